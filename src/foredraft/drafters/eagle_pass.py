"""What a draft head computes in one pass, and the interface that its implementations share.

Owns: HeadPass, HeadOutput, HeadRunner.  Does not know: sequences, or how a pass is computed.

A row stands for a token at position i and the *feature* of the token before it; it predicts the token at i + 1.  Its keys and
values lie in slot i.  Position 0 has no feature before it, so the first row of a text is that of position 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from foredraft.types import FloatArray

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True)
class HeadPass:
    """T rows; those of one sequence are consecutive, in the order of their positions.

    ``tokens``, ``positions``: int32 [T].  ``tables``: int32, the block tables of all sequences one after the other, and
    ``table_of``: int32 [T], where that of the row's sequence begins.  ``first_keys``: int32 [T], the first position that the row
    may attend to.
    ``states``: float32 [R, S * t], and ``row_of``: int32 [R], ascending, the rows whose features are made of them.  ``features``:
    float32 [T, d]: those of the other rows; the pass writes the made ones to their places.
    ``logit_rows``: int32 [n], ascending, at most one of each sequence.
    """

    tokens: Int32s
    positions: Int32s
    tables: Int32s
    table_of: Int32s
    first_keys: Int32s
    states: Float32s
    row_of: Int32s
    features: Float32s
    logit_rows: Int32s

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """All of them, flat, in the order above."""
        return (
            self.tokens,
            self.positions,
            self.tables,
            self.table_of,
            self.first_keys,
            self.states.reshape(-1),
            self.row_of,
            self.features.reshape(-1),
            self.logit_rows,
        )


@dataclass(frozen=True)
class HeadOutput:
    """``logits``: float32 [n, D] over the draft vocabulary.

    ``outputs``: float32 [n, d]: what takes the place of the feature of the next token.
    """

    logits: FloatArray
    outputs: FloatArray


class HeadRunner(Protocol):
    """A head with its weights, and a cache of its own for blocks of the target's size."""

    hidden_size: int
    num_blocks: int
    block_size: int

    def run(self, rows: HeadPass) -> HeadOutput:
        """Compute all rows in one pass, and write their keys and values."""
        ...

    def draft(self, rows: HeadPass, num_wanted: Int32s) -> tuple[Int32s, Float32s]:
        """Continue row i of logits by its likeliest token, ``num_wanted[i]`` >= 1 times.

        Returns tokens as the target's ids and their probabilities by the head, int32 and float32 [n, most wanted].  A negative
        token ends a row early: its logits were not finite.
        """
        ...


def chain(runner: HeadRunner, rows: HeadPass, num_wanted: Int32s, target_ids: npt.NDArray[np.int64]) -> tuple[Int32s, Float32s]:
    """``HeadRunner.draft`` by ``run``, pass by pass: the definition."""
    num, most = len(rows.logit_rows), int(num_wanted.max(initial=1))
    tokens, probabilities = np.full((num, most), -1, np.int32), np.zeros((num, most), np.float32)
    last, jobs = rows.logit_rows, np.arange(num)
    for depth in range(most):
        output = runner.run(rows)
        best = output.logits.argmax(axis=1)
        with np.errstate(invalid="ignore", over="ignore"):
            weights = np.exp(output.logits - output.logits.max(axis=1, keepdims=True)).sum(axis=1)
        finite = np.isfinite(weights)
        tokens[jobs[finite], depth] = target_ids[best[finite]]
        probabilities[jobs[finite], depth] = 1.0 / weights[finite]
        going = np.flatnonzero(finite & (num_wanted[jobs] > depth + 1))
        if not len(going):
            break
        jobs = jobs[going]
        rows = next_rows(rows, last[jobs] if not depth else going, tokens[jobs, depth], output.outputs[going])
    return tokens, probabilities


def next_rows(rows: HeadPass, chosen: npt.NDArray[Any], tokens: Int32s, outputs: FloatArray) -> HeadPass:
    """The pass that continues the ``chosen`` rows of ``rows`` by one token each, with ``outputs`` in place of features."""
    num = len(chosen)
    return HeadPass(
        tokens=tokens.astype(np.int32),
        positions=rows.positions[chosen] + np.int32(1),
        tables=rows.tables,
        table_of=np.ascontiguousarray(rows.table_of[chosen]),
        first_keys=np.ascontiguousarray(rows.first_keys[chosen]),
        states=rows.states[:0],
        row_of=rows.row_of[:0],
        features=np.array(outputs, np.float32),
        logit_rows=np.arange(num, dtype=np.int32),
    )


def warm_up(runner: HeadRunner) -> None:
    """Draft two tokens in the last block, so that no request waits until the head's memory was touched for the first time."""
    one, none = np.ones(1, np.int32), np.zeros(0, np.int32)
    table, feature = np.array([runner.num_blocks - 1], np.int32), np.zeros((1, runner.hidden_size), np.float32)
    start = np.zeros(1, np.int32)
    rows = HeadPass(start, one, table, start, one, np.zeros((0, 1), np.float32), none, feature, start)
    runner.draft(rows, np.array([2], np.int32))
