"""What drafting would bring at each batch size, and what it would take of the memory: the figures of a plan, as pure functions.

Owns: the best K, its speed-up with an interval, the batch where the gain fades, and the division of memory.  Does not know: where
acceptance or seconds come from, or how they are shown.

A step with K draft tokens takes K draft passes, the drafter's own time, a target pass of ``batch * (1 + draft rows)`` rows, and
what each emitted token takes outside of passes.  Its speed-up is its tokens times the seconds of a plain step over its own
seconds (Leviathan et al., 2211.17192, section 3.3, with rows that need not be free).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from foredraft.planner import tokens_per_pass
from foredraft.replay import Replay

# A gain that is smaller is not worth a setting, and lost again in an engine's own time per step.
WORTHWHILE = 1.02
LARGEST_BATCH = 1024
# 90 % of a normal distribution lie within so many standard errors.
STANDARD_ERRORS = 1.645

PassSeconds = Callable[[float, float, float], float]
"""Seconds of a pass by its rows, its sequences and the cached tokens of each sequence."""


@dataclass(frozen=True)
class Machine:
    """One guess at how fast a machine is.

    ``token_seconds``: of each emitted token outside the passes, such as sampling.
    """

    target: PassSeconds
    draft: PassSeconds | None = None
    token_seconds: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What one sequence gets from a pass with at most ``num_tokens`` draft tokens.

    ``tokens`` are emitted, ``low`` to ``high`` is the interval of that; ``num_rows`` draft rows are verified, in the mean.
    ``propose_seconds``: of the drafter, where it is no model on the machine.
    """

    num_tokens: int
    tokens: float
    low: float
    high: float
    num_rows: float
    propose_seconds: float = 0.0


@dataclass(frozen=True)
class Method:
    """A way to draft; ``outcomes`` for K = 1, 2, ...  ``runs_model``: each draft token takes a pass of the draft model."""

    name: str
    outcomes: tuple[Outcome, ...]
    runs_model: bool = False

    def __post_init__(self) -> None:
        assert self.outcomes and all(one.num_tokens >= 1 for one in self.outcomes), self


@dataclass(frozen=True)
class Forecast:
    """A method at one batch size.

    ``num_tokens`` is the K to set: 0 where no K brings enough.  ``tried`` is the best K above 0, and the other figures are of it.
    ``speedup`` has the interval ``low`` to ``high``; ``tokens_per_s`` are of one sequence.
    """

    method: str
    batch: int
    num_tokens: int
    tried: int
    tokens: float
    speedup: float
    low: float
    high: float
    plain_tokens_per_s: float
    tokens_per_s: float

    @property
    def verdict(self) -> str:
        """What to do, in words."""
        if self.num_tokens == 0:
            return "leave it off"
        return "may not pay" if self.low < 1.0 else "pays"


# ------------------------------------------------------------------------------------------------ methods


def with_alpha(name: str, alpha: float, max_tokens: int, *, runs_model: bool = False) -> Method:
    """A drafter that is right with probability ``alpha`` at every position, whatever came before."""
    outcomes = []
    for k in range(1, max_tokens + 1):
        tokens = tokens_per_pass([alpha] * k)
        outcomes.append(Outcome(k, tokens, tokens, tokens, float(k)))
    return Method(name, tuple(outcomes), runs_model)


def with_replays(name: str, replays: Mapping[int, Seq[Replay]], *, runs_model: bool = False) -> Method:
    """A drafter as it was over recorded requests: for each K a Replay of each request."""
    return Method(name, tuple(_outcome(k, replays[k], runs_model) for k in sorted(replays)), runs_model)


def _outcome(num_tokens: int, replays: Seq[Replay], runs_model: bool) -> Outcome:
    together = Replay(num_tokens, tuple(one for replay in replays for one in replay.passes))
    clusters = [(len(replay.passes), sum(one.num_emitted for one in replay.passes)) for replay in replays]
    if len(clusters) == 1:
        # A single request says nothing about how requests differ; its passes say at least how much they do.
        clusters = [(1, one.num_emitted) for one in together.passes]
    tokens, error = _ratio(clusters)
    return Outcome(
        num_tokens=num_tokens,
        tokens=tokens,
        low=max(1.0, tokens - STANDARD_ERRORS * error),
        high=min(num_tokens + 1.0, tokens + STANDARD_ERRORS * error),
        num_rows=together.drafted_per_pass,
        propose_seconds=0.0 if runs_model else together.mean_propose_seconds,
    )


def _ratio(clusters: Seq[tuple[int, int]]) -> tuple[float, float]:
    """Tokens per pass over requests of (passes, tokens), and its standard error (ratio estimator; Cochran, 1977, section 6.4)."""
    num_passes, num_emitted, count = sum(p for p, _ in clusters), sum(e for _, e in clusters), len(clusters)
    ratio = num_emitted / num_passes
    squares = sum((emitted - ratio * passes) ** 2 for passes, emitted in clusters)
    return ratio, math.sqrt(squares * count / (count - 1)) / num_passes if count > 1 else ratio


# ------------------------------------------------------------------------------------------------ speed


def speedup(method: Method, outcome: Outcome, batch: int, context: float, machine: Machine, tokens: float | None = None) -> float:
    """Tokens per second over plain decoding's; ``tokens`` in place of the expected number per pass."""
    emitted = outcome.tokens if tokens is None else tokens
    return emitted * _plain_seconds(batch, context, machine) / _step_seconds(method, outcome, batch, context, machine, emitted)


def forecast(method: Method, batch: int, context: float, machines: Seq[Machine]) -> Forecast:
    """The best K by the first of ``machines``, and its interval over all of them and over the interval of the tokens."""
    middle = machines[0]
    best = max(method.outcomes, key=lambda outcome: speedup(method, outcome, batch, context, middle))
    expected = speedup(method, best, batch, context, middle)
    extremes = [
        speedup(method, best, batch, context, machine, tokens)
        for machine in machines
        for tokens in (best.low, best.tokens, best.high)
    ]
    plain = 1.0 / _plain_seconds(batch, context, middle)
    return Forecast(
        method=method.name,
        batch=batch,
        num_tokens=best.num_tokens if expected >= WORTHWHILE else 0,
        tried=best.num_tokens,
        tokens=best.tokens,
        speedup=expected,
        low=min(extremes),
        high=max(extremes),
        plain_tokens_per_s=plain,
        tokens_per_s=plain * expected,
    )


def best_of(name: str, rows: Seq[Forecast]) -> Forecast:
    """Whatever of ``rows``, methods at one batch size, is best there: what is reached by switching methods as the batch changes."""
    return replace(max(rows, key=lambda row: row.speedup), method=name)


def schedule(method: Method, context: float, machine: Machine, max_batch: int) -> list[tuple[int, int, int]]:
    """``(first batch, last batch, K)`` from 1 to ``max_batch``: the best K of every batch size, equal neighbours together."""
    ranges: list[tuple[int, int, int]] = []
    for batch in range(1, max_batch + 1):
        k = forecast(method, batch, context, [machine]).num_tokens
        if ranges and ranges[-1][2] == k:
            ranges[-1] = (ranges[-1][0], batch, k)
        else:
            ranges.append((batch, batch, k))
    return ranges


def crossover(ranges: Seq[tuple[int, int, int]]) -> int | None:
    """The first batch size of a schedule from which on drafting is to be left off; None when it never is."""
    last = ranges[-1]
    return last[0] if last[2] == 0 else None


def break_even(make: Callable[[float], Method], batch: int, context: float, machine: Machine) -> float | None:
    """The least alpha at which ``make(alpha)`` is worth it, to 0.001; None when not even 0.99 is enough."""
    low, high = 0.0, 0.99
    if forecast(make(high), batch, context, [machine]).num_tokens == 0:
        return None
    while high - low > 0.0005:
        middle = (low + high) / 2
        if forecast(make(middle), batch, context, [machine]).num_tokens:
            high = middle
        else:
            low = middle
    return high


def _plain_seconds(batch: int, context: float, machine: Machine) -> float:
    return machine.target(batch, batch, context) + batch * machine.token_seconds


def _step_seconds(method: Method, outcome: Outcome, batch: int, context: float, machine: Machine, tokens: float) -> float:
    drafting = batch * outcome.propose_seconds
    if method.runs_model:
        assert machine.draft is not None, method.name
        drafting += outcome.num_tokens * machine.draft(batch, batch, context)
    verifying = machine.target(batch * (1 + outcome.num_rows), batch, context)
    return drafting + verifying + batch * tokens * machine.token_seconds


# ------------------------------------------------------------------------------------------------ memory


@dataclass(frozen=True)
class MemoryTable:
    """Where a method's memory goes: ``lines`` are (buffer, bytes), and what they leave is for keys and values.

    A cached token takes ``bytes_per_token``, the draft model's included.
    """

    method: str
    memory_bytes: float
    lines: tuple[tuple[str, float], ...]
    bytes_per_token: float
    context: int

    @property
    def kv_bytes(self) -> float:
        """For keys and values; negative when the rest does not fit."""
        return self.memory_bytes - sum(size for _, size in self.lines)

    @property
    def num_tokens(self) -> int:
        """Cached tokens that fit."""
        return max(0, int(self.kv_bytes // self.bytes_per_token))

    @property
    def num_requests(self) -> int:
        """Whole contexts that fit at a time."""
        return self.num_tokens // self.context

    @property
    def missing_bytes(self) -> float:
        """What one context needs beyond what there is; 0 when it fits."""
        return max(0.0, self.context * self.bytes_per_token - self.kv_bytes)


def memory_table(
    method: str, memory_bytes: float, buffers: Mapping[str, float], bytes_per_token: float, context: int
) -> MemoryTable:
    """A table of all buffers that take something."""
    lines = tuple((name, size) for name, size in buffers.items() if size)
    return MemoryTable(method, memory_bytes, lines, bytes_per_token, context)
