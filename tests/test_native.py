"""Whole passes on the native ops: the same bits however rows come together, and the values of the torch ops."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.architecture import Architecture, LayerKind, Rope
from foredraft.native import FORMATS, NativeModel
from foredraft.torch_model import TorchModel
from foredraft.types import Rows
from hf_weights import FAMILIES, VOCAB_SIZE, prompt, random_weights, vector
from native_helpers import (
    INSTRUCTION_SETS,
    QUANTISED,
    Floats,
    assert_same_bits,
    in_chunks,
    make_native,
    one_pass,
    tiny,
)

pytestmark = pytest.mark.usefixtures("one_thread")

each_family = pytest.mark.parametrize("family", FAMILIES)
each_format = pytest.mark.parametrize("format", FORMATS)
each_set = pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)


def make_torch(family: str, format: str, dtype: str = "float32", head_dim: int = 16) -> TorchModel:
    architecture, weights = tiny(family, format, head_dim)
    return TorchModel(architecture, weights, device="cpu", dtype=dtype, threads=None, num_blocks=64, block_size=4)


def distance(actual: Floats, expected: Floats) -> float:
    """Norm of the difference relative to the norm of what is expected."""
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


# ------------------------------------------------------------------------------------------------ the same bits


@each_set
@each_format
@each_family
def test_bits_depend_on_the_company_of_a_row(family: str, format: str, instruction_set: str) -> None:
    model, tokens = make_native(family, format, instruction_set=instruction_set), prompt(33)
    alone = in_chunks(model, tokens, range(9), [1])
    assert np.isfinite(alone).all()
    # As a prompt, in chunks, in blocks out of order, and on a model with another block size.
    assert_same_bits(one_pass(model, tokens, range(20, 29)), alone)
    assert_same_bits(in_chunks(model, tokens, [40, 9, 33, 2, 61, 60, 30, 31, 10], [3, 1, 8, 5, 2, 14]), alone)
    for block_size, table in ((7, [5, 1, 3, 2, 8]), (16, [9, 2, 4]), (32, [1, 0])):
        other = make_native(family, format, instruction_set=instruction_set, block_size=block_size, threads=2)
        assert_same_bits(in_chunks(other, tokens, table, [16, 1, 9]), alone)
    # Among other sequences, of which one has the same tokens.
    mates = [Rows(prompt(n, seed=n), 0, n, range(start, start + 5)) for n, start in ((1, 40), (18, 45), (7, 50))]
    out = model.forward([mates[0], Rows(tokens, 0, 33, range(9)), *mates[1:], Rows(tokens[:5], 0, 5, [60, 61])], (0, 1, 2, 3))
    assert out.hidden is not None
    together = [np.concatenate([logits, states], axis=1) for logits, states in zip(out.logits, out.hidden, strict=True)]
    assert_same_bits(together[1], alone)
    assert_same_bits(together[4], alone[:5])


@each_set
@each_format
def test_bits_depend_on_the_number_of_rows_or_threads(format: str, instruction_set: str) -> None:
    sizes = ((1, 4), (2, 16), (3, 48), (4, 5))
    models = [make_native("gemma3", format, instruction_set=instruction_set, threads=t, block_size=size) for t, size in sizes]
    tokens = prompt(140)
    alone = in_chunks(models[0], tokens, range(35), [1])
    for num_rows in range(2, 33):
        model = models[num_rows % 4]
        start = (3 * num_rows) % 50
        one_pass(model, tokens[:start], range(35)) if start else None
        assert_same_bits(one_pass(model, tokens[start : start + num_rows], range(35), start), alone[start : start + num_rows])
    # More rows than the kernels take at a time.
    for model in models:
        assert_same_bits(one_pass(model, tokens, range(35)), alone)


@each_format
def test_rejected_rows_leave_a_trace_once_overwritten(format: str) -> None:
    model, tokens, wrong = make_native("mistral", format), prompt(24), prompt(6, seed=9)
    fresh = one_pass(model, tokens, range(20, 26))
    one_pass(model, prompt(24, seed=3), range(6))
    one_pass(model, tokens[:15], range(6))
    one_pass(model, [*tokens[15:17], *wrong], range(6), start=15)
    assert_same_bits(one_pass(model, tokens[17:], range(6), start=17), fresh[17:])


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_some_split_into_passes_and_batches_changes_bits(data: st.DataObject) -> None:
    family, format = data.draw(st.sampled_from(FAMILIES)), data.draw(st.sampled_from(list(FORMATS)))
    block_size, threads = data.draw(st.sampled_from([1, 2, 5, 9, 16, 32])), data.draw(st.integers(1, 2))
    model = make_native(family, format, num_blocks=150, block_size=block_size, threads=threads)
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    prompts = [prompt(length, seed=i) for i, length in enumerate(lengths)]
    tables = np.array(data.draw(st.permutations(range(150)))).reshape(5, 30).tolist()
    done, collected = [0] * len(prompts), [list[Floats]() for _ in prompts]
    while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
        waiting = [i for i, p in enumerate(prompts) if done[i] < len(p)]
        members = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        sizes = [data.draw(st.integers(1, len(prompts[i]) - done[i])) for i in members]
        batch = [Rows(prompts[i][done[i] : done[i] + n], done[i], n, tables[i]) for i, n in zip(members, sizes, strict=True)]
        for i, n, logits in zip(members, sizes, model.forward(batch).logits, strict=True):
            collected[i].append(logits)
            done[i] += n
    for tokens, parts in zip(prompts, collected, strict=True):
        whole = one_pass(model, tokens, tables[4])[:, :VOCAB_SIZE]
        assert_same_bits(np.concatenate(parts), whole)


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_broken_sequence_breaks_its_mates_or_the_next_owner_of_its_blocks(block_size: int) -> None:
    architecture, weights = tiny("llama", "Q8_0")
    embed = weights["embed"].read(0, VOCAB_SIZE)
    embed[7] = np.nan
    sizes: dict[str, Any] = {"threads": 1, "num_blocks": 16, "block_size": block_size}
    model = NativeModel(architecture, {**weights, "embed": vector(embed)}, dtype="auto", **sizes)
    healthy = [token if token != 7 else 8 for token in prompt(9)]
    expected = one_pass(model, healthy, range(3))
    out = model.forward([Rows([1, *[7] * 15], 0, 16, range(9, 13)), Rows(healthy, 0, 9, [5, 6, 7])])
    assert_same_bits(out.logits[1], expected[:, :VOCAB_SIZE])
    assert np.isnan(out.logits[0][1:]).all() and np.isfinite(out.logits[0][0]).all()
    assert_same_bits(in_chunks(model, healthy, range(9, 12), [2, 1]), expected)


# ------------------------------------------------------------------------------------------------ the right values


@each_set
@each_family
def test_float32_is_not_that_of_the_torch_ops(family: str, instruction_set: str) -> None:
    reference, tokens = make_torch(family, "F32"), prompt(40)
    model = make_native(family, "F32", instruction_set=instruction_set)
    np.testing.assert_allclose(one_pass(model, tokens, range(10)), one_pass(reference, tokens, range(10)), rtol=0, atol=1e-4)


# The most that the norm of the error may be, relative to that of the logits: up to twice what these models were seen to have.  Both
# sides have the weights of the file, so what remains is the rounding of keys and values to halves, and with quantised matrices that
# of inputs to int8: steps of 1/127 of a block's maximum are an error of half a percent a product, and twelve products make 2 %.
BOUNDS = {"F16": 1e-3, "BF16": 1e-3, "Q8_0": 0.04, "Q4_0": 0.04, "Q4_1": 0.04}


@each_family
@pytest.mark.parametrize("format", BOUNDS)
def test_logits_are_further_from_dequantised_float32_than_the_format_allows(family: str, format: str) -> None:
    tokens = prompt(40)
    expected = one_pass(make_torch(family, format), tokens, range(10))[:, :VOCAB_SIZE]
    for instruction_set in INSTRUCTION_SETS:
        logits = one_pass(make_native(family, format, instruction_set=instruction_set), tokens, range(10))[:, :VOCAB_SIZE]
        assert distance(logits, expected) < BOUNDS[format]


@each_set
@pytest.mark.parametrize("format", QUANTISED)
def test_heads_of_whole_blocks_are_quantised_wrongly_or_before_they_are_complete(format: str, instruction_set: str) -> None:
    tokens = prompt(40)
    expected = one_pass(make_torch("qwen3", format, head_dim=32), tokens, range(10))[:, :VOCAB_SIZE]
    model = make_native("qwen3", format, head_dim=32, instruction_set=instruction_set)
    whole = one_pass(model, tokens, range(10))
    assert distance(whole[:, :VOCAB_SIZE], expected) < BOUNDS[format]
    threaded = make_native("qwen3", format, head_dim=32, instruction_set=instruction_set, threads=3)
    assert_same_bits(in_chunks(threaded, tokens, range(10), [1, 5, 2, 16]), whole)


@each_family
def test_instruction_sets_disagree_with_the_generic_kernels(family: str) -> None:
    tokens = prompt(40)
    generic = one_pass(make_native(family, "F32", instruction_set="generic"), tokens, range(10))
    for instruction_set in INSTRUCTION_SETS:
        model = make_native(family, "F32", instruction_set=instruction_set)
        assert distance(one_pass(model, tokens, range(10)), generic) < 3e-6


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_precision_that_was_asked_for_is_not_that_of_a_file_in_it(dtype: str) -> None:
    format, tokens = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype], prompt(20)
    asked, given_by_file = make_native("qwen3", "F32", dtype=dtype), make_native("qwen3", format)
    assert asked.precision == given_by_file.precision == format
    assert_same_bits(one_pass(asked, tokens, range(5)), one_pass(given_by_file, tokens, range(5)))


def activation_of(gates: np.ndarray, activation: str, instruction_set: str) -> npt.NDArray[np.float64]:
    """act(gate) * 1 for each of 256 gates, as the second half of a layer without attention computes it."""
    size, small = 256, 2.0**-30
    architecture = Architecture("llama", 1, size, size, 1, 1, 16, 8, 0.0, (LayerKind(Rope(1e4)),), activation, tie_embeddings=True)
    weights = random_weights(architecture)
    # A residual stream of 2^-30 everywhere is 1 everywhere after a norm, and too small to be seen in the result.
    gate_up = np.zeros((2 * size, size), np.float32)
    gate_up[:size, 0], gate_up[size:, 0] = gates, 1.0
    ones = np.ones(size)
    layer = {"attn_norm": ones, "mlp_norm": ones, "o": np.zeros((size, 16)), "gate_up": gate_up, "down": np.eye(size)}
    weights = {**weights, "embed": vector(np.full((1, size), small)), **{f"layers.0.{n}": vector(v) for n, v in layer.items()}}
    options: dict[str, Any] = {"dtype": "auto", "threads": 1, "num_blocks": 1, "block_size": 8}
    model = NativeModel(architecture, weights, instruction_set=instruction_set, **options)
    out = model.forward([Rows([0], 0, 0, [0])], (1,))
    assert out.hidden is not None
    return out.hidden[0][0].astype(np.float64) - small


@each_set
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_an_activation_is_not_that_of_torch(activation: str, instruction_set: str) -> None:
    extremes = [0.0, -0.0, 1e-30, -1e-30, 87.0, -87.0, -88.5, 90.0, -200.0, 1e4, -1e4, 1e12, -1e12, 1e30, -1e30, 3e38, -3e38]
    gates = np.concatenate([np.linspace(-20, 20, 256 - len(extremes)), extremes]).astype(np.float32)
    exact = torch.from_numpy(gates.astype(np.float64))
    tanh_gelu = 0.5 * exact * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (exact + 0.044715 * exact**3)))
    expected = torch.nn.functional.silu(exact) if activation == "silu" else tanh_gelu
    np.testing.assert_allclose(activation_of(gates, activation, instruction_set), expected, rtol=2e-6, atol=1e-8)


@each_set
@pytest.mark.parametrize("length", [1, 15, 16, 17, 47, 48, 49, 250])
def test_contexts_around_a_multiple_of_16_are_wrong(length: int, instruction_set: str) -> None:
    for family, block_size in (("llama", 4), ("llama", 16), ("mistral", 4), ("mistral", 16)):
        tokens, reference = prompt(length), make_torch(family, "F32")
        model = make_native(family, "F32", instruction_set=instruction_set, block_size=block_size)
        expected, actual = one_pass(reference, tokens, range(63)), one_pass(model, tokens, range(63))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("instruction_set", [INSTRUCTION_SETS[0], "generic"])
def test_a_size_of_heads_is_not_served(head_dim: int, instruction_set: str) -> None:
    base, _ = tiny("qwen3", "F32")
    architecture = dataclasses.replace(base, head_dim=head_dim, num_heads=3, num_kv_heads=1, layers=base.layers[:1])
    weights, tokens = random_weights(architecture), prompt(20)
    sizes: dict[str, Any] = {"threads": None, "num_blocks": 8, "block_size": 4}
    reference = TorchModel(architecture, weights, device="cpu", dtype="float32", **sizes)
    model = NativeModel(architecture, weights, dtype="auto", instruction_set=instruction_set, **sizes)
    expected, actual = (m.forward([Rows(tokens, 0, 20, range(5))]).logits[0] for m in (reference, model))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("num_heads", [1, 5, 8, 9, 70])
def test_a_number_of_heads_for_one_key_is_not_served(num_heads: int) -> None:
    base, _ = tiny("llama", "F32")
    architecture = dataclasses.replace(base, num_heads=num_heads, num_kv_heads=1, layers=base.layers[:1])
    weights, tokens = random_weights(architecture), prompt(20)
    sizes: dict[str, Any] = {"threads": 1, "num_blocks": 8, "block_size": 4}
    reference = TorchModel(architecture, weights, device="cpu", dtype="float32", **sizes)
    expected = reference.forward([Rows(tokens, 0, 20, range(5))]).logits[0]
    model = NativeModel(architecture, weights, dtype="auto", **sizes)
    np.testing.assert_allclose(model.forward([Rows(tokens, 0, 20, range(5))]).logits[0], expected, rtol=0, atol=1e-4)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_process_waits_for_ever_for_threads_that_stayed_behind(threads: int) -> None:
    model = make_native("llama", "Q4_1", threads=threads)
    one_pass(model, [1, 2], [0])
    child = os.fork()
    if child == 0:
        try:
            one_pass(model, [1, 2], [0])
        except RuntimeError as error:
            # To give the model up must not wait either.
            del model
            os._exit(0 if threads > 1 and "its threads stayed behind" in str(error) else 1)
        os._exit(0 if threads == 1 else 2)
    deadline = time.monotonic() + 60
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended and os.waitstatus_to_exitcode(status) == 0
