"""A small decoder of a target's own kind, in torch, that can be trained.

Owns: its sizes, its start from the target's weights, and a pass that gradients flow through.  Does not know: losses, texts on disk,
or how it is saved.

It has the target's settings but for fewer layers, and as an option a smaller hidden size and only the first ids of the vocabulary,
which in a vocabulary of byte pairs are the most frequent ones.  With the target's hidden size it starts as the target's first and
last layers; with a smaller one these are projected onto the principal axes of the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter, functional

from foredraft.architecture import Architecture, Weight, Weights
from foredraft.model import Decoder
from foredraft.ops import Geometry, KVStorage, PassLayout
from foredraft.ops.torch_ops import TorchOps
from foredraft.types import ConfigError, Rows, UnsupportedModelError

# What quantised blocks and kernels take.
SIZE_STEP = 32
# The final norm begins with this share of the target's: few layers are far less sure of the next token than many.
FIRST_NORM = 0.2
# Rows of the embedding that the principal axes are taken from.
MAX_AXES_ROWS = 16384
BLOCK_SIZE = 16


def student_architecture(target: Architecture, num_layers: int, hidden_size: int, vocab_size: int) -> Architecture:
    """The target's architecture with other sizes; heads keep their size, and there are fewer of them.

    Raises:
        ConfigError: a size that cannot be had.
        UnsupportedModelError: a target whose layers differ, or which has norms behind its layers.
    """
    if target.sandwich_norms or len(set(target.layers)) > 1:
        raise UnsupportedModelError(
            f"a draft model can be made of targets whose layers are all alike, and those of {target.family} are not; "
            "train statistics or a head instead."
        )
    if not 1 <= num_layers <= target.num_layers:
        raise ConfigError(f"layers must be from 1 to the target's {target.num_layers}, not {num_layers}; change --layers.")
    if not SIZE_STEP <= hidden_size <= target.hidden_size or hidden_size % SIZE_STEP:
        raise ConfigError(
            f"hidden must be a multiple of {SIZE_STEP} up to the target's {target.hidden_size}, not {hidden_size}; change --hidden."
        )
    if not 1 <= vocab_size <= target.vocab_size:
        raise ConfigError(f"vocab must be from 1 to the target's {target.vocab_size} ids, not {vocab_size}; change --vocab.")
    sizes = replace(target, layers=target.layers[:num_layers], vocab_size=vocab_size)
    if hidden_size == target.hidden_size:
        return sizes
    share = hidden_size / target.hidden_size
    group = target.num_heads // target.num_kv_heads
    num_kv_heads = max(1, round(target.num_kv_heads * share))
    return replace(
        sizes,
        hidden_size=hidden_size,
        intermediate_size=SIZE_STEP * max(1, round(target.intermediate_size * share / SIZE_STEP)),
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
    )


def taken_layers(num_layers: int, num_target_layers: int) -> list[int]:
    """The target's layers that a student starts as: the first and the last ones; of three or more the first half is rounded up."""
    num_first = num_layers // 2 if num_layers < 3 else math.ceil(num_layers / 2)
    return [*range(num_first), *range(num_target_layers - (num_layers - num_first), num_target_layers)]


def start_weights(architecture: Architecture, target: Architecture, weights: Weights) -> dict[str, Tensor]:
    """Canonical weights, float32, to start from; no more of the target is read than they take."""

    def read(name: str, num_rows: int | None = None) -> Tensor:
        weight = weights[name]
        return torch.from_numpy(np.array(weight.read(0, weight.shape[0] if num_rows is None else num_rows), np.float32))

    vocab_size = architecture.vocab_size
    started = {"embed": read("embed", vocab_size), "norm": read("norm") * FIRST_NORM}
    if not target.tie_embeddings:
        started["lm_head"] = read("lm_head", vocab_size)
    for i, taken in enumerate(taken_layers(architecture.num_layers, target.num_layers)):
        prefix = f"layers.{taken}."
        started |= {f"layers.{i}.{name.removeprefix(prefix)}": read(name) for name in weights if name.startswith(prefix)}
    return started if architecture.hidden_size == target.hidden_size else _projected(started, architecture, target)


def _projected(started: Mapping[str, Tensor], small: Architecture, large: Architecture) -> dict[str, Tensor]:
    """Weights on the ``hidden_size`` principal axes of the embedding; norms' factors go into the matrices behind them."""
    axes = principal_axes(started["embed"], small.hidden_size)
    projected = {"embed": started["embed"] @ axes, "norm": torch.full((small.hidden_size,), float(started["norm"].mean()))}
    if "lm_head" in started:
        projected["lm_head"] = started["lm_head"] @ axes
    for i in range(small.num_layers):
        old = {name.split(".")[2]: values for name, values in started.items() if name.startswith(f"layers.{i}.")}
        new = {name: values for name, values in old.items() if name in ("q_norm", "k_norm")}
        heads = _kept_heads(small, large)
        gate, up = (old["gate_up"] * old["mlp_norm"]).chunk(2)
        kept = _strongest(gate.norm(dim=1) * up.norm(dim=1) * old["down"].norm(dim=0), small.intermediate_size)
        new["qkv"] = ((old["qkv"] * old["attn_norm"]) @ axes)[heads]
        new["o"] = axes.T @ old["o"][:, heads[: small.num_heads * small.head_dim]]
        new["gate_up"] = torch.cat((gate[kept], up[kept])) @ axes
        new["down"] = axes.T @ old["down"][:, kept]
        new["attn_norm"] = new["mlp_norm"] = torch.ones(small.hidden_size)
        if "qkv_bias" in old:
            new["qkv_bias"] = old["qkv_bias"][heads]
        projected |= {f"layers.{i}.{name}": values.clone() for name, values in new.items()}
    return projected


def principal_axes(rows: Tensor, num_axes: int) -> Tensor:
    """Orthonormal columns [d, num_axes] along which ``rows`` [n, d] reach farthest; evenly spaced ones of many rows suffice."""
    sample = rows[:: max(1, len(rows) // MAX_AXES_ROWS)].double()
    axes: Tensor = torch.linalg.eigh(sample.T @ sample).eigenvectors
    return axes[:, -num_axes:].flip(1).float()


def _kept_heads(small: Architecture, large: Architecture) -> Tensor:
    """Rows of the large stacked q, k and v that the small one keeps: its first groups of heads."""
    d, q, kv = large.head_dim, large.num_heads * large.head_dim, large.num_kv_heads * large.head_dim
    keys = torch.arange(small.num_kv_heads * d)
    return torch.cat((torch.arange(small.num_heads * d), q + keys, q + kv + keys))


def _strongest(strength: Tensor, num: int) -> Tensor:
    return strength.topk(num).indices.sort().values


class Student:
    """The network with ``start`` as its parameters.

    Factors of normalised queries and keys stay as they are, and with ``train_vocabulary`` false embedding and output head.
    """

    def __init__(
        self, architecture: Architecture, start: Mapping[str, Tensor], *, device: torch.device, train_vocabulary: bool
    ) -> None:
        frozen = ("q_norm", "k_norm") if train_vocabulary else ("q_norm", "k_norm", "embed", "lm_head")
        self.architecture = architecture
        self._ops = _TrainingOps(device, frozen)
        self._decoder = Decoder(architecture, {name: _weight(values) for name, values in start.items()}, self._ops)
        self._storage = KVStorage(architecture, 1, 1, device, torch.float32)
        self.tensors: Mapping[str, Tensor] = self._ops.tensors

    @property
    def parameters(self) -> dict[str, Tensor]:
        """What is trained."""
        return {name: tensor for name, tensor in self.tensors.items() if tensor.requires_grad}

    @property
    def head(self) -> Tensor:
        """The output head [V, d]."""
        return self.tensors["embed" if self.architecture.tie_embeddings else "lm_head"]

    def hidden(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """What the output head reads of every token of every text, [T, d]; ids beyond the vocabulary are read as the last one."""
        last = self.architecture.vocab_size - 1
        batch = [Rows([min(token, last) for token in tokens], 0, 0, range(-(-len(tokens) // BLOCK_SIZE))) for tokens in texts]
        states, _ = self._decoder.forward(self._decoder.layout(batch, BLOCK_SIZE), self._storage)
        return self._ops.rms_norm(states, self.tensors["norm"], self.architecture.rms_norm_eps)


def _weight(values: Tensor) -> Weight:
    return Weight(tuple(values.shape), "F32", lambda start, stop: values[start:stop].numpy(force=True))


class _TrainingOps(TorchOps):
    """Torch ops on parameters; texts are whole, so that attention needs no cache."""

    def __init__(self, device: torch.device, frozen: tuple[str, ...]) -> None:
        super().__init__(device, torch.float32)
        self._frozen = frozen
        self.tensors: dict[str, Tensor] = {}

    def load_matrix(self, name: str, weight: Weight) -> Tensor:
        """A parameter, or a plain tensor of what is frozen."""
        values = super().load_matrix(name, weight)
        self.tensors[name] = values if name.endswith(self._frozen) else Parameter(values)
        return self.tensors[name]

    def linear(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """See Ops."""
        return functional.linear(x, matrix, bias)

    def gated_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        """See Ops; nothing is overwritten that a gradient needs."""
        gate, up = gate_up.chunk(2, dim=-1)
        return (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")) * up

    def plan_attention(self, geometry: Geometry, window: int | None) -> Any:
        """The lengths of the texts."""
        return list(geometry.num_rows)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, storage: KVStorage, layer: int, layout: PassLayout, window: int | None, scale: float
    ) -> Tensor:
        """See Ops; every row sees its own text up to itself."""
        lengths = layout.attention[window]
        parts = zip(torch.split(q, lengths), torch.split(k, lengths), torch.split(v, lengths), strict=True)
        return torch.cat([_attend(one, keys, values, window, scale) for one, keys, values in parts])


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float) -> Tensor:
    length = len(q)
    mask = None
    if window is not None and window < length:
        seen = torch.ones(length, length, dtype=torch.bool, device=q.device)
        mask = seen.tril() & seen.triu(1 - window)
    q, k, v = (x.transpose(0, 1)[None].to(v.dtype) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[0].transpose(0, 1).flatten(1)
