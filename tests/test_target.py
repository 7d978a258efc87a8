from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft import target as target_module
from foredraft.target import ModelTarget, resolve_device, resolve_dtype
from foredraft.types import CapacityError, ConfigError, FloatArray, Rows
from hf_weights import FAMILIES, VOCAB_SIZE, case, prompt

pytestmark = pytest.mark.usefixtures("one_thread")

# What the native ops hold to the bit is in tests/test_native.py; here they are held to what holds of all.
PLACES = [("cpu", "torch"), ("cpu", "native"), *([("cuda", "torch")] if torch.cuda.is_available() else [])]
each_family = pytest.mark.parametrize("family", FAMILIES)
each_place = pytest.mark.parametrize(("device", "ops"), PLACES)
each_ops = pytest.mark.parametrize("ops", ["torch", "native"])


def make(
    family: str, ops: str = "torch", device: str = "cpu", dtype: str = "float32", num_blocks: int = 64, block_size: int = 4
) -> ModelTarget:
    tiny = case(family)
    return ModelTarget(
        tiny.architecture,
        tiny.weights,
        device=device,
        dtype=dtype,
        ops=ops,
        threads=1,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=128,
    )


def one_pass(target: ModelTarget, tokens: Sequence[int], table: Sequence[int], start: int = 0) -> FloatArray:
    return target.forward([Rows(tokens, start, len(tokens), table)]).logits[0]


def close(actual: FloatArray, expected: FloatArray, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@each_place
@each_family
def test_logits_equal_transformers_at_every_prompt_length(family: str, device: str, ops: str) -> None:
    target = make(family, ops, device)
    for length in (1, 2, 5, 6, 7, 8, 9, 16, 40):
        tokens = prompt(length, seed=length)
        logits = one_pass(target, tokens, range(64))
        assert logits.dtype == np.float32
        close(logits, case(family).logits(tokens), 1e-4)


@each_place
@each_family
def test_taps_are_the_states_entering_each_layer_in_the_order_asked(family: str, device: str, ops: str) -> None:
    tokens, states = prompt(11), case(family).states(prompt(11))
    out = make(family, ops, device).forward([Rows(tokens, 0, 1, range(3))], taps=(2, 0, 1))
    assert out.hidden is not None
    close(out.hidden[0], torch.cat([states[2], states[0], states[1]], dim=1), 1e-4)


@each_ops
@each_family
def test_the_last_tap_comes_before_the_final_norm(family: str, ops: str) -> None:
    tiny, tokens = case(family), prompt(5)
    out = make(family, ops).forward([Rows(tokens, 0, 0, range(2))], taps=(3,))
    assert out.hidden is not None
    with torch.no_grad():
        close(tiny.reference.model.norm(torch.from_numpy(out.hidden[0])), tiny.states(tokens)[3], 1e-4)


@each_ops
@each_family
def test_only_the_last_rows_get_logits_and_taps_are_split_by_sequence(family: str, ops: str) -> None:
    target = make(family, ops)
    first, second = prompt(6, 1), prompt(3, 2)
    whole = [one_pass(target, first, [0, 1]), one_pass(target, second, [2])]
    out = target.forward([Rows(first, 0, 2, [0, 1]), Rows(second, 0, 0, [2]), Rows(first, 0, 6, [3, 4])], taps=(1, 2))
    assert [logits.shape for logits in out.logits] == [(2, VOCAB_SIZE), (0, VOCAB_SIZE), (6, VOCAB_SIZE)]
    close(out.logits[0], whole[0][-2:])
    close(out.logits[2], whole[0])
    assert out.hidden is not None and [state.shape for state in out.hidden] == [(6, 64), (3, 64), (6, 64)]
    close(out.hidden[0], out.hidden[2])


@each_place
@each_family
def test_a_prompt_in_chunks_gives_the_logits_of_one_go(family: str, device: str, ops: str) -> None:
    target, tokens = make(family, ops, device), prompt(37)
    whole = one_pass(target, tokens, range(10))
    for size in (1, 3, 8, 16):
        table = range(20, 30)
        chunks = [one_pass(target, tokens[i : i + size], table, start=i) for i in range(0, len(tokens), size)]
        close(np.concatenate(chunks), whole)


@each_place
@each_family
def test_batch_mates_do_not_change_a_sequence(family: str, device: str, ops: str) -> None:
    target = make(family, ops, device)
    lengths = (1, 37, 16, 17, 5, 16, 2)
    prompts = [prompt(length, seed=i) for i, length in enumerate(lengths)]
    alone = [one_pass(target, tokens, range(10)) for tokens in prompts]
    tables = [list(range(10 * (i % 6), 10 * (i % 6) + 10)) for i in range(6)] + [[60, 61, 62, 63]]
    together = target.forward([Rows(p, 0, len(p), table) for p, table in zip(prompts, tables, strict=True)])
    for expected, logits in zip(alone, together.logits, strict=True):
        close(logits, expected)
    # One row each at very different contexts: the decoding step, padded within a group.
    for rows in (1, 2):
        batch = [Rows(p[-rows:], len(p) - rows, rows, table) for p, table in zip(prompts, tables, strict=True) if len(p) >= rows]
        expected = [whole[-rows:] for p, whole in zip(prompts, alone, strict=True) if len(p) >= rows]
        for logits, rows_alone in zip(target.forward(batch).logits, expected, strict=True):
            close(logits, rows_alone)


@each_ops
@each_family
def test_block_size_and_block_order_do_not_matter(family: str, ops: str) -> None:
    tokens = prompt(33)
    whole = one_pass(make(family, ops), tokens, range(10))
    for block_size, table in ((1, list(range(63, 30, -1))), (3, [5, 60, 2, 40, 41, 1, 0, 9, 33, 21, 11]), (64, [7])):
        target = make(family, ops, block_size=block_size)
        close(one_pass(target, tokens[:20], table), whole[:20])
        close(one_pass(target, tokens[20:], table, start=20), whole[20:])


@each_ops
@each_family
def test_rejected_rows_leave_no_trace_once_overwritten(family: str, ops: str) -> None:
    target, tokens, wrong = make(family, ops), prompt(24), prompt(6, seed=9)
    fresh = one_pass(target, tokens, range(20, 26))
    one_pass(target, tokens[:15], range(6))
    one_pass(target, [*tokens[15:17], *wrong], range(6), start=15)
    close(one_pass(target, tokens[17:], range(6), start=17), fresh[17:])


@each_ops
@each_family
def test_what_earlier_owners_left_in_a_block_is_never_seen(family: str, ops: str) -> None:
    tokens = prompt(9)
    clean = one_pass(make(family, ops), tokens, [3, 1, 2])
    target = make(family, ops)
    target.forward([Rows(prompt(64, seed=5), 0, 1, range(16))])
    close(one_pass(target, tokens, [3, 1, 2]), clean)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_any_split_of_sequences_into_passes_gives_the_logits_of_single_passes(family: str, data: st.DataObject) -> None:
    target = make(family, num_blocks=60, block_size=3)
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    prompts = [prompt(length, seed=i) for i, length in enumerate(lengths)]
    tables = np.array(data.draw(st.permutations(range(60)))).reshape(6, 10).tolist()
    done, collected = [0] * len(prompts), [list[FloatArray]() for _ in prompts]
    while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
        waiting = [i for i, p in enumerate(prompts) if done[i] < len(p)]
        members = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        sizes = [data.draw(st.integers(1, len(prompts[i]) - done[i])) for i in members]
        batch = [Rows(prompts[i][done[i] : done[i] + n], done[i], n, tables[i]) for i, n in zip(members, sizes, strict=True)]
        for i, n, logits in zip(members, sizes, target.forward(batch).logits, strict=True):
            collected[i].append(logits)
            done[i] += n
    for tokens, parts in zip(prompts, collected, strict=True):
        close(np.concatenate(parts), one_pass(target, tokens, tables[5]))


@each_place
@each_family
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_and_stays_near_float32(family: str, device: str, ops: str, dtype: str) -> None:
    target, tokens = make(family, ops, device, dtype), prompt(20)
    logits = target.forward([Rows(tokens, 0, 20, range(5)), Rows(tokens[:1], 0, 1, [9])]).logits[0]
    assert logits.dtype == np.float32
    exact = case(family).logits(tokens).numpy()
    assert np.linalg.norm(logits - exact) / np.linalg.norm(exact) < 0.08


def test_bytes_are_those_of_the_tensors() -> None:
    target = make("llama", num_blocks=8, block_size=4)
    shapes = case("llama").architecture.weight_shapes().values()
    assert target.weight_bytes == 4 * sum(torch.Size(shape).numel() for shape in shapes)
    assert target.kv_bytes == 2 * 3 * 8 * 4 * 2 * 16 * 4
    assert make("llama-tied").weight_bytes == target.weight_bytes - 4 * VOCAB_SIZE * 32


def test_describe_is_one_line_that_tells_precision_place_and_exactness() -> None:
    line = make("qwen3").describe()
    assert "\n" not in line
    assert re.search(r"qwen3, 3 layers, float32 on \d+ CPU threads with torch ops; .* 256 tokens; exactness: numeric", line)


@each_ops
def test_an_empty_batch_is_no_pass(ops: str) -> None:
    out = make("llama", ops).forward([])
    assert out.logits == [] and out.hidden is None


def test_auto_is_float32_on_cpu_and_bfloat16_on_cuda() -> None:
    assert resolve_dtype("auto", "cpu") == "float32"
    assert resolve_dtype("auto", "cuda") == "bfloat16"
    assert resolve_dtype("float16", "cpu") == "float16"
    assert resolve_device("cpu") == "cpu"


def test_auto_takes_cuda_where_torch_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ConfigError, match=r"'cuda' needs .* use device 'cpu'"):
        resolve_device("cuda")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only torch can tell")
def test_auto_asks_torch_only_where_a_driver_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(target_module, "GPU_FILES", (str(tmp_path / "nvidiactl"),))
    assert resolve_device("auto") == "cpu" and resolve_device("cuda") == "cuda"
    (tmp_path / "nvidiactl").touch()
    assert resolve_device("auto") == "cuda" and resolve_device("cpu") == "cpu"


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cuda'"):
        resolve_device("cuda0")
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        resolve_dtype("bfloat", "cpu")


def test_a_length_beyond_the_models_positions_is_refused() -> None:
    tiny = case("llama")
    with pytest.raises(ConfigError, match=r"max_model_len must be from 1 to the model's 256 positions, not 257"):
        ModelTarget(tiny.architecture, tiny.weights, device="cpu", num_blocks=1, block_size=4, max_model_len=257)


@each_ops
def test_a_cache_larger_than_memory_is_a_capacity_error(ops: str) -> None:
    with pytest.raises(CapacityError, match="lower kv_cache_memory"):
        make("llama", ops, num_blocks=2**46, block_size=4)


@pytest.mark.parametrize(
    "rows",
    [
        Rows([VOCAB_SIZE], 0, 1, [0]),
        Rows([-1], 0, 1, [0]),
        Rows([1] * 5, 0, 1, [0]),
        Rows([1], 4, 1, [0]),
        Rows([1], 128, 1, range(33)),
        Rows([1], 0, 2, [0]),
        Rows([1], 0, 1, [64]),
        Rows([1], 0, 1, [-1]),
        Rows([], 0, 0, [0]),
    ],
)
@each_ops
def test_rows_that_would_read_or_write_elsewhere_are_refused(rows: Rows, ops: str) -> None:
    with pytest.raises(AssertionError):
        make("llama", ops).forward([rows])
