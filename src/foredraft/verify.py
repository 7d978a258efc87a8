"""Verification rules: which draft tokens stand, and the target's own token after them.

Owns: the three rules, as pure functions of a draft, the target's distributions and a source of chance.  Does not know: where the
draft came from or how a distribution was computed.

A rule reads ``row(i)``, the target's distribution after the first ``i`` draft tokens, only while the tokens before it stand, with
one exception: ``block`` reads all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from foredraft.sampling import STREAM_RESIDUAL, STREAM_TARGET, Chance
from foredraft.types import Distribution, Draft, FloatArray, Verdict

RowDistribution = Callable[[int], Distribution]
Rule = Callable[[Draft, RowDistribution, Chance, int], Verdict]


def coupled(draft: Draft, row: RowDistribution, chance: Chance, position: int) -> Verdict:
    """Accept while the draft token equals the target's own draw (Daliri et al., 2408.07978).

    With noise keyed by position the draws are those of plain decoding, so the output is too, whatever was drafted.

    Args:
        draft: K >= 0 tokens.
        row: ``row(i)`` for i in 0..K.
        chance: draws with ``STREAM_TARGET`` only.
        position: absolute position of the token that row 0 predicts.
    """
    for i, token in enumerate(draft.tokens):
        own = chance.draw(row(i), position + i, STREAM_TARGET)
        if own != token:
            return Verdict((*draft.tokens[:i], own), i)
    return _bonus(draft, row, chance, position)


def rejection(draft: Draft, row: RowDistribution, chance: Chance, position: int) -> Verdict:
    """Accept token x with probability min(1, target(x) / draft(x)), else draw from the positive part of target - draft.

    The output has the target's distribution (Leviathan et al., 2211.17192, section 2.3; Chen et al., 2302.01318).
    A draft without probabilities counts as drawn from a one-hot distribution.  Arguments as for ``coupled``.
    """
    for i, token in enumerate(draft.tokens):
        target = row(i)
        ratio = target.probability(token) / _draft_mass(draft, i)
        if not chance.accept(min(1.0, ratio), position + i):
            residual = _residual(target, np.exp(target.log_probs), draft, i)
            return Verdict((*draft.tokens[:i], chance.draw(residual, position + i, STREAM_RESIDUAL)), i)
    return _bonus(draft, row, chance, position)


def block(draft: Draft, row: RowDistribution, chance: Chance, position: int) -> Verdict:
    """Accept the longest prefix that passes the joint test of block verification (Sun et al., 2403.10444, algorithm 2).

    Needs the probabilities that the draft was drawn from; a draft without them is judged by ``rejection``.
    Arguments as for ``coupled``.
    """
    if draft.probs is None or not draft.tokens:
        return rejection(draft, row, chance, position)
    num_draft, kept, kept_joint, joint = len(draft.tokens), 0, 1.0, 1.0
    for i, token in enumerate(draft.tokens, start=1):
        joint = min(1.0, joint * row(i - 1).probability(token) / _draft_mass(draft, i - 1))
        if i == num_draft:
            threshold = joint
        else:
            target = row(i)
            excess = float(_positive_part(target, joint * np.exp(target.log_probs), draft, i).sum())
            threshold = excess / (excess + 1.0 - joint) if excess + 1.0 - joint > 0.0 else 1.0
        if chance.accept(threshold, position + i - 1):
            kept, kept_joint = i, joint
    if kept == num_draft:
        return _bonus(draft, row, chance, position)
    target = row(kept)
    residual = _residual(target, kept_joint * np.exp(target.log_probs), draft, kept)
    return Verdict((*draft.tokens[:kept], chance.draw(residual, position + kept, STREAM_RESIDUAL)), kept)


def judge(rule: Rule, draft: Draft, row: RowDistribution, chance: Chance, position: int) -> tuple[Verdict, str]:
    """A rule's verdict; where a row that it needs has no distribution, what stands before that row, and why it has none.

    Arguments after ``rule`` are the rule's.  Decoding plainly would come as far and break at the same row.
    """
    broken: list[int] = []

    def watched(i: int) -> Distribution:
        try:
            return row(i)
        except FloatingPointError:
            broken.append(i)
            raise

    while True:
        try:
            return rule(draft, watched, chance, position), ""
        except FloatingPointError as error:
            if broken[-1] == len(draft.tokens):
                return Verdict(draft.tokens, len(draft.tokens)), str(error)
            draft = draft.cut(broken[-1])


RULES: Mapping[str, Rule] = MappingProxyType({"coupled": coupled, "rejection": rejection, "block": block})


def _bonus(draft: Draft, row: RowDistribution, chance: Chance, position: int) -> Verdict:
    num_draft = len(draft.tokens)
    return Verdict((*draft.tokens, chance.draw(row(num_draft), position + num_draft, STREAM_TARGET)), num_draft)


def _draft_mass(draft: Draft, i: int) -> float:
    """Probability with which draft token i was drawn; positive, since it was drawn."""
    mass = 1.0 if draft.probs is None else draft.probs[i].probability(draft.tokens[i])
    assert mass > 0.0, f"draft token {draft.tokens[i]} at {i} has draft probability {mass}"
    return mass


def _positive_part(target: Distribution, target_mass: FloatArray, draft: Draft, i: int) -> FloatArray:
    """max(target_mass - draft, 0) on the target's support; outside of it the difference is never positive."""
    draft_mass = np.zeros_like(target_mass)
    if draft.probs is None:
        draft_mass[target.tokens == draft.tokens[i]] = 1.0
    else:
        _, here, there = np.intersect1d(target.tokens, draft.probs[i].tokens, assume_unique=True, return_indices=True)
        draft_mass[here] = np.exp(draft.probs[i].log_probs[there])
    return np.maximum(target_mass - draft_mass, 0.0)


def _residual(target: Distribution, target_mass: FloatArray, draft: Draft, i: int) -> Distribution:
    weights = _positive_part(target, target_mass, draft, i)
    support = np.flatnonzero(weights > 0.0)
    if not len(support):
        # Target and draft agree to the last bit, so a rejection has probability 0 up to rounding.
        return target
    return Distribution(target.tokens[support], np.log(weights[support] / weights[support].sum()))
