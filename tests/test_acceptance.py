from __future__ import annotations

import random

import pytest

from foredraft.acceptance import NUM_CLASSES, UNKNOWN, Acceptance, Shift, classes_of, confidence_class
from foredraft.planner import survival


def learn(acceptance: Acceptance, position: int, index: int, came: bool, shift: Shift) -> None:
    """One token's outcome."""
    acceptance.follow([1] * (position + 1), [index] * (position + 1), position, [int(came)], shift)


def taught(acceptance: Acceptance, probabilities: list[float], num: int, index: int = UNKNOWN, shift: Shift | None = None) -> None:
    """Drafts of tokens that are right with these probabilities."""
    generator, shift = random.Random(0), shift or Shift()
    for _ in range(num):
        for position, probability in enumerate(probabilities):
            came = generator.random() < probability
            learn(acceptance, position, index, came, shift)
            if not came:
                break


def test_positions_are_mixed_up() -> None:
    acceptance, true = Acceptance(), [0.9, 0.5, 0.8]
    taught(acceptance, true, 3000)
    assert acceptance.reach([UNKNOWN] * 3, Shift()) == pytest.approx(survival(true), abs=0.05)
    assert acceptance.by_position(3) == pytest.approx(true, abs=0.05)


def test_confidence_is_believed_or_ignored() -> None:
    """A drafter's belief orders its drafts; what it is worth is learned."""
    acceptance = Acceptance()
    sure, unsure = confidence_class(0.9), confidence_class(0.3)
    taught(acceptance, [0.6], 800, sure)
    taught(acceptance, [0.1], 800, unsure)
    assert acceptance.reach([sure], Shift())[0] == pytest.approx(0.6, abs=0.06)
    assert acceptance.reach([unsure], Shift())[0] == pytest.approx(0.1, abs=0.05)


def test_classes_are_out_of_order_or_range() -> None:
    classes = [confidence_class(value / 1000) for value in range(1001)]
    assert classes == sorted(classes) and classes[0] == 0 and max(classes) == UNKNOWN - 1 < NUM_CLASSES - 1
    assert confidence_class(-1.0) == 0 and confidence_class(2.0) == UNKNOWN - 1
    assert len(set(classes)) >= 13
    assert classes_of(None, 3) == [UNKNOWN] * 3 and classes_of((0.5, 0.9), 2) == [confidence_class(0.5), confidence_class(0.9)]


def test_a_request_unlike_the_others_is_taken_for_one_of_them() -> None:
    acceptance = Acceptance()
    taught(acceptance, [0.2], 500)
    mine = Shift()
    taught(acceptance, [0.95], 15, shift=mine)
    assert acceptance.reach([UNKNOWN], mine)[0] > 0.5 > acceptance.reach([UNKNOWN], Shift())[0]
    for _ in range(10):
        learn(acceptance, 0, UNKNOWN, False, mine)
    assert acceptance.reach([UNKNOWN], mine)[0] < 0.35, "and it may change again"


def test_a_few_outcomes_are_taken_for_certainty() -> None:
    acceptance, shift = Acceptance(), Shift()
    for _ in range(2):
        learn(acceptance, 0, UNKNOWN, True, shift)
    assert 0.5 < acceptance.reach([UNKNOWN], shift)[0] < 0.85
    for _ in range(5000):
        learn(acceptance, 0, UNKNOWN, True, shift)
    assert acceptance.reach([UNKNOWN], shift)[0] < 1.0 and abs(shift.value) <= 5.0


def test_a_drafter_that_changes_is_judged_by_its_past() -> None:
    acceptance = Acceptance()
    taught(acceptance, [0.9], 3000)
    taught(acceptance, [0.1], 3000)
    assert acceptance.reach([UNKNOWN], Shift())[0] < 0.2


def test_positions_beyond_the_last_counted_are_lost() -> None:
    acceptance = Acceptance()
    taught(acceptance, [0.95] * 30, 300)
    reached = acceptance.reach([UNKNOWN] * 30, Shift())
    assert len(reached) == 30 and reached == sorted(reached, reverse=True)
    assert len(acceptance.by_position(30)) == 30 and acceptance.by_position(30)[-1] == pytest.approx(0.95, abs=0.05)


def test_a_hopeless_rest_is_worked_out() -> None:
    acceptance = Acceptance()
    whole = acceptance.reach([UNKNOWN] * 10, Shift())
    assert acceptance.reach([UNKNOWN] * 10, Shift(), least=0.2) == [alive for alive in whole if alive >= 0.2]
    assert acceptance.reach([UNKNOWN] * 2, Shift(), trust=0.5) == pytest.approx([alive / 2 for alive in whole[:2]])
