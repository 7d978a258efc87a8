"""Many clients at once against one server: some cancel, some vanish, some read slowly, and every answer is checked.

Usage: ``python scripts/load_test.py [MODEL] [--clients N] [--seconds S] [--seed N] [--json FILE]``.  It starts the server itself,
after it has worked out all answers by plain decoding alone.

Reports the time to the first token and per output token (of readers who do not dawdle) and memory over time.  Fails if an answer is
lost or is another, if a block of the KV cache is not given back, or if memory grew by more than 5 %.  In the end a server is killed
outright and started anew; fails if it takes more than 10 s to serve again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from foredraft import LLM, SamplingParams, __version__
from foredraft.machine import describe_machine

QUESTIONS = (
    "Why is the sky blue?",
    "Write the numbers from one to thirty.",
    "Repeat word for word: the early bird catches the worm, but the second mouse gets the cheese.",
    "Write a Python function that adds two numbers.",
    "List ten fruits.",
    "Write a short story about a lighthouse keeper.",
    "Explain photosynthesis to a child.",
    "Write a polite letter that declines an invitation.",
)
# How a client behaves, and how often.
BEHAVIOURS: Mapping[str, float] = {"read": 0.6, "slow": 0.15, "cancel": 0.15, "vanish": 0.1}
MEMORY_SECONDS, MAX_GROWTH, MAX_RESTART_SECONDS = 2.0, 0.05, 10.0
PERCENTILES = (50, 95, 99)
Body = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A request and the only right answer to it."""

    body: Body
    text: str
    num_tokens: int
    finish_reason: str


@dataclass
class Load:
    """What came of it."""

    outcomes: Counter[str] = field(default_factory=Counter)
    first_token_ms: list[float] = field(default_factory=list)
    per_token_ms: list[float] = field(default_factory=list)
    num_tokens: int = 0
    wrong: list[str] = field(default_factory=list)

    def fail(self, what: str) -> None:
        """Note a failure."""
        self.outcomes["wrong"] += 1
        self.wrong.append(what)


def bodies(seed: int, num: int, max_tokens: int) -> list[Body]:
    """Different requests: greedy and sampled, short and long, each with its own way of drafting."""
    rng = random.Random(seed)
    ways = ({"method": "auto"}, {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False}, {"method": "none"})
    return [
        {
            "messages": [{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}],
            "max_tokens": rng.randrange(max_tokens // 4, max_tokens + 1),
            "temperature": (0.0, 0.7, 1.0)[i % 3],
            "seed": rng.randrange(2**31),
            "speculative": ways[i % 2] if i % 5 else ways[2],
        }
        for i in range(num)
    ]


def solve(llm: LLM, requests: Sequence[Body]) -> list[Case]:
    """Each request decoded alone, without drafts."""
    cases = []
    for body in requests:
        options = {name: body[name] for name in ("max_tokens", "temperature", "seed")}
        params = SamplingParams(**options, speculative={"method": "none"})
        (answer,) = llm.chat(body["messages"], params)[0].outputs
        cases.append(Case(body, answer.text, len(answer.token_ids), str(answer.finish_reason)))
    return cases


class Client:
    """One of many: asks, reads in its own way, and checks."""

    def __init__(self, http: httpx.AsyncClient, cases: Sequence[Case], load: Load, rng: random.Random) -> None:
        self._http, self._cases, self._load, self._rng = http, cases, load, rng

    async def run(self, deadline: float) -> None:
        """Ask until the time is over."""
        while time.monotonic() < deadline:
            case = self._rng.choice(self._cases)
            (behaviour,) = self._rng.choices(list(BEHAVIOURS), weights=list(BEHAVIOURS.values()))
            try:
                await self.ask(case, behaviour)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self._load.fail(f"{behaviour}: {type(error).__name__}: {error}")

    async def ask(self, case: Case, behaviour: str) -> None:
        """One request."""
        leaves_after = self._rng.randrange(1, 12) if behaviour in ("cancel", "vanish") else 10**9
        body = {**case.body, "stream": True, "stream_options": {"include_usage": True}}
        start = time.perf_counter()
        text, reason, usage, first, last, num_events = "", None, None, 0.0, 0.0, 0
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code in (429, 503):
                self._load.outcomes[f"refused with {response.status_code}"] += 1
                await asyncio.sleep(0.05)
                return
            if response.status_code != 200:
                raise ValueError(f"status {response.status_code}: {(await response.aread())[:200]!r}")
            if behaviour == "vanish" and self._rng.random() < 0.5:
                self._load.outcomes["vanish"] += 1
                return
            async for line in response.aiter_lines():
                if not line or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise ValueError(str(chunk["error"]))
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    if choice["delta"].get("content"):
                        last = time.perf_counter()
                        first = first or last
                    text += choice["delta"].get("content") or ""
                    reason = choice["finish_reason"] or reason
                num_events += 1
                if num_events >= leaves_after:
                    break
                if behaviour == "slow":
                    await asyncio.sleep(self._rng.uniform(0.0, 0.05))
        self._check(case, behaviour, text, reason, usage)
        if behaviour == "read" and usage and first:
            self._load.first_token_ms.append(1e3 * (first - start))
            if usage["completion_tokens"] > 1:
                self._load.per_token_ms.append(1e3 * (last - first) / (usage["completion_tokens"] - 1))

    def _check(self, case: Case, behaviour: str, text: str, reason: str | None, usage: Mapping[str, int] | None) -> None:
        if reason is None and behaviour in ("cancel", "vanish"):
            if not case.text.startswith(text):
                self._load.fail(f"{behaviour}: {text!r} does not begin {case.text!r}")
        elif usage is None or (text, reason, usage["completion_tokens"]) != (case.text, case.finish_reason, case.num_tokens):
            if usage is not None or behaviour not in ("cancel", "vanish"):
                self._load.fail(f"{behaviour}: {text!r} ({reason}, {usage}) instead of {case.text!r} ({case.finish_reason})")
        else:
            self._load.num_tokens += case.num_tokens
        self._load.outcomes[behaviour] += 1


async def press(url: str, cases: Sequence[Case], num_clients: int, seconds: float, seed: int) -> Load:
    """``num_clients`` clients for so long; then wait until the server is idle again."""
    load = Load()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=num_clients)
    async with httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits) as http:
        deadline = time.monotonic() + seconds
        await asyncio.gather(*(Client(http, cases, load, random.Random(seed + i)).run(deadline) for i in range(num_clients)))
        for _ in range(300):
            state = (await http.get("/v1/speculation")).json()
            if not (state["running"] or state["waiting"] or state["kv_usage"]):
                return load
            await asyncio.sleep(0.1)
    load.fail(f"the server is not idle in the end: {state['running']} running, KV cache {state['kv_usage']:.1%} in use")
    return load


# ------------------------------------------------------------------------------------------------ memory and report


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


async def watch_memory(pid: int) -> list[int]:
    """Resident memory every so often, until cancelled."""
    samples: list[int] = []
    try:
        while True:
            samples.append(resident_bytes(pid))
            await asyncio.sleep(MEMORY_SECONDS)
    except asyncio.CancelledError:
        return samples


def growth(samples: Sequence[int]) -> float:
    """How much larger the last fifth of the samples is than the second; the first is the warm-up."""
    part = max(1, len(samples) // 5)
    early, late = samples[part : 2 * part] or samples[:1], samples[-part:]
    return statistics.median(late) / statistics.median(early) - 1.0


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99."""
    ordered = sorted(values)
    return {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in PERCENTILES} if ordered else {}


def report(load: Load, seconds: float, samples: Sequence[int]) -> dict[str, Any]:
    """Plain data."""
    return {
        "outcomes": dict(load.outcomes),
        "seconds": round(seconds, 1),
        "tokens_per_second": round(load.num_tokens / seconds, 1),
        "first_token_ms": {name: round(value, 1) for name, value in percentiles(load.first_token_ms).items()},
        "per_token_ms": {name: round(value, 2) for name, value in percentiles(load.per_token_ms).items()},
        "resident_mb": [round(value / 1e6, 1) for value in samples],
        "growth": round(growth(samples), 4) if samples else None,
        "wrong": load.wrong[:20],
    }


def start_server(arguments: Sequence[str]) -> tuple[subprocess.Popen[str], str]:
    """(the process, its address) of a server that serves."""
    command = [sys.executable, "-m", "foredraft", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("serving on "):
            return process, line.split()[2]
    raise SystemExit(f"the server ended with {process.wait()} before it served")


def kill(process: subprocess.Popen[str]) -> None:
    """End a server without telling it."""
    assert process.stderr is not None
    process.kill()
    process.wait(60)
    process.stderr.close()


def seconds_to_restart(arguments: Sequence[str]) -> float:
    """How long it takes from killing a server outright until the next one serves."""
    first, _ = start_server(arguments)
    start = time.perf_counter()
    kill(first)
    second, _ = start_server(arguments)
    seconds = time.perf_counter() - start
    kill(second)
    return seconds


async def press_and_watch(url: str, pid: int, cases: Sequence[Case], options: argparse.Namespace) -> dict[str, Any]:
    """The whole run against a server that runs."""
    watching = asyncio.ensure_future(watch_memory(pid))
    start = time.perf_counter()
    load = await press(url, cases, options.clients, options.seconds, options.seed)
    seconds = time.perf_counter() - start
    watching.cancel()
    return report(load, seconds, await watching)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--requests", type=int, default=48, help="different requests")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    llm = LLM(options.model, device="cpu", max_model_len=1024, kv_cache_memory=64_000_000, speculative_config={"method": "none"})
    cases = solve(llm, bodies(options.seed, options.requests, options.max_tokens))
    del llm
    # The shared statistics fill up to their limit; a small one is reached while the clients warm up.
    drafts = json.dumps({"method": "auto", "suffix_decoding_max_bytes": 8_000_000})
    limits = ["--max-model-len", "1024", "--kv-cache-memory", "128MB", "--max-queue", "64", "--speculative-config", drafts]
    served = [options.model, *limits]
    process, url = start_server(served)
    assert process.stderr is not None
    # The log has to be read, or the pipe fills up and the server waits.
    drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
    try:
        found = asyncio.run(press_and_watch(url, process.pid, cases, options))
    finally:
        process.terminate()
        code = process.wait(60)
        process.stderr.close()
        drain.wait(60)
    found = {
        "machine": describe_machine(),
        "version": __version__,
        "model": options.model,
        "clients": options.clients,
        "different_requests": options.requests,
        "exit_code": code,
        "restart_seconds": round(seconds_to_restart(served), 2),
        **found,
    }
    print(json.dumps({name: value for name, value in found.items() if name != "resident_mb"}, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    is_slow, has_grown = found["restart_seconds"] > MAX_RESTART_SECONDS, (found["growth"] or 0.0) > MAX_GROWTH
    return int(bool(found["wrong"]) or code != 0 or is_slow or has_grown)


if __name__ == "__main__":
    sys.exit(main())
