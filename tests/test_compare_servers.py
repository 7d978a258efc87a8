"""The comparison of two servers: what is counted, and how it is summed up."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from server_helpers import open_tiny, running, write_tiny_model

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "compare_servers.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_servers", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up while they are made.
    sys.modules["compare_servers"] = module
    spec.loader.exec_module(module)
    return module


script = load_script()


def test_a_round_counts_other_tokens_than_were_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(clients=[1, 3], rounds=2, questions=2, max_tokens=5)
    with running(open_tiny(write_tiny_model(tmp_path / "tiny.gguf"))) as server:
        results = script.compare({"llama.cpp": server.url, "foredraft": server.url}, options)
        written = server.llm.engine.metrics.total.emitted_tokens
    # Two rounds of two servers with one client and three, two questions each, and what warms both up.
    assert written == 2 * 2 * (1 + 3) * 2 * 5 + 2 * 8
    assert [one["clients"] for one in results] == [1, 3]
    assert all(
        one[name]["tokens_per_second"] > 0.0 and len(one[name]["rounds"]) == 2
        for one in results
        for name in one
        if name != "clients"
    )
    table = script.table(results).splitlines()
    assert len(table) == 4 and table[0].split()[0] == "clients"
    capsys.readouterr()


def test_a_median_or_a_percentile_is_another() -> None:
    rounds = [script.Measured(10.0, [1.0] * 19 + [9.0]), script.Measured(30.0, [2.0] * 20), script.Measured(20.0, [3.0] * 20)]
    assert script.summary(rounds) == {"tokens_per_second": 20.0, "p95_seconds": 3.0, "rounds": [10.0, 30.0, 20.0]}


def test_the_servers_are_started_with_different_sizes() -> None:
    theirs = script.llama_command("llama-server", Path("m.gguf"), 1, 2, 16, 512)
    ours = script.own_command(Path("m.gguf"), 1, 2, 16, 512)
    assert theirs[theirs.index("-c") + 1] == str(16 * 512) and theirs[theirs.index("-np") + 1] == "16"
    assert ours[ours.index("--max-model-len") + 1] == "512" and ours[ours.index("--max-num-seqs") + 1] == "16"
    assert theirs[theirs.index("-t") + 1] == ours[ours.index("--threads") + 1] == "2"
