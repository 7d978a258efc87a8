"""A drafter run over tokens that are already known: what it would have been right about, without running a model.

Owns: which passes an engine would have needed for a recorded answer.  Does not know: the target, or what a pass costs.

Under the coupled rule the tokens of an answer do not depend on the drafts, so what was recorded once is what every drafter would
have been judged by; a drafter is offered the recorded tokens as if they came from the target.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from foredraft.types import Clock, ConfigError, Draft, Drafter, FloatArray, SamplingParams, Sequence, SpeculationStats, Verdict


class Record(NamedTuple):
    """A recorded request: the ids of prompt and completion, of which the first ``num_prompt`` are the prompt."""

    tokens: list[int]
    num_prompt: int


@dataclass(frozen=True)
class ReplayedPass:
    """One target pass: draft tokens, how many of them were accepted, tokens emitted, and seconds that the drafter took."""

    num_drafted: int
    num_accepted: int
    num_emitted: int
    propose_seconds: float


@dataclass(frozen=True)
class Replay:
    """The passes of one or many recorded answers, with at most ``num_tokens`` draft tokens each."""

    num_tokens: int
    passes: tuple[ReplayedPass, ...]

    @property
    def num_passes(self) -> int:
        """Target passes that emitted something."""
        return len(self.passes)

    @property
    def stats(self) -> SpeculationStats:
        """The engine's counters for these passes; ``milliseconds`` stay 0."""
        counted = SpeculationStats()
        for one in self.passes:
            counted.count(one.num_drafted, one.num_accepted, one.num_emitted)
        return counted

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per target pass; 1 without passes."""
        return self.stats.acceptance_length if self.passes else 1.0

    @property
    def drafted_per_pass(self) -> float:
        """Draft rows that a pass verifies, in the mean; a drafter may propose fewer than it is asked for."""
        return sum(one.num_drafted for one in self.passes) / max(1, len(self.passes))

    @property
    def mean_propose_seconds(self) -> float:
        """Seconds of a ``propose`` for one sequence, in the mean over all passes that asked for a draft."""
        asked = [one.propose_seconds for one in self.passes if one.propose_seconds > 0.0]
        return sum(asked) / len(asked) if asked else 0.0

    def survival(self) -> list[float]:
        """Probability, per pass, that the first, second, ... draft token was proposed, and it and all before it accepted."""
        reached = self.stats.accepted_per_position
        return [(reached[i] if i < len(reached) else 0) / max(1, len(self.passes)) for i in range(self.num_tokens)]

    def acceptance_per_position(self) -> list[float]:
        """Probability of each draft token given that it was proposed and those before it were accepted; 0 where never tried."""
        hits, trials = [0] * self.num_tokens, [0] * self.num_tokens
        for one in self.passes:
            for i in range(min(one.num_drafted, one.num_accepted + 1)):
                trials[i] += 1
                hits[i] += i < one.num_accepted
        return [hit / trial if trial else 0.0 for hit, trial in zip(hits, trials, strict=True)]

    def truncated(self, num_tokens: int) -> Replay:
        """The same passes as if no draft had had more than ``num_tokens`` tokens.

        With shorter drafts other passes would have followed; where acceptance does not depend on where a pass begins, as with a
        draft model, the figures are the same.
        """
        cut = [(min(one.num_drafted, num_tokens), min(one.num_accepted, num_tokens), one) for one in self.passes]
        return Replay(
            num_tokens,
            tuple(
                ReplayedPass(drafted, accepted, min(one.num_emitted, accepted + 1), one.propose_seconds)
                for drafted, accepted, one in cut
            ),
        )


def replay(
    drafter: Drafter,
    tokens: list[int],
    num_prompt: int,
    num_tokens: int,
    *,
    max_tokens: int | None = None,
    params: SamplingParams | None = None,
    seed: int = 0,
    tenant: str = "",
    states: FloatArray | None = None,
    clock: Clock = time.perf_counter,
) -> Replay:
    """Pass by pass, the drafts that ``drafter`` makes while ``tokens[num_prompt:]`` are emitted, and their outcomes.

    The drafter is opened and closed as the engine does for a request that finishes, so one that learns from earlier requests does.

    Args:
        tokens: prompt and completion; at least one token of each.
        num_prompt: how many of them are the prompt.
        num_tokens: K, fixed; the last token that a request may emit is never drafted for.
        max_tokens: what the request allowed; None takes the completion's length.  More says that the answer ended by itself.
        params, seed: of the request; a draft model draws its drafts by them (None is greedy).
        tenant: whose statistics are shared.
        states: float32 [tokens - 1, ...], those that leave the drafter's ``hidden_layers``, where it reads any.

    Raises:
        ConfigError: the drafter needs the target's hidden states and there are none, or it drafts trees.
    """
    assert 1 <= num_prompt < len(tokens) and num_tokens >= 0, (num_prompt, len(tokens), num_tokens)
    if drafter.hidden_layers and states is None:
        raise ConfigError("a drafter that reads the target's hidden states cannot be replayed over tokens alone; measure it.")
    seq = Sequence(
        seq_id=0,
        tokens=list(tokens[:num_prompt]),
        num_prompt=num_prompt,
        params=params or SamplingParams(temperature=0.0),
        seed=seed,
        tenant=tenant,
    )
    most = len(tokens) - num_prompt if max_tokens is None else max_tokens
    assert most >= len(tokens) - num_prompt, (most, len(tokens), num_prompt)
    passes = []
    drafter.open(seq)
    try:
        while len(seq.tokens) < len(tokens):
            wanted = max(0, min(num_tokens, most - seq.num_output - 1))
            start = clock()
            draft = drafter.propose([seq], [wanted])[0] if wanted else Draft()
            seconds = clock() - start if wanted else 0.0
            passes.append(_judge(drafter, seq, draft, tokens, wanted, seconds, states))
        seq.finish_reason = "length" if most == seq.num_output else "stop"
    finally:
        drafter.close(seq)
    return Replay(num_tokens, tuple(passes))


def replay_all(drafter: Drafter, records: Iterable[Record], num_tokens: int, *, clock: Clock = time.perf_counter) -> Replay:
    """Replay one recorded request after the other with the same drafter, and put their passes together."""
    parts = [replay(drafter, record.tokens, record.num_prompt, num_tokens, clock=clock) for record in records]
    return Replay(num_tokens, tuple(one for part in parts for one in part.passes))


def _judge(
    drafter: Drafter, seq: Sequence, draft: Draft, tokens: list[int], wanted: int, seconds: float, states: FloatArray | None
) -> ReplayedPass:
    """Commit the tokens that a pass would have emitted, and tell the drafter."""
    if draft.parents is not None:
        raise ConfigError("a drafter proposed a tree, and only chains can be replayed; leave Draft.parents None.")
    drafted, known = draft.tokens[:wanted], len(seq.tokens)
    right = zip(drafted, tokens[known:], strict=False)
    num_accepted = next((i for i, (a, b) in enumerate(right) if a != b), min(len(drafted), len(tokens) - known))
    emitted = tuple(tokens[known : known + num_accepted + 1])
    seq.tokens.extend(emitted)
    start, seq.num_computed = seq.num_computed, known + num_accepted
    hidden = None if states is None else states[start : seq.num_computed]
    drafter.observe(seq, Verdict(emitted, num_accepted), hidden)
    return ReplayedPass(len(drafted), num_accepted, len(emitted), seconds)
