"""One step: which drafter each request asks, and how much of its draft the pass verifies.

Owns: the decisions of a step, and what of them is told to the ledger.  Does not know: what a drafter is, or how drafts are made and
verified: it is told.

A request that is not adaptive gets its whole draft; the others get the rows that are worth their time (``planner.allot``).
A drafter whose expected gain does not cover its cost is not asked, but for probes that take at most ``PROBE_SHARE`` of the time.
A draft that is not verified, or only in part, is still compared with what comes: finding out costs no rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from foredraft.acceptance import classes_of
from foredraft.cost import PassWork
from foredraft.ledger import MAX_CREDIT_SECONDS, Calls, Ledger
from foredraft.planner import allot, best_depth, paying, room, share_of, survival
from foredraft.records import GAIN_RATE, Audit, Record, Track
from foredraft.types import Draft, Sequence

TURN_ON, STAY_ON = 1.2, 0.8
# Drafting that costs less than this, in tokens, is always done as deep as can be used.
CHEAP_TOKENS = 0.02
# Where a draft of one token costs less than this, in tokens, one as deep as can be used is tried.
TRY_TOKENS = 0.2
# How deep to draft is worked out again after so many steps.
STEPS_BETWEEN_DEPTHS = 32
# Drafters learn from being asked, so at first, where drafts pay at all, none is judged by the little that it was asked.
FIRST_AUDITS, ENOUGH_AUDITS = 10, 40
NO_DRAFT, NOBODY = Draft(), ("", 0)


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


def most_drafts(seq: Sequence, max_model_len: int) -> int:
    """Draft tokens that a sequence can still use: the last token that it may emit is never drafted for."""
    return max(0, min(seq.num_speculative_tokens, seq.params.max_tokens - seq.num_output - 1, max_model_len - len(seq.tokens) - 1))


@dataclass(frozen=True)
class Ask:
    """A call of one drafter: at most ``num_tokens[i]`` tokens for the sequence of slot ``slots[i]``."""

    drafter: str
    slots: list[int]
    num_tokens: list[int]


class _Slot:
    """A sequence that asks in this step, the most that it can use, and the best draft that was heard for it.

    ``only``: the one drafter to ask, "" for all.  ``audited``: every drafter's draft as far as it pays, where all are asked.
    """

    __slots__ = ("audited", "draft", "drafter", "limit", "net", "only", "reached", "seq", "tracks", "was_asked")

    def __init__(self, seq: Sequence, limit: int, tracks: dict[str, Track]) -> None:
        self.seq, self.limit, self.tracks = seq, limit, tracks
        self.drafter, self.draft, self.net = "", NO_DRAFT, 0.0
        self.reached: list[float] = []
        self.only, self.was_asked = "", False
        self.audited: dict[str, tuple[int, ...]] | None = None


class StepPlan:
    """One step: whom to ask, what was heard, what is taken, and what came of it."""

    def __init__(
        self,
        ledger: Ledger,
        seqs: list[Sequence],
        limits: list[int],
        work: PassWork,
        num_rows_left: int,
        readers: Collection[str] = (),
    ) -> None:
        self.seqs, self.work = seqs, work
        self._limits, self._readers = limits, readers
        self._slots: dict[int, _Slot] = {}
        self._ledger = ledger
        self._num_rows_left = num_rows_left
        self._calls = Calls()
        self._price, self._worth, self._share, self._room = 0.0, 1.0, 1.0, 1.0
        self._row_prices: list[float] = []

    # -------------------------------------------------------------------------------------------- asking

    def asks(self) -> Iterator[Ask]:
        """The calls to make, each decided when those before it were heard; see ``Ledger.turn``."""
        ledger, limits = self._ledger, self._limits
        fixed = [i for i, seq in enumerate(self.seqs) if not seq.adaptive and seq.drafters and limits[i]]
        wishes = dict(zip(fixed, share([limits[i] for i in fixed], self._num_rows_left), strict=True))
        awake = ledger.awake(self.seqs, limits)
        self._slots = {i: _Slot(self.seqs[i], limits[i], self._tracks(self.seqs[i])) for i in (*fixed, *awake)}
        if fixed:
            yield from self._fixed_asks({i: wish for i, wish in wishes.items() if wish})
        if not awake:
            return
        # What else is in this pass, as a prompt, makes it longer, but time no cheaper.
        alone = PassWork(len(self.seqs), self.work.keys_read)
        self._price, self._worth = ledger.prices(len(self.seqs), ledger.plain_seconds(alone, len(self.seqs)))
        here = PassWork(self.work.num_rows + sum(wishes.values()), self.work.keys_read)
        seconds = ledger.cost.row_seconds(here, len(awake), max(limits[i] for i in awake))
        self._row_prices = [self._price * one for one in seconds]
        self._room = ledger.room = room(self._row_prices, self._worth)
        slots = {i: self._slots[i] for i in awake}
        kinds = dict.fromkeys(tuple(slot.tracks) for slot in slots.values())
        records = {name: ledger.record(name) for kind in kinds for name in kind}
        order = sorted(records, key=lambda name: ledger.turn(records[name], self._price))
        self._begin_audit(slots, order, records)
        for name in order:
            ask = self._free_ask(name, records[name], {i: slot.tracks[name] for i, slot in slots.items() if name in slot.tracks})
            if ask is not None:
                yield ask
        for slot in slots.values():
            ledger.settle(slot.seq)

    def _tracks(self, seq: Sequence) -> dict[str, Track]:
        """Of the drafters that can draft for a sequence in this step."""
        tracks = self._ledger.tracks(seq)
        if not self._readers or seq.num_pending == 1:
            return tracks
        return {name: track for name, track in tracks.items() if name not in self._readers}

    def _begin_audit(self, slots: Mapping[int, _Slot], order: list[str], records: Mapping[str, Record]) -> None:
        """Choose whom to ask: all in turn, or only one; now and then all are asked, to see who would have brought what."""
        if len(order) < 2:
            return
        ledger = self._ledger
        # By guesses alone the cheapest would look best.
        only = ledger.better_alone(order, self._price, self._room) if ledger.num_audits >= ENOUGH_AUDITS else ""
        is_early = ledger.num_audits < FIRST_AUDITS
        may_audit = all(
            record.credit > 0.0 or (is_early and not ledger.is_dear(record, self._price)) for record in records.values()
        )
        for slot in slots.values():
            slot.only = only if only in slot.tracks else ""
            is_free = slot.seq.seq_id not in ledger.audits and len(slot.tracks) == len(order)
            if may_audit and is_free and any(track.is_on for track in slot.tracks.values()):
                slot.audited = {}
                may_audit = False

    def _fixed_asks(self, wishes: Mapping[int, int]) -> Iterator[Ask]:
        for name in dict.fromkeys(name for i in wishes for name in self._slots[i].tracks):
            asked = [i for i in wishes if name in self._slots[i].tracks]
            yield Ask(name, asked, [wishes[i] for i in asked])

    def _free_ask(self, name: str, record: Record, candidates: Mapping[int, Track]) -> Ask | None:
        """Ask for those requests where this drafter's expected gain covers its cost, and probe for one other if credit allows."""
        ledger, num = self._ledger, len(candidates)
        deepest = max(self._limits[i] for i in candidates)
        # The first calls tell what a token costs; of a slow drafter one is dear enough.
        depth, seconds = self._depth(record, num, deepest if record.cost.is_known else 1)
        least = self._price * (seconds + ledger.own_seconds.mean) / num
        asked, idle = [], []
        for i, track in candidates.items():
            slot = self._slots[i]
            # Where a draft is there that pays, another is asked for only if it is better as a rule: of two drafts the one that
            # looks better often only looks so.
            is_fallback = slot.was_asked and slot.net <= 0.0
            gain = self._room * (track.gains.fallback if is_fallback else track.gains.own).mean - slot.net
            is_wanted = not slot.only or slot.only == name
            track.is_on = is_wanted and self._share * gain > max(0.0, (STAY_ON if track.is_on else TURN_ON) * least)
            if track.is_on:
                asked.append(i)
            elif slot.audited is not None:
                asked.append(i)
                self._calls.probed.append(name)
            elif not track.tokens:
                idle.append(i)
        if not record.cost.is_known:  # one call tells what it costs; for all at once that might be much
            asked = asked[:1]
        if idle and record.credit > 0.0 and record.credit >= min(record.cost.seconds(1, depth), MAX_CREDIT_SECONDS):
            asked.append(idle[-1])
            self._calls.probed.append(name)
        return Ask(name, asked, [min(depth, self._limits[i]) for i in asked]) if asked else None

    def _depth(self, record: Record, num_seqs: int, deepest: int) -> tuple[int, float]:
        """(how deep to draft, seconds of that): as deep as can be used, less where drafting costs much and survival falls.

        Leaves in ``_share`` what a draft of that depth is expected to bring of what the deepest would.
        """
        seconds, self._share = record.cost.seconds(num_seqs, deepest), 1.0
        if self._price * seconds < CHEAP_TOKENS * num_seqs:
            return deepest, seconds
        # What a deep draft costs is guessed until there was one, and what was never tried would stay a guess.
        if record.cost.deepest < deepest and self._price * record.cost.seconds(num_seqs, 1) < TRY_TOKENS * num_seqs:
            return deepest, seconds
        depth, self._share, age = record.depths.get((num_seqs, deepest), (0, 1.0, STEPS_BETWEEN_DEPTHS))
        if age >= STEPS_BETWEEN_DEPTHS:
            reached = survival(record.acceptance.by_position(deepest))
            depth = max(
                1, best_depth(reached, lambda d: record.cost.seconds(num_seqs, d) / num_seqs, self._row_prices, self._price)
            )
            self._share, age = share_of(reached, depth, self._row_prices), 0
        record.depths[num_seqs, deepest] = depth, self._share, age + 1
        return depth, record.cost.seconds(num_seqs, depth)

    def hear(self, ask: Ask, drafts: list[Draft], seconds: float) -> None:
        """Take the drafts of an ask, which took ``seconds``, and keep the best for each sequence."""
        record = self._ledger.record(ask.drafter)
        if record.cost.is_known or any(draft.tokens for draft in drafts):  # what its first drafts take, it tells by making some
            record.cost.observe(len(ask.slots), max(ask.num_tokens), seconds)
        self._calls.names.append(ask.drafter)
        self._calls.seconds += seconds
        if ask.drafter in self._calls.probed:
            record.credit -= seconds / len(ask.slots)
            record.fruitless += 1
        trust, prices, worth = record.trust, self._row_prices, self._worth
        least = 0.5 * prices[0] if prices else 0.0
        for i, draft in zip(ask.slots, drafts, strict=True):
            slot, reached, num_paying, net = self._slots[i], list[float](), 0, 0.0
            track = slot.tracks[ask.drafter]
            if draft.tokens:
                # A drawn draft must not be cut or preferred for what was drawn: that would bias the rules that weigh it.
                confidence = None if draft.probs is not None else draft.confidence
                track.tokens, track.classes, track.next = draft.tokens, classes_of(confidence, len(draft.tokens)), 0
                self._ledger.expect(slot.seq, record, track)
                reached = record.acceptance.reach(track.classes, track.shift, trust, least)
                num_paying, net = paying(reached, prices, worth)
                if num_paying:
                    record.fruitless = 0
            if not slot.seq.adaptive:
                if not slot.drafter or sum(reached, 0.0) > sum(slot.reached, 0.0):
                    slot.drafter, slot.draft, slot.reached = ask.drafter, draft, reached
                continue
            self._count_gain(slot, track, record, net / self._share)
            slot.was_asked = True
            if slot.audited is not None:
                slot.audited[ask.drafter] = draft.tokens[:num_paying]
            if (net > slot.net or not slot.drafter) and slot.only in ("", ask.drafter):
                slot.drafter, slot.draft, slot.reached, slot.net = ask.drafter, draft, reached, net

    def _count_gain(self, slot: _Slot, track: Track, record: Record, gain: float) -> None:
        """A draft promises ``gain``, had it been as deep as could be used; it is kept as it would be if rows were free."""
        gain /= self._room
        is_first = slot.audited is not None or not slot.was_asked
        if track.gains is record.gains:
            track.gains = record.gains.copy(GAIN_RATE)
        for gains in (track.gains, record.gains):
            if is_first:
                gains.own.add(gain)
            if slot.was_asked:
                gains.rivalled.add(slot.net > 0.0)
                if slot.net <= 0.0:
                    gains.fallback.add(gain)

    # -------------------------------------------------------------------------------------------- choosing

    def choose(self) -> list[tuple[str, int]]:
        """Per sequence, whose draft is taken and how many tokens of it; ("", 0) for none."""
        slots, ledger = self._slots, self._ledger
        chosen = [NOBODY] * len(self.seqs)
        num_fixed = 0
        for i, slot in slots.items():
            if not slot.seq.adaptive and slot.draft.tokens:
                chosen[i] = (slot.drafter, len(slot.draft.tokens))
                num_fixed += len(slot.draft.tokens)
        paying = {i: slot for i, slot in slots.items() if slot.net > 0.0}
        if paying and not ledger.is_plain_due():
            survivals = [slot.reached for slot in paying.values()]
            most = min(self._num_rows_left - num_fixed, sum(map(len, survivals)))
            here = PassWork(self.work.num_rows + num_fixed, self.work.keys_read)
            seconds = ledger.cost.curve(here, most)
            counts = allot(survivals, seconds, self._price, self._worth)
            ledger.note(lambda: self._decision(paying, seconds, counts))
            for (i, slot), count in zip(paying.items(), counts, strict=True):
                if count:
                    chosen[i] = (slot.drafter, count)
        return chosen

    def _decision(self, slots: Mapping[int, _Slot], seconds: list[float], counts: list[int]) -> dict[str, Any]:
        return {
            "sequences": [slot.seq.seq_id for slot in slots.values()],
            "lengths": [len(slot.seq.tokens) for slot in slots.values()],
            "drafters": [slot.drafter for slot in slots.values()],
            "rows": self.work.num_rows,
            "keys_read": self.work.keys_read,
            "price": self._price,
            "worth": self._worth,
            "seconds": seconds,
            "survivals": [slot.reached for slot in slots.values()],
            "num_tokens": counts,
        }

    # -------------------------------------------------------------------------------------------- learning

    def learn(self, counts: Seq[int], emitted: Seq[Seq[int]], milliseconds: Mapping[str, float]) -> float:
        """Learn from what each sequence really verified (``counts``) and emitted, and from the time of each phase.

        Returns the number of plain steps that would have fitted into the time of this one, by the present estimates.
        """
        ledger = self._ledger
        for i, slot in self._slots.items():
            if counts[i] and slot.seq.adaptive:
                record = ledger.record(slot.drafter)
                # An emitted token more than those that were accepted is the target's own.
                record.expected.add(sum(slot.reached[: counts[i]], 0.0) / record.trust)
                record.accepted.add(max(0.0, len(emitted[i]) - 1.0))
            if slot.audited is not None:
                first = next((tokens for tokens in slot.audited.values() if tokens), ())
                ledger.audits[slot.seq.seq_id] = Audit({**slot.audited, "": first}, self._row_prices, self._worth)
        ledger.compare(self.seqs, emitted)
        return ledger.account(self.work, len(self.seqs), sum(counts), self._calls, sum(map(len, emitted)), milliseconds)
