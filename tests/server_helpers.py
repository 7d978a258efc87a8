"""A whole server in a thread, over a tiny random model that answers within milliseconds.

Owns: the model, the server's life, and how a stream is put together.  Does not know: any single test.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

import hf_weights
import loader_files
from foredraft import LLM
from foredraft.architecture import Architecture, LayerKind, Rope
from foredraft.server.serve import listen, make_server
from foredraft.server.settings import ServerConfig

MODEL = "tiny"
PATIENCE = 60.0
"""Seconds after which a test gives up; nothing takes so long."""
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "none": {"method": "none"},
    "auto": {"method": "auto"},
    "fixed": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False},
}
"""Speculation as a request may ask for it."""


def write_tiny_model(path: Path) -> Path:
    """A GGUF file of random weights with a byte-level tokenizer and a chat template."""
    kind = LayerKind(Rope(10000.0))
    architecture = Architecture(
        family="llama",
        vocab_size=len(loader_files.byte_level_tokens()),
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        layers=(kind,) * 2,
        tie_embeddings=True,
    )
    return loader_files.write_gguf(path, architecture, hf_weights.random_weights(architecture))


def open_tiny(path: Path, **options: Any) -> LLM:
    """The model of that file, with a small cache."""
    return LLM(str(path), **{"device": "cpu", "threads": 1, "kv_cache_memory": 4_000_000, "max_num_seqs": 8, **options})


@dataclass
class Running:
    """A server that listens on this machine; ``told`` is what it would print."""

    llm: LLM
    config: ServerConfig
    told: list[str] = field(default_factory=list)

    def start(self) -> Running:
        listener = listen(self.config)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = make_server(self.llm, self.config, self.told.append)
        self.parts = self.server.parts
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([listener])), daemon=True)
        self.thread.start()
        wait_for(lambda: self.server.started)
        return self

    def stop(self) -> None:
        if self.thread.is_alive():
            self.server.drain()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "the server does not end"

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE, **options)

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.http() as http:
            return http.post(path, json=body, **options)

    def is_idle(self) -> bool:
        """Whether nothing runs, and nothing is held; looked up between two steps, since within one anything may be the case."""

        def free(llm: LLM) -> bool:
            return not llm.engine.has_work and llm.kv.num_available == llm.kv.num_blocks

        # In a thread of its own, for callers whose thread runs a loop already.
        with ThreadPoolExecutor(1) as pool:
            is_free = pool.submit(asyncio.run, self.parts.engine.ask(free)).result()
        return is_free and not self.parts.service.admission.num_open


@contextmanager
def running(llm: LLM, **settings: Any) -> Iterator[Running]:
    """A server for the duration of a block; its cache must be free in the end."""
    server = Running(llm, ServerConfig(port=0, served_model_name=MODEL, **{"drain_timeout": PATIENCE, **settings})).start()
    try:
        yield server
        wait_for(server.is_idle)
    finally:
        server.stop()


class Pause:
    """Lets the engine make ``num_passes`` passes, and then only as many as are allowed."""

    def __init__(self, num_passes: int) -> None:
        self._permits = threading.Semaphore(num_passes)
        self._is_over = False

    def allow(self, num_passes: int = 1) -> None:
        """Let it go on for so long."""
        self._permits.release(num_passes)

    def end(self) -> None:
        """Let it go on."""
        self._is_over = True
        self._permits.release()

    def before_pass(self) -> None:
        if not self._is_over:
            assert self._permits.acquire(timeout=PATIENCE), "nobody lets the engine go on"


@contextmanager
def paused(server: Running, num_passes: int = 2) -> Iterator[Pause]:
    """So that an answer cannot be finished before something else has happened."""
    pause, forward = Pause(num_passes), server.llm.target.forward

    def wait(*args: Any, **kwargs: Any) -> Any:
        pause.before_pass()
        return forward(*args, **kwargs)

    server.llm.target.forward = wait  # type: ignore[method-assign]
    try:
        yield pause
    finally:
        pause.end()
        server.llm.target.forward = forward  # type: ignore[method-assign]


def wait_for(holds: Callable[[], bool]) -> None:
    """Until ``holds``; an assertion after a long time."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


# ------------------------------------------------------------------------------------------------ streams


def read_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream that ended with [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]", lines[-1]
    return [json.loads(line) for line in lines[:-1]]


def joined_chat(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a stream of chat chunks says, in the shape of ``said``."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "logprobs": [], "finish_reason": None})
            assert choice["finish_reason"] is None, "a chunk after the last"
            choice["text"] += part["delta"].get("content") or ""
            choice["logprobs"] += (part["logprobs"] or {"content": []})["content"]
            choice["finish_reason"] = part["finish_reason"]
    return {"choices": [choices[index] for index in sorted(choices)], "usage": _counts(usage)}


def said(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What a whole chat answer says, without its name and time."""
    choices = [
        {
            "text": choice["message"]["content"] or "",
            "logprobs": (choice["logprobs"] or {"content": []})["content"],
            "finish_reason": choice["finish_reason"],
        }
        for choice in answer["choices"]
    ]
    return {"choices": choices, "usage": _counts(answer["usage"])}


def _counts(usage: Mapping[str, Any] | None) -> dict[str, int] | None:
    """Without what depends on earlier requests."""
    return usage and {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def open_raw(server: Running, body: Mapping[str, Any], receive_buffer: int | None = None) -> socket.socket:
    """A connection that has sent a chat request and read nothing."""
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(PATIENCE)
    connection.connect(("127.0.0.1", server.port))
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    )
    connection.sendall("\r\n".join((*head, "", "")).encode() + data)
    return connection


def ask(text: str = "hello", **options: Any) -> dict[str, Any]:
    """The body of a chat request."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "seed": 5, "ignore_eos": True, **options}
