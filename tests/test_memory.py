"""The lines of the memory plan, the division of memory, and what is said when it does not suffice."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foredraft import LLM, capacity
from foredraft import memory as memory_module
from foredraft.capacity import plan_memory
from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters import registry
from foredraft.drafters.ngram import PythonIndex
from foredraft.drafters.suffix_statistics import RequestStatistics
from foredraft.loader import Checkpoint, load_checkpoint
from foredraft.memory import (
    GIB,
    DrafterBytes,
    MemoryPlan,
    ModelBytes,
    available_bytes,
    check_cache_fits,
    check_context_fits,
    check_weights_fit,
    default_kv_bytes,
    make_plan,
    plan_kv_blocks,
    resident_bytes,
)
from foredraft.target import free_bytes
from foredraft.types import CapacityError, ConfigError
from loader_files import write_folder, write_gguf

# ------------------------------------------------------------------------------------------------ the plan

LARGE = ModelBytes({"Q4_1": 900, "F32": 100}, kv_per_token=10, scratch=50)
SMALL = ModelBytes({"Q8_0": 200, "F32": 10}, kv_per_token=3, scratch=5)


def example(draft: ModelBytes | None = None, num_blocks: int = 7) -> MemoryPlan:
    sizes = {"num_blocks": num_blocks, "block_size": 4, "max_model_len": 20, "logits": 8, "libraries": 4000}
    return make_plan(LARGE, draft, DrafterBytes(fixed=30, per_token=2), **sizes)


def test_a_line_is_missing_from_the_plan() -> None:
    plan = example(SMALL)
    assert plan.lines == {
        "libraries": 4000,
        "weights": 1000,
        "draft_weights": 210,
        "kv": 280,
        "draft_kv": 84,
        "logits": 8,
        "scratch": 55,
        "statistics": 30 + 56,
    }
    assert plan.total == 4000 + 1000 + 210 + 280 + 84 + 8 + 55 + 86
    assert plan.formats == {"Q4_1": 900, "F32": 110, "Q8_0": 200}
    lines = {field.name for field in dataclasses.fields(plan)} - {"formats", "num_blocks", "block_size", "max_model_len"}
    assert lines == plan.lines.keys()
    found = json.loads(json.dumps(plan.to_dict()))
    assert found["total"] == plan.total and found["kv"] == 280 and found["num_tokens"] == 28 and found["formats"]["F32"] == 110
    assert example().draft_weights == example().draft_kv == 0


def test_a_request_is_promised_a_part_of_a_block() -> None:
    plan = example(num_blocks=7)
    assert [plan.num_requests(context) for context in (1, 4, 5, 8, 9, 28, 29)] == [7, 7, 3, 3, 2, 1, 0]


@pytest.mark.parametrize(("method", "make"), [("ngram", lambda: PythonIndex(5)), ("suffix", RequestStatistics)])
def test_indexing_a_token_takes_more_than_the_plan_says(method: str, make: Callable[[], Any]) -> None:
    planned = registry.memory(SpeculativeConfig(method=method)).per_token
    rng = np.random.default_rng(0)
    for num_tokens in (1000, 3000, 6000):
        tokens = rng.integers(0, 49_000, num_tokens).tolist()
        tracemalloc.start()
        index = make()
        index.extend(tokens)
        taken = tracemalloc.get_traced_memory()[0] / num_tokens
        tracemalloc.stop()
        assert taken <= 1.1 * planned <= 1.6 * taken, (num_tokens, taken)


def test_statistics_are_charged_to_a_drafter_that_has_none() -> None:
    assert registry.memory(PLAIN) == registry.memory(SpeculativeConfig(method="mine")) == DrafterBytes()
    assert registry.memory(SpeculativeConfig(method="draft_model", model="m")) == DrafterBytes()
    kept = SpeculativeConfig(method="suffix", suffix_decoding_max_bytes=10**6)
    assert registry.memory(kept).fixed == 10**6
    parts = [registry.memory(dataclasses.replace(kept, method=name)).per_token for name in ("ngram", "suffix")]
    assert registry.memory(dataclasses.replace(kept, method="auto")) == DrafterBytes(10**6, sum(parts))
    assert registry.memory(dataclasses.replace(kept, suffix_decoding_max_cached_requests=0)).fixed == 0


MEASURE_SCRATCH = """
import sys
sys.path.insert(0, sys.argv[1])
from foredraft.memory import resident_bytes
from foredraft.native import native_bytes
from foredraft.types import Rows
from native_helpers import make_native, tiny

family, format = sys.argv[2:]
planned = native_bytes(*tiny(family, format), dtype="auto", threads=1, num_rows=40_000, max_model_len=100)
model = make_native(family, format, num_blocks=4000, block_size=10)
batch = [Rows([1] * 100, 0, 0, range(10 * i, 10 * i + 10)) for i in range(400)]
for rows in batch:
    model.forward([rows])  # writes the cache
before = resident_bytes()
model.forward(batch)
print((resident_bytes() - before) / planned.scratch)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells resident memory")
@pytest.mark.parametrize(("family", "format"), [("gemma3", "Q8_0"), ("llama", "F32"), ("qwen3", "Q4_1")])
def test_a_pass_takes_other_scratch_than_planned(family: str, format: str) -> None:
    arguments = [str(Path(__file__).parent), family, format]
    # The heap would reuse what loading left behind; this has the system give every buffer.
    run = subprocess.run(
        [sys.executable, "-c", MEASURE_SCRATCH, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) == pytest.approx(1.0, abs=0.06)


# ------------------------------------------------------------------------------------------------ from a checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    case = write_folder(tmp_path / "source", "llama")
    opened = load_checkpoint(str(write_gguf(tmp_path / "m.gguf", case.architecture, case.weights)))

    def refuse(start: int, stop: int) -> Any:
        raise AssertionError("a weight was read")

    unread = {name: dataclasses.replace(weight, read=refuse, read_blocks=None) for name, weight in opened.weights.items()}
    return dataclasses.replace(opened, weights=unread)


PLAIN = SpeculativeConfig(method="none")
CONFIG = EngineConfig(device="cpu", max_model_len=64, kv_cache_memory=100_000, max_num_seqs=4, max_num_batched_tokens=32)


def test_planning_reads_weights_or_forgets_an_option(checkpoint: Checkpoint) -> None:
    plan = plan_memory(checkpoint, None, CONFIG, PLAIN)
    per_token = checkpoint.architecture.kv_bytes_per_token(4)
    assert plan.num_tokens == 100_000 // (16 * per_token) * 16 and plan.kv == plan.num_tokens * per_token
    assert plan.max_model_len == 64 and plan.libraries > 20e6
    assert plan.weights == sum(plan.formats.values()) and plan.formats.keys() == {"F32"}
    drafted = plan_memory(checkpoint, None, CONFIG, SpeculativeConfig(method="ngram", num_speculative_tokens=6))
    vocab_size = checkpoint.architecture.vocab_size
    assert drafted.logits - plan.logits == 4 * vocab_size * 6 * 4
    assert drafted.kv == plan.kv and drafted.statistics > 0 == plan.statistics
    # A draft row is a batched row: 32 is the most.
    many = plan_memory(checkpoint, None, CONFIG, SpeculativeConfig(method="ngram", num_speculative_tokens=60))
    assert many.logits - plan.logits == 4 * vocab_size * (32 - 4)
    larger = dataclasses.replace(CONFIG, max_num_batched_tokens=64)
    assert plan_memory(checkpoint, None, larger, PLAIN).scratch > plan.scratch


def test_a_draft_models_weights_and_cache_take_nothing(checkpoint: Checkpoint) -> None:
    plan = plan_memory(checkpoint, None, CONFIG, PLAIN)
    both = plan_memory(checkpoint, checkpoint, CONFIG, SpeculativeConfig(method="draft_model", model="m"))
    assert both.draft_weights == both.weights == plan.weights and both.scratch == 2 * plan.scratch
    assert both.draft_kv == both.kv and both.num_blocks == plan.num_blocks // 2
    assert both.num_requests(64) < plan.num_requests(64)


def test_memory_is_left_over_or_exceeded_within_a_limit(checkpoint: Checkpoint) -> None:
    limit = resident_bytes() + 100_000_000
    kept = SpeculativeConfig(method="suffix", suffix_decoding_max_bytes=20_000_000)
    draft = SpeculativeConfig(method="draft_model", model="m")
    rooms = []
    for speculative in (PLAIN, SpeculativeConfig(method="ngram"), kept, draft):
        small = checkpoint if speculative.model else None
        plan = plan_memory(checkpoint, small, CONFIG, speculative, within=limit)
        # Less than a block is left over.
        assert limit - 10**5 < plan.total <= limit and (plan.kv + plan.draft_kv) / plan.num_blocks > 5000
        rooms.append(plan.num_tokens)
    assert rooms[0] > rooms[1] > rooms[2] and rooms[0] > 1.9 * rooms[3]


def test_a_length_beyond_the_model_is_planned(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="max_model_len must be at most 256"):
        plan_memory(checkpoint, None, dataclasses.replace(CONFIG, max_model_len=257))


@pytest.mark.parametrize("free", [0, 100_000])
def test_a_model_larger_than_memory_is_loaded(free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = write_folder(tmp_path / "m", "llama")
    needed = 4 * sum(int(np.prod(shape)) for shape in case.architecture.weight_shapes().values())
    assert free < needed
    monkeypatch.setattr(capacity, "free_bytes", lambda device: free)
    monkeypatch.setattr("foredraft.draft_parts.ModelTarget", None)
    with pytest.raises(CapacityError, match=r"m needs \d+ MB for its weights .* only 0 MB of memory are free; choose a smaller"):
        LLM(str(tmp_path / "m"), device="cpu")


def test_a_refusal_names_other_numbers_than_those_of_the_plan() -> None:
    with pytest.raises(CapacityError) as refused:
        check_weights_fit("big", dataclasses.replace(example(num_blocks=0), weights=7_000_000_000, scratch=10**8), 4 * 10**9)
    assert str(refused.value).startswith("big needs 7,000 MB for its weights and 100 MB to compute")
    assert "only 4,000 MB of memory are free" in str(refused.value)
    empty = example(num_blocks=0)
    check_weights_fit("m", empty, empty.total - empty.libraries)
    with pytest.raises(CapacityError):
        check_weights_fit("m", empty, empty.total - empty.libraries - 1)


def test_the_cache_that_a_refusal_allows_does_not_fit() -> None:
    plan = dataclasses.replace(example(SMALL), kv=3_000_000, draft_kv=1_000_000)
    free = plan.total - plan.libraries
    check_cache_fits(plan, free)
    with pytest.raises(CapacityError, match=r"a KV cache of 4 MB needs 4 MB .* only 3 MB are free; lower kv_cache_memory to"):
        check_cache_fits(plan, free - 1_000_000)
    with pytest.raises(CapacityError, match="at most 3500000 bytes"):
        check_cache_fits(plan, free - 500_000)


# ------------------------------------------------------------------------------------------------ the KV budget


def test_a_draft_models_cache_is_not_counted() -> None:
    assert plan_kv_blocks(1600, [10], 16) == 10
    assert plan_kv_blocks(1600, [7, 3], 16) == 10
    assert plan_kv_blocks(1599, [10], 16) == 9


def test_the_default_takes_more_than_half_of_what_is_free_or_less_than_a_context() -> None:
    assert default_kv_bytes(1000, 8192, 8 * GIB) == GIB
    assert default_kv_bytes(GIB, 3, 8 * GIB) == 3 * GIB
    assert default_kv_bytes(GIB, 3, 2 * GIB) == GIB


def test_the_memory_that_a_refusal_asks_for_does_not_suffice() -> None:
    budget, block_size = 3_000_000, 16
    with pytest.raises(CapacityError) as refused:
        check_context_fits(plan_kv_blocks(budget, [46080], block_size), block_size, 8192, budget)
    asked = int(str(refused.value).split("at least ")[1].split()[0])
    check_context_fits(plan_kv_blocks(asked, [46080], block_size), block_size, 8192, asked)


def test_a_budget_below_one_block_is_answered_with_a_made_up_number() -> None:
    with pytest.raises(CapacityError, match=r"holds 0 tokens.* many times as much or lower max_model_len"):
        check_context_fits(0, 16, 8192, 1)


# ------------------------------------------------------------------------------------------------ the machine


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """A tree of ``proc`` and ``sys`` with 8 GB available."""
    files = {"proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n", "proc/self/cgroup": cgroup, **files}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {}, 8_192_000_000),
        ("", {"sys/fs/cgroup/memory.max": "1\n"}, 8_192_000_000),
        (
            "0::/a/b\n",
            {
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/memory.max": "3000000000\n",
                "sys/fs/cgroup/a/memory.current": "1500000000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 500000000\n",
            },
            2_000_000_000,
        ),
        (
            "9:cpu:/x\n4:memory:/the/host's/path\n0::/\n",
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000000000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "700000000\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 100000000\n",
            },
            1_400_000_000,
        ),
        (
            "0::/\n",
            {
                "sys/fs/cgroup/memory.max": "1000\n",
                "sys/fs/cgroup/memory.current": "2000\n",
                "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
            },
            0,
        ),
    ],
)
def test_a_containers_limit_is_overlooked(cgroup: str, files: dict[str, str], expected: int, tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, cgroup, files)) == expected


def test_a_system_without_meminfo_has_no_memory(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) > 10**8


def test_this_process_and_this_machine_have_senseless_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 10**7 < resident_bytes() < 10**11 and free_bytes("cpu") > 10**7
    monkeypatch.setattr(memory_module.os.path, "exists", lambda path: False)
    assert 10**7 < resident_bytes() < 10**11
