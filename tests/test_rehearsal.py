from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from foredraft.cost import PassTimes, PassWork
from foredraft.lanes import PLAIN_WAY, Race, Way, seeded
from foredraft.rehearsal import Correction, PresetClock, RecordedTarget, Rehearsal
from foredraft.types import PHASES, FloatArray, Rows, SamplingParams
from toy_llm import TIMES, toy_llm

GREEDY = SamplingParams(temperature=0.0, seed=3, max_tokens=40)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=40)
PROMPTS = ([1, 2, 3], [4, 5, 6, 7, 1, 2], [3, 3])


def no_states(stream: Sequence[int], taps: tuple[int, ...]) -> FloatArray:
    raise AssertionError("no drafter here reads states")


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["alone", "batch"])
@pytest.mark.parametrize("way", [PLAIN_WAY, Way("ngram", 3), Way("suffix", 4)])
def test_a_rehearsal_needs_other_passes_than_the_run(params: SamplingParams, prompts: tuple[list[int], ...], way: Way) -> None:
    llm = toy_llm(eos_ids=[7])
    race = Race(llm)
    race.add(PLAIN_WAY)
    lane = race.add(way)
    rehearsal = Rehearsal(llm, way)
    each = seeded(params, len(prompts))
    for _ in range(2):  # what the drafters learned of the first time counts in the second
        race.run(prompts, each, tenant="t")
        rehearsed, steps = rehearsal.play(prompts, each, race.lanes[0].answers, "t")
        shown = [(step.num_seqs, step.num_rows, step.num_drafted, step.num_accepted, step.num_emitted) for step in steps]
        assert shown == [(s.num_seqs, s.num_rows, s.num_drafted, s.num_accepted, s.num_emitted) for s in lane.steps]
        assert rehearsed.num_tokens == lane.num_tokens
        assert rehearsed.speculation.acceptance_length == lane.speculation.acceptance_length


def test_a_rehearsal_runs_the_model() -> None:
    llm = toy_llm()
    race = Race(llm)
    race.add(PLAIN_WAY)
    race.run(PROMPTS, seeded(GREEDY, 3))
    num_passes = llm.target.num_passes  # type: ignore[attr-defined]
    for way in (PLAIN_WAY, Way("auto", 8, adaptive=True)):
        Rehearsal(llm, way).play(PROMPTS, seeded(GREEDY, 3), race.lanes[0].answers)
    assert llm.target.num_passes == num_passes  # type: ignore[attr-defined]


def test_a_rehearsed_pass_takes_what_it_really_took_instead_of_what_is_calibrated() -> None:
    llm = toy_llm()
    race = Race(llm)
    race.add(PLAIN_WAY)
    race.run(PROMPTS[:1], [GREEDY])
    rehearsed, steps = Rehearsal(llm, clock=lambda: 0.0).play(PROMPTS[:1], [GREEDY], race.lanes[0].answers)
    expected = sum(TIMES.seconds(PassWork(1, 3 + i)) for i in range(39))
    assert rehearsed.milliseconds["pass"] / 1e3 == pytest.approx(expected) == rehearsed.seconds
    assert rehearsed.num_steps == len(steps) == 39
    rehearsal = Rehearsal(llm, clock=lambda: 0.0)
    rehearsal.times = PassTimes((1,), (0.25,))
    assert rehearsal.play(PROMPTS[:1], [GREEDY], race.lanes[0].answers)[0].seconds == pytest.approx(39 * 0.25)


def test_prompts_that_are_read_in_chunks_or_are_the_same_are_mixed_up() -> None:
    llm = toy_llm(max_model_len=700, num_blocks=4096)
    prompts = [[i % 8 for i in range(600)], [1, 2, 3], [1, 2, 3]]
    params = seeded(SamplingParams(temperature=1.0, seed=1, max_tokens=20), 3)
    race = Race(llm)
    race.add(PLAIN_WAY)
    race.run(prompts, params)
    answers = race.lanes[0].answers
    assert answers[1] != answers[2]
    Rehearsal(llm, Way("ngram", 4)).play(prompts, params, answers)


def test_a_wrong_record_is_taken_for_the_answer() -> None:
    clock = PresetClock(lambda: 0.0)
    target = RecordedTarget(8, 100, clock, lambda work, drafts: 0.5, no_states)
    target.expect([[1, 2, 3]])
    with pytest.raises(AssertionError, match="not expected"):
        target.forward([Rows([1, 3], 0, 1, [0])])


def test_logits_of_draft_rows_are_of_other_positions_or_stay_from_the_pass_before() -> None:
    target = RecordedTarget(8, 100, PresetClock(lambda: 0.0), lambda work, drafts: 0.5, no_states)
    target.expect([[1, 2, 3, 4, 5], [6, 7, 0]])
    first = target.forward([Rows([1, 2], 0, 1, [0]), Rows([6, 5, 5], 0, 3, [9])])
    assert [rows.argmax(-1).tolist() for rows in first.logits] == [[3], [7, 0, 0]]
    second = target.forward([Rows([3, 4, 4], 2, 3, [0])])
    assert [rows.argmax(-1).tolist() for rows in second.logits] == [[4, 5, 0]]
    assert [int((rows == 0.0).sum()) for rows in second.logits] == [3]
    many = target.forward([Rows([3] * 40, 2, 40, [0])])
    assert many.logits[0].argmax(-1).tolist() == [4, 5, *[0] * 38]


def test_the_clock_is_not_set_by_what_a_pass_should_take() -> None:
    ticks = itertools.count(0.0, 1.0)
    clock = PresetClock(lambda: next(ticks))
    start = clock()
    clock.replace(start, 0.25)
    assert clock() == pytest.approx(start + 0.25 + 1.0)


def test_a_correction_mixes_passes_with_the_rest() -> None:
    measured = dict.fromkeys(PHASES, 3.0) | {"pass": 20.0}
    rehearsed = dict.fromkeys(PHASES, 1.0) | {"pass": 10.0}
    correction = Correction.between(measured, rehearsed)
    assert (correction.passes, correction.others) == (2.0, 3.0)
    nothing = dict.fromkeys(PHASES, 0.0)
    assert Correction.between(nothing, rehearsed) == Correction.between(measured, nothing) == Correction()
