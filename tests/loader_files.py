"""Tiny model folders and GGUF files, written as other tools write them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import hf_weights
from foredraft.architecture import Architecture, Weights
from foredraft.loader.gguf_model import PARTS
from foredraft.loader.tokenizer import _byte_level_alphabet

CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIALS = ("<s>", "</s>", "<|start|>", "<|end|>")
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("1", "2"), ("Ġ", "Ġ"))


def byte_level_tokens() -> list[str]:
    """Specials, the 256 bytes, and what ``MERGES`` make."""
    return [*SPECIALS, *_byte_level_alphabet(), *("".join(pair) for pair in MERGES)]


@functools.cache
def byte_level_json() -> str:
    """A complete byte-level tokenizer that puts <s> first."""
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(byte_level_tokens())}, list(MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend.to_str()


def write_folder(path: Path, family: str, *, shard_size: str = "5GB", dtype: Any = None) -> hf_weights.Case:
    """A folder of ``hf_weights.case(family)`` as transformers saves it, with a tokenizer."""
    case = hf_weights.case(family)
    model = case.reference
    if dtype is not None:
        model = type(model)(model.config).to(dtype)
        model.load_state_dict(case.reference.state_dict())
    model.save_pretrained(path, max_shard_size=shard_size)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_level_json()), bos_token="<s>", eos_token="</s>", chat_template=CHAT
    )
    tokenizer.save_pretrained(path)
    return case


def byte_level_metadata(writer: gguf.GGUFWriter) -> None:
    tokens = byte_level_tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT)


SPM_WORDS = (
    "▁",
    "h",
    "e",
    "l",
    "o",
    "w",
    "r",
    "d",
    "ll",
    "he",
    "ell",
    "hell",
    "hello",
    "▁hello",
    "▁w",
    "or",
    "▁wor",
    "ld",
    "▁world",
)


def sentence_piece_tokens() -> tuple[list[str], list[float], list[int]]:
    """Strings, scores and types: specials, user-defined, bytes, words."""
    tokens = ["<unk>", "<s>", "</s>", "\n\n", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_WORDS]
    scores = [0.0] * 260 + [-float(i) for i in range(len(SPM_WORDS))]
    return tokens, scores, [2, 3, 3, 4] + [6] * 256 + [1] * len(SPM_WORDS)


def sentence_piece_metadata(writer: gguf.GGUFWriter, *, space_prefix: bool = False) -> None:
    tokens, scores, types = sentence_piece_tokens()
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(space_prefix)


def write_gguf(
    path: Path,
    architecture: Architecture,
    weights: Weights,
    *,
    format: str = "F32",
    tokenizer: Callable[[gguf.GGUFWriter], None] = byte_level_metadata,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
    rename: Mapping[str, str] | None = None,
) -> Path:
    """A GGUF file of canonical weights; ``format`` is that of the matrices; ``rename`` maps tensor names, to "" drops."""
    a = architecture
    arch = "llama" if a.family in ("llama", "mistral") else a.family
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(a.num_layers)
    writer.add_context_length(a.max_position_embeddings)
    writer.add_embedding_length(a.hidden_size)
    writer.add_feed_forward_length(a.intermediate_size)
    writer.add_head_count(a.num_heads)
    writer.add_head_count_kv(a.num_kv_heads)
    writer.add_key_length(a.head_dim)
    writer.add_value_length(a.head_dim)
    writer.add_layer_norm_rms_eps(a.rms_norm_eps)
    _write_layers(writer, a, arch)
    tokenizer(writer)
    if extra is not None:
        extra(writer)
    for name, values in gguf_tensors(a, weights).items():
        name = (rename or {}).get(name, name)
        if not name:
            continue
        kind = GGMLQuantizationType[format] if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_layers(writer: gguf.GGUFWriter, a: Architecture, arch: str) -> None:
    far = next((kind for kind in a.layers if kind.window is None), a.layers[0])
    writer.add_rope_freq_base(far.rope.theta)
    windows = [kind.window for kind in a.layers if kind.window is not None]
    if windows:
        writer.add_sliding_window(windows[0])
    if a.family == "gemma3":
        writer.add_array("gemma3.attention.sliding_window_pattern", [kind.window is not None for kind in a.layers])
    if a.attention_scale:
        writer.add_float32(f"{arch}.attention.scale", a.attention_scale)
    if far.rope.linear_factor != 1.0:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(far.rope.linear_factor)
    if far.rope.llama3 is not None:
        plain = type(far.rope)(far.rope.theta).inverse_frequencies(a.head_dim)
        divisors = plain / far.rope.inverse_frequencies(a.head_dim)
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))


def gguf_tensors(a: Architecture, weights: Weights) -> dict[str, np.ndarray]:
    """GGUF's names and row orders."""
    tensors: dict[str, np.ndarray] = {}
    q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    splits = {"qkv": ("q", "k", "v"), "qkv_bias": ("q_bias", "k_bias", "v_bias"), "gate_up": ("gate", "up")}
    for name, weight in weights.items():
        *prefix, stem = name.split(".")
        values = weight.read(0, weight.shape[0])
        parts = {stem: values}
        if stem in splits:
            cuts = [a.intermediate_size] if stem == "gate_up" else [q, q + kv]
            parts = dict(zip(splits[stem], np.split(values, cuts), strict=True))
        for part, rows in parts.items():
            if a.family in ("llama", "mistral") and part in ("q", "k"):
                rows = rows.reshape(-1, 2, a.head_dim // 2, a.hidden_size).swapaxes(1, 2).reshape(rows.shape)
            tensors[(f"blk.{prefix[-1]}." if prefix else "") + PARTS[part]] = np.ascontiguousarray(rows)
    return tensors
