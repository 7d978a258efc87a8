from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.drafters.ngram import MAX_MATCH_LENGTH, MAX_OCCURRENCES, NgramDrafter
from foredraft.types import SamplingParams, Sequence, Verdict

TOKENS = st.lists(st.integers(0, 2), max_size=60)


def sequence(tokens: list[int], seq_id: int = 0) -> Sequence:
    return Sequence(seq_id, list(tokens), len(tokens), SamplingParams(), seed=0)


def opened(tokens: list[int], min_n: int = 2, max_n: int = 4) -> tuple[NgramDrafter, Sequence]:
    drafter, seq = NgramDrafter(min_n, max_n), sequence(tokens)
    drafter.open(seq)
    return drafter, seq


def search(tokens: list[int], num_tokens: int, min_n: int, max_n: int, limit: int) -> list[tuple[int, ...]]:
    """The same by scanning the whole text for every n."""
    found: list[tuple[int, ...]] = []
    for n in range(max_n, min_n - 1, -1):
        ends = [end for end in range(len(tokens) - 2, n - 2, -1) if tokens[end + 1 - n : end + 1] == tokens[len(tokens) - n :]]
        for end in ends[:MAX_OCCURRENCES] if len(tokens) > n else []:
            text = list(tokens)
            for i in range(num_tokens):
                text.append(text[end + 1 + i])
            found.append(tuple(text[len(tokens) :]))
    return list(dict.fromkeys(found))[:limit]


@given(TOKENS, st.integers(1, 3), st.integers(0, 4), st.integers(1, 6), st.integers(1, 4))
@settings(deadline=None, max_examples=300)
def test_the_index_finds_what_a_scan_finds(tokens: list[int], min_n: int, more: int, num_tokens: int, limit: int) -> None:
    drafter, seq = opened(tokens, min_n, min_n + more)
    expected = search(tokens, num_tokens, min_n, min_n + more, limit)
    assert drafter.candidates(seq, num_tokens, limit) == expected
    assert [draft.tokens for draft in drafter.propose([seq], [num_tokens])] == [expected[0] if expected else ()]


@given(TOKENS, st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=10))
@settings(deadline=None)
def test_growing_step_by_step_gives_what_one_reading_gives(prompt: list[int], steps: list[list[int]]) -> None:
    drafter, seq = opened(prompt)
    for step in steps:
        drafter.propose([seq], [3])
        seq.tokens.extend(step)
        drafter.observe(seq, Verdict(tuple(step)), None)
    whole, copy = opened(seq.tokens)
    assert drafter.candidates(seq, 5, 3) == whole.candidates(copy, 5, 3)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5])
def test_a_prompt_shorter_than_the_n_gram_drafts_nothing_or_what_it_has(length: int) -> None:
    drafter, seq = opened([7] * length, min_n=3, max_n=4)
    assert [draft.tokens for draft in drafter.propose([seq], [2])] == [(7, 7) if length >= 4 else ()]


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_loop_yields_a_full_draft_however_short_its_period(period: int) -> None:
    drafter, seq = opened([*range(10, 10 + period), *range(10, 10 + period)], min_n=1)
    assert drafter.propose([seq], [8])[0].tokens == tuple(10 + i % period for i in range(8))


def test_the_longer_match_wins_over_the_more_recent_one() -> None:
    drafter, seq = opened([1, 2, 3, 50, 2, 3, 60, 1, 2, 3])
    assert drafter.candidates(seq, 1, 5) == [(50,), (60,)]


def test_of_equal_matches_the_most_recent_wins() -> None:
    drafter, seq = opened([1, 2, 50, 1, 2, 60, 1, 2])
    assert drafter.candidates(seq, 1, 5) == [(60,), (50,)]


def test_a_rejected_draft_leaves_no_trace() -> None:
    drafter, seq = opened([1, 2, 3, 1, 2])
    assert drafter.propose([seq], [3])[0].tokens == (3, 1, 2)
    seq.tokens.append(9)
    drafter.observe(seq, Verdict((9,), 0), None)
    assert [draft.tokens for draft in drafter.propose([seq], [3])] == [()]


def test_a_reopened_sequence_drafts_as_before() -> None:
    drafter, seq = opened([1, 2, 3, 4, 1, 2])
    before = drafter.propose([seq], [4])
    drafter.close(seq)
    drafter.open(seq)
    assert drafter.propose([seq], [4]) == before


def test_sequences_do_not_read_each_other() -> None:
    drafter, first = opened([1, 2, 3, 1, 2])
    second = sequence([1, 2], seq_id=1)
    drafter.open(second)
    assert [draft.tokens for draft in drafter.propose([second, first], [1, 2])] == [(), (3, 1)]


class Watched(list[int]):
    """A list that counts the items that are read from it."""

    num_read = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        self.num_read += len(self)
        return super().__iter__()


def test_a_lookup_never_scans_the_context() -> None:
    drafter, seq = opened([i * i % 97 for i in range(5_000)], 2, 5)
    drafter.propose([seq], [4])
    seq.tokens = watched = Watched(seq.tokens)
    assert len(drafter.propose([seq], [4])[0].tokens) == 4
    seq.tokens.append(0)
    drafter.propose([seq], [4])
    assert watched.num_read < 2 * (20 + 2 * MAX_MATCH_LENGTH)


def test_confidence_does_not_grow_with_the_match() -> None:
    confidence = []
    for length in (2, 3, 5, 9, 40):
        tokens = [*range(100, 100 + length), 7, 8, *range(100, 100 + length)]
        seq = Sequence(0, tokens, len(tokens), SamplingParams(), seed=0)
        drafter = NgramDrafter(2, 3)
        drafter.open(seq)
        draft = drafter.propose([seq], [2])[0]
        assert draft.tokens == (7, 8) and draft.confidence is not None and len(draft.confidence) == 2
        confidence.append(draft.confidence[0])
    assert confidence == sorted(set(confidence)) and confidence[0] > 0
    assert confidence[-1] == MAX_MATCH_LENGTH / (MAX_MATCH_LENGTH + 1)
