"""One product of the native ops: against numpy in float64, with hostile inputs, and packed weights read back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft import _native
from foredraft.native import FORMATS
from native_helpers import INSTRUCTION_SETS, QUANTISED, Floats, PackedMatrix, dequantise, quantise, quantised_input, rounded

each_format = pytest.mark.parametrize("format", FORMATS)
each_set = pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)


def random(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def expected(packed: PackedMatrix, x: Floats) -> tuple[Floats, Floats]:
    """The exact product, and the sum of its terms' sizes, which rounding errors are relative to."""
    inputs = quantised_input(x) if packed.format in QUANTISED else x.astype(np.float64)
    return inputs @ packed.values.T, np.abs(inputs) @ np.abs(packed.values.T)


@each_set
@each_format
@pytest.mark.parametrize(("rows", "cols"), [(1, 32), (16, 64), (67, 96), (33, 160)])
def test_a_product_is_not_that_of_float64(instruction_set: str, format: str, rows: int, cols: int) -> None:
    packed = PackedMatrix(random(rows, cols), format)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 130):
        x = random(num_rows, cols, seed=num_rows)
        want, size = expected(packed, x)
        got = packed.linear(x, instruction_set)
        assert np.all(np.abs(got - want) <= 1e-6 * size), (num_rows, np.max(np.abs(got - want) / size))


@each_format
def test_instruction_sets_disagree_with_the_generic_kernels(format: str) -> None:
    packed, x = PackedMatrix(random(67, 96), format), random(19, 96, seed=1)
    generic, size = packed.linear(x, "generic"), expected(packed, x)[1]
    for instruction_set in INSTRUCTION_SETS:
        assert np.all(np.abs(packed.linear(x, instruction_set) - generic) <= 1e-6 * size), instruction_set


@each_set
@pytest.mark.parametrize("format", QUANTISED)
def test_the_quantisation_of_inputs_is_off_by_more_than_half_a_step(instruction_set: str, format: str) -> None:
    # One-hot rows read the inputs back, times what the format makes of 1.
    packed = PackedMatrix(np.eye(96, dtype=np.float32), format)
    diagonal = np.diag(packed.values)
    assert np.all(packed.values == np.diag(diagonal)) and np.all(np.abs(diagonal - 1) < 1e-3)
    x = random(40, 96) * 10 ** np.random.default_rng(1).uniform(-20, 20, (40, 1)).astype(np.float32)
    step = np.repeat(np.abs(x).reshape(40, 3, 32).max(axis=2) / 127, 32, axis=1)
    got = packed.linear(x, instruction_set) / diagonal
    assert np.all(np.abs(got - x) <= step * 0.5001)


@each_set
@each_format
def test_rows_depend_on_how_many_there_are(instruction_set: str, format: str) -> None:
    packed, x = PackedMatrix(random(67, 96), format), random(130, 96, seed=2)
    alone = np.concatenate([packed.linear(row[None], instruction_set) for row in x])
    for num_rows in (*range(2, 33), 119, 120, 121, 130):
        assert np.array_equal(packed.linear(x[:num_rows], instruction_set), alone[:num_rows]), num_rows
        assert np.array_equal(packed.linear(x[-num_rows:], instruction_set), alone[-num_rows:]), num_rows


BAD = (np.nan, np.inf, -np.inf)
TINY = (0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 1e-36, -1e-30)


@each_set
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_hostile_values_in_one_row_reach_another(instruction_set: str, data: st.DataObject) -> None:
    packed = PackedMatrix(random(19, 64), data.draw(st.sampled_from(list(FORMATS))))
    x = random(data.draw(st.integers(1, 12)), 64, seed=data.draw(st.integers(0, 99)))
    x *= 10 ** data.draw(st.floats(-30, 30, width=32))
    poisoned = data.draw(st.sets(st.integers(0, len(x) - 1)))
    for row in poisoned:
        for column in data.draw(st.lists(st.integers(0, 63), min_size=1, max_size=64)):
            x[row, column] = data.draw(st.sampled_from(BAD + TINY))
    got = packed.linear(x, instruction_set)
    for row in range(len(x)):
        assert np.array_equal(got[row], packed.linear(x[row : row + 1], instruction_set)[0], equal_nan=True)
        if np.isnan(x[row]).any():
            assert np.isnan(got[row]).all()
        elif np.isinf(x[row]).any():
            assert not np.isfinite(got[row]).any()
        else:
            want, size = expected(packed, x[row : row + 1])
            # Products below the normal numbers lose digits, or all of them.
            assert np.all(np.abs(got[row] - want[0]) <= 1e-6 * size[0] + 64 * 1e-38)


@each_set
@each_format
def test_an_all_zero_row_is_not_zero(instruction_set: str, format: str) -> None:
    x = random(5, 64)
    x[1], x[3] = 0.0, -0.0
    got = PackedMatrix(random(67, 64), format).linear(x, instruction_set)
    assert np.all(got[[1, 3]] == 0.0) and np.all(got[[0, 2, 4]] != 0.0)


@each_set
@pytest.mark.parametrize("format", QUANTISED)
def test_the_largest_codes_overflow(instruction_set: str, format: str) -> None:
    # All codes and all inputs at their ends: what sums of 16 bits hold at most.
    cols = 64
    blocks = quantise(random(32, cols), format).reshape(32, cols // 32, -1)
    head = 4 if format == "Q4_1" else 2
    for row, code in enumerate([0x80, 0x7F, 0xFF, 0x00, 0x81] if format == "Q8_0" else [0x00, 0xFF, 0x0F, 0xF0, 0x88]):
        blocks[row, :, head:] = code
    blocks = blocks.reshape(32, -1)
    packed = PackedMatrix(random(32, cols), format)
    _native.pack_blocks(packed.bytes, FORMATS[format], 0, blocks, cols)
    packed.values = dequantise(blocks, format).astype(np.float64)
    x = np.stack([np.full(cols, 1.0), np.full(cols, -1.0), np.tile([1.0, -1.0], cols // 2)]).astype(np.float32)
    want, size = expected(packed, x)
    assert np.all(np.abs(packed.linear(x, instruction_set) - want) <= 1e-6 * size)


@pytest.mark.parametrize("format", ["F32", "F16", "BF16"])
def test_packed_floats_read_back_otherwise_than_torch_rounds_them(format: str) -> None:
    values = random(37, 48) * np.float32(10.0) ** np.random.default_rng(1).integers(-9, 5, (37, 48)).astype(np.float32)
    values[0, :7] = [65504.0, 65519.0, 65520.0, 1e30, 5.9e-8, 2.9e-8, -0.0]
    values[1, :3] = [1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8]
    finite = np.where(np.isfinite(rounded(values, format)), values, 0)
    got = PackedMatrix(finite, format).linear(np.eye(48, dtype=np.float32), "generic").T
    assert np.array_equal(got, rounded(finite, format))
    # 0 times infinity hides in a product with a one-hot row, so those are read one by one.
    packed = PackedMatrix(values[:1, 2:3], format)
    assert packed.linear(np.ones((1, 1), np.float32), "generic")[0, 0] == rounded(values, format)[0, 2]


def test_floats_packed_as_q8_0_are_off_by_more_than_half_a_step() -> None:
    values = random(19, 64) * np.logspace(-3, 3, 19, dtype=np.float32)[:, None]
    values[3] = 0.0
    packed = np.zeros(_native.packed_size(FORMATS["Q8_0"], 19, 64), np.uint8)
    for start in (0, 7, 18):
        _native.pack_floats(packed, FORMATS["Q8_0"], start, values[start : start + 11])
    matrix, y = _native.Matrix(packed, FORMATS["Q8_0"], 19, 64), np.empty(64 * 19, np.float32)
    _native.linear(matrix, np.eye(64, dtype=np.float32), y, "")
    step = np.repeat(np.abs(values).reshape(19, 2, 32).max(axis=2) / 127, 32, axis=1)
    # The scale is rounded to a half, and codes at the end of the range with it.
    assert np.all(np.abs(y.reshape(64, 19).T - values) <= 0.57 * step)


@pytest.mark.parametrize("format", QUANTISED)
def test_rows_packed_in_pieces_end_up_elsewhere(format: str) -> None:
    values = random(37, 64)
    whole = PackedMatrix(values, format)
    pieces = np.zeros_like(whole.bytes)
    blocks = quantise(values, format)
    for start, stop in ((20, 37), (0, 1), (1, 20)):
        _native.pack_blocks(pieces, FORMATS[format], start, blocks[start:stop], 64)
    assert np.array_equal(pieces, whole.bytes)


def test_arrays_that_are_too_small_are_written_beyond_their_end() -> None:
    packed = np.zeros(_native.packed_size(FORMATS["Q8_0"], 16, 64), np.uint8)
    with pytest.raises(ValueError, match="too small"):
        _native.pack_blocks(packed, FORMATS["Q8_0"], 1, quantise(random(16, 64), "Q8_0"), 64)
    with pytest.raises(ValueError, match="too small"):
        _native.pack_floats(packed, FORMATS["F32"], 0, random(16, 64))
    with pytest.raises(ValueError, match="wrong length"):
        _native.pack_blocks(packed, FORMATS["Q8_0"], 0, quantise(random(16, 32), "Q8_0"), 64)
    with pytest.raises(ValueError, match="blocks of 32"):
        _native.Matrix(packed, FORMATS["Q8_0"], 1, 48)
    matrix = _native.Matrix(packed, FORMATS["Q8_0"], 16, 64)
    for x, y in ((random(1, 32), np.empty(16, np.float32)), (random(2, 64), np.empty(31, np.float32))):
        with pytest.raises(ValueError, match="shapes"):
            _native.linear(matrix, x, y, "")
    with pytest.raises(ValueError, match="'sse9' cannot run"):
        _native.linear(matrix, random(1, 64), np.empty(16, np.float32), "sse9")
