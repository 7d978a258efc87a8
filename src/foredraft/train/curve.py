"""The course of a training, for people and for programs.

Owns: ``curve.json`` and ``curve.html`` in the folder of what was trained.  Does not know: what the figures mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foredraft.array_file import write_whole
from foredraft.report import page, plotting
from foredraft.types import ConfigError

CURVE, PLOT = "curve.json", "curve.html"


def write_curve(
    folder: Path, title: str, points: Sequence[Mapping[str, float]], shown: Sequence[tuple[str, str, Sequence[str]]]
) -> tuple[Path, ...]:
    """Write the points, and a page with one plot over tokens for each of ``shown``: heading, explanation, names of figures.

    Without plotly there is no page.  Gives the files that were written.

    Raises:
        CapacityError: a file cannot be written.
    """
    write_whole(folder / CURVE, json.dumps(list(points), indent=1).encode())
    try:
        sections = [(heading, text, _figure(points, names)) for heading, text, names in shown]
    except ConfigError:
        return (folder / CURVE,)
    write_whole(folder / PLOT, page(title, sections, "").encode())
    return folder / CURVE, folder / PLOT


def _figure(points: Sequence[Mapping[str, float]], names: Sequence[str]) -> Any:
    figure = plotting().Figure()
    for name in names:
        known = [point for point in points if name in point]
        figure.add_scatter(
            x=[point["tokens"] for point in known],
            y=[point[name] for point in known],
            mode="lines+markers",
            name=name.replace("_", " "),
        )
    axes = {"xaxis": {"title": {"text": "tokens learned from"}}, "yaxis": {"rangemode": "tozero"}}
    return figure.update_layout(**axes, template="plotly_white", height=420, showlegend=True)
