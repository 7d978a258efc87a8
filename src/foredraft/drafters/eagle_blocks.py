"""What the blocks of the target's cache hold of a draft head's keys and values.

Owns: which blocks a head has filled, and the feature of each one's last token.  Does not know: how either is computed.

A head's keys and values lie beside the target's own, in blocks of the same numbers, so that a prefix that the target finds in its
cache is there for the head too.  What it wrote for a token depends on the tokens up to that one only.  To go on behind a block
takes the feature of its last token, so that is kept as well.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from foredraft.kv_cache import KVCache
from foredraft.types import FloatArray


class HeadBlocks:
    """An account beside ``kv``'s: a block is filled until ``kv`` hands it out anew."""

    def __init__(self, kv: KVCache, hidden_size: int) -> None:
        self.block_size = kv.block_size
        self._kv = kv
        self._generations = [-1] * kv.num_blocks
        # Pages of an empty array take no memory until they are written.
        self._features = np.empty((kv.num_blocks, hidden_size), np.float32)

    def table(self, seq_id: int, num_tokens: int) -> list[int] | None:
        """The blocks of a sequence's first tokens; None while it does not have them all."""
        blocks, needed = self._kv.block_table(seq_id), self._kv.blocks_for(num_tokens)
        return blocks[:needed] if needed <= len(blocks) else None

    def held(self, seq_id: int) -> list[int]:
        """All blocks of a sequence."""
        return list(self._kv.block_table(seq_id))

    def fill(self, block: int, feature: FloatArray) -> None:
        """All of a block is written; ``feature`` is that of its last token, float32 [d]."""
        self._generations[block] = self._kv.generation(block)
        self._features[block] = feature

    def is_filled(self, block: int) -> bool:
        """Whether a block holds what was written for the tokens that the target has there now."""
        return self._generations[block] == self._kv.generation(block)

    def feature(self, block: int) -> FloatArray:
        """The feature of a filled block's last token, float32 [d]."""
        assert self.is_filled(block), block
        found: FloatArray = self._features[block]
        return found

    def num_filled_at_end(self, blocks: Seq[int]) -> int:
        """How many of the last of ``blocks`` are filled, without a gap."""
        return next((i for i, block in enumerate(reversed(blocks)) if not self.is_filled(block)), len(blocks))
