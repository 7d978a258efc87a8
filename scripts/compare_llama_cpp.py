"""Time llama.cpp and foredraft in turn on the same GGUF file, and print how many times as fast foredraft is.

Usage: ``python scripts/compare_llama_cpp.py BIN_DIR MODEL.gguf [--threads N] [--rounds N] [--peer-version TEXT] [--json FILE]``.
BIN_DIR holds llama-bench and llama-batched-bench with their libraries.  Run it on an idle machine.

A round runs both programs' measurements one after the other, so that a drift of the machine's speed cancels.  llama.cpp is measured
by its own tools, which sample nothing; plain decoding of foredraft is the whole engine, sampling and text included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from foredraft import LLM, SamplingParams, __version__
from foredraft.bench import bytes_per_token
from foredraft.bench_figures import quartiles
from foredraft.bench_table import aligned
from foredraft.machine import describe_machine, measure_read_bandwidth
from foredraft.native import num_default_threads
from foredraft.passes import Kind, PassTimer, batched, prompt, verifying

CONTEXT, DECODE_TOKENS, COPY_TOKENS, BATCH_SIZE, PROMPT_TOKENS = 64, 128, 160, 8, 512
PASS_ROWS = (1, 2, 5, 8)
ROUND_REPEATS = 3
QUESTION = "Explain in a few sentences why the sky looks blue at noon and red in the evening."
DOCUMENT = (
    "Minutes of the harbour board, third session. The new ferry needs a pier of ninety metres, because the old one cannot carry "
    "lorries of more than eight tonnes. The shipyard offered a floating pier, which could be towed away in winter, at a price of "
    "four million; a fixed pier of concrete would cost six million and last for eighty years. The fishermen fear that the dredging "
    "would drive the herring out of the bay, and asked for a study by the marine institute. The treasurer said that the state pays "
    "half of the sum when the work begins before May. The board will decide in its next session, when the study has been read."
)
COPY_REQUEST = f"Write out this text once more, without changing a word:\n\n{DOCUMENT}"
# How many times as fast foredraft is meant to be, by measure and by the file's format ("" for every other one).
TARGETS: Mapping[str, Mapping[str, float]] = {
    "decode": {"Q4_1": 1.6, "Q8_0": 1.4},
    "pass_5": {"": 3.0},
    "prefill": {"": 2.0},
    "batch_8": {"": 2.5},
}
Samples = dict[str, list[float]]


class Measure(NamedTuple):
    """One line of the comparison; a ``unit`` of ms is better when lower, one of tok/s when higher."""

    name: str
    title: str
    unit: str


MEASURES = (
    Measure("decode", "plain decoding", "tok/s"),
    *(Measure(f"pass_{n}", f"pass of {n} row{'s' if n > 1 else ''}", "ms") for n in PASS_ROWS),
    Measure("pass_5_last", "pass of 5 rows, logits of the last", "ms"),
    Measure("prefill", f"prompt of {PROMPT_TOKENS} tokens", "tok/s"),
    Measure("batch_5", "batch of 5, in all", "tok/s"),
    Measure("batch_8", "batch of 8, in all", "tok/s"),
)
NOTES = (
    f"Passes come after a context of {CONTEXT} tokens. foredraft computes logits for every row of a pass, as verification needs "
    "them, llama-bench for the last row only; 'logits of the last' has foredraft do the same.",
    "A pass of 1 row of llama.cpp is its time per generated token.",
    "Batches are passes without sampling on both sides.",
)


# ------------------------------------------------------------------------------------------------ llama.cpp


def run_tool(bin_dir: Path, name: str, arguments: Sequence[str]) -> str:
    """What a tool of llama.cpp prints; its libraries are found beside it."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(bin_dir)}
    result = subprocess.run([str(bin_dir / name), *arguments], capture_output=True, text=True, env=environment, check=False)
    if result.returncode:
        raise SystemExit(f"{name} ended with {result.returncode}:\n{result.stderr[-2000:]}")
    return result.stdout


def read_llama_bench(text: str) -> Samples:
    """Samples from the JSON of llama-bench: passes in ms, decoding and prompt in tokens/s."""
    samples: Samples = defaultdict(list)
    for test in json.loads(text):
        num_tokens = test["n_prompt"] or test["n_gen"]
        seconds = [nanoseconds / 1e9 for nanoseconds in test["samples_ns"]]
        if test["n_gen"]:
            samples["decode"] += [num_tokens / value for value in seconds]
            samples["pass_1"] += [1e3 * value / num_tokens for value in seconds]
        elif num_tokens == PROMPT_TOKENS:
            samples["prefill"] += [num_tokens / value for value in seconds]
        else:
            samples[f"pass_{num_tokens}"] += [1e3 * value for value in seconds]
            if num_tokens == 5:
                samples["pass_5_last"] += [1e3 * value for value in seconds]
    return samples


def read_batched_bench(text: str) -> Samples:
    """Samples from the JSON lines of llama-batched-bench: tokens/s of all sequences together while they generate."""
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {f"batch_{row['pl']}": [row["speed_tg"]] for row in rows}


def measure_peer(bin_dir: Path, model: Path, threads: int) -> Samples:
    """One round of llama.cpp."""
    common = ["-m", str(model), "-t", str(threads)]
    rows = ",".join(str(n) for n in PASS_ROWS if n > 1)
    small = ["-p", rows, "-n", "64", "-d", str(CONTEXT), "-r", str(ROUND_REPEATS), "-o", "json"]
    large = ["-p", str(PROMPT_TOKENS), "-n", "0", "-r", "1", "-o", "json"]
    batch = ["-c", "2048", "-npp", str(CONTEXT), "-ntg", "64", "-npl", f"5,{BATCH_SIZE}", "--output-format", "jsonl"]
    samples: Samples = defaultdict(list)
    for found in (
        read_llama_bench(run_tool(bin_dir, "llama-bench", common + small)),
        read_llama_bench(run_tool(bin_dir, "llama-bench", common + large)),
        read_batched_bench(run_tool(bin_dir, "llama-batched-bench", common + batch)),
    ):
        for name, values in found.items():
            samples[name] += values
    return samples


# ------------------------------------------------------------------------------------------------ foredraft


def measure_own(llm: LLM, timer: PassTimer) -> Samples:
    """One round of foredraft."""
    samples: Samples = defaultdict(list)
    for _ in range(ROUND_REPEATS):
        samples["decode"].append(decode(llm, llm.chat_prompt([{"role": "user", "content": QUESTION}]), DECODE_TOKENS)[0])
    names: dict[str, Kind] = {f"pass_{n}": verifying(n, CONTEXT) for n in PASS_ROWS}
    # llama-batched-bench goes from this context to one of 64 tokens more.
    batches = {n: batched(n, CONTEXT + 32) for n in (5, BATCH_SIZE)}
    names |= {"pass_5_last": Kind(1, 5, CONTEXT, 1), **{f"batch_{n}": kind for n, kind in batches.items()}}
    reading = prompt(PROMPT_TOKENS)
    seconds = timer.time([*names.values(), reading], 5 * ROUND_REPEATS, {reading: 5})
    for name, kind in names.items():
        samples[name] += [kind.num_seqs / value if name.startswith("batch") else 1e3 * value for value in seconds[kind]]
    samples["prefill"] += [PROMPT_TOKENS / value for value in seconds[reading]]
    samples["engine_batch_8"].append(decode_batch(llm))
    tokens = llm.chat_prompt([{"role": "user", "content": COPY_REQUEST}])
    plain, plain_ids = decode(llm, tokens, COPY_TOKENS)
    drafted, drafted_ids = decode(llm, tokens, COPY_TOKENS, {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False})
    samples["copy_plain"].append(plain)
    samples["copy_ngram"].append(drafted)
    samples["copy_speedup"].append(drafted / plain)
    samples["copy_identical"].append(float(plain_ids == drafted_ids))
    return samples


def decode(llm: LLM, tokens: list[int], num_tokens: int, speculative: Mapping[str, Any] | None = None) -> tuple[float, list[int]]:
    """(tokens per second after the first, the answer), greedy, in ``num_tokens`` tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, speculative=speculative or {"method": "none"})
    output = llm.generate(tokens, params)[0]
    first = output.metrics.time_to_first_token
    assert first is not None, output
    answer = output.outputs[0].token_ids
    return (len(answer) - 1) / (output.metrics.latency - first), answer


def decode_batch(llm: LLM) -> float:
    """Tokens per second of all sequences together, over the engine's steps that decode all of them."""
    tokens = llm.chat_prompt([{"role": "user", "content": QUESTION}])
    params = SamplingParams(temperature=0.0, max_tokens=DECODE_TOKENS // 2, ignore_eos=True, speculative={"method": "none"})
    requests = [llm.submit(tokens, params) for _ in range(BATCH_SIZE)]
    num_tokens, seconds = 0, 0.0
    while not all(request.finished for request in requests):
        start = time.perf_counter()
        llm.step()
        step = llm.engine.metrics.last_step
        if step is not None and step.num_rows == step.num_emitted == BATCH_SIZE:
            num_tokens, seconds = num_tokens + step.num_emitted, seconds + time.perf_counter() - start
    return num_tokens / seconds


# ------------------------------------------------------------------------------------------------ figures


def target_of(name: str, quantization: str) -> float | None:
    """How many times as fast foredraft is meant to be; None where nothing was set."""
    targets = TARGETS.get(name, {})
    return targets.get(quantization, targets.get(""))


def compare(own: Mapping[str, Sequence[float]], peer: Mapping[str, Sequence[float]], quantization: str) -> list[dict[str, Any]]:
    """A mapping per measure: name, title, unit, both sides' quartiles, times_as_fast (by medians), target."""
    lines = []
    for measure in MEASURES:
        ours, theirs = quartiles(own[measure.name]), quartiles(peer[measure.name])
        assert ours is not None and theirs is not None, measure
        fast, slow = (ours, theirs) if measure.unit == "tok/s" else (theirs, ours)
        lines.append(
            {
                **measure._asdict(),
                "foredraft": ours,
                "llama_cpp": theirs,
                "times_as_fast": fast["median"] / slow["median"],
                "target": target_of(measure.name, quantization),
            }
        )
    return lines


def format_comparison(result: Mapping[str, Any]) -> str:
    """The comparison as aligned plain text."""
    rows: list[tuple[str, ...]] = [
        ("measure", "unit", "foredraft", "quartiles", "llama.cpp", "quartiles", "times as fast", "target")
    ]
    for line in result["measures"]:
        sides = [
            f"{side['median']:.2f}\t{side['lower']:.2f}-{side['upper']:.2f}" for side in (line["foredraft"], line["llama_cpp"])
        ]
        target = "" if line["target"] is None else f"{line['target']:.1f} {'met' if is_met(line) else 'missed'}"
        rows.append((line["title"], line["unit"], *"\t".join(sides).split("\t"), f"{line['times_as_fast']:.2f}", target))
    machine, model, copy = result["machine"], result["model"], result["copy"]
    same = "the same tokens" if copy["identical"] else "OTHER TOKENS"
    return "\n".join(
        (
            f"{model['file']} ({model['quantization']}), kept as {model['precision']}, exactness: {model['exactness']}",
            f"{machine['cpu']}, {machine['cores']} cores; {result['threads']} threads; load {machine['load']:.1f} at the start; "
            f"llama.cpp {result['peer_version']}; {result['rounds']} rounds",
            "",
            aligned(rows, num_left=2),
            "",
            f"limit: {result['bandwidth']['buffer_bytes'] / 1e6:.0f} MB of weights are read in "
            f"{result['floor_ms']['best']:.2f} ms at best, {result['floor_ms']['median']:.2f} ms in the median",
            f"batch of {BATCH_SIZE} through the engine: {result['engine_batch_8']['median']:.1f} tok/s in all",
            f"copying a text, ngram K = 4 over plain: {copy['speedup']['median']:.2f} times "
            f"({copy['ngram']['median']:.1f} and {copy['plain']['median']:.1f} tok/s), {same}",
            *result["notes"],
        )
    )


def is_met(line: Mapping[str, Any]) -> bool:
    """Whether a measure reached its target, if it has one."""
    return line["target"] is None or line["times_as_fast"] >= line["target"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; exit status 1 when a target is missed."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bin_dir", type=Path, help="folder of llama-bench and llama-batched-bench")
    parser.add_argument("model", type=Path, help="a .gguf file")
    parser.add_argument("--threads", type=int, default=num_default_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-version", default="of unknown version", help="what to call this build of llama.cpp")
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args(arguments)
    machine = describe_machine()
    llm = LLM(str(options.model), threads=options.threads, enable_prefix_caching=False)
    print(llm.describe()[0], file=sys.stderr)
    timer = PassTimer(llm.target, llm.kv.num_blocks, llm.kv.block_size)
    own: Samples = defaultdict(list)
    peer: Samples = defaultdict(list)
    for index in range(options.rounds):
        for total, samples in (
            (peer, measure_peer(options.bin_dir, options.model, options.threads)),
            (own, measure_own(llm, timer)),
        ):
            for name, values in samples.items():
                total[name] += values
        print(f"round {index + 1} of {options.rounds}", file=sys.stderr)
    num_bytes = bytes_per_token(llm.checkpoint.architecture, llm.target.weight_bytes)
    bandwidth = measure_read_bandwidth("cpu", num_bytes=num_bytes, threads=options.threads)
    quantization = llm.checkpoint.quantization
    result = {
        "version": __version__,
        "peer_version": options.peer_version,
        "machine": machine,
        "threads": options.threads,
        "rounds": options.rounds,
        "model": {
            "file": options.model.name,
            "quantization": quantization,
            "precision": llm.target.precision,
            "exactness": llm.target.exactness,
        },
        "bandwidth": bandwidth,
        "floor_ms": {name: 1e3 * num_bytes / bandwidth[name] for name in ("best", "median")},
        "measures": compare(own, peer, quantization),
        "engine_batch_8": quartiles(own["engine_batch_8"]),
        "copy": {
            **{name: quartiles(own[f"copy_{name}"]) for name in ("plain", "ngram", "speedup")},
            "identical": all(own["copy_identical"]),
        },
        "notes": list(NOTES),
    }
    print(format_comparison(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if all(map(is_met, result["measures"])) else 1


if __name__ == "__main__":
    sys.exit(main())
