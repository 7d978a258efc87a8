from __future__ import annotations

import numpy as np
import pytest

from foredraft.sampling import STREAM_TARGET, Chance
from foredraft.testing.enumeration import outcome_probabilities
from foredraft.types import Distribution


def make_distribution(probs: dict[int, float]) -> Distribution:
    return Distribution(np.array(sorted(probs), dtype=np.int64), np.log([probs[token] for token in sorted(probs)]))


def test_code_without_chance_has_several_outcomes() -> None:
    assert outcome_probabilities(lambda chance: "only") == {"only": 1.0}


def test_draws_and_coins_are_miscounted() -> None:
    dist = make_distribution({3: 0.25, 8: 0.75})

    def run(chance: Chance) -> tuple[int, bool]:
        return chance.draw(dist, 0, STREAM_TARGET), chance.accept(0.1, 1)

    outcomes = outcome_probabilities(run)
    expected = {(3, True): 0.025, (3, False): 0.225, (8, True): 0.075, (8, False): 0.675}
    assert outcomes.keys() == expected.keys()
    for outcome, probability in expected.items():
        assert outcomes[outcome] == pytest.approx(probability, abs=1e-15)


def test_later_choice_that_depends_on_an_earlier_one_is_explored_wrongly() -> None:
    """Heads: stop.  Tails: draw from a distribution of another size, then flip again."""
    dist = make_distribution({0: 0.5, 1: 0.3, 2: 0.2})

    def run(chance: Chance) -> str:
        if chance.accept(0.5, 0):
            return "stop"
        token = chance.draw(dist, 1, STREAM_TARGET)
        return f"{token}{chance.accept(0.25, 2)}" if token else "zero"

    outcomes = outcome_probabilities(run)
    expected = {"stop": 0.5, "zero": 0.25, "1True": 0.0375, "1False": 0.1125, "2True": 0.025, "2False": 0.075}
    assert outcomes.keys() == expected.keys()
    assert outcomes == pytest.approx(expected, abs=1e-15)


def test_outcomes_reached_on_several_paths_are_not_summed() -> None:
    outcomes = outcome_probabilities(lambda chance: sum(chance.accept(0.5, i) for i in range(6)))
    assert outcomes == pytest.approx({0: 1 / 64, 1: 6 / 64, 2: 15 / 64, 3: 20 / 64, 4: 15 / 64, 5: 6 / 64, 6: 1 / 64}, abs=1e-15)


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_impossible_branch_is_run(probability: float) -> None:
    num_runs = 0

    def run(chance: Chance) -> bool:
        nonlocal num_runs
        num_runs += 1
        return chance.accept(probability, 0)

    assert outcome_probabilities(run) == {probability == 1.0: 1.0}
    assert num_runs == 1


def test_token_whose_probability_underflows_is_an_outcome() -> None:
    dist = Distribution(np.array([4, 5]), np.array([0.0, -1e300]))
    assert outcome_probabilities(lambda chance: chance.draw(dist, 0, STREAM_TARGET)) == {4: 1.0}
