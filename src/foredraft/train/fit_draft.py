"""Training a small draft model on a target's texts.

Owns: which tokens the loss is over, batches, the optimiser, a step, and a training from texts to a folder.  Does not know: where
texts come from, or the command.

The loss is over the tokens that answers consist of, not over the vocabulary: for SmolLM2 that is a ninth of the work, and what is
left out keeps the target's own embedding.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from foredraft.architecture import Architecture, Weights
from foredraft.drafters.ngram_table import TargetIdentity
from foredraft.loader import Checkpoint
from foredraft.train.collect import MOST_SEED
from foredraft.train.curve import write_curve
from foredraft.train.draft_file import save_draft
from foredraft.train.eagle3 import HeadLoss, TextRows, acceptance, target_probs
from foredraft.train.features import Text
from foredraft.train.fit_eagle3 import deterministic, digest_of, split
from foredraft.train.loop import Budget, autocast, product_dtype, run
from foredraft.train.student import Student, start_weights, student_architecture
from foredraft.types import ConfigError, FloatArray, refuse_unknown

# ``tokens`` learns from the recorded tokens, the others from the target's distribution at each.
LOSSES = ("ce", "tv", "lk", "tokens")
NUM_DRAFTED = 3
# An answer's tokens are mostly among few; the default vocabulary holds this share of them.
COVERED, VOCAB_STEP = 0.95, 1024
MAX_CANDIDATES = 5632
# Vectors, of which each value scales a whole channel, learn at this many times the rate of matrices.
VECTOR_RATE = 10.0
MAX_NORM = 1.0
EVALUATED_TEXTS = 8
MIN_TEXTS = 4
CHECKPOINT = "training.checkpoint"
SHOWN = (
    ("Acceptance length", f"Tokens per pass on texts held out, greedy, {NUM_DRAFTED} draft tokens.", ("acceptance_length",)),
    ("Loss", "Mean over the steps since the point before.", ("loss",)),
    ("Right guesses", "Share of tokens guessed right: on texts held out, and while training.", ("first_accepted", "right")),
)


@dataclass(frozen=True)
class DraftOptions:
    """What a draft model depends on besides the target and its texts.

    ``hidden`` None is the target's own size; ``vocab`` None takes as many of the vocabulary's first ids as hold 95 % of the tokens
    of the answers.

    Raises:
        ConfigError: a value out of its range, or an unknown loss.
    """

    layers: int = 2
    hidden: int | None = None
    vocab: int | None = None
    loss: str = "ce"
    learning_rate: float = 4e-3
    texts_per_step: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        refuse_unknown("loss", self.loss, LOSSES)
        ranges: tuple[tuple[str, float, float, float], ...] = (
            ("lr", self.learning_rate, 1e-8, 1.0),
            ("texts_per_step", self.texts_per_step, 1, math.inf),
            ("seed", self.seed, 0, MOST_SEED - 1),
        )
        for name, value, least, most in ranges:
            if not least <= value <= most:
                raise ConfigError(f"{name} must be from {least:g} to {most:g}, not {value}; change it.")

    def architecture(self, target: Architecture, texts: Sequence[Text] = ()) -> Architecture:
        """The draft model's; without ``texts``, only whether it can be had is certain.

        Raises:
            ConfigError, UnsupportedModelError: as ``student_architecture``.
        """
        vocab = self.vocab if self.vocab is not None else covering_vocab(texts, target.vocab_size) if texts else target.vocab_size
        return student_architecture(target, self.layers, target.hidden_size if self.hidden is None else self.hidden, vocab)


def covering_vocab(texts: Sequence[Text], vocab_size: int) -> int:
    """The smallest multiple of ``VOCAB_STEP`` ids that holds ``COVERED`` of the answers' tokens, or the whole vocabulary."""
    counts = np.bincount([token for text in texts for token in text.tokens[text.num_prompt :]], minlength=vocab_size)
    covered = np.cumsum(counts) / max(1, counts.sum())
    num_ids = int(np.searchsorted(covered, COVERED)) + 1
    return min(vocab_size, -(-num_ids // VOCAB_STEP) * VOCAB_STEP)


def choose_candidates(texts: Sequence[Text], vocab_size: int) -> Tensor:
    """The most frequent ids below ``vocab_size`` in the answers, ascending; of equally frequent ones the smaller."""
    counts = Counter(token for text in texts for token in text.tokens[text.num_prompt :] if token < vocab_size)
    return torch.tensor(sorted(sorted(counts, key=lambda token: (-counts[token], token))[:MAX_CANDIDATES]))


class DraftJob:
    """A ``loop.Job``: one student, its optimiser, and the texts.

    Raises:
        ConfigError, UnsupportedModelError: as ``student_architecture``.
    """

    def __init__(
        self,
        target: Architecture,
        weights: Weights,
        train: Sequence[Text],
        held_out: Sequence[Text],
        options: DraftOptions,
        *,
        device: torch.device,
    ) -> None:
        self.num_texts, self._train, self._held_out = len(train), train, held_out
        self._options, self._device, self._d = options, device, target.hidden_size
        self.architecture = options.architecture(target, train)
        smaller = self.architecture.hidden_size != target.hidden_size
        start = start_weights(self.architecture, target, weights)
        self.student = Student(self.architecture, start, device=device, train_vocabulary=smaller)
        self._candidates = choose_candidates(train, self.architecture.vocab_size).to(device)
        self._local = torch.full((target.vocab_size,), -1, dtype=torch.int64)
        self._local[self._candidates.cpu()] = torch.arange(len(self._candidates))
        self._teacher = _Teacher(target, weights, self._candidates, device)
        vectors = [p for p in self.student.parameters.values() if p.ndim == 1]
        matrices = [p for p in self.student.parameters.values() if p.ndim == 2]
        groups = [{"params": matrices, "scale": 1.0}, {"params": vectors, "scale": VECTOR_RATE}]
        self._optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(self, texts: list[int], progress: float, rate: float) -> dict[str, float]:
        """One step of the optimiser."""
        started = time.monotonic()
        loss, num_rows, num_right = self._loss([self._train[i] for i in texts])
        if num_rows:
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.student.parameters.values(), MAX_NORM)
            for group in self._optimizer.param_groups:
                group["lr"] = self._options.learning_rate * group["scale"] * rate
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        seconds = time.monotonic() - started
        return {"tokens": float(num_rows), "loss": float(loss.detach()), "right": num_right / max(1, num_rows), "seconds": seconds}

    def _loss(self, texts: Sequence[Text]) -> tuple[Tensor, int, int]:
        """(mean loss, rows that it is over, how many of them guessed the recorded token)."""
        labels = self._local[torch.tensor([token for text in texts for token in text.tokens[text.num_prompt :]])]
        kept = torch.nonzero(labels >= 0)[:, 0]
        with autocast(self._device):
            states = self._predicting(texts)[kept.to(self._device)]
        head, label = self.student.head[self._candidates], labels[kept].to(self._device)
        if self._options.loss == "tokens":
            probs, kind = functional.one_hot(label, len(head)).to(product_dtype(self._device)), "ce"
        else:
            probs, kind = self._teacher.probs(texts, kept), self._options.loss
        at, scale = torch.arange(len(label)), torch.full((len(label),), 1 / max(1, len(label)))
        apply: Any = HeadLoss.apply
        loss, _, right = apply(states, head, probs, at.to(self._device), label, scale.to(self._device), kind)
        return loss, len(label), int(right.sum())

    def _predicting(self, texts: Sequence[Text]) -> Tensor:
        """What the head reads at each token that an answer's token follows, [R, d]."""
        states = self.student.hidden([text.tokens[:-1] for text in texts])
        parts = torch.split(states, [len(text.tokens) - 1 for text in texts])
        return torch.cat([part[text.num_prompt - 1 :] for part, text in zip(parts, texts, strict=True)])

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Acceptance length of greedy drafts for the held-out texts, all ids of the student's vocabulary being offered."""
        emitted = passes = right = rows = 0
        head = self.student.head.to(product_dtype(self._device))
        for i in range(0, len(self._held_out), EVALUATED_TEXTS):
            texts = self._held_out[i : i + EVALUATED_TEXTS]
            with autocast(self._device):
                drafted = (self._predicting(texts).to(head.dtype) @ head.T).argmax(-1).cpu()
            hits = drafted == torch.tensor([token for text in texts for token in text.tokens[text.num_prompt :]])
            counts, where = run_lengths(hits, [len(text.tokens) - text.num_prompt for text in texts], NUM_DRAFTED)
            num_emitted, num_passes = acceptance(counts, where)
            emitted, passes = emitted + num_emitted, passes + num_passes
            right, rows = right + int(hits.sum()), rows + len(hits)
        return {"acceptance_length": emitted / max(1, passes), "first_accepted": right / max(1, rows)}

    def tensors(self) -> dict[str, FloatArray]:
        """The canonical weights, float32."""
        return {name: values.detach().float().numpy(force=True) for name, values in self.student.tensors.items()}

    def state(self) -> dict[str, Any]:
        """Parameters and the optimiser's moments."""
        parameters = {name: values.detach() for name, values in self.student.parameters.items()}
        return {"parameters": parameters, "optimizer": self._optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        with torch.no_grad():
            for name, values in self.student.parameters.items():
                values.copy_(state["parameters"][name])
        self._optimizer.load_state_dict(state["optimizer"])


class _Teacher:
    """The target's distribution over the candidates, from its last states."""

    def __init__(self, target: Architecture, weights: Weights, candidates: Tensor, device: torch.device) -> None:
        name = "embed" if target.tie_embeddings else "lm_head"
        chosen = candidates.cpu().numpy()
        head = np.asarray(weights[name].read(0, int(chosen.max()) + 1))[chosen]
        norm = np.asarray(weights["norm"].read(0, target.hidden_size))
        self._head = torch.from_numpy(head * norm).to(device, product_dtype(device))
        self._d, self._eps, self._device = target.hidden_size, target.rms_norm_eps, device

    @torch.no_grad()
    def probs(self, texts: Sequence[Text], kept: Tensor) -> Tensor:
        """[len(kept), candidates] at these rows, of all that an answer's token follows."""
        states = np.concatenate([text.states[text.num_prompt - 1 : -1, -self._d :] for text in texts])
        rows = torch.from_numpy(states)[kept].to(self._device).float()
        normed = functional.rms_norm(rows, (self._d,), None, self._eps)
        return target_probs(normed.to(self._head.dtype) @ self._head.T, 0.0)


def run_lengths(hits: Tensor, lengths: Sequence[int], most: int) -> tuple[Tensor, list[TextRows]]:
    """How many hits follow each other from each row on, ``most`` at most and within its text; and where the texts lie."""
    counts, alive, ends = torch.zeros(len(hits), dtype=torch.int64), torch.ones(len(hits), dtype=torch.bool), np.cumsum(lengths)
    end_of = torch.from_numpy(np.repeat(ends, lengths))
    for step in range(most):
        at = torch.arange(len(hits)) + step
        alive &= (at < end_of) & hits[at.clamp(max=len(hits) - 1)]
        counts += alive
    where = [TextRows(int(end - length), int(end), int(end - length), int(end)) for end, length in zip(ends, lengths, strict=True)]
    return counts, where


@dataclass(frozen=True)
class Fit:
    """One training, from the target's texts to a draft model's folder.

    ``texts`` have the target's last states, but for the loss ``tokens``.  ``out`` holds the checkpoint while the training lasts.
    """

    target: Checkpoint
    texts: Sequence[Text]
    identity: TargetIdentity
    options: DraftOptions
    budget: Budget
    out: Path
    device: str
    threads: int | None
    provenance: Mapping[str, Any]

    def run(self, report: Callable[[str], None]) -> tuple[Path, ...]:
        """Train, and write model, provenance and curve; gives the files, the model first.

        Raises:
            ConfigError: too few texts.
            CapacityError: a file cannot be written.
        """
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        learned, held_out = split(self.texts)
        if not learned or not held_out:
            raise ConfigError(f"a draft model takes at least {MIN_TEXTS} texts, not {len(self.texts)}; ask for more tokens.")
        target, options, device = self.target, self.options, torch.device(self.device)
        job = DraftJob(target.architecture, target.weights, learned, held_out, options, device=device)
        small = job.architecture
        report(
            f"{len(learned):,} texts to learn from, {len(held_out)} held out; {small.num_layers} layers of {small.hidden_size}, "
            f"{small.vocab_size:,} token ids"
        )
        settings = {
            "options": asdict(options),
            "budget": asdict(self.budget),
            "target": asdict(self.identity),
            "texts": digest_of(self.texts),
        }
        with deterministic(self.device):
            position = run(
                job,
                self.budget,
                texts_per_step=options.texts_per_step,
                seed=options.seed,
                checkpoint=self.out / CHECKPOINT,
                settings=settings,
                report=report,
            )
        provenance = {
            **self.provenance,
            **settings,
            "num_texts": len(learned),
            **position.outcome(),
        }
        path = save_draft(self.out, target, small, job.tensors(), provenance)
        curve = write_curve(self.out, f"Draft model for {self.identity.model}", position.curve, SHOWN)
        (self.out / CHECKPOINT).unlink(missing_ok=True)
        return (path, *curve)
