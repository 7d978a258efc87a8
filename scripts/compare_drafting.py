"""Time foredraft with ``auto`` beside llama.cpp's server with each of its settings, on the same file and prompts, group by group.

Usage: ``python scripts/compare_drafting.py LLAMA_SERVER MODEL.gguf [--dataset FILE] [--limit N] [--json FILE]``.
LLAMA_SERVER is the program llama-server.  Run it on an idle machine.

All servers run at once, but only one is asked at a time: each prompt goes to every setting, in turn, so that a drift of the
machine's speed cancels.  Both sides get the same token ids and decode greedily; reading the prompt is not counted.  foredraft is
one engine that lives through all prompts and meets each of them once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from compare_servers import free_port, llama_command, started
from foredraft import LLM, SamplingParams, __version__
from foredraft.bench_table import aligned
from foredraft.machine import describe_machine
from foredraft.native import num_default_threads
from never_backfires import group_prompts

PLAIN, AUTO = "foredraft plain", "foredraft auto"
# llama.cpp's ways to draft without a second model: as they come, and with sizes that suit answers of some hundred tokens.
SHORT = ("3", "4")
PEERS: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "ngram-simple": ("--spec-type", "ngram-simple"),
    "ngram-simple 3/4": (
        *("--spec-type", "ngram-simple"),
        *("--spec-ngram-simple-size-n", SHORT[0], "--spec-ngram-simple-size-m", SHORT[1]),
    ),
    "ngram-map-k 3/4": (
        *("--spec-type", "ngram-map-k"),
        *("--spec-ngram-map-k-size-n", SHORT[0], "--spec-ngram-map-k-size-m", SHORT[1]),
    ),
    "ngram-mod": ("--spec-type", "ngram-mod"),
    "ngram-cache": ("--spec-type", "ngram-cache"),
}
CONTEXT = 4096


@dataclass(frozen=True)
class Answer:
    """Tokens of an answer, seconds from its first token to its last, and target passes where they are known."""

    num_tokens: int
    seconds: float
    passes: int = 0


Ask = Callable[[list[int], int], Answer]
Answers = dict[str, dict[str, list[Answer]]]


def peer(url: str) -> Ask:
    """Asks a server of llama.cpp."""

    def ask(tokens: list[int], max_tokens: int) -> Answer:
        body = {"prompt": tokens, "n_predict": max_tokens, "temperature": 0, "cache_prompt": False}
        response = httpx.post(f"{url}/completion", json=body, timeout=600.0)
        response.raise_for_status()
        timings = response.json()["timings"]
        # As below, the first token is counted and its time is not: it comes of the pass over the prompt.
        return Answer(int(timings["predicted_n"]), timings["predicted_ms"] / 1e3)

    return ask


def own(llm: LLM, method: str) -> Ask:
    """Asks foredraft with a method."""

    def ask(tokens: list[int], max_tokens: int) -> Answer:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, speculative={"method": method})
        output = llm.generate(tokens, params)[0]
        first, stats = output.metrics.time_to_first_token, output.metrics.speculation
        assert first is not None, output
        return Answer(len(output.outputs[0].token_ids), output.metrics.latency - first, stats.target_passes)

    return ask


def compare(groups: Mapping[str, Sequence[list[int]]], asks: Mapping[str, Ask], max_tokens: int) -> Answers:
    """Answers by group and setting."""
    found: Answers = {group: {name: [] for name in asks} for group in groups}
    names, turn = list(asks), 0
    for name in names:
        asks[name](next(iter(groups.values()))[0][:16], 8)  # the first request of all warms up
    for group, prompts in groups.items():
        for tokens in prompts:
            for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
                found[group][name].append(asks[name](tokens, max_tokens))
            turn += 1
        print(f"{group}: {', '.join(f'{name} {rate(found[group][name]):.1f}' for name in names)}", file=sys.stderr, flush=True)
    return found


def rate(answers: Sequence[Answer]) -> float:
    """Tokens per second over all answers."""
    return sum(one.num_tokens for one in answers) / sum(one.seconds for one in answers)


def summary(answers: Mapping[str, Mapping[str, Sequence[Answer]]]) -> list[dict[str, Any]]:
    """Per group, and of all together: tokens per second of each setting, the best of llama.cpp's, and how ``auto`` compares."""
    names = list(next(iter(answers.values())))
    together = {name: [one for group in answers.values() for one in group[name]] for name in names}
    lines = []
    for group, found in {**answers, "all": together}.items():
        rates = {name: rate(found[name]) for name in names}
        best = max((name for name in names if name not in (PLAIN, AUTO)), key=lambda name: rates[name])
        auto = found[AUTO]
        lines.append(
            {
                "group": group,
                "num_prompts": len(auto),
                "tokens_per_second": rates,
                "acceptance_length": sum(one.num_tokens for one in auto) / sum(one.passes for one in auto),
                "speedup": rates[AUTO] / rates[PLAIN],
                "best_peer": best,
                "over_best_peer": rates[AUTO] / rates[best],
            }
        )
    return lines


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """For people."""
    rows = [("group", "plain tok/s", "auto tok/s", "auto/plain", "tokens a pass", "llama.cpp tok/s", "setting", "auto/llama.cpp")]
    for line in lines:
        rates = line["tokens_per_second"]
        figures = (rates[PLAIN], rates[AUTO], line["speedup"], line["acceptance_length"], rates[line["best_peer"]])
        rows.append((line["group"], *(f"{value:.2f}" for value in figures), line["best_peer"], f"{line['over_best_peer']:.2f}"))
    return aligned(rows, 1)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("llama_server", type=Path)
    parser.add_argument("model", type=Path, help="a .gguf file")
    parser.add_argument("--dataset", help="prompts in Spec-Bench's format; the built-in ones when not given")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each group")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=num_default_threads())
    parser.add_argument("--peer-version", default="", help="what to call this build of llama.cpp")
    parser.add_argument("--json", type=Path, help="write every figure here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print."""
    options = parse(arguments)
    llm = LLM(str(options.model), threads=options.threads, max_model_len=CONTEXT, enable_prefix_caching=False)
    print(llm.describe()[0], file=sys.stderr)
    libraries = {"LD_LIBRARY_PATH": str(options.llama_server.resolve().parent)}
    asks: dict[str, Ask] = {PLAIN: own(llm, "none"), AUTO: own(llm, "auto")}
    with ExitStack() as stack:
        for name, extra in PEERS.items():
            port = free_port()
            command = llama_command(str(options.llama_server), options.model, port, options.threads, 1, CONTEXT)
            asks[name] = peer(stack.enter_context(started([*command, *extra], port, libraries)))
        groups = group_prompts(llm, options.dataset, options.limit, options.max_tokens)
        fitting = {name: prompts for name, prompts in groups.items() if prompts}
        lines = summary(compare(fitting, asks, options.max_tokens))
    print(table(lines))
    if options.json is not None:
        settings = {name: getattr(options, name) for name in ("limit", "max_tokens", "threads", "peer_version")}
        model = {"file": options.model.name, "quantization": llm.checkpoint.quantization}
        found = {"machine": describe_machine(), "version": __version__, "model": model, **settings, "groups": lines}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
