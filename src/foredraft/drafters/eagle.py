"""Drafts by a small head on the target's own hidden states (EAGLE, 2401.15077; EAGLE-3, 2503.01840).

Owns: which states wait to be read, the passes of a ``propose``, and how a head's logits become draft tokens.  Does not know: how a
head is computed or loaded, or what the verification rule does with a draft.

``observe`` only keeps the states of tokens that stand.  ``propose`` first reads what waits, of all sequences together in one pass,
which writes keys and values of true states over those of drafts, and yields each first draft token; then it runs one row per
sequence for every further one, with the head's own output in place of a state.  A sequence that never drafts costs a copy of its
states, and a prompt is read only where drafts are asked for.

Tokens are drawn as those of a draft model: from the one distribution of the row, here over the draft vocabulary, and under the
coupled rule with the very noise that the target will use at that position.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from foredraft.config import SpeculativeConfig
from foredraft.drafters.context import DrafterContext
from foredraft.drafters.eagle_blocks import HeadBlocks
from foredraft.drafters.eagle_pass import HeadPass, HeadRunner, Int32s, next_rows, warm_up
from foredraft.kv_cache import KVCache
from foredraft.sampling import PositionNoise, distribution, is_adjusted, noise_for, top_probability
from foredraft.types import ConfigError, Distribution, Draft, FloatArray, IntArray, Sequence, Verdict

# States of so many tokens may wait, those of a prompt until its answer's first draft would be due.  More are read if the head is in
# much use; if not, the older ones are forgotten.
MAX_WAITING, MAX_PROMPT_WAITING = 128, 1024
# Use: of late, the share of an answer's passes before which a draft was asked for, none at first.  With little, only the newest
# states are read for a draft.
USE_RATE, MUCH_USE, LITTLE_USE = 0.01, 0.1, 0.05
# What waits when a sequence ends that asked now and then is still read if it is so little, so that a later request finds all of a
# shared prefix.
MAX_READ_AT_END = 32


@dataclass
class _State:
    """How far a sequence was read.

    Rows up to slot ``next_slot - 1`` are written, of those from ``first_key`` on.  ``waiting`` are states of the tokens at
    positions
    ``start .. end - 1``.  ``feature`` is that of token ``next_slot - 1`` where it came from the prefix cache: then ``start`` is
    ``next_slot``, else ``next_slot - 1``.  ``last`` is the feature that the last written row was made of.
    """

    next_slot: int
    first_key: int
    start: int
    feature: FloatArray | None = None
    last: FloatArray | None = None
    waiting: list[FloatArray] = field(default_factory=list)
    num_waiting: int = 0
    num_asked: int = 0

    @property
    def end(self) -> int:
        """Position behind the last known state."""
        return self.start + self.num_waiting

    def push(self, states: FloatArray) -> None:
        # A few rows of the array of a whole pass must not keep all of it.
        is_part = isinstance(states.base, np.ndarray) and states.base.size > 2 * states.size
        self.waiting.append(states.copy() if is_part else states)
        self.num_waiting += len(states)

    def keep(self, most: int) -> None:
        """Where more than ``most`` states wait, drop all but the newest: what comes then attends to nothing before."""
        if self.num_waiting <= most:
            return
        num = self.num_waiting - most // 2
        self.start, self.num_waiting = self.start + num, self.num_waiting - num
        while num >= len(self.waiting[0]):
            num -= len(self.waiting.pop(0))
        # A copy, so that what was dropped takes no memory.
        self.waiting[0] = self.waiting[0][num:].copy()
        self.next_slot, self.feature, self.last = self.start + 1, None, None
        self.first_key = self.next_slot


@dataclass
class _Job:
    """One sequence in one pass: the rows of ``num_rows`` tokens from position ``slot`` on, and a draft behind them."""

    seq: Sequence
    state: _State
    table: list[int]
    num_wanted: int = 0
    slot: int = 0
    num_rows: int = 0
    noise: PositionNoise | None = None
    tokens: list[int] = field(default_factory=list)
    probs: list[Distribution] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)


class EagleDrafter:
    """Drafts with ``runner``, a head on the states that leave the target's ``hidden_layers``.

    It drafts nothing while a sequence's states are not known up to its last token but one, as before its first pass, and nothing
    beyond ``max_positions`` tokens, where the head was not trained to go.

    Args:
        runner: the head, with room for the blocks of ``kv`` and, behind them, for drafts.
        kv: accounts for the target's blocks.
        target_ids: int64 [D], the target's id of each draft token.
        vocab_size: of the target.
        stream: noise that tokens are drawn with; see ``context.draws_for``.
        with_probs: report the distributions that tokens were drawn from.
        max_num_batched_tokens: rows per pass, at most.
    """

    def __init__(
        self,
        runner: HeadRunner,
        kv: KVCache,
        *,
        hidden_layers: tuple[int, ...],
        target_ids: IntArray,
        vocab_size: int,
        max_positions: int,
        stream: int,
        with_probs: bool,
        max_num_batched_tokens: int = 512,
    ) -> None:
        assert runner.block_size == kv.block_size and runner.num_blocks > kv.num_blocks, (runner.num_blocks, kv.num_blocks)
        self.hidden_layers = hidden_layers
        self.blocks = HeadBlocks(kv, runner.hidden_size)
        self._runner, self._kv = runner, kv
        self._target_ids, self._vocab_size = target_ids, vocab_size
        self._is_ascending = bool(np.all(np.diff(target_ids) > 0))
        self._max_positions, self._max_num_rows = max_positions, max_num_batched_tokens
        self._stream, self._with_probs = stream, with_probs
        self._states: dict[int, _State] = {}
        self._use = 0.0

    def open(self, seq: Sequence) -> None:
        """Take over what the target's prefix cache has of the sequence, as far back as the head has filled it."""
        num_cached, size = seq.num_cached, self._kv.block_size
        blocks = self.blocks.held(seq.seq_id)[: num_cached // size] if num_cached else []
        num_filled = self.blocks.num_filled_at_end(blocks)
        if num_filled:
            first_key = max(1, num_cached - num_filled * size)
            self._states[seq.seq_id] = _State(num_cached, first_key, num_cached, self.blocks.feature(blocks[-1]).copy())
        else:
            self._states[seq.seq_id] = _State(num_cached + 1, num_cached + 1, num_cached)

    def propose(self, seqs: list[Sequence], num_tokens: list[int]) -> list[Draft]:
        """One draft per sequence, at most ``num_tokens[i]`` tokens."""
        if self._use < LITTLE_USE:
            for seq in seqs:
                self._states[seq.seq_id].keep(MAX_WAITING)
        self._use += USE_RATE * len(seqs)
        jobs = [self._start(seq, num) for seq, num in zip(seqs, num_tokens, strict=True)]
        for greedy in (True, False):
            alike = [job for job in jobs if job.num_wanted and self._is_greedy(job) is greedy]
            for group in self._groups(alike):
                if greedy:
                    self._follow(group)
                else:
                    self._draw(group)
        return [self._result(job) for job in jobs]

    def observe(self, seq: Sequence, verdict: Verdict, hidden: FloatArray | None) -> None:
        """Keep the states; they are read when a draft is asked for, or when there are many."""
        assert hidden is not None, "the head needs hidden states"
        is_answering = seq.num_output > 1
        if is_answering:
            self._use -= USE_RATE * self._use
        state, end = self._states[seq.seq_id], seq.num_computed
        if end > self._max_positions:
            state.waiting, state.num_waiting = [], 0
            return
        assert state.end == end - len(hidden), f"states up to {state.end} are known, and those of {end - len(hidden)} .. {end} came"
        state.push(hidden)
        most = MAX_WAITING if is_answering else MAX_PROMPT_WAITING
        if self._use < MUCH_USE:
            state.keep(most)
        while state.num_waiting > most:
            self._read([seq])

    def close(self, seq: Sequence) -> None:
        """Forget the sequence, but not what its blocks hold."""
        state = self._states.get(seq.seq_id)
        if state is None:
            return
        if state.num_asked > LITTLE_USE * seq.num_output and 0 < state.num_waiting <= MAX_READ_AT_END:
            self._read([seq])
        del self._states[seq.seq_id]

    # -------------------------------------------------------------------------------------------- passes

    def _start(self, seq: Sequence, num_tokens: int) -> _Job:
        """A job that drafts as much as there is room for; nothing where the last token's row cannot be made."""
        state, num_known = self._states[seq.seq_id], len(seq.tokens)
        state.num_asked += 1
        table = self.blocks.table(seq.seq_id, num_known)
        if table is None or num_known < 2 or num_known >= self._max_positions:
            return _Job(seq, state, [])
        is_new = state.end == num_known - 1 and state.next_slot < num_known
        if not is_new and not (state.next_slot == num_known and state.last is not None):
            return _Job(seq, state, [])
        while state.num_waiting > self._max_num_rows // 2:
            self._read([seq])
        return _Job(seq, state, table, min(num_tokens, self._max_positions - num_known), noise=noise_for(seq))

    def _groups(self, jobs: list[_Job]) -> list[list[_Job]]:
        """Jobs that fit into a pass, and whose drafts fit behind the blocks of the target."""
        groups: list[list[_Job]] = []
        num_rows = num_scratch = 0
        size, room = self._kv.block_size, self._runner.num_blocks - self._kv.num_blocks
        for job in jobs:
            # The last token of a draft is not computed.
            job.num_wanted = min(job.num_wanted, (len(job.table) + room) * size - len(job.seq.tokens) + 1)
            needed = max(0, self._kv.blocks_for(len(job.seq.tokens) + job.num_wanted - 1) - len(job.table))
            num_new = job.state.num_waiting + 1
            if not groups or num_rows + num_new > self._max_num_rows or num_scratch + needed > room:
                groups.append([])
                num_rows = num_scratch = 0
            first = self._kv.num_blocks + num_scratch
            job.table += range(first, first + needed)
            num_rows, num_scratch = num_rows + num_new, num_scratch + needed
            groups[-1].append(job)
        return groups

    def _read(self, seqs: list[Sequence]) -> None:
        """Write the rows of states that wait, up to as many as a pass may have, and draft nothing."""
        jobs = []
        for seq in seqs:
            state = self._states[seq.seq_id]
            # The row of a state is that of the token behind it.
            stop = min(state.end + 1, len(seq.tokens), state.next_slot + self._max_num_rows)
            num = stop - state.next_slot
            if num <= 0:
                state.waiting, state.start, state.num_waiting = [], state.end, 0
                continue
            held, needed = self.blocks.held(seq.seq_id), self._kv.blocks_for(stop)
            scratch = range(self._kv.num_blocks, self._kv.num_blocks + max(0, needed - len(held)))
            assert len(scratch) <= self._runner.num_blocks - self._kv.num_blocks, (needed, len(held))
            jobs.append(_Job(seq, state, [*held[:needed], *scratch], slot=state.next_slot, num_rows=num))
        if jobs:
            rows = self._rows(jobs, wants_logits=False)
            self._runner.run(rows)
            self._note(jobs, rows)

    def _catch_up(self, jobs: list[_Job]) -> HeadPass:
        """The first pass of a draft: rows of all states that wait, or the last row again when none does."""
        for job in jobs:
            job.slot = min(job.state.next_slot, len(job.seq.tokens) - 1)
            job.num_rows = len(job.seq.tokens) - job.slot
        return self._rows(jobs, wants_logits=True)

    def _rows(self, jobs: list[_Job], *, wants_logits: bool) -> HeadPass:
        nums = [job.num_rows for job in jobs]
        ends = np.cumsum(nums)
        total, width = int(ends[-1]), self._runner.hidden_size
        features = np.empty((total, width), np.float32)
        states: list[FloatArray] = []
        row_of: list[int] = []
        for job, end in zip(jobs, ends.tolist(), strict=True):
            state, first = job.state, end - job.num_rows
            given = state.feature if job.slot == state.next_slot else state.last
            if given is not None:
                features[first] = given
                first += 1
            row_of += range(first, end)
            num_left = end - first
            for chunk in state.waiting:
                if num_left > 0:
                    states.append(chunk[:num_left])
                    num_left -= len(chunk)
        tables = [job.table for job in jobs]
        offsets = np.cumsum([0, *map(len, tables)])[:-1]
        return HeadPass(
            tokens=np.array([t for job in jobs for t in job.seq.tokens[job.slot : job.slot + job.num_rows]], np.int32),
            positions=np.array([p for job in jobs for p in range(job.slot, job.slot + job.num_rows)], np.int32),
            tables=np.array([block for table in tables for block in table], np.int32),
            table_of=np.repeat(offsets, nums).astype(np.int32),
            first_keys=np.repeat([job.state.first_key for job in jobs], nums).astype(np.int32),
            states=np.ascontiguousarray(np.concatenate(states), np.float32) if states else np.empty((0, 1), np.float32),
            row_of=np.array(row_of, np.int32),
            features=features,
            logit_rows=(ends - 1).astype(np.int32) if wants_logits else np.empty(0, np.int32),
        )

    def _note(self, jobs: list[_Job], rows: HeadPass) -> None:
        """The rows of ``jobs`` are written: what waited is read, and blocks that were completed are filled."""
        size, first = self._kv.block_size, 0
        for job in jobs:
            state, stop = job.state, job.slot + job.num_rows
            # The row at the start of a block was made of the feature of the last token of the block before.
            for slot in range(-(-job.slot // size) * size, stop, size):
                block = job.table[slot // size - 1]
                if slot and state.first_key <= max(1, slot - size):
                    self.blocks.fill(block, rows.features[first + slot - job.slot])
            state.last = rows.features[first + job.num_rows - 1].copy()
            num_read = stop - 1 - state.start
            if num_read < state.num_waiting:
                left = np.concatenate(state.waiting)[max(0, num_read) :].copy()
                state.waiting, state.num_waiting = [left], len(left)
            else:
                state.waiting, state.num_waiting = [], 0
            state.next_slot, state.start, state.feature = stop, stop - 1, None
            first += job.num_rows

    # -------------------------------------------------------------------------------------------- drafts

    def _is_greedy(self, job: _Job) -> bool:
        """Whether the head's likeliest token is drafted, whatever its other logits are."""
        return job.seq.params.temperature == 0.0 and not is_adjusted(job.seq)

    def _follow(self, jobs: list[_Job]) -> None:
        rows = self._catch_up(jobs)
        tokens, probabilities = self._runner.draft(rows, np.array([job.num_wanted for job in jobs], np.int32))
        self._note(jobs, rows)
        for job, ids, chances in zip(jobs, tokens.tolist(), probabilities.tolist(), strict=True):
            num = next((i for i, token in enumerate(ids[: job.num_wanted]) if token < 0), job.num_wanted)
            job.tokens, job.confidence = ids[:num], chances[:num]
            if self._with_probs:
                job.probs = [Distribution(np.array([token], np.int64), np.zeros(1)) for token in job.tokens]

    def _draw(self, jobs: list[_Job]) -> None:
        rows = self._catch_up(jobs)
        output = self._runner.run(rows)
        self._note(jobs, rows)
        chosen: Int32s = rows.logit_rows
        while True:
            drawn = [self._draw_token(job, logits) for job, logits in zip(jobs, output.logits, strict=True)]
            going = [i for i, job in enumerate(jobs) if drawn[i] and len(job.tokens) < job.num_wanted]
            if not going:
                return
            jobs = [jobs[i] for i in going]
            tokens = np.array([job.tokens[-1] for job in jobs], np.int32)
            rows = next_rows(rows, chosen[going], tokens, output.outputs[going])
            chosen, output = rows.logit_rows, self._runner.run(rows)

    def _draw_token(self, job: _Job, logits: FloatArray) -> bool:
        """Draw the job's next token; False where the head has none that the request allows, or no finite logits."""
        assert job.noise is not None
        position = len(job.seq.tokens) + len(job.tokens)
        try:
            dist = self._distribution(job, logits)
        except FloatingPointError:
            return False
        token = job.noise.draw(dist, position, self._stream)
        job.tokens.append(token)
        job.probs.append(dist)
        job.confidence.append(top_probability(logits) if len(dist.tokens) == 1 else dist.probability(token))
        return True

    def _distribution(self, job: _Job, logits: FloatArray) -> Distribution:
        """Of the next token, in the target's ids."""
        if self._is_ascending and not is_adjusted(job.seq, len(job.tokens)):
            dist = distribution(logits, job.seq, job.tokens)
            return Distribution(self._target_ids[dist.tokens], dist.log_probs)
        row = np.full(self._vocab_size, -np.inf, np.float32)
        row[self._target_ids] = logits
        return distribution(row, job.seq, job.tokens)

    def _result(self, job: _Job) -> Draft:
        if not job.tokens:
            return Draft()
        return Draft(tuple(job.tokens), tuple(job.probs) if self._with_probs else None, confidence=tuple(job.confidence))


def scratch_blocks(num_speculative_tokens: int, max_num_seqs: int, block_size: int) -> int:
    """Blocks behind the target's for the drafts of all sequences at once; at least one, which a row at an end may need."""
    return max_num_seqs * max(1, -(-num_speculative_tokens // block_size))


def create(config: SpeculativeConfig, context: DrafterContext) -> EagleDrafter:
    """Factory for methods ``eagle`` and ``eagle3``; loads the head that ``config.model`` names.

    Raises:
        ConfigError: no head is named, it is of the other kind, was made for another target, or none can be loaded here.
        ModelFileError, UnsupportedModelError: it cannot be read.
    """
    if config.model is None:
        raise ConfigError(f'method {config.method!r} must have a head; add "model" to speculative_config.')
    if context.load_head is None or context.kv is None:
        raise ConfigError(f"method {config.method!r} cannot load heads here; choose 'ngram' or 'suffix'.")
    num_scratch = scratch_blocks(config.num_speculative_tokens, context.max_num_seqs, context.kv.block_size)
    head = context.load_head(config.model, num_scratch)
    warm_up(head.runner)
    return EagleDrafter(
        head.runner,
        context.kv,
        hidden_layers=head.hidden_layers,
        target_ids=head.target_ids,
        vocab_size=context.vocab_size,
        max_positions=min(head.max_positions, context.max_model_len),
        stream=context.stream,
        with_probs=context.with_probs,
        max_num_batched_tokens=context.max_num_batched_tokens,
    )
