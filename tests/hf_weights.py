"""Tiny random models of every family in transformers, and the same as canonical weights: the reference of the model tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from foredraft.architecture import Architecture, LayerKind, Rope, Weight, Weights

VOCAB_SIZE = 67
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}
OWN_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


def vector(values: npt.ArrayLike) -> Weight:
    """A Weight that lies in memory, of any shape."""
    array = np.asarray(values, dtype=np.float32)
    return Weight(array.shape, "F32", lambda start, stop: array[start:stop])


def random_weights(architecture: Architecture, seed: int = 0) -> Weights:
    """Weights that keep activations near 1 and attention uneven."""
    rng = np.random.default_rng(seed)

    def one(name: str, shape: tuple[int, ...]) -> Weight:
        noise = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            return vector(0.3 * noise if name.endswith("bias") else 1 + 0.1 * noise)
        return vector(0.2 * noise if name == "embed" else noise / shape[1] ** 0.5)

    return {name: one(name, shape) for name, shape in architecture.weight_shapes().items()}


@dataclass(frozen=True)
class Case:
    """One network, ours and transformers'."""

    reference: Any
    architecture: Architecture
    weights: Weights

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Float32 [T, V] by transformers."""
        with torch.no_grad():
            return self.reference(torch.tensor([list(tokens)]), use_cache=False).logits[0]

    def states(self, tokens: Sequence[int]) -> list[torch.Tensor]:
        """Residual stream that enters each layer, and, after the final norm, the one that leaves the last: [T, d] each."""
        with torch.no_grad():
            out = self.reference(torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True)
            return [state[0] for state in out.hidden_states]


def to_state_dict(architecture: Architecture, weights: Weights) -> dict[str, torch.Tensor]:
    """Hugging Face names and layouts of canonical weights."""
    a, state = architecture, {}
    array = {name: torch.from_numpy(weight.read(0, weight.shape[0]).copy()) for name, weight in weights.items()}
    one = 1.0 if a.family == "gemma3" else 0.0
    mlp_norm = "pre_feedforward_layernorm" if a.sandwich_norms else "post_attention_layernorm"
    norms = {"attn_norm": "input_layernorm", "mlp_norm": mlp_norm, "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    norms |= {"post_attn_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"}
    q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    for name, values in array.items():
        *prefix, last = name.split(".")
        layer = f"model.layers.{prefix[-1]}." if prefix else "model."
        if last in norms:
            state[f"{layer}{norms[last]}.weight"] = values - one
        elif last in ("qkv", "qkv_bias"):
            kind = "bias" if last == "qkv_bias" else "weight"
            for part, rows in zip("qkv", values.split([q, kv, kv]), strict=True):
                state[f"{layer}self_attn.{part}_proj.{kind}"] = rows
        elif last == "gate_up":
            state[f"{layer}mlp.gate_proj.weight"], state[f"{layer}mlp.up_proj.weight"] = values.chunk(2)
        else:
            hf = {"o": "self_attn.o_proj", "down": "mlp.down_proj", "embed": "embed_tokens", "norm": "norm", "lm_head": "lm_head"}
            state[("" if last == "lm_head" else layer) + hf[last] + ".weight"] = values - one if last == "norm" else values
    if a.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def _llama(tie: bool) -> tuple[Any, Architecture]:
    scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64, "rope_theta": 10000.0}
    config = transformers.LlamaConfig(**SIZES, rope_parameters=scaling, rms_norm_eps=1e-5, tie_word_embeddings=tie)
    kind = LayerKind(Rope(10000.0, llama3=(4.0, 1.0, 4.0, 64)))
    own = Architecture(family="llama", **OWN_SIZES, rms_norm_eps=1e-5, layers=(kind,) * 3, tie_embeddings=tie)
    return transformers.LlamaForCausalLM(config), own


def _mistral() -> tuple[Any, Architecture]:
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    config = transformers.MistralConfig(**SIZES, rope_parameters=rope, rms_norm_eps=1e-5, sliding_window=7)
    own = Architecture(family="mistral", **OWN_SIZES, rms_norm_eps=1e-5, layers=(LayerKind(Rope(5000.0), window=7),) * 3)
    return transformers.MistralForCausalLM(config), own


def _qwen2() -> tuple[Any, Architecture]:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"} | {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    own_sizes = OWN_SIZES | {"num_heads": 2, "num_kv_heads": 1}
    config = transformers.Qwen2Config(**sizes, rope_parameters=rope, rms_norm_eps=1e-6, tie_word_embeddings=False)
    own = Architecture(family="qwen2", **own_sizes, rms_norm_eps=1e-6, layers=(LayerKind(Rope(1e6)),) * 3, qkv_bias=True)
    return transformers.Qwen2ForCausalLM(config), own


def _qwen3() -> tuple[Any, Architecture]:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = transformers.Qwen3Config(**SIZES, rope_parameters=rope, rms_norm_eps=1e-6, tie_word_embeddings=True)
    layers = (LayerKind(Rope(1e6)),) * 3
    own = Architecture(family="qwen3", **OWN_SIZES, rms_norm_eps=1e-6, layers=layers, qk_norm=True, tie_embeddings=True)
    return transformers.Qwen3ForCausalLM(config), own


def _gemma3() -> tuple[Any, Architecture]:
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3TextConfig(
        **SIZES, rope_parameters=ropes, layer_types=kinds, sliding_window=5, query_pre_attn_scalar=24, rms_norm_eps=1e-6
    )
    near, far = LayerKind(Rope(10000.0), window=5), LayerKind(Rope(1e6, linear_factor=8.0))
    own = Architecture(
        family="gemma3",
        **OWN_SIZES,
        rms_norm_eps=1e-6,
        layers=(near, far, near),
        activation="gelu_tanh",
        attention_scale=24**-0.5,
        embedding_scale=32**0.5,
        tie_embeddings=True,
        qk_norm=True,
        sandwich_norms=True,
    )
    return transformers.Gemma3ForCausalLM(config), own


FAMILIES = ("llama", "llama-tied", "mistral", "qwen2", "qwen3", "gemma3")


@cache
def case(family: str) -> Case:
    """The tiny model of a family; the same weights every time."""
    builders = {"mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3, "gemma3": _gemma3}
    builders |= {"llama": lambda: _llama(False), "llama-tied": lambda: _llama(True)}
    reference, architecture = builders[family]()
    weights = random_weights(architecture)
    missing, unexpected = reference.load_state_dict(to_state_dict(architecture, weights), strict=False)
    assert not unexpected and all("inv_freq" in name for name in missing), (missing, unexpected)
    return Case(reference.eval().float(), architecture, weights)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()
