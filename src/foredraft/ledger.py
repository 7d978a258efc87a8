"""What drafts and plain steps have cost and brought, over all requests and in each, and the time that may go into finding out.

Owns: the online state of all decisions.  Does not know: how a step is decided (``step_plan``), or what a drafter is; to it a
drafter is a name with a cost and a record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from foredraft.cost import PassCost, PassTimes, PassWork, Running
from foredraft.records import AUDIT_RATE, AUDIT_WEIGHT, FIRST_GAIN, Audit, Record, Track
from foredraft.types import Sequence

PROBE_SHARE, LEAST_PROBES, STEPS_BETWEEN_PROBES = 0.008, 0.5, 3
# After so many probes in turn that promised nothing a drafter is probed less.
PATIENCE, LEFT_FOR_FRUITLESS = 40, 0.25
# Time saved up for probes, so that a quiet hour does not end in a burst of them.
MAX_CREDIT_SECONDS = 0.05
# A pass without drafts every so often keeps the comparison with plain decoding true; it costs what a draft would have saved.
STEPS_BETWEEN_PLAIN = 200
# While nobody drafts, every so many steps are enough to follow the machine.
STEPS_BETWEEN_IDLE = 4
# Time is valued higher than it is: what only breaks even is not worth its risk, least of all where nothing has paid yet.
MARGIN, LEAST_SPEEDUP = 1.05, 1.15
SPEED_RATE = 0.02
# A drafter whose calls cost more than this, in tokens, is asked after those that cost less.
DEAR_TOKENS = 0.05


@dataclass
class Calls:
    """The calls of drafters in one step: whom, who of them only for a probe, and their seconds in all."""

    names: list[str] = field(default_factory=list)
    probed: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Ledger:
    """What is known, and how it follows what steps show.

    Args:
        times: what passes take, to begin with.
        trace: called with each decision and everything it was made from, as plain data.
    """

    def __init__(self, times: PassTimes, trace: Callable[[Mapping[str, Any]], None] | None = None) -> None:
        self.cost = PassCost(times)
        self._trace = trace
        self._records: dict[str, Record] = {}
        self._tracks: dict[int, dict[str, Track]] = {}
        self._resting: set[int] = set()
        self._pending: dict[int, list[tuple[Record, Track]]] = {}
        self.own_seconds = Running(SPEED_RATE)
        self.together = Running(AUDIT_RATE, FIRST_GAIN, AUDIT_WEIGHT)
        self.audits: dict[int, Audit] = {}
        self.num_audits = 0
        self._probe_turn = 0
        self._since_plain = 0
        self._num_steps = 0
        self._per_step, self._per_token = Running(SPEED_RATE), Running(SPEED_RATE)
        self._emitted, self._plain_emitted = Running(SPEED_RATE, 1.0, 8.0), Running(SPEED_RATE, 1.0, 8.0)
        self._last = (0, 0)
        self.room = 1.0

    @property
    def speedup(self) -> float:
        """Tokens per second of late over what plain decoding would have given by the present estimates; at least 1."""
        return max(1.0, self._emitted.mean / self._plain_emitted.mean) if self._plain_emitted.mean > 0.0 else 1.0

    def close(self, seq: Sequence) -> None:
        """Forget a request."""
        self._tracks.pop(seq.seq_id, None)
        self._resting.discard(seq.seq_id)
        self._pending.pop(seq.seq_id, None)
        self.audits.pop(seq.seq_id, None)

    def record(self, name: str) -> Record:
        """The record of a drafter."""
        known = self._records.get(name)
        if known is None:
            known = self._records[name] = Record()
        return known

    def tracks(self, seq: Sequence) -> dict[str, Track]:
        """The records of all drafters that a request may ask."""
        known = self._tracks.get(seq.seq_id)
        if known is None:
            known = self._tracks[seq.seq_id] = {name: self.record(name).track() for name in seq.drafters}
        return known

    def prices(self, num_slots: int, plain_seconds: float) -> tuple[float, float]:
        """(tokens per second that time is worth, what an accepted token is worth after its own handling).

        ``plain_seconds``: this step without drafts.
        """
        price = max(MARGIN * self.speedup, LEAST_SPEEDUP) * num_slots / plain_seconds
        return price, max(0.1, 1.0 - price * self._per_token.mean)

    def awake(self, seqs: Seq[Sequence], limits: Seq[int]) -> list[int]:
        """The adaptive sequences with a drafter that is on, and one of the others in turn if a probe is due."""
        free = [i for i, seq in enumerate(seqs) if seq.adaptive and limits[i] and seq.drafters]
        if not self._resting:
            return free
        found = [i for i in free if seqs[i].seq_id not in self._resting]
        credit = max((record.credit for record in self._records.values()), default=0.0)
        is_turn = self._num_steps % STEPS_BETWEEN_PROBES == 0 or credit > 0.1 * MAX_CREDIT_SECONDS
        if is_turn and credit > 0.0 and len(found) < len(free):
            idle = [i for i in free if seqs[i].seq_id in self._resting]
            self._probe_turn += 1
            found.append(idle[self._probe_turn % len(idle)])
        return found

    def settle(self, seq: Sequence) -> None:
        """Let a sequence rest when it has no drafter on."""
        if any(track.is_on for track in self._tracks[seq.seq_id].values()):
            self._resting.discard(seq.seq_id)
        else:
            self._resting.add(seq.seq_id)

    def is_dear(self, record: Record, price: float) -> bool:
        """Whether a call costs so much that it is to be saved where it can be."""
        return price * record.cost.per_sequence.mean > DEAR_TOKENS

    def turn(self, record: Record, price: float) -> tuple[bool, float]:
        """Sorts drafters: of those that cost little the best comes first, since then the others need not be asked.

        Those that cost much come last, when it is known what a cheap draft promises.
        """
        is_dear = self.is_dear(record, price)
        return is_dear, record.cost.per_sequence.mean if is_dear else -record.gains.own.mean

    def better_alone(self, order: list[str], price: float, room: float) -> str:
        """The drafter that brings more when only it is asked than all do one after the other; "" for none.

        ``room``: see ``planner.room``.
        """
        cost = {name: price * (self._records[name].cost.per_sequence.mean + self.own_seconds.mean) for name in order}
        alone = {name: self._records[name].alone.mean - cost[name] for name in order}
        best = max(order, key=lambda name: alone[name])
        # Those after the first are asked where nobody has a draft yet, if that pays.
        asked = [name for name in order[1:] if room * self._records[name].gains.fallback.mean > cost[name]]
        shares = ((1.0 - self._records[name].gains.rivalled.mean) * cost[name] for name in asked)
        return best if alone[best] > self.together.mean - cost[order[0]] - sum(shares, 0.0) else ""

    def expect(self, seq: Sequence, record: Record, track: Track) -> None:
        """A draft was made, whose outcome will come."""
        pending = self._pending.get(seq.seq_id)
        if pending is None:
            self._pending[seq.seq_id] = [(record, track)]
        elif all(waiting is not track for _, waiting in pending):
            pending.append((record, track))

    def compare(self, seqs: Seq[Sequence], emitted: Seq[Seq[int]]) -> None:
        """Count the outcomes of drafts, verified or not."""
        if self.audits:
            self._compare_audits(seqs, emitted)
        if not self._pending:
            return
        for seq, tokens in zip(seqs, emitted, strict=True):
            pending = self._pending.pop(seq.seq_id, None)
            if pending is not None:
                still = [pair for pair in pending if pair[0].compare(pair[1], tokens)]
                if still:
                    self._pending[seq.seq_id] = still

    def _compare_audits(self, seqs: Seq[Sequence], emitted: Seq[Seq[int]]) -> None:
        for seq, tokens in zip(seqs, emitted, strict=True):
            audit = self.audits.get(seq.seq_id)
            if audit is not None and audit.follow(tokens):
                del self.audits[seq.seq_id]
                self.num_audits += 1
                for name, net in audit.net_tokens().items():
                    (self._records[name].alone if name else self.together).add(net)

    def is_plain_due(self) -> bool:
        """Whether the next pass should be without drafts."""
        return self._since_plain >= STEPS_BETWEEN_PLAIN

    def note(self, decision: Callable[[], Mapping[str, Any]]) -> None:
        """Pass a decision on to the trace."""
        if self._trace is not None:
            self._trace({"step": self._num_steps, **decision()})

    def account(
        self, work: PassWork, num_slots: int, num_drafts: int, calls: Calls, num_emitted: int, milliseconds: Mapping[str, float]
    ) -> float:
        """Learn what a step took; the plain steps that would have fitted into its time, 1 where a pass does other work too."""
        self._num_steps += 1
        self._last = (num_slots, num_drafts)
        total = 1e-3 * sum(milliseconds.values(), 0.0)
        # Where a row costs nearly what a token is worth, finding out who is right brings less.
        earned = PROBE_SHARE * max(LEAST_PROBES, math.sqrt(self.room)) * total / max(1, len(self._records))
        for record in self._records.values():
            share = earned if record.fruitless < PATIENCE else LEFT_FOR_FRUITLESS * earned
            record.credit = min(MAX_CREDIT_SECONDS, record.credit + share)
        if calls.names:
            own = max(0.0, 1e-3 * milliseconds["draft"] - calls.seconds) / len(calls.names)
            self.own_seconds.add(own)
            for name in calls.probed:
                self._records[name].credit -= own
        if not num_slots or not num_emitted:
            return 1.0
        if not calls.names and not num_drafts and self._num_steps % STEPS_BETWEEN_IDLE:  # a plain step; most tell nothing new
            self._emitted.add(num_emitted)
            self._plain_emitted.add(num_slots)
            return 1.0
        self._since_plain = self._since_plain + 1 if num_drafts else 0
        self._per_token.add(1e-3 * milliseconds["verify"] / num_emitted)
        self._per_step.add(1e-3 * (milliseconds["schedule"] + milliseconds["rest"]))
        if work.num_rows != num_slots:  # a pass that also computes part of a prompt tells nothing about either
            return 1.0
        self.cost.observe(work, num_drafts, 1e-3 * milliseconds["pass"])
        num_plain = total / self.plain_seconds(work, num_slots)
        self._emitted.add(num_emitted)
        self._plain_emitted.add(num_slots * num_plain)
        return num_plain

    def plain_seconds(self, work: PassWork, num_slots: int) -> float:
        """A whole step without drafts."""
        return self.cost.seconds(work) + num_slots * self._per_token.mean + self._per_step.mean
