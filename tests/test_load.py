"""A short run of the load test, and whether it would notice what it looks for."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from server_helpers import Running, open_tiny, running, write_tiny_model

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "load_test.py"
CLIENTS, SECONDS = 16, 4.0


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("load_test", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up while they are made.
    import sys

    sys.modules["load_test"] = module
    spec.loader.exec_module(module)
    return module


SCRIPT_MODULE = load_script()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")
    # Few blocks and places, so that requests wait, are preempted, and reuse each other's blocks.
    with running(open_tiny(path, kv_cache_memory=1_200_000, max_num_seqs=6), max_queue=5) as server:
        yield server


@pytest.fixture(scope="module")
def cases(server: Running) -> Any:
    llm = open_tiny(server.llm.checkpoint.path, speculative_config={"method": "none"})
    return SCRIPT_MODULE.solve(llm, SCRIPT_MODULE.bodies(1, 12, 200))


def test_an_answer_is_lost_or_mixed_up_under_load(server: Running, cases: Any) -> None:
    load = asyncio.run(SCRIPT_MODULE.press(server.url, cases, CLIENTS, SECONDS, seed=7))
    assert load.wrong == []
    assert {"read", "slow", "cancel", "vanish", "refused with 429"} <= set(load.outcomes), load.outcomes
    assert len(load.first_token_ms) > 10 and server.llm.kv.num_available == server.llm.kv.num_blocks
    found = SCRIPT_MODULE.report(load, SECONDS, [SCRIPT_MODULE.resident_bytes(os.getpid())])
    assert found["per_token_ms"]["p50"] <= found["per_token_ms"]["p95"] <= found["per_token_ms"]["p99"]


def test_the_load_test_misses_a_wrong_answer(server: Running, cases: Any) -> None:
    wrong = [
        replace(cases[0], text=cases[0].text[:-1] + "?"),
        replace(cases[1], num_tokens=3),
        replace(cases[2], finish_reason="x"),
    ]
    for case in wrong:
        load = asyncio.run(SCRIPT_MODULE.press(server.url, [case], 2, 0.2, seed=1))
        assert load.wrong


def test_growing_memory_looks_flat() -> None:
    assert SCRIPT_MODULE.growth([50, *[100] * 9]) == 0.0
    assert SCRIPT_MODULE.growth([100 + i for i in range(20)]) > 0.1
    assert SCRIPT_MODULE.percentiles(range(100)) == {"p50": 50, "p95": 95, "p99": 99}
    assert SCRIPT_MODULE.percentiles([]) == {}
