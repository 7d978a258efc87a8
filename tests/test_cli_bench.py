"""The commands bench and experiments: what they are asked, which files they write, and how they end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import Run
from cli_helpers import run as run
from foredraft import cli_bench
from foredraft.terminal import PartsBar


def test_bench_prints_a_table_and_then_its_figures_as_one_line(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from foredraft import bench, bench_table

    seen: list[bench.BenchOptions] = []

    def run_bench(options: bench.BenchOptions, progress: bench.Progress, journal: Path | None) -> dict[str, Any]:
        seen.append(options)
        progress.part("a", 0, 1)
        progress.note("[1/1]")
        assert journal == path.with_name("bench.json.part")
        journal.write_text("parts")
        return {"overall": [1], "runs": [2, {"a": [3]}]}

    monkeypatch.setattr(cli_bench, "fetch_model", lambda model: None)
    monkeypatch.setattr(bench, "run_bench", run_bench)
    monkeypatch.setattr(bench_table, "format_table", lambda result: "a table")
    options = "--methods ngram, --num-speculative-tokens 3 --categories chat,code --repeats 2 --kv-cache-memory 1GiB --threads 1"
    options += " --k-sweep 0-2,4 --batch-sweep none"
    path = tmp_path / "bench.json"
    assert run(None, "bench", "m", *options.split(), "--json", str(path)) == (0, 'a table\n{"overall":[1]}\n', "[1/1]\n")
    assert json.loads(path.read_text()) == {"overall": [1], "runs": [2, {"a": [3]}]}
    assert '\n "runs": [\n  2,\n  {"a": [3]}\n ]\n}' in path.read_text() and list(tmp_path.iterdir()) == [path]
    expected = {"methods": ("ngram",), "num_speculative_tokens": 3, "categories": ("chat", "code"), "repeats": 2}
    expected |= {"k_sweep": (0, 1, 2, 4), "batch_sweep": ()}
    assert seen == [bench.BenchOptions("m", **expected, kv_cache_memory=2**30, threads=1)]  # type: ignore[arg-type]


def test_bench_with_passes_times_passes_and_writes_both_files(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from foredraft import passes, report

    seen: list[passes.PassOptions] = []

    def run_passes(options: passes.PassOptions, note: Callable[[str], None]) -> dict[str, Any]:
        seen.append(options)
        note("timing")
        return {"passes": {"64": {"1": 2.5}}}

    monkeypatch.setattr(cli_bench, "fetch_model", lambda model: None)
    monkeypatch.setattr(passes, "run_passes", run_passes)
    monkeypatch.setattr(passes, "format_table", lambda result: "a table")
    monkeypatch.setattr(report, "plotting", lambda: None)
    monkeypatch.setattr(report, "write_passes", lambda result, path: path.write_text(json.dumps(result)))
    files = {name: tmp_path / f"passes.{name}" for name in ("json", "html")}
    options = ["--repeats", "3", "--ops", "native", "--threads", "1", "--max-model-len", "2048"]
    options += [text for name, path in files.items() for text in (f"--{name}", str(path))]
    assert run(None, "bench", "m", "--passes", *options) == (0, 'a table\n{"passes":{"64":{"1":2.5}}}\n', "timing\n")
    assert seen == [passes.PassOptions("m", repeats=3, ops="native", threads=1, max_model_len=2048)]
    assert [json.loads(path.read_text()) for path in files.values()] == [{"passes": {"64": {"1": 2.5}}}] * 2
    # Standard output ends with the figures already.
    monkeypatch.chdir(tmp_path)
    assert run(None, "bench", "m", "--passes", "--json", "-")[:2] == (0, 'a table\n{"passes":{"64":{"1":2.5}}}\n')
    assert not (tmp_path / "-").exists()


def test_a_report_without_plotly_is_refused_before_minutes_of_measuring(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def fetch(model: str) -> None:
        raise AssertionError("fetched")

    monkeypatch.setattr(cli_bench, "fetch_model", fetch)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    code, out, err = run(None, "bench", "m", "--passes", "--html", str(tmp_path / "x.html"))
    assert (code, out) == (2, "")
    assert "pip install 'foredraft[report]'" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--html", "x.html"], "use --report"),
        (["--passes", "--k-sweep", "1"], "--k-sweep"),
        (["--passes", "--methods", "ngram"], "leave it out"),
        (["--passes", "--max-tokens", "5"], "--max-tokens"),
    ],
)
def test_options_of_answers_and_of_passes_are_not_mixed(run: Run, arguments: list[str], says: str) -> None:
    code, out, err = run(None, "bench", "m", *arguments)
    assert (code, out) == (2, "")
    assert says in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--methods", "ngrm"], "'ngram'"),
        (["--categories", "codes"], "'code'"),
        (["--json", "/no/such/folder/x.json"], "--json"),
        (["--report", "/no/such/folder/x.html"], "--report"),
        (["--k-sweep", "1-x"], "--k-sweep must be numbers and ranges"),
        (["--k-sweep", "99"], "k_sweep must hold whole numbers from 0 to 64"),
        (["--batch-sweep", "0"], "batch_sweep must hold"),
        (["--passes", "--html", "/no/such/folder/x.html"], "--html"),
        (["--passes", "--repeats", "0"], "repeats"),
        (["--passes", "--ops", "cpp"], "'cpp'"),
        (["--speculative-config", "{"], "not valid JSON"),
        (["--speculative-config", "[]"], "JSON object"),
        (["--speculative-config", '{"a":' + "9" * 5000 + "}"], "not valid JSON"),
        (["--speculative-config", "[" * 100_000], "not valid JSON"),
        (["--k-sweep", "8-0"], "--k-sweep must have ranges that rise, not 8-0; write 0-8"),
        (["--json", "x" * 300], "--json must name a file"),
    ],
)
def test_bench_refuses_mistakes_before_it_fetches_a_model(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    def fetch(model: str) -> None:
        raise AssertionError("fetched")

    monkeypatch.setattr(cli_bench, "fetch_model", fetch)
    code, out, err = run(None, "bench", "m", *arguments)
    assert (code, out) == (2, "")
    assert says in err and err.count("\n") == 1


def scripted_bench(monkeypatch: pytest.MonkeyPatch, run_bench: Callable[..., dict[str, Any]]) -> None:
    from foredraft import bench, bench_table

    monkeypatch.setattr(cli_bench, "fetch_model", lambda model: None)
    monkeypatch.setattr(bench, "run_bench", run_bench)
    monkeypatch.setattr(bench_table, "format_table", lambda result: "a table")


def test_a_bench_that_is_stopped_loses_what_it_has(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run_bench(options: Any, progress: Any, journal: Path) -> dict[str, Any]:
        journal.write_text("parts")
        raise KeyboardInterrupt

    scripted_bench(monkeypatch, run_bench)
    path = tmp_path / "x.json"
    code, out, err = run(None, "bench", "m", "--json", str(path))
    assert (code, out) == (130, "")
    assert err == f"what is finished is kept in {path}.part; the same command goes on from there\nstopped\n"
    assert (tmp_path / "x.json.part").read_text() == "parts"


def test_figures_are_lost_where_their_file_cannot_be_written(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, kept = tmp_path / "x.json", tmp_path / "x.json.part"

    def run_bench(options: Any, progress: Any, journal: Path) -> dict[str, Any]:
        journal.write_text("parts")
        path.mkdir()  # since the check at the start
        return {"overall": []}

    scripted_bench(monkeypatch, run_bench)
    code, out, err = run(None, "bench", "m", "--json", str(path))
    assert (code, out) == (2, "a table\n") and "x.json cannot be written" in err and err.count("\n") == 1
    assert kept.read_text() == "parts"


@pytest.mark.parametrize("file", [[], ["--json", "/dev/null"]])
def test_a_bench_without_a_file_writes_one(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: list[str]) -> None:
    journals: list[Path | None] = []

    def run_bench(options: Any, progress: Any, journal: Path | None) -> dict[str, Any]:
        journals.append(journal)
        return {"overall": []}

    scripted_bench(monkeypatch, run_bench)
    monkeypatch.chdir(tmp_path)
    assert run(None, "bench", "m", *file) == (0, 'a table\n{"overall":[]}\n', "")
    assert journals == [None] and list(tmp_path.iterdir()) == []


def test_a_report_is_not_written_or_what_it_lacks_is_not_said(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from foredraft import bench_report, report

    scripted_bench(monkeypatch, lambda options, progress, journal: {"overall": []})
    monkeypatch.setattr(report, "plotting", lambda: None)

    def write_report(result: Any, path: Path) -> list[str]:
        path.write_text(json.dumps(result))
        return ["no images"]

    monkeypatch.setattr(bench_report, "write_report", write_report)
    path = tmp_path / "x.html"
    assert run(None, "bench", "m", "--report", str(path)) == (0, 'a table\n{"overall":[]}\n', "no images\n")
    assert json.loads(path.read_text()) == {"overall": []}


def test_experiments_are_not_given_their_options_or_not_printed(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from foredraft import experiments

    seen = []

    def run_experiments(options: experiments.ExperimentOptions, progress: Any) -> dict[str, Any]:
        seen.append(options)
        progress.note("lever: holds")
        return {"findings": []}

    monkeypatch.setattr(cli_bench, "fetch_model", lambda model: None)
    monkeypatch.setattr(experiments, "run_experiments", run_experiments)
    monkeypatch.setattr(experiments, "format_experiments", lambda result: "claims")
    path = tmp_path / "x.json"
    options = ["--only", "lever,batch", "--max-tokens", "40", "--seed", "3", "--threads", "1", "--json", str(path)]
    assert run(None, "experiments", "m", *options) == (0, 'claims\n{"findings":[]}\n', "lever: holds\n")
    assert seen == [experiments.ExperimentOptions("m", only=("lever", "batch"), max_tokens=40, seed=3, threads=1)]
    assert json.loads(path.read_text()) == {"findings": []}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "levr"], "'lever'"),
        (["--max-tokens", "8"], "at least 32"),
        (["--json", "/no/such/folder/x.json"], "--json"),
        (["--device", "gpu"], "'gpu'"),
        (["--only", ","], "only must name at least one experiment"),
    ],
)
def test_experiments_refuse_mistakes_after_minutes(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.setattr(cli_bench, "fetch_model", lambda model: pytest.fail("fetched"))
    code, out, err = run(None, "experiments", "m", *arguments)
    assert (code, out) == (2, "")
    assert says in err and err.count("\n") == 1


class Terminal:
    """A stream that says it is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_a_bar_hides_lines_or_shows_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with PartsBar() as bar:
        bar.note("before")
        bar.part("chat/[x]", 1, 5)
        bar.note("[2/5] between")
        bar.part("chat/y", 2, 5)
    for text in ("before", "chat/[x]", "1/5", "[2/5] between", "chat/y", "2/5"):
        assert text in terminal.text


def test_a_bar_is_drawn_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with PartsBar() as bar:
        bar.part("chat/x", 0, 2)
        bar.note("[1/2] chat/x")
    assert capsys.readouterr().err == "[1/2] chat/x\n"
