from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import foredraft.terminal
from foredraft.architecture import Architecture
from foredraft.cli import main
from foredraft.llm import LLM
from foredraft.types import PassOutput, Rows
from head_toys import ARCHITECTURE, HIDDEN, as_file, random_weights
from train_toys import END, Model

LETTERS = replace(ARCHITECTURE, vocab_size=END + 1)


class Thinker(Model):
    """A model of letters with states; the last ones foretell nothing."""

    def __init__(self, architecture: Architecture = LETTERS, **options: Any) -> None:
        super().__init__(**options)
        self.max_model_len = 1000
        self.checkpoint.architecture = architecture
        self.checkpoint.weights = as_file(random_weights(architecture=architecture))
        self.kv = SimpleNamespace(num_blocks=100)
        self.config.block_size = 16
        self.target = SimpleNamespace(vocab_size=END + 1, forward=self.forward, max_model_len=1000)
        self.table = np.random.default_rng(0).standard_normal((END + 1, 4 * HIDDEN)).astype(np.float32)

    def forward(self, batch: list[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        assert taps == (2, 3, 4, 7)
        return PassOutput([], [self.table[list(rows.tokens)] for rows in batch])


@pytest.fixture
def thinker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Thinker:
    made = Thinker()
    use(made, monkeypatch)
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return made


def use(model: Thinker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foredraft.terminal, "open_llm", lambda name, **options: cast(LLM, model))


def train(out: Path, *options: str) -> int:
    return main(["train", "eagle3", "toy", "--out", str(out), "--tokens", "1000", "--threads", "1", *options])


def test_the_command_leaves_no_head_or_another_one_each_time(
    thinker: Thinker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        assert train(tmp_path / name, "--epochs", "0.3", "--draft-vocab", "5", "--seed", "2") == 0
    said = capsys.readouterr().err
    assert "acceptance length" in said and "texts to learn from" in said
    first, second = (tmp_path / name / "model.safetensors" for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert config["draft_vocab_size"] == 5 and config["transformer_layer_config"]["vocab_size"] == END + 1
    provenance = json.loads((tmp_path / "a/provenance.json").read_text())
    assert provenance["recipe"]["seed"] == 2 and provenance["target"]["model"] == "toy"
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "config.json",
        "curve.html",
        "curve.json",
        "model.safetensors",
        "provenance.json",
    ]


def test_a_head_that_is_gone_on_from_is_left_behind(thinker: Thinker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "a", "--epochs", "0.3", "--draft-vocab", "5") == 0
    capsys.readouterr()
    # So short a training at so low a rate moves nothing that bfloat16 can tell.
    assert train(tmp_path / "b", "--epochs", "0.01", "--lr", "1e-8", "--start", str(tmp_path / "a")) == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert before.keys() == after.keys() and len(before) > 10
    for name, tensor in before.items():
        assert torch.allclose(tensor.float(), after[name].float(), rtol=0.02, atol=1e-6), name
    first, second = (json.loads((tmp_path / name / "provenance.json").read_text()) for name in "ab")
    assert second["went_on_from"] == first and first["start"] is None and len(second["start"]) == 64
    assert second["options"]["draft_vocab"] == 5, "what was asked for, not what the head has"
    curve = json.loads((tmp_path / "b/curve.json").read_text())
    assert curve[0]["acceptance_length"] == first["held_out"]["acceptance_length"]


def test_the_model_itself_is_written_over(thinker: Thinker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, table = tmp_path / "model", tmp_path / "model.gguf"
    model.mkdir()
    (model / "config.json").write_text("{}")
    table.write_bytes(b"GGUF and so on")
    for kind in ("eagle3", "draft"):
        assert main(["train", kind, "toy", "--out", str(model), "--tokens", "1000"]) == 2
        assert "holds a model that was not trained by this command" in capsys.readouterr().err
    assert main(["train", "suffix", "toy", "--out", str(table), "--tokens", "1000"]) == 2
    assert "is there already and holds no statistics" in capsys.readouterr().err
    assert (model / "config.json").read_text() == "{}" and table.read_bytes() == b"GGUF and so on" and not thinker.calls


def test_a_head_of_another_shape_is_gone_on_from(thinker: Thinker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "a", "--epochs", "0.1") == 0
    config = tmp_path / "a/config.json"
    config.write_text(config.read_text().replace('"norm_output": false', '"norm_output": true'))
    thinker.calls.clear()
    assert train(tmp_path / "b", "--start", str(tmp_path / "a")) == 2
    assert "a head of another shape" in capsys.readouterr().err and not thinker.calls
    assert train(tmp_path / "b", "--start", str(tmp_path / "a"), "--draft-vocab", "5") == 2
    assert "--draft-vocab cannot be given with --start" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--loss", "kl"], "loss"),
        (["--steps", "9"], "steps must be from 1 to 8, not 9"),
        (["--hours", "0"], "hours must be above 0"),
        (["--tokens", "10"], "tokens must be at least 1000, not 10"),
        (["--prompts", "missing.txt"], "missing.txt"),
        (["--start", "missing"], "missing"),
    ],
)
def test_a_wrong_option_is_found_after_texts_were_written(
    thinker: Thinker, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    assert train(tmp_path / "a", *options) == 2
    assert says in capsys.readouterr().err and not thinker.calls


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Thinker(has_chat_template=False), "no chat template and cannot make up questions; give some with --prompts"),
        (Thinker(replace(LETTERS, family="gemma3", activation="gelu_tanh")), "gemma3"),
        (Thinker(replace(LETTERS, layers=LETTERS.layers[:4])), "4 layers is too shallow"),
    ],
)
def test_a_model_that_cannot_be_learned_from_writes_texts_first(
    thinker: Thinker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: Thinker,
    says: str,
) -> None:
    use(model, monkeypatch)
    assert train(tmp_path / "a") == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error and not model.calls


def test_a_place_that_cannot_be_written_is_found_at_the_end(
    thinker: Thinker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert train(tmp_path / "file") == 2
    assert "cannot be written" in capsys.readouterr().err and not thinker.calls
