"""The reference ops in torch, for CPU and CUDA.

Owns: numerics in torch, and which torch call is fastest for few rows.  Does not know: any model's structure.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.architecture import Weight
from foredraft.ops.layout import Geometry, KVStorage, PassLayout
from foredraft.types import IntArray
from foredraft.weights import read_chunks

# Up to this many rows MKL's gemm is faster with the weights as its left operand, and for one row also faster than its gemv:
# it then uses every core and reads each weight once.
MAX_ROWS_WEIGHTS_LEFT = 8


@dataclass(frozen=True)
class AttentionGroup:
    """Sequences of one attention call: S of them with R new rows each, their keys padded to L.

    ``rows``: int64 [S * R] of the pass, or None for all rows in order.  ``blocks``: int64 [S * B], B >= L / block_size.
    ``mask``: added to scores, [S, 1, R, L], or None when every row sees all L keys.
    """

    num_seqs: int
    num_rows: int
    num_keys: int
    rows: Tensor | None
    blocks: Tensor
    mask: Tensor | None


class TorchOps:
    """See the Ops protocol for shapes.  Results of a row may differ by rounding with the other rows of a pass."""

    exactness = "numeric"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        has_mkl = bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
        weights_left = has_mkl and device.type == "cpu" and dtype == torch.float32
        self._max_rows_weights_left = MAX_ROWS_WEIGHTS_LEFT if weights_left else 0

    def load_matrix(self, name: str, weight: Weight) -> Tensor:
        """Read into a tensor of ``dtype``, chunk by chunk."""
        matrix = torch.empty(weight.shape, dtype=self.dtype, device=self.device)
        for start, rows in read_chunks(name, weight):
            matrix[start : start + len(rows)].copy_(torch.from_numpy(rows))
        return matrix

    def load_vector(self, name: str, weight: Weight) -> Tensor:
        """As ``load_matrix``."""
        return self.load_matrix(name, weight)

    def embedding(self, token_ids: Tensor, matrix: Tensor, scale: float) -> Tensor:
        """Gather rows, then scale them."""
        rows = matrix.index_select(0, token_ids)
        return rows if scale == 1.0 else rows * scale

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm (Zhang and Sennrich, 1910.07467)."""
        if weight.dim() == 1:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight

    def linear(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias."""
        num_rows = x.shape[0]
        if not 0 < num_rows <= self._max_rows_weights_left:
            return F.linear(x, matrix, bias)
        columns = (torch.cat((x, x)) if num_rows == 1 else x).t()
        out = torch.mm(matrix, columns).t()[:num_rows].contiguous()
        return out if bias is None else out.add_(bias)

    def rope(self, qk: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate pairs (i, i + D/2)."""
        cosine, sine = rotary
        return torch.addcmul(qk * cosine, qk.roll(qk.shape[-1] // 2, -1), sine)

    def gated_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        """Gated unit (Shazeer, 2002.05202)."""
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)

    def logits(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Linear in ``dtype``, then float32."""
        return self.linear(x, matrix).float()

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, storage: KVStorage, layer: int, layout: PassLayout, window: int | None, scale: float
    ) -> Tensor:
        """One call per group of sequences with as many new rows; torch's kernel keeps scores and softmax in float32."""
        keys, values = storage.keys[layer], storage.values[layer]
        keys.flatten(0, 1).index_copy_(0, layout.slots, k)
        values.flatten(0, 1).index_copy_(0, layout.slots, v)
        groups: tuple[AttentionGroup, ...] = layout.attention[window]
        if len(groups) == 1:
            return self._attend(q, keys, values, groups[0], scale)
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        for group in groups:
            assert group.rows is not None, len(groups)
            out.index_copy_(0, group.rows, self._attend(q.index_select(0, group.rows), keys, values, group, scale))
        return out

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, group: AttentionGroup, scale: float) -> Tensor:
        num_heads, head_dim = q.shape[1:]
        shape = (group.num_seqs, -1, *keys.shape[2:])
        out = F.scaled_dot_product_attention(
            q.view(group.num_seqs, group.num_rows, num_heads, head_dim).transpose(1, 2),
            keys.index_select(0, group.blocks).view(shape)[:, : group.num_keys].transpose(1, 2),
            values.index_select(0, group.blocks).view(shape)[:, : group.num_keys].transpose(1, 2),
            attn_mask=group.mask,
            scale=scale,
            enable_gqa=num_heads != keys.shape[2],
        )
        return out.transpose(1, 2).reshape(-1, num_heads * head_dim)

    def plan_attention(self, geometry: Geometry, window: int | None) -> tuple[AttentionGroup, ...]:
        """Group sequences by number of new rows and, within a factor of two, by keys; so padding at most doubles the work."""
        first_keys = [0 if window is None else max(0, start - window + 1) for start in geometry.starts]
        members = defaultdict(list)
        for i, (first, length) in enumerate(zip(first_keys, geometry.context_lengths, strict=True)):
            members[geometry.num_rows[i], (length - first).bit_length()].append(i)
        return tuple(self._group(geometry, window, seqs, first_keys) for seqs in members.values())

    def _group(self, geometry: Geometry, window: int | None, seqs: list[int], first_keys: list[int]) -> AttentionGroup:
        block_size, lengths = geometry.block_size, geometry.context_lengths
        num_rows = geometry.num_rows[seqs[0]]
        first_blocks = [first_keys[i] // block_size for i in seqs]
        num_keys = max(lengths[i] - first * block_size for i, first in zip(seqs, first_blocks, strict=True))
        num_blocks = -(-num_keys // block_size)
        tables = [geometry.block_tables[i][first:] for i, first in zip(seqs, first_blocks, strict=True)]
        # A short table is padded with its own last block: masked keys still enter a product with weight zero, and a
        # neighbour's NaN must not.
        blocks = np.stack([np.pad(table, (0, num_blocks - len(table)), mode="edge") for table in tables])

        starts = np.array([geometry.starts[i] for i in seqs])
        queries = starts[:, None, None] + np.arange(num_rows)[None, :, None]
        keys = (np.array(first_blocks) * block_size)[:, None, None] + np.arange(num_keys)[None, None, :]
        visible = keys <= queries if window is None else (keys <= queries) & (keys > queries - window)
        mask = None
        if not visible.all():
            mask = torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(torch.from_numpy(~visible), -torch.inf)
            mask = mask.unsqueeze(1).to(self.device)
        rows = None
        if len(seqs) < len(geometry.starts):
            rows = self._index(np.concatenate([np.arange(*geometry.query_offsets[i : i + 2]) for i in seqs]))
        return AttentionGroup(len(seqs), num_rows, num_keys, rows, self._index(blocks.reshape(-1)), mask)

    def _index(self, numbers: IntArray) -> Tensor:
        return torch.from_numpy(numbers).to(self.device)
