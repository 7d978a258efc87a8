"""A plan's result as text.

Owns: how it looks.  Does not know: how a figure came about.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from foredraft.terminal import format_table

GIB = 1024**3
SHOWN_ROWS = (1, 2, 5, 9, 17, 33, 65)


def format_plan(result: Mapping[str, Any]) -> str:
    """A result of ``run_plan``: place, speed, batch sizes, memory, vLLM's options and notes."""
    parts = [_header(result)]
    if result["alphas"] is None:
        parts += [_speed(result), _schedules(result)]
    else:
        parts.append(_alphas(result))
    parts.append(_memory(result))
    if result["vllm"] is not None:
        parts.append(_vllm(result["vllm"]))
    return "\n\n".join([*parts, "\n".join(result["notes"])])


def _header(result: Mapping[str, Any]) -> str:
    place, draft = result["place"], result["draft"]
    with_draft = "" if draft is None else f", draft model {_model(draft)}"
    lines = [f"target:    {_model(result['target'])}{with_draft}; {result['context']:,} tokens of context a request"]
    if "machine" in place:
        machine, times = place["machine"], place["pass_times"]
        shown = [(rows, seconds) for rows, seconds in zip(times["rows"], times["base"], strict=True) if rows in SHOWN_ROWS]
        passes = ", ".join(f"{rows} row{'s' * (rows > 1)} {1e3 * seconds:.2f}" for rows, seconds in shown)
        where = f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:.1f}"
        lines.append(f"hardware:  this machine ({where}); {place['model']}")
        lines.append(f"passes:    ms without context: {passes}; {1e3 * place['token_seconds']:.3f} ms more for each emitted token")
    else:
        count = f"{place['num_gpus']} x " if place["num_gpus"] > 1 else ""
        figures = f"{place['bandwidth'] / 1e9:,.0f} GB/s, {place['flops'] / 1e12:,.1f} dense TFLOP/s in {place['dtype']}"
        size = f"{place['memory_bytes'] / GIB:,.1f} GiB"
        lines.append(f"hardware:  {count}{place['hardware']}: {figures}, {size}; {place['source']}")
    return "\n".join(lines)


def _model(dims: Mapping[str, Any]) -> str:
    return f"{dims['name']} ({_count(dims['num_params'])} parameters)"


def _count(number: float) -> str:
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:.3g}"


# ------------------------------------------------------------------------------------------------ speed


def _speed(result: Mapping[str, Any]) -> str:
    held = {table["method"]: table["num_requests"] for table in result["memory"]}
    rows = [["BATCH", "METHOD", "BEST K", "TOKENS/PASS", "SPEED-UP", "INTERVAL", "PLAIN TOK/S", "WITH DRAFTS", "ADVICE"]]
    for row in result["forecasts"]:
        on = row["num_tokens"] > 0
        advice = row["verdict"] + ("" if on else f" (K = {row['tried']} gives {row['speedup']:.2f})")
        if not row["fits"]:
            advice += f"; memory holds {held.get(row['method'], min(held.values()))}"
        rows.append(
            [
                str(row["batch"]),
                row["method"],
                str(row["num_tokens"]),
                f"{row['tokens']:.2f}" if on else "1.00",
                f"{row['speedup']:.2f}" if on else "1.00",
                f"{row['low']:.2f}-{row['high']:.2f}" if on else "-",
                f"{row['plain_tokens_per_s']:.1f}",
                f"{row['tokens_per_s']:.1f}" if on else "-",
                advice,
            ]
        )
    return f"{format_table(rows)}\n(tokens/s of each request)"


def _schedules(result: Mapping[str, Any]) -> str:
    return "\n".join(f"{name}: {_schedule(plan['ranges'], plan['crossover'])}" for name, plan in result["schedules"].items())


def _schedule(ranges: Seq[Seq[int]], crossover: int | None) -> str:
    if crossover == 1:
        return "leave it off at every batch size"
    shown = ranges[:-1] if crossover is not None else ranges
    steps = [f"{f'K = {k}' if k else 'off'} for {first}" + (f"-{last}" if last > first else "") for first, last, k in shown]
    ends = (
        f"the gain fades at a batch of {crossover}: leave it off from there on"
        if crossover is not None
        else f"the gain has not faded at {ranges[-1][1]}"
    )
    return f"{', '.join(steps)}; {ends}"


def _alphas(result: Mapping[str, Any]) -> str:
    alphas = result["alphas"]
    batches = [int(batch) for batch in alphas["break_even"]]
    cells = {(row["alpha"], row["batch"]): row for row in alphas["rows"]}
    rows = [["ALPHA", *(f"BATCH {batch}" for batch in batches)]]
    for alpha in dict.fromkeys(row["alpha"] for row in alphas["rows"]):
        rows.append([f"{alpha:.1f}", *(_alpha_cell(cells[alpha, batch]) for batch in batches)])
    least = alphas["break_even"].values()
    rows.append(["pays from", *("never" if alpha is None else f"{alpha:.2f}" for alpha in least)])
    method = "a draft model" if result["draft"] is not None else "a drafter that takes no time"
    return (
        f"What is accepted is not known; best K and speed-up (interval) by acceptance alpha at each position, with {method}:\n"
        f"{format_table(rows)}"
    )


def _alpha_cell(row: Mapping[str, Any]) -> str:
    if not row["num_tokens"]:
        return "off"
    return f"K {row['num_tokens']}: {row['speedup']:.2f} ({row['low']:.2f}-{row['high']:.2f})"


# ------------------------------------------------------------------------------------------------ memory and vLLM


def _memory(result: Mapping[str, Any]) -> str:
    tables, context = result["memory"], result["context"]
    longest_first = sorted(tables, key=lambda table: -len(table["lines"]))
    names = list(dict.fromkeys(name for table in longest_first for name, _ in table["lines"]))
    rows = [["GiB", *("plain" if table["method"] == "none" else table["method"] for table in tables)]]
    rows.append(["memory", *(_gib(table["memory_bytes"]) for table in tables)])
    for name in names:
        rows.append([f"- {name}", *(_gib(dict(table["lines"]).get(name, 0.0)) for table in tables)])
    rows.append(["= keys and values", *(_gib(table["kv_bytes"]) for table in tables)])
    rows.append(["KiB a cached token", *(f"{table['bytes_per_token'] / 1024:.1f}" for table in tables)])
    rows.append(["cached tokens", *(f"{table['num_tokens']:,}" for table in tables)])
    rows.append([f"requests of {context:,} tokens", *(f"{table['num_requests']:,}" for table in tables)])
    lines = [format_table(rows)]
    for table in tables:
        if table["missing_bytes"]:
            what = "plain decoding" if table["method"] == "none" else table["method"]
            enough = "" if table["num_gpus_needed"] is None else f" ({table['num_gpus_needed']} GPUs hold it)"
            lines.append(
                f"does not fit: {what} lacks {_gib(table['missing_bytes'])} GiB for one request{enough}; speeds are as if it did"
            )
    return "\n".join(lines)


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def _vllm(vllm: Mapping[str, Any]) -> str:
    return "\n".join([*(f"# {remark}" for remark in vllm["remarks"]), vllm["command"]])
