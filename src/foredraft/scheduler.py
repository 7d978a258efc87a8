"""Which sequences get rows in the next pass.

Owns: the waiting and running queues, the token budget, admission against the KV budget, and preemption.  Does not know: tensors,
drafts, or text; it sees sequences and a block account.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from foredraft.kv_cache import KVCache
from foredraft.types import Sequence

# Prompt log-probabilities need a logits row per prompt token; chunks of this size bound their memory.
MAX_PROMPT_LOGPROB_ROWS = 64


@dataclass(frozen=True)
class Schedule:
    """A step's rows: ``num_rows[i]`` known tokens of ``seqs[i]`` are computed; ``num_rows_left`` of the budget may be drafts."""

    seqs: list[Sequence]
    num_rows: list[int]
    num_rows_left: int


class Scheduler:
    """First come, first served; running sequences before waiting ones.

    Every running sequence gets one row, then the rest of the budget goes to prompts in order of arrival, in chunks.
    A sequence is admitted when blocks for all its known tokens are available, and one more for each running sequence to
    grow into.  When a running one needs a block and none is left, the youngest is preempted: its blocks are freed and it
    is computed again later.

    ``on_admit`` and ``on_preempt`` let the engine, the only writer of sequences, follow.  One that raises leaves the sequence
    waiting, and must leave it without blocks.
    """

    def __init__(
        self,
        kv: KVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        on_admit: Callable[[Sequence], None],
        on_preempt: Callable[[Sequence], None],
    ) -> None:
        assert max_num_batched_tokens >= max_num_seqs, (max_num_batched_tokens, max_num_seqs)
        self._kv = kv
        self._max_num_seqs = max_num_seqs
        self._max_num_rows = max_num_batched_tokens
        self._on_admit = on_admit
        self._on_preempt = on_preempt
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(seq)

    def holds(self, seq: Sequence) -> bool:
        """True while the sequence waits or runs."""
        return seq in self.running or seq in self.waiting

    def remove(self, seq: Sequence) -> bool:
        """Take a sequence out of the queues; True when it was running, and so held blocks."""
        if seq in self.running:
            self.running.remove(seq)
            return True
        self.waiting.remove(seq)
        return False

    def schedule(self) -> Schedule:
        """Rows of the next step; empty when there is nothing to do."""
        num_preempted = self._secure_next_rows()
        if not num_preempted:
            self._admit()
        num_rows = [1] * len(self.running)
        left = self._max_num_rows - len(self.running)
        for i, seq in enumerate(self.running):
            wish = seq.num_pending - 1
            if seq.params.prompt_logprobs is not None:
                wish = min(wish, MAX_PROMPT_LOGPROB_ROWS - 1)
            extra = min(wish, left)
            num_rows[i] += extra
            left -= extra
        return Schedule(list(self.running), num_rows, left)

    def _secure_next_rows(self) -> int:
        """Reserve blocks for all known tokens of the running, oldest first, preempting the youngest where they run out."""
        num_preempted = 0
        index = 0
        while index < len(self.running):
            seq = self.running[index]
            if self._kv.reserve(seq.seq_id, len(seq.tokens)):
                index += 1
                continue
            victim = self.running.pop()
            assert self.running, f"{self._kv.num_blocks} blocks cannot hold the {len(seq.tokens)} tokens of sequence {seq.seq_id}"
            # First, so that whatever goes wrong it is somewhere and can be removed.
            self.waiting.appendleft(victim)
            self._on_preempt(victim)
            num_preempted += 1
        self.num_preemptions += num_preempted
        return num_preempted

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_num_seqs:
            seq = self.waiting[0]
            # Cached blocks are counted as needed here; that refuses some that would fit, but never admits one that would not.
            if self._kv.blocks_for(len(seq.tokens)) + len(self.running) > self._kv.num_available:
                break
            # A sequence that could not be admitted waits on, and can be removed.
            self._on_admit(seq)
            self.waiting.popleft()
            reserved = self._kv.reserve(seq.seq_id, len(seq.tokens))
            assert reserved, f"sequence {seq.seq_id} was admitted without room for its {len(seq.tokens)} tokens"
            self.running.append(seq)
