"""A decoder and its cache on torch ops: the reference, and what runs on CUDA.

Owns: the split of a pass into each sequence's rows, and the way of its results to numpy.  Does not know: sequences, or how an
operation is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from foredraft.architecture import Architecture, Weights
from foredraft.model import Decoder
from foredraft.ops import KVStorage, create_ops
from foredraft.types import FloatArray, PassOutput, Rows


class TorchModel:
    """A network, its weights as tensors, and its cache.

    ``device`` and ``dtype`` are torch's own names.  ``threads`` are torch's for the whole process; None leaves them alone.

    Raises:
        ModelFileError: a tensor is missing, unexpected, or of the wrong shape.
        CapacityError: no memory for the cache.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: Weights,
        *,
        device: str,
        dtype: str,
        threads: int | None,
        num_blocks: int,
        block_size: int,
    ) -> None:
        on, precision = torch.device(device), getattr(torch, dtype)
        self._ops = create_ops(on, precision, threads)
        self._decoder = Decoder(architecture, weights, self._ops)
        # What a draft head beside it may use too.
        self.device, self.ends = on, {"embed": self._decoder.embed, "lm_head": self._decoder.head}
        self._storage = KVStorage(architecture, num_blocks, block_size, on, precision)
        self.exactness, self.precision = self._ops.exactness, dtype
        self.weight_bytes, self.kv_bytes = self._decoder.weight_bytes, self._storage.bytes
        self.threads = torch.get_num_threads()

    @torch.inference_mode()
    def forward(self, batch: Sequence[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        """See types.Target."""
        layout = self._decoder.layout(batch, self._storage.block_size)
        hidden, tapped = self._decoder.forward(layout, self._storage, taps)
        offsets = layout.geometry.query_offsets
        wanted = [row for rows, end in zip(batch, offsets[1:], strict=True) for row in range(end - rows.num_logits, end)]
        if len(wanted) < offsets[-1]:
            hidden = hidden.index_select(0, torch.tensor(wanted, dtype=torch.int64, device=hidden.device))
        logits = _split(self._decoder.logits(hidden), [rows.num_logits for rows in batch])
        return PassOutput(logits, None if tapped is None else _split(tapped, layout.geometry.num_rows))

    def place(self) -> str:
        """Precision and place, for the start message."""
        on_cpu = self._ops.device.type == "cpu"
        where = f"{self.threads} CPU threads" if on_cpu else torch.cuda.get_device_name(self._ops.device)
        return f"{self.precision} on {where} with torch ops"


def _split(rows: torch.Tensor, lengths: Sequence[int]) -> list[FloatArray]:
    """[sum(lengths), n] in float32 on the CPU, cut into [lengths[i], n]; one copy from a GPU, and one wait for it."""
    values: FloatArray = rows.float().numpy(force=True)
    return np.split(values, np.cumsum(lengths)[:-1])
