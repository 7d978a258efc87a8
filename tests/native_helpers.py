"""Tiny models in every storage format, and the module that packs and multiplies them: what the tests of the native ops share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType

from foredraft import _native
from foredraft.architecture import Architecture, Weight, Weights
from foredraft.native import FORMATS, NativeModel
from foredraft.types import Rows
from hf_weights import case, random_weights

INSTRUCTION_SETS: list[str] = _native.instruction_sets()
QUANTISED = ("Q8_0", "Q4_0", "Q4_1")
Floats = npt.NDArray[np.float32]
Blocks = npt.NDArray[np.uint8]


def quantise(values: Floats, format: str) -> Blocks:
    """Rows of blocks as a GGUF file stores them."""
    return np.ascontiguousarray(gguf.quants.quantize(values, GGMLQuantizationType[format]))


def dequantise(blocks: Blocks, format: str) -> Floats:
    return np.array(gguf.quants.dequantize(blocks, GGMLQuantizationType[format]), np.float32)


def rounded(values: Floats, format: str) -> Floats:
    """What remains of float32 values when they are stored as F32, F16 or BF16."""
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[format]
    return torch.from_numpy(values.copy()).to(dtype).float().numpy()


def stored(values: Floats, format: str) -> Weight:
    """A weight as a file in this format would give it: what it reads is what is stored, not ``values``."""
    if format in FORMATS and format not in QUANTISED:
        kept = rounded(values, format)
        return Weight(values.shape, format, lambda start, stop: kept[start:stop])
    blocks = quantise(values, format)
    return Weight(
        values.shape, format, lambda start, stop: dequantise(blocks[start:stop], format), lambda start, stop: blocks[start:stop]
    )


@cache
def tiny(family: str, format: str, head_dim: int = 16) -> tuple[Architecture, Weights]:
    """A random model whose matrices have columns in blocks of 32, stored in ``format``."""
    architecture = dataclasses.replace(case(family).architecture, hidden_size=64, intermediate_size=96, head_dim=head_dim)
    weights = {
        name: stored(weight.read(0, weight.shape[0]), format) if len(weight.shape) == 2 else weight
        for name, weight in random_weights(architecture).items()
    }
    return architecture, weights


def make_native(family: str, format: str, *, head_dim: int = 16, **options: Any) -> NativeModel:
    architecture, weights = tiny(family, format, head_dim)
    defaults = {"dtype": "auto", "threads": 1, "num_blocks": 64, "block_size": 4}
    return NativeModel(architecture, weights, **(defaults | options))


ALL_TAPS = (0, 1, 2, 3)


def one_pass(model: Any, tokens: Sequence[int], table: Sequence[int], start: int = 0) -> Floats:
    """Logits and the states of all layers of every row, side by side: [T, V + 4 d]."""
    out = model.forward([Rows(tokens, start, len(tokens), table)], ALL_TAPS)
    assert out.hidden is not None
    return np.concatenate([out.logits[0], out.hidden[0]], axis=1)


def in_chunks(model: Any, tokens: Sequence[int], table: Sequence[int], sizes: Sequence[int]) -> Floats:
    """The same from passes of the given numbers of rows, over and over until the tokens end."""
    parts, done = [], 0
    while done < len(tokens):
        size = sizes[len(parts) % len(sizes)]
        parts.append(one_pass(model, tokens[done : done + size], table, done))
        done += size
    return np.concatenate(parts)


def assert_same_bits(actual: Floats, expected: Floats) -> None:
    __tracebackhide__ = True
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    # Equal as numbers is not enough: two NaNs differ, and the two zeros are equal.
    different = np.argwhere(np.ascontiguousarray(actual).view(np.int32) != np.ascontiguousarray(expected).view(np.int32))
    assert not len(different), f"{len(different)} of {actual.size} values differ, first at {different[0].tolist()}"


class PackedMatrix:
    """Rows packed for ``_native.linear``, with the bytes that they lie in and the float64 values that they stand for."""

    def __init__(self, values: Floats, format: str) -> None:
        rows, cols = values.shape
        self.bytes = np.zeros(_native.packed_size(FORMATS[format], rows, cols), np.uint8)
        if format in QUANTISED:
            blocks = quantise(values, format)
            _native.pack_blocks(self.bytes, FORMATS[format], 0, blocks, cols)
            self.values = dequantise(blocks, format).astype(np.float64)
        else:
            _native.pack_floats(self.bytes, FORMATS[format], 0, values)
            self.values = rounded(values, format).astype(np.float64)
        self.rows, self.format = rows, format
        self.matrix = _native.Matrix(self.bytes, FORMATS[format], rows, cols)

    def linear(self, x: Floats, instruction_set: str) -> Floats:
        """x W^T, float32 [len(x), rows]."""
        y = np.full(len(x) * self.rows, np.nan, np.float32)
        _native.linear(self.matrix, x, y, instruction_set)
        return y.reshape(len(x), self.rows)


def quantised_input(x: Floats) -> npt.NDArray[np.float64]:
    """Finite inputs after a symmetric int8 quantisation in blocks of 32: scale = max / 127, codes to the nearest even."""
    blocks = x.reshape(len(x), -1, 32)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(0), scale)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    codes = np.clip(np.rint(blocks * inverse), -127, 127)
    return (codes.astype(np.float64) * scale).reshape(x.shape)
