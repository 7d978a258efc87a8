"""A table language model and scripted drafters that exercise the whole engine in milliseconds.

Owns: a target whose every probability is known and which notices a wrong cache.  Does not know: the engine.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from foredraft.kv_cache import KVCache
from foredraft.types import Draft, FloatArray, PassOutput, Rows, Sequence, Verdict

_MODULUS = 61


class TableTarget:
    """Logits looked up by the last two tokens and, weakly, by a checksum of the whole context.

    Its "keys and values" are the token ids themselves: a pass writes them to the cache's slots and then reads the context
    back through the block table, so a wrong table, a missed rollback or a stale shared block changes the output.
    Hidden state of a row at layer i: (token, position, i).
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        *,
        vocab_size: int = 8,
        max_model_len: int = 128,
        seed: int = 0,
        spread: float = 2.0,
    ) -> None:
        rng = np.random.Generator(np.random.Philox(seed))
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_passes = 0
        self._by_pair = (spread * rng.standard_normal((vocab_size, vocab_size, vocab_size))).astype(np.float32)
        self._by_checksum = (0.3 * spread * rng.standard_normal((_MODULUS, vocab_size))).astype(np.float32)
        self._slots = np.full(num_blocks * block_size, -1, dtype=np.int64)

    def row(self, context: list[int]) -> FloatArray:
        """Logits of the token after ``context``, float32 [vocab_size]."""
        last, before = context[-1], context[-2] if len(context) > 1 else 0
        checksum = 0
        for token in context:
            checksum = (checksum * 7 + token + 1) % _MODULUS
        logits: FloatArray = self._by_pair[before % self.vocab_size, last % self.vocab_size] + self._by_checksum[checksum]
        return logits

    def forward(self, batch: list[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        """See types.Target."""
        self.num_passes += 1
        slots = [self._slots_of(rows) for rows in batch]
        for rows, places in zip(batch, slots, strict=True):
            self._slots[places[rows.start :]] = rows.tokens
        logits, hidden = [], []
        for rows, places in zip(batch, slots, strict=True):
            context = [int(token) for token in self._slots[places]]
            ends = range(len(places) - rows.num_logits + 1, len(places) + 1)
            table = [self.row(context[:end]) for end in ends]
            logits.append(np.array(table, dtype=np.float32).reshape(len(table), self.vocab_size))
            states = [[value for layer in taps for value in (context[i], i, layer)] for i in range(rows.start, len(places))]
            hidden.append(np.array(states, dtype=np.float32))
        return PassOutput(logits, hidden if taps else None)

    def _slots_of(self, rows: Rows) -> FloatArray:
        num_tokens = rows.start + len(rows.tokens)
        assert num_tokens <= self.max_model_len, f"{num_tokens} tokens in a context of {self.max_model_len}"
        positions = np.arange(num_tokens)
        blocks = np.asarray(rows.block_table)[positions // self.block_size]
        places: FloatArray = blocks * self.block_size + positions % self.block_size
        return places

    def kv_cache(self, prefix_caching: bool = True) -> KVCache:
        """A block account that fits this target's slots."""
        return KVCache(len(self._slots) // self.block_size, self.block_size, prefix_caching)


class ScriptedDrafter:
    """Drafts what ``script(tokens, num_tokens)`` says, and records what it was told."""

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, script: Callable[[list[int], int], list[int]], hidden_layers: tuple[int, ...] = ()) -> None:
        self.script = script
        self.hidden_layers = hidden_layers
        self.opened: list[int] = []
        self.closed: list[int] = []
        self.verdicts: list[tuple[int, Verdict]] = []
        self.hidden: list[tuple[int, FloatArray | None]] = []

    def open(self, seq: Sequence) -> None:
        """Record it."""
        self.opened.append(seq.seq_id)

    def propose(self, seqs: list[Sequence], num_tokens: list[int]) -> list[Draft]:
        """Ask the script."""
        return [Draft(tuple(self.script(list(seq.tokens), k))) for seq, k in zip(seqs, num_tokens, strict=True)]

    def observe(self, seq: Sequence, verdict: Verdict, hidden: FloatArray | None) -> None:
        """Record it."""
        self.verdicts.append((seq.seq_id, verdict))
        self.hidden.append((seq.seq_id, hidden))

    def close(self, seq: Sequence) -> None:
        """Record it."""
        self.closed.append(seq.seq_id)


def oracle(answer: list[int], wrong_at: frozenset[int] = frozenset(), vocab_size: int = 8) -> Callable[[list[int], int], list[int]]:
    """A script that knows the whole token stream ``answer`` and errs exactly at the positions ``wrong_at``."""

    def script(tokens: list[int], num_tokens: int) -> list[int]:
        start = len(tokens)
        return [
            (token + 1) % vocab_size if start + i in wrong_at else token
            for i, token in enumerate(answer[start : start + num_tokens])
        ]

    return script
