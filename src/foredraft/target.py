"""A decoder with its cache, run on batches: what the engine, or a draft model, calls for logits.

Owns: devices and dtypes by name, the cache's tensors, which rows get logits.  Does not know: which blocks belong to whom, or
what is sampled from the logits.
"""

from __future__ import annotations

import torch

from foredraft.architecture import Architecture, Weights
from foredraft.config import DEVICES, DTYPES
from foredraft.model import Decoder
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


class ModelTarget:
    """A ``types.Target`` on a decoder.  A draft model is one too, with a cache of its own.

    ``threads`` sets torch's CPU threads for the whole process, None leaves them.  ``num_blocks`` blocks of ``block_size``
    tokens are the cache; ``max_model_len`` is the longest sequence in tokens.

    Raises:
        ConfigError: the device or dtype cannot be had, or ``max_model_len`` is more than the model was made for.
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
        threads: int | None = None,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
    ) -> None:
        if not 1 <= max_model_len <= architecture.max_position_embeddings:
            raise ConfigError(
                f"max_model_len must be from 1 to the model's {architecture.max_position_embeddings} positions, "
                f"not {max_model_len}; change max_model_len."
            )
        on = resolve_device(device)
        self._ops = create_ops(on, resolve_dtype(dtype, on), threads)
        self._decoder = Decoder(architecture, weights, self._ops)
        self._storage = KVStorage(architecture, num_blocks, block_size, on, self._ops.dtype)
        self.architecture = architecture
        self.vocab_size, self.max_model_len = architecture.vocab_size, max_model_len
        self.exactness = self._ops.exactness
        self.weight_bytes, self.kv_bytes = self._decoder.weight_bytes, self._storage.bytes

    @torch.inference_mode()
    def forward(self, batch: list[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        """Compute all rows in one pass; logits only where they are wanted.  Taps as in ``Decoder.forward``.

        The results are inference tensors: clone them to train on them.
        """
        if not batch:
            return PassOutput([], [] if taps else None)
        self._check(batch)
        layout = self._decoder.layout(batch, self._storage.block_size)
        hidden, tapped = self._decoder.forward(layout, self._storage, taps)
        offsets = layout.geometry.query_offsets
        wanted = [row for rows, end in zip(batch, offsets[1:], strict=True) for row in range(end - rows.num_logits, end)]
        if len(wanted) < offsets[-1]:
            hidden = hidden.index_select(0, torch.tensor(wanted, dtype=torch.int64, device=hidden.device))
        logits = torch.split(self._decoder.logits(hidden), [rows.num_logits for rows in batch])
        states = None if tapped is None else torch.split(tapped, list(layout.geometry.num_rows))
        return PassOutput(list(logits), None if states is None else list(states))

    def describe(self) -> str:
        """One line for the start message: model, precision, place and memory."""
        ops, storage = self._ops, self._storage
        where = f"{torch.get_num_threads()} CPU threads" if ops.device.type == "cpu" else torch.cuda.get_device_name(ops.device)
        dtype = str(ops.dtype).removeprefix("torch.")
        return (
            f"{self.architecture.family}, {self.architecture.num_layers} layers, {dtype} on {where}; "
            f"weights {self.weight_bytes / 1e6:,.0f} MB, KV cache {self.kv_bytes / 1e6:,.0f} MB "
            f"for {storage.num_blocks * storage.block_size:,} tokens; exactness: {self.exactness}"
        )

    def _check(self, batch: list[Rows]) -> None:
        for rows in batch:
            end = rows.start + len(rows.tokens)
            assert end <= self.max_model_len, (rows.start, len(rows.tokens), self.max_model_len)
            assert 0 <= rows.num_logits <= len(rows.tokens), (rows.num_logits, len(rows.tokens))
            blocks = rows.block_table
            assert blocks and min(blocks) >= 0 and max(blocks) < self._storage.num_blocks, (blocks, self._storage.num_blocks)
