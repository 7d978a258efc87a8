"""The GGUF container: metadata, tensor table and rows of tensors.

Owns: parsing and bounds of the file format (version 2 and 3, little-endian).  Does not know: what a key or a tensor means.

The header is parsed here rather than with a library because a vocabulary of 262 144 strings must open in a tenth of a second and
because every length in an untrusted file has to be checked; values are dequantised by the ``gguf`` package.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foredraft.architecture import Weight
from foredraft.types import FloatArray, ModelFileError, UnsupportedModelError

MAGIC = b"GGUF"
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
DEEPEST_ARRAY = 4
MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the tensor table.  ``shape`` is rows first; ``offset`` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    format: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF file, its bytes memory-mapped."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    data: npt.NDArray[np.uint8]

    def weight(self, name: str, row_order: npt.NDArray[np.intp] | None = None) -> Weight:
        """One tensor of one or two dimensions; row ``i`` is the file's row ``row_order[i]`` when an order is given."""
        info = self.tensors[name]
        rows = info.shape[0] if len(info.shape) > 1 else 1
        raw = self.data[info.offset : info.offset + info.num_bytes].reshape(rows, -1)
        dequantise = _dequantiser(info.format, self.path)
        if len(info.shape) == 1:

            def read_values(start: int, stop: int) -> FloatArray:
                assert 0 <= start <= stop <= info.shape[0], (start, stop, info.shape)
                values: FloatArray = dequantise(raw)[0]
                return values[start:stop] if row_order is None else values.take(row_order[start:stop])

            return Weight(info.shape, info.format, read_values)

        def read_blocks(start: int, stop: int) -> npt.NDArray[np.uint8]:
            assert 0 <= start <= stop <= rows, (start, stop, rows)
            return np.ascontiguousarray(raw[start:stop] if row_order is None else raw[row_order[start:stop]])

        def read(start: int, stop: int) -> FloatArray:
            return dequantise(read_blocks(start, stop)) if start < stop else np.zeros((0, *info.shape[1:]), np.float32)

        return Weight(info.shape, info.format, read, read_blocks)


def open_gguf(path: Path) -> GGUFFile:
    """Parse the header and check that every tensor lies inside the file.

    Raises:
        ModelFileError: not a GGUF file, truncated or corrupt.
        UnsupportedModelError: a version, byte order or tensor format that cannot be read.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelFileError(f"{path} is not a GGUF file: it does not begin with 'GGUF'; give another file.")
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read ({error.strerror or error}); check the path and its permissions.") from error
    return _Parser(path, data).parse()


def _dequantiser(format: str, path: Path) -> Callable[[npt.NDArray[np.uint8]], FloatArray]:
    from gguf import quants
    from gguf.constants import GGMLQuantizationType

    kind = GGMLQuantizationType[format]
    block = _sizes()[kind.value][2]
    try:
        quants.dequantize(np.zeros((1, block), np.uint8), kind)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"{path} holds tensors in format {format}, which cannot be read; "
            "convert it to Q4_0, Q4_1, Q8_0, a K-quant, F16 or BF16."
        ) from error

    def dequantise(rows: npt.NDArray[np.uint8]) -> FloatArray:
        return np.array(quants.dequantize(np.ascontiguousarray(rows), kind), dtype=np.float32)

    return dequantise


def _sizes() -> dict[int, tuple[str, int, int]]:
    from gguf.constants import GGML_QUANT_SIZES

    return {kind.value: (kind.name, block, num_bytes) for kind, (block, num_bytes) in GGML_QUANT_SIZES.items()}


class _Parser:
    def __init__(self, path: Path, data: npt.NDArray[np.uint8]) -> None:
        self.path = path
        self.data = data
        self.view = memoryview(data.data)
        self.size = len(self.view)
        self.position = len(MAGIC)

    def parse(self) -> GGUFFile:
        version = self._scalar("I")
        if version not in (2, 3):
            raise UnsupportedModelError(
                f"{self.path} is GGUF version {version} or big-endian; convert it to little-endian version 3."
            )
        num_tensors, num_fields = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._corrupt(f"general.alignment is {alignment!r}, not a power of two")
        data_start = -(-self.position // alignment) * alignment
        sizes = _sizes()
        tensors = {entry[0]: self._tensor(entry, data_start, alignment, sizes) for entry in entries}
        if len(tensors) != num_tensors:
            raise self._corrupt("two tensors have the same name")
        return GGUFFile(self.path, metadata, tensors, self.data)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._scalar("I")
        if not 1 <= num_dimensions <= MOST_DIMENSIONS:
            raise self._corrupt(f"tensor {name!r} has {num_dimensions} dimensions")
        columns_first = [self._scalar("Q") for _ in range(num_dimensions)]
        return name, tuple(reversed(columns_first)), self._scalar("I"), self._scalar("Q")

    def _tensor(
        self, entry: tuple[str, tuple[int, ...], int, int], data_start: int, alignment: int, sizes: dict[int, tuple[str, int, int]]
    ) -> TensorInfo:
        name, shape, kind, offset = entry
        if kind not in sizes:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name!r} has the unknown format number {kind}; convert the model again."
            )
        format, block, block_bytes = sizes[kind]
        if 0 in shape or shape[-1] % block or offset % alignment:
            raise self._corrupt(f"tensor {name!r} with shape {list(shape)} and offset {offset} does not fit format {format}")
        num_values = 1
        for extent in shape:
            num_values *= extent
        num_bytes = num_values // block * block_bytes
        if data_start + offset + num_bytes > self.size:
            missing = data_start + offset + num_bytes - self.size
            raise self._corrupt(f"the data of tensor {name!r} reaches {missing} bytes past the end of the file")
        return TensorInfo(name, shape, format, data_start + offset, num_bytes)

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array(depth)
        if kind not in SCALARS:
            raise self._corrupt(f"metadata has the unknown type number {kind}")
        return self._scalar(SCALARS[kind])

    def _array(self, depth: int) -> list[Any]:
        kind, count = self._scalar("I"), self._scalar("Q")
        if depth >= DEEPEST_ARRAY or (kind not in SCALARS and kind not in (STRING, ARRAY)):
            raise self._corrupt(f"a metadata array has the type number {kind} at depth {depth}")
        if count > self.size - self.position:
            raise self._corrupt(f"a metadata array of {count} entries reaches past the end of the file")
        if kind in SCALARS:
            code = f"<{count}{SCALARS[kind]}"
            return list(struct.unpack(code, self._take(struct.calcsize(code))))
        return [self._value(kind, depth + 1) for _ in range(count)]

    def _string(self) -> str:
        # A vocabulary may hold bytes that are not UTF-8 alone; such a token can never be matched in text, so it may read as U+FFFD.
        return str(self._take(self._scalar("Q")), "utf-8", "replace")

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _take(self, num_bytes: int) -> memoryview:
        start, self.position = self.position, self.position + num_bytes
        if self.position > self.size:
            raise self._corrupt("it ends inside its header")
        return self.view[start : self.position]

    def _corrupt(self, reason: str) -> ModelFileError:
        return ModelFileError(f"{self.path} is truncated or corrupt: {reason}; fetch it again.")
