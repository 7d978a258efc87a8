"""What is known of each drafter: what its calls cost, how often it is right, and what its drafts bring, in all and per request.

Owns: the records.  Does not know: who reads them, or what is decided by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from foredraft.acceptance import Acceptance, Shift
from foredraft.cost import DraftCost, Running

GAIN_RATE, OVERALL_RATE, TRUST_RATE = 0.15, 0.03, 0.02
# Before a drafter has a record, it is taken to bring this many tokens a draft, and that is believed for one draft.
FIRST_GAIN, FIRST_WEIGHT = 0.5, 1.0
# What may be spent at once on getting to know a drafter.
FIRST_CREDIT_SECONDS = 0.0005
# Before drafts were verified, as many are taken to have been as expected.
TRUST_WEIGHT, FIRST_EXPECTED = 10.0, 0.3
AUDIT_RATE, AUDIT_WEIGHT = 0.004, 20.0


class Gains:
    """Net tokens per draft, that is beyond the price of its rows, over ``planner.room``: comparable where rows cost more or less.

    ``own``: whatever others have.  ``fallback``: where none of those asked before has a draft that pays; ``rivalled`` is the share
    of calls where one had.
    """

    __slots__ = ("fallback", "own", "rivalled")

    def __init__(self, rate: float, own: float = FIRST_GAIN, fallback: float = FIRST_GAIN, rivalled: float = 0.5) -> None:
        self.own = Running(rate, own, FIRST_WEIGHT)
        self.fallback = Running(rate, fallback, FIRST_WEIGHT)
        self.rivalled = Running(rate, rivalled, FIRST_WEIGHT)

    def copy(self, rate: float) -> Gains:
        """The same means, to go on from at another rate."""
        return Gains(rate, self.own.mean, self.fallback.mean, self.rivalled.mean)


class Track:
    """One drafter in one request: its shift, its gains, whether it is on, and the part of a draft whose outcome is to come.

    ``gains`` are the record's own until this request has heard a draft.
    """

    __slots__ = ("classes", "gains", "is_on", "next", "shift", "tokens")

    def __init__(self, gains: Gains) -> None:
        self.shift = Shift()
        self.gains = gains
        self.is_on = True
        self.tokens: tuple[int, ...] = ()
        self.classes: list[int] = []
        self.next = 0


@dataclass
class Record:
    """One drafter over all requests.

    ``credit``: seconds that probes may take now.  ``fruitless``: probes in turn that promised nothing.
    ``expected`` and ``accepted``: tokens of the drafts that were verified.
    ``depths``: how deep to draft for so many sequences that can use so much, the share that this brings, and the estimate's age.
    ``alone``: net tokens that really came, or would have, when only this drafter is asked.
    """

    cost: DraftCost = field(default_factory=DraftCost)
    acceptance: Acceptance = field(default_factory=Acceptance)
    gains: Gains = field(default_factory=lambda: Gains(OVERALL_RATE))
    credit: float = FIRST_CREDIT_SECONDS
    fruitless: int = 0
    expected: Running = field(default_factory=lambda: Running(TRUST_RATE, FIRST_EXPECTED, TRUST_WEIGHT))
    accepted: Running = field(default_factory=lambda: Running(TRUST_RATE, FIRST_EXPECTED, TRUST_WEIGHT))

    depths: dict[tuple[int, int], tuple[int, float, int]] = field(default_factory=dict)
    alone: Running = field(default_factory=lambda: Running(AUDIT_RATE, FIRST_GAIN, AUDIT_WEIGHT))

    @property
    def trust(self) -> float:
        """Accepted over expected tokens of the drafts that were verified, at most 1: those chosen looked better than they were."""
        return min(1.0, self.accepted.mean / self.expected.mean)

    def track(self) -> Track:
        """For a new request: what is known of all is expected of it, until it has gains of its own."""
        return Track(self.gains)

    def compare(self, track: Track, emitted: Seq[int]) -> bool:
        """Count a draft's tokens against those that came; True while some are still to come."""
        track.next = self.acceptance.follow(track.tokens, track.classes, track.next, emitted, track.shift)
        if track.next < 0:
            track.tokens = ()
        return track.next >= 0


class Audit:
    """Drafts of all drafters from one point of a text, to be compared when it is known which of their tokens came.

    ``drafts``: by drafter, those tokens that pay by its own estimate; "" is the first with any, as when all are asked in turn.
    """

    __slots__ = ("_drafts", "_num_seen", "_open", "_prices", "_right", "_worth")

    def __init__(self, drafts: Mapping[str, Seq[int]], prices: Seq[float], worth: float) -> None:
        self._drafts = dict(drafts)
        self._prices, self._worth = prices, worth
        self._right = dict.fromkeys(drafts, 0)
        self._open = {name for name, tokens in drafts.items() if tokens}
        self._num_seen = 0

    def follow(self, emitted: Seq[int]) -> bool:
        """Compare with the tokens that came; True when all is known."""
        for token in emitted:
            for name in tuple(self._open):
                tokens = self._drafts[name]
                came = tokens[self._num_seen] == token
                self._right[name] += came
                if not came or self._right[name] == len(tokens):
                    self._open.discard(name)
            self._num_seen += 1
        return not self._open

    def net_tokens(self) -> dict[str, float]:
        """What each brought, or would have brought, beyond the price of its rows."""
        spent = {name: sum(self._prices[: len(tokens)], 0.0) for name, tokens in self._drafts.items()}
        return {name: self._worth * self._right[name] - price for name, price in spent.items()}
