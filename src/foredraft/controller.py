"""The engine's side of adaptive drafting: begin a step, and tell what is known.

Owns: how estimates and decisions are told.  Does not know: how a step is decided (``step_plan``), or what is remembered
(``ledger``).

A step goes: ``plan``, for each of ``StepPlan.asks()`` a proposal that is told by ``hear``, ``choose``, the pass, ``learn``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from foredraft.cost import PassWork
from foredraft.ledger import Ledger
from foredraft.planner import allot
from foredraft.step_plan import StepPlan
from foredraft.types import Sequence


class Controller(Ledger):
    """Plans every step of an engine and learns from it; for the arguments see Ledger, for the trace ``replay_decision``."""

    def plan(
        self, seqs: list[Sequence], limits: list[int], work: PassWork, num_rows_left: int, readers: Collection[str] = ()
    ) -> StepPlan:
        """Begin a step: a draft can continue ``seqs``, each by at most ``limits[i]`` tokens; ``work`` is all else in the pass.

        ``readers`` are the drafters that read what passes computed: they have nothing to say of a prompt before its pass.
        """
        return StepPlan(self, seqs, limits, work, num_rows_left, readers)

    def snapshot(self) -> dict[str, Any]:
        """What the controller knows, for metrics: per drafter its cost, acceptance by position and expected net gain."""
        num_slots, num_drafts = self._last
        drafters = {
            name: {
                "draft_ms": 1e3 * record.cost.seconds(1, 4),
                "acceptance_per_position": record.acceptance.by_position(4),
                "net_tokens_per_draft": self.room * record.gains.own.mean,
            }
            for name, record in self._records.items()
        }
        drafting = num_drafts > 0
        return {
            "speculating": drafting,
            "reason": "drafts pay" if drafting else "no draft is expected to pay for its time",
            "num_speculative_tokens": num_drafts / num_slots if num_slots else 0.0,
            "speedup_estimate": self.speedup,
            "drafters": drafters,
        }


def replay_decision(decision: Mapping[str, Any]) -> list[int]:
    """The decision that a line of a trace leads to now; equal to its ``num_tokens`` as long as the planner is the same."""
    return allot(decision["survivals"], decision["seconds"], decision["price"], decision["worth"])
