"""What ``foredraft plan`` answers: options in, a result as plain data out.

Owns: the order of the work, and the shape of the result.  Does not know: how a figure is computed, measured or shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import Any

from foredraft.config import SpeculativeConfig
from foredraft.drafters import registry
from foredraft.forecast import (
    LARGEST_BATCH,
    MemoryTable,
    Method,
    best_of,
    break_even,
    crossover,
    forecast,
    memory_table,
    schedule,
    with_alpha,
)
from foredraft.hardware import GIB
from foredraft.loader.aliases import ALIASES
from foredraft.plan_measure import OpenLLM, Report, measured_setting, replayed_methods
from foredraft.plan_options import PlanOptions
from foredraft.plan_setting import (
    RESERVED,
    Setting,
    alpha_method,
    chosen_context,
    chosen_hardware,
    computed,
    log_records,
    open_draft,
    open_subject,
)
from foredraft.vllm_config import HEADS, NO_TARGET_NAME, VllmPlan, remarks, serve_command, speculative_config

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def run_plan(options: PlanOptions, report: Report, open_llm: OpenLLM) -> dict[str, Any]:
    """Plan, and tell ``report`` how far it is, line by line.  ``open_llm`` opens a model where one has to run.

    Returns plain data for JSON::

        options              the PlanOptions as a mapping
        place                hardware, source, bandwidth, flops, memory_bytes, num_gpus, dtype; of this machine what was measured
        target, draft        the ModelDims as mappings; draft None without one
        context              tokens of one request
        acceptance           per method: K -> tokens per pass, interval, draft rows, seconds of proposing
        forecasts            a row per batch and method: see forecast.Forecast; verdict, and fits: whether memory holds the batch.
                             Behind several methods one of "auto", which is the best of them
        schedules            per method: ranges [first batch, last batch, K], and crossover: the batch from which on to leave it
                             off, or None
        alphas               where nothing says what is accepted: a row per alpha and batch, and break_even per batch; else None
        memory               per method, "none" first: lines, kv_bytes, bytes_per_token, num_tokens, num_requests,
                             missing_bytes, num_gpus_needed (None where it fits, or more GPUs are no answer)
        vllm                 None, or speculative_config, command and remarks
        notes                sentences on where the figures are from

    Raises:
        ForedraftError: see the tree in foredraft.types.
    """
    if not options.is_here:
        chosen_hardware(options)  # before anything that takes long
    runs = options.is_here or options.measure is not None
    setting = measured_setting(options, report, open_llm) if runs else _computed_setting(options, report)
    return _result(options, setting)


def _computed_setting(options: PlanOptions, report: Report) -> Setting:
    """For hardware of the table or a file: nothing runs but drafters."""
    target, draft = open_subject(options.model, options.target_params, "target"), open_draft(options)
    chosen_context(options, target.dims.max_context)
    notes: list[str] = []
    methods: list[Method] = []
    if options.alpha is not None:
        methods = [alpha_method(options, notes)]
    elif options.from_log is not None:
        methods = replayed_methods(options, log_records(options.from_log, target, notes), target, draft, report, notes)
    return computed(options, target, draft, methods, notes)


def _assumed(options: PlanOptions, alpha: float) -> Method:
    """The method that a plan without a word on acceptance is about."""
    name = "draft_model" if options.has_draft else "ngram"
    return with_alpha(name, alpha, options.num_speculative_tokens, runs_model=options.has_draft)


def _memory(options: PlanOptions, setting: Setting) -> list[MemoryTable]:
    tables = []
    for method in (None, *(setting.methods or [_assumed(options, 0.5)])):
        per_token = setting.token_bytes(method)
        name = "none" if method is None else method.name
        tables.append(memory_table(name, setting.memory_bytes, setting.buffers(method), per_token, setting.context))
    return tables


# ------------------------------------------------------------------------------------------------ the result


def _result(options: PlanOptions, setting: Setting) -> dict[str, Any]:
    memory = {table.method: table for table in _memory(options, setting)}
    middle = setting.machines[0]
    ranges = {}
    for method in setting.methods:
        # Beyond what memory holds there is no batch to plan for, unless it was asked for.
        most = max(*options.batches, min(LARGEST_BATCH, memory[method.name].num_requests), 1)
        ranges[method.name] = schedule(method, setting.context, middle, most)
    rows = [row for batch in options.batches for row in _forecasts(setting, memory, batch)]
    return {
        "options": asdict(options),
        "place": dict(setting.place),
        "target": asdict(setting.target.dims),
        "draft": asdict(setting.draft.dims) if setting.draft is not None else None,
        "context": setting.context,
        "acceptance": {method.name: [asdict(one) for one in method.outcomes] for method in setting.methods},
        "forecasts": rows,
        "schedules": {name: {"ranges": some, "crossover": crossover(some)} for name, some in ranges.items()},
        "alphas": None if setting.methods else _alphas(options, setting),
        "memory": [_memory_dict(options, setting, table) for table in memory.values()],
        "vllm": _vllm(options, setting, memory, ranges) if options.emit == "vllm" else None,
        "notes": list(setting.notes),
    }


def _forecasts(setting: Setting, memory: Mapping[str, MemoryTable], batch: int) -> list[dict[str, Any]]:
    """A row per method at one batch size, and where there are several one of ``auto``, which takes the best."""
    rows = [forecast(method, batch, setting.context, setting.machines) for method in setting.methods]
    found = [{**asdict(row), "verdict": row.verdict, "fits": batch <= memory[row.method].num_requests} for row in rows]
    if len(rows) > 1:
        best = best_of(registry.AUTO, rows)
        found.append({**asdict(best), "verdict": best.verdict, "fits": all(row["fits"] for row in found)})
    return found


def _memory_dict(options: PlanOptions, setting: Setting, table: MemoryTable) -> dict[str, Any]:
    names = ("kv_bytes", "num_tokens", "num_requests", "missing_bytes")
    needed = None
    if table.missing_bytes and not options.is_here and options.memory_gib is None:
        buffers = sum(size for _, size in table.lines) - RESERVED * table.memory_bytes
        one_gpu = (1 - RESERVED) * setting.place["memory_bytes"]
        needed = math.ceil((buffers + table.context * table.bytes_per_token) / one_gpu)
    return {**asdict(table), **{name: getattr(table, name) for name in names}, "num_gpus_needed": needed}


def _alphas(options: PlanOptions, setting: Setting) -> dict[str, Any]:
    """What acceptance would bring, where nobody knows it."""

    def make(alpha: float) -> Method:
        return _assumed(options, alpha)

    context, machines = setting.context, setting.machines
    rows = [
        {"alpha": alpha, **asdict(forecast(make(alpha), batch, context, machines))} for alpha in ALPHAS for batch in options.batches
    ]
    return {
        "rows": rows,
        "break_even": {str(batch): break_even(make, batch, context, machines[0]) for batch in options.batches},
    }


def _settings_of(method: str) -> dict[str, Any]:
    """With what a method was replayed, where vLLM would do otherwise or may one day."""
    config = SpeculativeConfig()
    names = {
        "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
        "suffix": ("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
    }
    return {name: getattr(config, name) for name in names.get(method, ())}


def _vllm(
    options: PlanOptions,
    setting: Setting,
    memory: Mapping[str, MemoryTable],
    ranges: Mapping[str, Seq[tuple[int, int, int]]],
) -> dict[str, Any]:
    """The options for the method that is best at the smallest batch."""
    smallest = options.batches[0]
    rows = [forecast(method, smallest, setting.context, setting.machines) for method in setting.methods]
    best = max(rows, key=lambda row: row.speedup).method
    num_seqs = max(1, min(max(options.batches), memory[best].num_requests or max(options.batches)))
    # What goes by a short name here, or is a GGUF file, has another name there.
    has_name = (
        options.model is not None and options.can_load and options.model not in ALIASES and not options.model.endswith(".gguf")
    )
    draft = options.draft if options.draft and not options.draft.endswith(".json") else None
    plan = VllmPlan(
        target=options.model if options.model is not None and has_name else NO_TARGET_NAME,
        method=best,
        draft=setting.place.get("head") if best in HEADS else draft,
        settings=_settings_of(best),
        ranges=[(first, min(last, num_seqs), k) for first, last, k in ranges[best] if first <= num_seqs],
        max_model_len=setting.context,
        max_num_seqs=num_seqs,
        num_gpus=options.gpus,
        dtype=str(setting.place.get("dtype", "bfloat16")),
    )
    told = remarks(plan)
    if memory[best].missing_bytes:
        told.append(f"this does not fit: {memory[best].missing_bytes / GIB:.1f} GiB are missing")
    return {"method": best, "speculative_config": speculative_config(plan), "command": serve_command(plan), "remarks": told}
