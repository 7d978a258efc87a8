"""A draft head in torch: the reference, and what runs on CUDA.

Owns: the order of operations of a head (EAGLE, 2401.15077; EAGLE-3, 2503.01840, section 3).  Does not know: sequences, or formats
of heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.architecture import Weight
from foredraft.drafters.eagle_config import EAGLE3
from foredraft.drafters.eagle_file import HeadFile
from foredraft.drafters.eagle_pass import Float32s, HeadOutput, HeadPass, Int32s, chain
from foredraft.ops import rotary_rows
from foredraft.types import CapacityError
from foredraft.weights import read_chunks


class TorchHeadWeights:
    """A head's weights as tensors; ``given`` are the target's own ``embed`` and ``lm_head``, for a head without them.

    ``norm`` and ``norm_eps`` are the target's final norm.
    """

    def __init__(
        self, head: HeadFile, given: Mapping[str, Tensor | Weight], norm: Weight, norm_eps: float, device: str, dtype: str
    ) -> None:
        self.config, self.target_ids = head.config, head.target_ids
        self.device, self.dtype = torch.device(device), getattr(torch, dtype)
        self.norm_eps = norm_eps
        self.num_bytes = 0
        self.tensors = {name: self._load(name, weight) for name, weight in head.weights.items()}
        for name in ("embed", "lm_head"):
            if name not in self.tensors:
                own = given[name]
                self.tensors[name] = own if isinstance(own, Tensor) else self._load(name, own)
        self.state_norm = self._load("norm", norm) if head.config.kind != EAGLE3 else None

    def _load(self, name: str, weight: Weight) -> Tensor:
        tensor = torch.empty(weight.shape, dtype=self.dtype, device=self.device)
        for start, rows in read_chunks(name, weight):
            tensor[start : start + len(rows)].copy_(torch.from_numpy(rows))
        self.num_bytes += tensor.nbytes
        return tensor

    def runner(self, num_blocks: int, block_size: int) -> TorchHead:
        """The head with an empty cache."""
        return TorchHead(self, num_blocks, block_size)


class _Layout:
    """Where the rows of a pass are: padded to [sequences, rows], and the keys that each may see."""

    def __init__(self, rows: HeadPass, block_size: int, device: torch.device) -> None:
        changes = np.flatnonzero(np.diff(rows.table_of)) + 1
        starts, ends = np.array([0, *changes]), np.array([*changes, len(rows.tokens)])
        lasts, tables = rows.positions[ends - 1], rows.table_of[starts]
        places = np.arange(int(lasts.max()) + 1)
        keys = np.minimum(places[None, :], lasts[:, None])
        self.slots = self._to(rows.tables[tables[:, None] + keys // block_size] * block_size + keys % block_size, device)
        own = rows.tables[rows.table_of + rows.positions // block_size].astype(np.int64)
        self.own_slots = self._to(own * block_size + rows.positions % block_size, device)
        most = int((ends - starts).max())
        padded = np.minimum(starts[:, None] + np.arange(most)[None, :], (ends - 1)[:, None])
        self.padded = self._to(padded, device)
        self.flat = self._to(
            np.concatenate([s * most + np.arange(e - b) for s, (b, e) in enumerate(zip(starts, ends, strict=True))]), device
        )
        low, high = rows.first_keys[padded][..., None], rows.positions[padded][..., None]
        self.visible = torch.from_numpy((places >= low) & (places <= high)).unsqueeze(1).to(device)

    @staticmethod
    def _to(numbers: np.ndarray, device: torch.device) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers, np.int64)).to(device)


class TorchHead:
    """See ``eagle_pass.HeadRunner``."""

    def __init__(self, weights: TorchHeadWeights, num_blocks: int, block_size: int) -> None:
        config = weights.config
        self.hidden_size, self.num_blocks, self.block_size = config.hidden_size, num_blocks, block_size
        self._weights, self._config, self._tensors = weights, config, weights.tensors
        shape = (config.num_layers, num_blocks * block_size, config.num_kv_heads, config.head_dim)
        try:
            self._keys, self._values = (torch.zeros(shape, dtype=weights.dtype, device=weights.device) for _ in range(2))
        except (RuntimeError, MemoryError) as error:
            raise CapacityError("there is no memory for the keys and values of the draft head; lower kv_cache_memory.") from error

    @torch.inference_mode()
    def run(self, rows: HeadPass) -> HeadOutput:
        """See HeadRunner."""
        config, tensors = self._config, self._tensors
        features = self._features(rows)
        x, inputs = self._enter(rows, features)
        layout = _Layout(rows, self.block_size, self._weights.device)
        rotary = rotary_rows(
            config.rope, rows.positions.astype(np.int64), config.head_dim, self._weights.device, self._weights.dtype
        )
        for i in range(config.num_layers):
            prefix = f"layers.{i}."
            if i or config.kind != EAGLE3:
                inputs = self._norm(x, prefix + "attn_norm")
            x = x + self._attention(inputs, i, layout, rotary)
            hidden = self._norm(x, prefix + "mlp_norm")
            gate, up = F.linear(hidden, tensors[prefix + "gate_up"]).chunk(2, dim=-1)
            active = F.silu(gate) if config.activation == "silu" else F.gelu(gate, approximate="tanh")
            x = x + F.linear(active * up, tensors[prefix + "down"])
        last = x[torch.from_numpy(rows.logit_rows.astype(np.int64)).to(x.device)]
        normed = self._norm(last, "norm")
        outputs = normed if config.norm_output else last
        logits = F.linear(normed, tensors["lm_head"]).float()
        return HeadOutput(logits.numpy(force=True), outputs.float().numpy(force=True))

    def draft(self, rows: HeadPass, num_wanted: Int32s) -> tuple[Int32s, Float32s]:
        """See HeadRunner."""
        return chain(self, rows, num_wanted, self._weights.target_ids)

    def _features(self, rows: HeadPass) -> Tensor:
        """[T, d]; those that are made of states are written back."""
        config, tensors = self._config, self._tensors
        if len(rows.row_of):
            states = torch.from_numpy(rows.states).to(self._weights.device, self._weights.dtype)
            if self._weights.state_norm is not None:
                states = F.rms_norm(states, states.shape[-1:], self._weights.state_norm, self._weights.norm_eps)
            if "fc_norm" in tensors:
                parts = states.view(len(states), config.num_states, -1)
                normed = F.rms_norm(parts, parts.shape[-1:], None, config.rms_norm_eps)
                states = (normed * tensors["fc_norm"].view(config.num_states, -1)).flatten(1)
            if "input_norm" in tensors:
                states = self._norm(states, "input_norm")
            if config.kind == EAGLE3:
                states = F.linear(states, tensors["fc"], tensors.get("fc_bias"))
            rows.features[rows.row_of] = states.float().numpy(force=True)
        return torch.from_numpy(rows.features).to(self._weights.device, self._weights.dtype)

    def _enter(self, rows: HeadPass, features: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream, and what the first layer of an EAGLE-3 head reads beside it."""
        config, tensors = self._config, self._tensors
        embeds = F.embedding(torch.from_numpy(rows.tokens.astype(np.int64)).to(features.device), tensors["embed"])
        if config.kind != EAGLE3:
            x = F.linear(torch.cat((embeds, features), dim=-1), tensors["fc"], tensors.get("fc_bias"))
            return x, x
        normed = self._norm(features, "hidden_norm")
        inputs = torch.cat((self._norm(embeds, "layers.0.attn_norm"), normed), dim=-1)
        return (normed if config.norm_before_residual else features), inputs

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """A norm that the head does without leaves x as it is."""
        weight = self._tensors.get(name)
        return x if weight is None else F.rms_norm(x, x.shape[-1:], weight, self._config.rms_norm_eps)

    def _attention(self, inputs: Tensor, i: int, layout: _Layout, rotary: tuple[Tensor, Tensor]) -> Tensor:
        config, tensors, prefix = self._config, self._tensors, f"layers.{i}."
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = F.linear(inputs, tensors[prefix + "qkv"], tensors.get(prefix + "qkv_bias")).view(len(inputs), -1, dim)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        q, k = (_rotated(self._norm(part, f"{prefix}{n}_norm"), rotary) for part, n in ((q, "q"), (k, "k")))
        self._keys[i].index_copy_(0, layout.own_slots, k)
        self._values[i].index_copy_(0, layout.own_slots, v)
        num, most = layout.padded.shape
        out = F.scaled_dot_product_attention(
            q[layout.padded].transpose(1, 2),
            self._keys[i][layout.slots].transpose(1, 2),
            self._values[i][layout.slots].transpose(1, 2),
            attn_mask=layout.visible,
            enable_gqa=heads != kv_heads,
        )
        flat = out.transpose(1, 2).reshape(num * most, heads * dim)[layout.flat]
        return F.linear(flat, tensors[prefix + "o"], tensors.get(prefix + "o_bias"))


def _rotated(heads: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotary
    return heads * cosine + heads.roll(heads.shape[-1] // 2, -1) * sine
