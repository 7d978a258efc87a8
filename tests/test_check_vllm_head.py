from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "check_vllm_head.py"
OURS = {"foredraft": "1", "num_drafts": 100, "num_accepted": 50, "accepted_per_position": [40, 8, 2]}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script without a model."""
    spec = importlib.util.spec_from_file_location("check_vllm_head", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "write_float32", lambda model, folder: None)
    monkeypatch.setattr(module, "chat_prompts", lambda folder, path, num: [[1, 2], [3]][:num])
    monkeypatch.setattr(module, "here", lambda folder, head, prompts, num: {**OURS, "tokens": [[7], [8]]})
    return module


def other_python(folder: Path, result: dict[str, Any]) -> str:
    """A program that answers a job as vLLM's Python would."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\ntest "$2" = --job && cat > "${{3%.json}}.out" <<\'END\'\n{json.dumps(result)}\nEND\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("num_accepted", "code"), [(50, 0), (57, 0), (70, 1), (30, 1)])
def test_a_head_that_another_engine_accepts_less_of_passes(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_accepted: int, code: int
) -> None:
    theirs = {"vllm": "2", "num_drafts": 100, "num_accepted": num_accepted, "accepted_per_position": [], "tokens": [[7], [9]]}
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("")
    program = other_python(tmp_path, theirs)
    monkeypatch.setattr("sys.argv", [str(SCRIPT), str(prompts), "--vllm-python", program, "--head", "head", "--json", str(out)])
    assert script.main() == code
    result = json.loads(out.read_text())
    assert result["foredraft"]["acceptance_length"] == 1.5 and result["num_same_answers"] == 1
    assert result["ratio"] == pytest.approx(1.5 / (1.0 + num_accepted / 100))
