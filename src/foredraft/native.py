"""The decoder on native kernels: weights in the file's own format, one C++ call per pass.

Owns: the choice of each weight's run-time format, its packed bytes, and the arrays of a pass.  Does not know: sequences, or how a
kernel works (csrc/kernels.cpp).

A row's logits depend on its own tokens and positions only, to the last bit: ``exactness: bitwise``.
"""

from __future__ import annotations

import importlib
import mmap
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from foredraft.architecture import Architecture, Weight, Weights
from foredraft.memory import ModelBytes
from foredraft.types import CapacityError, ConfigError, ModelFileError, PassOutput, Rows
from foredraft.weights import CHUNK_BYTES, check_weights, read_chunks

FORMATS = {"F32": 0, "F16": 1, "BF16": 2, "Q8_0": 3, "Q4_0": 4, "Q4_1": 5}
FORMAT_OF_DTYPE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
BLOCK_FORMATS = ("Q8_0", "Q4_0", "Q4_1")
BLOCK_SIZE = 32
TILE_ROWS = 16
MAX_ATTENTION_QUERIES = 8
ALIGNMENT = 64
# Larger keys or values of a layer ask for huge pages, which are quicker to find; in smaller ones they would waste memory.
MIN_HUGE_BYTES = 4 * 1024 * 1024
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 128, 192, 256)

Bytes = npt.NDArray[np.uint8]


def load_extension() -> Any:
    """The compiled module.  Raises ImportError where it is not there."""
    return importlib.import_module("foredraft._native")


def why_not_native(architecture: Architecture) -> str | None:
    """What keeps this machine or network from the native kernels, as half a sentence; None when nothing does."""
    try:
        load_extension()
    except ImportError as error:
        return f"the compiled module is missing ({error})"
    sizes = {"hidden_size": architecture.hidden_size, "intermediate_size": architecture.intermediate_size}
    for name, size in sizes.items():
        if size % TILE_ROWS:
            return f"{name} {size} is no multiple of {TILE_ROWS}"
    if architecture.head_dim not in HEAD_DIMS:
        return f"head_dim {architecture.head_dim} is none of {HEAD_DIMS}"
    return None


def run_format(weight: Weight, dtype: str) -> str:
    """The format that a matrix is kept in: the file's own where there are kernels for it, Q8_0 for other quantised ones.

    ``dtype`` other than ``auto`` asks for that format.
    """
    if dtype != "auto":
        return FORMAT_OF_DTYPE[dtype]
    if weight.format in FORMATS and (weight.format not in BLOCK_FORMATS or weight.read_blocks is not None):
        return weight.format
    return "Q8_0" if weight.shape[1] % BLOCK_SIZE == 0 else "F32"


def has_half_cache(weights: Weights, dtype: str) -> bool:
    """Keys and values are kept as float16 unless some matrix is float32: then nothing is rounded."""
    return all(run_format(weight, dtype) != "F32" for weight in weights.values() if len(weight.shape) == 2)


def _main_format(weights: Weights, dtype: str) -> str:
    """The run-time format of most matrix values."""
    totals: Counter[str] = Counter()
    for weight in weights.values():
        if len(weight.shape) == 2:
            totals[run_format(weight, dtype)] += weight.shape[0] * weight.shape[1]
    return totals.most_common(1)[0][0]


def num_default_threads() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _packed_bytes(weight: Weight, dtype: str) -> int:
    packed: int = load_extension().packed_size(FORMATS[run_format(weight, dtype)], *weight.shape)
    return -(-packed // ALIGNMENT) * ALIGNMENT


def native_bytes(
    architecture: Architecture, weights: Weights, *, dtype: str, threads: int | None, num_rows: int, max_model_len: int
) -> ModelBytes:
    """What a NativeModel takes, without reading any weight; ``num_rows`` rows are the largest pass."""
    formats: Counter[str] = Counter()
    for name, shape in architecture.weight_shapes().items():
        if len(shape) == 2:
            formats[run_format(weights[name], dtype)] += _packed_bytes(weights[name], dtype)
        else:
            formats["F32"] += 4 * shape[0]
    heads, kv = architecture.num_heads * architecture.head_dim, architecture.num_kv_heads * architecture.head_dim
    num_ropes = len({kind.rope for kind in architecture.layers})
    # As NativeModel.run in csrc/module.cpp asks for them; what goes into a matrix product is there as int8 too, with three numbers
    # a block, if a matrix is quantised.
    inputs = (max(heads, architecture.hidden_size), architecture.intermediate_size)
    residual = (1 + architecture.sandwich_norms) * architecture.hidden_size
    floats = residual + num_ropes * architecture.head_dim + heads + 2 * kv + sum(inputs)
    has_blocks = any(name in BLOCK_FORMATS for name in formats)
    quantised = sum(width + 12 * (width // BLOCK_SIZE + 1) for width in inputs) if has_blocks else 0
    scores = 4 * (threads or num_default_threads()) * MAX_ATTENTION_QUERIES * (max_model_len + 32)
    return ModelBytes(
        weights=dict(formats),
        kv_per_token=architecture.kv_bytes_per_token(2 if has_half_cache(weights, dtype) else 4),
        scratch=num_rows * (4 * floats + quantised) + scores,
    )


def cache_pages(num_bytes: int) -> Bytes:
    """Zeros that take no memory until they are written.

    They come straight from the system; the heap would reuse, and so fill with zeros, what loading left behind.

    Raises:
        OSError, OverflowError: there is no room.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= MIN_HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


class _Packer:
    """Fills one aligned arena with packed matrices, in the order in which a pass reads them."""

    def __init__(self, extension: Any, weights: Weights, dtype: str, names: Sequence[str], release: Callable[[], None]) -> None:
        self._extension, self._weights, self._dtype, self._release = extension, weights, dtype, release
        self.num_bytes = sum(_packed_bytes(weights[name], dtype) for name in names)
        self._arena = np.zeros(self.num_bytes + ALIGNMENT, np.uint8)
        self._at = -self._arena.ctypes.data % ALIGNMENT

    def matrix(self, name: str) -> Any:
        weight = self._weights[name]
        kind = run_format(weight, self._dtype)
        size = _packed_bytes(weight, self._dtype)
        packed = self._arena[self._at : self._at + size]
        self._at += size
        if kind in BLOCK_FORMATS and kind == weight.format and weight.read_blocks is not None:
            step = max(1, CHUNK_BYTES // (weight.shape[1]))
            for start in range(0, weight.shape[0], step):
                blocks = weight.read_blocks(start, min(start + step, weight.shape[0]))
                self._extension.pack_blocks(packed, FORMATS[kind], start, blocks, weight.shape[1])
                self._release()
        else:
            for start, rows in read_chunks(name, weight):
                self._extension.pack_floats(packed, FORMATS[kind], start, rows)
                self._release()
        return self._extension.Matrix(packed, FORMATS[kind], *weight.shape)

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        weight = self._weights[name]
        values = weight.read(0, weight.shape[0])
        if values.shape != weight.shape:
            raise ModelFileError(f"tensor {name!r} must have shape {weight.shape}, not {values.shape}; fetch the model again.")
        return np.require(values, np.float32, ["C", "W"])


class NativeModel:
    """A network, its weights packed for the native kernels, and its cache.

    ``instruction_set`` None takes the best that this machine has.  ``release`` is called whenever rows were packed: it may give
    back what reading them took, so that loading needs little more memory than running.

    Raises:
        ModelFileError: a tensor is missing, unexpected, or of the wrong shape.
        ConfigError: the instruction set cannot run here.
        CapacityError: no memory for the cache.
    """

    exactness = "bitwise"

    def __init__(
        self,
        architecture: Architecture,
        weights: Weights,
        *,
        dtype: str,
        threads: int | None,
        num_blocks: int,
        block_size: int,
        instruction_set: str | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        check_weights(architecture, weights)
        extension = load_extension()
        sets = extension.instruction_sets()
        if instruction_set is not None and instruction_set not in sets:
            raise ConfigError(f"instruction set {instruction_set!r} cannot run on this machine; choose one of: {', '.join(sets)}.")
        self.architecture, self.dtype, self.num_blocks, self.block_size = architecture, dtype, num_blocks, block_size
        self.threads = threads or num_default_threads()
        self.half_cache = has_half_cache(weights, dtype)
        self.precision = _main_format(weights, dtype)
        kept = {
            weight.format for weight in weights.values() if len(weight.shape) == 2 and run_format(weight, dtype) == weight.format
        }
        self._repacked = sorted({weight.format for weight in weights.values() if len(weight.shape) == 2} - kept)
        try:
            self._model = extension.Model(
                architecture.hidden_size,
                architecture.intermediate_size,
                architecture.num_heads,
                architecture.num_kv_heads,
                architecture.head_dim,
                block_size,
                architecture.num_layers,
                architecture.rms_norm_eps,
                architecture.scale,
                architecture.embedding_scale,
                architecture.activation == "gelu_tanh",
                self.half_cache,
                self.threads,
                instruction_set or "",
            )
        except RuntimeError as error:
            raise ConfigError(f"{self.threads} threads could not be started here ({error}); lower threads.") from error
        self.kv_bytes = architecture.kv_bytes_per_token(2 if self.half_cache else 4) * num_blocks * block_size
        # Everything that the extension holds pointers into.
        self._kept: list[Any] = []
        # What a draft head on the same threads may use too.
        self.extension_model, self.matrices = self._model, dict[str, Any]()
        self.weight_bytes = self._load(extension, weights, release)

    def _load(self, extension: Any, weights: Weights, release: Callable[[], None]) -> int:
        architecture = self.architecture
        matrices = [name for name, shape in architecture.weight_shapes().items() if len(shape) == 2]
        in_order = sorted(matrices, key=lambda name: name in ("embed", "lm_head"))
        packer = _Packer(extension, weights, self.dtype, in_order, release)
        num_vector_bytes = 0

        def vector(name: str) -> npt.NDArray[np.float32]:
            nonlocal num_vector_bytes
            values = packer.vector(name)
            num_vector_bytes += values.nbytes
            return values

        # Layers that share an array share their rotations.
        frequencies = {
            rope: np.ascontiguousarray(rope.inverse_frequencies(architecture.head_dim), dtype=np.float64)
            for rope in {kind.rope for kind in architecture.layers}
        }
        for i, kind in enumerate(architecture.layers):
            prefix = f"layers.{i}."
            keys, values = self._cache(), self._cache()
            arrays = {
                name: vector(prefix + name) if prefix + name in weights else None
                for name in ("attn_norm", "mlp_norm", "qkv_bias", "q_norm", "k_norm", "post_attn_norm", "post_mlp_norm")
            }
            stacks = {name: packer.matrix(prefix + name) for name in ("qkv", "o", "gate_up", "down")}
            place = {"frequencies": frequencies[kind.rope], "window": kind.window or 0, "keys": keys, "values": values}
            self._model.set_layer(i, **stacks, **arrays, **place)
            self._kept += [*stacks.values(), *arrays.values(), frequencies, keys, values]
        embed = packer.matrix("embed")
        head = embed if architecture.tie_embeddings else packer.matrix("lm_head")
        norm = vector("norm")
        self._model.set_ends(embed, norm, head)
        self._kept += [packer, embed, head, norm]
        self.matrices = {"embed": embed, "lm_head": head}
        return packer.num_bytes + num_vector_bytes

    def _cache(self) -> Bytes:
        num_bytes = self.kv_bytes // (2 * self.architecture.num_layers)
        try:
            return cache_pages(num_bytes)
        except (OSError, OverflowError) as error:
            raise CapacityError(
                f"the KV cache needs {self.kv_bytes / 1e6:,.0f} MB, which is not free; lower kv_cache_memory."
            ) from error

    def forward(self, batch: Sequence[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        """See types.Target."""
        num_rows = [len(rows.tokens) for rows in batch]
        tables = [rows.block_table for rows in batch]
        tokens = np.fromiter((token for rows in batch for token in rows.tokens), np.int32)
        positions = np.concatenate(
            [np.arange(rows.start, rows.start + n, dtype=np.int32) for rows, n in zip(batch, num_rows, strict=True)]
        )
        offsets = np.cumsum([0, *(len(table) for table in tables)])[:-1]
        flat_tables = np.fromiter((block for table in tables for block in table), np.int32)
        ends = np.cumsum(num_rows)
        wanted = [np.arange(end - rows.num_logits, end, dtype=np.int32) for rows, end in zip(batch, ends, strict=True)]
        logits = np.empty((sum(rows.num_logits for rows in batch), self.architecture.vocab_size), np.float32)
        tapped = np.empty((len(tokens), len(taps) * self.architecture.hidden_size), np.float32)
        assert tokens.min() >= 0 and tokens.max() < self.architecture.vocab_size, (tokens.min(), tokens.max())
        self._model.run(
            tokens,
            positions,
            flat_tables,
            np.repeat(offsets, num_rows).astype(np.int32),
            np.concatenate(wanted),
            np.array(taps, np.int32),
            logits.reshape(-1),
            tapped.reshape(-1),
        )
        num_logits = np.cumsum([rows.num_logits for rows in batch])
        return PassOutput(np.split(logits, num_logits[:-1]), np.split(tapped, ends[:-1]) if taps else None)

    def place(self) -> str:
        """Where it runs, for the start message."""
        repacked = f" (repacked from {', '.join(self._repacked)})" if self._repacked else ""
        return f"{self.precision}{repacked} on {self.threads} CPU threads with native ops ({self._model.isa})"
