"""Where a pass's rows are: geometry of the batch, the layout that every layer reads, and the tensors of the cache.

Owns: Geometry, PassLayout, KVStorage.  Does not know: what is computed over them, or which blocks are free.

A *slot* is one token's place in the cache: ``block * block_size + offset``.  T counts the rows of a pass, S its sequences, G
key-value heads, D the head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.architecture import Architecture, Rope
from foredraft.types import CapacityError, IntArray, Rows


@dataclass(frozen=True)
class Geometry:
    """A batch in plain integers, one entry per sequence.

    Sequence i computes ``num_rows[i]`` tokens from position ``starts[i]``; ``block_tables[i]`` covers all its positions.
    """

    starts: tuple[int, ...]
    num_rows: tuple[int, ...]
    block_tables: tuple[IntArray, ...]
    block_size: int

    @classmethod
    def of(cls, batch: Sequence[Rows], block_size: int) -> Geometry:
        """The geometry of a batch; table entries beyond a sequence's last position are dropped."""
        starts, num_rows, tables = [], [], []
        for rows in batch:
            needed = -(-(rows.start + len(rows.tokens)) // block_size)
            assert rows.start >= 0 and rows.tokens, (rows.start, rows.tokens)
            assert len(rows.block_table) >= needed, (len(rows.block_table), needed, rows.start, len(rows.tokens))
            starts.append(rows.start)
            num_rows.append(len(rows.tokens))
            tables.append(np.asarray(rows.block_table[:needed], dtype=np.int64))
        return cls(tuple(starts), tuple(num_rows), tuple(tables), block_size)

    @property
    def context_lengths(self) -> tuple[int, ...]:
        """Tokens in each sequence's cache after the pass."""
        return tuple(start + rows for start, rows in zip(self.starts, self.num_rows, strict=True))

    @property
    def query_offsets(self) -> tuple[int, ...]:
        """First row of each sequence, and T at the end: S + 1 numbers."""
        offsets = [0]
        for rows in self.num_rows:
            offsets.append(offsets[-1] + rows)
        return tuple(offsets)

    def positions(self) -> IntArray:
        """Absolute position of every row: int64 [T]."""
        return np.concatenate([np.arange(s, s + n, dtype=np.int64) for s, n in zip(self.starts, self.num_rows, strict=True)])

    def slots(self) -> IntArray:
        """Cache slot of every row: int64 [T]."""
        parts = []
        for start, rows, table in zip(self.starts, self.num_rows, self.block_tables, strict=True):
            positions = np.arange(start, start + rows, dtype=np.int64)
            parts.append(table[positions // self.block_size] * self.block_size + positions % self.block_size)
        return np.concatenate(parts)


@dataclass(frozen=True)
class PassLayout:
    """What every layer of one pass needs, computed once per pass.

    ``token_ids``, ``slots``: int64 [T] on the device.  ``rotary``: per Rope the cosine and the sine of every row's angles,
    [T, 1, D] each; the first half of a sine row is negated, so that rotated = x * cosine + swap_halves(x) * sine.
    ``attention``: per window the plan that the ops made for themselves.
    """

    geometry: Geometry
    token_ids: Tensor
    slots: Tensor
    rotary: Mapping[Rope, tuple[Tensor, Tensor]]
    attention: Mapping[int | None, Any]


def rotary_rows(rope: Rope, positions: IntArray, head_dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine [T, 1, D] of RoPE (Su et al., 2104.09864, section 3.2) at ``positions`` int64 [T].

    Angles are float64: float32 is off by more than 1e-3 radians beyond position 16 000.
    """
    angles = positions[:, None] * rope.inverse_frequencies(head_dim)[None, :]
    cosine, sine = np.cos(angles), np.sin(angles)
    rows = (np.concatenate((cosine, cosine), axis=1), np.concatenate((-sine, sine), axis=1))
    cos, sin = (torch.from_numpy(part).to(dtype).unsqueeze(1).to(device) for part in rows)
    return cos, sin


class KVStorage:
    """Keys and values of every layer, allocated once: ``keys[i]`` and ``values[i]`` are [num_blocks, block_size, G, D].

    Starts as zeros: padded rows of an attention call read slots that were never written, and NaN times zero is NaN.

    Raises:
        CapacityError: the memory is not there.
    """

    def __init__(
        self, architecture: Architecture, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        assert num_blocks >= 1 and block_size >= 1, (num_blocks, block_size)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.bytes = architecture.kv_bytes_per_token(dtype.itemsize) * num_blocks * block_size
        shape = (num_blocks, block_size, architecture.num_kv_heads, architecture.head_dim)

        def allocate() -> list[Tensor]:
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(architecture.num_layers)]

        try:
            self.keys, self.values = allocate(), allocate()
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"the KV cache needs {self.bytes / 1e6:,.0f} MB on {device}, which is not free; lower kv_cache_memory."
            ) from error
