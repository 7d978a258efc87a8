"""A draft head on native kernels: quantised when it is loaded, and drafting by one call.

Owns: the run-time format of each matrix of a head, and the arrays of its passes.  Does not know: sequences, or how a kernel works
(csrc/head.inc).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from foredraft.architecture import Architecture, Weight
from foredraft.drafters.eagle_config import EAGLE3, HeadConfig
from foredraft.drafters.eagle_file import HeadFile
from foredraft.drafters.eagle_pass import Float32s, HeadOutput, HeadPass, Int32s
from foredraft.memory import ModelBytes
from foredraft.native import (
    ALIGNMENT,
    BLOCK_SIZE,
    FORMAT_OF_DTYPE,
    FORMATS,
    HEAD_DIMS,
    MAX_ATTENTION_QUERIES,
    TILE_ROWS,
    NativeModel,
    cache_pages,
    load_extension,
    num_default_threads,
)
from foredraft.weights import read_chunks

# A draft step is bound by reading these.  What they lose to four bits changes few drafts, and no output.
LAYER_FORMAT, HEAD_FORMAT, INPUT_FORMAT = "Q4_1", "Q4_1", "Q8_0"


def why_not(config: HeadConfig) -> str | None:
    """What keeps a head from the native kernels, as half a sentence; None when nothing does."""
    sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
    for name, size in sizes.items():
        if size % TILE_ROWS:
            return f"{name} {size} is no multiple of {TILE_ROWS}"
    return None if config.head_dim in HEAD_DIMS else f"head_dim {config.head_dim} is none of {HEAD_DIMS}"


def run_format(name: str, columns: int, dtype: str) -> str:
    """The format that a matrix of a head is kept in; ``dtype`` other than ``auto`` asks for that one."""
    if dtype != "auto":
        return FORMAT_OF_DTYPE[dtype]
    if columns % BLOCK_SIZE:
        return "F32"
    return HEAD_FORMAT if name == "lm_head" else INPUT_FORMAT if name in ("fc", "embed") else LAYER_FORMAT


def head_bytes(head: HeadFile, *, dtype: str, threads: int | None, num_rows: int, max_model_len: int, half: bool) -> ModelBytes:
    """What a head takes beside its target, without reading any weight; ``num_rows`` rows are the largest pass."""
    config, extension = head.config, load_extension()
    formats: Counter[str] = Counter()
    for name, weight in head.weights.items():
        if len(weight.shape) == 2:
            kind = run_format(name, weight.shape[1], dtype)
            formats[kind] += -(-extension.packed_size(FORMATS[kind], *weight.shape) // ALIGNMENT) * ALIGNMENT
        else:
            formats["F32"] += 4 * weight.shape[0]
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    width = max(heads, 2 * config.hidden_size, config.num_states * config.target_hidden_size)
    # Values, and as int8 with three numbers for each block.
    inputs = sum(5 * size + 12 * (size // BLOCK_SIZE + 1) for size in (width, config.intermediate_size))
    floats = 3 * config.hidden_size + config.head_dim + heads + 2 * kv + config.num_states * config.target_hidden_size
    scores = 4 * (threads or num_default_threads()) * MAX_ATTENTION_QUERIES * (max_model_len + 32)
    return ModelBytes(
        weights=dict(formats),
        kv_per_token=config.kv_values_per_token * (2 if half else 4),
        scratch=num_rows * (4 * floats + inputs) + scores,
    )


def quantise_q4_1(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Rows [n, columns] as blocks of 32 in Q4_1, uint8 [n, columns / 32 * 20].

    A block is its scale and minimum as float16 and 16 bytes, the i-th of which holds value i in its low and value i + 16 in its
    high four bits; a value is minimum + scale * code.
    """
    blocks = rows.reshape(len(rows), -1, BLOCK_SIZE)
    low = blocks.min(axis=2).astype(np.float16)
    scale = ((blocks.max(axis=2) - low.astype(np.float32)) / 15.0).astype(np.float16)
    wide = scale.astype(np.float32)[..., None]
    codes = np.divide(blocks - low.astype(np.float32)[..., None], wide, out=np.zeros_like(blocks), where=wide > 0)
    codes = np.clip(np.rint(codes), 0, 15).astype(np.uint8)
    packed = codes[..., :16] | codes[..., 16:] << 4
    parts = (scale[..., None].view(np.uint8), low[..., None].view(np.uint8), packed)
    return np.ascontiguousarray(np.concatenate(parts, axis=2).reshape(len(rows), -1))


class NativeHeadWeights:
    """A head's weights, packed; the embedding and output matrix are the target's where it has none of its own."""

    def __init__(self, head: HeadFile, target: NativeModel, architecture: Architecture, norm: Weight, dtype: str) -> None:
        self.config, self.target_ids = head.config, np.ascontiguousarray(head.target_ids, np.int64)
        self._target, self._head, self._dtype = target, head, dtype
        self._extension = load_extension()
        self.num_bytes = 0
        names = [name for name, weight in head.weights.items() if len(weight.shape) == 2]
        self.matrices: dict[str, Any] = {name: self._matrix(name) for name in names}
        for name in ("embed", "lm_head"):
            self.matrices.setdefault(name, target.matrices[name])
        self.vectors = {name: self._vector(w) for name, w in head.weights.items() if len(w.shape) == 1}
        self.state_eps = head.config.rms_norm_eps
        if head.config.kind != EAGLE3:
            # EAGLE reads the state that the target's own output matrix reads.
            self.vectors["fc_norm"], self.state_eps = self._vector(norm), architecture.rms_norm_eps

    def _matrix(self, name: str) -> Any:
        weight, extension = self._head.weights[name], self._extension
        kind = run_format(name, weight.shape[1], self._dtype)
        packed = np.zeros(extension.packed_size(FORMATS[kind], *weight.shape), np.uint8)
        for start, rows in read_chunks(name, weight):
            if kind == "Q4_1":
                extension.pack_blocks(packed, FORMATS[kind], start, quantise_q4_1(rows), weight.shape[1])
            else:
                extension.pack_floats(packed, FORMATS[kind], start, rows)
        self._head.release()
        self.num_bytes += packed.nbytes
        return _Kept(extension.Matrix(packed, FORMATS[kind], *weight.shape), packed)

    def _vector(self, weight: Weight) -> npt.NDArray[np.float32]:
        values = np.require(weight.read(0, weight.shape[0]), np.float32, ["C", "W"])
        self.num_bytes += values.nbytes
        return values

    def runner(self, num_blocks: int, block_size: int) -> NativeHead:
        """The head with an empty cache."""
        return NativeHead(self, self._target, num_blocks, block_size)


class _Kept:
    """A matrix of the extension and the bytes that it points into."""

    def __init__(self, matrix: Any, packed: npt.NDArray[np.uint8]) -> None:
        self.matrix, self.packed = matrix, packed


class NativeHead:
    """See ``eagle_pass.HeadRunner``.  A row's results depend on its own sequence only, to the last bit."""

    def __init__(self, weights: NativeHeadWeights, target: NativeModel, num_blocks: int, block_size: int) -> None:
        config = weights.config
        self.hidden_size, self.num_blocks, self.block_size = config.hidden_size, num_blocks, block_size
        self._draft_vocab_size = config.draft_vocab_size
        self._weights = weights
        value_bytes = 2 if target.half_cache else 4
        self._head = load_extension().Head(
            target.extension_model,
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            block_size,
            config.num_layers,
            config.rms_norm_eps,
            config.head_dim**-0.5,
            config.activation == "gelu_tanh",
            target.half_cache,
            config.kind == EAGLE3,
            config.norm_before_residual,
            config.norm_output,
            config.num_states,
            config.target_hidden_size,
            weights.state_eps,
        )
        matrices = {name: getattr(kept, "matrix", kept) for name, kept in weights.matrices.items()}
        vectors = weights.vectors
        frequencies = np.ascontiguousarray(config.rope.inverse_frequencies(config.head_dim), np.float64)
        num_bytes = num_blocks * block_size * config.num_kv_heads * config.head_dim * value_bytes
        self._kept: list[Any] = [frequencies, target]
        self._head.set_inputs(
            matrices["embed"],
            matrices["fc"],
            vectors.get("fc_bias"),
            vectors.get("fc_norm"),
            vectors.get("input_norm"),
            vectors.get("hidden_norm"),
        )
        for i in range(config.num_layers):
            prefix = f"layers.{i}."
            cache = {"keys": cache_pages(num_bytes), "values": cache_pages(num_bytes)}
            stacks = {name: matrices[prefix + name] for name in ("qkv", "o", "gate_up", "down")}
            names = ("attn_norm", "mlp_norm", "qkv_bias", "q_norm", "k_norm", "o_bias")
            self._head.set_layer(i, **stacks, **{n: vectors.get(prefix + n) for n in names}, frequencies=frequencies, **cache)
            self._kept.append(cache)
        self._head.set_output(vectors.get("norm"), matrices["lm_head"], weights.target_ids)

    def run(self, rows: HeadPass) -> HeadOutput:
        """See HeadRunner."""
        num = len(rows.logit_rows)
        logits = np.empty((num, self._draft_vocab_size), np.float32)
        outputs = np.empty((num, self.hidden_size), np.float32)
        best, probabilities = np.empty(num, np.int32), np.empty(num, np.float32)
        self._head.run(*rows.arrays, logits.reshape(-1), outputs.reshape(-1), best, probabilities)
        return HeadOutput(logits, outputs)

    def draft(self, rows: HeadPass, num_wanted: Int32s) -> tuple[Int32s, Float32s]:
        """See HeadRunner."""
        shape = len(rows.logit_rows), int(num_wanted.max())
        tokens, probabilities = np.empty(shape, np.int32), np.empty(shape, np.float32)
        self._head.draft(*rows.arrays, num_wanted, tokens.reshape(-1), probabilities.reshape(-1))
        return tokens, probabilities
