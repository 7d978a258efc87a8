from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.controller import Controller
from foredraft.cost import PassTimes, PassWork
from foredraft.ledger import LEAST_PROBES, LEFT_FOR_FRUITLESS, PROBE_SHARE, Calls
from foredraft.planner import room
from foredraft.step_plan import most_drafts, share
from foredraft.types import PHASES, Draft, SamplingParams, Sequence

wishes_lists = st.lists(st.integers(0, 64), max_size=8)


def make_sequence(num_speculative_tokens: int, num_output: int = 0, max_tokens: int = 100, num_prompt: int = 5) -> Sequence:
    seq = Sequence(0, [0] * (num_prompt + num_output), num_prompt, SamplingParams(max_tokens=max_tokens), seed=0)
    seq.num_speculative_tokens = num_speculative_tokens
    return seq


def slow_share(wishes: list[int], total: int) -> list[int]:
    """One token at a time, to the first of those who have the fewest and still want more."""
    granted = [0] * len(wishes)
    for _ in range(total):
        open_wishes = [i for i, wish in enumerate(wishes) if granted[i] < wish]
        if open_wishes:
            granted[min(open_wishes, key=lambda i: (granted[i], i))] += 1
    return granted


@given(wishes_lists, st.integers(0, 200))
def test_rows_are_shared_unfairly_or_wasted(wishes: list[int], total: int) -> None:
    granted = share(list(wishes), total)
    assert granted == slow_share(wishes, total)
    assert sum(granted) == min(sum(wishes), total)


@pytest.mark.parametrize(
    ("wishes", "total", "expected"),
    [([], 0, []), ([3], 0, [0]), ([4, 4, 4], 7, [3, 2, 2]), ([0, 5, 1], 3, [0, 2, 1]), ([2, 2], 4, [2, 2]), ([0, 0], 0, [0, 0])],
)
def test_share_of_a_known_case_changed(wishes: list[int], total: int, expected: list[int]) -> None:
    assert share(wishes, total) == expected


@pytest.mark.parametrize(
    ("max_tokens", "num_output", "max_model_len", "expected"),
    [
        (100, 0, 1000, 4),
        (1, 0, 1000, 0),  # the only token is the target's own
        (4, 0, 1000, 3),
        (5, 0, 1000, 4),
        (5, 4, 1000, 0),
        (5, 3, 1000, 1),
        (100, 0, 6, 0),  # five tokens of prompt; the sixth fills the context
        (100, 0, 7, 1),
        (100, 0, 10, 4),
        (5, 5, 5, 0),
    ],
)
def test_draft_goes_past_the_last_token_that_may_be_emitted(
    max_tokens: int, num_output: int, max_model_len: int, expected: int
) -> None:
    assert most_drafts(make_sequence(4, num_output, max_tokens), max_model_len) == expected


def test_fixed_requests_get_more_rows_than_are_left() -> None:
    seqs = [make_sequence(4), make_sequence(0), make_sequence(64, max_tokens=3), make_sequence(2)]
    for index, seq in enumerate(seqs):
        seq.seq_id, seq.drafters = index, ("any",)
    limits = [most_drafts(seq, 1000) for seq in seqs]
    assert limits == [4, 0, 2, 2]
    for num_rows_left, expected in ((100, {0: 4, 2: 2, 3: 2}), (5, {0: 2, 2: 2, 3: 1}), (0, {})):
        plan = Controller(PassTimes.unknown()).plan(seqs, limits, PassWork(4, 20), num_rows_left)
        asked = {slot: num for ask in plan.asks() for slot, num in zip(ask.slots, ask.num_tokens, strict=True)}
        assert asked == expected


def test_all_ask_a_drafter_before_it_is_known_what_a_call_costs() -> None:
    controller = Controller(PassTimes.unknown())
    seqs = [make_sequence(4) for _ in range(8)]
    for index, seq in enumerate(seqs):
        seq.seq_id, seq.drafters, seq.adaptive = index, ("any",), True
    num_asked = []
    for _ in range(3):
        plan = controller.plan(seqs, [4] * 8, PassWork(8, 40), 100)
        for ask in plan.asks():
            num_asked.append(len(ask.slots))
            plan.hear(ask, [Draft((1, 1), confidence=(0.9, 0.9))] * len(ask.slots), 1e-6)
    assert num_asked == [1, 1, 8]


def test_requests_that_ask_for_the_first_time_know_nothing_of_what_others_heard() -> None:
    """A drafter that brought nothing in other requests is not tried in each of many new ones."""
    controller = Controller(PassTimes.unknown())
    seqs = [make_sequence(4) for _ in range(8)]
    for index, seq in enumerate(seqs):
        seq.seq_id, seq.drafters, seq.adaptive = index, ("any",), True
    tracks = [controller.tracks(seq)["any"] for seq in seqs]
    for seq in seqs[:1] * 30:
        plan = controller.plan([seq], [4], PassWork(1, 5), 100)
        for ask in plan.asks():
            plan.hear(ask, [Draft()], 1e-3)
    assert all(track.gains is controller.record("any").gains for track in tracks[1:])
    assert tracks[0].gains is not controller.record("any").gains
    assert tracks[1].gains.own.mean <= 0.25


def test_a_drafter_that_never_brings_anything_is_probed_as_much_for_ever() -> None:
    controller = Controller(PassTimes.unknown())
    record = controller.record("any")
    milliseconds = dict.fromkeys(PHASES, 0.2)

    def credit_of_a_step() -> float:
        record.credit = 0.0
        controller.account(PassWork(1, 5), 1, 0, Calls(), 1, milliseconds)
        return record.credit

    first = credit_of_a_step()
    assert first == pytest.approx(PROBE_SHARE * 1e-3)
    record.fruitless = 1000
    assert credit_of_a_step() == pytest.approx(LEFT_FOR_FRUITLESS * first)
    seq = make_sequence(4)
    seq.drafters, seq.adaptive = ("any",), True
    plan = controller.plan([seq], [4], PassWork(1, 5), 100)
    for ask in plan.asks():
        plan.hear(ask, [Draft((1, 1), confidence=(0.9, 0.9))], 1e-6)
    assert record.fruitless == 0


def test_probing_takes_as_much_where_drafts_can_bring_little() -> None:
    controller = Controller(PassTimes.unknown())
    record, earned = controller.record("any"), []
    for some in (1.0, 0.49, 0.01):
        controller.room, record.credit = some, 0.0
        controller.account(PassWork(1, 5), 1, 0, Calls(), 1, dict.fromkeys(PHASES, 0.2))
        earned.append(record.credit)
    assert earned == pytest.approx([PROBE_SHARE * 1e-3 * share for share in (1.0, 0.7, LEAST_PROBES)])


def adaptive(num_computed: int) -> Sequence:
    seq = make_sequence(4, num_prompt=300)
    seq.drafters, seq.adaptive, seq.num_computed = ("any", "reader"), True, num_computed
    return seq


@pytest.mark.parametrize("is_adaptive", [True, False])
def test_a_drafter_that_reads_states_is_asked_about_a_prompt_that_no_pass_computed(is_adaptive: bool) -> None:
    for num_computed, expected in ((0, {"any"}), (299, {"any", "reader"})):
        seq = adaptive(num_computed)
        seq.adaptive = is_adaptive
        plan = Controller(PassTimes.unknown()).plan([seq], [4], PassWork(seq.num_pending, num_computed), 100, ("reader",))
        asked = set()
        for ask in plan.asks():
            asked.add(ask.drafter)
            plan.hear(ask, [Draft()], 1e-6)
        assert asked == expected
        assert seq.seq_id not in plan._ledger._resting


def test_a_prompt_in_the_same_pass_makes_time_look_cheap() -> None:
    prices = []
    for num_rows in (1, 200):
        plan = Controller(PassTimes.unknown()).plan([adaptive(299)], [4], PassWork(num_rows, 299), 100)
        next(plan.asks())
        prices.append(plan._price)
    assert prices[0] == prices[1] > 0.0


def test_calls_that_found_nothing_tell_what_a_draft_takes() -> None:
    controller = Controller(PassTimes.unknown())
    cost = controller.record("any").cost
    for drafted, is_known in (((), False), ((), False), ((1,), False), ((1,), True)):
        plan = controller.plan([adaptive(299)], [4], PassWork(1, 299), 100)
        ask = next(ask for ask in plan.asks() if ask.drafter == "any")
        plan.hear(ask, [Draft(drafted)], 1e-6 if not drafted else 1e-3)
        assert cost.is_known == is_known
    assert cost.seconds(1, 1) == pytest.approx(1e-3)


def test_row_prices_that_rise_leave_a_drafter_as_promising_as_before() -> None:
    assert room([0.0]) == 1.0 and room([]) == 1.0
    assert room([0.5]) == pytest.approx(0.25)
    assert room([0.3], worth=0.8) == pytest.approx(0.25)
    assert 0.0 < room([3.0]) < 0.01
