"""The step loop: schedule, plan, draft, pass, verify, commit, observe.

Owns: every write to a Sequence, and the order of a step.  Does not know: text (a sequence's sink turns ids into it), or what
kind a drafter is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from foredraft.controller import Controller
from foredraft.cost import PassWork
from foredraft.kv_cache import KVCache
from foredraft.metrics import EngineMetrics, Stopwatch
from foredraft.sampling import distribution, noise_for, token_logprobs
from foredraft.scheduler import Schedule, Scheduler
from foredraft.step_plan import StepPlan, most_drafts
from foredraft.types import (
    Clock,
    ConfigError,
    Distribution,
    Draft,
    Drafter,
    FloatArray,
    PassOutput,
    RequestError,
    Rows,
    Sequence,
    StepStats,
    Target,
    Verdict,
    num_agreeing,
)
from foredraft.verify import RowDistribution, Rule, judge

PLAIN = "none"


@dataclass(frozen=True)
class Emission:
    """Tokens that a sequence received in one step, none if it only ended; ``origins`` says plain, accepted, recovered or bonus."""

    seq: Sequence
    tokens: tuple[int, ...]
    origins: tuple[str, ...]


@dataclass
class _Work:
    """One sequence's part of a step: ``num_rows`` known tokens, then ``draft``; ``verdict`` is what was emitted.

    ``heard`` are the drafts that were proposed, by drafter; ``draft`` is what of one is verified.  ``judged`` is ``draft``, and
    behind it the drawn id that the target cannot say and that ended it, if that is why it ended.  ``broken`` says why the row
    after the verdict's tokens gives none.
    """

    seq: Sequence
    num_rows: int
    complete: bool
    heard: dict[str, Draft] = field(default_factory=dict)
    drafter: str = PLAIN
    draft: Draft = field(default_factory=Draft)
    judged: Draft = field(default_factory=Draft)
    verdict: Verdict = field(default_factory=Verdict)
    broken: str = ""


class Engine:
    """Continues sequences of token ids, many at a time, each with a draft from one of ``drafters``.

    ``controller`` decides who drafts and how much of it is verified.
    """

    def __init__(
        self,
        target: Target,
        kv: KVCache,
        drafters: Mapping[str, Drafter],
        rule: Rule,
        controller: Controller,
        *,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.metrics = EngineMetrics()
        self._target = target
        self._kv = kv
        self._drafters = drafters
        self._readers: frozenset[str] = frozenset()
        self._taps_of: dict[frozenset[tuple[str, ...]], tuple[int, ...]] = {}
        self._rule = rule
        self._clock = clock
        self.controller = controller
        self._scheduler = Scheduler(
            kv,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            on_admit=self._admit,
            on_preempt=self._preempt,
        )

    # -------------------------------------------------------------------------------------------- requests

    @property
    def has_work(self) -> bool:
        """True while a sequence waits or runs."""
        return bool(self._scheduler.waiting or self._scheduler.running)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to be admitted."""
        return len(self._scheduler.waiting)

    def check(self, num_tokens: int, max_tokens: int) -> None:
        """Raise RequestError when a prompt of ``num_tokens`` could not be served."""
        limit = self._target.max_model_len
        if num_tokens == 0:
            raise RequestError("a prompt must have at least 1 token, not 0; write a prompt.")
        if num_tokens >= limit:
            raise RequestError(
                f"a prompt must have at most {limit - 1} tokens, so that one can follow within the context of {limit}, "
                f"not {num_tokens}; shorten it."
            )
        # The last token is emitted, not computed.
        most = min(limit, num_tokens + max_tokens) - 1
        if self._kv.blocks_for(most) > self._kv.num_blocks:
            room = self._kv.num_blocks * self._kv.block_size
            raise RequestError(
                f"this request may need {most} tokens of KV cache, which holds {room}; lower max_tokens or raise kv_cache_memory."
            )

    def add(self, seq: Sequence) -> None:
        """Queue a sequence.

        Raises:
            RequestError: it could never fit.
        """
        assert set(seq.drafters) <= self._drafters.keys(), f"not all of {seq.drafters} are among {sorted(self._drafters)}"
        self.check(len(seq.tokens), seq.params.max_tokens)
        # A drafter may be made for the first request that asks for it.
        self._readers = frozenset(name for name, drafter in self._drafters.items() if drafter.hidden_layers)
        self._scheduler.add(seq)

    def cancel(self, seq: Sequence) -> None:
        """End a sequence now, wherever it is; does nothing when it has ended already."""
        if self._scheduler.holds(seq):
            try:
                self._end(seq, seq.finish_reason or "abort")
            finally:
                self.controller.close(seq)

    # -------------------------------------------------------------------------------------------- the loop

    def step(self) -> list[Emission]:
        """Run one pass of the target over everything that is due, and return what was emitted."""
        watch = Stopwatch(self._clock)
        schedule = self._scheduler.schedule()  # 1 schedule
        work = _work_of(schedule)
        watch.lap("schedule")
        plan = self._plan(work, schedule.num_rows_left)  # 2 plan whom to ask, and how much to verify
        self._draft(work, plan)  # 3 draft
        watch.lap("draft")
        output = self._pass(work)  # 4 target pass
        watch.lap("pass")
        self._verify(work, output)  # 5 verify
        watch.lap("verify")
        emissions = self._commit(work, output)  # 6 commit
        try:
            self._observe(work, output)  # 7 observe
            watch.lap("rest")
            self._account(work, plan, watch)
        finally:
            # Not before: the draft that ended a request counts as well.
            for item in work:
                if item.seq.finish_reason is not None:
                    self.controller.close(item.seq)
        return emissions

    def _plan(self, work: list[_Work], num_rows_left: int) -> StepPlan:
        """Only a sequence whose known tokens are all computed in this pass can be continued by a draft."""
        ready = [item.seq for item in work if item.complete]
        limits = [most_drafts(seq, self._target.max_model_len) for seq in ready]
        load = PassWork(sum(item.num_rows for item in work), sum(item.seq.num_computed for item in work))
        return self.controller.plan(ready, limits, load, num_rows_left, self._readers)

    def _draft(self, work: list[_Work], plan: StepPlan) -> None:
        ready = [item for item in work if item.complete]
        vocab_size = self._target.vocab_size
        for ask in plan.asks():
            start = self._clock()
            proposed = self._drafters[ask.drafter].propose([ready[i].seq for i in ask.slots], ask.num_tokens)
            seconds = self._clock() - start
            asked = zip(ask.slots, proposed, ask.num_tokens, strict=True)
            drafts = [_sound(ready[i].seq, draft, num, vocab_size) for i, draft, num in asked]
            for i, draft in zip(ask.slots, drafts, strict=True):
                ready[i].heard[ask.drafter] = draft
            plan.hear(ask, drafts, seconds)
        for item, (name, num_tokens) in zip(ready, plan.choose(), strict=True):
            # A draft never pushes another request out of the cache: without room there is none.
            if num_tokens and self._kv.reserve(item.seq.seq_id, len(item.seq.tokens) + num_tokens):
                item.drafter, item.judged = name, item.heard[name].cut(num_tokens)
                item.draft = item.judged.cut(_num_possible(item.seq, item.judged.tokens, vocab_size))

    def _pass(self, work: list[_Work]) -> PassOutput:
        batch = []
        for item in work:
            seq = item.seq
            tokens = [*seq.tokens[seq.num_computed : seq.num_computed + item.num_rows], *item.draft.tokens]
            num_logits = len(tokens) if _wants_prompt_logprobs(seq) else len(item.draft.tokens) + item.complete
            batch.append(Rows(tokens, seq.num_computed, num_logits, self._kv.block_table(seq.seq_id)))
        return self._target.forward(batch, self._taps(work)) if batch else PassOutput([])

    def _verify(self, work: list[_Work], output: PassOutput) -> None:
        """Judge every draft."""
        for item, rows in zip(work, output.logits, strict=True):
            if item.complete:
                row = _row_distribution(item.seq, item.draft, _draft_rows(rows, item.draft))
                item.verdict, item.broken = judge(self._rule, item.judged, row, noise_for(item.seq), len(item.seq.tokens))

    def _commit(self, work: list[_Work], output: PassOutput) -> list[Emission]:
        """Append each verdict's tokens up to the earliest of EOS, stop id, stop string, max_tokens and context limit.

        A sequence whose next row gives no token ends as well, and the others go on.
        """
        emissions = []
        for item, rows in zip(work, output.logits, strict=True):
            seq, verdict, num_known = item.seq, item.verdict, len(item.seq.tokens)
            self._note_prompt_logprobs(item, rows)
            for token in verdict.tokens:
                seq.tokens.append(token)
                if self._meets_end(seq, token):
                    break
            if item.broken and seq.finish_reason is None:
                seq.finish_reason, seq.stop_reason = "error", item.broken
            emitted = tuple(seq.tokens[num_known:])
            item.verdict = Verdict(emitted, min(verdict.num_accepted, len(emitted)))
            seq.num_computed += item.num_rows + item.verdict.num_accepted
            if emitted and seq.params.logprobs is not None:
                logits = _draft_rows(rows, item.draft)
                seq.logprobs.extend(token_logprobs(logits[i], token, seq.params.logprobs) for i, token in enumerate(emitted))
            if emitted or seq.finish_reason is not None:
                origins = _origins(len(item.draft.tokens), item.verdict)
                seq.origins.extend(origins)
                emissions.append(Emission(seq, emitted, origins))
        return emissions

    def _observe(self, work: list[_Work], output: PassOutput) -> None:
        """Forget rejected rows, let drafters learn, and end what has ended, also when a drafter fails."""
        taps = self._taps(work)
        with ExitStack() as ending:  # which begins with what it was told last
            for item in reversed(work):
                if item.seq.finish_reason is not None:
                    ending.callback(self._end, item.seq, item.seq.finish_reason)
            for index, item in enumerate(work):
                seq, num_standing = item.seq, item.num_rows + item.verdict.num_accepted
                if item.draft.tokens:
                    self._kv.truncate(seq.seq_id, seq.num_computed)
                self._kv.commit(seq.seq_id, seq.tokens[: seq.num_computed])
                for name in seq.drafters:
                    drafter = self._drafters[name]
                    hidden = _select(output.hidden[index][:num_standing], taps, drafter.hidden_layers) if output.hidden else None
                    drafter.observe(seq, _verdict_on(item, name), hidden)

    # -------------------------------------------------------------------------------------------- parts

    def _admit(self, seq: Sequence) -> None:
        # Rows from the prefix cache have no logits.
        reuse = seq.params.prompt_logprobs is None
        seq.num_computed = seq.num_cached = self._kv.open(seq.seq_id, seq.tokens, seq.tenant, reuse=reuse)
        opened: list[str] = []
        try:
            for name in seq.drafters:
                self._drafters[name].open(seq)
                opened.append(name)
        except BaseException:
            self._withdraw(seq, opened)
            raise
        if seq.num_prompt_cached is None:
            seq.num_prompt_cached = seq.num_cached

    def _preempt(self, seq: Sequence) -> None:
        self.metrics.num_preemptions += 1
        seq.prompt_logprobs.clear()
        self._withdraw(seq, seq.drafters)

    def _withdraw(self, seq: Sequence, names: Seq[str]) -> None:
        """Undo an admission: what waits holds nothing."""
        try:
            self._release(seq, names)
        finally:
            seq.num_computed = 0

    def _end(self, seq: Sequence, reason: str) -> None:
        """Take a sequence out of everything but the controller, which is to learn from its last step."""
        seq.finish_reason = reason
        self.metrics.finished[reason] += 1
        if self._scheduler.remove(seq):
            self._release(seq, seq.drafters)

    def _release(self, seq: Sequence, names: Seq[str]) -> None:
        """Close a sequence for these drafters and give up its blocks, whatever goes wrong with any of them."""
        with ExitStack() as rest:
            rest.callback(self._kv.close, seq.seq_id)
            for name in reversed(names):
                rest.callback(self._drafters[name].close, seq)

    def _meets_end(self, seq: Sequence, token: int) -> bool:
        """Decide whether ``token``, just appended, is the last; at one position a stop wins over a length."""
        params, num_output = seq.params, seq.num_output
        stop_string = seq.sink.push(token, may_stop=num_output >= params.min_tokens) if seq.sink else None
        if num_output > params.min_tokens and token in seq.rules.eos_ids and not params.ignore_eos:
            seq.finish_reason = "stop"
        elif num_output > params.min_tokens and token in params.stop_token_ids:
            seq.finish_reason, seq.stop_reason = "stop", token
        elif stop_string is not None:
            seq.finish_reason, seq.stop_reason = "stop", stop_string
        elif seq.grammar is not None and seq.grammar.is_complete(seq):
            seq.finish_reason = "stop"
        elif num_output >= params.max_tokens or len(seq.tokens) >= self._target.max_model_len:
            seq.finish_reason = "length"
        return seq.finish_reason is not None

    def _taps(self, work: list[_Work]) -> tuple[int, ...]:
        """The layers whose states any drafter of these sequences reads, ascending."""
        kinds = frozenset([item.seq.drafters for item in work])
        known = self._taps_of.get(kinds)
        if known is None:
            layers = {layer for names in kinds for name in names for layer in self._drafters[name].hidden_layers}
            known = self._taps_of[kinds] = tuple(sorted(layers))
        return known

    def _note_prompt_logprobs(self, item: _Work, rows: FloatArray) -> None:
        seq = item.seq
        if not _wants_prompt_logprobs(seq):
            return
        if not seq.prompt_logprobs:
            seq.prompt_logprobs.append(None)
        for i in range(min(item.num_rows, seq.num_prompt - seq.num_computed - 1)):
            token = seq.tokens[seq.num_computed + i + 1]
            seq.prompt_logprobs.append(token_logprobs(rows[i], token, seq.params.prompt_logprobs or 0))

    def _account(self, work: list[_Work], plan: StepPlan, watch: Stopwatch) -> None:
        if not work:
            return
        verified = [item for item in work if item.complete]
        num_drafted = [len(item.draft.tokens) for item in verified]
        num_plain = plan.learn(num_drafted, [item.verdict.tokens for item in verified], watch.milliseconds)
        for item in verified:
            counts = len(item.draft.tokens), item.verdict.num_accepted, len(item.verdict.tokens)
            item.seq.stats.count(*counts)
            item.seq.stats.plain_tokens += num_plain
            item.seq.last_drafter = item.drafter
            self.metrics.count_pass(item.drafter, *counts)
        for item in work:
            for phase, milliseconds in watch.milliseconds.items():
                item.seq.stats.milliseconds[phase] += milliseconds
        self.metrics.count_step(
            StepStats(
                num_seqs=len(work),
                num_rows=sum(item.num_rows + len(item.draft.tokens) for item in work),
                num_drafted=sum(len(item.draft.tokens) for item in verified),
                num_accepted=sum(item.verdict.num_accepted for item in verified),
                num_emitted=sum(len(item.verdict.tokens) for item in verified),
                milliseconds=watch.milliseconds,
            )
        )


def _work_of(schedule: Schedule) -> list[_Work]:
    pairs = zip(schedule.seqs, schedule.num_rows, strict=True)
    return [_Work(seq, num_rows, complete=num_rows == seq.num_pending) for seq, num_rows in pairs]


def _verdict_on(item: _Work, name: str) -> Verdict:
    """The verdict as it concerns one drafter: how many of the tokens that it proposed came."""
    emitted, proposed = item.verdict.tokens, item.heard.get(name)
    if proposed is None or not proposed.tokens:
        return item.verdict if not item.verdict.num_accepted else Verdict(emitted)
    return Verdict(emitted, num_agreeing(proposed.tokens, emitted))


def _wants_prompt_logprobs(seq: Sequence) -> bool:
    return seq.params.prompt_logprobs is not None and seq.num_computed < seq.num_prompt


def _draft_rows(rows: FloatArray, draft: Draft) -> FloatArray:
    """The last K + 1 of a sequence's logits rows: those of its last known token and of its draft."""
    return rows[len(rows) - len(draft.tokens) - 1 :]


def _row_distribution(seq: Sequence, draft: Draft, logits: FloatArray) -> RowDistribution:
    def row(i: int) -> Distribution:
        return distribution(logits[i], seq, draft.tokens[:i])

    return row


def _select(hidden: FloatArray, taps: tuple[int, ...], layers: tuple[int, ...]) -> FloatArray | None:
    """The columns of ``layers`` among those of all tapped layers."""
    if not layers:
        return None
    if layers == taps:
        return hidden
    columns = hidden.reshape(len(hidden), len(taps), hidden.shape[1] // len(taps))
    return columns[:, [taps.index(layer) for layer in layers]].reshape(len(hidden), len(layers) * columns.shape[2])


def _sound(seq: Sequence, draft: Draft, num_wanted: int, vocab_size: int) -> Draft:
    """What of a draft a rule may judge.

    A drafter may say anything: what was asked for is kept, up to the first id that the target cannot say.  Of a drawn draft
    that id is kept too.  It is rejected, and no pass computes it; to drop it would make the draft's length depend on the draw
    itself, and then the rules that weigh draft probabilities are biased.  What comes after an end is dropped: nobody receives it.
    """
    if draft.parents is not None:
        raise ConfigError("a drafter proposed a tree, and this version verifies chains only; leave Draft.parents None.")
    if draft.probs is not None and len(draft.probs) != len(draft.tokens):
        raise ConfigError(
            f"a draft must have one of Draft.probs for each token, and a drafter proposed {len(draft.tokens)} tokens with "
            f"{len(draft.probs)}; give each token what it was drawn from, or leave Draft.probs None."
        )
    if type(draft.tokens) is not tuple or any(type(token) is not int for token in draft.tokens):
        draft = replace(draft, tokens=tuple(int(token) for token in draft.tokens))
    if draft.confidence is not None and not _is_plain(draft.confidence, len(draft.tokens)):
        draft = replace(draft, confidence=_plain(draft.confidence, len(draft.tokens)))
    tokens = draft.tokens[:num_wanted]
    num_possible = _num_possible(seq, tokens, vocab_size)
    if draft.probs is None or num_possible == len(tokens):
        return draft.cut(num_possible)
    is_at_end = seq.grammar is not None and seq.grammar.allowed(seq, tokens[:num_possible]) is None
    return draft.cut(num_possible + (not is_at_end))


def _is_plain(confidence: object, num_tokens: int) -> bool:
    """Whether a confidence is what the planning takes, which may be compiled: a tuple with a float for each token."""
    return type(confidence) is tuple and len(confidence) == num_tokens and all(type(one) is float for one in confidence)


def _plain(confidence: Any, num_tokens: int) -> tuple[float, ...] | None:
    """A confidence as floats; None where it cannot be one: a draft of unknown confidence is as sound as any."""
    try:
        plain = tuple(float(one) for one in confidence)
    except (TypeError, ValueError, OverflowError):
        return None
    return plain if len(plain) == num_tokens else None


def _num_possible(seq: Sequence, tokens: tuple[int, ...], vocab_size: int) -> int:
    """Length of a draft up to the first id that is no token of the target, or that the sequence's grammar forbids."""
    num_known = next((i for i, token in enumerate(tokens) if not 0 <= token < vocab_size), len(tokens))
    return num_known if seq.grammar is None else seq.grammar.num_allowed(seq, tokens[:num_known])


def _origins(num_drafted: int, verdict: Verdict) -> tuple[str, ...]:
    """What each emitted token is; a pass without a draft emits a plain one."""
    num_own = len(verdict.tokens) - verdict.num_accepted
    own = "plain" if num_drafted == 0 else "bonus" if verdict.num_accepted == num_drafted else "recovered"
    return ("accepted",) * verdict.num_accepted + (own,) * num_own
