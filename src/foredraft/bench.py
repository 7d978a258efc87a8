"""Plain and speculative decoding side by side on one machine: by category, by K and by batch, each beside its prediction.

Owns: which batches are run in which ways, and what a result holds.  Does not know: how a run is made, or how it is shown.

Timing is of decoding alone: it starts after the step that emitted a request's first tokens, and those tokens do not count, so
neither the prompt's length nor a draft that rode along with the prompt is in the figures.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from foredraft import __version__
from foredraft.architecture import Architecture
from foredraft.bench_figures import (
    ALL_CATEGORIES,
    cells_of,
    crossovers,
    overall,
    passes_by_rows,
    plains_of,
    prediction_summary,
    ratio,
    speeds,
)
from foredraft.bench_options import BenchOptions as BenchOptions
from foredraft.drafters import registry
from foredraft.journal import Journal
from foredraft.lanes import PLAIN, Way, blocks_needed
from foredraft.llm import LLM, Prompt
from foredraft.loader.resolve import fingerprint
from foredraft.machine import describe_machine, measure_read_bandwidth
from foredraft.target import resolve_device
from foredraft.trial import Batch, Contest, Run
from foredraft.types import ConfigError, RequestError, SamplingParams, refuse_unknown
from foredraft.workloads import WORKLOADS, Workload, load_dataset

# What of a machine's description changes from one hour to the next.
PASSING = ("load", "date")
NOTES = (
    "Tokens/s and speed-up are of decoding alone: from the step that emitted the first tokens, which do not count, to the end.",
    "All ways of a batch decoded in turn, in segments of 16 tokens; speed-up is the median of the paired ratios.",
    "Prefix caching was off, so that every run computed its whole prompt.",
    "A prediction goes by passes that were timed by themselves before each batch and by the plain run, by nothing that drafted.",
    "Drafters began each repeat knowing no answers and learned those of the repeat's prompts; what they calibrate lasted.",
    "In a batch answers end at different times, so that the last passes have fewer sequences.",
)


class Progress(Protocol):
    """Where a bench says how far it is."""

    def note(self, line: str) -> None:
        """A line that stays."""
        ...

    def part(self, title: str, done: int, total: int) -> None:
        """``done`` of ``total`` batches are finished; ``title`` is the next one."""
        ...


@dataclass(frozen=True)
class _Stage:
    """A part of the bench: batches that the same lanes run one after the other."""

    name: str
    ways: tuple[Way, ...]
    batches: tuple[Batch, ...]


def run_bench(options: BenchOptions, progress: Progress, journal_path: Path | None = None) -> dict[str, Any]:
    """Measure and predict.  ``journal_path``: a file of finished parts, which a later call with the same options goes on from.

    Returns plain data for JSON::

        version, options          of foredraft, as text; the BenchOptions as a mapping
        machine                   cpu, cores, memory_bytes, gpu (None without), torch, python, threads, load (before measuring)
        model                     name, quantization, device, dtype, exactness, weight_bytes, bytes_per_token,
                                  prompts (chat or text)
        bandwidth                 best and median in bytes/s, buffer_bytes, repeats
        ceiling                   tokens_per_s (bandwidth.best / model.bytes_per_token), plain_tokens_per_s, plain_percent
        cells                     one per category and method, "none" (plain) first:
            category, method, num_speculative_tokens, batch, num_runs
            acceptance_length, acceptance_rate, acceptance_per_position
            tokens_per_s, speedup     {lower, median, upper} quartiles over the runs; None when nothing was decoded
            noise                     half of the 90 % interval of speedup over speedup; None when it cannot be told
            predicted                 None, or speedup, acceptance_length, error (over the measurement), is_even (measured within
                                      noise of 1), is_good (within 10 %), sign_is_right
            ms_per_step               by phase, median over the runs; overhead_ms_per_step is all but draft and pass
            identical, num_different  whether all token ids equal plain's, and in how many runs they do not
            first_divergence          None, or prompt, repeat, position, plain_token, token, their texts, and margin: the
                                      difference of the plain run's two highest raw logits there (None if it did not recur)
        overall                   the same per method over all categories; category is "all"
        k_sweep                   cells of one prompt per category, per method and K; category is "all"
        batch_sweep               cells of mixed prompts, per batch size and method; category is "all"
        crossover                 by method, measured and predicted: the batch size where it stops to pay; None: beyond the sweep
        prediction                how many of all these cells were predicted well, and the rule by which that is said; None without
        pass_times                the calibration: rows, base (seconds), per_read, per_score; see foredraft.cost.PassTimes
        pass_ms                   by rows, quartiles of the milliseconds of the passes that really ran
        example                   of one adaptive request: category, prompt, steps (drafted, accepted, emitted); None without auto
        resumed                   how many parts were taken from an interrupted bench
        runs                      every run: the fields of trial.Run and tokens_per_s; times in seconds
        notes                     sentences on how to read this

    Raises:
        ForedraftError: see the tree in foredraft.types.
    """
    workloads = _select(options)
    progress.note(f"loading {options.model}")
    llm = LLM(
        options.model, speculative_config=options.engine_speculation(), also=options.methods, **asdict(options.engine_config())
    )
    for line in llm.describe():
        progress.note(line)
    machine, model = describe_machine(), _describe_model(llm, options)
    batches, prompts = _batches(llm, workloads, options, progress)
    journal = Journal(journal_path, _journal_key(llm, options, machine, model, prompts))
    num_resumed = len(journal)
    if num_resumed:
        progress.note(f"going on after {num_resumed} finished parts")
    progress.note("measuring read bandwidth and the cost of passes")
    bandwidth = measure_read_bandwidth(
        resolve_device(options.device), num_bytes=model["bytes_per_token"], threads=llm.target.threads
    )
    times = llm.calibrate()
    stages = _fitting(llm, options, _stages(options, batches), progress)
    runs = _run_stages(llm, options, stages, journal, progress)
    result = {
        "version": __version__,
        "options": asdict(options),
        "machine": machine,
        "model": model,
        "bandwidth": bandwidth,
        "ceiling": _ceiling(bandwidth, model["bytes_per_token"], speeds(run for run in runs["categories"] if run.method == PLAIN)),
        **_figures(llm, options, prompts, runs),
        "pass_times": times.to_dict(),
        "pass_ms": passes_by_rows(run for some in runs.values() for run in some),
        "example": _example(runs["categories"]),
        "resumed": num_resumed,
        "runs": [run.to_dict() for some in runs.values() for run in some],
        "notes": list(NOTES),
    }
    return result


# ------------------------------------------------------------------------------------------------ what is run


def _journal_key(
    llm: LLM, options: BenchOptions, machine: Mapping[str, Any], model: Mapping[str, Any], prompts: Mapping[tuple[str, str], Prompt]
) -> dict[str, Any]:
    """All that the parts of a bench depend on: of files not just their names, of prompts not just those of their data set."""
    named = [(options.speculative_config or {}).get(name) for name in ("model", "suffix_decoding_base")]
    paths = [llm.checkpoint.path, *(Path(str(one)) for one in named if one)]
    fixed = {name: value for name, value in machine.items() if name not in PASSING}
    return {
        "version": __version__,
        "options": asdict(options),
        "model": dict(model),
        "machine": fixed,
        "files": [stamp for path in paths if path.exists() for stamp in fingerprint(path)],
        "prompts": hashlib.sha256(json.dumps(list(prompts.values())).encode()).hexdigest(),
    }


def _select(options: BenchOptions) -> list[Workload]:
    pool = WORKLOADS if options.dataset is None else load_dataset(options.dataset)
    known = list(dict.fromkeys(workload.category for workload in pool))
    for category in options.categories or ():
        refuse_unknown("category", category, known)
    chosen = [category for category in known if options.categories is None or category in options.categories]
    return [w for category in chosen for w in [w for w in pool if w.category == category][: options.limit]]


def _batches(
    llm: LLM, workloads: Seq[Workload], options: BenchOptions, progress: Progress
) -> tuple[list[Batch], dict[tuple[str, str], Prompt]]:
    """Every prompt as a batch of its own, and by category and name; those that do not fit into the context are left out."""
    batches: list[Batch] = []
    prompts: dict[tuple[str, str], Prompt] = {}
    for workload in workloads:
        tokens = prompt_tokens(llm, workload)
        if len(tokens) + options.max_tokens <= llm.max_model_len:
            batches.append(Batch(workload.category, workload.name, (tuple(tokens),)))
            prompts[workload.category, workload.name] = tokens
    if len(batches) < len(workloads):
        progress.note(
            f"{len(workloads) - len(batches)} prompts are left out: with the answer they exceed {llm.max_model_len} tokens"
        )
    if not batches:
        raise RequestError(
            f"none of {len(workloads)} prompts and {options.max_tokens} tokens fit into a context of {llm.max_model_len}; "
            "lower max_tokens or raise max_model_len."
        )
    return batches, prompts


def prompt_tokens(llm: LLM, workload: Workload) -> list[int]:
    """By the model's chat template if it has one, else the texts with empty lines between them."""
    tokenizer = llm.checkpoint.tokenizer
    if tokenizer.has_chat_template:
        return llm.chat_prompt(workload.messages)
    return tokenizer.encode("\n\n".join(message["content"] for message in workload.messages) + "\n\n")


def _stages(options: BenchOptions, batches: Seq[Batch]) -> list[_Stage]:
    by_category: dict[str, list[Batch]] = {}
    for batch in batches:
        by_category.setdefault(batch.category, []).append(batch)
    stages = [_Stage("categories", tuple(options.ways()), tuple(batches))]
    if options.swept_ways():
        firsts = tuple(
            replace(some[0], category=ALL_CATEGORIES, name=f"{some[0].category}/{some[0].name}") for some in by_category.values()
        )
        stages.append(_Stage("k_sweep", tuple(options.swept_ways()), firsts))
    # Mixed: the first of each category, then the second of each, and so on; too few are taken again.
    depth = max(map(len, by_category.values()))
    mixed = [some[i] for i in range(depth) for some in by_category.values() if i < len(some)]
    largest = max(options.batch_sweep, default=0)
    pool = [mixed[i % len(mixed)].prompts[0] for i in range(largest)]
    for size in options.batch_sweep:
        parts = [tuple(pool[start : start + size]) for start in range(0, largest - size + 1, size)]
        named = tuple(Batch(ALL_CATEGORIES, f"{size} at a time, {index + 1}", part) for index, part in enumerate(parts))
        stages.append(_Stage(f"batch_sweep {size}", tuple(options.ways()), named))
    return stages


def _fitting(llm: LLM, options: BenchOptions, stages: Seq[_Stage], progress: Progress) -> list[_Stage]:
    """The stages whose lanes find room in the cache together; to find out later would cost what was measured until then."""
    free, fitting = llm.kv.num_available, []
    for stage in stages:
        num_lanes = len(stage.ways) + 1
        needed = max(blocks_needed(llm, num_lanes, batch.prompts, options.max_tokens) for batch in stage.batches)
        if needed <= free:
            fitting.append(stage)
            continue
        size = f"{num_lanes} lanes at a time may need {needed} cache blocks of {free}; raise kv_cache_memory"
        if stage is stages[0]:
            raise ConfigError(f"the prompts are too long to be compared: {size} or lower max_tokens.")
        progress.note(f"{stage.name.replace('_', ' ')} is left out: {size}")
    return fitting


def _run_stages(llm: LLM, options: BenchOptions, stages: Seq[_Stage], journal: Journal, progress: Progress) -> dict[str, list[Run]]:
    """Runs by stage; what the journal holds is not run again."""
    total = options.repeats * sum(len(stage.batches) for stage in stages)
    runs: dict[str, list[Run]] = {}
    done = 0
    for stage in stages:
        runs[stage.name] = []
        contest: Contest | None = None
        for part, repeat, batch, turn in _parts(stage, options.repeats):
            progress.part(f"{stage.name.replace('_', ' ')}: {batch.category}/{batch.name}", done, total)
            kept = journal.get(part)
            if kept is not None:
                found = [Run.from_dict(data) for data in kept]
            else:
                contest = contest or _open(llm, options, stage, runs[stage.name])
                found = contest.run(batch, _params(options, repeat), repeat, turn)
                journal.add(part, [run.to_dict() for run in found])
                progress.note(f"[{done + 1}/{total}] {batch.category}/{batch.name}: {', '.join(_said(found))}")
            runs[stage.name] += found
            done += 1
    progress.part("done", done, total)
    return runs


def _parts(stage: _Stage, repeats: int) -> Iterator[tuple[str, int, Batch, int]]:
    """(name, repeat, batch, whose turn it is to begin) of everything that a stage runs."""
    for repeat in range(repeats):
        for index, batch in enumerate(stage.batches):
            yield f"{stage.name}/{repeat}/{batch.category}/{batch.name}", repeat, batch, repeat + index


def _open(llm: LLM, options: BenchOptions, stage: _Stage, earlier: Seq[Run]) -> Contest:
    """A contest that knows what it would if it had run ``earlier``."""
    contest = Contest(llm, stage.ways)
    contest.warm_up(stage.batches[0], _params(options, 0))
    batches = {(batch.category, batch.name): batch for batch in stage.batches}
    for plain in plains_of(earlier).values():
        contest.recall(batches[plain.category, plain.prompt], plain)
    return contest


def _said(runs: Seq[Run]) -> Iterator[str]:
    """A few words per way; of many ways the best."""
    plain, *others = runs
    ranked = sorted(others, key=lambda run: -(ratio(run, plain) or 0.0))
    for run in (plain, *(others if len(others) <= 4 else ranked[:1])):
        fixed = run.method not in (PLAIN, registry.AUTO)
        name = "plain" if run is plain else f"{run.method} K={run.num_speculative_tokens}" if fixed else run.method
        speed = "all at once" if run.tokens_per_s is None else f"{run.tokens_per_s:.1f} tok/s"
        value = ratio(run, plain)
        gained = f" ({value:.2f}x" if value is not None and run is not plain else ""
        expected = f", predicted {run.predicted['speedup']:.2f}" if gained and run.predicted else ""
        yield f"{name} {speed}{gained}{expected}{')' if gained else ''}"


def _params(options: BenchOptions, repeat: int) -> SamplingParams:
    return SamplingParams(temperature=options.temperature, seed=options.seed + repeat, max_tokens=options.max_tokens)


# ------------------------------------------------------------------------------------------------ what is told


def _figures(
    llm: LLM, options: BenchOptions, prompts: Mapping[tuple[str, str], Prompt], runs: Mapping[str, list[Run]]
) -> dict[str, Any]:
    plains = plains_of(runs["categories"])
    cells = cells_of(runs["categories"])
    for cell in cells:
        if cell["first_divergence"] is not None:
            cell["first_divergence"] |= _explain(llm, options, prompts, plains, cell)
    k_sweep = cells_of(runs.get("k_sweep", []))
    batch_sweep = [cell for name, some in runs.items() if name.startswith("batch_sweep") for cell in cells_of(some)]
    return {
        "cells": cells,
        "overall": overall(runs["categories"], cells),
        "k_sweep": k_sweep,
        "batch_sweep": batch_sweep,
        "crossover": crossovers(batch_sweep),
        "prediction": prediction_summary([*cells, *k_sweep, *batch_sweep]),
    }


def _describe_model(llm: LLM, options: BenchOptions) -> dict[str, Any]:
    return {
        "name": options.model,
        "quantization": llm.checkpoint.quantization,
        "device": resolve_device(options.device),
        "dtype": llm.target.precision,
        "exactness": llm.target.exactness,
        "weight_bytes": llm.target.weight_bytes,
        "bytes_per_token": bytes_per_token(llm.checkpoint.architecture, llm.target.weight_bytes),
        "prompts": "chat" if llm.checkpoint.tokenizer.has_chat_template else "text",
    }


def bytes_per_token(architecture: Architecture, weight_bytes: int) -> int:
    """Weight bytes that a pass of one row reads: all, but of an embedding that is not also the output head one row only."""
    if architecture.tie_embeddings:
        return weight_bytes
    sizes = {name: math.prod(shape) for name, shape in architecture.weight_shapes().items()}
    total = sum(sizes.values())
    return round(weight_bytes * (total - sizes["embed"]) / total)


def _ceiling(bandwidth: Mapping[str, Any], num_bytes: int, plain_speeds: Seq[float]) -> dict[str, float | None]:
    most = bandwidth["best"] / num_bytes
    plain = statistics.median(plain_speeds) if plain_speeds else None
    return {"tokens_per_s": most, "plain_tokens_per_s": plain, "plain_percent": None if plain is None else 100 * plain / most}


def _example(runs: Seq[Run]) -> dict[str, Any] | None:
    """The adaptive run whose drafts changed most from step to step: the one that shows most of how K is chosen."""
    adaptive = [run for run in runs if run.method == registry.AUTO and run.steps]
    if not adaptive:
        return None
    chosen = max(adaptive, key=lambda run: sum(abs(a[1] - b[1]) for a, b in zip(run.steps, run.steps[1:], strict=False)))
    steps = [(drafted, accepted, emitted) for _, drafted, accepted, emitted, _ in chosen.steps]
    return {"category": chosen.category, "prompt": chosen.prompt, "steps": steps}


def _explain(
    llm: LLM,
    options: BenchOptions,
    prompts: Mapping[tuple[str, str], Prompt],
    plains: Mapping[tuple[str, str, int], Run],
    cell: Mapping[str, Any],
) -> dict[str, Any]:
    """Texts of the two tokens, and how clear plain decoding's choice was, which takes one more request.

    Log-probabilities of one row differ as its logits do.
    """
    found = cell["first_divergence"]
    key, repeat, position = (found["category"], found["prompt"]), found["repeat"], found["position"]
    params = replace(_params(options, repeat), max_tokens=position + 1, logprobs=2, speculative={"method": PLAIN})
    answer = llm.generate(prompts[key], params)[0].outputs[0]
    margin = None
    if answer.token_ids == plains[(*key, repeat)].token_ids[0][: position + 1] and len(answer.logprobs or ()) == position + 1:
        assert answer.logprobs is not None
        first, second = sorted(answer.logprobs[position].values(), key=lambda entry: entry.rank)[:2]
        margin = first.logprob - second.logprob
    decode = llm.checkpoint.tokenizer.decode
    texts = {
        f"{name}_text": None if found[name] is None else decode([found[name]], skip_special_tokens=False)
        for name in ("plain_token", "token")
    }
    return {**texts, "margin": margin}
