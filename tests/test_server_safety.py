"""What a request may not do to a server: hold it up, reach it from another site, or escape its log and its counts."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from foredraft import SamplingParams
from foredraft.server.gate import Gate, Hosts
from foredraft.server.problems import Problem
from foredraft.server.protocol import Body, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from foredraft.server.serve import JsonLines
from foredraft.server.settings import ServerConfig
from server_helpers import MODEL, PATIENCE, Running, ask, open_tiny, running, write_tiny_model

MANY = 1000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with running(open_tiny(model)) as server:
        yield server


def request_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """What the log says of requests; complete only when the server has ended."""
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    return [line for line in lines if line["event"] == "request"]


# ------------------------------------------------------------------------------------------------ bodies

WRONG_CALL = {"id": 1, "type": "function", "function": {"name": "f", "arguments": "{}"}}
LISTS: list[tuple[type[Body], dict[str, Any], str]] = [
    (CompletionRequest, {"prompt": [{}] * MANY}, "prompt"),
    (CompletionRequest, {"prompt": ["x", *[1] * MANY]}, "prompt"),
    (CompletionRequest, {"prompt": [["x"] * MANY]}, "prompt"),
    (TokenizeRequest, {"messages": [0] * MANY}, "messages"),
    (DetokenizeRequest, {"tokens": ["x"] * MANY}, "tokens"),
    (ChatRequest, {"messages": [0] * MANY}, "messages"),
    (ChatRequest, {"messages": [{"role": "user", "content": [0] * MANY}]}, "messages"),
    (ChatRequest, {"messages": [{"role": "user", "tool_calls": [WRONG_CALL] * MANY}]}, "messages"),
    *((ChatRequest, ask(**{name: [0.5] * MANY}), name) for name in ("tools", "stop", "stop_token_ids", "allowed_token_ids")),
    *((ChatRequest, ask(**{name: [0] * MANY}), name) for name in ("bad_words", "guided_choice")),
    (ChatRequest, ask(structured_outputs={"choice": [0] * MANY}), "structured_outputs"),
    (ChatRequest, ask(logit_bias={str(i): "" for i in range(MANY)}), "logit_bias"),
    (ChatRequest, ask(logit_bias={str(i): float("inf") for i in range(MANY)}), "logit_bias"),
]


@pytest.mark.parametrize(("kind", "body", "name"), LISTS, ids=[f"{name}-{i}" for i, (_, _, name) in enumerate(LISTS)])
def test_every_wrong_item_of_a_list_is_told(kind: type[Body], body: dict[str, Any], name: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    # A prompt has four forms, and one error of each.
    assert 1 <= caught.value.error_count() <= 4
    assert {error["loc"][0] for error in caught.value.errors()} == {name}


def test_a_long_unknown_name_is_compared_with_all_others() -> None:
    with pytest.raises(ValidationError, match="unknown field") as caught:
        ChatRequest.model_validate(ask(**{"temperature" * MANY: 1}))
    assert len(str(caught.value.errors()[0]["msg"])) < MANY


def test_a_right_bias_is_lost() -> None:
    bias = {"1": 2, "2": -0.5, "3": 1e300}
    assert ChatRequest.model_validate(ask(logit_bias=bias)).logit_bias == bias


def test_strings_of_tokens_are_made_in_the_event_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, threads = server.parts.tokenizer.decode, set()

    def note(*args: Any) -> str:
        threads.add(threading.current_thread())
        return decode(*args)

    monkeypatch.setattr(server.parts.tokenizer, "decode", note)
    found = server.post("/tokenize", {"prompt": "hello", "return_token_strs": True, "add_special_tokens": False}).json()
    assert "".join(found["token_strs"]) == "hello"
    assert threads and server.thread not in threads


@pytest.mark.parametrize(
    ("prompt", "says"), [([[5], [5, 10**6]], "prompt token ids must be from 0"), ([5] * 5000, "at most 1023 tokens")]
)
def test_a_reply_reads_a_prompt_that_the_engine_refuses(server: Running, prompt: Any, says: str) -> None:
    with pytest.raises(Problem, match=says) as caught:
        server.parts.jobs.completion(CompletionRequest(prompt=prompt))
    assert caught.value.status == 400
    refused = server.post("/v1/completions", {"prompt": prompt})
    assert refused.status_code == 400 and says in refused.json()["error"]["message"]


@pytest.mark.parametrize(("prompt", "param"), [(["a", "b"], "prompt"), ("a", "n")])
def test_a_number_too_long_to_be_written_breaks_the_server(server: Running, prompt: Any, param: str) -> None:
    response = server.post("/v1/completions", {"prompt": prompt, "n": int("9" * 4300)})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and "one request may have 16" in error["message"] and len(error["message"]) < 300


# ------------------------------------------------------------------------------------------------ other sites

OURS = ("localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:8000", "localhost:")
OTHERS = (
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "10.0.0.1",
    "",
    ":8000",
    "::1",
    "\xff",
)


def test_a_name_of_another_site_reaches_a_server_without_keys(server: Running) -> None:
    with server.http() as http:
        for path in ("/", "/health", "/v1/models", "/nothing"):
            for name in OTHERS[:5]:
                refused = http.get(path, headers={"Host": name})
                assert refused.status_code == 403 and refused.json()["error"]["code"] == "wrong_host", (path, name)
                assert "x-request-id" in refused.headers and repr(name) in refused.json()["error"]["message"]
        for name in OURS:
            assert http.get("/v1/models", headers={"Host": name}).status_code == 200, name
        assert http.post("/v1/chat/completions", json=ask(), headers={"Host": "evil.example"}).status_code == 403


def test_a_host_is_read_wrongly() -> None:
    hosts = Hosts(ServerConfig())
    for name in OTHERS:
        with pytest.raises(Problem) as caught:
            hosts.check(name.encode("latin-1"))
        assert caught.value.status == 403
    for name in OURS:
        hosts.check(name.encode())
    Hosts(ServerConfig(host="127.0.0.2")).check(b"127.0.0.2:8000")
    with pytest.raises(Problem):
        hosts.check(b"127.0.0.2:8000")


@pytest.mark.parametrize("settings", [{"api_keys": ("key",)}, {"host": "0.0.0.0"}, {"host": "::"}, {"host": "server.example"}])
def test_a_server_with_keys_or_for_others_must_be_asked_by_a_local_name(settings: dict[str, Any]) -> None:
    Hosts(ServerConfig(**settings)).check(b"server.example")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "Localhost"])
def test_a_local_server_is_taken_for_a_public_one(host: str) -> None:
    assert ServerConfig(host=host).is_local
    assert not any(ServerConfig(host=other).is_local for other in ("0.0.0.0", "::", "", "10.0.0.1", "localhost.example"))


def test_an_old_client_without_a_host_is_refused(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert connection.recv(4096).split(b"\r\n")[0].split()[1] == b"200"


# ------------------------------------------------------------------------------------------------ failures


def test_a_failure_is_counted_and_logged_as_status_0(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(llm: Any) -> Any:
        raise RuntimeError("a broken monitor")

    origin = "http://page.example"
    with caplog.at_level(logging.INFO, "foredraft.server"), running(open_tiny(model), cors_origins=(origin,)) as server:
        monkeypatch.setattr(server.parts.monitor, "state", fail)
        with server.http() as http:
            response = http.get("/v1/speculation", headers={"Origin": origin})
    # Counted and logged after the answer, so for certain only when the server has ended.
    labels = {"model_name": MODEL, "path": "/v1/speculation", "status": "500"}
    assert server.parts.metrics.registry.get_sample_value("foredraft_http_responses_total", labels) == 1.0
    assert response.status_code == 500 and response.json()["error"]["code"] == "internal_error"
    assert "broken monitor" not in response.text and "a broken monitor" in caplog.text
    assert response.headers["access-control-allow-origin"] == origin
    (line,) = request_lines(caplog)
    assert line["status"] == 500 and response.headers["x-request-id"] == line["request_id"]


async def test_a_failure_within_an_answer_begins_a_second_one() -> None:
    sent, counted = [], []

    async def break_off(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("broken off")

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    gate = Gate(break_off, ServerConfig(), lambda path, status: counted.append(status))
    with pytest.raises(RuntimeError, match="broken off"):
        await gate({"type": "http", "method": "GET", "path": "/", "headers": []}, receive, send)
    assert sent == ["http.response.start"] and counted == [200]


# ------------------------------------------------------------------------------------------------ log and counts


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_streamed_answer_is_missing_in_the_log(model: Path, path: str, caplog: pytest.LogCaptureFixture) -> None:
    options = {"n": 2, "max_tokens": 12, "seed": 5, "ignore_eos": True}
    body = {**options, "prompt": ["one", "two"]} if path == "/v1/completions" else ask(**options)
    for log_prompts in (True, False):
        caplog.clear()
        with caplog.at_level(logging.INFO, "foredraft.server"), running(open_tiny(model), log_prompts=log_prompts) as server:
            for stream in (False, True):
                assert server.post(path, {**body, "stream": stream}).status_code == 200
        whole, streamed = request_lines(caplog)
        assert ("answers" in whole) == ("answers" in streamed) == log_prompts
        assert whole.get("answers") == streamed.get("answers")
        if log_prompts:
            assert len(whole["answers"]) == (4 if "prompt" in body else 2) and all(whole["answers"])


@pytest.mark.parametrize("stream", [False, True])
def test_answers_to_several_prompts_count_as_equally_long(model: Path, stream: bool) -> None:
    llm = open_tiny(model)
    given = {"temperature": 1.0, "seed": 4, "max_tokens": 12, "ignore_eos": True}
    prompts = ["hello", "one 12"]
    short, long = (output.outputs[0].token_ids for output in llm.generate(prompts, SamplingParams(**given)))
    end = next(token for token in short[:3] if token not in long)
    with running(llm) as server:
        body = {**given, "prompt": prompts, "stop_token_ids": [end], "stream": stream}
        assert server.post("/v1/completions", body).status_code == 200

        def num_up_to(tokens: float) -> float | None:
            labels = {"model_name": MODEL, "le": str(tokens)}
            return server.parts.metrics.registry.get_sample_value("vllm:request_generation_tokens_bucket", labels)

        assert (num_up_to(4.0), num_up_to(16.0)) == (1.0, 2.0)
