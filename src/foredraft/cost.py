"""Seconds of a step: of a target pass by its rows and context, of a draft, and of everything else.

Owns: the estimates, the measurement that starts them, and how they follow what steps really take.  Does not know: what is
worth its time.

A pass is modelled as ``scale * (base(rows) + per_read * keys_read + per_score * keys_scored)``: ``base`` is a table over rows with
straight lines between its nodes, ``keys_read`` counts cached tokens that a pass reads once, ``keys_scored`` those that its further
rows are compared with.  ``scale`` follows a machine that gets slower or faster; the table's shape follows more slowly.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from foredraft.types import Clock

# Nodes in the order of their use: a slow model's measurement ends early, and must then have what matters most.
CALIBRATION_ROWS = (1, 5, 2, 9, 3, 17, 4, 33, 7, 65, 6, 13, 8, 25, 49)
SHORT_CONTEXT, LONG_CONTEXT = 32, 512
MAX_ROUNDS, FEW_ROWS = 15, 9
LEVEL_RATE, BEND_RATE, BEND_DECAY, MAX_SURPRISE = 0.04, 0.12, 0.0003, 0.7
# Of a node's first pass; what was measured before is believed the less, the fewer passes have confirmed it.
FIRST_BEND_RATE = 0.4
# A node that was seen more counts as seen so often: it is not remembered longer.
LEAST_SEEN, MOST_SEEN = 0.5, 4.0
# Estimates are worked out again after passes have moved them by so much, in logarithms, and after so many passes anyway.
MOVE_PER_UPDATE, PASSES_PER_UPDATE = 0.02, 64


# Of a drafter, until its calls are as they will be.
FIRST_CALLS = 2


@dataclass(frozen=True)
class PassWork:
    """What a pass has to do besides its drafts: ``num_rows`` known tokens, ``keys_read`` cached tokens in all of its sequences."""

    num_rows: int
    keys_read: int


@dataclass(frozen=True)
class PassTimes:
    """Seconds of passes: ``base`` by rows (ascending nodes), ``per_read`` and ``per_score`` for each cached key.

    ``seconds(work, k)`` is a pass of ``work`` and ``k`` draft rows.  Raises AssertionError for an empty or falling table.
    """

    rows: tuple[int, ...]
    base: tuple[float, ...]
    per_read: float = 0.0
    per_score: float = 0.0

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.base) >= 1, (self.rows, self.base)
        assert all(a < b for a, b in zip(self.rows, self.rows[1:], strict=False)), self.rows
        assert self.base[0] > 0.0 and all(a <= b for a, b in zip(self.base, self.base[1:], strict=False)), self.base

    def at(self, num_rows: int) -> float:
        """``base`` of any number of rows: straight between nodes, and beyond the last as the last piece goes on."""
        return interpolate(self.rows, self.base, num_rows)

    def seconds(self, work: PassWork, num_drafts: int = 0) -> float:
        """Seconds of a pass that computes ``num_drafts`` draft rows beside ``work``."""
        context = work.keys_read / max(1, work.num_rows)
        return self.at(work.num_rows + num_drafts) + self.per_read * work.keys_read + self.per_score * context * num_drafts

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"rows": list(self.rows), "base": list(self.base), "per_read": self.per_read, "per_score": self.per_score}

    @classmethod
    def unknown(cls) -> PassTimes:
        """Before anything is measured: a millisecond, and a tenth of that for each further row."""
        rows = tuple(sorted(CALIBRATION_ROWS))
        return cls(rows, tuple(1e-3 + 1e-4 * (count - 1) for count in rows))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PassTimes:
        """What ``to_dict`` gave."""
        return cls(tuple(data["rows"]), tuple(data["base"]), float(data["per_read"]), float(data["per_score"]))


def interpolate(nodes: Seq[int], values: Seq[float], x: int) -> float:
    """Straight lines through (nodes, values); before the first node constant, beyond the last as between the last two."""
    if x <= nodes[0] or len(nodes) == 1:
        return values[0]
    right = min(bisect_right(nodes, x), len(nodes) - 1)
    low, high = nodes[right - 1], nodes[right]
    share = (x - low) / (high - low)
    return values[right - 1] + share * (values[right] - values[right - 1])


def by_rows(nodes: Seq[int], values: Seq[float], most: int) -> list[float]:
    """``interpolate`` at 0, 1, ... at least ``most``, all at once."""
    found, step = [values[0]] * (nodes[0] + 1), 0.0
    for low, high, left, right in zip(nodes, nodes[1:], values, values[1:], strict=False):
        step = (right - left) / (high - low)
        found += [left + step * k for k in range(1, high - low + 1)]
    return found + [values[-1] + step * k for k in range(1, most - nodes[-1] + 1)]


def calibrate(
    run_pass: Callable[[int, int], None],
    *,
    max_rows: int,
    max_context: int,
    budget: float = 1.5,
    clock: Clock = time.perf_counter,
) -> PassTimes:
    """Measure passes of one sequence for about ``budget`` seconds.

    Args:
        run_pass: computes so many rows after so many cached tokens, with logits for each.
        max_rows, max_context: the most of them that a pass may have.
        budget: seconds; at least passes of 1 and 5 rows are timed, whatever they take.
    """
    rows = [count for count in CALIBRATION_ROWS if count <= max_rows] or [1]
    short = max(0, min(SHORT_CONTEXT, max_context - max(rows)))
    long = max(0, min(LONG_CONTEXT, max_context - 9))
    points = [(count, short) for count in rows[:2]] + [(1, long)]
    points += [(count, short) for count in rows[2:4]] + [(min(9, max_rows), long)] + [(count, short) for count in rows[4:]]
    times: dict[tuple[int, int], list[float]] = {point: [] for point in points}
    run_pass(1, short)  # wakes threads, fills caches
    start = clock()
    for num_round in range(MAX_ROUNDS):
        for index, point in enumerate(points):
            if clock() - start > budget and (num_round > 0 or index >= 2):
                return _fit(times, short, long, max_rows)
            if sum(times[point]) > budget / len(points):  # the largest passes matter least, and one takes as long as ten others
                continue
            before = clock()
            run_pass(*point)
            times[point].append(clock() - before)
    return _fit(times, short, long, max_rows)


def _fit(times: Mapping[tuple[int, int], list[float]], short: int, long: int, max_rows: int) -> PassTimes:
    # Whatever else runs on the machine adds time, and not to all points alike; the least of all is luck.
    seconds = {point: sorted(some)[len(some) // 4] for point, some in times.items() if some}
    many = min(9, max_rows)
    per_read = per_score = 0.0
    if long > short and (1, long) in seconds:
        per_read = max(0.0, seconds[1, long] - seconds[1, short]) / (long - short)
    if long > short and many > 1 and (many, long) in seconds and (many, short) in seconds:
        further = seconds[many, long] - seconds[many, short] - per_read * (long - short)
        per_score = max(0.0, further) / ((many - 1) * (long - short))
    nodes = sorted({rows for rows, context in seconds if context == short})
    base = [seconds[rows, short] - short * (per_read + per_score * (rows - 1)) for rows in nodes]
    risen = rising([max(value, 1e-9) for value in base])
    # Few measure the large ones, and beyond reading the weights all is arithmetic, of which no row does less than one before it.
    hull = convex(nodes, risen)
    base = [value if rows <= FEW_ROWS else least for rows, value, least in zip(nodes, risen, hull, strict=True)]
    return PassTimes(tuple(nodes), rising(base), per_read, per_score)


def pooled(measured: Seq[PassTimes]) -> PassTimes:
    """One of several measurements: medians, at the nodes that all have."""
    nodes = sorted(set.intersection(*(set(one.rows) for one in measured)))
    at = [dict(zip(one.rows, one.base, strict=True)) for one in measured]
    base = [statistics.median(one[node] for one in at) for node in nodes]
    per_read, per_score = (statistics.median(getattr(one, name) for one in measured) for name in ("per_read", "per_score"))
    return PassTimes(tuple(nodes), rising(base), per_read, per_score)


def rising(values: Seq[float]) -> tuple[float, ...]:
    """The nearest sequence that never falls (pool adjacent violators): more rows never take less time, but noise says so."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            previous, count = pools.pop()
            mean, size = (mean * size + previous * count) / (size + count), size + count
        pools.append((mean, size))
    return tuple(mean for mean, size in pools for _ in range(size))


def convex(nodes: Seq[int], values: Seq[float]) -> list[float]:
    """At each node, the highest convex function that is nowhere above (nodes, values): of neighbouring slopes none falls."""
    corners: list[int] = []

    def slope(a: int, b: int) -> float:
        return (values[b] - values[a]) / (nodes[b] - nodes[a])

    for index in range(len(nodes)):
        while len(corners) > 1 and slope(corners[-2], corners[-1]) >= slope(corners[-1], index):
            corners.pop()
        corners.append(index)
    return [interpolate([nodes[i] for i in corners], [values[i] for i in corners], node) for node in nodes]


class PassCost:
    """PassTimes that follow the passes that really ran.

    A node's time is the first one, times e to the ``level`` of all and to the node's own ``bend``.  A pass that takes longer than
    expected moves both, the bend more: were it the machine that got slower, passes at other nodes will say so soon, while a
    wrong shape would never show if the level followed every change.  A bend that is not confirmed slowly goes back.  Nodes that
    no pass has come near of late bend as those around them: what made some passes slower makes larger ones slower too.
    """

    def __init__(self, times: PassTimes) -> None:
        self._rows, self._base = times.rows, times.base
        self._per_read, self._per_score = times.per_read, times.per_score
        self._level, self._scale = 0.0, 1.0
        self._bends = [0.0] * len(times.rows)
        self._seen = [0.0] * len(times.rows)
        self._shape = [0.0] * len(times.rows)
        self._by_rows: list[float] = []
        self._added: dict[tuple[int, int, int], tuple[float, ...]] = {}
        self._moved, self._num_observed = 0.0, 0

    @property
    def times(self) -> PassTimes:
        """The present estimate."""
        scale = math.exp(self._level)
        return PassTimes(self._rows, rising(self._values()), scale * self._per_read, scale * self._per_score)

    def seconds(self, work: PassWork, num_drafts: int = 0) -> float:
        """See PassTimes.seconds."""
        return self._dense(work.num_rows + num_drafts)[work.num_rows + num_drafts] + self._context(work, num_drafts)

    def curve(self, work: PassWork, most: int) -> list[float]:
        """Seconds of passes with 0, 1, ... ``most`` draft rows beside ``work``; never falling."""
        start, fixed = work.num_rows, self._context(work, 0)
        slope = self._context(work, 1) - fixed
        return [seconds + (fixed + slope * k) for k, seconds in enumerate(self._dense(start + most)[start : start + most + 1])]

    def row_seconds(self, work: PassWork, num_seqs: int, most: int) -> list[float]:
        """What the first, second, ... draft row of each of ``num_seqs`` sequences adds to a pass, in seconds; never falling.

        The first rows are often nearly free and later ones are not: reading the weights hides the arithmetic of a few.  Where it
        is the other way, all share what the first cost more.
        """
        start, key = work.num_rows, (work.num_rows, num_seqs, most)
        added = self._added.get(key)
        if added is None:
            passes = self._dense(start + num_seqs * most)[start : start + num_seqs * most + 1 : num_seqs]
            added = self._added[key] = rising([(after - before) / num_seqs for before, after in pairwise(passes)])
        slope = self._scale * self._per_score * work.keys_read / max(1, start)
        return [seconds + slope for seconds in added]

    def observe(self, work: PassWork, num_drafts: int, seconds: float) -> None:
        """Learn what a pass took; a single outlier moves little."""
        if seconds <= 0.0:
            return
        num_rows, rows, shape = work.num_rows + num_drafts, self._rows, self._shape
        right = min(bisect_right(rows, num_rows), len(rows) - 1)
        left = max(0, right - 1)
        share = 1.0 if left == right else max(0.0, min(1.0, (num_rows - rows[left]) / (rows[right] - rows[left])))
        beyond = max(0.0, num_rows - rows[-1]) / (rows[right] - rows[left]) if left < right else 0.0
        low = self._scale * self._base[left] * math.exp(shape[left])
        high = self._scale * self._base[right] * math.exp(shape[right])
        expected = low + (share + beyond) * (high - low) + self._context(work, num_drafts)
        surprise = math.log(seconds / expected) if expected > 0.0 else 0.0
        surprise = max(-MAX_SURPRISE, min(MAX_SURPRISE, surprise))
        self._level += LEVEL_RATE * surprise
        self._scale = math.exp(self._level)
        for node, part in ((left, 1.0 - share), (right, share)):
            rate = max(BEND_RATE, FIRST_BEND_RATE / (1.0 + self._seen[node])) * part
            self._bends[node] = shape[node] = shape[node] + rate * surprise
            self._seen[node] = min(MOST_SEEN, self._seen[node] + part)
            self._moved += rate * surprise
        self._num_observed += 1
        if abs(self._moved) > MOVE_PER_UPDATE or self._num_observed >= PASSES_PER_UPDATE:
            decay = 1.0 - BEND_DECAY * self._num_observed
            self._bends = [decay * bend for bend in self._bends]
            self._seen = [decay * seen for seen in self._seen]
            self._shape = self._shaped()
            self._by_rows, self._moved, self._num_observed = [], 0.0, 0
            self._added.clear()

    def _context(self, work: PassWork, num_drafts: int) -> float:
        """What the cached tokens add."""
        score = self._per_score * num_drafts / max(1, work.num_rows)
        return self._scale * (self._per_read + score) * work.keys_read

    def _dense(self, most: int) -> list[float]:
        """``base`` of 0, 1, ... at least ``most`` rows, never falling; kept until passes have shown enough that is new."""
        if len(self._by_rows) <= most:
            self._by_rows = list(accumulate(by_rows(self._rows, self._values(), most), max))
        return self._by_rows

    def _shaped(self) -> list[float]:
        """The bends; of nodes that were hardly seen, what is between those that were."""
        known = [node for node, seen in enumerate(self._seen) if seen >= LEAST_SEEN]
        bends = [self._bends[node] for node in known]
        return [interpolate(known, bends, min(node, known[-1])) if known else 0.0 for node in range(len(self._bends))]

    def _values(self) -> list[float]:
        return [value * math.exp(self._level + bend) for value, bend in zip(self._base, self._shape, strict=True)]


class Running:
    """A mean that starts as the plain mean of what came and then forgets at ``rate``; before anything came it is ``first``."""

    __slots__ = ("_count", "_rate", "mean")

    def __init__(self, rate: float, first: float = 0.0, weight: float = 0.0) -> None:
        self.mean = first
        self._rate = rate
        self._count = weight

    def add(self, value: float) -> None:
        """Take one more."""
        self._count += 1.0
        rate = 1.0 / self._count
        self.mean += (rate if rate > self._rate else self._rate) * (value - self.mean)


class DraftCost:
    """Seconds of one drafter's ``propose`` by depth and number of sequences, fitted to the calls that were made.

    ``deepest``: of those calls; 0 before the first.  ``is_known`` once there were enough.
    """

    def __init__(self) -> None:
        self.per_sequence = Running(0.1)
        self.deepest = 0
        self._num_calls = 0
        self._seconds: dict[tuple[int, int], Running] = {}
        self._nearest: dict[tuple[int, int], tuple[Running, float]] = {}

    @property
    def is_known(self) -> bool:
        """Whether estimates are of calls as they will be."""
        return self._num_calls >= FIRST_CALLS

    def seconds(self, num_seqs: int, depth: int) -> float:
        """An estimate; before the first call 0, so that there is one."""
        key = (num_seqs, depth)
        known = self._nearest.get(key)
        if known is None:
            if not self._seconds:
                return 0.0
            known = self._nearest[key] = self._like(num_seqs, depth)
        return known[0].mean * known[1]

    def observe(self, num_seqs: int, depth: int, seconds: float) -> None:
        """Learn what a call took.  One that is many times the usual counts as a few times as much: it was disturbed.

        The first, which may read a whole prompt or wake threads, counts until there is a second.
        """
        self._num_calls += 1
        self.deepest = max(self.deepest if self._num_calls > FIRST_CALLS else 0, depth)
        if self._num_calls == FIRST_CALLS:
            self._seconds.clear()
            self.per_sequence = Running(0.1)
        known = self._seconds.get((num_seqs, depth))
        if known is None:
            known = self._seconds[num_seqs, depth] = Running(0.1)
            self._nearest.clear()
        known.add(min(seconds, 4.0 * known.mean) if known.mean > 0.0 else seconds)
        self.per_sequence.add(seconds / num_seqs)

    def _like(self, num_seqs: int, depth: int) -> tuple[Running, float]:
        """The nearest call that was made, and the proportion: more sequences or tokens cost as much more, at most."""
        nearest = min(self._seconds, key=lambda key: abs(math.log(key[0] / num_seqs)) + abs(math.log(key[1] / depth)))
        share = (num_seqs / nearest[0]) * ((1 + depth) / (1 + nearest[1]))
        return self._seconds[nearest], max(share, 0.25)
