"""The result of a bench as plain text.

Owns: the table, its columns and words.  Does not know: how a figure is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from foredraft.drafters import registry
from foredraft.lanes import PLAIN
from foredraft.types import PHASES


def format_table(result: Mapping[str, Any]) -> str:
    """A result of ``run_bench``: machine, ceiling, speeds, sweeps, milliseconds per step, predictions, divergences."""
    parts = [
        _header(result),
        _speed_table(result),
        _k_table(result["k_sweep"]),
        _batch_table(result["batch_sweep"], result["crossover"]),
        _phase_table(result["overall"]),
        _prediction(result["prediction"]),
        _divergences(result),
        "\n".join(result["notes"]),
    ]
    return "\n\n".join(part for part in parts if part)


def label(method: str) -> str:
    """A method's name in a table."""
    return "plain" if method == PLAIN else method


def aligned(rows: Seq[tuple[str, ...]], num_left: int) -> str:
    """A table in plain text, the first row its header: the first ``num_left`` columns flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = [str.ljust] * num_left + [str.rjust] * (len(widths) - num_left)
    lines = ["  ".join(f(text, width) for f, text, width in zip(pad, row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * sum(widths, 2 * len(widths) - 2), *lines[1:]])


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


# ------------------------------------------------------------------------------------------------ speeds


def _speed_table(result: Mapping[str, Any]) -> str:
    rows: list[tuple[str, ...]] = [
        ("category", "method", "tok/s", "speed-up", "quartiles", "predicted", "length", "rate", "per position", "same output")
    ]
    rows += [_speed_row(cell) for cell in [*result["cells"], *result["overall"]]]
    return aligned(rows, num_left=2)


def _speed_row(cell: Mapping[str, Any]) -> tuple[str, ...]:
    speed, speedup, drafts = cell["tokens_per_s"], cell["speedup"], cell["method"] != PLAIN
    different = f"{cell['num_different']} of {cell['num_runs']} differ"
    return (
        cell["category"],
        label(cell["method"]),
        "-" if speed is None else f"{speed['median']:.1f}",
        f"{speedup['median']:.2f}x" if speedup and drafts else "",
        f"{speedup['lower']:.2f}-{speedup['upper']:.2f}" if speedup and drafts else "",
        f"{cell['predicted']['speedup']:.2f}x" if cell["predicted"] else "",
        f"{cell['acceptance_length']:.2f}",
        f"{cell['acceptance_rate']:.2f}" if drafts else "",
        " ".join(f"{rate:.2f}" for rate in cell["acceptance_per_position"]),
        "" if not drafts else "yes" if cell["identical"] else different,
    )


def pair(cell: Mapping[str, Any] | None) -> str:
    """``measured (predicted)`` speed-up; a dash where nothing was decoded."""
    if cell is None or cell["speedup"] is None:
        return "-"
    expected = f" ({cell['predicted']['speedup']:.2f})" if cell["predicted"] else ""
    return f"{cell['speedup']['median']:.2f}{expected}"


def best_fixed(cells: Seq[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The cell of a K sweep with the highest measured speed-up of all fixed settings."""
    fixed = [cell for cell in cells if cell["method"] not in (PLAIN, registry.AUTO) and cell["speedup"] is not None]
    return max(fixed, key=lambda cell: float(cell["speedup"]["median"]), default=None)


def _k_table(cells: Seq[Mapping[str, Any]]) -> str:
    methods = list(dict.fromkeys(cell["method"] for cell in cells if cell["method"] not in (PLAIN, registry.AUTO)))
    if not methods:
        return ""
    at = {(cell["method"], cell["num_speculative_tokens"]): cell for cell in cells}
    rows: list[tuple[str, ...]] = [("speed-up (predicted)", *methods)]
    for k in sorted({k for method, k in at if method in methods}):
        rows.append((f"K = {k}", *(pair(at.get((method, k))) for method in methods)))
    auto = next((cell for cell in cells if cell["method"] == registry.AUTO), None)
    text, best = aligned(rows, num_left=1), best_fixed(cells)
    if auto is None or auto["speedup"] is None or best is None:
        return text
    share = auto["speedup"]["median"] / best["speedup"]["median"]
    setting = f"{best['method']} with K = {best['num_speculative_tokens']}"
    return f"{text}\nauto: {pair(auto)}, which is {share:.2f} times the best fixed setting of all prompts, {setting}"


def _batch_table(cells: Seq[Mapping[str, Any]], crossover: Mapping[str, Any]) -> str:
    methods = list(dict.fromkeys(cell["method"] for cell in cells if cell["method"] != PLAIN))
    if not cells:
        return ""
    at = {(cell["method"], cell["batch"]): cell for cell in cells}
    rows: list[tuple[str, ...]] = [("speed-up (predicted)", "plain tok/s in all", *methods)]
    for size in sorted({size for _, size in at}):
        speed = at[PLAIN, size]["tokens_per_s"]
        plain = "-" if speed is None else f"{speed['median']:.1f}"
        rows.append((f"batch {size}", plain, *(pair(at.get((method, size))) for method in methods)))
    rows.append(("no gain from", "", *(_crossing(crossover[method]) for method in methods)))
    return aligned(rows, num_left=1)


def _crossing(found: Mapping[str, float | None]) -> str:
    measured, predicted = (("never" if value is None else f"{value:.1f}") for value in (found["measured"], found["predicted"]))
    return f"{measured} ({predicted})"


def _phase_table(overall: Seq[Mapping[str, Any]]) -> str:
    rows: list[tuple[str, ...]] = [("ms per step", *PHASES, "overhead")]
    for cell in overall:
        figures = [*(cell["ms_per_step"].get(phase) for phase in PHASES), cell["overhead_ms_per_step"]]
        rows.append((label(cell["method"]), *("-" if value is None else f"{value:.3f}" for value in figures)))
    return aligned(rows, num_left=1)


# ------------------------------------------------------------------------------------------------ sentences


def _prediction(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    return (
        f"predictions: {found['share_within_10_percent']:.0%} of {found['num_cells']} cells within 10 %, "
        f"{found['share_of_right_signs']:.0%} with the right sign ({found['num_even']} were measured within noise of 1.00); "
        f"median error {found['median_error']:.1%}, worst {found['worst_error']:+.1%}\n{found['rule']}"
    )


def _divergences(result: Mapping[str, Any]) -> str:
    lines = []
    for cell in result["cells"]:
        found = cell["first_divergence"]
        if found is not None:
            margin = "not known" if found["margin"] is None else f"{found['margin']:.4g}"
            where = f"{found['category']}/{found['prompt']} at token {found['position']}"
            lines.append(
                f"{label(cell['method'])} differs from plain in {where}: "
                f"{found['token_text']!r} instead of {found['plain_token_text']!r} (top-2 logit margin {margin})"
            )
    for cell in [*result["k_sweep"], *result["batch_sweep"]]:
        if not cell["identical"]:
            how = f"K = {cell['num_speculative_tokens']}, batch {cell['batch']}"
            lines.append(
                f"{label(cell['method'])} ({how}) differs from plain in {cell['num_different']} of {cell['num_runs']} runs"
            )
    return "\n".join(lines)
