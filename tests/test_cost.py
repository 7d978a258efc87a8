from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.cost import (
    DraftCost,
    PassCost,
    PassTimes,
    PassWork,
    Running,
    by_rows,
    calibrate,
    convex,
    interpolate,
    pooled,
    rising,
)

TIMES = PassTimes((1, 5, 17), (1.0, 1.2, 3.0), per_read=2e-4, per_score=1e-4)


class Machine:
    """A clock that a pass moves on; every third pass takes three times as long."""

    def __init__(self, per_row: float = 0.1, first: float = 1.0, disturbed: bool = False) -> None:
        self.now = 0.0
        self.passes: list[tuple[int, int]] = []
        self._per_row, self._first, self._disturbed = per_row, first, disturbed

    def run(self, num_rows: int, context: int) -> None:
        self.passes.append((num_rows, context))
        seconds = self._first + self._per_row * num_rows + 1e-4 * context + 1e-5 * context * (num_rows - 1)
        self.now += seconds * (3.0 if self._disturbed and len(self.passes) % 3 == 0 else 1.0)


@pytest.mark.parametrize("disturbed", [False, True])
def test_calibration_does_not_find_what_passes_take(disturbed: bool) -> None:
    machine = Machine(disturbed=disturbed)
    times = calibrate(machine.run, max_rows=512, max_context=2048, budget=1e4, clock=lambda: machine.now)
    for rows, context in ((1, 0), (1, 1000), (5, 64), (9, 500), (30, 100)):
        before = machine.now
        expected = Machine()
        expected.run(rows, context)
        assert times.seconds(PassWork(1, context), rows - 1) == pytest.approx(expected.now - 0.0, rel=0.02), (rows, context)
        assert machine.now == before


@pytest.mark.parametrize("seconds", [0.5, 5.0, 100.0])
def test_calibration_of_a_slow_model_takes_long(seconds: float) -> None:
    machine = Machine(first=seconds)
    calibrate(machine.run, max_rows=512, max_context=2048, budget=1.5, clock=lambda: machine.now)
    assert machine.now <= max(1.5 + 3 * seconds, 4.2 * seconds)
    assert {rows for rows, _ in machine.passes[1:]} >= {1, 5}


@pytest.mark.parametrize(("max_rows", "max_context"), [(1, 2), (1, 64), (4, 10), (5, 4096), (512, 12), (7, 7)])
def test_calibration_oversteps_a_limit(max_rows: int, max_context: int) -> None:
    machine = Machine()
    calibrate(machine.run, max_rows=max_rows, max_context=max_context, budget=50.0, clock=lambda: machine.now)
    assert all(rows <= max_rows and context >= 0 and rows + context <= max(max_context, rows) for rows, context in machine.passes)


def test_times_are_lost_in_json() -> None:
    assert PassTimes.from_dict(TIMES.to_dict()) == TIMES


@pytest.mark.parametrize(("rows", "base"), [((), ()), ((1, 1), (1.0, 1.0)), ((1, 2), (2.0, 1.0)), ((1,), (0.0,)), ((1, 2), (1.0,))])
def test_impossible_times_are_taken(rows: tuple[int, ...], base: tuple[float, ...]) -> None:
    with pytest.raises(AssertionError):
        PassTimes(rows, base)


@pytest.mark.parametrize(("x", "expected"), [(0, 1.0), (1, 1.0), (3, 1.1), (5, 1.2), (11, 2.1), (17, 3.0), (29, 4.8)])
def test_interpolation_misses_a_node_or_stops_at_the_last(x: int, expected: float) -> None:
    assert interpolate(TIMES.rows, TIMES.base, x) == pytest.approx(expected)
    assert interpolate((3,), (7.0,), x) == 7.0


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=12))
def test_a_risen_sequence_falls_or_loses_its_mean(values: list[float]) -> None:
    risen = rising(values)
    assert all(a <= b for a, b in itertools.pairwise(risen))
    assert sum(risen) == pytest.approx(sum(values))
    assert rising(sorted(values)) == tuple(sorted(values))


def test_a_curve_differs_from_its_single_values() -> None:
    cost, work = PassCost(TIMES), PassWork(3, 600)
    assert cost.curve(work, 20) == pytest.approx([cost.seconds(work, k) for k in range(21)])
    assert cost.curve(work, 20) == pytest.approx([TIMES.seconds(work, k) for k in range(21)])


def row_seconds(base: list[float], num_seqs: int) -> list[float]:
    """Of all rows behind those of ``num_seqs`` sequences without a context."""
    cost = PassCost(PassTimes(tuple(range(num_seqs, num_seqs + len(base))), tuple(base)))
    return cost.row_seconds(PassWork(num_seqs, 0), num_seqs, (len(base) - 1) // num_seqs)


def test_cheap_first_rows_are_priced_like_dear_later_ones() -> None:
    assert row_seconds([1.0, 1.1, 1.4, 2.4], 1) == pytest.approx([0.1, 0.3, 1.0])
    assert row_seconds([1.0, 1.1, 1.4, 2.4, 3.4], 2) == pytest.approx([0.2, 1.0])
    assert row_seconds([1.0], 3) == []
    # A first row that is dear is shared with those that come nearly for nothing behind it.
    assert row_seconds([1.0, 1.4, 1.4, 1.7], 1) == pytest.approx([0.2, 0.2, 0.3])
    assert row_seconds([1.0, 1.1, 1.7, 1.8, 1.8], 1) == pytest.approx([0.1, 0.7 / 3, 0.7 / 3, 0.7 / 3])


def test_a_row_is_priced_without_what_it_is_compared_with_or_as_before_the_machine_changed() -> None:
    cost, work = PassCost(TIMES), PassWork(1, 600)
    assert cost.row_seconds(work, 1, 4) == pytest.approx([0.05 + 1e-4 * 600] * 4)
    for _ in range(200):
        cost.observe(work, 4, 2.0 * TIMES.seconds(work, 4))
    curve = cost.curve(work, 4)
    assert cost.row_seconds(work, 1, 4) == pytest.approx([after - before for before, after in itertools.pairwise(curve)])


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=12))
def test_a_convex_sequence_is_bent_or_lies_above_what_was_measured(values: list[float]) -> None:
    nodes = [i * i + 1 for i in range(len(values))]
    found = convex(nodes, values)
    assert all(low <= value + 1e-9 for low, value in zip(found, values, strict=True))
    slopes = [(b - a) / (n - m) for (m, a), (n, b) in itertools.pairwise(zip(nodes, found, strict=True))]
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(slopes))
    assert (found[0], found[-1]) == pytest.approx((values[0], values[-1]))
    assert convex(nodes, found) == pytest.approx(found)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=6), st.integers(0, 60))
def test_all_rows_at_once_differ_from_each_alone(values: list[float], most: int) -> None:
    nodes = [i * i + 1 for i in range(len(values))]
    found = by_rows(nodes, values, most)
    assert len(found) > most
    assert found == pytest.approx([interpolate(nodes, values, x) for x in range(len(found))])


def test_large_passes_look_cheap_since_smaller_ones_were_disturbed() -> None:
    """Where 17 rows were measured too slow, those from 18 to 25 must not seem to be nearly free."""

    class Disturbed(Machine):
        def run(self, num_rows: int, context: int) -> None:
            before = self.now
            super().run(num_rows, context)
            if num_rows == 17:
                self.now += 0.5 * (self.now - before)

    machine = Disturbed()
    times = calibrate(machine.run, max_rows=512, max_context=2048, budget=1e4, clock=lambda: machine.now)
    assert times.at(25) - times.at(17) == pytest.approx(0.8, rel=0.1)


def test_what_was_never_seen_stays_cheap_when_all_that_is_seen_gets_dear() -> None:
    """Sixteen requests that do not draft never show what larger passes take; a slower machine makes those slower too."""
    times = PassTimes((1, 9, 13, 17, 25, 33), (1.0, 2.0, 3.0, 4.0, 6.0, 8.0))
    cost = PassCost(times)
    for _ in range(300):
        cost.observe(PassWork(16, 0), 0, 1.5 * times.at(16))
    assert cost.row_seconds(PassWork(16, 0), 16, 1)[0] == pytest.approx(1.5 * 0.25, rel=0.15)


@pytest.mark.parametrize("factor", [0.4, 1.0, 3.0])
def test_a_machine_that_changes_speed_is_not_followed(factor: float) -> None:
    cost, generator = PassCost(TIMES), random.Random(0)
    for _ in range(400):
        work, k = PassWork(1, generator.randint(0, 500)), generator.choice([0, 4])
        cost.observe(work, k, factor * TIMES.seconds(work, k) * generator.lognormvariate(0.0, 0.1))
    for k in (0, 2, 4):
        assert cost.seconds(PassWork(1, 100), k) == pytest.approx(factor * TIMES.seconds(PassWork(1, 100), k), rel=0.2)
    assert cost.times.at(5) == pytest.approx(factor * 1.2, rel=0.2)


def test_a_wrong_shape_is_kept() -> None:
    """Passes of one row take what they did, those of five are dearer than was measured."""
    cost = PassCost(TIMES)
    for step in range(120):
        k = 0 if step % 20 == 0 else 4
        cost.observe(PassWork(1, 0), k, 1.0 if k == 0 else 2.4)
    assert cost.seconds(PassWork(1, 0), 4) / cost.seconds(PassWork(1, 0)) == pytest.approx(2.4, rel=0.25)


def test_an_outlier_is_believed() -> None:
    cost = PassCost(TIMES)
    before = cost.seconds(PassWork(1, 0))
    for _ in range(5):
        cost.observe(PassWork(1, 0), 0, before)
    cost.observe(PassWork(1, 0), 0, 1000.0)
    cost.observe(PassWork(1, 0), 0, 0.0)
    assert cost.seconds(PassWork(1, 0)) < 1.2 * before


def test_the_cost_of_a_draft_is_not_that_of_like_calls() -> None:
    cost = DraftCost()
    assert cost.seconds(1, 4) == 0.0
    for _ in range(20):
        cost.observe(2, 4, 1e-3)
    assert cost.seconds(2, 4) == pytest.approx(1e-3)
    assert cost.seconds(4, 4) == pytest.approx(2e-3) and cost.seconds(2, 9) == pytest.approx(2e-3)
    assert 0.25e-3 <= cost.seconds(1, 1) < 1e-3
    cost.observe(2, 4, 1.0)
    assert cost.seconds(2, 4) < 1.5e-3, "one disturbed call"
    cost.observe(1, 1, 5e-4)
    assert cost.seconds(1, 1) == 5e-4


def test_a_first_call_that_reads_the_prompt_makes_a_drafter_look_dear() -> None:
    cost = DraftCost()
    cost.observe(1, 8, 14e-3)
    assert cost.seconds(1, 8) == 14e-3 and cost.deepest == 8 and not cost.is_known
    cost.observe(1, 1, 1e-3)
    assert cost.seconds(1, 1) == 1e-3 and cost.per_sequence.mean == 1e-3 and cost.deepest == 1 and cost.is_known


def test_a_running_mean_forgets_at_once_or_never() -> None:
    mean = Running(0.1)
    for value in (1.0, 2.0, 3.0):
        mean.add(value)
    assert mean.mean == pytest.approx(2.0)
    for _ in range(200):
        mean.add(10.0)
    assert math.isclose(mean.mean, 10.0, rel_tol=1e-6)
    believed = Running(0.1, first=5.0, weight=9.0)
    believed.add(0.0)
    assert believed.mean == pytest.approx(4.5)


def test_a_pass_of_many_more_rows_than_were_calibrated_has_no_logarithm() -> None:
    cost = PassCost(PassTimes((1, 5, 9), (0.010, 0.011, 0.020)))
    for _ in range(200):
        cost.observe(PassWork(16, 0), 64, 0.002)
    assert 0.0 < cost.seconds(PassWork(16, 0), 64) < 0.02


def test_pooled_times_follow_one_measurement_or_lose_a_node_that_all_have() -> None:
    measured = [
        PassTimes((1, 2, 5, 9), (1.0, 1.1, 1.5, 2.0), 1e-6, 0.0),
        PassTimes((1, 2, 5), (2.0, 2.1, 2.2), 3e-6, 1e-7),
        PassTimes((1, 2, 5), (1.2, 1.2, 1.6), 2e-6, 2e-7),
    ]
    found = pooled(measured)
    assert found.rows == (1, 2, 5) and found.base == (1.2, 1.2, 1.6)
    assert (found.per_read, found.per_score) == (2e-6, 1e-7)
    assert pooled(measured[:1]) == measured[0]
