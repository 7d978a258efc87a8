"""One distribution of the next token from counts at several match lengths and of several origins.

Owns: the classes of counts, what each class weighs before anything is known, and how their shares are mixed.  Does not know:
where counts come from, or what is drafted.

Deleted interpolation (Jelinek and Mercer, 1980): from the longest match down, each level takes its weight of what probability is
left and gives it to its tokens by their shares.  Counts that look alike have one weight, a *cell*: same origin, similar match
length, similar number of occurrences, similar number of different successors.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

OWN, SHARED, BASE = 0, 5, 10
"""First groups: the request itself, other requests (each by matches of 1, 2-3, 4-7, 8-15, 16 tokens and more), a table."""
NUM_GROUPS, CELLS_PER_GROUP = 16, 32
NUM_CELLS = NUM_GROUPS * CELLS_PER_GROUP
# When less than this share is undecided, shorter matches seldom change a draft, and looking at them costs more than they bring.
LEAST_LEFT = 0.15
# Occurrences that a match of 1, 2-3, 4-7, 8-15, 16 and more tokens, all continued alike, must have to weigh one half.
_HALF = (2.5, 1.5, 1.0, 0.6, 0.3)
_HALF_SHARED, _HALF_BASE = 1.5, 4.0

Shares = Iterable[tuple[int, float]]


def counts_cell(group: int, total: int, num_kinds: int) -> int:
    """The cell of ``total`` occurrences with ``num_kinds`` different successors."""
    kind = 0 if num_kinds == 1 else 1 if 4 * num_kinds <= total else 2 if 5 * num_kinds <= 3 * total else 3
    return (group * 8 + min((total - 1).bit_length(), 7)) * 4 + kind


def group_of(origin: int, length: int) -> int:
    """The group of a match of ``length`` tokens in the request itself (OWN) or in others (SHARED)."""
    return origin + min(length.bit_length(), 5) - 1


def base_cell(order: int, cell: int) -> int:
    """The cell of a table's context of ``order`` tokens whose counts look like ``cell`` of group 0."""
    return (BASE + order - 1) * CELLS_PER_GROUP + cell


def first_weights() -> list[float]:
    """A weight for each cell, for when nothing was learned: more occurrences, and fewer different successors, weigh more."""
    weights = []
    for group in range(NUM_GROUPS):
        half = _HALF_BASE if group >= BASE else _HALF[group % SHARED] * (_HALF_SHARED if group >= SHARED else 1.0)
        for cell in range(CELLS_PER_GROUP):
            total = 2 ** (cell // 4)
            weights.append((1.0, 0.8, 0.6, 0.3)[cell % 4] * total / (total + half))
    return weights


def mix(evidence: Iterable[tuple[int, Shares]], weights: Seq[float], rest: Shares) -> dict[int, float]:
    """Probabilities of the tokens in ``evidence`` (cells with shares, longest match first) and of ``rest``; at most 1 in all."""
    left, probs = 1.0, dict[int, float]()
    for cell, shares in evidence:
        taken = left * weights[cell]
        for token, share in shares:
            probs[token] = probs.get(token, 0.0) + taken * share
        left -= taken
        if left < LEAST_LEFT:
            return probs
    for token, share in rest:
        probs[token] = probs.get(token, 0.0) + left * share
    return probs
