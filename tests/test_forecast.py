from __future__ import annotations

from itertools import pairwise

import pytest

from foredraft.forecast import (
    Machine,
    Method,
    Outcome,
    break_even,
    crossover,
    forecast,
    memory_table,
    schedule,
    speedup,
    with_alpha,
    with_replays,
)
from foredraft.replay import Replay, ReplayedPass


def flat(rows: float, seqs: float, context: float) -> float:
    return 1.0


def bound_by(ridge: float, rows: float) -> float:
    """A pass that is free up to ``ridge`` rows."""
    return max(1.0, rows / ridge)


def ridged(ridge: float, draft_cost: float = 0.0) -> Machine:
    return Machine(
        target=lambda rows, seqs, context: bound_by(ridge, rows),
        draft=lambda rows, seqs, context: draft_cost * bound_by(ridge, rows),
    )


# Constant verification cost: the optimum is known in closed form (Leviathan et al., 2211.17192, theorem 3.8).
@pytest.mark.parametrize(
    ("alpha", "cost", "best", "gain"),
    [(0.5, 0.05, 3, 1.63), (0.7, 0.1, 4, 1.98), (0.8, 0.05, 8, 3.09), (0.9, 0.2, 7, 2.37), (0.6, 0.3, 1, 1.23)],
)
def test_the_textbook_optimum_is_missed(alpha: float, cost: float, best: int, gain: float) -> None:
    machine = Machine(flat, draft=lambda rows, seqs, context: cost)
    row = forecast(with_alpha("draft_model", alpha, 20, runs_model=True), 1, 0, [machine])
    assert (row.num_tokens, round(row.speedup, 2)) == (best, gain)


def test_drafting_is_recommended_where_a_batch_makes_passes_compute_bound() -> None:
    method, machine = with_alpha("ngram", 0.7, 8), ridged(64)
    assert forecast(method, 1, 0, [machine]).num_tokens == 8
    assert forecast(method, 16, 0, [machine]).num_tokens == 3
    row = forecast(method, 64, 0, [machine])
    assert (row.num_tokens, row.verdict) == (0, "leave it off")
    assert row.speedup < 1.0 and row.tried == 1


def test_the_schedule_disagrees_with_the_forecast_or_has_holes() -> None:
    method, machine = with_alpha("ngram", 0.7, 8), ridged(64)
    ranges = schedule(method, 0, machine, 100)
    assert [k for _, _, k in ranges] == sorted({k for _, _, k in ranges}, reverse=True)
    assert ranges[0][0] == 1 and ranges[-1][1] == 100
    assert all(before[1] + 1 == after[0] for before, after in pairwise(ranges))
    for first, last, k in ranges:
        assert all(forecast(method, batch, 0, [machine]).num_tokens == k for batch in (first, last))
    fades = crossover(ranges)
    assert fades == ranges[-1][0]
    assert forecast(method, fades - 1, 0, [machine]).num_tokens > 0
    assert crossover(schedule(method, 0, ridged(1e9), 100)) is None


def test_an_interval_leaves_out_a_machine_or_the_spread_of_the_log() -> None:
    method = Method("suffix", (Outcome(2, tokens=2.0, low=1.5, high=2.5, num_rows=2.0),))
    fast, slow = Machine(flat), Machine(lambda rows, seqs, context: 1.0 + 0.1 * rows)
    row = forecast(method, 1, 0, [fast, slow])
    assert row.speedup == pytest.approx(2.0)
    assert row.low == pytest.approx(1.5 * 1.1 / 1.3)
    assert row.high == pytest.approx(2.5)
    assert forecast(method, 1, 0, [fast]).verdict == "pays"
    assert forecast(Method("suffix", (Outcome(2, 1.1, 0.9, 1.3, 2.0),)), 1, 0, [fast]).verdict == "may not pay"


def test_time_beside_the_passes_is_taken_for_free() -> None:
    method = Method("ngram", (Outcome(2, 2.0, 2.0, 2.0, num_rows=2.0, propose_seconds=0.25),))
    assert speedup(method, method.outcomes[0], 1, 0, Machine(flat)) == pytest.approx(2 / 1.25)
    # Each emitted token takes its own time, however many come at once.
    assert speedup(method, method.outcomes[0], 1, 0, Machine(flat, token_seconds=0.5)) == pytest.approx(2 * 1.5 / (1.25 + 1.0))
    assert speedup(method, method.outcomes[0], 4, 0, Machine(flat)) == pytest.approx(2 / 2.0)


def test_break_even_alpha_pays_nothing_or_is_not_the_least() -> None:
    machine = ridged(8, draft_cost=0.1)

    def make(alpha: float) -> Method:
        return with_alpha("draft_model", alpha, 4, runs_model=True)

    least = break_even(make, 1, 0, machine)
    assert least is not None
    assert forecast(make(least), 1, 0, [machine]).num_tokens > 0
    assert forecast(make(least - 0.005), 1, 0, [machine]).num_tokens == 0
    assert break_even(make, 100, 0, machine) is None


def recorded(*passes: tuple[int, int]) -> Replay:
    return Replay(4, tuple(ReplayedPass(drafted, emitted - 1, emitted, 0.001 * bool(drafted)) for drafted, emitted in passes))


def test_a_replay_is_summed_up_as_a_mean_of_requests_or_without_its_spread() -> None:
    replays = [recorded((4, 5), (4, 3)), recorded((0, 1), (0, 1), (4, 1), (4, 1))]
    outcome = with_replays("ngram", {4: replays}).outcomes[0]
    assert outcome.tokens == pytest.approx(12 / 6)
    assert outcome.num_rows == pytest.approx(16 / 6)
    assert outcome.propose_seconds == pytest.approx(0.001)
    # Two requests, of which one has 4 tokens a pass and the other 1: residuals 4 and -4.
    assert outcome.high == pytest.approx(2 + 1.645 * (32 * 2 / 1) ** 0.5 / 6)
    assert outcome.low == 1.0
    alike = with_replays("ngram", {4: [recorded((4, 2), (4, 2))] * 3}).outcomes[0]
    assert alike.low == alike.tokens == alike.high == 2.0


def test_the_time_of_a_replayed_draft_model_here_is_charged_on_other_hardware() -> None:
    assert with_replays("draft_model", {4: [recorded((4, 5))] * 2}, runs_model=True).outcomes[0].propose_seconds == 0.0


def test_buffers_are_left_out_of_the_memory_or_requests_rounded_up() -> None:
    table = memory_table("draft_model", 1000.0, {"weights": 500.0, "draft weights": 100.0, "suffix statistics": 0.0}, 3.0, 50)
    assert table.lines == (("weights", 500.0), ("draft weights", 100.0))
    assert (table.kv_bytes, table.num_tokens, table.num_requests, table.missing_bytes) == (400.0, 133, 2, 0.0)
    full = memory_table("none", 400.0, {"weights": 500.0}, 3.0, 50)
    assert (full.num_tokens, full.num_requests, full.missing_bytes) == (0, 0, 250.0)
