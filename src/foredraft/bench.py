"""Plain and speculative decoding side by side on one machine, prompt by prompt.

Owns: the order of the runs, what is computed from them, and the table.  Does not know: how a draft is made, or what is in a prompt.

Timing is of decoding alone: it starts after the step that emitted a request's first tokens, and those tokens do not count, so
neither the prompt's length nor a draft that rode along with the prompt is in the figures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from typing import Any

from foredraft import __version__
from foredraft.architecture import Architecture
from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters import registry
from foredraft.llm import LLM, Prompt
from foredraft.machine import describe_machine, measure_read_bandwidth
from foredraft.target import resolve_device
from foredraft.types import PHASES, ConfigError, SamplingParams, SpeculationStats, StepStats, refuse_unknown
from foredraft.workloads import CATEGORIES, WORKLOADS, Workload, load_dataset

PLAIN = "none"
ALL_CATEGORIES = "all"
MODEL_FREE = (PLAIN, "ngram", "suffix")
OVERHEAD_PHASES = tuple(phase for phase in PHASES if phase not in ("draft", "pass"))
NOTES = (
    "Tokens/s and speed-up are of decoding alone: from the step that emitted the first tokens, which do not count, to the end.",
    "Each prompt was run with plain and every method in turn, in rotating order; speed-up is the median of the paired ratios.",
    "Prefix caching was off, so that every run computed its whole prompt.",
    "The suffix drafter began each repeat knowing no answers and learned those of the repeat's prompts; its calibration lasted.",
)


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    ``methods`` are compared with plain decoding, which always runs.  ``categories`` None means all; ``limit`` keeps at most that
    many prompts of each.  ``dataset`` is a file for ``load_dataset`` and replaces the built-in prompts.  Repeat r samples with
    ``seed + r``.  ``speculative_config`` holds further settings of the drafters, such as ``model`` for ``draft_model``.
    The rest are EngineConfig's.

    Raises:
        ConfigError: an unknown name, or a value out of its range.
    """

    model: str
    methods: tuple[str, ...] = ("ngram", "suffix")
    num_speculative_tokens: int = 4
    max_tokens: int = 96
    categories: tuple[str, ...] | None = None
    repeats: int = 1
    temperature: float = 0.0
    seed: int = 0
    dataset: str | None = None
    limit: int | None = None
    speculative_config: Mapping[str, Any] | None = None
    device: str = "auto"
    dtype: str = "auto"
    ops: str = "auto"
    threads: int | None = None
    max_model_len: int | None = None
    kv_cache_memory: int | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "methods", tuple(dict.fromkeys(method for method in self.methods if method != PLAIN)))
        put(self, "speculative_config", dict(self.speculative_config or {}))
        for name, low in (("num_speculative_tokens", 1), ("max_tokens", 2), ("repeats", 1), ("limit", 1), ("seed", 0)):
            value = getattr(self, name)
            if not (value is None and name == "limit") and (not isinstance(value, int) or value < low):
                raise ConfigError(f"{name} must be a whole number of at least {low}, not {value!r}; change {name}.")
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature must be a finite number of at least 0, not {self.temperature!r}; change temperature.")
        if self.categories is not None and not self.categories:
            raise ConfigError("categories must name at least one category, not none; leave them out for all.")
        if self.dataset is None:
            for category in self.categories or ():
                refuse_unknown("category", category, CATEGORIES)
        self._check_methods()
        self.engine_config()

    def _check_methods(self) -> None:
        """Refuse here what would otherwise fail after the model is loaded."""
        for name, instead in (("method", "methods"), ("num_speculative_tokens", "num_speculative_tokens")):
            if name in (self.speculative_config or {}):
                raise ConfigError(f"a bench's speculative_config must not hold {name!r}; use the bench's own option {instead}.")
        config = self.engine_speculation()
        for method in self.methods:
            registry.check(replace(config, method=method, model=None if method in MODEL_FREE else config.model))
        registry.check(config)

    def engine_speculation(self) -> SpeculativeConfig:
        """What the engine is opened with: requests choose their method, but a draft model is loaded at the start."""
        method = next((method for method in self.methods if method not in MODEL_FREE), PLAIN)
        options = {"method": method, "num_speculative_tokens": self.num_speculative_tokens}
        return SpeculativeConfig.parse({**(self.speculative_config or {}), **options})

    def engine_config(self) -> EngineConfig:
        """The engine's sizes; a cached prefix would make a prompt's second run unlike its first."""
        names = ("device", "dtype", "ops", "threads", "max_model_len", "kv_cache_memory")
        return EngineConfig(enable_prefix_caching=False, **{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class Run:
    """One request.  ``decode_seconds`` and ``decode_tokens`` exclude everything up to the first emission.

    ``ms_per_step``: milliseconds by phase, mean over the decoding steps; empty when there was none.
    """

    category: str
    prompt: str
    method: str
    repeat: int
    num_prompt_tokens: int
    token_ids: list[int]
    time_to_first_token: float
    decode_seconds: float
    decode_tokens: int
    decode_steps: int
    ms_per_step: dict[str, float]
    speculation: SpeculationStats

    @property
    def pair(self) -> tuple[str, str, int]:
        """What a run shares with the runs that it is compared with."""
        return self.category, self.prompt, self.repeat

    @property
    def tokens_per_s(self) -> float | None:
        """Decoded tokens per second; None when everything was emitted at once."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens and self.decode_seconds > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        own = {name: value for name, value in vars(self).items() if name != "speculation"}
        return {**own, "tokens_per_s": self.tokens_per_s, "speculation": self.speculation.to_dict()}


Plains = Mapping[tuple[str, str, int], Run]


def run_bench(options: BenchOptions, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure, and tell ``report`` how far it is, line by line.

    Returns plain data for JSON::

        version, options          of foredraft, as text; the BenchOptions as a mapping
        machine                   cpu, cores, memory_bytes, gpu (None without), torch, python, threads, load (before measuring)
        model                     name, quantization, device, dtype, exactness, weight_bytes, bytes_per_token,
                                  prompts (chat or text)
        bandwidth                 best and median in bytes/s, buffer_bytes, repeats
        ceiling                   tokens_per_s (bandwidth.best / model.bytes_per_token), plain_tokens_per_s, plain_percent
        cells                     one per category and method, "none" (plain) first:
            category, method, num_runs, acceptance_length, acceptance_rate, acceptance_per_position
            tokens_per_s, speedup     {lower, median, upper} quartiles over the runs; None when nothing was decoded
            ms_per_step               by phase, median over the runs; overhead_ms_per_step is all but draft and pass
            identical, num_different  whether all token ids equal plain's, and in how many runs they do not
            first_divergence          None, or prompt, repeat, position, plain_token, token, their texts, and margin: the
                                      difference of the plain run's two highest raw logits there (None if it did not recur)
        overall                   the same per method over all categories; category is "all"
        runs                      every run: the fields of Run and tokens_per_s; times in seconds
        notes                     sentences on how to read this

    Raises:
        ForedraftError: see the tree in foredraft.types.
    """
    workloads = _select(options)
    report(f"loading {options.model}")
    llm = LLM(options.model, speculative_config=options.engine_speculation(), **asdict(options.engine_config()))
    for line in llm.describe():
        report(line)
    machine = describe_machine()
    report("measuring read bandwidth")
    num_bytes = bytes_per_token(llm.checkpoint.architecture, llm.target.weight_bytes)
    bandwidth = measure_read_bandwidth(resolve_device(options.device), num_bytes=num_bytes, threads=llm.target.threads)
    prompts = {(workload.category, workload.name): _prompt(llm, workload) for workload in workloads}
    runs = _measure_all(llm, options, prompts, report)
    plains = {run.pair: run for run in runs if run.method == PLAIN}
    categories = list(dict.fromkeys(workload.category for workload in workloads))
    cells = []
    for category in categories:
        for method in (PLAIN, *options.methods):
            cell = _cell(category, method, [run for run in runs if (run.category, run.method) == (category, method)], plains)
            if cell["first_divergence"] is not None:
                cell["first_divergence"] |= _explain(llm, options, prompts, plains, cell)
            cells.append(cell)
    return {
        "version": __version__,
        "options": asdict(options),
        "machine": machine,
        "model": _describe_model(llm, options),
        "bandwidth": bandwidth,
        "ceiling": _ceiling(llm, bandwidth, cell_speeds(runs, PLAIN)),
        "cells": cells,
        "overall": [_overall(method, runs, plains, cells) for method in (PLAIN, *options.methods)],
        "runs": [run.to_dict() for run in runs],
        "notes": list(NOTES),
    }


# ------------------------------------------------------------------------------------------------ measuring


def _select(options: BenchOptions) -> list[Workload]:
    pool = WORKLOADS if options.dataset is None else load_dataset(options.dataset)
    known = list(dict.fromkeys(workload.category for workload in pool))
    for category in options.categories or ():
        refuse_unknown("category", category, known)
    chosen = [category for category in known if options.categories is None or category in options.categories]
    return [w for category in chosen for w in [w for w in pool if w.category == category][: options.limit]]


def _prompt(llm: LLM, workload: Workload) -> Prompt:
    if llm.checkpoint.tokenizer.has_chat_template:
        return llm.chat_prompt(workload.messages)
    return "\n\n".join(message["content"] for message in workload.messages) + "\n\n"


def _measure_all(
    llm: LLM, options: BenchOptions, prompts: Mapping[tuple[str, str], Prompt], report: Callable[[str], None]
) -> list[Run]:
    """Every prompt with every method, one directly after the other, so that a drift of the machine's speed cancels."""
    methods = (PLAIN, *options.methods)
    report("warming up")
    for method in methods:
        _measure(llm, options, method, next(iter(prompts)), next(iter(prompts.values())), -1)
    runs: list[Run] = []
    for repeat in range(options.repeats):
        for index, (key, prompt) in enumerate(prompts.items()):
            turn = (repeat + index) % len(methods)
            group = {m: _measure(llm, options, m, key, prompt, repeat) for m in (*methods[turn:], *methods[:turn])}
            runs += [group[method] for method in methods]
            done = f"[{repeat * len(prompts) + index + 1}/{options.repeats * len(prompts)}]"
            report(f"{done} {'/'.join(key)}: {', '.join(_progress(group[method], group[PLAIN]) for method in methods)}")
    return runs


def _progress(run: Run, plain: Run) -> str:
    ratio = _ratio(run, plain)
    speed = "all at once" if run.tokens_per_s is None else f"{run.tokens_per_s:.1f} tok/s"
    return f"{_label(run.method)} {speed}" + (f" ({ratio:.2f}x)" if ratio is not None and run is not plain else "")


def _measure(llm: LLM, options: BenchOptions, method: str, key: tuple[str, str], prompt: Prompt, repeat: int) -> Run:
    """Run one request alone.  A tenant of its own keeps each repeat from remembering the one before; -1 is the warm-up."""
    request = llm.submit(prompt, _params(options, method, repeat), tenant=f"repeat {repeat}")
    steps: list[StepStats] = []
    while not request.finished:
        llm.step()
        step = llm.engine.metrics.last_step
        assert step is not None and step.num_seqs == 1, step
        steps.append(step)
    output = llm.take(request)
    metrics = output.metrics
    assert metrics.time_to_first_token is not None, output
    first = next(index for index, step in enumerate(steps) if step.num_emitted)
    decode = steps[first + 1 :]
    return Run(
        *key,
        method,
        repeat,
        num_prompt_tokens=len(output.prompt_token_ids),
        token_ids=output.outputs[0].token_ids,
        time_to_first_token=metrics.time_to_first_token,
        decode_seconds=metrics.latency - metrics.time_to_first_token,
        decode_tokens=sum(step.num_emitted for step in decode),
        decode_steps=len(decode),
        ms_per_step={phase: statistics.fmean(step.milliseconds[phase] for step in decode) for phase in PHASES if decode},
        speculation=metrics.speculation,
    )


def _params(options: BenchOptions, method: str, repeat: int) -> SamplingParams:
    return SamplingParams(
        temperature=options.temperature,
        seed=options.seed + max(repeat, 0),
        max_tokens=options.max_tokens,
        speculative={
            "method": method,
            "num_speculative_tokens": options.num_speculative_tokens,
            "adaptive": method == registry.AUTO,
        },
    )


# ------------------------------------------------------------------------------------------------ describing


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


def _ceiling(llm: LLM, bandwidth: Mapping[str, Any], plain_speeds: list[float]) -> dict[str, float | None]:
    most = bandwidth["best"] / bytes_per_token(llm.checkpoint.architecture, llm.target.weight_bytes)
    plain = statistics.median(plain_speeds) if plain_speeds else None
    return {"tokens_per_s": most, "plain_tokens_per_s": plain, "plain_percent": None if plain is None else 100 * plain / most}


# ------------------------------------------------------------------------------------------------ figures


def cell_speeds(runs: Iterable[Run], method: str) -> list[float]:
    """Tokens per second of the runs of one method that decoded anything."""
    return [run.tokens_per_s for run in runs if run.method == method and run.tokens_per_s is not None]


def quartiles(values: Seq[float]) -> dict[str, float] | None:
    """Lower quartile, median and upper quartile, interpolated between the values; None without values."""
    if not values:
        return None
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"lower": lower, "median": median, "upper": upper}


def _ratio(run: Run, plain: Run) -> float | None:
    speed, plain_speed = run.tokens_per_s, plain.tokens_per_s
    return None if speed is None or plain_speed is None else speed / plain_speed


def _cell(category: str, method: str, runs: list[Run], plains: Plains) -> dict[str, Any]:
    total = SpeculationStats.merged(run.speculation for run in runs)
    ratios = [ratio for run in runs if (ratio := _ratio(run, plains[run.pair])) is not None]
    per_step = [run.ms_per_step for run in runs if run.ms_per_step]
    overheads = [sum(milliseconds[phase] for phase in OVERHEAD_PHASES) for milliseconds in per_step]
    different = [run for run in runs if run.token_ids != plains[run.pair].token_ids]
    return {
        "category": category,
        "method": method,
        "num_runs": len(runs),
        "acceptance_length": total.acceptance_length,
        "acceptance_rate": total.acceptance_rate,
        "acceptance_per_position": [
            accepted / drafted
            for accepted, drafted in zip(
                total.accepted_per_position + [0] * len(total.drafted_per_position), total.drafted_per_position, strict=False
            )
        ],
        "tokens_per_s": quartiles(cell_speeds(runs, method)),
        "speedup": quartiles(ratios),
        "ms_per_step": {phase: statistics.median(ms[phase] for ms in per_step) for phase in PHASES if per_step},
        "overhead_ms_per_step": statistics.median(overheads) if overheads else None,
        "identical": not different,
        "num_different": len(different),
        "first_divergence": _divergence(different[0], plains[different[0].pair]) if different else None,
    }


def _overall(method: str, runs: list[Run], plains: Plains, cells: list[dict[str, Any]]) -> dict[str, Any]:
    cell = _cell(ALL_CATEGORIES, method, [run for run in runs if run.method == method], plains)
    explained = (other["first_divergence"] for other in cells if other["method"] == method)
    return {**cell, "first_divergence": next((divergence for divergence in explained if divergence is not None), None)}


def _divergence(run: Run, plain: Run) -> dict[str, Any]:
    """The first position, counted from the answer's start, where two answers differ; a token is None behind an answer's end."""
    pairs = zip(run.token_ids, plain.token_ids, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(run.token_ids), len(plain.token_ids)))
    token, plain_token = (ids[position] if position < len(ids) else None for ids in (run.token_ids, plain.token_ids))
    return {
        "category": run.category,
        "prompt": run.prompt,
        "repeat": run.repeat,
        "position": position,
        "plain_token": plain_token,
        "token": token,
    }


def _explain(
    llm: LLM, options: BenchOptions, prompts: Mapping[tuple[str, str], Prompt], plains: Plains, cell: Mapping[str, Any]
) -> dict[str, Any]:
    """Texts of the two tokens, and how clear plain decoding's choice was, which takes one more request.

    Log-probabilities of one row differ as its logits do.
    """
    found = cell["first_divergence"]
    key, repeat, position = (found["category"], found["prompt"]), found["repeat"], found["position"]
    params = replace(_params(options, PLAIN, repeat), max_tokens=position + 1, logprobs=2)
    answer = llm.generate(prompts[key], params)[0].outputs[0]
    margin = None
    if answer.token_ids == plains[(*key, repeat)].token_ids[: position + 1] and len(answer.logprobs or ()) == position + 1:
        assert answer.logprobs is not None
        first, second = sorted(answer.logprobs[position].values(), key=lambda entry: entry.rank)[:2]
        margin = first.logprob - second.logprob
    decode = llm.checkpoint.tokenizer.decode
    texts = {
        f"{name}_text": None if found[name] is None else decode([found[name]], skip_special_tokens=False)
        for name in ("plain_token", "token")
    }
    return {**texts, "margin": margin}


# ------------------------------------------------------------------------------------------------ the table


def format_table(result: Mapping[str, Any]) -> str:
    """A result of ``run_bench`` as aligned plain text: machine, ceiling, speeds, milliseconds per step, divergences."""
    rows: list[tuple[str, ...]] = [
        ("category", "method", "tok/s", "speed-up", "quartiles", "length", "rate", "per position", "same output")
    ]
    rows += [_speed_row(cell) for cell in [*result["cells"], *result["overall"]]]
    phases: list[tuple[str, ...]] = [("ms per step", *PHASES, "overhead")]
    for cell in result["overall"]:
        figures = [*(cell["ms_per_step"].get(phase) for phase in PHASES), cell["overhead_ms_per_step"]]
        phases.append((_label(cell["method"]), *("-" if value is None else f"{value:.3f}" for value in figures)))
    parts = [_header(result), aligned(rows, num_left=2), aligned(phases, num_left=1), _divergences(result)]
    return "\n\n".join(part for part in [*parts, "\n".join(result["notes"])] if part)


def _label(method: str) -> str:
    return "plain" if method == PLAIN else method


def _header(result: Mapping[str, Any]) -> str:
    machine, model, bandwidth, ceiling = (result[name] for name in ("machine", "model", "bandwidth", "ceiling"))
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 1e9:.1f} GB"
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    share = "" if ceiling["plain_percent"] is None else f"; plain reaches {ceiling['plain_percent']:.0f} %"
    return "\n".join(
        (
            f"machine:   {where}{gpu}; torch {machine['torch']}, {machine['threads']} threads; load {machine['load']:.1f}",
            f"model:     {model['name']} ({model['quantization']}), {model['dtype']} on {model['device']}, "
            f"exactness: {model['exactness']}",
            f"bandwidth: {bandwidth['best'] / 1e9:.1f} GB/s read at best, {bandwidth['median'] / 1e9:.1f} in the median",
            f"ceiling:   {model['bytes_per_token'] / 1e6:,.0f} MB of weights a token allow {ceiling['tokens_per_s']:.1f} "
            f"plain tok/s{share}",
        )
    )


def _speed_row(cell: Mapping[str, Any]) -> tuple[str, ...]:
    speed, speedup, drafts = cell["tokens_per_s"], cell["speedup"], cell["method"] != PLAIN
    different = f"{cell['num_different']} of {cell['num_runs']} differ"
    return (
        cell["category"],
        _label(cell["method"]),
        "-" if speed is None else f"{speed['median']:.1f}",
        f"{speedup['median']:.2f}x" if speedup and drafts else "",
        f"{speedup['lower']:.2f}-{speedup['upper']:.2f}" if speedup and drafts else "",
        f"{cell['acceptance_length']:.2f}",
        f"{cell['acceptance_rate']:.2f}" if drafts else "",
        " ".join(f"{rate:.2f}" for rate in cell["acceptance_per_position"]),
        "" if not drafts else "yes" if cell["identical"] else different,
    )


def aligned(rows: Seq[tuple[str, ...]], num_left: int) -> str:
    """A table in plain text, the first row its header: the first ``num_left`` columns flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = [str.ljust] * num_left + [str.rjust] * (len(widths) - num_left)
    lines = ["  ".join(f(text, width) for f, text, width in zip(pad, row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * sum(widths, 2 * len(widths) - 2), *lines[1:]])


def _divergences(result: Mapping[str, Any]) -> str:
    lines = []
    for cell in result["cells"]:
        found = cell["first_divergence"]
        if found is not None:
            margin = "not known" if found["margin"] is None else f"{found['margin']:.4g}"
            where = f"{found['category']}/{found['prompt']} at token {found['position']}"
            lines.append(
                f"{_label(cell['method'])} differs from plain in {where}: "
                f"{found['token_text']!r} instead of {found['plain_token_text']!r} (top-2 logit margin {margin})"
            )
    return "\n".join(lines)
