"""A decoder network as data: sizes, the kind of each layer, and where its weights come from.

Owns: everything in which Llama, Mistral, Qwen2, Qwen3 and Gemma 3 differ.  Does not know: how a layer is computed or which file
holds it.

Canonical weight names (shapes as rows x columns; optional ones marked ?)::

    embed [V, d]                     norm [d]                      lm_head? [V, d]   (absent when tied to embed)
    layers.I.attn_norm [d]           layers.I.qkv [(H+2G)*D, d]    layers.I.qkv_bias? [(H+2G)*D]
    layers.I.q_norm? [D]             layers.I.k_norm? [D]          layers.I.o [d, H*D]
    layers.I.post_attn_norm? [d]     layers.I.mlp_norm [d]         layers.I.gate_up [2*F, d]
    layers.I.down [d, F]             layers.I.post_mlp_norm? [d]

with V vocabulary, d hidden size, H heads, G key-value heads, D head size, F intermediate size.  q, k and v (gate and up) are
stacked in that order.  Rotary pairs are (i, i + D/2), as in Hugging Face checkpoints.  Norm weights are what the normalised
value is multiplied with (Gemma's "+1" already added).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foredraft.types import FloatArray


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of one kind of layer.

    ``linear_factor`` divides every frequency.  ``llama3`` = (factor, low_freq_factor, high_freq_factor,
    original_max_position_embeddings) is Llama 3.1's rule: long wavelengths are divided by factor, short ones kept, and
    those between are blended.
    """

    theta: float
    linear_factor: float = 1.0
    llama3: tuple[float, float, float, int] | None = None

    def inverse_frequencies(self, head_dim: int) -> FloatArray:
        """Angle per position of each rotary pair: float64 [head_dim / 2]."""
        frequencies = 1.0 / self.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.llama3 is not None:
            factor, low, high, original = self.llama3
            wavelength = 2 * math.pi / frequencies
            blend = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
            frequencies = blend * frequencies + (1 - blend) * frequencies / factor
        return frequencies / self.linear_factor


@dataclass(frozen=True)
class LayerKind:
    """Positions and reach of one layer's attention; ``window`` None sees the whole context, else the last ``window`` tokens."""

    rope: Rope
    window: int | None = None


@dataclass(frozen=True)
class Architecture:
    """One decoder network.  ``activation`` is ``silu`` or ``gelu_tanh``; ``layers`` has one entry per layer."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    layers: tuple[LayerKind, ...]
    activation: str = "silu"
    attention_scale: float = 0.0
    embedding_scale: float = 1.0
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def scale(self) -> float:
        """Factor on attention scores; 1/sqrt(head_dim) unless the checkpoint says otherwise."""
        return self.attention_scale or self.head_dim**-0.5

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every canonical weight of this network and its shape."""
        d, f = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, d), "norm": (d,)}
        if not self.tie_embeddings:
            shapes["lm_head"] = (self.vocab_size, d)
        for i in range(self.num_layers):
            layer: dict[str, tuple[int, ...]] = {
                "attn_norm": (d,), "qkv": (q + 2 * kv, d), "o": (d, q),
                "mlp_norm": (d,), "gate_up": (2 * f, d), "down": (d, f),
            }  # fmt: skip
            if self.qkv_bias:
                layer["qkv_bias"] = (q + 2 * kv,)
            if self.qk_norm:
                layer |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
            if self.sandwich_norms:
                layer |= {"post_attn_norm": (d,), "post_mlp_norm": (d,)}
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        return shapes


@dataclass(frozen=True)
class Weight:
    """One canonical weight as it lies in a file.

    ``format`` is the file's storage format (F32, F16, BF16, Q4_0, Q4_1, Q8_0, Q6_K, ...).  ``read(start, stop)`` returns rows
    start..stop as float32 [stop - start, columns] (1-D for vectors), reading no more of the file than it must.
    ``read_blocks(start, stop)``, where the file has blocks in ``format``, returns the same rows as they are stored, uint8
    [stop - start, bytes per row].
    """

    shape: tuple[int, ...]
    format: str
    read: Callable[[int, int], FloatArray]
    read_blocks: Callable[[int, int], npt.NDArray[np.uint8]] | None = None


Weights = Mapping[str, Weight]
