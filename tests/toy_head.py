"""A draft head for the table target that notices a wrong cache.

Owns: ToyHead, whose features and keys are tokens and positions.  Does not know: any single test.
"""

from __future__ import annotations

import numpy as np

from foredraft.drafters.context import draws_for
from foredraft.drafters.eagle import EagleDrafter
from foredraft.drafters.eagle_pass import Float32s, HeadOutput, HeadPass, Int32s, chain
from foredraft.kv_cache import KVCache
from foredraft.testing.toy import TableTarget

LAYER = 5
EMPTY = -1


class ToyHead:
    """What a row is told, it writes to its slot; then it reads all that it may attend to, and checks that one follows the other.

    A feature is (token, position), as in the target's states.  The next token is what the target's table says by the last two.
    """

    hidden_size = 2

    def __init__(self, target: TableTarget, target_ids: np.ndarray, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size, self.target_ids = num_blocks, block_size, target_ids
        self.num_rows = 0
        self._target = target
        # Of each slot: the token, its position, and the token and position of its feature.
        self._slots = np.full((num_blocks * block_size, 4), EMPTY, np.int64)

    def run(self, rows: HeadPass) -> HeadOutput:
        """See HeadRunner."""
        if len(rows.row_of):
            states = rows.states.reshape(len(rows.row_of), 3)
            assert (states[:, 2] == LAYER).all(), states
            rows.features[rows.row_of] = states[:, :2]
        self.num_rows += len(rows.tokens)
        entries = np.column_stack([rows.tokens, rows.positions, rows.features.astype(np.int64)])
        slots = [self._slot(rows, row, int(position)) for row, position in enumerate(rows.positions)]
        assert len(set(slots)) == len(slots), f"two rows share a slot: {slots}"
        self._slots[slots] = entries
        context = [self._context(rows, row) for row in range(len(rows.tokens))]
        size = self._target.vocab_size
        logits = [
            self._target._by_pair[context[row][-2] % size, context[row][-1] % size][self.target_ids] for row in rows.logit_rows
        ]
        outputs = entries[rows.logit_rows][:, :2].astype(np.float32)
        return HeadOutput(np.array(logits, np.float32).reshape(len(outputs), len(self.target_ids)), outputs)

    def draft(self, rows: HeadPass, num_wanted: Int32s) -> tuple[Int32s, Float32s]:
        """See HeadRunner."""
        return chain(self, rows, num_wanted, self.target_ids)

    def _slot(self, rows: HeadPass, row: int, position: int) -> int:
        block = int(rows.tables[rows.table_of[row] + position // self.block_size])
        assert 0 <= block < self.num_blocks, block
        return block * self.block_size + position % self.block_size

    def _context(self, rows: HeadPass, row: int) -> list[int]:
        first, last = int(rows.first_keys[row]), int(rows.positions[row])
        assert 1 <= first <= last, (first, last)
        found = self._slots[[self._slot(rows, row, position) for position in range(first, last + 1)]]
        assert found[:, 1].tolist() == list(range(first, last + 1)), f"keys of other positions: {found.tolist()}"
        assert found[:, 3].tolist() == list(range(first - 1, last)), f"features of other positions: {found.tolist()}"
        assert found[1:, 2].tolist() == found[:-1, 0].tolist(), f"features of other tokens: {found.tolist()}"
        return [int(found[0, 2]), *found[:, 0].tolist()]


def toy_eagle(
    target: TableTarget, kv: KVCache, rule: str = "coupled", *, num_scratch: int = 16, max_positions: int = 128
) -> EagleDrafter:
    """A drafter that knows all tokens of the target's but every sixth."""
    target_ids = np.array([token for token in range(target.vocab_size) if token % 6 != 5], np.int64)
    stream, with_probs = draws_for(rule)
    return EagleDrafter(
        ToyHead(target, target_ids, kv.num_blocks + num_scratch, kv.block_size),
        kv,
        hidden_layers=(LAYER,),
        target_ids=target_ids,
        vocab_size=target.vocab_size,
        max_positions=max_positions,
        stream=stream,
        with_probs=with_probs,
        max_num_batched_tokens=20,
    )
