from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.controller import Controller
from foredraft.cost import PassTimes, PassWork
from foredraft.step_plan import most_drafts, share
from foredraft.types import SamplingParams, Sequence

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
