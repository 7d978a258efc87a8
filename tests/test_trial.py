"""A contest in earnest, on a table model: what it measures, and what it predicts beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from foredraft.cost import PassTimes
from foredraft.lanes import Segment, Way
from foredraft.trial import Batch, Contest, Run, _noise
from foredraft.types import PHASES, SamplingParams
from toy_llm import toy_llm

GREEDY = SamplingParams(temperature=0.0, seed=3, max_tokens=48)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=48)
ALONE = Batch("a", "x", ((1, 2, 3),))
THREE = Batch("a", "y", ((1, 2, 3), (4, 4), (5, 6, 7, 0)))
WAYS = (Way("ngram", 3), Way("auto", 8, adaptive=True))


def runs_of(batch: Batch = ALONE, params: SamplingParams = GREEDY, **options: Any) -> list[Run]:
    contest = Contest(toy_llm(num_blocks=1024), WAYS, **options)
    contest.warm_up(batch, params)
    return contest.run(batch, params, repeat=2, turn=1)


@pytest.mark.parametrize("batch", [ALONE, THREE], ids=["alone", "batch"])
def test_a_run_does_not_say_what_was_run(batch: Batch) -> None:
    plain, ngram, auto = runs_of(batch)
    size = len(batch.prompts)
    assert [(run.method, run.num_speculative_tokens, run.batch) for run in (plain, ngram, auto)] == [
        ("none", 0, size),
        ("ngram", 3, size),
        ("auto", 8, size),
    ]
    assert all(run.pair == ("a", batch.name, 2) for run in (plain, ngram, auto))
    assert plain.token_ids == ngram.token_ids == auto.token_ids and [len(ids) for ids in plain.token_ids] == [48] * size
    # A batch's prompts are read in one step here, so each answer's first token is outside the timing.
    assert plain.decode_tokens == 47 * size and plain.decode_steps == 47
    assert ngram.decode_steps == len(ngram.steps) < 47
    assert sum(emitted for _, _, _, emitted, _ in ngram.steps) == ngram.decode_tokens
    assert set(plain.ms_per_step) == set(PHASES) and plain.noise is not None and plain.noise > 0.0
    assert 0.0 < sum(ngram.ms_per_step.values()) * ngram.decode_steps / 1e3 <= ngram.decode_seconds


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_prediction_of_a_fixed_k_is_of_other_passes(params: SamplingParams) -> None:
    plain, ngram, auto = runs_of(THREE, params)
    assert plain.predicted is None
    assert ngram.predicted is not None and auto.predicted is not None
    assert ngram.predicted["steps"] == ngram.decode_steps
    assert ngram.predicted["acceptance_length"] == pytest.approx(ngram.speculation.acceptance_length)
    assert ngram.predicted["speedup"] == pytest.approx(plain.decode_seconds / ngram.predicted["seconds"])


def test_a_prediction_goes_by_one_moment_or_by_other_passes_than_those_that_were_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(first: float, fourth: float) -> PassTimes:
        return PassTimes((1, 4), (first, fourth))

    timed, asked = [times(1.0, 1.5), times(1.0, 9.0), times(1.0, 2.0)], list[int]()
    llm = toy_llm(num_blocks=1024)
    monkeypatch.setattr(llm, "time_passes", lambda most, budget: asked.append(most) or timed[len(asked) - 1])
    contest = Contest(llm, (Way("ngram", 3),))
    for expected in (1.5, 5.25, 2.0):
        contest.run(ALONE, GREEDY, 0, 0)
        assert [rehearsal.times for rehearsal in contest._rehearsals] == [times(1.0, expected)] * 2
    assert asked == [4] * 3


def test_nothing_is_predicted_where_nothing_was_asked_or_decoded() -> None:
    assert [run.predicted for run in runs_of(predict=False)] == [None] * 3
    short = SamplingParams(temperature=0.0, seed=3, max_tokens=1)
    runs = runs_of(params=short)
    assert [(run.decode_tokens, run.tokens_per_s, run.noise, run.predicted, run.ms_per_step) for run in runs] == [
        (0, None, None, None, {})
    ] * 3


def test_a_growing_context_is_taken_for_noise() -> None:
    def noise(*seconds: float) -> float | None:
        return _noise(SimpleNamespace(segments=[Segment(4, 4 * value) for value in seconds]))  # type: ignore[arg-type]

    assert noise(1.0) is None
    assert noise(1.0, 1.0, 1.0) == 0.0
    growing, noisy = noise(1.00, 1.01, 1.02, 1.03), noise(1.00, 1.03, 1.01, 1.02)
    assert growing is not None and noisy is not None and growing < noisy / 2
    assert noise(1.0, 1.2) == pytest.approx(0.2 / 2 / 1.1)


def test_a_recalled_batch_is_unknown_to_the_lanes_or_to_the_rehearsal() -> None:
    ways = (Way("suffix", 4),)
    first = Contest(toy_llm(), ways)
    plain = first.run(ALONE, SAMPLED, 0, 0)
    again = first.run(ALONE, SAMPLED, 0, 0)[1]
    resumed = Contest(toy_llm(), ways)
    resumed.recall(ALONE, plain[0])
    run = resumed.run(ALONE, SAMPLED, 0, 0)[1]
    assert again.speculation.acceptance_length > plain[1].speculation.acceptance_length + 0.5
    assert run.speculation.acceptance_length > plain[1].speculation.acceptance_length + 0.5
    assert run.predicted is not None
    assert run.predicted["acceptance_length"] == pytest.approx(run.speculation.acceptance_length)
