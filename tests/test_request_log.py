from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_helpers import ByteTokenizer
from foredraft.request_log import ModelTokens, PseudoTokens, read_log, read_prompts
from foredraft.types import RequestError


def write(folder: Path, *lines: object, name: str = "log.jsonl") -> str:
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


USER = {"role": "user", "content": "one two"}
ANSWER = {"role": "assistant", "content": "two three"}


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "one two", "completion": "two three"},
        {"prompt": "one two", "response": "two three", "model": "any", "usage": {}},
        {"messages": [{"role": "user", "content": "one two"}, ANSWER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "one two"}, {"type": "image_url"}]}, ANSWER]},
    ],
)
def test_a_common_shape_of_a_log_is_refused_or_its_words_differ(tmp_path: Path, line: object) -> None:
    (record,) = read_log(write(tmp_path, line, ""), PseudoTokens())
    prompt, completion = record.tokens[: record.num_prompt], record.tokens[record.num_prompt :]
    assert len(completion) == 2
    assert completion[1] not in prompt
    # "one", " two"; a word at a start has no space before it, so the answer's "two" is another token.
    assert prompt[:2] == [0, 1] and completion[0] != prompt[1]


def test_token_ids_are_changed(tmp_path: Path) -> None:
    (record,) = read_log(write(tmp_path, {"prompt_token_ids": [5, 6], "token_ids": [7]}), PseudoTokens())
    assert record == ([5, 6, 7], 2)


def test_pseudo_tokens_lose_text_or_number_the_same_piece_twice() -> None:
    encoder = PseudoTokens()
    text = "Extraordinary 12345 times,\n\n  snake_case naïve."
    ids = encoder.completion(text)
    pieces = {index: piece for piece, index in encoder._ids.items()}
    assert "".join(pieces[index] for index in ids) == text
    assert [pieces[index] for index in ids][:4] == ["Extraor", "dinary", " 123", "45"]
    assert encoder.completion(text) == ids


def test_a_conversation_is_not_put_by_the_chat_template() -> None:
    class Chatting(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [1] * add_special_tokens + list(text.encode())

        def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
            return [7, len(messages), *messages[0]["content"].encode()]

    encoder = ModelTokens(Chatting())  # type: ignore[arg-type]
    assert encoder.prompt([USER]) == [7, 1, *b"one two"]
    assert encoder.prompt("hi") == [1, *b"hi"]
    assert encoder.completion("hi") == [*b"hi"]
    assert ModelTokens(Chatting(has_chat_template=False)).prompt([USER]) == [1, *b"one two\n\n"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"prompt": "one"}, "there is no completion"),
        ({"text": "one"}, "there is no completion"),
        ({"messages": [USER]}, "there is no completion: the last of the messages"),
        ({"messages": []}, "messages must be"),
        ({"prompt": "one", "completion": ""}, "the completion is empty"),
        ({"prompt": "", "completion": "one"}, "the prompt is empty"),
        ({"prompt": 1, "completion": "one"}, "prompt must be a text"),
        ({"prompt": "one", "completion": ["one"]}, "completion must be a text"),
        ({"prompt_token_ids": [1]}, "token_ids must be a list"),
        ({"prompt_token_ids": [1], "token_ids": [-2]}, "token_ids must be a list"),
        ({"prompt_token_ids": [1], "token_ids": [2**31]}, "token_ids must be below 2147483648"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "content must be a text"),
        ("[1]", "must be a JSON object"),
        ("{", "not valid JSON"),
    ],
)
def test_a_line_without_a_completion_is_not_named(tmp_path: Path, line: object, says: str) -> None:
    good = {"prompt": "one", "completion": "two"}
    with pytest.raises(RequestError, match=f"line 3: .*{says}.*; mend or remove the line"):
        read_log(write(tmp_path, good, "", line), PseudoTokens())


def test_ids_of_another_vocabulary_are_planned_with(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt_token_ids": [1], "token_ids": [2, 40]})
    assert len(read_log(path, PseudoTokens(), 41)) == 1
    with pytest.raises(RequestError, match="line 1: token_ids must be below 40, the size of the vocabulary, not 40"):
        read_log(path, PseudoTokens(), 40)


def test_an_empty_or_absent_log_is_planned_with(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="holds no requests"):
        read_log(write(tmp_path, ""), PseudoTokens())
    with pytest.raises(RequestError, match="cannot be read"):
        read_log(str(tmp_path / "none.jsonl"), PseudoTokens())
    for path in ("~nobody-at-all/log.jsonl", "log\0.jsonl"):
        with pytest.raises(RequestError, match="cannot be read"):
            read_log(path, PseudoTokens())


def test_prompts_of_a_file_are_read_in_part(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{}]}
    assert read_prompts(write(tmp_path, {"messages": [USER, call]})) == [[USER]]
    lines = [{"prompt": "one"}, {"messages": [USER, ANSWER]}, {"messages": [USER]}, {"turns": ["first", "second"], "category": "x"}]
    assert read_prompts(write(tmp_path, *lines)) == ["one", [USER], [USER], "first"]
    assert read_prompts(write(tmp_path, "one\n\n two ", name="prompts.txt")) == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"turns": []}, "line 1: there is no prompt"),
        ({"messages": [{"role": "user"}]}, "line 1: a message's content must be a text, not None"),
        ("", "holds no prompts"),
    ],
)
def test_a_file_without_prompts_is_measured_with(tmp_path: Path, line: object, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        read_prompts(write(tmp_path, line))
