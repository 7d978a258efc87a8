from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.planner import allot, best_depth, best_fixed, paying, share_of, survival, tokens_per_pass

falling = st.lists(st.floats(0.01, 1.0), max_size=4).map(lambda values: survival(values))


@pytest.mark.parametrize(("acceptance", "expected"), [(0.5, 1.94), (0.7, 2.77), (0.9, 4.10)])
def test_tokens_per_pass_differ_from_the_closed_form(acceptance: float, expected: float) -> None:
    assert tokens_per_pass([acceptance] * 4) == pytest.approx((1 - acceptance**5) / (1 - acceptance))
    assert round(tokens_per_pass([acceptance] * 4), 2) == pytest.approx(expected)
    assert tokens_per_pass([]) == 1.0


def slow_allot(survivals: list[list[float]], seconds: list[float], price: float, worth: float) -> float:
    """The best net gain over every way to give each sequence so many rows."""
    best = 0.0
    for counts in itertools.product(*(range(len(reached) + 1) for reached in survivals)):
        if sum(counts) < len(seconds):
            gain = sum(sum(reached[:count]) for reached, count in zip(survivals, counts, strict=True))
            best = max(best, worth * gain - price * (seconds[sum(counts)] - seconds[0]))
    return best


@given(
    st.lists(falling, max_size=4), st.lists(st.floats(0.0, 0.5), min_size=1, max_size=14), st.floats(0.0, 5.0), st.floats(0.1, 1.0)
)
def test_rows_are_allotted_worse_than_the_best_of_all_ways(
    survivals: list[list[float]], steps: list[float], price: float, worth: float
) -> None:
    seconds = list(itertools.accumulate(steps, initial=1.0))
    counts = allot(survivals, seconds, price, worth)
    assert all(0 <= count <= len(reached) for count, reached in zip(counts, survivals, strict=True))
    assert sum(counts) < len(seconds)
    gain = sum(sum(reached[:count]) for reached, count in zip(survivals, counts, strict=True))
    net = worth * gain - price * (seconds[sum(counts)] - seconds[0])
    assert net == pytest.approx(slow_allot(survivals, seconds, price, worth), abs=1e-9)


def test_a_free_row_is_left_or_a_dear_one_taken() -> None:
    assert allot([[0.9, 0.8], [0.1]], [1.0] * 4, 1.0) == [2, 1]
    assert allot([[0.9, 0.8], [0.1]], [1.0, 1.5, 2.0, 2.5], 1.0) == [2, 0]
    assert allot([[0.9, 0.8], [0.1]], [1.0, 2.5, 4.0, 5.5], 1.0) == [0, 0]
    assert allot([[0.9, 0.8], [0.1]], [1.0, 1.0], 1.0) == [1, 0]
    assert allot([], [1.0], 1.0) == [] and allot([[], [0.5]], [1.0], 1.0) == [0, 0]
    # The third row comes with the second: two rows alone would not pay.
    assert allot([[0.4, 0.4, 0.4]], [1.0, 1.5, 1.9, 1.9], 1.0) == [3]


def test_what_a_draft_brings_ignores_the_price_of_its_rows() -> None:
    flat = [0.2] * 3
    assert paying([0.8, 0.5, 0.1], flat) == (2, pytest.approx(0.9))
    assert paying([0.8, 0.5, 0.1], flat, worth=0.5) == (2, pytest.approx(0.25))
    assert paying([0.1, 0.1], flat) == (0, 0.0)
    assert paying([0.4, 0.35, 0.3], [0.05, 0.1, 0.9]) == (2, pytest.approx(0.6))  # the first rows are cheap, the third is not
    assert paying([0.5, 0.4], [0.6, 0.0]) == (2, pytest.approx(0.3))  # dear, then free
    assert share_of([0.8, 0.5, 0.1], 1, flat) == pytest.approx(0.6 / 0.9)
    assert share_of([0.1], 1, flat) == 1.0


def test_drafting_deeper_than_pays() -> None:
    reached = survival([0.8] * 8)
    assert best_depth(reached, lambda depth: 0.0, [0.0] * 8, 1.0) == 8
    assert best_depth(reached, lambda depth: 0.3 * depth, [0.1] * 8, 1.0) == 4
    assert best_depth(reached, lambda depth: 1.0 * depth, [0.0] * 8, 1.0) == 0
    # A call that costs much at once is worth it if it goes deep.
    assert best_depth(reached, lambda depth: 2.0, [0.0] * 8, 1.0) == 8


def test_the_best_k_is_not_the_fastest() -> None:
    generator = random.Random(0)
    for _ in range(200):
        acceptance = [generator.random() for _ in range(8)]
        per_row, per_draft = generator.random() / 3, generator.random() / 3

        def step(k: int, per_row: float = per_row, per_draft: float = per_draft) -> float:
            return 1.0 + (per_row + per_draft) * k

        k, speedup = best_fixed(acceptance, step)
        speeds = [tokens_per_pass(acceptance[:n]) / step(n) for n in range(9)]
        assert speeds[k] == pytest.approx(max(speeds)) and speedup == pytest.approx(max(speeds))
    assert best_fixed([0.1] * 4, lambda k: 1.0 + k) == (0, 1.0)
