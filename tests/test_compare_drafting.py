"""The script that sets ``auto`` beside llama.cpp's ways to draft."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from toy_llm import ToyLLM

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    # Others load its neighbours by path.
    for name in ("compare_drafting", "compare_servers", "never_backfires"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("compare_drafting")


def answers(script: ModuleType, plain: float, auto: float, peers: Mapping[str, float]) -> dict[str, list[Any]]:
    """Two answers of 100 tokens for each setting, at these tokens per second."""
    rates = {script.PLAIN: plain, script.AUTO: auto, **peers}
    return {name: [script.Answer(100, 100 / rate, 50)] * 2 for name, rate in rates.items()}


def test_the_best_setting_of_a_peer_is_its_first_or_the_own_one(script: ModuleType) -> None:
    found = {
        "chat": answers(script, 200.0, 300.0, {"plain": 90.0, "ngram-simple": 60.0}),
        "rag": answers(script, 200.0, 200.0, {"plain": 90.0, "ngram-simple": 120.0}),
    }
    chat, rag, both = script.summary(found)
    assert (chat["best_peer"], rag["best_peer"]) == ("plain", "ngram-simple")
    assert chat["over_best_peer"] == pytest.approx(300 / 90) and rag["over_best_peer"] == pytest.approx(200 / 120)
    assert chat["speedup"] == pytest.approx(1.5) and chat["acceptance_length"] == 2.0
    # 400 tokens in as many seconds as both groups took.
    assert both["group"] == "all" and both["num_prompts"] == 4
    assert both["tokens_per_second"]["plain"] == pytest.approx(90.0)
    assert both["tokens_per_second"]["ngram-simple"] == pytest.approx(400 / (200 / 60 + 200 / 120))
    assert "300.00" in script.table([chat, rag, both])


def test_settings_are_asked_for_different_texts_or_always_in_the_same_order(script: ModuleType) -> None:
    asked: list[tuple[str, tuple[int, ...]]] = []

    def asker(name: str) -> Any:
        def ask(tokens: list[int], max_tokens: int) -> Any:
            asked.append((name, tuple(tokens)))
            return script.Answer(max_tokens, 1.0, 1)

        return ask

    names = ("a", "b", "c")
    groups = {"chat": [[1, 2], [3]], "rag": [[4]]}
    found = script.compare(groups, {name: asker(name) for name in names}, 10)
    turns = asked[len(names) :]
    assert [name for name, _ in turns] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert [tokens for _, tokens in turns[::3]] == [(1, 2), (3,), (4,)]
    assert {group: {name: len(some) for name, some in ways.items()} for group, ways in found.items()} == {
        "chat": dict.fromkeys(names, 2),
        "rag": dict.fromkeys(names, 1),
    }


def test_a_run_leaves_out_a_setting_or_times_the_prompt(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[Sequence[str]] = []

    @contextmanager
    def started(command: Sequence[str], port: int, environment: Mapping[str, str]) -> Iterator[str]:
        commands.append(command)
        assert environment["LD_LIBRARY_PATH"] == str(tmp_path)
        yield f"http://peer:{len(commands)}"

    def post(url: str, json: Mapping[str, Any], timeout: float) -> httpx.Response:
        assert json["temperature"] == 0 and json["prompt"] and not json["cache_prompt"]
        timings = {"predicted_n": json["n_predict"], "predicted_ms": 1e3, "prompt_ms": 5e3}
        return httpx.Response(200, json={"timings": timings}, request=httpx.Request("POST", url))

    llm = ToyLLM(max_model_len=700, vocab_size=256, num_blocks=1 << 12)
    monkeypatch.setattr(script, "LLM", llm.open)
    monkeypatch.setattr(script, "own", lambda llm, method: lambda tokens, max_tokens: script.Answer(max_tokens, 0.5, 10))
    monkeypatch.setattr(script, "started", started)
    monkeypatch.setattr(script.httpx, "post", post)
    out = tmp_path / "out.json"
    arguments = [str(tmp_path / "llama-server"), "toy.gguf", "--limit", "1", "--max-tokens", "20", "--json", str(out)]
    assert script.main(arguments) == 0
    assert len(commands) == len(script.PEERS) and sum("--spec-type" in command for command in commands) == len(script.PEERS) - 1
    result = json.loads(out.read_text())
    last = result["groups"][-1]
    assert last["group"] == "all" and set(last["tokens_per_second"]) == {script.PLAIN, script.AUTO, *script.PEERS}
    assert last["tokens_per_second"]["plain"] == pytest.approx(20.0)
    assert "llama.cpp tok/s" in capsys.readouterr().out
