"""Exact outcome probabilities of code that takes its randomness from a Chance.

Owns: running such code once for every way that chance can fall.  Does not know: what the code does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import TypeVar

import numpy as np

from foredraft.types import Distribution

Outcome = TypeVar("Outcome", bound=Hashable)


class _Branch:
    """A Chance that follows a recorded path of choices and notes which alternatives lie beyond it."""

    def __init__(self, path: list[int]) -> None:
        self.path = path
        self.probability = 1.0
        self.untried: list[list[int]] = []
        self._taken: list[int] = []

    def _choose(self, probabilities: list[float]) -> int:
        depth = len(self._taken)
        options = [i for i, probability in enumerate(probabilities) if probability > 0.0]
        if depth < len(self.path):
            choice = self.path[depth]
        else:
            choice = options[0]
            self.untried += [[*self._taken, other] for other in options[1:]]
        self._taken.append(choice)
        self.probability *= probabilities[choice]
        return choice

    def draw(self, dist: Distribution, position: int, stream: int) -> int:
        return int(dist.tokens[self._choose([float(p) for p in np.exp(dist.log_probs)])])

    def accept(self, probability: float, position: int) -> bool:
        return self._choose([1.0 - probability, probability]) == 1


def outcome_probabilities(run: Callable[[_Branch], Outcome]) -> dict[Outcome, float]:
    """The exact distribution of ``run(chance)``, by depth-first search over all its draws and coins."""
    totals: dict[Outcome, float] = defaultdict(float)
    paths: list[list[int]] = [[]]
    while paths:
        branch = _Branch(paths.pop())
        totals[run(branch)] += branch.probability
        paths += branch.untried
    return dict(totals)
