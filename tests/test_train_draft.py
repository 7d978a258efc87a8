from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hf_weights
import loader_files
from foredraft.architecture import Architecture, LayerKind, Rope, Weights
from foredraft.cli import main
from foredraft.drafters.draft_model import check_vocabularies
from foredraft.llm import LLM
from foredraft.loader import Checkpoint, load_checkpoint
from foredraft.model import Decoder
from foredraft.ops import KVStorage, create_ops
from foredraft.train import loop
from foredraft.train.draft_file import GGUF_NAME, PROVENANCE_NAME, save_draft
from foredraft.train.features import Text
from foredraft.train.fit_draft import CHECKPOINT, DraftJob, DraftOptions, covering_vocab, run_lengths
from foredraft.train.student import Student, principal_axes, start_weights, student_architecture, taken_layers
from foredraft.types import CapacityError, ConfigError, Rows, SamplingParams, UnsupportedModelError

CPU = torch.device("cpu")
ALIKE = [family for family in hf_weights.FAMILIES if family != "gemma3"]
TOY = Architecture(
    family="llama",
    vocab_size=40,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    layers=(LayerKind(Rope(1e4)),) * 4,
    tie_embeddings=True,
)


def toy_weights(architecture: Architecture = TOY) -> Weights:
    return hf_weights.random_weights(architecture)


def student(architecture: Architecture, target: Architecture, weights: Weights, *, train_vocabulary: bool = False) -> Student:
    start = start_weights(architecture, target, weights)
    return Student(architecture, start, device=CPU, train_vocabulary=train_vocabulary)


def as_weights(tensors: dict[str, torch.Tensor]) -> Weights:
    return {name: hf_weights.vector(values.detach().numpy()) for name, values in tensors.items()}


def logits_by_engine(architecture: Architecture, weights: Weights, tokens: list[int]) -> torch.Tensor:
    decoder = Decoder(architecture, weights, create_ops(CPU, torch.float32))
    storage = KVStorage(architecture, 8, 16, CPU, torch.float32)
    with torch.inference_mode():
        states, _ = decoder.forward(decoder.layout([Rows(tokens, 0, len(tokens), range(8))], 16), storage)
        return decoder.logits(states)


# ----------------------------------------------------------------------------------------------------- the network


@pytest.mark.parametrize("family", ALIKE)
def test_what_is_trained_is_another_network_than_what_runs(family: str) -> None:
    case = hf_weights.case(family)
    architecture = student_architecture(case.architecture, 3, 32, hf_weights.VOCAB_SIZE)
    trained = student(architecture, case.architecture, case.weights)
    texts = [hf_weights.prompt(20, 1), hf_weights.prompt(9, 2)]
    with torch.no_grad():
        logits = trained.hidden(texts) @ trained.head.T
    expected = torch.cat([logits_by_engine(architecture, as_weights(dict(trained.tensors)), text) for text in texts])
    assert torch.allclose(logits, expected, atol=1e-4)


def test_a_layer_or_factor_is_not_trained() -> None:
    case = hf_weights.case("qwen3")
    architecture = student_architecture(case.architecture, 2, 32, 60)
    trained = student(architecture, case.architecture, case.weights)
    trained.hidden([hf_weights.prompt(12)]).square().sum().backward()  # type: ignore[no-untyped-call]
    assert all(values.grad is not None and values.grad.abs().max() > 0 for values in trained.parameters.values())
    left = set(trained.tensors) - set(trained.parameters)
    assert left == {"embed", *(f"layers.{i}.{part}_norm" for i in range(2) for part in "qk")}


def test_ids_beyond_the_vocabulary_are_not_read_as_its_last_one() -> None:
    architecture = student_architecture(TOY, 1, 64, 30)
    trained = student(architecture, TOY, toy_weights())
    assert torch.equal(trained.hidden([[3, 35, 4]]), trained.hidden([[3, 29, 4]]))


@pytest.mark.parametrize(("num", "taken"), [(1, [3]), (2, [0, 3]), (3, [0, 1, 3]), (4, [0, 1, 2, 3])])
def test_a_student_starts_from_the_middle_of_its_target(num: int, taken: list[int]) -> None:
    assert taken_layers(num, 4) == taken
    weights = toy_weights()
    start = start_weights(student_architecture(TOY, num, 64, 40), TOY, weights)
    for i, layer in enumerate(taken):
        assert np.array_equal(start[f"layers.{i}.down"].numpy(), weights[f"layers.{layer}.down"].read(0, 64))


def test_a_projected_start_is_unlike_the_target() -> None:
    """With an embedding and layers that live on 32 axes, nothing is lost."""
    rng = np.random.default_rng(3)
    axes = np.linalg.qr(rng.standard_normal((64, 32)))[0].astype(np.float32)
    small = student_architecture(TOY, 1, 32, 40)
    values = {name: weight.read(0, weight.shape[0]).copy() for name, weight in toy_weights().items()}
    values["embed"] = (values["embed"] @ axes) @ axes.T
    start = start_weights(small, TOY, {name: hf_weights.vector(value) for name, value in values.items()})
    assert {name: tuple(value.shape) for name, value in start.items()} == small.weight_shapes()
    assert np.allclose(start["embed"] @ start["embed"].T, values["embed"] @ values["embed"].T, atol=1e-4)
    found = principal_axes(torch.from_numpy(values["embed"]), 32).numpy()
    x = values["embed"][:5] * values["layers.3.attn_norm"]
    keys = slice(64, 64 + 16)
    expected = (values["layers.3.qkv"][keys] * values["layers.3.attn_norm"]) @ found @ found.T @ values["embed"][:5].T
    assert np.allclose(start["layers.0.qkv"][32 : 32 + 16] @ start["embed"][:5].T, expected, atol=1e-3) and x.shape == (5, 64)


@pytest.mark.parametrize(
    ("layers", "hidden", "vocab", "says"),
    [
        (0, 64, 40, "layers must be from 1 to the target's 4, not 0"),
        (5, 64, 40, "layers must be from 1"),
        (1, 40, 40, "hidden must be a multiple of 32"),
        (1, 0, 40, "hidden must be"),
        (1, 96, 40, "up to the target's 64, not 96"),
        (1, 32, 41, "vocab must be from 1 to the target's 40 ids"),
        (1, 32, 0, "vocab must be"),
    ],
)
def test_sizes_that_cannot_be_had_are_taken(layers: int, hidden: int, vocab: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        student_architecture(TOY, layers, hidden, vocab)


def test_a_target_whose_layers_differ_is_taken() -> None:
    with pytest.raises(UnsupportedModelError, match="all alike"):
        student_architecture(hf_weights.case("gemma3").architecture, 1, 32, 60)


# ----------------------------------------------------------------------------------------------------- files


def target_of(family: str, place: Path, as_gguf: bool) -> Checkpoint:
    if not as_gguf:
        loader_files.write_folder(place, family)
        return load_checkpoint(str(place))
    case = hf_weights.case(family)
    vocab_size = len(loader_files.byte_level_tokens())
    architecture = replace(case.architecture, vocab_size=vocab_size)
    path = loader_files.write_gguf(place / "target.gguf", architecture, hf_weights.random_weights(architecture))
    return load_checkpoint(str(path))


@pytest.mark.parametrize("as_gguf", [True, False])
@pytest.mark.parametrize("family", ALIKE)
def test_a_saved_draft_model_is_another_one(family: str, as_gguf: bool, tmp_path: Path) -> None:
    if as_gguf and family == "mistral":
        pytest.skip("its GGUF files are Llama's")
    (tmp_path / "target").mkdir()
    target = target_of(family, tmp_path / "target", as_gguf)
    vocab = 265 if as_gguf else 60
    architecture = student_architecture(target.architecture, 2, 32, vocab)
    tensors = {name: values.numpy() for name, values in start_weights(architecture, target.architecture, target.weights).items()}
    path = save_draft(tmp_path / "out", target, architecture, tensors, {"of": family})
    assert path == (tmp_path / "out" / GGUF_NAME if as_gguf else tmp_path / "out")
    draft = load_checkpoint(str(path))
    assert draft.architecture == architecture
    for name, values in tensors.items():
        coarse = 0.2 if as_gguf else 0.01
        assert np.abs(draft.weights[name].read(0, len(values)) - values).max() <= coarse * np.abs(values).max(), name
    tokens = hf_weights.prompt(15)
    exact = logits_by_engine(architecture, {name: hf_weights.vector(values) for name, values in tensors.items()}, tokens)
    stored = logits_by_engine(architecture, draft.weights, tokens)
    assert torch.corrcoef(torch.stack((exact.flatten(), stored.flatten())))[0, 1] > 0.95
    check_vocabularies(target.tokenizer.vocabulary(), draft.tokenizer.vocabulary())
    assert draft.tokenizer.encode("hell w x") == target.tokenizer.encode("hell w x")
    assert json.loads((tmp_path / "out" / PROVENANCE_NAME).read_text()) == {"of": family}
    assert sorted(file.name for file in (tmp_path / "out").iterdir() if file.name.startswith(".")) == []


def test_a_gguf_draft_keeps_tokens_that_it_does_not_know(tmp_path: Path) -> None:
    target = target_of("llama", tmp_path, True)
    architecture = student_architecture(target.architecture, 1, 32, 262)
    start = start_weights(architecture, target.architecture, target.weights)
    path = save_draft(tmp_path / "out", target, architecture, {name: values.numpy() for name, values in start.items()}, {})
    draft = load_checkpoint(str(path))
    assert set(draft.tokenizer.vocabulary().values()) == set(range(262))
    assert draft.tokenizer.decode(draft.tokenizer.encode("hello")) == "hello"


def test_a_folder_without_room_ends_in_a_traceback(tmp_path: Path) -> None:
    target = target_of("llama", tmp_path, True)
    architecture = student_architecture(target.architecture, 1, 32, 262)
    start = start_weights(architecture, target.architecture, target.weights)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CapacityError, match="cannot be written"):
        save_draft(tmp_path / "file" / "out", target, architecture, {n: v.numpy() for n, v in start.items()}, {})


# ----------------------------------------------------------------------------------------------------- training


def toy_texts(num: int, seed: int = 0, length: int = 40) -> list[Text]:
    """Texts in which each token has one usual successor, and states whose logits say the same."""
    rng = np.random.default_rng(seed)
    usual = np.random.default_rng(9).permutation(40)
    embed = toy_weights()["embed"].read(0, 40)
    texts = []
    for _ in range(num):
        tokens = [int(rng.integers(40))]
        while len(tokens) < length:
            tokens.append(int(usual[tokens[-1]]) if rng.random() < 0.9 else int(rng.integers(40)))
        texts.append(Text(tokens, 5, (8 * embed[usual[tokens]]).astype(np.float16)))
    return texts


def job(**options: Any) -> DraftJob:
    chosen = DraftOptions(**({"layers": 1, "hidden": 64, "vocab": 40, "learning_rate": 5e-3} | options))
    return DraftJob(TOY, toy_weights(), toy_texts(60), toy_texts(8, 1), chosen, device=CPU)


def train(one: DraftJob, checkpoint: Path, budget: float = 2.0, **options: Any) -> loop.Position:
    return loop.run(
        one,
        loop.Budget(epochs=budget, warmup=5),
        texts_per_step=2,
        seed=0,
        checkpoint=checkpoint,
        settings={},
        report=lambda line: None,
        **options,
    )


@pytest.mark.parametrize("hidden", [64, 32])
@pytest.mark.parametrize("loss", ["ce", "lk", "tokens"])
def test_training_leaves_acceptance_where_it_was(loss: str, hidden: int, tmp_path: Path) -> None:
    curve = train(job(loss=loss, hidden=hidden), tmp_path / "c").curve
    assert curve[0]["acceptance_length"] < 1.5 and curve[-1]["acceptance_length"] > 2.2
    assert curve[-1]["first_accepted"] > 0.7


def test_a_killed_training_ends_elsewhere(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    whole, killed = job(), job()
    train(whole, tmp_path / "whole")

    def die(position: loop.Position) -> None:
        if position.step >= 20:
            raise Killed

    with pytest.raises(Killed):
        train(killed, tmp_path / "killed", on_evaluate=die, seconds_per_checkpoint=0.0)
    again = job()
    train(again, tmp_path / "killed")
    for name, values in whole.student.tensors.items():
        assert torch.equal(values, again.student.tensors[name]), name


def test_the_evaluation_counts_other_passes_than_a_replay() -> None:
    hits = torch.tensor([1, 1, 1, 1, 0, 1, 0, 1, 1], dtype=torch.bool)
    counts, where = run_lengths(hits, [6, 3], 3)
    assert counts.tolist() == [3, 3, 2, 1, 0, 1, 0, 2, 1]
    assert [(text.first, text.last) for text in where] == [(0, 6), (6, 9)]


def test_the_vocabulary_covers_too_few_tokens() -> None:
    texts = [Text([5000, *range(100), 7, 3000], 1, np.empty((0, 0), np.float16))]
    assert covering_vocab(texts, 49152) == 1024
    rare = [Text([0, *([3000] * 10), *range(90)], 1, np.empty((0, 0), np.float16))]
    assert covering_vocab(rare, 49152) == 3072 and covering_vocab(rare, 3001) == 3001


@pytest.mark.parametrize(
    ("options", "says"), [({"loss": "kl"}, "loss"), ({"learning_rate": 0.0}, "lr must be"), ({"seed": -1}, "seed must be")]
)
def test_an_option_out_of_range_is_taken(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DraftOptions(**options)


# ----------------------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def target_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose texts are few letters: its answers end by length."""
    vocab_size = len(loader_files.byte_level_tokens())
    architecture = replace(TOY, vocab_size=vocab_size, max_position_embeddings=512)
    return loader_files.write_gguf(tmp_path_factory.mktemp("target") / "toy.gguf", architecture, toy_weights(architecture))


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"hello {number}"}) + "\n" for number in range(6)))
    return path


def command(target_file: Path, out: Path, *arguments: str) -> int:
    return main(["train", "draft", str(target_file), "--out", str(out), "--threads", "1", *arguments])


@pytest.mark.parametrize("loss", ["ce", "tokens"])
def test_the_command_makes_no_draft_model(
    target_file: Path, prompts: Path, tmp_path: Path, loss: str, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ("--tokens", "1000", "--epochs", "1", "--layers", "1", "--hidden", "32", "--loss", loss, "--prompts", str(prompts))
    assert command(target_file, tmp_path / "a", *size) == 0, capsys.readouterr().err
    about = json.loads((tmp_path / "a" / PROVENANCE_NAME).read_text())
    assert about["options"]["loss"] == loss and about["num_prompts"] == 6 and about["held_out"]["acceptance_length"] >= 1
    assert not (tmp_path / "a" / CHECKPOINT).exists()
    config = {"method": "draft_model", "model": str(tmp_path / "a"), "num_speculative_tokens": 3, "adaptive": False}
    drafted, plain = (
        LLM(str(target_file), speculative_config=one, threads=1, kv_cache_memory=10_000_000).generate(
            "hello 1", SamplingParams(temperature=0.0, max_tokens=20)
        )[0]
        for one in (config, {"method": "none"})
    )
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.metrics.speculation.drafted_tokens > 0
    assert command(target_file, tmp_path / "b", *size) == 0
    assert (tmp_path / "a" / GGUF_NAME).read_bytes() == (tmp_path / "b" / GGUF_NAME).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--layers", "0"], "layers must be from 1 to the target's 4, not 0"),
        (["--hidden", "33"], "hidden must be a multiple of 32"),
        (["--vocab", "100000"], "vocab must be from 1"),
        (["--loss", "kl"], "loss"),
        (["--tokens", "10"], "tokens must be at least 1000"),
        (["--hours", "-1"], "hours"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_a_wrong_option_is_found_after_the_texts_were_made(
    target_file: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert command(target_file, tmp_path / "a", *arguments) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "cache" / "texts").exists()


def test_an_out_that_cannot_be_written_fails_after_hours(
    target_file: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert command(target_file, tmp_path / "file" / "below") == 2
    assert "cannot be written" in capsys.readouterr().err and not (tmp_path / "cache" / "texts").exists()
