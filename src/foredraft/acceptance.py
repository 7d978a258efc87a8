"""How often a drafter is right: by position and by its own confidence, over all requests and in the one at hand.

Owns: the counts and how they become probabilities.  Does not know: what drafting costs, or what is done with an estimate.

A probability starts from all outcomes of the drafter's tokens of like confidence, is refined by their position in the draft once
there are outcomes for it, and is then shifted, in log-odds, by how this request has fared: few outcomes shift little, and
the shift follows a request that changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

NUM_POSITIONS, NUM_CLASSES = 8, 16
PRIOR_WEIGHT, MAX_TRIALS = 6.0, 400.0
SHIFT_RATE, SHIFT_DECAY, MAX_SHIFT = 0.25, 0.01, 5.0
UNKNOWN = NUM_CLASSES - 1
# Estimates are worked out again after so many further outcomes; at first more often.
OUTCOMES_PER_UPDATE = 64
RESOLUTION = 512


def _class_of(confidence: float) -> int:
    odds = confidence / (1.0 - confidence) if confidence < 1.0 else math.inf
    return 0 if odds <= 0.0 else min(UNKNOWN - 1, max(0, int(min(6.5 + 1.5 * math.log2(odds), NUM_CLASSES))))


# By the confidence in parts of RESOLUTION.
_CLASSES = tuple(_class_of(part / RESOLUTION) for part in range(RESOLUTION + 1))


# Before anything is known a token is taken to be as likely as the drafter says, but at most as likely as not.
_FIRST = tuple(min(0.5, 2.0 ** ((index - 6.0) / 1.5) / (1.0 + 2.0 ** ((index - 6.0) / 1.5))) for index in range(NUM_CLASSES))


def confidence_class(confidence: float) -> int:
    """The class of a drafter's own belief in a token: by odds, finer than a factor of two; the last class is for no belief."""
    return _CLASSES[int(RESOLUTION * min(1.0, max(0.0, confidence)))]


def classes_of(confidence: Seq[float] | None, num_tokens: int) -> list[int]:
    """One class per draft token."""
    if confidence is None:
        return [UNKNOWN] * num_tokens
    classes = _CLASSES
    return [classes[int(RESOLUTION * (value if 0.0 <= value <= 1.0 else value > 0.0))] for value in confidence]


class Shift:
    """How one request differs from the rest, for one drafter, in log-odds."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class Acceptance:
    """One drafter's outcomes over all requests, by position in the draft and class of confidence."""

    def __init__(self) -> None:
        self._hits = [0.0] * (NUM_POSITIONS * NUM_CLASSES)
        self._trials = [0.0] * (NUM_POSITIONS * NUM_CLASSES)
        self._log_odds = [_logit(first) for _ in range(NUM_POSITIONS) for first in _FIRST]
        self._num_new, self._num_due = 0, 1

    def reach(self, classes: Seq[int], shift: Shift, trust: float = 1.0, least: float = 0.0) -> list[float]:
        """Survival probabilities of a draft whose tokens have these classes, times ``trust``; ends where below ``least``."""
        alive, reached, offset, log_odds, exp = trust, [], shift.value, self._log_odds, math.exp
        row, last_row = 0, (NUM_POSITIONS - 1) * NUM_CLASSES
        for index in classes:
            alive /= 1.0 + exp(-log_odds[row + index] - offset)
            if alive < least:
                break
            reached.append(alive)
            if row < last_row:
                row += NUM_CLASSES
        return reached

    def follow(self, tokens: Seq[int], classes: Seq[int], position: int, emitted: Seq[int], shift: Shift) -> int:
        """Count outcomes of a draft's tokens from ``position`` on against those that came.

        Returns the position that is to be compared next; -1 when the draft has ended.
        """
        last, value, came = len(tokens) - 1, shift.value, True
        for token in emitted:
            came = tokens[position] == token
            cell = (position if position < NUM_POSITIONS else NUM_POSITIONS - 1) * NUM_CLASSES + classes[position]
            expected = 1.0 / (1.0 + math.exp(-self._log_odds[cell] - value))
            value += SHIFT_RATE * (came - expected) - SHIFT_DECAY * value
            if not -MAX_SHIFT < value < MAX_SHIFT:
                value = math.copysign(MAX_SHIFT, value)
            self._trials[cell] += 1.0
            self._hits[cell] += came
            self._num_new += 1
            if self._num_new >= self._num_due:
                self._update()
            position += 1
            if not came or position > last:
                break
        shift.value = value
        return position if came and position <= last else -1

    def by_position(self, num_tokens: int) -> list[float]:
        """Acceptance of the first, second, ... draft token, whatever its confidence; one never tried counts as the one before."""
        estimates, before = [], 0.5
        for position in range(num_tokens):
            cells = slice(min(position, NUM_POSITIONS - 1) * NUM_CLASSES, (min(position, NUM_POSITIONS - 1) + 1) * NUM_CLASSES)
            before = (sum(self._hits[cells], 0.0) + PRIOR_WEIGHT * before) / (sum(self._trials[cells], 0.0) + PRIOR_WEIGHT)
            estimates.append(before)
        return estimates

    def _update(self) -> None:
        """Work out the estimates, and let old outcomes fade where there are many."""
        self._num_new, self._num_due = 0, min(2 * self._num_due, OUTCOMES_PER_UPDATE)
        hits, trials = self._hits, self._trials
        for index in range(NUM_CLASSES):
            cells = range(index, NUM_POSITIONS * NUM_CLASSES, NUM_CLASSES)
            num = sum((trials[cell] for cell in cells), 0.0)
            overall = (sum((hits[cell] for cell in cells), 0.0) + _FIRST[index] * PRIOR_WEIGHT) / (num + PRIOR_WEIGHT)
            for cell in cells if num else ():
                self._log_odds[cell] = _logit((hits[cell] + PRIOR_WEIGHT * overall) / (trials[cell] + PRIOR_WEIGHT))
                if trials[cell] > MAX_TRIALS:
                    trials[cell] /= 2
                    hits[cell] /= 2


def _logit(probability: float) -> float:
    clipped = max(1e-4, min(1.0 - 1e-4, probability))
    return math.log(clipped / (1.0 - clipped))
