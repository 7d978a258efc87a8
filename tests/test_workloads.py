from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from foredraft.types import RequestError
from foredraft.workloads import CATEGORIES, WORKLOADS, Workload, load_dataset


def write(path: Path, *lines: object) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def question(number: int, category: str = "writing", turns: object = ("first", "second")) -> dict[str, object]:
    return {"question_id": number, "category": category, "turns": turns, "reference": ["ignored"]}


def test_no_category_lacks_its_three_prompts() -> None:
    assert Counter(workload.category for workload in WORKLOADS) == dict.fromkeys(CATEGORIES, 3)


def test_no_two_prompts_share_a_name_or_a_text() -> None:
    assert len({(workload.category, workload.name) for workload in WORKLOADS}) == len(WORKLOADS)
    assert len({json.dumps(workload.messages) for workload in WORKLOADS}) == len(WORKLOADS)


def test_every_conversation_ends_with_the_users_turn() -> None:
    for workload in WORKLOADS:
        assert workload.messages[-1]["role"] == "user"
        assert all(message["content"] == message["content"].strip() != "" for message in workload.messages), workload.name


def test_extraction_prompts_are_long_and_the_others_are_not() -> None:
    for workload in WORKLOADS:
        num_words = sum(len(message["content"].split()) for message in workload.messages)
        assert (300 <= num_words <= 600) if workload.category == "extraction" else num_words < 250, (workload.name, num_words)


def test_only_the_first_turn_of_a_question_is_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "questions.jsonl", question(81), "", question(7, "qa", ["Where?"]))
    assert load_dataset(path) == (
        Workload("writing", "81", ({"role": "user", "content": "first"},)),
        Workload("qa", "7", ({"role": "user", "content": "Where?"},)),
    )


def test_the_limit_counts_within_each_category_and_keeps_the_order(tmp_path: Path) -> None:
    path = write(tmp_path / "questions.jsonl", *(question(i, "qa" if i % 3 == 2 else "writing") for i in range(9)))
    assert [workload.name for workload in load_dataset(path, limit=2)] == ["0", "1", "2", "5"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "must be a JSON object, not list"),
        ({"question_id": 2, "turns": ["x"]}, "category is missing"),
        (question(2, turns=[]), "turns must be"),
        (question(2, turns="text"), "turns must be"),
        (question(2, turns=[3]), "turns must be"),
        (question(2, turns=[" "]), "turns must be"),
        (question(2, category=""), "category must be"),
        (question(True), "question_id must be a number"),
        (question(1), "question_id must be unique"),
    ],
)
def test_a_bad_line_is_refused_with_its_number_even_beyond_the_limit(tmp_path: Path, line: object, said: str) -> None:
    path = write(tmp_path / "questions.jsonl", question(1), "", line)
    with pytest.raises(RequestError, match=f"questions.jsonl, line 3: .*{said}"):
        load_dataset(path, limit=1)


def test_a_line_that_is_no_utf8_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_bytes(json.dumps(question(1)).encode() + b'\n{"question_id": "\xff\xfe"}\n')
    with pytest.raises(RequestError, match="line 2: not valid JSON"):
        load_dataset(str(path))


def test_a_missing_or_empty_data_set_and_a_bad_limit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot be read \(No such file"):
        load_dataset(str(tmp_path / "none.jsonl"))
    with pytest.raises(RequestError, match="cannot be read"):
        load_dataset(str(tmp_path))
    with pytest.raises(RequestError, match="holds no questions"):
        load_dataset(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(RequestError, match="limit must be at least 1, not 0"):
        load_dataset(write(tmp_path / "one.jsonl", question(1)), limit=0)
