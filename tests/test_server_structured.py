"""Answers with a form, asked for in every way that clients know, and calls of functions."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from foredraft import grammar
from foredraft.server.tools import read_call
from server_helpers import (
    MODEL,
    PATIENCE,
    SETTINGS,
    Running,
    ask,
    joined_chat,
    open_tiny,
    read_events,
    running,
    said,
    write_tiny_model,
)

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMAR = 'start: "yes" | "no"'
FORMS: Mapping[str, Mapping[str, Any]] = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}},
    "structured_json": {"structured_outputs": {"json": SCHEMA}},
    "guided_json": {"guided_json": json.dumps(SCHEMA)},
    "structured_regex": {"structured_outputs": {"regex": "[ab]{3}"}},
    "guided_regex": {"guided_regex": "[ab]{3}"},
    "structured_choice": {"structured_outputs": {"choice": ["red", "green"]}},
    "guided_choice": {"guided_choice": ["red", "green"]},
    "structured_grammar": {"structured_outputs": {"grammar": GRAMMAR}},
    "guided_grammar": {"guided_grammar": GRAMMAR},
}
TOOLS = [
    {"type": "function", "function": {"name": "find", "description": "Finds a person.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(open_tiny(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf"))) as server:
        yield server


def body_of(**options: Any) -> dict[str, Any]:
    return ask(**{"ignore_eos": False, "max_tokens": 120, "temperature": 1.0, **options})


def fits(form: str, text: str) -> bool:
    if "json" in form or form == "schema":
        person = json.loads(text)
        return list(person) == ["name", "age"] and person["name"] in ("Ann", "Bob") and 0 <= person["age"] <= 99
    pattern = {"regex": "[ab]{3}", "choice": "red|green", "grammar": "yes|no"}[form.partition("_")[2]]
    return re.fullmatch(pattern, text) is not None


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_lacks_its_form_or_drafts_change_it(server: Running, form: str) -> None:
    expected = said(server.post("/v1/chat/completions", body_of(**FORMS[form], n=4, speculative=SETTINGS["none"])).json())
    assert all(fits(form, choice["text"]) and choice["finish_reason"] == "stop" for choice in expected["choices"])
    for setting in SETTINGS.values():
        body = body_of(**FORMS[form], n=4, speculative=setting)
        assert said(server.post("/v1/chat/completions", body).json()) == expected
        assert (
            joined_chat(read_events(server.post("/v1/chat/completions", {**body, "stream": True})))["choices"]
            == expected["choices"]
        )


def test_a_json_object_is_another_value(server: Running) -> None:
    body = body_of(
        response_format={"type": "json_object"}, logit_bias={str(4 + i): -100 for i in range(100, 250)}, max_tokens=300, n=4
    )
    for choice in server.post("/v1/chat/completions", body).json()["choices"]:
        assert choice["message"]["content"].lstrip().startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}}, "response_format"),
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_grammar": "start ="}, "guided_grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"jsno": {}}}, "structured_outputs.jsno"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": {"a": 0} | {"x" * i: {"y" * 900: {}} for i in range(1, 100)}}, "guided_json"),
    ],
)
def test_a_form_that_cannot_be_had_is_taken_or_not_named(server: Running, options: dict[str, Any], param: str) -> None:
    response = server.post("/v1/chat/completions", body_of(**options))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


def test_a_slow_grammar_holds_up_the_answers_of_others(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_at_once, may_end, begun = grammar._compile, threading.Event(), threading.Event()

    def compile_slowly(*args: Any) -> Any:
        begun.set()
        assert may_end.wait(PATIENCE)
        return compile_at_once(*args)

    def answer(**options: Any) -> str:
        reply = server.post("/v1/chat/completions", body_of(**options)).json()
        return str(reply["choices"][0]["message"]["content"])

    known = {"structured_outputs": {"regex": "[cd]{2}"}}
    expected = answer(**known)
    monkeypatch.setattr(grammar, "_compile", compile_slowly)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(answer, structured_outputs={"regex": "[ef]{4}"})
        assert begun.wait(PATIENCE)
        assert answer(**known) == expected and answer(max_tokens=3)
        may_end.set()
        assert re.fullmatch("[ef]{4}", slow.result())


def test_a_function_is_called_wrongly(server: Running) -> None:
    messages = [{"role": "user", "content": "Who is Ann?"}]
    tokenizer = server.llm.checkpoint.tokenizer
    # Random weights would fill an answer with white space.
    blank = {str(token): -100 for token in range(tokenizer.vocab_size) if not tokenizer.token_bytes(token).strip()}
    with server.client() as client:
        for setting in SETTINGS.values():
            options: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": TOOLS, "seed": 3, "max_tokens": 150}
            options["logit_bias"] = blank
            options["extra_body"] = {"speculative": setting}
            answer = client.chat.completions.create(**options, tool_choice={"type": "function", "function": {"name": "find"}})
            (choice,) = answer.choices
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
            (call,) = choice.message.tool_calls or []
            assert call.type == "function" and call.function.name == "find" and fits("schema", call.function.arguments)
            chunks = client.chat.completions.create(
                **options, tool_choice={"type": "function", "function": {"name": "find"}}, stream=True
            )
            parts = [part for chunk in chunks for part in chunk.choices]
            (streamed,) = [call for part in parts for call in part.delta.tool_calls or []]
            assert streamed.function.arguments == call.function.arguments and parts[-1].finish_reason == "tool_calls"
            any_of = client.chat.completions.create(**options, tool_choice="required", n=3)
            for one in any_of.choices:
                (call,) = one.message.tool_calls or []
                assert call.function.name in ("find", "stop")
                assert call.function.name == "find" or json.loads(call.function.arguments) == {}


def test_a_call_that_is_cut_is_told_as_a_call(server: Running) -> None:
    body = body_of(tools=TOOLS, tool_choice="required", max_tokens=5)
    (choice,) = server.post("/v1/chat/completions", body).json()["choices"]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"] and choice["message"]["content"]


def test_a_call_that_is_too_deep_ends_in_an_error() -> None:
    depth = 200_000
    assert read_call('{"name": "f", "arguments": ' + "[" * depth + "]" * depth + "}", "call") is None


def test_a_conversation_with_calls_is_not_understood(server: Running) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"name": "Ann"}'}}
    messages = [
        {"role": "user", "content": "Who is Ann?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a baker"},
    ]
    ids = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    text = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert '{"name": "find", "arguments": {"name": "Ann"}}' in text and "a baker" in text
    assert server.post("/v1/chat/completions", {**body_of(max_tokens=2), "messages": messages}).status_code == 200


def test_the_official_client_cannot_read_the_answer(server: Running) -> None:
    with server.client() as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x"}],
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}},
            max_tokens=120,
        )
        assert fits("schema", answer.choices[0].message.content or "")
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], tools=TOOLS)  # type: ignore[arg-type]
