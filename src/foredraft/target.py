"""A decoder with its cache, run on batches: what the engine, or a draft model, calls for logits.

Owns: devices, dtypes and ops by name, and which of them serves a model.  Does not know: which blocks belong to whom, or what is
sampled from the logits.

Importing torch takes over 200 MB and seconds, so it is imported only for a device or ops that need it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from foredraft.architecture import Architecture, Weights
from foredraft.config import DEVICES, DTYPES, OPS
from foredraft.memory import ModelBytes, available_bytes
from foredraft.native import NativeModel, has_half_cache, native_bytes, why_not_native
from foredraft.types import ConfigError, PassOutput, Rows, refuse_unknown

BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}
# What Linux shows where a driver for a GPU that torch calls CUDA is loaded: NVIDIA's, on WSL, on Jetson, and AMD's.
GPU_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/nvmap", "/dev/kfd")


def resolve_device(name: str) -> str:
    """``cpu`` or ``cuda``; ``auto`` is CUDA where torch finds it, else the CPU.

    Raises:
        ConfigError: an unknown name, or ``cuda`` where torch finds none.
    """
    refuse_unknown("device", name, DEVICES)
    if name == "cpu" or (name == "auto" and not has_gpu_driver()):
        return "cpu"
    import torch

    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("device 'cuda' needs a CUDA build of torch and a GPU, and torch finds none; use device 'cpu' or 'auto'.")
    return "cuda" if has_cuda else "cpu"


def has_gpu_driver() -> bool:
    """False where torch cannot find a GPU, so that it need not be asked; True where only torch can tell."""
    return sys.platform not in ("linux", "darwin") or any(os.path.exists(path) for path in GPU_FILES)


def resolve_dtype(name: str, device: str) -> str:
    """What torch ops compute in: ``auto`` is bfloat16 on CUDA and float32 on the CPU.

    Raises:
        ConfigError: an unknown name.
    """
    refuse_unknown("dtype", name, DTYPES)
    if name != "auto":
        return name
    return "bfloat16" if device == "cuda" else "float32"


def resolve_ops(name: str, architecture: Architecture, device: str) -> str:
    """``native`` on a CPU where the kernels can serve the network, else ``torch``.

    Raises:
        ConfigError: an unknown name, or ``native`` where it cannot be had.
    """
    refuse_unknown("ops", name, OPS)
    if name == "torch":
        return "torch"
    reason = why_not_native(architecture) if device == "cpu" else "they run on the CPU only"
    if reason is not None and name == "native":
        raise ConfigError(f"ops 'native' cannot be used here: {reason}; use ops 'torch' or 'auto'.")
    return "torch" if reason is not None else "native"


def kv_bytes_per_token(architecture: Architecture, weights: Weights, *, device: str, dtype: str, ops: str) -> int:
    """Bytes of keys and values of one token, as a ModelTarget with the same options keeps them."""
    on = resolve_device(device)
    if resolve_ops(ops, architecture, on) == "native":
        return architecture.kv_bytes_per_token(2 if has_half_cache(weights, dtype) else 4)
    return architecture.kv_bytes_per_token(BYTES_PER_VALUE[resolve_dtype(dtype, on)])


def model_bytes(
    architecture: Architecture,
    weights: Weights,
    *,
    device: str,
    dtype: str,
    ops: str,
    threads: int | None,
    num_rows: int,
    max_model_len: int,
) -> ModelBytes:
    """What a ModelTarget with these options takes, without reading any weight; ``num_rows`` rows are the largest pass."""
    on = resolve_device(device)
    if resolve_ops(ops, architecture, on) == "native":
        return native_bytes(architecture, weights, dtype=dtype, threads=threads, num_rows=num_rows, max_model_len=max_model_len)
    precision = resolve_dtype(dtype, on)
    size = BYTES_PER_VALUE[precision]
    num_values = sum(math.prod(shape) for shape in architecture.weight_shapes().values())
    # An estimate: torch allocates as it goes, and how much at once is its own affair.
    widths = 4 * architecture.hidden_size + 3 * architecture.intermediate_size + 3 * architecture.num_heads * architecture.head_dim
    gathered = 4 * architecture.num_kv_heads * architecture.head_dim * max_model_len
    return ModelBytes(
        weights={precision: size * num_values},
        kv_per_token=architecture.kv_bytes_per_token(size),
        scratch=size * (num_rows * widths + gathered),
    )


def free_bytes(device: str) -> int:
    """Bytes that can still be taken of the memory where weights and cache are: main memory, or the GPU's."""
    if device == "cpu":
        return available_bytes()
    import torch

    return int(torch.cuda.mem_get_info()[0])


class Runner(Protocol):
    """A network with its weights and cache on one kind of ops."""

    exactness: str
    precision: str
    weight_bytes: int
    kv_bytes: int
    threads: int

    def forward(self, batch: Sequence[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        """As ``types.Target.forward``, for a batch that was checked."""
        ...

    def place(self) -> str:
        """Precision and place, for the start message."""
        ...


class ModelTarget:
    """A ``types.Target`` on a decoder.  A draft model is one too, with a cache of its own.

    ``ops``: ``native`` kernels keep the weights in the file's format and are exact to the bit; ``torch`` is the reference.
    ``threads`` are the native kernels' own, or torch's for the whole process; None takes all processors, or leaves torch's.
    ``num_blocks`` blocks of ``block_size`` tokens are the cache; ``max_model_len`` is the longest sequence in tokens.
    ``release`` gives back the memory of what was read from the model's file; it is called while weights are loaded, and after.

    Raises:
        ConfigError: the device, dtype or ops cannot be had, or ``max_model_len`` is more than the model was made for.
        ModelFileError: a tensor is missing or of the wrong shape.
        CapacityError: no memory for the cache.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: Weights,
        *,
        device: str = "auto",
        dtype: str = "auto",
        ops: str = "auto",
        threads: int | None = None,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        if not 1 <= max_model_len <= architecture.max_position_embeddings:
            raise ConfigError(
                f"max_model_len must be from 1 to the model's {architecture.max_position_embeddings} positions, "
                f"not {max_model_len}; change max_model_len."
            )
        refuse_unknown("dtype", dtype, DTYPES)
        on = resolve_device(device)
        self.runner: Runner
        if resolve_ops(ops, architecture, on) == "native":
            self.runner = NativeModel(
                architecture, weights, dtype=dtype, threads=threads, num_blocks=num_blocks, block_size=block_size, release=release
            )
        else:
            from foredraft.torch_model import TorchModel

            precision = resolve_dtype(dtype, on)
            self.runner = TorchModel(
                architecture, weights, device=on, dtype=precision, threads=threads, num_blocks=num_blocks, block_size=block_size
            )
        release()
        self.architecture = architecture
        self.vocab_size, self.max_model_len = architecture.vocab_size, max_model_len
        self.exactness, self.precision = self.runner.exactness, self.runner.precision
        self.weight_bytes, self.kv_bytes = self.runner.weight_bytes, self.runner.kv_bytes
        self.threads = self.runner.threads
        self._num_blocks, self._block_size = num_blocks, block_size

    def forward(self, batch: list[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        """Compute all rows in one pass; logits only where they are wanted.  Taps as in ``Decoder.forward``."""
        if not batch:
            return PassOutput([], [] if taps else None)
        self._check(batch)
        return self.runner.forward(batch, taps)

    def describe(self) -> str:
        """One line for the start message: model, precision, place and memory."""
        return (
            f"{self.architecture.family}, {self.architecture.num_layers} layers, {self.runner.place()}; "
            f"weights {self.weight_bytes / 1e6:,.0f} MB, KV cache {self.kv_bytes / 1e6:,.0f} MB "
            f"for {self._num_blocks * self._block_size:,} tokens; exactness: {self.exactness}"
        )

    def _check(self, batch: list[Rows]) -> None:
        for rows in batch:
            end = rows.start + len(rows.tokens)
            assert rows.start >= 0 and rows.tokens, (rows.start, rows.tokens)
            assert end <= self.max_model_len, (rows.start, len(rows.tokens), self.max_model_len)
            assert 0 <= rows.num_logits <= len(rows.tokens), (rows.num_logits, len(rows.tokens))
            assert min(rows.tokens) >= 0 and max(rows.tokens) < self.vocab_size, (rows.tokens, self.vocab_size)
            blocks, needed = rows.block_table, -(-end // self._block_size)
            assert len(blocks) >= needed, (len(blocks), needed, rows.start, len(rows.tokens))
            assert min(blocks) >= 0 and max(blocks) < self._num_blocks, (blocks, self._num_blocks)
