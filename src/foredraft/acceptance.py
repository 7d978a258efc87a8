"""How often a drafter is right: by position and by its own confidence, over all requests and in the one at hand.

Owns: the counts and how they become probabilities.  Does not know: what drafting costs, or what is done with an estimate.

A probability starts from all outcomes of the drafter's tokens of like confidence, is refined by their position in the draft once
there are outcomes for it, and is then shifted, in log-odds, by how this request has fared: few outcomes shift little, and
the shift follows a request that changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq

NUM_POSITIONS, NUM_CLASSES = 8, 16
PRIOR_WEIGHT, MAX_TRIALS = 6.0, 400.0
SHIFT_RATE, SHIFT_DECAY, MAX_SHIFT = 0.4, 0.01, 5.0
UNKNOWN = NUM_CLASSES - 1


def confidence_class(confidence: float) -> int:
    """The class of a drafter's own belief in a token: by odds, finer than a factor of two; the last class is for no belief."""
    if confidence >= 1.0:
        return UNKNOWN - 1
    odds = confidence / (1.0 - confidence)
    return max(0, min(UNKNOWN - 1, int(6.5 + 1.5 * math.log2(odds)))) if odds > 0.0 else 0


def classes_of(confidence: Iterable[float] | None, num_tokens: int) -> list[int]:
    """One class per draft token."""
    return [UNKNOWN] * num_tokens if confidence is None else [confidence_class(value) for value in confidence]


class Shift:
    """How one request differs from the rest, for one drafter, in log-odds."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class Acceptance:
    """One drafter's counts over all requests."""

    def __init__(self) -> None:
        self._hits = [0.0] * (NUM_POSITIONS * NUM_CLASSES)
        self._trials = [0.0] * (NUM_POSITIONS * NUM_CLASSES)
        self._class_hits = [0.0] * NUM_CLASSES
        self._class_trials = [0.0] * NUM_CLASSES
        self._position_hits = [0.0] * NUM_POSITIONS
        self._position_trials = [0.0] * NUM_POSITIONS
        self._log_odds: list[float | None] = [None] * (NUM_POSITIONS * NUM_CLASSES)

    def reach(self, classes: Seq[int], shift: Shift, least: float = 0.0) -> list[float]:
        """Survival probabilities of a draft whose tokens have these classes; ends where they fall below ``least``."""
        alive, reached, offset = 1.0, [], shift.value
        log_odds = self._log_odds
        for position, index in enumerate(classes):
            cell = min(position, NUM_POSITIONS - 1) * NUM_CLASSES + index
            known = log_odds[cell]
            if known is None:
                known = log_odds[cell] = _logit(self._probability(cell))
            alive /= 1.0 + math.exp(-known - offset)
            if alive < least:
                break
            reached.append(alive)
        return reached

    def learn(self, position: int, index: int, came: bool, shift: Shift) -> None:
        """Count the outcome of one token, those before which were right."""
        position = min(position, NUM_POSITIONS - 1)
        cell = position * NUM_CLASSES + index
        known = self._log_odds[cell]
        if known is None:
            known = _logit(self._probability(cell))
        expected = 1.0 / (1.0 + math.exp(-known - shift.value))
        moved = (1.0 - SHIFT_DECAY) * shift.value + SHIFT_RATE * (came - expected)
        shift.value = max(-MAX_SHIFT, min(MAX_SHIFT, moved))
        _count(self._hits, self._trials, cell, came)
        _count(self._class_hits, self._class_trials, index, came)
        _count(self._position_hits, self._position_trials, position, came)
        for cell in range(index, NUM_POSITIONS * NUM_CLASSES, NUM_CLASSES):
            self._log_odds[cell] = None  # all that fall back on this class

    def by_position(self, num_tokens: int) -> list[float]:
        """Acceptance of the first, second, ... draft token, whatever its confidence; one never tried counts as the one before."""
        estimates, before = [], 0.5
        for position in range(num_tokens):
            at = min(position, NUM_POSITIONS - 1)
            before = (self._position_hits[at] + PRIOR_WEIGHT * before) / (self._position_trials[at] + PRIOR_WEIGHT)
            estimates.append(before)
        return estimates

    def _probability(self, cell: int) -> float:
        index = cell % NUM_CLASSES
        overall = (self._class_hits[index] + 0.5 * PRIOR_WEIGHT) / (self._class_trials[index] + PRIOR_WEIGHT)
        return (self._hits[cell] + PRIOR_WEIGHT * overall) / (self._trials[cell] + PRIOR_WEIGHT)


def _count(hits: list[float], trials: list[float], index: int, came: bool) -> None:
    """Count one; when there are many the old ones fade."""
    if trials[index] >= MAX_TRIALS:
        trials[index] /= 2
        hits[index] /= 2
    trials[index] += 1.0
    hits[index] += came


def _logit(probability: float) -> float:
    clipped = max(1e-4, min(1.0 - 1e-4, probability))
    return math.log(clipped / (1.0 - clipped))
