"""One decoder network for every supported family; what differs between families is data.

Owns: the order of operations of a pass, and loading weights into them.  Does not know: sequences, requests, or how an
operation is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.architecture import Architecture, LayerKind, Weights
from foredraft.ops import Geometry, KVStorage, Ops, PassLayout, rotary_rows
from foredraft.types import Rows
from foredraft.weights import check_weights


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one layer as the ops hold them; names and shapes as in ``architecture``, None where a family has none.

    ``qk_norm`` is [H + G, D]: q_norm for the first H heads, k_norm for the rest, so that both are normalised in one call.
    """

    kind: LayerKind
    attn_norm: Tensor
    qkv: Any
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    o: Any
    post_attn_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Any
    down: Any
    post_mlp_norm: Tensor | None


class _Reader:
    """Hands weights to the ops one after the other and counts the bytes that they take there."""

    def __init__(self, ops: Ops, weights: Weights) -> None:
        self._ops, self._weights, self.num_bytes = ops, weights, 0

    def matrix(self, name: str) -> Any:
        matrix = self._ops.load_matrix(name, self._weights[name])
        self.num_bytes += matrix.nbytes
        return matrix

    def vector(self, name: str) -> Tensor:
        vector = self._ops.load_vector(name, self._weights[name])
        self.num_bytes += vector.nbytes
        return vector

    def layer(self, architecture: Architecture, i: int) -> DecoderLayer:
        prefix = f"layers.{i}."
        qk_norm = None
        if architecture.qk_norm:
            q_norm, k_norm = self.vector(prefix + "q_norm"), self.vector(prefix + "k_norm")
            qk_norm = torch.cat((q_norm.expand(architecture.num_heads, -1), k_norm.expand(architecture.num_kv_heads, -1)))
        return DecoderLayer(
            architecture.layers[i],
            attn_norm=self.vector(prefix + "attn_norm"),
            qkv=self.matrix(prefix + "qkv"),
            qkv_bias=self.vector(prefix + "qkv_bias") if architecture.qkv_bias else None,
            qk_norm=qk_norm,
            o=self.matrix(prefix + "o"),
            post_attn_norm=self.vector(prefix + "post_attn_norm") if architecture.sandwich_norms else None,
            mlp_norm=self.vector(prefix + "mlp_norm"),
            gate_up=self.matrix(prefix + "gate_up"),
            down=self.matrix(prefix + "down"),
            post_mlp_norm=self.vector(prefix + "post_mlp_norm") if architecture.sandwich_norms else None,
        )


class Decoder:
    """A network with its weights loaded.

    The weights are read chunk by chunk straight to where they stay, so loading takes little more memory than running.
    ``weight_bytes`` counts tied embeddings once.

    Raises:
        ModelFileError: a tensor is missing, unexpected, or of the wrong shape.
    """

    def __init__(self, architecture: Architecture, weights: Weights, ops: Ops) -> None:
        check_weights(architecture, weights)
        self.architecture, self.ops = architecture, ops
        reader = _Reader(ops, weights)
        self.embed = reader.matrix("embed")
        self._norm = reader.vector("norm")
        self.head = self.embed if architecture.tie_embeddings else reader.matrix("lm_head")
        self._layers = tuple(reader.layer(architecture, i) for i in range(architecture.num_layers))
        self.weight_bytes = reader.num_bytes

    def layout(self, batch: Sequence[Rows], block_size: int) -> PassLayout:
        """Geometry of a non-empty batch and everything that its layers share."""
        architecture, ops = self.architecture, self.ops
        geometry = Geometry.of(batch, block_size)
        tokens = [token for rows in batch for token in rows.tokens]
        assert min(tokens) >= 0 and max(tokens) < architecture.vocab_size, (min(tokens), max(tokens), architecture.vocab_size)
        positions = geometry.positions()
        ropes = {kind.rope for kind in architecture.layers}
        return PassLayout(
            geometry,
            token_ids=torch.tensor(tokens, dtype=torch.int64, device=ops.device),
            slots=torch.from_numpy(geometry.slots()).to(ops.device),
            rotary={rope: rotary_rows(rope, positions, architecture.head_dim, ops.device, ops.dtype) for rope in ropes},
            attention={w: ops.plan_attention(geometry, w) for w in {kind.window for kind in architecture.layers}},
        )

    def forward(self, layout: PassLayout, storage: KVStorage, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Run all rows of a pass and write their keys and values.

        Returns the residual stream after the last layer, before the final norm, [T, d]; and the tapped states side by side
        in the order of ``taps``, [T, len(taps) * d], or None without taps.  Tap i is the residual stream that enters layer i
        (EAGLE-3, 2503.01840, section 3); i = num_layers is the one that leaves the last.
        """
        num_layers = self.architecture.num_layers
        assert all(0 <= tap <= num_layers for tap in taps), (taps, num_layers)
        tapped = {}
        x = self.ops.embedding(layout.token_ids, self.embed, self.architecture.embedding_scale)
        for i, layer in enumerate(self._layers):
            if i in taps:
                tapped[i] = x
            x = x + self._attention(x, i, layer, layout, storage)
            x = x + self._mlp(x, layer)
        tapped[num_layers] = x
        return x, torch.cat([tapped[tap] for tap in taps], dim=-1) if taps else None

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and output head on rows of ``forward``'s first result: [n, d] -> float32 [n, V]."""
        return self.ops.logits(self.ops.rms_norm(hidden, self._norm, self.architecture.rms_norm_eps), self.head)

    def _attention(self, x: Tensor, i: int, layer: DecoderLayer, layout: PassLayout, storage: KVStorage) -> Tensor:
        ops, architecture = self.ops, self.architecture
        num_heads, num_kv_heads, eps = architecture.num_heads, architecture.num_kv_heads, architecture.rms_norm_eps
        qkv = ops.linear(ops.rms_norm(x, layer.attn_norm, eps), layer.qkv, layer.qkv_bias)
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, architecture.head_dim)
        qk, v = torch.split(heads, [num_heads + num_kv_heads, num_kv_heads], dim=1)
        if layer.qk_norm is not None:
            qk = ops.rms_norm(qk, layer.qk_norm, eps)
        q, k = torch.split(ops.rope(qk, layout.rotary[layer.kind.rope]), [num_heads, num_kv_heads], dim=1)
        attended = ops.attention(q, k, v, storage, i, layout, layer.kind.window, architecture.scale)
        out = ops.linear(attended, layer.o)
        return out if layer.post_attn_norm is None else ops.rms_norm(out, layer.post_attn_norm, eps)

    def _mlp(self, x: Tensor, layer: DecoderLayer) -> Tensor:
        ops, eps = self.ops, self.architecture.rms_norm_eps
        gate_up = ops.linear(ops.rms_norm(x, layer.mlp_norm, eps), layer.gate_up)
        out = ops.linear(ops.gated_activation(gate_up, self.architecture.activation), layer.down)
        return out if layer.post_mlp_norm is None else ops.rms_norm(out, layer.post_mlp_norm, eps)
