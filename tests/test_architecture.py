from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from foredraft.architecture import Architecture, LayerKind, Rope

LLAMA3 = (8.0, 1.0, 4.0, 8192)
SMALL = Architecture(
    family="llama",
    vocab_size=11,
    hidden_size=8,
    intermediate_size=20,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    layers=(LayerKind(Rope(10_000.0)),) * 2,
)


@pytest.mark.parametrize("head_dim", [2, 6, 64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 1_000_000.0])
def test_plain_frequencies_differ_from_their_definition(theta: float, head_dim: int) -> None:
    frequencies = Rope(theta).inverse_frequencies(head_dim)
    assert frequencies.dtype == np.float64 and frequencies.shape == (head_dim // 2,)
    np.testing.assert_allclose(frequencies, [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)], rtol=1e-14)
    np.testing.assert_allclose(Rope(theta, linear_factor=8.0).inverse_frequencies(head_dim), frequencies / 8, rtol=1e-14)


@pytest.mark.parametrize("rope", [LLAMA3, (32.0, 1.0, 4.0, 8192), (2.0, 0.5, 3.0, 100)])
def test_llama3_frequencies_differ_from_the_rule_written_out(rope: tuple[float, float, float, int]) -> None:
    factor, low, high, original = rope
    result = Rope(500_000.0, llama3=rope).inverse_frequencies(64)
    kinds = set()
    for i, value in enumerate(result):
        frequency = 500_000.0 ** (-2 * i / 64)
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            kind, expected = "short", frequency
        elif wavelength > original / low:
            kind, expected = "long", frequency / factor
        else:
            smooth = (original / wavelength - low) / (high - low)
            kind, expected = "between", (1 - smooth) * frequency / factor + smooth * frequency
        kinds.add(kind)
        assert value == pytest.approx(expected, rel=1e-13)
    assert kinds == {"short", "between", "long"}


@pytest.mark.parametrize(
    ("rope", "parameters"),
    [
        (Rope(10_000.0), {"rope_type": "default", "rope_theta": 10_000.0}),
        (Rope(1e6, linear_factor=8.0), {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}),
        (
            Rope(500_000.0, llama3=LLAMA3),
            {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
    ],
)
def test_frequencies_differ_from_transformers(rope: Rope, parameters: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=131_072, rope_parameters=parameters
    )
    theirs = LlamaRotaryEmbedding(config).inv_freq
    assert theirs.dtype == torch.float32
    np.testing.assert_allclose(rope.inverse_frequencies(64), theirs.numpy(), rtol=1e-5)


def test_weight_shapes_differ_from_the_documented_names() -> None:
    shapes = SMALL.weight_shapes()
    assert shapes["embed"] == shapes["lm_head"] == (11, 8) and shapes["norm"] == (8,)
    assert {name.split(".")[2]: shape for name, shape in shapes.items() if name.startswith("layers.1.")} == {
        "attn_norm": (8,),
        "qkv": ((4 + 2 * 2) * 6, 8),
        "o": (8, 24),
        "mlp_norm": (8,),
        "gate_up": (40, 8),
        "down": (8, 20),
    }
    assert len(shapes) == 3 + 2 * 6


@pytest.mark.parametrize(
    ("options", "added"),
    [
        ({"qkv_bias": True}, {"layers.0.qkv_bias": (48,), "layers.1.qkv_bias": (48,)}),
        ({"qk_norm": True}, {f"layers.{i}.{name}": (6,) for i in range(2) for name in ("q_norm", "k_norm")}),
        ({"sandwich_norms": True}, {f"layers.{i}.{name}": (8,) for i in range(2) for name in ("post_attn_norm", "post_mlp_norm")}),
    ],
)
def test_optional_weights_are_missing_or_too_many(options: dict[str, bool], added: dict[str, tuple[int, ...]]) -> None:
    assert replace(SMALL, **options).weight_shapes() == SMALL.weight_shapes() | added  # type: ignore[arg-type]


def test_tied_network_asks_for_an_output_matrix() -> None:
    shapes = replace(SMALL, tie_embeddings=True).weight_shapes()
    assert shapes.keys() == SMALL.weight_shapes().keys() - {"lm_head"}


def test_scale_or_cache_size_is_wrong() -> None:
    assert SMALL.num_layers == 2
    assert pytest.approx(1 / math.sqrt(6)) == SMALL.scale
    assert replace(SMALL, attention_scale=0.25).scale == 0.25
    assert SMALL.kv_bytes_per_token(4) == 2 * 2 * 2 * 6 * 4
