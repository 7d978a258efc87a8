"""A decoder with its cache, run on batches: what the engine, or a draft model, calls for logits.

Owns: devices, dtypes and ops by name, and which of them serves a model.  Does not know: which blocks belong to whom, or what is
sampled from the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from foredraft.architecture import Architecture, Weights
from foredraft.config import DEVICES, DTYPES, OPS
from foredraft.model import Decoder
from foredraft.native import NativeModel, has_half_cache, num_default_threads, why_not_native
from foredraft.ops import KVStorage, create_ops
from foredraft.types import ConfigError, PassOutput, Rows, refuse_unknown


def resolve_device(name: str) -> torch.device:
    """``auto`` is CUDA where torch finds it, else the CPU.

    Raises:
        ConfigError: an unknown name, or ``cuda`` where torch finds none.
    """
    refuse_unknown("device", name, DEVICES)
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("device 'cuda' needs a CUDA build of torch and a GPU, and torch finds none; use device 'cpu' or 'auto'.")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on CUDA and float32 on the CPU.

    Raises:
        ConfigError: an unknown name.
    """
    refuse_unknown("dtype", name, DTYPES)
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def resolve_ops(name: str, architecture: Architecture, device: torch.device) -> str:
    """``native`` on a CPU where the kernels can serve the network, else ``torch``.

    Raises:
        ConfigError: an unknown name, or ``native`` where it cannot be had.
    """
    refuse_unknown("ops", name, OPS)
    if name == "torch":
        return "torch"
    reason = why_not_native(architecture) if device.type == "cpu" else "they run on the CPU only"
    if reason is not None and name == "native":
        raise ConfigError(f"ops 'native' cannot be used here: {reason}; use ops 'torch' or 'auto'.")
    return "torch" if reason is not None else "native"


def kv_bytes_per_token(architecture: Architecture, weights: Weights, *, device: str, dtype: str, ops: str) -> int:
    """Bytes of keys and values of one token, as a ModelTarget with the same options keeps them."""
    on = resolve_device(device)
    if resolve_ops(ops, architecture, on) == "native":
        return architecture.kv_bytes_per_token(2 if has_half_cache(weights, dtype) else 4)
    return architecture.kv_bytes_per_token(resolve_dtype(dtype, on).itemsize)


class Runner(Protocol):
    """A network with its weights and cache on one kind of ops."""

    exactness: str
    precision: str
    weight_bytes: int
    kv_bytes: int

    def forward(self, batch: Sequence[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        """As ``types.Target.forward``, for a batch that was checked."""
        ...

    def place(self) -> str:
        """Precision and place, for the start message."""
        ...


class TorchModel:
    """The decoder on torch ops: the reference, and what runs on CUDA."""

    def __init__(
        self,
        architecture: Architecture,
        weights: Weights,
        *,
        device: torch.device,
        dtype: torch.dtype,
        threads: int | None,
        num_blocks: int,
        block_size: int,
    ) -> None:
        self._ops = create_ops(device, dtype, threads)
        self._decoder = Decoder(architecture, weights, self._ops)
        self._storage = KVStorage(architecture, num_blocks, block_size, device, dtype)
        self.exactness, self.precision = self._ops.exactness, str(dtype).removeprefix("torch.")
        self.weight_bytes, self.kv_bytes = self._decoder.weight_bytes, self._storage.bytes

    @torch.inference_mode()
    def forward(self, batch: Sequence[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        """See Runner.  The results are inference tensors: clone them to train on them."""
        layout = self._decoder.layout(batch, self._storage.block_size)
        hidden, tapped = self._decoder.forward(layout, self._storage, taps)
        offsets = layout.geometry.query_offsets
        wanted = [row for rows, end in zip(batch, offsets[1:], strict=True) for row in range(end - rows.num_logits, end)]
        if len(wanted) < offsets[-1]:
            hidden = hidden.index_select(0, torch.tensor(wanted, dtype=torch.int64, device=hidden.device))
        logits = torch.split(self._decoder.logits(hidden), [rows.num_logits for rows in batch])
        states = None if tapped is None else torch.split(tapped, list(layout.geometry.num_rows))
        return PassOutput(list(logits), None if states is None else list(states))

    def place(self) -> str:
        """See Runner."""
        on_cpu = self._ops.device.type == "cpu"
        where = f"{torch.get_num_threads()} CPU threads" if on_cpu else torch.cuda.get_device_name(self._ops.device)
        return f"{self.precision} on {where} with torch ops"


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
            precision = resolve_dtype(dtype, on)
            self.runner = TorchModel(
                architecture, weights, device=on, dtype=precision, threads=threads, num_blocks=num_blocks, block_size=block_size
            )
        release()
        self.architecture = architecture
        self.vocab_size, self.max_model_len = architecture.vocab_size, max_model_len
        self.exactness, self.precision = self.runner.exactness, self.runner.precision
        self.weight_bytes, self.kv_bytes = self.runner.weight_bytes, self.runner.kv_bytes
        self.threads = threads or (num_default_threads() if isinstance(self.runner, NativeModel) else torch.get_num_threads())
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
