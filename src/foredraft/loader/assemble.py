"""From the tensors of a file to the canonical weights of an architecture.

Owns: which file tensors are stacked into one canonical weight, the check of every shape, and giving back a file's pages.
Does not know: how a file names or stores a tensor.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from foredraft.architecture import Architecture, Weight, Weights
from foredraft.types import ModelFileError

OpenPart = Callable[[str, int | None], Weight]
ReadRows = Callable[[int, int], npt.NDArray[Any]]

STACKS = {"qkv": ("q", "k", "v"), "qkv_bias": ("q_bias", "k_bias", "v_bias"), "gate_up": ("gate", "up")}


def assemble(architecture: Architecture, open_part: OpenPart) -> Weights:
    """All canonical weights, lazily read.

    ``open_part(part, layer)`` opens one tensor of the file: a canonical stem (``o``, ``down``, ``embed``) or a member of
    ``STACKS``; ``layer`` is None outside the layers.

    Raises:
        ModelFileError: a tensor has another shape than the architecture gives it, or ``open_part`` says that it is missing.
    """
    weights: dict[str, Weight] = {}
    for name, shape in architecture.weight_shapes().items():
        stem = name.rsplit(".", 1)[-1]
        layer = int(name.split(".")[1]) if name.startswith("layers.") else None
        parts = []
        for part in STACKS.get(stem, (stem,)):
            weight = open_part(part, layer)
            expected = (_part_rows(architecture, part, shape[0]), *shape[1:])
            if weight.shape != expected:
                raise ModelFileError(
                    f"the tensor for {part} of {name} has shape {list(weight.shape)}, "
                    f"but the model's settings ask for {list(expected)}; "
                    "the file is inconsistent, fetch it again."
                )
            parts.append(weight)
        weights[name] = stack_rows(parts)
    return weights


def _part_rows(architecture: Architecture, part: str, rows: int) -> int:
    kind = part.removesuffix("_bias")
    if kind == "q":
        return architecture.num_heads * architecture.head_dim
    if kind in ("k", "v"):
        return architecture.num_kv_heads * architecture.head_dim
    return architecture.intermediate_size if kind in ("gate", "up") else rows


def stack_rows(parts: list[Weight]) -> Weight:
    """One weight whose rows are those of ``parts`` in turn.

    Where the parts differ in format, the stack is called by the most precise one: whoever repacks it by its format then
    loses nothing.
    """
    if len(parts) == 1:
        return parts[0]
    starts = [0, *np.cumsum([part.shape[0] for part in parts]).tolist()]

    def stacked(readers: list[ReadRows]) -> ReadRows:
        def read(start: int, stop: int) -> npt.NDArray[Any]:
            assert 0 <= start <= stop <= starts[-1], (start, stop, starts[-1])
            pieces = [
                reader(max(start, first) - first, min(stop, last) - first)
                for reader, first, last in zip(readers, starts[:-1], starts[1:], strict=True)
                if max(start, first) < min(stop, last)
            ]
            return np.concatenate(pieces) if pieces else readers[0](0, 0)

        return read

    formats = [part.format for part in parts]
    blocks = [part.read_blocks for part in parts if part.read_blocks is not None]
    same_blocks = len(blocks) == len(parts) and len(set(formats)) == 1
    return Weight(
        (starts[-1], *parts[0].shape[1:]),
        max(formats, key=bits_per_value),
        stacked([part.read for part in parts]),
        stacked(blocks) if same_blocks else None,
    )


def shifted(weight: Weight, amount: float) -> Weight:
    """The same weight with ``amount`` added to every value."""
    return Weight(weight.shape, weight.format, lambda start, stop: weight.read(start, stop) + np.float32(amount))


def release_pages(*files: npt.NDArray[np.uint8]) -> None:
    """Let the pages that were read of memory-mapped files go; a later read maps them again."""
    for file in files:
        mapped = getattr(file, "_mmap", None)
        if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)


def bits_per_value(format: str) -> float:
    """Storage bits of one value in a named format."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[format]]
    return 8 * num_bytes / block


def most_common_format(matrices: Iterable[tuple[str, int]]) -> str:
    """The format that holds the most bytes among ``(format, bytes)`` pairs."""
    totals: Counter[str] = Counter()
    for format, num_bytes in matrices:
        totals[format] += num_bytes
    return totals.most_common(1)[0][0] if totals else "F32"
