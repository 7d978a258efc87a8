"""The page and the plots of a bench: that each shows the figures of the result, and nothing comes from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench_helpers import Answer, Setup, Step, Told, dataset, options, prediction
from bench_helpers import scripted as scripted
from foredraft import bench_report
from foredraft.bench import run_bench
from foredraft.bench_report import NO_IMAGES, all_figures, write_report

ALL = [
    "speedup_by_k",
    "speedup_by_batch",
    "prediction",
    "pass_cost",
    "acceptance_by_position",
    "phases",
    "phases_besides",
    "k_over_time",
]


def script(prompt: str, method: str, seed: int) -> Answer:
    if method == "none":
        return Answer((Step(1), *[Step(1, {"pass": 90.0, "rest": 10.0})] * 6))
    step = Step(2, {"pass": 110.0, "rest": 10.0, "draft": 5.0}, drafted=3, accepted=1)
    return Answer((Step(1), *[step] * 3), tuple(range(7)), prediction(1.5))


@pytest.fixture
def result(scripted: Setup, tmp_path: Path) -> Iterator[dict[str, Any]]:
    scripted(script)
    path = dataset(tmp_path, "x", "y", categories=("a", "<b>"))
    yield run_bench(options(methods=("ngram", "auto"), k_sweep=(0, 1, 3), batch_sweep=(1, 2), dataset=path), Told())


def traces(figure: Any) -> dict[str, tuple[list[Any], list[Any]]]:
    return {trace.name: (list(trace.x), list(trace.y)) for trace in figure.data if trace.name}


def test_a_plot_shows_other_figures_than_the_result(result: dict[str, Any]) -> None:
    figures = all_figures(result)
    assert list(figures) == ALL
    speedup = pytest.approx(2 * 100 / 125)
    assert traces(figures["speedup_by_k"]) == {
        "ngram, measured": ([0, 1, 3], [1.0, speedup, speedup]),
        "ngram, predicted": ([0, 1, 3], [1.0, 1.5, 1.5]),
        "auto, measured": ([0, 8], [speedup, speedup]),
    }
    assert traces(figures["speedup_by_batch"])["auto, measured"] == ([1, 2], [speedup, speedup])
    assert traces(figures["pass_cost"])["calibrated"] == ([1, 5], [100.0, 120.0])
    assert traces(figures["pass_cost"])["in this bench"] == ([1, 4], [90.0, 110.0])
    assert traces(figures["acceptance_by_position"])["ngram"] == ([1, 2, 3], [1.0, 0.0, 0.0])
    assert traces(figures["phases"])["pass"] == (["plain", "ngram", "auto"], [90.0, 110.0, 110.0])
    assert traces(figures["phases_besides"])["draft"] == (["plain", "ngram", "auto"], [0.0, 5.0, 5.0])
    assert "pass" not in traces(figures["phases_besides"])
    assert traces(figures["k_over_time"]) == {"drafted (K)": ([1, 2, 3], [3, 3, 3]), "accepted": ([1, 2, 3], [1, 1, 1])}
    points = traces(figures["prediction"])
    assert {name: len(x) for name, (x, _) in points.items()} == {"ngram": 2 + 2 + 2, "auto": 2 + 1 + 2}


def test_the_crossover_is_not_marked(result: dict[str, Any]) -> None:
    crossover = {"ngram": {"measured": 1.5, "predicted": None}, "auto": {"measured": None, "predicted": 3.0}}
    figure = bench_report.speedup_by_batch(result["batch_sweep"], crossover)
    marks = [(trace.name, list(trace.x), list(trace.y)) for trace in figure.data if "no gain" in (trace.name or "")]
    assert marks == [("ngram: no gain from 1.5 (measured)", [1.5], [1.0]), ("auto: no gain from 3.0 (predicted)", [3.0], [1.0])]


def test_a_bench_without_sweeps_or_adaptive_runs_has_empty_plots(scripted: Setup, tmp_path: Path) -> None:
    scripted(lambda prompt, method, seed: replace(script(prompt, method, seed), predicted=None))
    result = run_bench(options(methods=("ngram",), dataset=dataset(tmp_path, "x")), Told())
    assert list(all_figures(result)) == ["pass_cost", "acceptance_by_position", "phases", "phases_besides"]


def test_the_page_loads_something_or_holds_the_library_twice(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_report, "can_write_images", lambda: False)
    path = tmp_path / "report.html"
    assert write_report(result, path) == [NO_IMAGES]
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)
    assert text.count("/**\n* plotly.js v") == 1
    assert text.count('class="plotly-graph-div"') == len(ALL) == text.count("<h2>")
    assert "&lt;b&gt;" in text and "<b>" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert [entry.name for entry in tmp_path.iterdir() if entry.suffix == ".png"] == []


def test_images_are_missing_or_their_failure_ends_the_bench(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import plotly.graph_objects

    written: list[str] = []

    def write_image(figure: Any, path: Path, width: int, height: int) -> None:
        written.append(f"{path.name} {figure.layout.title.text}")

    monkeypatch.setattr(bench_report, "can_write_images", lambda: True)
    monkeypatch.setattr(plotly.graph_objects.Figure, "write_image", write_image)
    assert write_report(result, tmp_path / "r.html") == []
    assert [line.split(" ", 1)[0] for line in written] == [f"r_{name}.png" for name in ALL]
    assert not any(line.endswith("None") for line in written)

    def fail(figure: Any, path: Path, width: int, height: int) -> None:
        raise RuntimeError("no browser\nmany more lines")

    monkeypatch.setattr(plotly.graph_objects.Figure, "write_image", fail)
    assert write_report(result, tmp_path / "r.html") == ["the plots were not written as PNG: no browser"]
