"""Training an EAGLE-3 head on recorded texts.

Owns: the draft vocabulary, which texts are held out, batches, the optimiser and a step.  Does not know: files, or the command.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.architecture import Architecture, Weight, Weights
from foredraft.drafters.eagle_file import HeadFile
from foredraft.drafters.ngram_table import TargetIdentity
from foredraft.train.collect import MOST_SEED
from foredraft.train.curve import write_curve
from foredraft.train.eagle3 import (
    LOSSES,
    Eagle3Network,
    TextBatch,
    TextRows,
    acceptance,
    accepted_counts,
    ttt_loss,
)
from foredraft.train.features import Array, Text
from foredraft.train.head_file import NUM_DRAFTED, WEIGHTS, write_head
from foredraft.train.loop import Budget, autocast, product_dtype, run
from foredraft.types import ConfigError, UnsupportedModelError, refuse_unknown

HELD_OUT_EVERY, MAX_HELD_OUT = 20, 64
EVAL_TEXTS = 16
MIN_TEXTS = 4
MAX_STEPS, MAX_GRADIENT = 8, 1.0
CHECKPOINT = "training.checkpoint"
SHOWN = (
    ("Acceptance length", f"Tokens per pass on texts held out, greedy, {NUM_DRAFTED} draft tokens.", ("acceptance_length",)),
    ("Loss", "Mean over the steps since the point before.", ("loss",)),
    (
        "Right guesses",
        "Share of tokens guessed right while training, by step; the first on texts held out.",
        ("first_accepted", *(f"right_{i + 1}" for i in range(MAX_STEPS))),
    ),
)


@dataclass(frozen=True)
class Eagle3Options:
    """How a head is trained.

    ``num_steps`` of training-time test, each weighing ``step_decay`` times what the one before does; during the first
    ``first_share`` of the budget there is one only, since a head that knows nothing of the next token learns nothing of later ones.
    ``draft_vocab`` tokens can be drafted.  ``hard`` is the share of a target's probabilities that is moved to the likeliest token.

    Raises:
        ConfigError: a value out of its range, or an unknown loss.
    """

    num_steps: int = 3
    loss: str = "ce"
    step_decay: float = 0.5
    draft_vocab: int = 8192
    learning_rate: float = 2e-3
    texts_per_step: int = 3
    first_share: float = 0.1
    hard: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        refuse_unknown("loss", self.loss, LOSSES)
        ranges: tuple[tuple[str, float, float, float], ...] = (
            ("steps", self.num_steps, 1, MAX_STEPS),
            ("step_decay", self.step_decay, 0.0, 1.0),
            ("draft_vocab", self.draft_vocab, 2, math.inf),
            ("lr", self.learning_rate, 1e-8, 1.0),
            ("texts_per_step", self.texts_per_step, 1, math.inf),
            ("first_share", self.first_share, 0.0, 1.0),
            ("hard", self.hard, 0.0, 1.0),
            ("seed", self.seed, 0, MOST_SEED - 1),
        )
        for name, value, low, high in ranges:
            if not low <= value <= high:
                raise ConfigError(f"{name} must be from {low} to {high}, not {value}; change it.")


def refuse_target(architecture: Architecture) -> None:
    """Refuse a target whose head would not be a plain Llama layer.

    Raises:
        UnsupportedModelError: it has a Gemma layer.
    """
    if architecture.sandwich_norms or architecture.activation != "silu" or architecture.embedding_scale != 1.0:
        raise UnsupportedModelError(
            f"a head cannot be trained for the {architecture.family} family yet, only for Llama, Mistral, Qwen2 and Qwen3 models; "
            "`foredraft train suffix` works for all."
        )


def tapped_layers(num_layers: int) -> tuple[int, ...]:
    """The layers whose entering states a head reads (EAGLE-3, 2503.01840), in order.

    Raises:
        UnsupportedModelError: too few layers for three of them.
    """
    taps = (2, num_layers // 2, num_layers - 3)
    if sorted(set(taps)) != list(taps):
        raise UnsupportedModelError(f"a model of {num_layers} layers is too shallow for a head; use one of at least 7.")
    return taps


def choose_vocab(texts: Sequence[Text], size: int) -> Tensor:
    """The ``size`` most frequent tokens of the texts, or all there are, ascending; of equally frequent ones the smaller.

    Questions count too: with as few texts as these, a word of theirs is likelier to come again than one that was never seen.
    """
    counts = Counter(token for text in texts for token in text.tokens)
    return torch.tensor(sorted(sorted(counts, key=lambda token: (-counts[token], token))[:size]))


def split(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """(to learn from, held out): of the texts with more than one token of an answer.

    A question is the target's own text too, and learned from; what begins all texts, the header of a chat template, is not.
    """
    useful = [text for text in texts if len(text.tokens) - text.num_prompt > 1]
    every = HELD_OUT_EVERY if len(useful) >= 2 * HELD_OUT_EVERY else 2
    held = set(range(every - 1, len(useful), every)[:MAX_HELD_OUT])
    header = max(1, _num_common([text.tokens for text in useful]))
    train = [text._replace(num_prompt=min(header, text.num_prompt)) for i, text in enumerate(useful) if i not in held]
    return train, [useful[i] for i in sorted(held)]


def _num_common(texts: Sequence[list[int]]) -> int:
    """How many tokens all begin with."""
    # Of sorted texts the first and the last differ soonest.
    pairs = zip(min(texts), max(texts), strict=False) if texts else ()
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(map(len, texts), default=0))


class Eagle3Job:
    """A ``loop.Job``: one head, its optimiser, and the texts.

    ``weights`` are the target's as float32, those that ``Eagle3Network.start_from`` reads; ``start`` those of a head to go on from.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: Mapping[str, Tensor],
        train: Sequence[Text],
        held_out: Sequence[Text],
        draft_vocab: Tensor,
        options: Eagle3Options,
        *,
        device: torch.device,
        start: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.options, self.device = options, device
        self._first_share = options.first_share if start is None else 0.0
        self.num_texts, self._train, self._held_out = len(train), train, held_out
        self._d = d = architecture.hidden_size
        self._num_features = train[0].states.shape[1] - d
        scale = _scale(train, self._num_features)
        self.network = Eagle3Network(architecture, self._num_features // d, draft_vocab, weights["embed"].bfloat16(), scale)
        if start is None:
            self.network.start_from(weights, architecture.num_layers - 1, torch.Generator().manual_seed(options.seed))
        else:
            self.network.continue_from(start)
        self.network.to(device)
        self._local = torch.full((architecture.vocab_size,), -1, dtype=torch.int64)
        self._local[draft_vocab] = torch.arange(len(draft_vocab))
        head = weights.get("lm_head", weights["embed"])[draft_vocab] * weights["norm"]
        self._target_head = head.to(device, product_dtype(device))
        self._eps = architecture.rms_norm_eps
        self._optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def batch(self, texts: Sequence[Text]) -> TextBatch:
        """Texts side by side."""
        features, last, where = list[Array](), list[Array](), list[TextRows]()
        tokens, labels, positions, rows = list[int](), list[int](), list[int](), list[int]()
        pairs = predicting = 0
        for text in texts:
            n, m = len(text.tokens) - 2, len(text.tokens) - 1 - text.num_prompt
            features.append(text.states[:n, : self._num_features])
            last.append(text.states[text.num_prompt : -1, self._num_features :])
            tokens += text.tokens[1:-1]
            labels += text.tokens[text.num_prompt + 1 :]
            positions += range(n)
            rows += range(pairs + n - m, pairs + n)
            where.append(TextRows(pairs, pairs + n, predicting, predicting + m))
            pairs, predicting = pairs + n, predicting + m
        states = torch.from_numpy(np.concatenate(last)).to(self.device).float()
        with torch.no_grad():
            target = (
                torch.nn.functional.rms_norm(states, (self._d,), None, self._eps).to(self._target_head.dtype) @ self._target_head.T
            )

        def ids(values: list[int]) -> Tensor:
            return torch.tensor(values, device=self.device)

        return TextBatch(
            tokens=ids(tokens),
            features=torch.from_numpy(np.concatenate(features)).to(self.device).float(),
            positions=ids(positions),
            rows=ids(rows),
            label=self._local[torch.tensor(labels)].to(self.device),
            target=target,
            texts=where,
        )

    def step(self, texts: list[int], progress: float, rate: float) -> dict[str, float]:
        """One step of the optimiser."""
        started, options = time.monotonic(), self.options
        batch = self.batch([self._train[i] for i in texts])
        num_steps = 1 if progress < self._first_share else options.num_steps
        with autocast(self.device):
            total, results = ttt_loss(self.network, batch, num_steps, options.loss, options.step_decay, options.hard)
        torch.autograd.backward(total)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), MAX_GRADIENT)
        self._optimizer.param_groups[0]["lr"] = options.learning_rate * rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        figures = {"tokens": float(len(batch.rows)), "loss": float(total.detach())}
        for i in range(options.num_steps):
            figures[f"right_{i + 1}"] = results[i].right if i < num_steps else 0.0
        return figures | {"seconds": time.monotonic() - started}

    def evaluate(self) -> dict[str, float]:
        """Acceptance length of greedy drafts for the held-out texts."""
        emitted = passes = right = rows = 0
        for i in range(0, len(self._held_out), EVAL_TEXTS):
            batch = self.batch(self._held_out[i : i + EVAL_TEXTS])
            with autocast(self.device):
                counts = accepted_counts(self.network, batch, NUM_DRAFTED)
            tokens, steps = acceptance(counts, batch.texts)
            emitted, passes = emitted + tokens, passes + steps
            right, rows = right + int((counts > 0).sum()), rows + len(counts)
        return {"acceptance_length": emitted / max(1, passes), "first_accepted": right / max(1, rows)}

    def state(self) -> dict[str, Any]:
        """Parameters and the optimiser's moments."""
        return {"network": self.network.state_dict(), "optimizer": self._optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.network.load_state_dict(state["network"])
        self._optimizer.load_state_dict(state["optimizer"])


def _scale(texts: Sequence[Text], width: int) -> Tensor:
    """Root mean square of each channel of the states, those of texts' first tokens left out: these are far from all others."""
    chosen = texts[:: max(1, len(texts) // 100)]
    rows = np.concatenate([text.states[4:, :width].astype(np.float32) for text in chosen])
    return torch.from_numpy(np.sqrt(np.mean(rows**2, axis=0)) + 1e-3)


@dataclass(frozen=True)
class Fit:
    """One training, from the target's weights to a head's folder.

    ``texts`` have states of ``taps`` and of the last layer's output; ``weights`` are the target's, by canonical name.  ``start``
    is a head of the same shape to go on from, whose draft vocabulary stays.  ``out`` is the head's folder and holds the checkpoint
    while the training lasts.
    """

    architecture: Architecture
    weights: Weights
    texts: Sequence[Text]
    taps: tuple[int, ...]
    identity: TargetIdentity
    options: Eagle3Options
    budget: Budget
    out: Path
    device: str
    threads: int | None
    provenance: Mapping[str, Any]
    start: HeadFile | None = None

    def run(self, report: Callable[[str], None]) -> tuple[Path, ...]:
        """Train, and write head, provenance and curve; gives the files.

        Raises:
            ConfigError: too few texts.
            CapacityError: a file cannot be written.
        """
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        train, held_out = split(self.texts)
        if not train or not held_out:
            raise ConfigError(f"a head takes at least {MIN_TEXTS} texts, not {len(self.texts)}; ask for more tokens.")
        start = self.start
        vocab = choose_vocab(train, self.options.draft_vocab) if start is None else torch.from_numpy(start.target_ids)
        report(
            f"{len(train):,} texts to learn from, {len(held_out)} held out; {len(vocab):,} tokens can be drafted, "
            f"{coverage(held_out, vocab):.1%} of what is held out"
        )
        before = None if start is None else {name: _read(weight) for name, weight in start.weights.items()}
        device = torch.device(self.device)
        job = Eagle3Job(self.architecture, self._read_weights(), train, held_out, vocab, self.options, device=device, start=before)
        settings = {
            # Of texts with fewer words, or a head to go on from, there are not as many as were asked for.
            "options": asdict(replace(self.options, draft_vocab=len(vocab))),
            "budget": asdict(self.budget),
            "identity": asdict(self.identity),
            "taps": list(self.taps),
            "texts": digest_of(self.texts),
            "start": None if start is None else hashlib.sha256((start.path / WEIGHTS).read_bytes()).hexdigest(),
        }
        checkpoint = self.out / CHECKPOINT
        with deterministic(self.device):
            position = run(
                job,
                self.budget,
                texts_per_step=self.options.texts_per_step,
                seed=self.options.seed,
                checkpoint=checkpoint,
                settings=settings,
                report=report,
            )
        provenance = {
            **self.provenance,
            **settings,
            "num_texts": len(train),
            **position.outcome(),
        }
        write_head(self.out, job.network, self.architecture, self.taps, self.identity, provenance)
        files = write_curve(self.out, f"EAGLE-3 head for {self.identity.model}", position.curve, SHOWN)
        checkpoint.unlink(missing_ok=True)
        return (self.out / WEIGHTS, *files)

    def _read_weights(self) -> dict[str, Tensor]:
        last = self.architecture.num_layers - 1
        parts = ("qkv", "o", "gate_up", "down", "attn_norm", "mlp_norm")
        names = ["embed", "norm", "layers.0.qkv", "layers.0.attn_norm", *(f"layers.{last}.{part}" for part in parts)]
        names += [] if self.architecture.tie_embeddings else ["lm_head"]
        return {name: _read(self.weights[name]) for name in names}


def _read(weight: Weight) -> Tensor:
    return torch.from_numpy(weight.read(0, weight.shape[0]))


def coverage(texts: Sequence[Text], vocab: Tensor) -> float:
    """The share of the answers' tokens that can be drafted."""
    known = set(vocab.tolist())
    tokens = [token for text in texts for token in text.tokens[text.num_prompt :]]
    return sum(token in known for token in tokens) / max(1, len(tokens))


def digest_of(texts: Sequence[Text]) -> str:
    """A digest of the tokens of texts, and of where their answers begin."""
    parts = json.dumps([[text.num_prompt, text.tokens] for text in texts])
    return hashlib.sha256(parts.encode()).hexdigest()


@contextlib.contextmanager
def deterministic(device: str) -> Iterator[None]:
    """Within, torch uses deterministic kernels where it has them; on a CPU it does anyway."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(device != "cpu", warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
