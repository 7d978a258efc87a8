"""Drafts of what a request's grammar leaves no choice about.

Owns: the drafter ``forced``.  Does not know: any model or text; the sequence's grammar says what is forced.
"""

from __future__ import annotations

from foredraft.config import SpeculativeConfig
from foredraft.drafters.context import DrafterContext
from foredraft.memory import DrafterBytes
from foredraft.types import Draft, FloatArray, Sequence, Verdict

CONFIDENCE = 0.99


class ForcedDrafter:
    """Drafts the tokens that must come, such as the name of the next property of a JSON object; else nothing."""

    hidden_layers: tuple[int, ...] = ()

    def open(self, seq: Sequence) -> None:
        """Nothing to do: the grammar follows the sequence itself."""

    def propose(self, seqs: list[Sequence], num_tokens: list[int]) -> list[Draft]:
        """One draft per sequence; none without a grammar, or where it leaves a choice."""
        return [_draft(seq, num) for seq, num in zip(seqs, num_tokens, strict=True)]

    def observe(self, seq: Sequence, verdict: Verdict, hidden: FloatArray | None) -> None:
        """Nothing to learn."""

    def close(self, seq: Sequence) -> None:
        """Nothing is kept."""


def _draft(seq: Sequence, num_tokens: int) -> Draft:
    tokens = () if seq.grammar is None else seq.grammar.forced(seq, num_tokens)
    return Draft(tokens, confidence=(CONFIDENCE,) * len(tokens)) if tokens else Draft()


def memory(config: SpeculativeConfig) -> DrafterBytes:
    """Nothing."""
    return DrafterBytes()


def create(config: SpeculativeConfig, context: DrafterContext) -> ForcedDrafter:
    """Factory for method ``forced``."""
    return ForcedDrafter()
