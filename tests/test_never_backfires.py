"""The script that looks for cases where adaptive speculation costs more than it brings."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from foredraft.bench_figures import over_best
from foredraft.workloads import load_dataset
from toy_llm import ToyLLM

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "never_backfires.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("never_backfires", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up by name.
    sys.modules["never_backfires"] = module
    spec.loader.exec_module(module)
    return module


def spec_bench(tmp_path: Path) -> str:
    categories = ("writing", "coding", "translation", "summarization", "qa", "math_reasoning", "rag")
    lines = [{"question_id": f"{c}{i}", "category": c, "turns": [f"{c} {i}"]} for c in categories for i in range(3)]
    path = tmp_path / "spec_bench.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert len(load_dataset(str(path))) == 21
    return str(path)


def test_a_case_is_missing_or_its_figures_do_not_fit_together(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    llm = ToyLLM(max_model_len=300, vocab_size=256, num_blocks=1 << 14)
    monkeypatch.setattr(script, "LLM", llm.open)
    arguments = ["m", "--dataset", spec_bench(tmp_path), "--limit", "2", "--max-tokens", "40", "--k-sweep", "2"]
    assert script.main(arguments) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert [case["name"] for case in result["cases"]] == [
        *("chat", "translation", "summarization", "qa", "math", "rag"),
        *("random tokens, temperature 1.5", "always wrong", "flips every 50 tokens", "slow and right", "slow and wrong"),
        *("batch 16", "batch 16, random tokens, temperature 1.5", "batch 16, always wrong"),
    ]
    assert all(case["same_tokens"] for case in result["cases"])
    for case in result["cases"][:6]:
        assert set(case["fixed"]) == {"ngram K=2", "suffix K=2"} and case["num_prompts"] == 2
        best = max(case["fixed"].values())
        assert case["best_fixed_speedup"] == max(best, 1.0)
        assert case["auto_over_highest"] == pytest.approx(case["speedup_in_all"] / max(best, 1.0))
        timed = case["ms_per_token"]
        assert set(timed) == {"plain", "auto", *case["fixed"]} and len({len(found) for found in timed.values()}) == 1
        assert case["auto_over_best"] == pytest.approx(over_best(timed.pop("auto"), timed), rel=1e-3)
    assert result["worst"]["speedup_in_all"] == min(case["speedup_in_all"] for case in result["cases"])
    wrong = next(case for case in result["cases"] if case["name"] == "always wrong")
    assert all(rate < 0.6 for rate in wrong["drafters"]["synthetic"]["acceptance_per_position"])
    assert "flips every 50 tokens" in captured.err


def test_the_luckiest_of_many_settings_passes_for_the_best() -> None:
    # By the first, third, ... segment "a" is the fastest, by the others "b".
    others = {"a": [1.0, 4.0] * 3, "b": [2.0, 3.0] * 3, "plain": [5.0, 5.0] * 3}
    assert over_best([2.0, 2.0] * 3, others) == pytest.approx((4.0 / 2.0 + 2.0 / 2.0) / 2)
    # One segment that was disturbed changes nothing.
    assert over_best([2.0, 2.0, 2.0, 90.0, 2.0, 2.0], others) == over_best([2.0] * 6, others)


def test_other_data_has_no_groups(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps({"question_id": i, "category": "code", "turns": ["x" * (i * 100 + 1)]}) for i in range(3)))
    llm: Any = ToyLLM(max_model_len=200, vocab_size=256)
    found = script.group_prompts(llm, str(path), 4, 50)
    assert [len(prompt) for prompt in found["code"]] == [3, 103]
    assert list(script.group_prompts(llm, None, 1, 10)) == ["chat", "code", "maths", "summary", "extraction", "translation"]
