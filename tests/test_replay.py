from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from engine_helpers import Lab, Request, make_drafter, plain, scripted
from foredraft.drafters.ngram import NgramDrafter
from foredraft.replay import Record, Replay, replay, replay_all
from foredraft.testing.toy import ScriptedDrafter, TableTarget
from foredraft.types import ConfigError, Draft, SamplingParams, Sequence, SpeculationStats, TokenRules

PROMPTS = ((1, 2, 3, 1, 2), (5,), (1, 2, 3, 1, 2, 3, 4, 1, 2))
# Drafters that get a token id beyond the vocabulary from their script are cut by the engine only, which knows the vocabulary.
NAMES = ("ngram", "suffix", "draft_model", "draft_twin", "right", "wrong", "wrong_at_2", "too_many", "fewer", "empty")


def counters(stats: SpeculationStats) -> tuple[object, ...]:
    return (
        stats.target_passes,
        stats.drafted_tokens,
        stats.accepted_tokens,
        stats.emitted_tokens,
        stats.drafted_per_position,
        stats.accepted_per_position,
    )


def requests(temperature: float, eos: frozenset[int] = frozenset()) -> list[Request]:
    params = SamplingParams(temperature=temperature, max_tokens=30)
    return [Request(prompt, params, seed=seed, rules=TokenRules(eos)) for seed, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 7])
@pytest.mark.parametrize(("temperature", "eos"), [(0.0, frozenset()), (0.8, frozenset()), (0.9, frozenset({0}))])
def test_replay_counts_other_passes_than_the_engine_ran(
    name: str, num_tokens: int, temperature: float, eos: frozenset[int]
) -> None:
    asked = requests(temperature, eos)
    answers = [[*request.prompt, *plain(request).tokens] for request in asked]
    lab = Lab({name: make_drafter(name, TableTarget(), answers)})
    again = make_drafter(name, TableTarget(), answers)
    for request, answer in zip(asked, answers, strict=True):
        seq = request.sequence(name, num_tokens)
        lab.run(seq)  # one after the other, so that shared statistics are the same
        replayed = replay(
            again,
            answer,
            seq.num_prompt,
            num_tokens,
            max_tokens=request.params.max_tokens,
            params=request.params,
            seed=request.seed,
        )
        assert counters(replayed.stats) == counters(seq.stats)
        assert replayed.acceptance_length == seq.stats.acceptance_length


def test_a_drafter_is_left_open_or_told_nothing_of_the_end() -> None:
    answer = [1, 2, 3, 4, 5, 6]
    drafter = scripted("right", [answer])
    replay(drafter, answer, 2, 3)
    assert drafter.opened == drafter.closed == [0]
    assert [token for _, verdict in drafter.verdicts for token in verdict.tokens] == answer[2:]


def test_statistics_are_not_shared_between_records() -> None:
    first = [9, 1, 2, 3, 4, 5, 6, 7]
    drafter = make_drafter("suffix", TableTarget(), [])
    alone = replay(drafter, first, 1, 4)
    second = replay(drafter, [8, *first[1:]], 3, 4)
    assert alone.stats.accepted_tokens == 0 < second.stats.accepted_tokens


def test_positions_after_a_rejection_or_an_empty_draft_are_counted_as_tried() -> None:
    answer = list(range(40))

    def script(tokens: list[int], num_tokens: int) -> list[int]:
        start = len(tokens)
        if start % 2:
            return []
        return [start, start + 1, 0, 0][:num_tokens]

    replayed = replay(ScriptedDrafter(script), answer, 2, 4, max_tokens=100)
    # From an even length two are accepted and one recovered: odd; from an odd length one plain token: even.
    assert [one.num_accepted for one in replayed.passes[:4]] == [2, 0, 2, 0]
    assert replayed.acceptance_per_position() == [1.0, 1.0, 0.0, 0.0]
    assert replayed.survival() == pytest.approx([0.5, 0.5, 0.0, 0.0], abs=0.06)
    assert replayed.drafted_per_pass == pytest.approx(2.0, abs=0.2)


def test_passes_of_many_records_are_lost_when_put_together() -> None:
    answers = [[1, 2, 3, 4], [5, 6, 7]]
    together = replay_all(scripted("right", answers), [Record(answers[0], 1), Record(answers[1], 2)], 2)
    assert isinstance(together, Replay)
    assert together.stats.emitted_tokens == 4
    assert together.num_passes == 2


def test_time_that_no_draft_took_is_averaged_in() -> None:
    ticks: Iterator[int] = count()
    replayed = replay(scripted("right", [[1, 2, 3, 4]]), [1, 2, 3, 4], 1, 1, clock=lambda: float(next(ticks)))
    assert [one.propose_seconds for one in replayed.passes] == [1.0, 0.0]
    assert replayed.mean_propose_seconds == 1.0


def test_a_drafter_without_its_hidden_states_is_replayed_as_if_it_had_them() -> None:
    with pytest.raises(ConfigError, match="hidden states"):
        replay(scripted("right", [], hidden_layers=(1,)), [1, 2], 1, 2)


def test_a_tree_is_judged_as_a_chain() -> None:
    class Branching(NgramDrafter):
        def propose(self, seqs: list[Sequence], num_tokens: list[int]) -> list[Draft]:
            return [Draft((2, 3), parents=(-1, -1)) for _ in seqs]

    with pytest.raises(ConfigError, match="tree"):
        replay(Branching(1, 2), [1, 2, 3, 4], 1, 2)
