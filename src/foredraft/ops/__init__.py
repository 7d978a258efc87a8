"""The few numeric operations that a decoder is made of, behind one interface.

Owns: the Ops protocol and the choice of an implementation.  Does not know: any model's structure.

Shapes: T rows of a pass, d hidden size, H heads, G key-value heads, D head size, F intermediate size, V vocabulary.
Activations are tensors of ``Ops.dtype`` on ``Ops.device``; matrices are opaque objects that only their ops understand.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from foredraft.architecture import Weight
from foredraft.ops.layout import Geometry, KVStorage, PassLayout, rotary_rows

__all__ = ["Geometry", "KVStorage", "Matrix", "Ops", "PassLayout", "create_ops", "rotary_rows"]


class Matrix(Protocol):
    """A weight matrix as one implementation of the ops stores it."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on the device."""
        ...


class Ops(Protocol):
    """One implementation.

    ``exactness``: ``bitwise`` when a row's result depends on that row alone, ``numeric`` when it may differ by rounding
    with the other rows of the pass.
    """

    device: torch.device
    dtype: torch.dtype
    exactness: str

    def load_matrix(self, name: str, weight: Weight) -> Any:
        """Read a weight [rows, columns] in row chunks into a Matrix.  ``name`` is for errors.

        Raises:
            ModelFileError: the file gave rows of another shape.
        """
        ...

    def load_vector(self, name: str, weight: Weight) -> Tensor:
        """Read a weight [n].  Raises ModelFileError as ``load_matrix`` does."""
        ...

    def plan_attention(self, geometry: Geometry, window: int | None) -> Any:
        """Whatever ``attention`` can precompute for all layers with this window; see PassLayout.attention."""
        ...

    def embedding(self, token_ids: Tensor, matrix: Any, scale: float) -> Tensor:
        """Rows of the matrix times ``scale``: int64 [T] -> [T, d]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis; ``weight`` is that axis, or broadcasts to x with it last."""
        ...

    def linear(self, x: Tensor, matrix: Any, bias: Tensor | None = None) -> Tensor:
        """[T, columns] -> [T, rows], contiguous."""
        ...

    def rope(self, qk: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate heads by their rows' angles: [T, heads, D] -> the same, with ``rotary`` as in PassLayout."""
        ...

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, storage: KVStorage, layer: int, layout: PassLayout, window: int | None, scale: float
    ) -> Tensor:
        """Write k and v [T, G, D] into the layer's cache, then attend with q [T, H, D] over it: [T, H * D].

        A row at position t sees positions max(0, t - window + 1) .. t of its own sequence.  Softmax is float32.
        """
        ...

    def gated_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up from stacked [T, 2F] -> [T, F]; ``silu`` or ``gelu_tanh``."""
        ...

    def logits(self, x: Tensor, matrix: Any) -> Tensor:
        """[n, d] -> float32 [n, V], contiguous."""
        ...


def create_ops(device: torch.device, dtype: torch.dtype, threads: int | None = None) -> Ops:
    """The ops for a device.  ``threads`` sets torch's CPU threads once, for the whole process; None leaves them alone."""
    from foredraft.ops.torch_ops import TorchOps

    if threads is not None:
        torch.set_num_threads(threads)
    return TorchOps(device, dtype)
