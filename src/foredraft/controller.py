"""Which drafter each request asks in a step, and how much of its draft the pass verifies.

Owns: the online state: what drafts cost and bring, in all and per request, and the time that may go into finding out.  Does not
know: what a drafter is; to it a drafter is a name with a cost and a record.

A step goes: ``plan``, for each of ``StepPlan.asks()`` a proposal that is told by ``hear``, ``choose``, the pass, ``learn``.
A request that is not adaptive gets its whole draft; the others get the rows that are worth their time (``planner.allot``).
A drafter whose expected gain does not cover its cost is not asked, but for probes that take at most ``PROBE_SHARE`` of the time.
A draft that is not verified, or only in part, is still compared with what comes: finding out costs no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from foredraft.acceptance import classes_of
from foredraft.cost import PassCost, PassTimes, PassWork, Running
from foredraft.planner import allot, best_depth, net_tokens, share_of, survival
from foredraft.records import AUDIT_RATE, AUDIT_WEIGHT, FIRST_GAIN, Audit, Record, Track
from foredraft.types import Draft, Sequence

PROBE_SHARE, STEPS_BETWEEN_PROBES = 0.01, 3
# Time saved up for probes, so that a quiet hour does not end in a burst of them.
MAX_CREDIT_SECONDS = 0.05
# A pass without drafts every so often keeps the comparison with plain decoding true; it costs what a draft would have saved.
STEPS_BETWEEN_PLAIN = 200
TURN_ON, STAY_ON = 1.2, 0.8
# Time is valued a little higher than it is: what only breaks even is not worth its risk.
MARGIN = 1.05
# Drafting that costs less than this, in tokens, is always done as deep as can be used.
CHEAP_TOKENS = 0.02
SPEED_RATE = 0.02
# How deep to draft is worked out again after so many steps.
STEPS_BETWEEN_DEPTHS = 32
# Drafters learn from being asked, so at first, where drafts pay at all, none is judged by the little that it was asked.
FIRST_AUDITS = 10
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


class Controller:
    """Plans every step of an engine and learns from it.

    Args:
        times: what passes take, to begin with.
        trace: called with each decision and everything it was made from, as plain data; see ``replay_decision``.
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

    def plan(self, seqs: list[Sequence], limits: list[int], work: PassWork, num_rows_left: int) -> StepPlan:
        """Begin a step: a draft can continue ``seqs``, each by at most ``limits[i]`` tokens; ``work`` is all else in the pass."""
        return StepPlan(self, seqs, limits, work, num_rows_left)

    def snapshot(self) -> dict[str, Any]:
        """What the controller knows, for metrics: per drafter its cost, acceptance by position and expected net gain."""
        num_slots, num_drafts = self._last
        drafters = {
            name: {
                "draft_ms": 1e3 * record.cost.seconds(1, 4),
                "acceptance_per_position": record.acceptance.by_position(4),
                "net_tokens_per_draft": record.gains.own.mean,
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

    # -------------------------------------------------------------------------------------------- for StepPlan

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

    def prices(self, work: PassWork, num_slots: int) -> tuple[float, float]:
        """(tokens per second that time is worth, what an accepted token is worth after its own handling)."""
        price = MARGIN * self.speedup * num_slots / self._plain_seconds(work, num_slots)
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

    def settle(self, seq: Sequence, tracks: Mapping[str, Track]) -> None:
        """Let a sequence rest when it has no drafter on."""
        if any(track.is_on for track in tracks.values()):
            self._resting.discard(seq.seq_id)
        else:
            self._resting.add(seq.seq_id)

    def better_alone(self, order: list[str], price: float) -> str:
        """The drafter that brings more when only it is asked than all do one after the other; "" for none."""
        cost = {name: price * (self._records[name].cost.per_sequence.mean + self.own_seconds.mean) for name in order}
        alone = {name: self._records[name].alone.mean - cost[name] for name in order}
        best = max(order, key=lambda name: alone[name])
        # Those after the first are asked where nobody has a draft yet.
        shares = ((1.0 - self._records[name].gains.rivalled.mean) * cost[name] for name in order[1:])
        return best if alone[best] > self.together.mean - cost[order[0]] - sum(shares) else ""

    def expect(self, seq: Sequence, record: Record, track: Track) -> None:
        """A draft was made, whose outcome will come."""
        pending = self._pending.setdefault(seq.seq_id, [])
        if not any(waiting is track for _, waiting in pending):
            pending.append((record, track))

    def compare(self, seqs: Seq[Sequence], emitted: Seq[Seq[int]]) -> None:
        """Count the outcomes of drafts, verified or not."""
        for seq, tokens in zip(seqs, emitted, strict=True) if self.audits else ():
            audit = self.audits.get(seq.seq_id)
            if audit is not None and audit.follow(tokens):
                del self.audits[seq.seq_id]
                self.num_audits += 1
                for name, net in audit.net_tokens().items():
                    (self._records[name].alone if name else self.together).add(net)
        for seq, tokens in zip(seqs, emitted, strict=True) if self._pending else ():
            if seq.seq_id in self._pending:
                pending = [(record, track) for record, track in self._pending[seq.seq_id] if record.compare(track, tokens)]
                if pending:
                    self._pending[seq.seq_id] = pending
                else:
                    del self._pending[seq.seq_id]

    def is_plain_due(self) -> bool:
        """Whether the next pass should be without drafts."""
        return self._since_plain >= STEPS_BETWEEN_PLAIN

    def note(self, decision: Callable[[], Mapping[str, Any]]) -> None:
        """Pass a decision on to the trace."""
        if self._trace is not None:
            self._trace({"step": self._num_steps, **decision()})

    def account(self, plan: StepPlan, counts: Seq[int], num_emitted: int, milliseconds: Mapping[str, float]) -> float:
        """Learn what a step took; the plain steps that would have fitted into its time, 1 where a pass does other work too."""
        num_slots, num_drafts, work = len(plan.seqs), sum(counts), plan.work
        self._num_steps += 1
        self._last = (num_slots, num_drafts)
        total = 1e-3 * sum(milliseconds.values())
        for record in self._records.values():
            record.credit = min(MAX_CREDIT_SECONDS, record.credit + PROBE_SHARE * total / len(self._records))
        if plan.asked:
            own = max(0.0, 1e-3 * milliseconds["draft"] - plan.asked_seconds)
            self.own_seconds.add(own / len(plan.asked))
            for name in plan.probed:
                self._records[name].credit -= own / len(plan.asked)
        if not num_slots or not num_emitted:
            return 1.0
        self._since_plain = self._since_plain + 1 if num_drafts else 0
        self._per_token.add(1e-3 * milliseconds["verify"] / num_emitted)
        self._per_step.add(1e-3 * (milliseconds["schedule"] + milliseconds["rest"]))
        if work.num_rows != num_slots:  # a pass that also computes part of a prompt tells nothing about either
            return 1.0
        self.cost.observe(work, num_drafts, 1e-3 * milliseconds["pass"])
        num_plain = total / self._plain_seconds(work, num_slots)
        self._emitted.add(num_emitted)
        self._plain_emitted.add(num_slots * num_plain)
        return num_plain

    def _plain_seconds(self, work: PassWork, num_slots: int) -> float:
        """A whole step without drafts."""
        return self.cost.seconds(work) + num_slots * self._per_token.mean + self._per_step.mean


class StepPlan:
    """One step: whom to ask, what was heard, what is taken, and what came of it."""

    def __init__(self, controller: Controller, seqs: list[Sequence], limits: list[int], work: PassWork, num_rows_left: int) -> None:
        self.seqs, self.work = seqs, work
        self._limits = limits
        self._slots: dict[int, _Slot] = {}
        self._controller = controller
        self._num_rows_left = num_rows_left
        self.asked: list[str] = []
        self.probed: list[str] = []
        self.asked_seconds = 0.0
        self._price, self._worth, self._row_price, self._share = 0.0, 1.0, 0.0, 1.0

    # -------------------------------------------------------------------------------------------- asking

    def asks(self) -> Iterator[Ask]:
        """The calls to make, each decided when those before it were heard: cheap drafters first."""
        controller, limits = self._controller, self._limits
        fixed = [i for i, seq in enumerate(self.seqs) if not seq.adaptive and seq.drafters and limits[i]]
        wishes = dict(zip(fixed, share([limits[i] for i in fixed], self._num_rows_left), strict=True))
        awake = controller.awake(self.seqs, limits)
        self._slots = {i: _Slot(self.seqs[i], limits[i], controller.tracks(self.seqs[i])) for i in (*fixed, *awake)}
        yield from self._fixed_asks({i: wish for i, wish in wishes.items() if wish})
        if not awake:
            return
        self._price, self._worth = controller.prices(self.work, len(self.seqs))
        here = PassWork(self.work.num_rows + sum(wishes.values()), self.work.keys_read)
        self._row_price = self._price * (controller.cost.seconds(here, 4) - controller.cost.seconds(here)) / 4
        slots = {i: self._slots[i] for i in awake}
        records = {name: controller.record(name) for slot in slots.values() for name in slot.tracks}
        order = sorted(records, key=lambda name: records[name].cost.per_sequence.mean)
        self._begin_audit(slots, order, records)
        for name in order:
            ask = self._free_ask(name, records[name], {i: slot.tracks[name] for i, slot in slots.items() if name in slot.tracks})
            if ask is not None:
                yield ask
        for slot in slots.values():
            controller.settle(slot.seq, slot.tracks)

    def _begin_audit(self, slots: Mapping[int, _Slot], order: list[str], records: Mapping[str, Record]) -> None:
        """Choose whom to ask: all, the cheap first, or only one; now and then all are asked, to see who would have brought what."""
        if len(order) < 2:
            return
        controller = self._controller
        only = controller.better_alone(order, self._price)
        may_audit = controller.num_audits < FIRST_AUDITS or all(record.credit > 0.0 for record in records.values())
        for slot in slots.values():
            slot.only = only if only in slot.tracks else ""
            is_free = slot.seq.seq_id not in controller.audits and len(slot.tracks) == len(order)
            if may_audit and is_free and any(track.is_on for track in slot.tracks.values()):
                slot.audited = {}
                may_audit = False

    def _fixed_asks(self, wishes: Mapping[int, int]) -> Iterator[Ask]:
        for name in dict.fromkeys(name for i in wishes for name in self.seqs[i].drafters):
            asked = [i for i in wishes if name in self.seqs[i].drafters]
            yield Ask(name, asked, [wishes[i] for i in asked])

    def _free_ask(self, name: str, record: Record, candidates: Mapping[int, Track]) -> Ask | None:
        """Ask for those requests where this drafter's expected gain covers its cost, and probe for one other if credit allows."""
        controller, num = self._controller, len(candidates)
        depth, seconds = self._depth(record, num, max(self._limits[i] for i in candidates))
        least = self._price * (seconds + controller.own_seconds.mean) / num
        asked, idle = [], []
        for i, track in candidates.items():
            slot = self._slots[i]
            # Where a draft is there that pays, another is asked for only if it is better as a rule: of two drafts the one that
            # looks better often only looks so.
            gain = track.gains.fallback.mean if slot.was_asked and slot.net <= 0.0 else track.gains.own.mean - slot.net
            is_wanted = not slot.only or slot.only == name
            track.is_on = is_wanted and self._share * gain > max(0.0, (STAY_ON if track.is_on else TURN_ON) * least)
            if track.is_on:
                asked.append(i)
            elif slot.audited is not None:
                asked.append(i)
                record.credit -= seconds / num
            elif not track.tokens:
                idle.append(i)
        if idle and record.credit > 0.0 and record.credit >= min(record.cost.seconds(1, depth), MAX_CREDIT_SECONDS):
            asked.append(idle[-1])
            self.probed.append(name)
        return Ask(name, asked, [min(depth, self._limits[i]) for i in asked]) if asked else None

    def _depth(self, record: Record, num_seqs: int, deepest: int) -> tuple[int, float]:
        """(how deep to draft, seconds of that): as deep as can be used, less where drafting costs much and survival falls.

        Leaves in ``_share`` what a draft of that depth is expected to bring of what the deepest would.
        """
        seconds, self._share = record.cost.seconds(num_seqs, deepest), 1.0
        if self._price * seconds < CHEAP_TOKENS * num_seqs:
            return deepest, seconds
        depth, self._share, age = record.depths.get((num_seqs, deepest), (0, 1.0, STEPS_BETWEEN_DEPTHS))
        if age >= STEPS_BETWEEN_DEPTHS:
            reached = survival(record.acceptance.by_position(deepest))
            depth = max(1, best_depth(reached, lambda d: record.cost.seconds(num_seqs, d) / num_seqs, self._row_price, self._price))
            self._share, age = share_of(reached, depth, self._row_price), 0
        record.depths[num_seqs, deepest] = depth, self._share, age + 1
        return depth, record.cost.seconds(num_seqs, depth)

    def hear(self, ask: Ask, drafts: list[Draft], seconds: float) -> None:
        """Take the drafts of an ask, which took ``seconds``, and keep the best for each sequence."""
        record = self._controller.record(ask.drafter)
        record.cost.observe(len(ask.slots), max(ask.num_tokens), seconds)
        self.asked.append(ask.drafter)
        self.asked_seconds += seconds
        if ask.drafter in self.probed:
            record.credit -= seconds / len(ask.slots)
        for i, draft in zip(ask.slots, drafts, strict=True):
            slot = self._slots[i]
            track = slot.tracks[ask.drafter]
            # A drawn draft must not be cut or preferred for the tokens that were drawn: that would bias the rules that weigh them.
            confidence = None if draft.probs is not None else draft.confidence
            classes = classes_of(confidence, len(draft.tokens))
            if draft.tokens:
                track.tokens, track.classes, track.next = draft.tokens, classes, 0
                self._controller.expect(slot.seq, record, track)
            reached = record.acceptance.reach(classes, track.shift, record.trust, 0.5 * self._row_price)
            if not slot.seq.adaptive:
                if not slot.drafter or sum(reached) > sum(slot.reached):
                    slot.drafter, slot.draft, slot.reached = ask.drafter, draft, reached
                continue
            net = net_tokens(reached, self._row_price, self._worth)
            for gains in (track.gains, record.gains):
                if slot.audited is not None or not slot.was_asked:
                    gains.own.add(net / self._share)
                if slot.was_asked:
                    gains.rivalled.add(slot.net > 0.0)
                    if slot.net <= 0.0:
                        gains.fallback.add(net / self._share)
            slot.was_asked = True
            if slot.audited is not None:
                slot.audited[ask.drafter] = draft.tokens[: sum(self._worth * alive > self._row_price for alive in reached)]
            if (net > slot.net or not slot.drafter) and slot.only in ("", ask.drafter):
                slot.drafter, slot.draft, slot.reached, slot.net = ask.drafter, draft, reached, net

    # -------------------------------------------------------------------------------------------- choosing

    def choose(self) -> list[tuple[str, int]]:
        """Per sequence, whose draft is taken and how many tokens of it; ("", 0) for none."""
        slots, controller = self._slots, self._controller
        chosen = [NOBODY] * len(self.seqs)
        num_fixed = 0
        for i, slot in slots.items():
            if not slot.seq.adaptive and slot.draft.tokens:
                chosen[i] = (slot.drafter, len(slot.draft.tokens))
                num_fixed += len(slot.draft.tokens)
        paying = {i: slot for i, slot in slots.items() if slot.seq.adaptive and slot.net > 0.0}
        if paying and not controller.is_plain_due():
            survivals = [slot.reached for slot in paying.values()]
            most = min(self._num_rows_left - num_fixed, sum(map(len, survivals)))
            here = PassWork(self.work.num_rows + num_fixed, self.work.keys_read)
            seconds = controller.cost.curve(here, most)
            counts = allot(survivals, seconds, self._price, self._worth)
            controller.note(lambda: self._decision(paying, seconds, counts))
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
        controller = self._controller
        for i, slot in self._slots.items():
            if counts[i] and slot.seq.adaptive:
                record = controller.record(slot.drafter)
                # An emitted token more than those that were accepted is the target's own.
                record.expected.add(sum(slot.reached[: counts[i]]) / record.trust)
                record.accepted.add(max(0.0, len(emitted[i]) - 1.0))
            if slot.audited is not None:
                first = next((tokens for tokens in slot.audited.values() if tokens), ())
                controller.audits[slot.seq.seq_id] = Audit({**slot.audited, "": first}, self._row_price, self._worth)
        controller.compare(self.seqs, emitted)
        return controller.account(self, counts, sum(map(len, emitted)), milliseconds)


def replay_decision(decision: Mapping[str, Any]) -> list[int]:
    """The decision that a line of a trace leads to now; equal to its ``num_tokens`` as long as the planner is the same."""
    return allot(decision["survivals"], decision["seconds"], decision["price"], decision["worth"])
