"""Training an EAGLE-3 head on recorded texts.

Owns: the draft vocabulary, which texts are held out, batches, the optimiser and a step.  Does not know: files, or the command.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.architecture import Architecture
from foredraft.train.eagle3 import (
    Eagle3Network,
    TextBatch,
    TextRows,
    acceptance,
    accepted_counts,
    ttt_loss,
)
from foredraft.train.features import Text

NUM_DRAFTED = 3
HELD_OUT_EVERY, MAX_HELD_OUT = 20, 64
EVAL_TEXTS = 16


@dataclass(frozen=True)
class Eagle3Options:
    """``num_steps`` of training-time test; their losses weigh ``step_decay`` ** step; the first ``first_share`` of the budget has one.

    ``learning_rate`` is of the matrices; ``optimizer`` ``adamw`` or ``muon``.
    """

    num_steps: int = 3
    loss: str = "ce"
    step_decay: float = 1.0
    draft_vocab: int = 5632
    learning_rate: float = 1e-3
    texts_per_step: int = 4
    first_share: float = 0.1
    hard: float = 0.0
    optimizer: str = "adamw"
    seed: int = 0
    train_lm_head: bool = True
    ema: float = 0.0


def choose_vocab(texts: Sequence[Text], size: int) -> Tensor:
    """The ``size`` most frequent tokens of the answers, ascending; of equally frequent ones the smaller."""
    counts = Counter(token for text in texts for token in text.tokens[text.num_prompt :])
    ranked = sorted(counts, key=lambda token: (-counts[token], token))[:size]
    spare = (token for token in range(10**9) if token not in counts)
    while len(ranked) < size:
        ranked.append(next(spare))
    return torch.tensor(sorted(ranked))


def split(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """(to learn from, held out): of those with more than one token of an answer."""
    useful = [text for text in texts if len(text.tokens) - text.num_prompt > 1]
    every = HELD_OUT_EVERY if len(useful) >= 2 * HELD_OUT_EVERY else 2
    held = set(range(every - 1, len(useful), every)[:MAX_HELD_OUT])
    return [text for i, text in enumerate(useful) if i not in held], [useful[i] for i in sorted(held)]


class Eagle3Job:
    """A ``loop.Job``: one head, its optimiser, and the texts.

    ``weights`` are the target's as float32, those that ``Eagle3Network.start_from`` reads.
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
    ) -> None:
        self.options, self.device = options, device
        self.num_texts, self._train, self._held_out = len(train), train, held_out
        self._d = d = architecture.hidden_size
        self._num_features = train[0].states.shape[1] - d
        torch.manual_seed(options.seed)
        scale = _scale(train, self._num_features)
        self.network = Eagle3Network(architecture, self._num_features // d, draft_vocab, weights["embed"].bfloat16(), scale)
        self.network.start_from(weights, architecture.num_layers - 1)
        if not options.train_lm_head:
            self.network.lm_head.requires_grad_(False)
        self.network.to(device)
        self._local = torch.full((architecture.vocab_size,), -1, dtype=torch.int64)
        self._local[draft_vocab] = torch.arange(len(draft_vocab))
        head = weights.get("lm_head", weights["embed"])[draft_vocab] * weights["norm"]
        self._target_head = head.bfloat16().to(device)
        self._eps = architecture.rms_norm_eps
        self._optimizers = _optimizers(self.network, options)
        self._rates = [[group["lr"] for group in one.param_groups] for one in self._optimizers]

    def batch(self, texts: Sequence[Text]) -> TextBatch:
        """Texts side by side."""
        features, last, tokens, labels, positions, rows, where = [], [], [], [], [], [], []
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
            target = torch.nn.functional.rms_norm(states, (self._d,), None, self._eps).bfloat16() @ self._target_head.T

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
        num_steps = 1 if progress < options.first_share else options.num_steps
        with self._autocast():
            total, results = ttt_loss(self.network, batch, num_steps, options.loss, options.step_decay, options.hard)
        total.backward()
        torch.nn.utils.clip_grad_norm_([p for p in self.network.parameters() if p.grad is not None], 1.0)
        for optimizer, rates in zip(self._optimizers, self._rates, strict=True):
            for group, full in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = full * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        figures = {"tokens": float(len(batch.rows)), "loss": float(total.detach())}
        for i in range(options.num_steps):
            figures[f"right_{i + 1}"] = results[i].right if i < num_steps else 0.0
        return figures | {"seconds": time.monotonic() - started}

    def evaluate(self) -> dict[str, float]:
        """Acceptance length of greedy drafts for the held-out texts."""
        emitted = passes = right = rows = 0
        for i in range(0, len(self._held_out), EVAL_TEXTS):
            batch = self.batch(self._held_out[i : i + EVAL_TEXTS])
            with self._autocast():
                counts = accepted_counts(self.network, batch, NUM_DRAFTED)
            tokens, steps = acceptance(counts, batch.texts)
            emitted, passes = emitted + tokens, passes + steps
            right, rows = right + int((counts > 0).sum()), rows + len(counts)
        return {"acceptance_length": emitted / max(1, passes), "first_accepted": right / max(1, rows)}

    def state(self) -> dict[str, Any]:
        """Parameters and the optimiser's moments."""
        return {"network": self.network.state_dict(), "optimizers": [one.state_dict() for one in self._optimizers]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.network.load_state_dict(state["network"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def _scale(texts: Sequence[Text], width: int) -> Tensor:
    """Root mean square of each channel of the states, those of texts' first tokens left out: these are far from all others."""
    chosen = texts[:: max(1, len(texts) // 100)]
    rows = np.concatenate([text.states[4:, :width].astype(np.float32) for text in chosen])
    return torch.from_numpy(np.sqrt(np.mean(rows**2, axis=0)) + 1e-3)


def _optimizers(network: Eagle3Network, options: Eagle3Options) -> list[torch.optim.Optimizer]:
    rate = options.learning_rate
    vectors = [p for p in network.parameters() if p.ndim == 1]
    matrices = [p for name, p in network.named_parameters() if p.ndim == 2 and name != "lm_head"]
    head = [network.lm_head] if options.train_lm_head else []
    if options.optimizer == "muon":
        muon = torch.optim.Muon(matrices, lr=rate * 10, weight_decay=0.0, momentum=0.95, adjust_lr_fn="original")
        adam = torch.optim.AdamW(
            [{"params": head, "lr": rate}, {"params": vectors, "lr": rate}], betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        return [muon, adam]
    return [
        torch.optim.AdamW(
            [{"params": [*matrices, *head], "lr": rate}, {"params": vectors, "lr": rate}],
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=True,
        )
    ]
