"""A drafter whose acceptance and cost are chosen: it knows the answers and errs as often as it is told to.

Owns: what such a drafter proposes and how long it takes.  Does not know: what is measured with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import numpy as np

from foredraft.types import Clock, Draft, FloatArray, Sequence, Verdict

Acceptance = Callable[[int], float]
"""The probability that a draft token is right, by its index in the answer."""


class SyntheticDrafter:
    """Drafts the known answer, and another token in place of each with probability 1 - ``acceptance(index)``, independently.

    Args:
        answers: token ids of the answer to each prompt, by the prompt's token ids; other prompts get no drafts.
        acceptance: the same everywhere, or by index.
        rng: decides which tokens are wrong.
        vocab_size: of the target.
        seconds_per_token: that a draft token takes, beyond what drafting this way takes anyhow; the time is spent computing.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self,
        answers: Mapping[tuple[int, ...], Seq[int]],
        acceptance: float | Acceptance,
        rng: np.random.Generator,
        vocab_size: int,
        *,
        seconds_per_token: float = 0.0,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._answers = dict(answers)
        self._acceptance: Acceptance = acceptance if callable(acceptance) else lambda _: acceptance
        self._rng, self._vocab_size = rng, vocab_size
        self._seconds_per_token, self._clock = seconds_per_token, clock
        self._open: dict[int, Seq[int]] = {}

    def open(self, seq: Sequence) -> None:
        """Look the answer up."""
        self._open[seq.seq_id] = self._answers.get(tuple(seq.tokens[: seq.num_prompt]), ())

    def propose(self, seqs: list[Sequence], num_tokens: list[int]) -> list[Draft]:
        """As far as the answer is known."""
        end = self._clock() + self._seconds_per_token * max(num_tokens)
        drafts = [Draft(self._tokens(seq, num)) for seq, num in zip(seqs, num_tokens, strict=True)]
        while self._clock() < end:
            pass
        return drafts

    def _tokens(self, seq: Sequence, num_tokens: int) -> tuple[int, ...]:
        start = seq.num_output
        right = self._open[seq.seq_id][start : start + num_tokens]
        draws = self._rng.random(len(right))
        return tuple(
            token if draw < self._acceptance(start + i) else (token + 1) % self._vocab_size
            for i, (token, draw) in enumerate(zip(right, draws, strict=True))
        )

    def observe(self, seq: Sequence, verdict: Verdict, hidden: FloatArray | None) -> None:
        """Nothing to learn."""

    def close(self, seq: Sequence) -> None:
        """Forget a sequence."""
        self._open.pop(seq.seq_id, None)
