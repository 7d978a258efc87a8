"""Time llama.cpp's server and ``foredraft serve`` in turn on the same GGUF file, at several numbers of clients.

Usage: ``python scripts/compare_servers.py LLAMA_SERVER MODEL.gguf [--clients 1,4,16] [--rounds N] [--threads N] [--json FILE]``.
LLAMA_SERVER is the program llama-server.  Run it on an idle machine.

Both servers run at once, but only one is asked at a time; a round asks both at each number of clients, one after the other, so that
a drift of the machine's speed cancels.  Each client asks its questions one after the other, greedily, for a fixed number of tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from foredraft import __version__
from foredraft.bench_table import aligned
from foredraft.machine import describe_machine
from foredraft.native import num_default_threads

QUESTIONS = (
    "Why is the sky blue?",
    "Write the numbers from one to forty.",
    "Repeat this word for word, three times: the early bird catches the worm, but the second mouse gets the cheese.",
    "Write a Python function that adds two numbers, with tests.",
    "List twenty fruits.",
    "Write a short story about a lighthouse keeper.",
    "Explain photosynthesis to a child.",
    "Write a polite letter that declines an invitation.",
)
START_SECONDS = 120.0


@dataclass(frozen=True)
class Measured:
    """One server at one number of clients: ``latencies`` of its requests in seconds, and all tokens over all time."""

    tokens_per_second: float
    latencies: list[float]

    @property
    def p95(self) -> float:
        """Latency that 95 % of the requests stay below, in seconds."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def started(command: Sequence[str], port: int, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """The address of a server that has loaded its model; it is stopped in the end."""
    env = {**os.environ, **(environment or {})}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _is_healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command[0]} does not serve (exit code {process.poll()})")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


def llama_command(program: str, model: Path, port: int, threads: int, clients: int, context: int) -> list[str]:
    """llama-server with a place for every client; ``context`` is shared among them."""
    sizes = ["-c", str(context * clients), "-np", str(clients), "-t", str(threads)]
    return [program, "-m", str(model), "--host", "127.0.0.1", "--port", str(port), *sizes]


def own_command(model: Path, port: int, threads: int, clients: int, context: int) -> list[str]:
    """``foredraft serve`` with the same sizes and default settings."""
    sizes = ["--max-model-len", str(context), "--max-num-seqs", str(clients), "--threads", str(threads)]
    return [sys.executable, "-m", "foredraft", "serve", str(model), "--port", str(port), *sizes]


async def ask(http: httpx.AsyncClient, question: str, max_tokens: int) -> tuple[float, int]:
    """(seconds, tokens) of one answer."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    start = time.perf_counter()
    response = await http.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    return time.perf_counter() - start, int(response.json()["usage"]["completion_tokens"])


async def measure(url: str, num_clients: int, num_questions: int, max_tokens: int) -> Measured:
    """``num_clients`` clients, each with ``num_questions`` questions."""
    async with httpx.AsyncClient(base_url=url, timeout=600.0, limits=httpx.Limits(max_connections=num_clients)) as http:

        async def client(index: int) -> list[tuple[float, int]]:
            questions = [QUESTIONS[(index + i) % len(QUESTIONS)] for i in range(num_questions)]
            return [await ask(http, question, max_tokens) for question in questions]

        start = time.perf_counter()
        answers = [answer for answers in await asyncio.gather(*map(client, range(num_clients))) for answer in answers]
        seconds = time.perf_counter() - start
    return Measured(sum(tokens for _, tokens in answers) / seconds, [latency for latency, _ in answers])


def compare(urls: Mapping[str, str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Per number of clients: each server's rounds."""
    found: dict[int, dict[str, list[Measured]]] = {num: {name: [] for name in urls} for num in options.clients}
    for url in urls.values():
        asyncio.run(measure(url, 1, 1, 8))  # the first request of all warms up
    for number in range(options.rounds):
        for num, servers in found.items():
            order = list(urls) if number % 2 else list(urls)[::-1]
            for name in order:
                servers[name].append(asyncio.run(measure(urls[name], num, options.questions, options.max_tokens)))
                print(
                    f"round {number + 1}, {num} clients, {name}: {servers[name][-1].tokens_per_second:.1f} tok/s", file=sys.stderr
                )
    return [{"clients": num, **{name: summary(rounds) for name, rounds in servers.items()}} for num, servers in found.items()]


def summary(rounds: Sequence[Measured]) -> dict[str, Any]:
    """Medians over the rounds, and every round's figure."""
    rates = [one.tokens_per_second for one in rounds]
    latencies = [latency for one in rounds for latency in one.latencies]
    return {
        "tokens_per_second": round(statistics.median(rates), 2),
        "p95_seconds": round(Measured(0.0, latencies).p95, 3),
        "rounds": [round(rate, 2) for rate in rates],
    }


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """For people."""
    rows: list[tuple[str, ...]] = [("clients", "llama.cpp tok/s", "foredraft tok/s", "ratio", "llama.cpp p95 s", "foredraft p95 s")]
    for one in results:
        theirs, ours = one["llama.cpp"], one["foredraft"]
        ratio = ours["tokens_per_second"] / theirs["tokens_per_second"]
        numbers = [theirs["tokens_per_second"], ours["tokens_per_second"], ratio, theirs["p95_seconds"], ours["p95_seconds"]]
        rows.append((str(one["clients"]), *(f"{number:.2f}" for number in numbers)))
    return aligned(rows, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("llama_server")
    parser.add_argument("model", type=Path)
    parser.add_argument("--clients", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--questions", type=int, default=2, help="of each client in a round")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=num_default_threads())
    parser.add_argument("--peer-version", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    most, ports = max(options.clients), (free_port(), free_port())
    libraries = {"LD_LIBRARY_PATH": str(Path(options.llama_server).resolve().parent)}
    theirs = llama_command(options.llama_server, options.model, ports[0], options.threads, most, options.context)
    ours = own_command(options.model, ports[1], options.threads, most, options.context)
    with started(theirs, ports[0], libraries) as their_url, started(ours, ports[1]) as our_url:
        results = compare({"llama.cpp": their_url, "foredraft": our_url}, options)
    print(table(results))
    if options.json is not None:
        settings = {
            name: getattr(options, name) for name in ("rounds", "questions", "max_tokens", "context", "threads", "peer_version")
        }
        found = {"machine": describe_machine(), "version": __version__, "model": options.model.name, **settings, "results": results}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
