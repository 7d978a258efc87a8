from __future__ import annotations

from dataclasses import replace

import pytest

from foredraft.lanes import PLAIN_WAY, Lane, Race, Way, rotated, seeded
from foredraft.types import ConfigError, SamplingParams
from toy_llm import toy_llm

GREEDY = SamplingParams(temperature=0.0, seed=3, max_tokens=40)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=40)
WAYS = (PLAIN_WAY, Way("ngram", 3), Way("suffix", 4), Way("auto", 8, adaptive=True))
PROMPTS = ([1, 2, 3], [4, 5, 6, 7, 1, 2], [3, 3])


def race_of(ways: tuple[Way, ...] = WAYS, **options: object) -> Race:
    race = Race(toy_llm(**options))
    for way in ways:
        race.add(way)
    return race


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["alone", "batch"])
def test_a_lane_decodes_something_else_than_plain(params: SamplingParams, prompts: tuple[list[int], ...]) -> None:
    race = race_of()
    race.run(prompts, seeded(params, len(prompts)), segment_tokens=7)
    plain, *others = race.lanes
    assert all(len(answer) == 40 for answer in plain.answers)
    assert [lane.answers for lane in others] == [plain.answers] * 3
    assert others[0].speculation.accepted_tokens > 0 == plain.speculation.drafted_tokens


def test_segments_of_two_lanes_are_not_the_same_stretch_of_text() -> None:
    race = race_of()
    race.run(PROMPTS[:1], [GREEDY], segment_tokens=6)
    for lane in race.lanes:
        ends = [sum(one.num_tokens for one in lane.segments[: i + 1]) for i in range(len(lane.segments))]
        # The first token is not timed; a step may go past the end of a segment by what it drafted.
        assert ends[-1] == 39
        assert all(0 <= end - 6 * (i + 1) <= lane.way.num_speculative_tokens for i, end in enumerate(ends[:-1]))
    assert [one.num_tokens for one in race.lanes[0].segments] == [6] * 6 + [3]


def test_the_steps_until_the_first_token_are_timed() -> None:
    race = race_of((PLAIN_WAY,))
    race.run(PROMPTS, seeded(GREEDY, 3))
    lane = race.lanes[0]
    assert lane.seconds_to_begin > 0.0
    assert lane.num_tokens == 3 * 39 == sum(step.num_emitted for step in lane.steps)
    assert lane.milliseconds()["pass"] / 1e3 <= lane.seconds


def test_one_lane_always_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    run_segment = Lane.run_segment

    def noted(lane: Lane, num_tokens: int) -> None:
        order.append(lane.way.label)
        run_segment(lane, num_tokens)

    monkeypatch.setattr(Lane, "run_segment", noted)
    race = race_of((PLAIN_WAY, Way("ngram", 1)))
    race.run(PROMPTS[:1], [replace(GREEDY, max_tokens=5)], segment_tokens=1)
    assert order[:4] == ["plain", "ngram K=1", "ngram K=1", "plain"]
    order.clear()
    race.run(PROMPTS[:1], [replace(GREEDY, max_tokens=5)], segment_tokens=1, turn=1)
    assert order[0] == "ngram K=1"


def test_rotating_loses_or_repeats_an_item() -> None:
    lanes = race_of().lanes
    assert [rotated(lanes, turn)[0] for turn in range(5)] == [*lanes, lanes[0]]
    assert all(set(rotated(lanes, turn)) == set(lanes) for turn in range(5))


def test_lanes_that_do_not_fit_into_the_cache_together_push_each_other_out() -> None:
    race = race_of(num_blocks=30)
    with pytest.raises(ConfigError, match="4 lanes of 1 prompts may need 44 cache blocks, but 30 are free"):
        race.run(PROMPTS[:1], [GREEDY])


def test_a_race_leaves_blocks_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    race = race_of()
    before = race.llm.kv.num_available
    race.run(PROMPTS, seeded(GREEDY, 3))
    assert race.llm.kv.num_available == before

    def fail(lane: Lane, num_tokens: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Lane, "run_segment", fail)
    with pytest.raises(KeyboardInterrupt):
        race.run(PROMPTS, seeded(GREEDY, 3))
    assert race.llm.kv.num_available == before


def test_an_answer_that_ends_with_its_first_token_hangs_or_fails() -> None:
    race = race_of(eos_ids=range(8))
    race.run(PROMPTS, seeded(GREEDY, 3))
    assert [len(answer) for answer in race.lanes[0].answers] == [1, 1, 1]
    assert race.lanes[0].segments == [] and race.lanes[0].seconds == 0.0


def test_an_answer_that_is_recalled_is_not_known_to_the_drafter() -> None:
    plain = race_of((PLAIN_WAY,))
    plain.run(PROMPTS[:1], [SAMPLED])
    answers = plain.lanes[0].answers
    lengths = []
    for tenant in ("other", "same"):
        race = race_of((Way("suffix", 4),))
        race.lanes[0].recall(PROMPTS[:1], answers, tenant)
        race.run(PROMPTS[:1], [SAMPLED], tenant="same")
        lengths.append(race.lanes[0].speculation.acceptance_length)
    assert lengths[1] > lengths[0] + 0.5


def test_the_warm_up_is_known_to_later_requests() -> None:
    race = Race(toy_llm())
    drafters = race.llm.new_drafters("suffix")
    race.add(Way("suffix", 4), drafters)
    assert race.warm_up(PROMPTS[0], SAMPLED).max_tokens == 8
    shared = drafters["suffix"].shared  # type: ignore[attr-defined]
    assert shared.select("warm-up") and not shared.select("")


@pytest.mark.parametrize(
    ("way", "label"),
    [(PLAIN_WAY, "plain"), (Way("ngram", 0), "plain"), (Way("ngram", 4), "ngram K=4"), (Way("auto", 8, adaptive=True), "auto")],
)
def test_a_way_has_another_label(way: Way, label: str) -> None:
    assert way.label == label


def test_answers_of_a_batch_share_a_seed() -> None:
    assert [one.seed for one in seeded(GREEDY, 3)] == [3, 4, 5]
