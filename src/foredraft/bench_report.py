"""The result of a bench as one HTML page of plots, and each plot as a PNG.

Owns: the plots, the page and the image files.  Does not know: how a figure is computed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from foredraft.array_file import write_text
from foredraft.bench_table import format_table, label
from foredraft.drafters import registry
from foredraft.lanes import PLAIN
from foredraft.report import COLOURS, page, plotting
from foredraft.types import PHASES

PHASE_COLOURS = dict(zip(PHASES, ("#bbbbbb", "#ff7f0e", "#1f77b4", "#2ca02c", "#9467bd"), strict=True))
BESIDES = tuple(phase for phase in PHASES if phase != "pass")
NO_IMAGES = "the plots were not written as PNG, which needs kaleido: pip install kaleido"

Cell = Mapping[str, Any]


def write_report(result: Mapping[str, Any], path: Path) -> list[str]:
    """Write a result of ``run_bench`` as one HTML file that loads nothing from elsewhere, and PNGs of its plots beside it.

    Returns sentences on what was not written.

    Raises:
        ConfigError: plotly is not installed.
        CapacityError: the page cannot be written.
    """
    figures = all_figures(result)
    title = f"Speculative decoding of {result['model']['name']}"
    sections = [(figure.layout.title.text, _EXPLAINED[name], figure) for name, figure in figures.items()]
    missing = _write_images(figures, path)  # before the page takes the titles out of the plots
    write_text(path, page(title, sections, format_table(result)))
    return missing


def can_write_images() -> bool:
    """Whether kaleido is installed."""
    return importlib.util.find_spec("kaleido") is not None


def _write_images(figures: Mapping[str, Any], path: Path) -> list[str]:
    if not can_write_images():
        return [NO_IMAGES]
    for name, figure in figures.items():
        try:
            figure.write_image(path.with_name(f"{path.stem}_{name}.png"), width=1000, height=560)
        except Exception as error:
            # kaleido runs a browser of its own, and says by many kinds of exception that there is none.
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            return [f"the plots were not written as PNG: {reason}"]
    return []


_EXPLAINED = {
    "speedup_by_k": "Median over one prompt of each category of the paired ratio to plain decoding. Dashed: predicted from the "
    "plain run's tokens, the drafter replayed over them, and the calibrated cost of passes. Above the line at 1, drafting pays.",
    "speedup_by_batch": "Mixed prompts, so many at a time. Where a line falls below 1, drafting stops to pay; crosses mark it "
    "as measured, open circles as predicted.",
    "prediction": "Every cell of the bench: workload, method, K and batch size. Between the dotted lines the error is at most "
    "10 %.",
    "pass_cost": "The line is the calibration, of one sequence; points are the passes that ran in this bench, with quartiles, of "
    "one or many sequences and longer contexts.",
    "acceptance_by_position": "Of the drafts that had a token at this position and were verified, the share whose tokens were "
    "right up to and including it.",
    "phases": "Milliseconds of a decoding step, medians over the runs; a step of a drafting method emits more than one token.",
    "phases_besides": "The same on another scale: what drafting, sampling and all else take.",
    "k_over_time": "Step by step, how many tokens were drafted and how many of them came; 0 is a plain step.",
}


def all_figures(result: Mapping[str, Any]) -> dict[str, Any]:
    """The plots by name; those without data are left out."""
    example = result["example"]
    made = {
        "speedup_by_k": speedup_by_k(result["k_sweep"]) if result["k_sweep"] else None,
        "speedup_by_batch": speedup_by_batch(result["batch_sweep"], result["crossover"]) if result["batch_sweep"] else None,
        "prediction": predictions([*result["cells"], *result["k_sweep"], *result["batch_sweep"]]) if result["prediction"] else None,
        "pass_cost": pass_cost(result["pass_times"], result["pass_ms"]),
        "acceptance_by_position": acceptance_by_position(result["overall"]),
        "phases": phases(result["overall"], PHASES, "Time per phase of a step"),
        "phases_besides": phases(result["overall"], BESIDES, "Time per phase, but for the pass"),
        "k_over_time": k_over_time(example) if example else None,
    }
    return {name: figure for name, figure in made.items() if figure is not None}


def _figure(title: str, x: str, y: str) -> Any:
    figure = plotting().Figure()
    figure.update_layout(title={"text": title}, template="plotly_white", height=480, hovermode="closest")
    figure.update_xaxes(title={"text": x})
    figure.update_yaxes(title={"text": y}, rangemode="tozero")
    return figure


def _by_method(cells: Seq[Cell]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell["method"] != PLAIN and cell["speedup"] is not None:
            found.setdefault(cell["method"], []).append(cell)
    return found


def _speedup_lines(figure: Any, cells: Seq[Cell], name_of_x: str, start: tuple[float, float] | None = None) -> None:
    """For each method the measured line with quartiles, and the predicted one dashed, from ``start`` if that is given."""
    for index, (method, some) in enumerate(_by_method(cells).items()):
        colour = COLOURS[index % len(COLOURS)]
        first = [start] if start else []
        measured = [*first, *((cell[name_of_x], cell["speedup"]["median"]) for cell in some)]
        above = [0.0] * len(first) + [cell["speedup"]["upper"] - cell["speedup"]["median"] for cell in some]
        below = [0.0] * len(first) + [cell["speedup"]["median"] - cell["speedup"]["lower"] for cell in some]
        figure.add_scatter(
            x=[x for x, _ in measured],
            y=[y for _, y in measured],
            error_y={"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1},
            mode="lines+markers",
            name=f"{method}, measured",
            line={"color": colour},
            legendgroup=method,
        )
        predicted = [*first, *((cell[name_of_x], cell["predicted"]["speedup"]) for cell in some if cell["predicted"])]
        figure.add_scatter(
            x=[x for x, _ in predicted],
            y=[y for _, y in predicted],
            mode="lines+markers",
            name=f"{method}, predicted",
            line={"color": colour, "dash": "dash"},
            marker={"symbol": "circle-open"},
            legendgroup=method,
        )
    figure.add_hline(y=1.0, line={"color": "#555555", "width": 1})


def speedup_by_k(cells: Seq[Cell]) -> Any:
    """A line per method over K, where K = 0 is plain decoding, and a level one for ``auto``."""
    figure = _figure("Speed-up by K", "K, draft tokens per pass", "speed-up over plain decoding")
    _speedup_lines(figure, [cell for cell in cells if cell["method"] != registry.AUTO], "num_speculative_tokens", start=(0, 1.0))
    figure.update_xaxes(dtick=1)
    for cell in cells:
        if cell["method"] == registry.AUTO and cell["speedup"] is not None:
            ends, value = [0, max(one["num_speculative_tokens"] for one in cells)], cell["speedup"]["median"]
            line = {"color": COLOURS[2], "dash": "dot"}
            figure.add_scatter(x=ends, y=[value, value], mode="lines", name="auto, measured", line=line)
    return figure


def speedup_by_batch(cells: Seq[Cell], crossover: Mapping[str, Mapping[str, float | None]]) -> Any:
    """A line per method over the batch size, with the places where it crosses 1."""
    figure = _figure("Speed-up by batch size", "requests at a time", "speed-up over plain decoding at the same batch size")
    _speedup_lines(figure, cells, "batch")
    for index, method in enumerate(_by_method(cells)):
        for kind, symbol in (("measured", "x"), ("predicted", "circle-open")):
            at = crossover[method][kind]
            if at is not None:
                marker = {"symbol": symbol, "size": 14, "color": COLOURS[index % len(COLOURS)], "line": {"width": 2}}
                name = f"{method}: no gain from {at:.1f} ({kind})"
                figure.add_scatter(x=[at], y=[1.0], mode="markers", marker=marker, name=name, legendgroup=method, showlegend=False)
    sizes = sorted({cell["batch"] for cell in cells})
    figure.update_xaxes(type="log", tickvals=sizes, ticktext=[str(size) for size in sizes])
    return figure


def predictions(cells: Seq[Cell]) -> Any:
    """Predicted against measured speed-up, one point per cell."""
    figure = _figure("Predicted and measured", "measured speed-up", "predicted speed-up")
    found = _by_method([cell for cell in cells if cell["predicted"]])
    values = [value for some in found.values() for c in some for value in (c["speedup"]["median"], c["predicted"]["speedup"])]
    ends = [0.9 * min(values, default=1.0), 1.1 * max(values, default=1.0)]
    for factor, dash in ((1.0, "solid"), (1.1, "dot"), (0.9, "dot")):
        line = {"color": "#555555", "width": 1, "dash": dash}
        figure.add_scatter(x=ends, y=[factor * end for end in ends], mode="lines", line=line, showlegend=False, hoverinfo="skip")
    for index, (method, some) in enumerate(found.items()):
        figure.add_scatter(
            x=[cell["speedup"]["median"] for cell in some],
            y=[cell["predicted"]["speedup"] for cell in some],
            mode="markers",
            name=method,
            marker={"color": COLOURS[index % len(COLOURS)], "size": 8, "opacity": 0.7},
            text=[f"{cell['category']}, K = {cell['num_speculative_tokens']}, batch {cell['batch']}" for cell in some],
        )
    figure.update_yaxes(rangemode="normal")
    return figure


def pass_cost(times: Mapping[str, Any], measured: Mapping[str, Mapping[str, float]]) -> Any:
    """Milliseconds against rows."""
    figure = _figure("Cost of a pass", "rows of the pass", "milliseconds")
    rows, base = times["rows"], [1e3 * value for value in times["base"]]
    figure.add_scatter(x=rows, y=base, mode="lines+markers", name="calibrated", line={"color": COLOURS[0]})
    spread = {
        "type": "data",
        "symmetric": False,
        "array": [cell["upper"] - cell["median"] for cell in measured.values()],
        "arrayminus": [cell["median"] - cell["lower"] for cell in measured.values()],
        "thickness": 1,
    }
    medians = [cell["median"] for cell in measured.values()]
    marker = {"color": COLOURS[1]}
    x = [int(count) for count in measured]
    figure.add_scatter(x=x, y=medians, error_y=spread, mode="markers", name="in this bench", marker=marker)
    figure.add_scatter(
        x=[1, rows[-1]], y=[base[0], base[0]], mode="lines", name="one row", line={"color": "#555555", "dash": "dot"}
    )
    figure.update_xaxes(rangemode="tozero")
    return figure


def acceptance_by_position(overall: Seq[Cell]) -> Any:
    """A line per method: accepted over drafted tokens, by position in the draft."""
    figure = _figure("Acceptance by position", "position in the draft", "accepted / drafted")
    for index, cell in enumerate(cell for cell in overall if cell["method"] != PLAIN):
        rates = cell["acceptance_per_position"]
        colour = {"color": COLOURS[index % len(COLOURS)]}
        figure.add_scatter(x=list(range(1, len(rates) + 1)), y=rates, mode="lines+markers", name=cell["method"], line=colour)
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(range=[0, 1.02])
    return figure


def phases(overall: Seq[Cell], shown: Seq[str], title: str) -> Any:
    """A bar per method, of some phases of a step."""
    figure = _figure(title, "", "milliseconds")
    names = [label(cell["method"]) for cell in overall]
    for phase in shown:
        heights = [cell["ms_per_step"].get(phase, 0.0) for cell in overall]
        figure.add_bar(x=names, y=heights, name=phase, marker={"color": PHASE_COLOURS[phase]})
    figure.update_layout(barmode="stack")
    return figure


def k_over_time(example: Mapping[str, Any]) -> Any:
    """Drafted and accepted tokens of each step of one request."""
    title = f"K over time, auto, {example['category']}/{example['prompt']}"
    figure = _figure(title, "step", "tokens")
    steps = list(range(1, len(example["steps"]) + 1))
    drafted, accepted = ([step[index] for step in example["steps"]] for index in (0, 1))
    figure.add_bar(x=steps, y=drafted, name="drafted (K)", marker={"color": "#c6dbef"})
    figure.add_bar(x=steps, y=accepted, name="accepted", marker={"color": "#2ca02c"}, width=0.4)
    figure.update_layout(barmode="overlay")
    figure.update_yaxes(dtick=1)
    return figure
