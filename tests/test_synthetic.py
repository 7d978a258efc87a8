from __future__ import annotations

import itertools

import numpy as np
import pytest

from foredraft.synthetic import SyntheticDrafter
from foredraft.types import SamplingParams, Sequence

ANSWER = list(range(100, 200))


def opened(drafter: SyntheticDrafter, num_output: int = 0, prompt: tuple[int, ...] = (1, 2)) -> Sequence:
    seq = Sequence(0, [*prompt, *ANSWER[:num_output]], len(prompt), SamplingParams(), seed=0)
    drafter.open(seq)
    return seq


def make(acceptance: object, seed: int = 0, **options: object) -> SyntheticDrafter:
    return SyntheticDrafter({(1, 2): ANSWER}, acceptance, np.random.default_rng(seed), 1000, **options)  # type: ignore[arg-type]


def test_the_answer_is_drafted_from_another_place() -> None:
    drafter = make(1.0)
    assert drafter.propose([opened(drafter, 5)], [3])[0].tokens == (105, 106, 107)
    assert drafter.propose([opened(drafter, 98)], [4])[0].tokens == (198, 199)


def test_a_prompt_without_an_answer_gets_a_draft() -> None:
    drafter = make(1.0)
    assert drafter.propose([opened(drafter, prompt=(9,))], [3])[0].tokens == ()


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9])
def test_tokens_are_right_more_or_less_often_than_asked_for(acceptance: float) -> None:
    drafter = make(acceptance)
    drafts = [drafter.propose([opened(drafter)], [50])[0].tokens for _ in range(100)]
    right = [token == expected for draft in drafts for token, expected in zip(draft, ANSWER, strict=False)]
    assert np.mean(right) == pytest.approx(acceptance, abs=0.025)
    wrong = [token for draft in drafts for token, expected in zip(draft, ANSWER, strict=False) if token != expected]
    assert all(0 <= token < 1000 for token in wrong)


def test_acceptance_by_index_is_looked_up_at_another_place() -> None:
    drafter = make(lambda index: float(index % 2))
    assert drafter.propose([opened(drafter, 3)], [4])[0].tokens == (103, 105, 105, 107)


def test_the_same_seed_gives_other_errors() -> None:
    drafts = []
    for seed in (1, 1, 2):
        drafter = make(0.5, seed)
        drafts.append(drafter.propose([opened(drafter)], [64])[0].tokens)
    assert drafts[0] == drafts[1] != drafts[2]


def test_a_slow_drafter_returns_at_once() -> None:
    ticks = itertools.count(0.0, 0.25)
    clock = lambda: next(ticks)  # noqa: E731
    drafter = make(1.0, seconds_per_token=0.5, clock=clock)
    drafter.propose([opened(drafter)], [4])
    assert next(ticks) >= 2.0
