"""An HTML page with plots, and that of measured passes.

Owns: the page, and the plotting library.  Does not know: how anything is measured.
"""

from __future__ import annotations

import html
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foredraft.array_file import write_text
from foredraft.passes import format_table
from foredraft.types import ConfigError

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")


def plotting() -> Any:
    """Plotly's module of figures.

    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        return importlib.import_module("plotly.graph_objects")
    except ImportError as error:
        raise ConfigError(f"an HTML report needs plotly ({error}); install it with: pip install 'foredraft[report]'.") from error


def page(title: str, sections: Sequence[tuple[str, str, Any]], text: str) -> str:
    """HTML that loads nothing from elsewhere: a heading, an explanation and a plot per section, then preformatted text."""
    parts = []
    for index, (heading, explained, figure) in enumerate(sections):
        parts.append(f"<h2>{html.escape(heading)}</h2>\n<p>{html.escape(explained)}</p>" if heading else "")
        # The plots' own title would say the same again; the library is in the page once.
        shown = figure.update_layout(title=None, margin={"t": 30})
        parts.append(shown.to_html(full_html=False, include_plotlyjs=index == 0))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        "<style>body { font-family: sans-serif; margin: 2em auto; max-width: 70em; } pre { overflow-x: auto; }</style></head>\n"
        f"<body>\n<h1>{html.escape(title)}</h1>\n{chr(10).join(parts)}\n<pre>{html.escape(text)}</pre>\n</body>\n</html>\n"
    )


def write_passes(result: Mapping[str, Any], path: Path) -> None:
    """Write a result of ``run_passes`` as one HTML file that loads nothing from elsewhere.

    Raises:
        ConfigError: plotly is not installed.
        CapacityError: the page cannot be written.
    """
    title = f"Cost of a target pass: {result['model']['name']}"
    write_text(path, page(title, [("", "", passes_figure(result))], format_table(result)))


def passes_figure(result: Mapping[str, Any]) -> Any:
    """Milliseconds against rows for each context: what was measured with its quartiles, the floor, and one-row passes in turn."""
    graphs = plotting()
    figure = graphs.Figure()
    most = max(ms for passes in result["passes"].values() for ms in passes.values())
    for index, (context, passes) in enumerate(result["passes"].items()):
        colour = COLOURS[index % len(COLOURS)]
        rows, cells = [int(count) for count in passes], list(result["quartiles"][context].values())
        medians = list(passes.values())
        spread = {
            "type": "data",
            "symmetric": False,
            "array": [cell["upper"] - cell["median"] for cell in cells],
            "arrayminus": [cell["median"] - cell["lower"] for cell in cells],
        }
        group = {"legendgroup": context, "line": {"color": colour}}
        ends, floor = [rows[0], rows[-1]], result["floor"][context]
        figure.add_scatter(x=rows, y=medians, error_y=spread, mode="lines+markers", name=f"measured, context {context}", **group)
        group["line"] = {"color": colour, "dash": "dot"}
        figure.add_scatter(x=ends, y=[floor, floor], mode="lines", name=f"memory floor, context {context}", **group)
        group["line"] = {"color": colour, "dash": "dash"}
        linear = [passes["1"] * count for count in ends]
        figure.add_scatter(x=ends, y=linear, mode="lines", name=f"rows one by one, context {context}", **group)
    figure.update_layout(
        xaxis={"title": {"text": "rows of the pass (drafted tokens + 1)"}, "rangemode": "tozero"},
        yaxis={"title": {"text": "milliseconds"}, "range": [0, 1.15 * most]},
        template="plotly_white",
        height=560,
    )
    return figure
