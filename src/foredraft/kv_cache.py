"""Paged blocks of keys and values: who holds which, what is shared, what may be evicted.

Owns: block tables, reference counts, the prefix cache, and ``truncate``, the only rollback.  Does not know: what is stored in a
block; tensors belong to the target.

A block is in exactly one state::

    free    no content that anyone could want            in _free
    idle    registered content, no holder                in _idle, least recently used first; evicted when free runs out
    held    one or more sequences list it                _num_holders[block] >= 1; may be registered too

Only full blocks of committed tokens are registered.  A registered block is found by (parent, its tokens), where parent is the
identity of the block before it, or the namespace; so a match is a match of the whole prefix, without relying on a hash.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count

Key = tuple[int | str, tuple[int, ...]]


@dataclass
class _Holding:
    """What one sequence holds: its blocks in order, tokens they are reserved for, and the identities of registered ones."""

    namespace: str
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    identities: list[int] = field(default_factory=list)


class KVCache:
    """Accounts for ``num_blocks`` blocks of ``block_size`` tokens."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        assert num_blocks >= 1 and block_size >= 1, (num_blocks, block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._prefix_caching = prefix_caching
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._num_holders = [0] * num_blocks
        self._generations = [0] * num_blocks
        self._holdings: dict[int, _Holding] = {}
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._identity_of: dict[int, int] = {}
        self._next_identity = count()

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def open(self, seq_id: int, tokens: Seq[int], namespace: str = "", *, reuse: bool = True) -> int:
        """Start a sequence; attach the longest cached prefix of full blocks and return its length in tokens.

        At least one token is left to compute, since a pass must yield logits.  ``reuse=False`` attaches nothing.
        """
        assert seq_id not in self._holdings, f"sequence {seq_id} is open already"
        holding = self._holdings[seq_id] = _Holding(namespace)
        parent: int | str = namespace
        size = self.block_size
        if reuse and self._prefix_caching:
            self.num_queried_tokens += len(tokens)
            for start in range(0, len(tokens) - size, size):
                block = self._block_of.get((parent, tuple(tokens[start : start + size])))
                if block is None:
                    break
                self._hold(block)
                holding.blocks.append(block)
                parent = self._identity_of[block]
                holding.identities.append(parent)
        holding.length = len(holding.blocks) * size
        self.num_hit_tokens += holding.length
        return holding.length

    def reserve(self, seq_id: int, length: int) -> bool:
        """Make room for ``length`` tokens in all; False, with nothing changed, when too few blocks are available."""
        holding = self._holdings[seq_id]
        num_new = self.blocks_for(length) - len(holding.blocks)
        if num_new > self.num_available:
            return False
        for _ in range(num_new):
            holding.blocks.append(self._take())
        holding.length = max(holding.length, length)
        return True

    def commit(self, seq_id: int, tokens: Seq[int]) -> None:
        """Keys and values of ``tokens`` (from the sequence's start) are computed and final: register full blocks."""
        holding = self._holdings[seq_id]
        assert len(tokens) <= holding.length, f"sequence {seq_id}: {len(tokens)} tokens committed, {holding.length} reserved"
        if not self._prefix_caching:
            return
        for index in range(len(holding.identities), len(tokens) // self.block_size):
            parent = holding.identities[-1] if holding.identities else holding.namespace
            start = index * self.block_size
            key = (parent, tuple(tokens[start : start + self.block_size]))
            block = self._block_of.get(key)
            if block is None:
                block = holding.blocks[index]
                self._block_of[key] = block
                self._key_of[block] = key
                self._identity_of[block] = next(self._next_identity)
            # Where another sequence registered the same content first, ours stays private and the chain goes on from theirs.
            holding.identities.append(self._identity_of[block])

    def truncate(self, seq_id: int, length: int) -> int:
        """Forget all tokens from ``length`` on and return the length that remains.

        That is less than ``length`` only when the cut falls into a block that another sequence shares: it cannot be
        overwritten, so it is given up.
        """
        holding = self._holdings[seq_id]
        assert 0 <= length <= holding.length, f"sequence {seq_id}: cannot truncate {holding.length} tokens to {length}"
        num_kept = self.blocks_for(length)
        if length % self.block_size:
            partial = holding.blocks[num_kept - 1]
            if self._num_holders[partial] > 1:
                num_kept -= 1
                length = num_kept * self.block_size
            elif partial in self._key_of:
                self._unregister(partial)
        while len(holding.blocks) > num_kept:
            self._release(holding.blocks.pop())
        del holding.identities[length // self.block_size :]
        holding.length = length
        return length

    def block_table(self, seq_id: int) -> list[int]:
        """The sequence's blocks, in order."""
        return self._holdings[seq_id].blocks

    def generation(self, block: int) -> int:
        """A number that changes whenever the block is handed out for other tokens than it held before."""
        return self._generations[block]

    def length(self, seq_id: int) -> int:
        """Tokens that the sequence's blocks are reserved for."""
        return self._holdings[seq_id].length

    def close(self, seq_id: int) -> None:
        """Give up all of a sequence's blocks; registered ones stay findable until they are evicted."""
        # The last block goes first, so that of one prefix the end is evicted before the beginning.
        for block in reversed(self._holdings.pop(seq_id).blocks):
            self._release(block)

    def check_integrity(self) -> None:
        """Assert the invariants of the table in the module's docstring."""
        num_holders = [0] * self.num_blocks
        for seq_id, holding in self._holdings.items():
            assert len(set(holding.blocks)) == len(holding.blocks), f"sequence {seq_id} lists a block twice: {holding.blocks}"
            assert self.blocks_for(holding.length) <= len(holding.blocks), (seq_id, holding)
            assert len(holding.identities) * self.block_size <= holding.length, (seq_id, holding)
            for block in holding.blocks:
                num_holders[block] += 1
        assert num_holders == self._num_holders, f"holders {num_holders} but counted {self._num_holders}"
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free) and not free & idle, (self._free, self._idle)
        held = {block for block, num in enumerate(num_holders) if num}
        assert not held & (free | idle) and len(held | free | idle) == self.num_blocks, (held, free, idle)
        assert idle <= self._key_of.keys() and not free & self._key_of.keys(), (idle, free, self._key_of)
        assert {block: key for key, block in self._block_of.items()} == self._key_of
        assert self._identity_of.keys() == self._key_of.keys()

    def _hold(self, block: int) -> None:
        self._num_holders[block] += 1
        self._idle.pop(block, None)

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._idle))
            self._unregister(block)
            del self._idle[block]
        self._generations[block] += 1
        self._hold(block)
        return block

    def _release(self, block: int) -> None:
        self._num_holders[block] -= 1
        if self._num_holders[block]:
            return
        if block in self._key_of:
            self._idle[block] = None
        else:
            self._free.append(block)

    def _unregister(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]
        del self._identity_of[block]
