"""What a server refuses, and how: wrong fields, wrong bodies, and whatever a fuzzer thinks of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error

from foredraft.server.problems import Problem, problem_of_validation
from foredraft.server.protocol import ChatRequest, CompletionRequest
from foredraft.server.settings import ServerConfig
from foredraft.types import ConfigError
from server_helpers import MODEL, Running, ask, open_tiny, running, write_tiny_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")
    with running(open_tiny(path, max_model_len=256), max_body_bytes=20_000) as server:
        yield server


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a refused request, in OpenAI's shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"] and list(body["error"]) == ["message", "type", "param", "code"]
    error: dict[str, Any] = body["error"]
    return error


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"temprature": 1}, "temprature", "'temperature'"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"temperature": -1}, "temperature", "at least 0"),
    ({"temperature": True}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ"),
    ({"n": 17}, "n", "16"),
    ({"n": 0}, "n", "from 1"),
    ({"n": 10**30}, "n", "16"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ({"stop": ["x"] * 17}, "stop", "16"),
    ({"stop": [""]}, "stop", "non-empty"),
    ({"seed": -1}, "seed", "from 0"),
    ({"seed": 2**63}, "seed", "2^63-1"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"100000": 1}}, "logit_bias", "must be from 0"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages", "'include_usage'"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "", "image_url"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "user"),
    ({"messages": [{"role": "user", "contents": "x"}]}, "messages.0.contents", "'content'"),
    ({"messages": [{"role": "user", "content": "x" * 2000}]}, "", "at most 255 tokens"),
    ({"speculative": {"methud": "none"}}, "", "'method'"),
    ({"speculative": {"method": "draft_model"}}, "", "model"),
    ({"best_of": 2}, "best_of", "not supported"),
    ({"store": True}, "store", "not supported"),
    ({"audio": {"voice": "x"}}, "audio", "not supported"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice", "required"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "required"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "combined"),
]


@pytest.mark.parametrize(("options", "param", "says"), WRONG, ids=[str(options)[:50] for options, _, _ in WRONG])
def test_a_wrong_field_is_taken_or_not_named(server: Running, options: dict[str, Any], param: str, says: str) -> None:
    error = refusal(server.post("/v1/chat/completions", {**ask(), **options}))
    assert error["type"] == "invalid_request_error" and says in error["message"], error
    if param:
        assert error["param"] == param, error


def test_a_missing_field_is_not_named(server: Running) -> None:
    error = refusal(server.post("/v1/chat/completions", {"model": MODEL}))
    assert (error["param"], error["code"]) == ("messages", "missing_field")


def test_a_field_that_changes_nothing_is_refused(server: Running) -> None:
    neutral = {"best_of": 1, "store": False, "suffix": None, "metadata": None, "user": "me", "tool_choice": "none", "n": None}
    assert server.post("/v1/chat/completions", {**ask(max_tokens=1), **neutral}).status_code == 200


def test_another_model_is_answered_for(server: Running) -> None:
    with server.client() as client, pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "model_not_found" and MODEL in str(caught.value)


@pytest.mark.parametrize(
    ("path", "method", "status"), [("/nothing", "GET", 404), ("/v1/models", "POST", 405), ("/v1/completions", "GET", 405)]
)
def test_a_wrong_path_is_not_answered_in_the_same_shape(server: Running, path: str, method: str, status: int) -> None:
    with server.http() as http:
        refusal(http.request(method, path), status)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe{}",
        b'{"messages": NaN}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"\\ud800": 1, "messages": [{"role": "user", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 6000 + b"}",
        b'{"messages": ' + b"[" * 9000 + b"]" * 9000 + b"}",
        b'{"response_format": ' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"}",
    ],
    ids=range(14),
)
def test_a_body_that_is_no_request_breaks_the_server(server: Running, body: bytes) -> None:
    with server.http() as http:
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            refusal(http.post(path, content=body, headers={"Content-Type": "application/json"}))


def test_a_body_beyond_the_limit_is_read(server: Running) -> None:
    with server.http() as http:
        assert refusal(http.post("/v1/completions", content=b"x" * 20_001), 413)["code"] == "body_too_large"

        def endless() -> Iterator[bytes]:
            for _ in range(30):
                yield b"x" * 1000

        assert refusal(http.post("/v1/completions", content=endless()), 413)["code"] == "body_too_large"
        assert http.get("/health").status_code == 200


# ------------------------------------------------------------------------------------------------ fuzzing

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.sampled_from([0, 1, -1, 2**31, 2**63, 10**40, -(10**40)])
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(st.characters(), max_size=8)
    | st.sampled_from(["\ud800", "\x00", "ﬀ", "a" * 3000, "user", "function", "none"])
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4), max_leaves=8
)
names = st.sampled_from(sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, "echo", "nonsense"} - {"max_tokens"}))
mild = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 3),
        "top_p": st.floats(0.01, 1),
        "logit_bias": st.dictionaries(st.integers(0, 266).map(str), st.floats(-1e6, 1e6), max_size=4),
        "allowed_token_ids": st.lists(st.integers(0, 266), min_size=1, max_size=3),
        "bad_words": st.lists(st.text("he l", min_size=1, max_size=3), max_size=3),
        "stop": st.lists(st.text(min_size=1, max_size=3), max_size=3),
        "min_tokens": st.integers(0, 2),
        "repetition_penalty": st.floats(0.01, 100),
        "n": st.integers(1, 3),
        "seed": st.integers(0, 2**63 - 1),
        "stream": st.booleans(),
        "logprobs": st.sampled_from([True, False, 3, 0]),
        "stop_token_ids": st.lists(st.integers(0, 300), max_size=3),
    },
)
FUZZ = settings(max_examples=40, suppress_health_check=list(HealthCheck))


def survives(server: Running, path: str, data: bytes) -> None:
    with server.http() as http:
        response = http.post(path, content=data, headers={"Content-Type": "application/json"})
    assert response.status_code < 500, (response.text, data)
    if response.status_code != 200:
        refusal(response, response.status_code)
    elif response.headers["content-type"].startswith("text/event-stream"):
        last = [line for line in response.text.splitlines() if line][-1]
        assert last == "data: [DONE]" or "server_error" not in last, last


@FUZZ
@given(st.dictionaries(names, values, max_size=5), mild, st.sampled_from(["/v1/chat/completions", "/v1/completions"]))
def test_a_fuzzed_field_breaks_the_server(server: Running, wild: dict[str, Any], mild: dict[str, Any], path: str) -> None:
    base = {"max_tokens": 2, "messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"max_tokens": 2, "prompt": "x"}
    survives(server, path, json.dumps({**base, **mild, **wild}).encode())
    survives(server, path, json.dumps({**base, **mild}).encode())


@FUZZ
@given(
    st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]),
    values.map(json.dumps).map(str.encode) | st.binary(max_size=40),
)
def test_a_fuzzed_body_breaks_the_server(server: Running, path: str, data: bytes) -> None:
    survives(server, path, data)


def test_a_request_made_from_our_own_description_breaks_the_server(server: Running) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    paths = []
    for result in schema.get_all_operations():
        operation = result.ok()
        paths.append(operation.path)

        @settings(max_examples=8, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy())
        def survive(case: Any) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("max_tokens"), int):
                case.body["max_tokens"] = min(case.body["max_tokens"], 8)
            response = case.call(timeout=60)
            case.validate_response(response, checks=(not_a_server_error,))

        survive()
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/models", "/v1/speculation"} <= set(paths)


def test_the_description_of_errors_is_another(server: Running) -> None:
    with server.http() as http:
        document = http.get("/openapi.json").json()
    responses = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {"200", "400", "401", "404", "413", "429", "503"} <= set(responses) and "422" not in responses
    assert document["components"]["schemas"]["ChatRequest"]["additionalProperties"] is False


# ------------------------------------------------------------------------------------------------ parts


def test_a_message_is_as_long_as_what_it_complains_of() -> None:
    assert len(Problem(400, "x" * 5000).body()["error"]["message"]) < 700


def test_a_validation_error_without_a_place_is_not_told() -> None:
    problem = problem_of_validation([{"loc": ("body",), "type": "model_attributes_type", "msg": "Input should be an object"}])
    assert problem.status == 400 and "JSON object" in problem.message


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"port": 70000}, "port must be from 0 to 65535"),
        ({"max_queue": -1}, "max_queue"),
        ({"max_choices": 65}, "from 1 to 64"),
        ({"request_timeout": 0.0}, "above 0"),
        ({"write_timeout": float("nan")}, "above 0"),
        ({"api_keys": ("",)}, "API key"),
        ({"api_keys": ("a b",)}, "API key"),
        ({"cors_origins": ("*", "http://a")}, "cors_origins"),
    ],
)
def test_a_wrong_setting_is_taken(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ServerConfig(**options)


def test_a_key_is_shown_by_the_config() -> None:
    assert "secret" not in repr(ServerConfig(api_keys=("secret",)))
