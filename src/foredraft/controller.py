"""How many tokens each request drafts in a step.

Owns: turning wishes and limits into one K per request.  Does not know: what a drafter is or what a draft costs; K is what the
request asks for, as far as the step's limits allow.
"""

from __future__ import annotations

from foredraft.types import Sequence


class FixedController:
    """K as configured: cut to what the sequence can still use, and shared fairly when the step's rows do not suffice."""

    def plan(self, seqs: list[Sequence], max_model_len: int, num_rows_left: int) -> list[int]:
        """Draft tokens for each sequence; their sum is at most ``num_rows_left``.

        A pass emits one token more than it accepts, so the last token that a request may emit is never drafted for.
        """
        wishes = [
            max(0, min(seq.num_speculative_tokens, seq.params.max_tokens - seq.num_output - 1, max_model_len - len(seq.tokens) - 1))
            for seq in seqs
        ]
        return share(wishes, num_rows_left)


def share(wishes: list[int], total: int) -> list[int]:
    """Grant wishes level by level, so that nobody gets a second token before everyone who wants one got the first."""
    if sum(wishes) <= total:
        return wishes
    granted = [0] * len(wishes)
    for depth in range(max(wishes)):
        for i, wish in enumerate(wishes):
            if depth < wish and total > 0:
                granted[i] += 1
                total -= 1
    return granted
