"""From a Hugging Face ``config.json`` to an Architecture.

Owns: the settings of each ``model_type``, their defaults, and the refusal of options that would change the result.  Does not
know: where the weights are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from foredraft.architecture import Architecture, LayerKind, Rope
from foredraft.loader.fields import Fields
from foredraft.types import ModelFileError, UnsupportedModelError, refuse_unknown

# What transformers assumes where config.json is silent.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "rope_theta": 1e4, "max_position_embeddings": 2048},
    "mistral": {"tie_word_embeddings": False, "rope_theta": 1e4, "max_position_embeddings": 4096 * 32},
    "qwen2": {"tie_word_embeddings": False, "rope_theta": 1e4, "max_position_embeddings": 32768, "max_window_layers": 28},
    "qwen3": {
        "tie_word_embeddings": False,
        "rope_theta": 1e4,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "head_dim": 128,
    },
    "gemma3_text": {
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "max_position_embeddings": 131072,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
REFUSED = (
    "attention_bias",
    "mlp_bias",
    "quantization_config",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
    "num_local_experts",
)


def folder_architecture(config: Mapping[str, Any], source: str) -> Architecture:
    """The network that ``config`` describes; ``source`` names the file in messages.

    Raises:
        UnsupportedModelError: a family or an option that would change the result.
        ModelFileError: a setting is missing or senseless.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelFileError(f"{source} has no model_type; the file is incomplete, fetch it again.")
    if model_type == "gemma3" and isinstance(config.get("text_config"), Mapping):
        outer = {key: value for key, value in config.items() if key in ("tie_word_embeddings", "quantization_config")}
        config, model_type = {**outer, **config["text_config"]}, "gemma3_text"
    refuse_unknown("model_type", model_type, DEFAULTS, UnsupportedModelError)
    present = {key: value for key, value in config.items() if value is not None}
    # A sliding window of null says that there is none; an absent one takes the family's default.
    if model_type == "mistral" and "sliding_window" not in config:
        present["sliding_window"] = 4096
    fields = Fields(source, {**DEFAULTS[model_type], **present})
    for key in REFUSED:
        if fields.get(key):
            raise UnsupportedModelError(
                f"{source} sets {key} = {fields.get(key)!r}, which is not supported; choose a model without it."
            )
    return _architecture(model_type, fields)


def _architecture(model_type: str, fields: Fields) -> Architecture:
    gemma = model_type == "gemma3_text"
    num_heads, hidden_size = fields.size("num_attention_heads"), fields.size("hidden_size")
    num_kv_heads = fields.size("num_key_value_heads", num_heads)
    head_dim = fields.size("head_dim", max(1, hidden_size // num_heads))
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelFileError(f"{fields.source}: {num_heads} heads of size {head_dim} cannot share {num_kv_heads} key-value heads.")
    activation = fields.get("hidden_activation") or fields.get("hidden_act") or "silu"
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{fields.source}: activation {activation!r} is not supported; use one of {', '.join(ACTIVATIONS)}."
        )
    scalar = fields.number("query_pre_attn_scalar") if gemma else float(head_dim)
    return Architecture(
        family=model_type.removesuffix("_text"),
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.size("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        layers=_layers(model_type, fields),
        activation=ACTIVATIONS[activation],
        attention_scale=0.0 if scalar == head_dim else scalar**-0.5,
        embedding_scale=math.sqrt(hidden_size) if gemma else 1.0,
        tie_embeddings=bool(fields.get("tie_word_embeddings")),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type in ("qwen3", "gemma3_text"),
        sandwich_norms=gemma,
    )


def _layers(model_type: str, fields: Fields) -> tuple[LayerKind, ...]:
    num_layers = fields.size("num_hidden_layers")
    if num_layers > 10_000:
        raise ModelFileError(f"{fields.source}: num_hidden_layers is {num_layers}; the file is corrupt, fetch it again.")
    sliding = _sliding_layers(model_type, fields, num_layers)
    window = fields.size("sliding_window") if any(sliding) else None
    full, local = _ropes(model_type, fields)
    return tuple(LayerKind(local, window) if slides else LayerKind(full) for slides in sliding)


def _sliding_layers(model_type: str, fields: Fields, num_layers: int) -> list[bool]:
    if model_type in ("qwen2", "qwen3") and not fields.get("use_sliding_window"):
        return [False] * num_layers
    types = fields.get("layer_types")
    if types is not None:
        valid = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != num_layers or any(entry not in valid for entry in types):
            raise UnsupportedModelError(
                f"{fields.source}: layer_types must give one of {', '.join(valid)} to each of {num_layers} layers."
            )
        return [entry == "sliding_attention" for entry in types]
    if model_type == "gemma3_text":
        every = fields.size("_sliding_window_pattern", fields.size("sliding_window_pattern"))
        return [(layer + 1) % every != 0 for layer in range(num_layers)]
    slides = model_type != "llama" and fields.get("sliding_window") is not None
    first = fields.size("max_window_layers", least=0) if model_type in ("qwen2", "qwen3") else 0
    return [slides and layer >= first for layer in range(num_layers)]


def _ropes(model_type: str, fields: Fields) -> tuple[Rope, Rope]:
    """The ropes of full and of sliding layers; they differ for Gemma 3 only."""
    theta = fields.number("rope_theta")
    parameters = fields.get("rope_parameters")
    if isinstance(parameters, Mapping) and "full_attention" in parameters:
        local_theta = fields.number("rope_local_base_freq", theta)
        full = _rope(parameters["full_attention"], theta, fields.source)
        return full, _rope(parameters.get("sliding_attention"), local_theta, fields.source)
    full = _rope(parameters if parameters is not None else fields.get("rope_scaling"), theta, fields.source)
    return full, Rope(fields.number("rope_local_base_freq")) if model_type == "gemma3_text" else full


def _rope(settings: Any, theta: float, source: str) -> Rope:
    if settings is None:
        return Rope(theta)
    if not isinstance(settings, Mapping):
        raise ModelFileError(f"{source}: the rope settings must be an object, not {settings!r}.")
    fields = Fields(f"{source} (rope settings)", settings)
    theta = fields.number("rope_theta", theta)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if settings.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnsupportedModelError(f"{source}: partial_rotary_factor is not supported; choose a model without it.")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, linear_factor=fields.number("factor"))
    if kind == "llama3":
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        if low == high:
            raise ModelFileError(f"{source}: low_freq_factor and high_freq_factor must differ; both are {low}.")
        return Rope(theta, llama3=(fields.number("factor"), low, high, fields.size("original_max_position_embeddings")))
    raise UnsupportedModelError(f"{source}: rope type {kind!r} is not supported; use default, linear or llama3.")
