from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

import foredraft.terminal
from foredraft.cli import app, main
from foredraft.drafters.ngram_table import TargetIdentity, load_table
from foredraft.llm import LLM
from foredraft.loader import Tokenizer
from foredraft.replay import Record
from foredraft.train import collect
from foredraft.train.collect import TEXTS_PER_FILE, Collector, Recipe, read_texts
from foredraft.types import ConfigError
from train_toys import END, HEADER, TURN, Bytes, Model

RECIPE = Recipe(max_question=20, max_answer=12, openings=())


def collector(folder: Path, model: Model | None = None, recipe: Recipe = RECIPE, **options: Any) -> Collector:
    model = model or Model()
    return Collector(model, cast(Tokenizer, model.tokenizer), folder, model="toy", recipe=recipe, **options)


def text(record: Record) -> tuple[str, str]:
    decode = Bytes().decode
    return decode(record.tokens[: record.num_prompt]), decode(record.tokens[record.num_prompt :])


def test_answers_are_not_to_the_questions_that_were_made_up(tmp_path: Path) -> None:
    model = Model()
    records = collector(tmp_path, model).collect(300)
    assert sum(len(record.tokens) - record.num_prompt for record in records) >= 300
    questions, answers = model.calls[:2]
    assert {prompt for prompt, _ in questions} == {HEADER} and len(questions) == TEXTS_PER_FILE
    assert {params.temperature for _, params in questions} == {1.0}
    assert len({params.seed for _, params in [*questions, *answers]}) == len(questions) + len(answers)
    assert all(prompt.startswith(HEADER) and prompt.endswith(TURN) and len(prompt) > 15 for prompt, _ in answers)
    assert [text(record)[0] for record in records[: len(answers)]] == [prompt for prompt, _ in answers]
    assert {params.temperature for _, params in answers} == set(RECIPE.temperatures)


@pytest.mark.parametrize("prompts", [[], ["one?"]])
def test_openings_are_asked_for_and_lost_or_not_taken_in_turn(tmp_path: Path, prompts: list[str]) -> None:
    model = Model()
    made = collector(tmp_path, model, replace(RECIPE, openings=("Why", "Write a")), prompts=prompts)
    records = made.collect(300)
    begun = [prompt.removeprefix(HEADER) for prompt, _ in model.calls[0]]
    assert begun[:8] == ["", "Why", "", "Write a"] * 2
    asked = {text(record)[0] for record in records}
    for opening in ("Why", "Write a"):
        assert any(prompt.startswith(HEADER + opening) and len(prompt) > len(HEADER + opening + TURN) for prompt in asked)
    assert made.folder != collector(tmp_path, model, prompts=prompts).folder


def test_the_texts_depend_on_anything_but_number_recipe_and_model(tmp_path: Path) -> None:
    first = collector(tmp_path / "a").collect(900)
    assert collector(tmp_path / "b").collect(900) == first
    assert collector(tmp_path / "b", Model(dies_after=0)).collect(900) == first
    other = collector(tmp_path / "b", recipe=replace(RECIPE, seed=1)).collect(900)
    assert other != first


@pytest.mark.parametrize("dies_after", range(6))
def test_a_killed_run_starts_again_or_goes_on_with_other_texts(tmp_path: Path, dies_after: int) -> None:
    expected = collector(tmp_path / "whole").collect(700)
    with pytest.raises(KeyboardInterrupt):
        collector(tmp_path / "killed", Model(dies_after)).collect(700)
    second = Model()
    assert collector(tmp_path / "killed", second).collect(700) == expected
    whole = Model()
    collector(tmp_path / "again", whole).collect(700)
    assert len(second.calls) == len(whole.calls) - 2 * (dies_after // 2)


def test_more_tokens_make_everything_anew_and_fewer_other_texts(tmp_path: Path) -> None:
    few = collector(tmp_path).collect(300)
    model = Model()
    more = collector(tmp_path, model).collect(900)
    assert more[: len(few)] == few
    assert collector(tmp_path, Model(dies_after=0)).collect(300) == few


def test_a_broken_file_of_texts_stays_broken(tmp_path: Path) -> None:
    made = collector(tmp_path)
    expected = made.collect(300)
    path = made.folder / "00000000.texts"
    path.write_bytes(path.read_bytes()[:-3])
    assert read_texts(path) is None
    assert collector(tmp_path).collect(300) == expected and read_texts(path) is not None


def test_given_prompts_do_not_take_turns_with_those_made_up(tmp_path: Path) -> None:
    records = collector(tmp_path, prompts=["one?", [{"role": "user", "content": "two?"}]]).collect(600)
    asked = [text(record)[0] for record in records]
    given = [prompt for prompt in asked if "?" in prompt]
    assert given[:4] == [f"{HEADER}one?{TURN}", f"{HEADER}two?{TURN}"] * 2 and 0.3 < len(given) / len(asked) < 0.9


def test_a_prompt_that_is_given_once_more_gets_the_same_answer(tmp_path: Path) -> None:
    model = Model(has_chat_template=False)
    records = collector(tmp_path, model, Recipe(temperatures=(0.0,), max_answer=12), prompts=["one?", "two?"]).collect(100)
    assert [text(record)[0] for record in records[:4]] == ["one?", "two?"] * 2
    assert [params.temperature for _, params in model.calls[0][:4]] == [0.0, 0.0, 0.7, 0.7]
    assert len({text(record)[1] for record in records if text(record)[0] == "one?"}) > 1


def test_a_prompt_beyond_the_context_ends_the_run(tmp_path: Path) -> None:
    lines: list[str] = []
    made = collector(tmp_path, prompts=["x" * 190, "y" * 190, "one?"], report=lines.append)
    assert "2 of the prompts" in lines[0]
    assert any("one?" in text(record)[0] for record in made.collect(100))
    with pytest.raises(ConfigError, match="none of the 1 prompts fits"):
        collector(tmp_path, prompts=["x" * 190])


def test_a_model_without_a_template_fails_late(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--prompts"):
        collector(tmp_path, Model(has_chat_template=False))


def test_a_model_whose_questions_never_end_runs_for_ever(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no question that ends within 20 tokens"):
        collector(tmp_path, Model(ends=False)).collect(100)


def test_a_context_too_short_for_a_text_fails_late(tmp_path: Path) -> None:
    model = Model()
    model.max_model_len = 50
    with pytest.raises(ConfigError, match="too short"):
        collector(tmp_path, model)


@pytest.mark.parametrize("options", [{"seed": -1}, {"seed": 2**32}, {"temperatures": ()}, {"temperatures": (0.5, -0.1)}])
def test_a_recipe_out_of_range_is_taken(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Recipe(**options)


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Model:
    made = Model()
    made.max_model_len = 1000

    def open_llm(name: str, **options: Any) -> LLM:
        assert options == {"speculative_config": {"method": "none"}, "max_num_seqs": TEXTS_PER_FILE, "threads": 1}
        return cast(LLM, made)

    monkeypatch.setattr(foredraft.terminal, "open_llm", open_llm)
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return made


def train(out: Path, *arguments: str) -> int:
    return main(["train", "suffix", "toy", "--out", str(out), "--threads", "1", *arguments])


def test_the_command_makes_a_file_that_cannot_be_loaded(model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "a", "--tokens", "1500", "--seed", "3") == 0
    table = load_table(tmp_path / "a", TargetIdentity.of("toy", END + 1, model.tokenizer.vocabulary()))
    assert table.provenance["recipe"]["seed"] == 3 and 1500 <= table.provenance["num_tokens"] < 1520
    assert "tokens a pass" in capsys.readouterr().err
    num_calls = len(model.calls)
    assert train(tmp_path / "b", "--tokens", "1500", "--seed", "3") == 0
    assert len(model.calls) == num_calls and (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tokens", "999"], "tokens must be at least 1000, not 999"),
        (["--temperatures", "warm"], "--temperatures must be numbers"),
        (["--seed", "-1"], "seed must be from 0"),
        (["--prompts", "missing.txt"], "missing.txt"),
        (["--max-bytes", "9999"], "--max-bytes must be at least 10000, not 9999"),
    ],
)
def test_a_wrong_option_is_found_after_the_model_was_loaded(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert train(tmp_path / "a", *arguments) == 2
    assert says in capsys.readouterr().err and model.calls == []


def test_a_file_is_larger_than_it_may_be(model: Model, tmp_path: Path) -> None:
    assert train(tmp_path / "a", "--tokens", "1500") == train(tmp_path / "b", "--tokens", "1500", "--max-bytes", "10000") == 0
    assert (tmp_path / "b").stat().st_size <= 10_000 < (tmp_path / "a").stat().st_size


def test_an_out_that_cannot_be_written_fails_after_hours(model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    assert train(tmp_path / "file" / "below") == 2
    assert "cannot be written" in capsys.readouterr().err and model.calls == []


def test_the_help_does_not_name_the_command() -> None:
    assert "suffix" in CliRunner().invoke(app, ["train", "--help"]).output
    assert collect.KIND == "texts"
