"""The comparison with llama.cpp: how its tools' output is read, and what is called faster."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "compare_llama_cpp.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_llama_cpp", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


def run_of(n_prompt: int, n_gen: int, *milliseconds: float) -> dict[str, Any]:
    return {"n_prompt": n_prompt, "n_gen": n_gen, "n_depth": 64, "samples_ns": [round(1e6 * ms) for ms in milliseconds]}


def test_each_sample_of_llama_bench_goes_to_its_measure_in_its_unit() -> None:
    tests = [run_of(2, 0, 12.0), run_of(5, 0, 20.0, 21.0), run_of(512, 0, 2000.0), run_of(0, 64, 640.0, 800.0)]
    found = script.read_llama_bench(json.dumps(tests))
    assert found == {
        "pass_2": [pytest.approx(12.0)],
        "pass_5": pytest.approx([20.0, 21.0]),
        "pass_5_last": pytest.approx([20.0, 21.0]),
        "prefill": [pytest.approx(256.0)],
        "decode": pytest.approx([100.0, 80.0]),
        "pass_1": pytest.approx([10.0, 12.5]),
    }


def test_lines_of_batched_bench_that_are_not_json_are_passed_over() -> None:
    lines = ["", "llama_context: a warning", *(json.dumps({"pl": n, "speed_tg": 30.0 * n, "t_tg": 1.0}) for n in (5, 8))]
    assert script.read_batched_bench("\n".join(lines)) == {"batch_5": [150.0], "batch_8": [240.0]}


def samples(speed: float) -> dict[str, list[float]]:
    """Every measure ``speed`` times as fast as 10 ms or 10 tokens/s."""
    return {m.name: [10 * speed if m.unit == "tok/s" else 10 / speed] * 3 for m in script.MEASURES}


def test_faster_is_more_tokens_a_second_but_fewer_milliseconds() -> None:
    lines = script.compare(samples(3.0), samples(1.5), "Q4_1")
    assert [line["times_as_fast"] for line in lines] == pytest.approx([2.0] * len(script.MEASURES))


@pytest.mark.parametrize(
    ("name", "quantization", "target"),
    [
        ("decode", "Q4_1", 1.6),
        ("decode", "Q8_0", 1.4),
        ("decode", "Q4_0", None),
        ("pass_5", "Q4_0", 3.0),
        ("prefill", "Q8_0", 2.0),
        ("batch_8", "Q4_1", 2.5),
        ("batch_5", "Q4_1", None),
    ],
)
def test_a_target_holds_for_the_wrong_measure_or_format(name: str, quantization: str, target: float | None) -> None:
    assert script.target_of(name, quantization) == target


def test_a_missed_target_is_called_met() -> None:
    lines = {line["name"]: line for line in script.compare(samples(2.2), samples(1.0), "Q4_1")}
    assert {name: script.is_met(lines[name]) for name in ("decode", "pass_5", "prefill", "batch_8", "pass_2")} == {
        "decode": True,
        "pass_5": False,
        "prefill": True,
        "batch_8": False,
        "pass_2": True,
    }


def test_a_tool_that_fails_is_taken_for_one_that_measured_nothing(tmp_path: Path) -> None:
    tool = tmp_path / "llama-bench"
    tool.write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    tool.chmod(0o755)
    with pytest.raises(SystemExit, match="llama-bench ended with 3:\nno such model"):
        script.run_tool(tmp_path, "llama-bench", [])


def test_a_tools_libraries_are_not_found_beside_it(tmp_path: Path) -> None:
    tool = tmp_path / "llama-bench"
    tool.write_text('#!/bin/sh\necho "$LD_LIBRARY_PATH" "$@"\n')
    tool.chmod(0o755)
    assert script.run_tool(tmp_path, "llama-bench", ["-m", "x"]) == f"{tmp_path} -m x\n"


@pytest.mark.skipif(sys.platform == "win32", reason="the tools are stood in for by shell scripts")
@pytest.mark.model
def test_a_whole_comparison_of_one_round_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from foredraft.loader.resolve import resolve_model

    monkeypatch.setattr(script, "measure_peer", lambda bin_dir, model, threads: samples(1000.0))
    monkeypatch.setattr(script, "DECODE_TOKENS", 6)
    monkeypatch.setattr(script, "COPY_TOKENS", 6)
    monkeypatch.setattr(script, "ROUND_REPEATS", 1)
    model = Path(resolve_model("smollm2-135m"))
    path = tmp_path / "out.json"
    assert script.main([str(tmp_path), str(model), "--threads", "1", "--rounds", "1", "--json", str(path)]) == 1
    result = json.loads(path.read_text())
    assert str(tmp_path) not in path.read_text() and str(model.parent) not in path.read_text()
    assert result["copy"]["identical"] is True
    assert result["model"]["quantization"] == "Q4_1" and "missed" in capsys.readouterr().out
