"""Architecture and weights out of a GGUF file.

Owns: GGUF's setting and tensor names, and the row order of its Llama files.  Does not know: the container's bytes, or tokenizers.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from foredraft.architecture import Architecture, LayerKind, Rope, Weight, Weights
from foredraft.loader.assemble import assemble
from foredraft.loader.fields import Fields
from foredraft.loader.gguf_file import GGUFFile
from foredraft.types import FloatArray, ModelFileError, UnsupportedModelError, refuse_unknown

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
GEMMA_LOCAL_THETA = 10000.0
GEMMA_GLOBAL_EVERY = 6
GEMMA_27B_LAYERS = 62
LLAMA3_DEFAULTS = (1.0, 4.0, 8192)

PARTS = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "lm_head": "output.weight",
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o": "attn_output.weight",
    "post_attn_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
}

REFUSED = (
    "expert_count",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attention.clamp_kqv",
)


def gguf_architecture(file: GGUFFile) -> Architecture:
    """The network that the metadata describes.

    Raises:
        UnsupportedModelError: a family or an option that would change the result.
        ModelFileError: a setting is missing or senseless.
    """
    family = file.metadata.get("general.architecture")
    if not isinstance(family, str):
        raise ModelFileError(f"{file.path} has no general.architecture; the file is incomplete, fetch it again.")
    refuse_unknown("GGUF architecture", family, FAMILIES, UnsupportedModelError)
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedModelError(
            f"{file.path} is one part of a split model; merge the parts into one file with gguf-split --merge."
        )
    fields = Fields(str(file.path), file.metadata, family + ".")
    _refuse_options(fields)
    num_heads, hidden_size = fields.size("attention.head_count"), fields.size("embedding_length")
    head_dim = fields.size("attention.key_length", max(1, hidden_size // num_heads))
    for key, expected in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim)):
        if fields.size(key, expected) != expected:
            raise UnsupportedModelError(
                f"{file.path}: {family}.{key} is {fields.get(key)} and the head size is {expected}; only equal sizes work."
            )
    num_kv_heads = fields.size("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelFileError(f"{file.path}: {num_heads} heads of size {head_dim} cannot share {num_kv_heads} key-value heads.")
    for name in ("token_embd.weight", "output_norm.weight"):
        if name not in file.tensors:
            raise ModelFileError(f"{file.path} has no tensor {name}; the file is incomplete, fetch it again.")
    gemma = family == "gemma3"
    layers = _layers(file, fields, head_dim)
    return Architecture(
        family=family,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.size("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.size("context_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", 1e-6),
        layers=layers,
        activation="gelu_tanh" if gemma else "silu",
        attention_scale=_attention_scale(fields, gemma, len(layers), hidden_size / num_heads),
        embedding_scale=math.sqrt(hidden_size) if gemma else 1.0,
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias=family == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        qk_norm=family in ("qwen3", "gemma3"),
        sandwich_norms=gemma,
    )


def gguf_weights(file: GGUFFile, architecture: Architecture) -> Weights:
    """The canonical weights.

    Raises:
        ModelFileError: a tensor is missing or has the wrong shape.
        UnsupportedModelError: a tensor that the architecture has no use for, or a format that cannot be read.
    """
    used = {"rope_freqs.weight"}

    def open_part(part: str, layer: int | None) -> Weight:
        name = PARTS[part] if layer is None else f"blk.{layer}.{PARTS[part]}"
        if name not in file.tensors:
            raise ModelFileError(f"{file.path} has no tensor {name}; the file is incomplete, fetch it again.")
        used.add(name)
        return file.weight(name, row_order(architecture, part, file.tensors[name].shape[0]))

    weights = assemble(architecture, open_part)
    unused = sorted(set(file.tensors) - used)
    if unused:
        raise UnsupportedModelError(
            f"{file.path} holds the tensor {unused[0]}, which a plain {architecture.family} model does not have; "
            "choose a checkpoint without it."
        )
    return weights


def row_order(architecture: Architecture, part: str, num_rows: int) -> npt.NDArray[np.intp] | None:
    """Rows of q and k that bring rotary pairs from (2i, 2i+1), as Llama GGUF files have them, to (i, i + D/2)."""
    kind, half = part.removesuffix("_bias"), architecture.head_dim // 2
    if architecture.family != "llama" or kind not in ("q", "k") or num_rows % architecture.head_dim:
        return None
    return np.arange(num_rows).reshape(-1, half, 2).swapaxes(1, 2).reshape(-1)


def _refuse_options(fields: Fields) -> None:
    for key in REFUSED:
        if fields.get(key) not in (None, 0, 1):
            raise UnsupportedModelError(
                f"{fields.source} sets {fields.prefix}{key} = {fields.get(key)}, which is not supported; choose a model without it."
            )


def _attention_scale(fields: Fields, gemma: bool, num_layers: int, width_per_head: float) -> float:
    if fields.get("attention.scale") is not None:
        return fields.number("attention.scale")
    # The file format has no key for Gemma 3 27B's scale, the one Gemma 3 whose scale is not that of its head size.
    return width_per_head**-0.5 if gemma and num_layers == GEMMA_27B_LAYERS else 0.0


def _layers(file: GGUFFile, fields: Fields, head_dim: int) -> tuple[LayerKind, ...]:
    num_layers = fields.size("block_count")
    if num_layers > len(file.tensors):
        raise ModelFileError(
            f"{file.path}: {fields.prefix}block_count is {num_layers}, but there are {len(file.tensors)} tensors in all."
        )
    gemma = file.metadata["general.architecture"] == "gemma3"
    scaling, factor = fields.get("rope.scaling.type"), 1.0
    if scaling == "linear":
        factor = fields.number("rope.scaling.factor")
    elif scaling not in (None, "", "none"):
        raise UnsupportedModelError(
            f"{file.path}: {fields.prefix}rope.scaling.type {scaling!r} is not supported; use none or linear."
        )
    theta = fields.number("rope.freq_base", 1e6 if gemma else 1e4)
    llama3 = None
    if "rope_freqs.weight" in file.tensors:
        info = file.tensors["rope_freqs.weight"]
        if info.shape != (head_dim // 2,):
            raise ModelFileError(f"{file.path}: rope_freqs.weight has shape {list(info.shape)}, not [{head_dim // 2}].")
        llama3 = llama3_rule(file.weight("rope_freqs.weight").read(0, head_dim // 2), theta, head_dim, str(file.path))
    rope = Rope(theta, factor, llama3)
    window = fields.size("attention.sliding_window") if fields.get("attention.sliding_window") else None
    if not gemma:
        return (LayerKind(rope, window),) * num_layers
    local = LayerKind(Rope(fields.number("rope.freq_base_swa", GEMMA_LOCAL_THETA)), window)
    return tuple(local if sliding else LayerKind(rope) for sliding in _sliding_layers(fields, num_layers))


def _sliding_layers(fields: Fields, num_layers: int) -> list[bool]:
    pattern = fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise ModelFileError(f"{fields.source}: the sliding window pattern has {len(pattern)} entries for {num_layers} layers.")
        return [bool(entry) for entry in pattern]
    every = fields.size("attention.sliding_window_pattern", GEMMA_GLOBAL_EVERY)
    return [(layer + 1) % every != 0 for layer in range(num_layers)]


def llama3_rule(divisors: FloatArray, theta: float, head_dim: int, source: str) -> tuple[float, float, float, int] | None:
    """Llama 3.1's rule behind a table of frequency divisors [head_dim / 2]; None when the table changes nothing.

    The usual constants are tried first.  Else two points of the blended region fix the rule: with low_freq_factor set to 1, the
    blend is linear in 1 / wavelength.

    Raises:
        UnsupportedModelError: no rule of that kind gives the table.
    """
    divisors = np.asarray(divisors, np.float64)
    if np.allclose(divisors, 1.0):
        return None
    if not (np.isfinite(divisors).all() and (divisors > 0).all()):
        raise ModelFileError(f"{source}: rope_freqs.weight must hold finite numbers above 0; fetch the file again.")
    plain = Rope(theta).inverse_frequencies(head_dim)
    factor = float(divisors.max())
    rules = [(factor, *LLAMA3_DEFAULTS)]
    blended = np.flatnonzero((divisors > 1 + 1e-4) & (divisors < factor * (1 - 1e-4)))
    if len(blended) >= 2:
        first, last = blended[0], blended[-1]
        blend = (1 / divisors - 1 / factor) / (1 - 1 / factor)
        slope = (blend[first] - blend[last]) * 2 * math.pi / (plain[first] - plain[last])
        intercept = slope * plain[first] / (2 * math.pi) - blend[first]
        if slope > 0 and intercept > 0:
            rules.append((factor, 1.0, round(float(1.0 + 1.0 / intercept), 4), round(float(slope / intercept))))
    for rule in rules:
        if np.allclose(Rope(theta, 1.0, rule).inverse_frequencies(head_dim) * divisors, plain, rtol=1e-3):
            return rule
    raise UnsupportedModelError(f"{source}: the table rope_freqs.weight is not of Llama 3's form; choose another conversion.")
