"""What is known of each drafter: what its calls cost, how often it is right, and what its drafts bring, in all and per request.

Owns: the records.  Does not know: who reads them, or what is decided by them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from foredraft.acceptance import Acceptance, Shift
from foredraft.cost import DraftCost, Running

GAIN_RATE, OVERALL_RATE, TRUST_RATE = 0.15, 0.03, 0.02
# Before a drafter has a record, it is taken to bring this many tokens a draft, and that is believed for one draft.
FIRST_GAIN, FIRST_WEIGHT = 0.5, 1.0
# Before drafts were verified, as many are taken to have been as expected.
TRUST_WEIGHT, FIRST_PROMISE = 20.0, 0.3


def _gains(first: tuple[float, float], rate: float) -> tuple[Running, Running]:
    return Running(rate, first[0], FIRST_WEIGHT), Running(rate, first[1], FIRST_WEIGHT)


class Track:
    """One drafter in one request: its shift, its gains, whether it is on, and the part of a draft whose outcome is to come."""

    __slots__ = ("classes", "gains", "is_on", "next", "shift", "tokens")

    def __init__(self, gains: tuple[float, float]) -> None:
        self.shift = Shift()
        self.gains = _gains(gains, GAIN_RATE)
        self.is_on = True
        self.tokens: tuple[int, ...] = ()
        self.classes: list[int] = []
        self.next = 0


@dataclass
class Record:
    """One drafter over all requests.

    ``gains``: net tokens per draft where no earlier drafter had one that pays, and where one had.  ``credit``: seconds that
    probes may take now.  ``expected`` and ``accepted``: tokens of the drafts that were verified.  ``promised`` and ``kept``: net
    tokens beyond those of an earlier drafter's draft that was passed over for this one's.
    """

    cost: DraftCost = field(default_factory=DraftCost)
    acceptance: Acceptance = field(default_factory=Acceptance)
    gains: tuple[Running, Running] = field(default_factory=lambda: _gains((FIRST_GAIN, FIRST_GAIN), OVERALL_RATE))
    credit: float = 0.0
    expected: Running = field(default_factory=lambda: Running(TRUST_RATE, 1.0, TRUST_WEIGHT))
    accepted: Running = field(default_factory=lambda: Running(TRUST_RATE, 1.0, TRUST_WEIGHT))

    promised: Running = field(default_factory=lambda: Running(TRUST_RATE, FIRST_PROMISE, TRUST_WEIGHT))
    kept: Running = field(default_factory=lambda: Running(TRUST_RATE, FIRST_PROMISE, TRUST_WEIGHT))

    def gain(self, track: Track, has_rival: bool) -> float:
        """Net tokens that a draft is expected to bring in this request, where an earlier drafter has one that pays or has none.

        The better of two drafts was taken because it looked better, so the difference is on average less than it looked.
        """
        kept = self.kept.mean / self.promised.mean if has_rival else 1.0
        return track.gains[has_rival].mean * max(0.0, min(1.0, kept))

    @property
    def trust(self) -> float:
        """Accepted over expected tokens of the drafts that were verified, at most 1: those chosen looked better than they were."""
        return min(1.0, self.accepted.mean / self.expected.mean)

    def track(self) -> Track:
        """For a new request: what is known of all is expected of it."""
        return Track((self.gains[0].mean, self.gains[1].mean))

    def compare(self, track: Track, emitted: Seq[int]) -> bool:
        """Count a draft's tokens against those that came; True while some are still to come."""
        tokens, position = track.tokens, track.next
        for token in emitted:
            came = tokens[position] == token
            self.acceptance.learn(position, track.classes[position], came, track.shift)
            position += 1
            if not came or position == len(tokens):
                track.tokens = ()
                return False
        track.next = position
        return True
