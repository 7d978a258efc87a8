"""Which format, cache and instruction set the native ops choose, what they refuse, and their threads."""

from __future__ import annotations

import dataclasses
import importlib
import os
import threading
import time
from typing import Any

import numpy as np
import pytest

from foredraft.architecture import Weight
from foredraft.native import FORMATS, NativeModel, num_default_threads, run_format, why_not_native
from foredraft.target import ModelTarget, kv_bytes_per_token, model_bytes, resolve_ops
from foredraft.torch_model import TorchModel
from foredraft.types import CapacityError, ConfigError, ModelFileError, Rows
from hf_weights import FAMILIES, VOCAB_SIZE, prompt
from native_helpers import INSTRUCTION_SETS, assert_same_bits, make_native, one_pass, stored, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES: dict[str, Any] = {"threads": 1, "num_blocks": 16, "block_size": 4}


def make_target(format: str, **options: Any) -> ModelTarget:
    architecture, weights = tiny("llama", format)
    defaults = {"device": "cpu", "ops": "native", "max_model_len": 64}
    return ModelTarget(architecture, weights, **(SIZES | defaults | options))


# ------------------------------------------------------------------------------------------------ formats


@pytest.mark.parametrize(
    ("stored_as", "dtype", "kept_as"),
    [
        *((format, "auto", format) for format in FORMATS),
        ("Q6_K", "auto", "Q8_0"),
        ("Q4_0", "float32", "F32"),
        ("F32", "float16", "F16"),
        ("Q6_K", "bfloat16", "BF16"),
    ],
)
def test_a_matrix_is_kept_in_another_format(stored_as: str, dtype: str, kept_as: str) -> None:
    array = np.zeros((4, 256), np.uint8)
    assert run_format(Weight((4, 256), stored_as, lambda a, b: array[a:b], lambda a, b: array[a:b]), dtype) == kept_as


def test_a_quantised_matrix_without_blocks_to_copy_is_kept_in_its_format() -> None:
    for format in ("Q4_0", "Q4_1", "Q8_0", "Q6_K"):
        assert run_format(Weight((4, 64), format, lambda a, b: np.zeros((b - a, 64), np.float32)), "auto") == "Q8_0"
        assert run_format(Weight((4, 48), format, lambda a, b: np.zeros((b - a, 48), np.float32)), "auto") == "F32"


def test_a_matrix_that_must_be_repacked_is_not_that_of_float_rows() -> None:
    architecture, weights = tiny("llama", "Q4_1")
    repacked = {n: Weight(w.shape, "Q5_K" if len(w.shape) == 2 else "F32", w.read) for n, w in weights.items()}
    as_floats = {n: Weight(w.shape, "F32", w.read) for n, w in weights.items()}
    model = NativeModel(architecture, repacked, dtype="auto", **SIZES)
    reference = TorchModel(architecture, as_floats, device="cpu", dtype="float32", **SIZES)
    actual, expected = (one_pass(m, prompt(20), range(5))[:, :VOCAB_SIZE] for m in (model, reference))
    assert model.precision == "Q8_0" and np.linalg.norm(actual - expected) / np.linalg.norm(expected) < 0.04


def test_one_float32_matrix_among_others_does_not_keep_the_cache_in_float32() -> None:
    architecture, weights = tiny("llama", "Q8_0")
    mixed = {**weights, "layers.1.o": stored(weights["layers.1.o"].read(0, 64), "F32")}
    halves, floats = (NativeModel(architecture, w, dtype="auto", **SIZES) for w in (weights, mixed))
    assert (halves.half_cache, floats.half_cache) == (True, False)
    assert (halves.precision, floats.precision) == ("Q8_0", "Q8_0")
    assert halves.kv_bytes * 2 == floats.kv_bytes == architecture.kv_bytes_per_token(4) * 64
    for model in (halves, floats):
        assert np.isfinite(one_pass(model, prompt(20), range(5))).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
def test_the_memory_plan_is_not_what_weights_and_cache_take(format: str, dtype: str) -> None:
    for ops in ("native", "torch"):
        target = make_target(format, dtype=dtype, ops=ops)
        architecture, weights = tiny("llama", format)
        how: dict[str, Any] = {"device": "cpu", "dtype": dtype, "ops": ops}
        planned = model_bytes(architecture, weights, threads=1, num_rows=8, max_model_len=64, **how)
        assert target.kv_bytes == 64 * kv_bytes_per_token(architecture, weights, **how) == 64 * planned.kv_per_token
        assert target.weight_bytes == sum(planned.weights.values()) and planned.scratch > 0
        assert target.precision == max(planned.weights, key=lambda name: planned.weights[name])


def test_weight_bytes_are_not_those_of_the_format() -> None:
    architecture, _ = tiny("llama", "F32")
    shapes = architecture.weight_shapes().values()
    tiles = sum(-(-shape[0] // 16) * 16 * shape[1] for shape in shapes if len(shape) == 2)
    vectors = 4 * sum(shape[0] for shape in shapes if len(shape) == 1)
    bytes_per_32 = {"F32": 128, "F16": 64, "BF16": 64, "Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
    for format, num_bytes in bytes_per_32.items():
        assert make_native("llama", format).weight_bytes == pytest.approx(tiles // 32 * num_bytes + vectors, abs=64 * len(shapes))


# ------------------------------------------------------------------------------------------------ choices and refusals


def test_describe_hides_the_format_or_the_instruction_set() -> None:
    line = make_target("Q4_1", threads=2).describe()
    assert f"llama, 3 layers, Q4_1 on 2 CPU threads with native ops ({INSTRUCTION_SETS[0]}); weights" in line
    assert line.endswith("exactness: bitwise")
    assert "float32 on" in make_target("Q4_1", ops="torch").describe()
    assert make_target("F16").precision == "F16" and make_target("F16", ops="torch").precision == "float32"


def test_auto_takes_the_torch_ops_where_there_are_native_ones() -> None:
    architecture, _ = tiny("llama", "F32")
    assert resolve_ops("auto", architecture, "cpu") == resolve_ops("native", architecture, "cpu") == "native"
    assert resolve_ops("auto", architecture, "cuda") == resolve_ops("torch", architecture, "cpu") == "torch"
    with pytest.raises(ConfigError, match=r"ops 'native' cannot be used here: they run on the CPU only; use ops 'torch'"):
        resolve_ops("native", architecture, "cuda")
    with pytest.raises(ConfigError, match="did you mean 'native'"):
        resolve_ops("nativ", architecture, "cpu")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 40}, "hidden_size 40 is no multiple of 16"),
        ({"intermediate_size": 100}, "intermediate_size 100 is no multiple of 16"),
        ({"head_dim": 24}, r"head_dim 24 is none of \(16, 32"),
        ({"head_dim": 512}, r"head_dim 512 is none of"),
    ],
)
def test_a_network_that_the_kernels_cannot_compute_is_given_to_them(changes: dict[str, int], reason: str) -> None:
    architecture = dataclasses.replace(tiny("llama", "F32")[0], **changes)
    assert resolve_ops("auto", architecture, "cpu") == "torch"
    with pytest.raises(ConfigError, match=f"ops 'native' cannot be used here: {reason}.*; use ops 'torch' or 'auto'"):
        resolve_ops("native", architecture, "cpu")


def test_a_package_without_the_compiled_module_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    architecture, _ = tiny("llama", "F32")
    assert why_not_native(architecture) is None
    monkeypatch.setattr(importlib, "import_module", fail)
    assert resolve_ops("auto", architecture, "cpu") == "torch"
    with pytest.raises(ConfigError, match=r"the compiled module is missing \(No module named 'foredraft._native'\)"):
        resolve_ops("native", architecture, "cpu")


def test_the_best_instruction_set_is_not_the_first() -> None:
    order = [name for name in ("avx512", "avxvnni", "avx2", "generic") if name in INSTRUCTION_SETS]
    assert order == INSTRUCTION_SETS and INSTRUCTION_SETS[-1] == "generic"
    tokens = prompt(9)
    best = one_pass(make_native("llama", "Q4_0", instruction_set=INSTRUCTION_SETS[0]), tokens, range(4))
    assert_same_bits(one_pass(make_native("llama", "Q4_0"), tokens, range(4)), best)


def test_an_unknown_instruction_set_is_taken() -> None:
    with pytest.raises(ConfigError, match=r"instruction set 'sse9' cannot run on this machine; choose one of: .*generic"):
        make_native("llama", "F32", instruction_set="sse9")


def test_a_cache_larger_than_memory_crashes() -> None:
    for num_blocks in (2**46, 2**62):
        with pytest.raises(CapacityError, match="lower kv_cache_memory"):
            make_native("llama", "F32", num_blocks=num_blocks)


@pytest.mark.parametrize("name", ["layers.1.qkv", "norm", "embed"])
def test_rows_of_another_shape_than_promised_are_loaded(name: str) -> None:
    architecture, weights = tiny("llama", "F32")
    whole = weights[name]
    short = Weight(whole.shape, whole.format, lambda start, stop: whole.read(start, stop)[..., :-1])
    with pytest.raises(ModelFileError, match=f"'{name}' must have shape"):
        NativeModel(architecture, {**weights, name: short}, dtype="auto", **SIZES)


# ------------------------------------------------------------------------------------------------ threads


def test_threads_are_not_as_many_as_asked_for() -> None:
    assert make_target("F32", threads=3).runner.place().startswith("F32 on 3 CPU threads")
    assert f"on {num_default_threads()} CPU threads" in make_target("F32", threads=None).runner.place()


def test_two_callers_at_once_mix_their_passes() -> None:
    model, prompts = make_native("qwen3", "Q8_0", threads=2), [prompt(9, seed=1), prompt(17, seed=2)]
    tables = [range(5), range(5, 10)]
    expected = [one_pass(model, tokens, table) for tokens, table in zip(prompts, tables, strict=True)]
    failures: list[AssertionError] = []

    def call(index: int) -> None:
        try:
            for _ in range(40):
                assert_same_bits(one_pass(model, prompts[index], tables[index]), expected[index])
        except AssertionError as error:
            failures.append(error)

    callers = [threading.Thread(target=call, args=(index,)) for index in (0, 1)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failures, failures


def test_workers_that_slept_miss_the_next_pass() -> None:
    model = make_native("llama", "Q4_1", threads=3)
    expected = one_pass(model, prompt(9), range(3))
    time.sleep(0.3)
    assert_same_bits(one_pass(model, prompt(9), range(3)), expected)
    for pause in (0.0001, 0.0003, 0.0005, 0.001, 0.002):
        time.sleep(pause)
        assert_same_bits(one_pass(model, prompt(9), range(3)), expected)


def test_an_idle_model_keeps_a_processor_busy() -> None:
    model = make_native("llama", "F32", threads=2)
    one_pass(model, prompt(3), range(1))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux lists them")
def test_models_that_are_thrown_away_leave_threads_behind() -> None:
    before = len(os.listdir("/proc/self/task"))
    for index in range(50):
        model = make_native(FAMILIES[index % len(FAMILIES)], "Q4_0", threads=1 + index % 4)
        if index % 2:
            one_pass(model, prompt(3), range(1))
        del model
    assert len(os.listdir("/proc/self/task")) == before


def test_rows_without_logits_or_taps_fail() -> None:
    model = make_native("llama", "Q8_0", threads=2)
    out = model.forward([Rows(prompt(5), 0, 0, range(2)), Rows(prompt(3), 0, 0, [3])])
    assert [tuple(logits.shape) for logits in out.logits] == [(0, VOCAB_SIZE), (0, VOCAB_SIZE)] and out.hidden is None
    after = model.forward([Rows([1], 5, 1, range(2))]).logits[0]
    assert_same_bits(after, one_pass(model, [*prompt(5), 1], [6, 7])[-1:, :VOCAB_SIZE])
