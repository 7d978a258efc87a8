from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.metrics import EngineMetrics, Stopwatch
from foredraft.types import PHASES, SpeculationStats, StepStats

passes = st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 7)).filter(lambda p: p[1] <= min(p[0], p[2]))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_stopwatch_loses_time_between_phases() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    for phase, seconds in (("schedule", 0.25), ("draft", 0.5), ("pass", 2.0), ("draft", 1.0)):
        clock.now += seconds
        watch.lap(phase)
    assert watch.milliseconds == {"schedule": 250.0, "draft": 1500.0, "pass": 2000.0, "verify": 0.0, "rest": 0.0}
    with pytest.raises(KeyError):
        watch.lap("lunch")


@given(st.lists(passes, max_size=12))
def test_counts_per_position_contradict_the_totals(counted: list[tuple[int, int, int]]) -> None:
    stats = SpeculationStats()
    for num_drafted, num_accepted, num_emitted in counted:
        stats.count(num_drafted, num_accepted, num_emitted)
    drafted, accepted, emitted = (sum(p[i] for p in counted) for i in range(3))
    assert (stats.drafted_tokens, stats.accepted_tokens, stats.emitted_tokens) == (drafted, accepted, emitted)
    assert stats.target_passes == len(counted)
    assert stats.drafted_per_position == [sum(p[0] > i for p in counted) for i in range(max((p[0] for p in counted), default=0))]
    assert stats.accepted_per_position == [sum(p[1] > i for p in counted) for i in range(max((p[1] for p in counted), default=0))]
    assert stats.acceptance_rate == (accepted / drafted if drafted else 0.0)
    assert stats.acceptance_length == (emitted / len(counted) if counted else 0.0)


@pytest.mark.parametrize("counts", [(2, 3, 4), (4, 3, 2)])
def test_impossible_pass_is_counted(counts: tuple[int, int, int]) -> None:
    with pytest.raises(AssertionError):
        SpeculationStats().count(*counts)


@given(st.lists(st.tuples(st.sampled_from(["ngram", "eagle", "none"]), passes), max_size=12))
def test_drafters_do_not_add_up_to_the_total(counted: list[tuple[str, tuple[int, int, int]]]) -> None:
    metrics = EngineMetrics()
    for drafter, counts in counted:
        metrics.count_pass(drafter, *counts)
    assert metrics.per_drafter.keys() == {drafter for drafter, _ in counted}
    for name in ("drafted_tokens", "accepted_tokens", "emitted_tokens", "target_passes"):
        assert sum(getattr(stats, name) for stats in metrics.per_drafter.values()) == getattr(metrics.total, name)


def test_step_is_counted_twice_or_not_at_all() -> None:
    metrics = EngineMetrics()
    step = StepStats(2, 7, 4, 1, 3, dict.fromkeys(PHASES, 0.0) | {"draft": 1.5, "pass": 20.0})
    metrics.count_step(step)
    metrics.count_step(step)
    assert (metrics.num_steps, metrics.num_rows, metrics.last_step) == (2, 14, step)
    assert metrics.total.milliseconds == {"schedule": 0.0, "draft": 3.0, "pass": 40.0, "verify": 0.0, "rest": 0.0}
    assert step.milliseconds["draft"] == 1.5


def test_two_engines_share_their_counters() -> None:
    one, other = EngineMetrics(), EngineMetrics()
    one.count_pass("ngram", 2, 1, 2)
    one.count_step(StepStats(1, 3, 2, 1, 2, dict.fromkeys(PHASES, 1.0)))
    one.finished["stop"] += 1
    assert other.snapshot() == EngineMetrics().snapshot()


def test_snapshot_is_no_plain_data_or_changes_later() -> None:
    metrics = EngineMetrics()
    metrics.count_pass("ngram", 3, 1, 2)
    metrics.count_step(StepStats(1, 4, 3, 1, 2, dict.fromkeys(PHASES, 2.0)))
    metrics.finished["length"] += 1
    metrics.num_preemptions = 5
    snapshot = metrics.snapshot()
    text = json.dumps(snapshot)
    metrics.count_pass("ngram", 3, 3, 4)
    metrics.count_step(StepStats(1, 4, 3, 3, 4, dict.fromkeys(PHASES, 2.0)))
    metrics.finished["length"] += 1
    assert json.dumps(snapshot) == text
    assert (
        snapshot["finished"] == {"length": 1} and snapshot["preemptions"] == 5 and snapshot["rows"] == 4 and snapshot["steps"] == 1
    )
    assert snapshot["accepted_tokens"] == 1 and snapshot["acceptance_length"] == 2.0
    assert snapshot["drafted_per_position"] == [1, 1, 1] and snapshot["accepted_per_position"] == [1]
    assert snapshot["per_drafter"]["ngram"]["acceptance_rate"] == pytest.approx(1 / 3)
