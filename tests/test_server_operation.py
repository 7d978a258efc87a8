"""A server at work: keys, limits, clients that leave or do not read, and its end."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from foredraft import cli
from foredraft.server import serve
from foredraft.server.gate import EventStream, Keys
from foredraft.server.problems import Problem
from foredraft.server.serve import JsonLines, Uncut, listen
from foredraft.server.service import Admission
from foredraft.server.settings import ServerConfig
from foredraft.types import ConfigError
from server_helpers import (
    PATIENCE,
    Running,
    ask,
    joined_chat,
    open_raw,
    open_tiny,
    paused,
    running,
    said,
    wait_for,
    write_tiny_model,
)

LONG = 900


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with running(open_tiny(model)) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# ------------------------------------------------------------------------------------------------ keys and tenants


def test_a_wrong_key_gets_in_or_tenants_share(model: Path) -> None:
    with running(open_tiny(model), api_keys=("first", "second")) as server, server.http() as http:
        for headers in (
            {},
            bearer("third"),
            {"Authorization": "Basic first"},
            bearer("firstsecond"),
            bearer("first\xff"),
        ):
            for path in ("/v1/models", "/metrics", "/v1/speculation", "/nothing"):
                response = http.get(path, headers=[(k.encode(), v.encode("latin-1")) for k, v in headers.items()])
                assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
            assert http.post("/v1/completions", headers={}, content=b"x" * 10_000_000).status_code == 401
        assert http.get("/health").status_code == http.get("/").status_code == 200
        assert http.get("/v1/models", headers=bearer("second")).status_code == 200
        body = ask("hello " * 30, temperature=0.0, max_tokens=40, speculation_statistics=True)
        body["speculative"] = {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False}
        first, again, other = (
            http.post("/v1/chat/completions", json=body, headers=bearer(key)).json() for key in ("first", "first", "second")
        )
        assert said(first) == said(again) == said(other)

        def shared(answer: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            stats = answer["foredraft"]["statistics"]
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"], {
                n: v for n, v in stats.items() if n.endswith("tokens")
            }

        assert shared(other) == shared(first)
        assert shared(again)[0] > shared(first)[0] == 0
        assert shared(again)[1]["accepted_tokens"] > shared(first)[1]["accepted_tokens"]


def test_a_key_is_compared_wrongly() -> None:
    keys = Keys(("one", "two"))
    tenants = {keys.tenant("Bearer one"), keys.tenant("bearer two")}
    assert None not in tenants and len(tenants) == 2 and not any("one" in (name or "") for name in tenants)
    assert [keys.tenant(text) for text in ("", "Bearer", "Bearer three", "one", "Token one")] == [None] * 5
    assert Keys(()).tenant("") == ""


def test_other_sites_may_ask_unasked(model: Path, server: Running) -> None:
    headers = {"Origin": "http://page.example"}
    with server.http() as http:
        assert "access-control-allow-origin" not in http.get("/health", headers=headers).headers
    with (
        running(open_tiny(model), cors_origins=("http://page.example",), api_keys=("key",)) as open_server,
        open_server.http() as http,
    ):
        ask_first = {**headers, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        assert http.options("/v1/completions", headers=ask_first).headers["access-control-allow-origin"] == "http://page.example"
        refused = http.get("/v1/models", headers=headers)
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "http://page.example"
        assert "access-control-allow-origin" not in http.get("/health", headers={"Origin": "http://other.example"}).headers


# ------------------------------------------------------------------------------------------------ clients that leave


def test_a_client_that_leaves_a_stream_is_written_for_on(server: Running) -> None:
    before, admission = server.llm.engine.metrics.finished["abort"], server.parts.service.admission
    body = ask(max_tokens=LONG, n=4, stream=True)
    with paused(server):
        with server.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            assert admission.num_open == 4
        wait_for(lambda: not admission.num_open)
    wait_for(server.is_idle)
    assert server.llm.engine.metrics.finished["abort"] == before + 4


@pytest.mark.parametrize("num_turns", range(8))
async def test_a_client_that_leaves_as_a_write_ends_is_written_for_on(num_turns: int) -> None:
    # The cancellation reaches the writer in every turn of the loop around the end of a write, that of its result included.
    has_left, closed = asyncio.Event(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            has_left.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)

    async def events() -> AsyncIterator[str]:
        yield "{}"
        await asyncio.Event().wait()

    async def close() -> None:
        closed.set()

    log: dict[str, Any] = {}
    stream = EventStream(events(), close, write_timeout=PATIENCE)
    await asyncio.wait_for(stream({"state": {"log": log}}, receive, send), 10.0)
    assert closed.is_set() and log["ended"] == "the client left"


def test_a_client_that_leaves_before_its_answer_is_written_for_on(server: Running) -> None:
    before, admission = server.llm.engine.metrics.finished["abort"], server.parts.service.admission
    with paused(server):
        connection = open_raw(server, ask(max_tokens=LONG, n=8))
        wait_for(lambda: admission.num_open == 8)
        connection.close()
        wait_for(lambda: not admission.num_open)
    wait_for(server.is_idle)
    assert server.llm.engine.metrics.finished["abort"] == before + 8


def test_a_slow_reader_holds_others_up_or_loses_text(server: Running) -> None:
    body = ask(max_tokens=LONG, n=4, stream=True, logprobs=True, top_logprobs=5)
    slow = open_raw(server, body, receive_buffer=4096)
    quick = server.post("/v1/chat/completions", ask())
    assert quick.status_code == 200
    data = b""
    while b"[DONE]" not in data[-200:]:
        part = slow.recv(65536)
        assert part, data[-500:]
        data += part
    slow.close()
    # Chunks of the transfer encoding are told apart by lines that do not begin with "data:".
    lines = [line[6:] for line in data.decode().splitlines() if line.startswith("data: {")]
    answer = said(server.post("/v1/chat/completions", {**body, "stream": False}).json())
    assert joined_chat([json.loads(line) for line in lines])["choices"] == answer["choices"]


def test_a_client_that_never_reads_keeps_its_place(model: Path) -> None:
    with running(open_tiny(model), write_timeout=0.2) as server:
        deaf = open_raw(server, ask(max_tokens=LONG, n=8, stream=True, logprobs=True, top_logprobs=20), receive_buffer=4096)
        wait_for(lambda: server.parts.service.admission.num_open == 8)
        wait_for(server.is_idle)
        assert server.post("/v1/chat/completions", ask()).status_code == 200
        deaf.close()


# ------------------------------------------------------------------------------------------------ limits


def test_more_than_the_queue_holds_is_taken(model: Path) -> None:
    with running(open_tiny(model, max_num_seqs=1), max_queue=1) as server, server.http() as http:
        body = ask(max_tokens=LONG, n=2, stream=True)
        with paused(server), http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            refused = server.post("/v1/chat/completions", ask(max_tokens=1))
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        wait_for(server.is_idle)
        assert server.post("/v1/chat/completions", ask(max_tokens=1)).status_code == 200
        never = server.post("/v1/chat/completions", ask(n=3))
        assert never.status_code == 429 and "2 may" in never.json()["error"]["message"]


def test_an_answer_takes_for_ever(model: Path) -> None:
    with running(open_tiny(model), request_timeout=0.3) as server:
        with paused(server):
            late = server.post("/v1/chat/completions", ask(max_tokens=LONG))
        assert late.status_code == 408 and late.json()["error"]["code"] == "request_timeout"
        wait_for(server.is_idle)
        with paused(server):
            lines = server.post("/v1/chat/completions", ask(max_tokens=LONG, stream=True)).text.split()
        assert "[DONE]" not in lines and "request_timeout" in lines[-1]
        wait_for(server.is_idle)


def test_a_body_comes_for_ever(model: Path) -> None:
    with running(open_tiny(model), body_timeout=0.1) as server:
        connection = open_raw(server, {})
        connection.close()
        with httpx.Client(timeout=PATIENCE) as http:
            gate = threading.Event()

            def stuck() -> Iterator[bytes]:
                yield b"{"
                gate.wait(2.0)
                yield b"}"

            try:
                response = http.post(f"{server.url}/v1/completions", content=stuck())
                assert response.status_code == 408
            except httpx.HTTPError:  # the server may have closed the connection while the rest was sent
                pass
            gate.set()
        assert server.post("/v1/chat/completions", ask(max_tokens=1)).status_code == 200


def test_a_failing_step_ends_the_server(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, failures = server.llm.target.forward, [RuntimeError("a broken pass")]

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        if failures:
            raise failures.pop()
        return forward(*args, **kwargs)

    monkeypatch.setattr(server.llm.target, "forward", fail_once)
    broken = server.post("/v1/chat/completions", ask())
    assert broken.status_code == 500 and broken.json()["error"]["code"] == "internal_error"
    assert "broken pass" not in broken.text
    assert server.post("/v1/chat/completions", ask()).status_code == 200


def test_places_are_lost_or_waited_for_too_long() -> None:
    admission = Admission(2, 1)
    admission.enter(2)
    admission.enter(1)
    with pytest.raises(Problem) as caught:
        admission.enter(1)
    assert caught.value.status == 429 and caught.value.retry_after == 2
    admission.leave(2, 1000.0)
    admission.enter(2)
    with pytest.raises(Problem) as caught:
        admission.enter(1)
    assert caught.value.retry_after == 30
    admission.is_draining = True
    with pytest.raises(Problem) as caught:
        admission.enter(1)
    assert caught.value.status == 503


# ------------------------------------------------------------------------------------------------ the end


def test_running_answers_are_cut_when_the_server_stops(model: Path) -> None:
    server = Running(open_tiny(model), ServerConfig(port=0, drain_timeout=PATIENCE)).start()
    body = ask(max_tokens=200)
    expected = said(server.post("/v1/chat/completions", body).json())
    with (
        paused(server) as pause,
        server.http() as http,
        http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response,
    ):
        lines = response.iter_lines()
        first = next(lines)
        server.server.drain()
        refused = server.post("/v1/chat/completions", ask())
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        with server.http() as other:
            assert other.get("/health").status_code == 503
        pause.end()
        rest = [first, *(line for line in lines if line)]
    assert rest[-1] == "data: [DONE]"
    assert joined_chat([json.loads(line[6:]) for line in rest[:-1]])["choices"] == expected["choices"]
    server.stop()
    assert not server.parts.engine.is_alive


def test_a_server_that_is_to_stop_waits_for_ever(model: Path) -> None:
    server = Running(open_tiny(model), ServerConfig(port=0, drain_timeout=0.05)).start()
    with (
        paused(server) as pause,
        server.http() as http,
        http.stream("POST", "/v1/chat/completions", json=ask(max_tokens=LONG, stream=True)) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        server.server.drain()
        wait_for(lambda: not server.parts.engine.is_alive)
        pause.end()
        last = [line for line in lines if line][-1]
    assert "closed before this request ended" in last
    server.stop()


def test_the_program_cannot_be_started_killed_started_and_stopped(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "foredraft", "serve", str(model), "--port", "0", "--kv-cache-memory", "4MB", "--threads", "1"]

    def start() -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("serving on "):
                return process, line.split()[2]
        raise AssertionError("it did not start")

    killed, _ = start()
    killed.kill()
    assert killed.wait(PATIENCE) == -9
    assert killed.stderr is not None
    killed.stderr.close()
    process, url = start()
    answer = httpx.post(f"{url}/v1/chat/completions", json=ask("a secret word", max_tokens=3), timeout=PATIENCE)
    assert answer.status_code == 200
    process.terminate()
    _, log = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, log
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    (line,) = [line for line in lines if line["event"] == "request"]
    assert (line["status"], line["completion_tokens"], line["path"]) == (200, 3, "/v1/chat/completions")
    assert "secret" not in log and "finishing 0 answers" in log


def test_answers_that_a_second_signal_cuts_fill_the_log() -> None:
    def record(error: BaseException | None) -> logging.LogRecord:
        info = (type(error), error, None) if error is not None else None
        return logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "Exception in ASGI application", (), info)

    assert [Uncut().filter(record(error)) for error in (None, ValueError(), asyncio.CancelledError())] == [True, True, False]


def test_a_taken_port_is_found_out_late() -> None:
    with listen(ServerConfig(port=0)) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="cannot listen on"):
            listen(ServerConfig(port=taken.getsockname()[1]))


# ------------------------------------------------------------------------------------------------ watching


def test_prompts_are_in_the_log_unasked(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    for log_prompts in (False, True):
        caplog.clear()
        with caplog.at_level(logging.INFO, "foredraft.server"), running(open_tiny(model), log_prompts=log_prompts) as server:
            text = server.post("/v1/chat/completions", ask("a secret word")).json()["choices"][0]["message"]["content"]
        # A line comes after its answer, so it is there for certain only when the server has ended.
        (line,) = [line for line in map(JsonLines().format, caplog.records) if json.loads(line)["event"] == "request"]
        assert ("a secret word" in line) == log_prompts
        assert json.loads(line).get("answers", [text] if not log_prompts else None) == [text]


def test_metrics_are_wrong(model: Path) -> None:
    with running(open_tiny(model)) as server, server.http() as http:
        body = ask("hello hello hello", temperature=0.0, n=2, speculation_statistics=True)
        body["speculative"] = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
        answer = http.post("/v1/chat/completions", json=body).json()
        stats = answer["foredraft"]["statistics"]
        text = http.get("/metrics").text
        state = http.get("/v1/speculation").json()

    def value(name: str, **labels: str) -> float:
        for line in text.splitlines():
            head, _, number = line.rpartition(" ")
            if head.partition("{")[0] == name and all(f'{label}="{wanted}"' in head for label, wanted in labels.items()):
                return float(number)
        raise AssertionError(f"no {name} {labels}")

    assert value("vllm:prompt_tokens_total") == answer["usage"]["prompt_tokens"]
    assert value("vllm:generation_tokens_total", model_name="tiny") == answer["usage"]["completion_tokens"] == 48
    assert value("vllm:request_success_total", finished_reason="length") == 2
    assert value("vllm:spec_decode_num_draft_tokens_total") == stats["drafted_tokens"] > 0
    assert value("vllm:spec_decode_num_accepted_tokens_total") == stats["accepted_tokens"]
    for position, accepted in enumerate(stats["accepted_per_position"]):
        assert value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(position)) == accepted
    assert 0 < value("vllm:spec_decode_num_drafts_total") <= stats["target_passes"]
    assert value("vllm:num_requests_running") == value("vllm:num_requests_waiting") == value("vllm:kv_cache_usage_perc") == 0
    assert value("vllm:time_to_first_token_seconds_count") == value("vllm:e2e_request_latency_seconds_count") == 1
    assert value("foredraft_drafted_tokens_total", drafter="ngram") == stats["drafted_tokens"]
    assert value("foredraft_http_responses_total", path="/v1/chat/completions", status="200") == 1
    for name in ("num_speculative_tokens", "speedup_estimate", "pass_milliseconds", "draft_milliseconds", "speculation_on"):
        assert value(f"foredraft_{name}") >= 0.0
    assert state["acceptance_per_position"] == [
        accepted / drafted for accepted, drafted in zip(stats["accepted_per_position"], stats["drafted_per_position"], strict=False)
    ]
    assert {"auto", "ngram", "none", "suffix"} <= set(state["methods"]) and "draft_model" not in state["methods"]
    assert state["default"]["method"] == "auto"
    assert (state["running"], state["waiting"], state["kv_usage"]) == (0, 0, 0.0)
    assert state["history"] and state["reason"].endswith(".") and state["exactness"] == "bitwise"


def test_the_live_state_is_blank_while_an_answer_is_written(server: Running) -> None:
    body = ask("hello hello", temperature=0.0, max_tokens=LONG, n=4, stream=True)
    body["speculative"] = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    states: list[dict[str, Any]] = []

    def look() -> None:
        with server.http() as other:
            states.append(other.get("/v1/speculation").json())

    with (
        paused(server, 60) as pause,
        server.http() as http,
        http.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        for _ in range(30):
            next(lines)
        looker = threading.Thread(target=look)
        looker.start()
        # The engine looks at questions between two passes.
        while looker.is_alive():
            pause.allow()
            looker.join(0.01)
    (state,) = states
    assert state["running"] == 4 and 0.0 < state["kv_usage"] <= 1.0 and state["k"] > 0.0 and state["pass_ms"] > 0.0
    assert (state["state"], state["drafter"]) == ("on", "ngram")
    assert state["tokens_per_second"] > 0.0 and state["history"][-1]["k"] > 0.0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "70000"], "port must be from 0 to 65535"),
        (["--max-choices", "0"], "max_choices must be from 1 to 64"),
        (["--api-key", "two words"], "API key"),
        (["--kv-cache-memory", "much"], "kv_cache_memory"),
        (["--host", "nowhere.invalid", "--port", "0"], "cannot listen on nowhere.invalid:0"),
    ],
)
def test_a_wrong_option_is_found_out_after_the_model_is_loaded(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "no-such-model.gguf", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_options_do_not_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[ServerConfig] = []
    monkeypatch.setattr(serve, "serve", lambda open_llm, config, tell: found.append(config))
    monkeypatch.setenv("FOREDRAFT_API_KEY", "first second")
    arguments = [
        "--cors-origin",
        "http://a",
        "--cors-origin",
        "http://b",
        "--max-queue",
        "3",
        "--log-prompts",
        "--drain-timeout",
        "7",
    ]
    assert cli.main(["serve", "m", *arguments]) == 0
    expected = ServerConfig(
        api_keys=("first", "second"), cors_origins=("http://a", "http://b"), max_queue=3, log_prompts=True, drain_timeout=7.0
    )
    assert found == [expected]
