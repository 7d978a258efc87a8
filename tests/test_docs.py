"""README.md and docs: what they take from elsewhere is current, and what they say of the program holds."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from foredraft.claims import EXPERIMENTS
from foredraft.config import SpeculativeConfig
from foredraft.drafters import registry

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPT = REPOSITORY / "scripts" / "render_docs.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render_docs", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT_MODULE = load_script()
PAGES = [path.relative_to(REPOSITORY).as_posix() for path in SCRIPT_MODULE.pages(REPOSITORY)]
ALL_PAGES = [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", "dev/LOG.md"]


def read(page: str) -> str:
    return (REPOSITORY / page).read_text(encoding="utf-8")


def code_blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a language; those inside a longer fence are not of this page."""
    text = re.sub(r"^````.*?^````$", "", read(page), flags=re.MULTILINE | re.DOTALL)
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """All that the script reads, to be changed."""
    for name in ("docs", "src/foredraft"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(REPOSITORY / "README.md", tmp_path)
    return tmp_path


# ------------------------------------------------------------------------------------------------ generated sections


def test_a_page_is_stale() -> None:
    result = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_a_changed_figure_help_text_module_or_exception_goes_unnoticed(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert SCRIPT_MODULE.main(["--check"], copy) == 0
    bench = json.loads((copy / SCRIPT_MODULE.BENCH).read_text(encoding="utf-8"))
    ceiling, bandwidth = f'"tokens_per_s": {bench["ceiling"]["tokens_per_s"]}', f'"best": {bench["bandwidth"]["best"]}'
    speedup = f"| {bench['overall'][1]['speedup']['median']:.2f} |"
    changes = [
        (SCRIPT_MODULE.BENCH, ceiling, '"tokens_per_s": 12.5', ["README.md", "docs/benchmarks.md"]),
        (SCRIPT_MODULE.BENCH, bandwidth, '"best": 12500000000.0', ["README.md", "docs/benchmarks.md"]),
        ("src/foredraft/scheduler.py", "Which sequences get rows", "Which sequences get columns", ["README.md"]),
        ("src/foredraft/errors.py", "not enough memory or disk", "not enough memory", ["docs/errors.md"]),
        ("docs/cli.md", "Most tokens of one answer", "Tokens of one answer", ["docs/cli.md"]),
        ("docs/benchmarks.md", speedup, "| 9.99 |", ["docs/benchmarks.md"]),
    ]
    for name, old, new, stale in changes:
        path = copy / name
        before = path.read_text(encoding="utf-8")
        assert old in before, old
        path.write_text(before.replace(old, new), encoding="utf-8")
        capsys.readouterr()
        assert SCRIPT_MODULE.main(["--check"], copy) == 1, new
        assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == stale
        path.write_text(before, encoding="utf-8")
    assert SCRIPT_MODULE.main(["--check"], copy) == 0


@pytest.mark.parametrize("name", [SCRIPT_MODULE.PASSES, *SCRIPT_MODULE.COMPARISONS])
def test_a_changed_figure_of_the_kernels_goes_unnoticed(copy: Path, capsys: pytest.CaptureFixture[str], name: Path) -> None:
    figures = json.loads((copy / name).read_text(encoding="utf-8"))
    if "passes" in figures:
        figures["passes"]["64"]["5"] *= 2
    else:
        figures["measures"][0]["foredraft"]["median"] *= 2
    (copy / name).write_text(json.dumps(figures), encoding="utf-8")
    assert SCRIPT_MODULE.main(["--check"], copy) == 1
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["docs/benchmarks.md"]


def test_a_changed_experiment_goes_unnoticed(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy / SCRIPT_MODULE.EXPERIMENTS
    result = json.loads(path.read_text(encoding="utf-8"))
    assert {one["name"] for one in result["findings"]} == set(EXPERIMENTS)
    for name in ("verdict", "said", "claim", "source", "rule"):
        changed = json.loads(path.read_text(encoding="utf-8"))
        changed["findings"][0][name] += "?"
        (copy / SCRIPT_MODULE.EXPERIMENTS).write_text(json.dumps(changed), encoding="utf-8")
        assert SCRIPT_MODULE.main(["--check"], copy) == 1
        assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["docs/experiments.md"]
        path.write_text(json.dumps(result), encoding="utf-8")


def swept(method: str, k: int, batch: int, speedup: float, predicted: float | None) -> dict[str, Any]:
    expected = None if predicted is None else {"speedup": predicted}
    return {
        "method": method,
        "num_speculative_tokens": k,
        "batch": batch,
        "speedup": {"median": speedup},
        "predicted": expected,
    }


def test_a_sweep_is_shown_with_the_figures_of_another_cell() -> None:
    plain = swept("none", 0, 1, 1.0, None)
    bench = {
        "k_sweep": [
            plain,
            swept("ngram", 1, 1, 1.2, 1.3),
            swept("ngram", 4, 1, 1.5, 1.4),
            swept("suffix", 4, 1, 1.1, None),
            swept("auto", 8, 1, 1.6, 1.7),
        ],
        "batch_sweep": [plain, swept("ngram", 4, 1, 1.5, 1.4), swept("ngram", 4, 8, 0.8, 0.9)],
        "crossover": {"ngram": {"measured": 5.25, "predicted": None}},
    }
    assert SCRIPT_MODULE.bench_sweep(bench, "k_sweep").splitlines() == [
        "| K | ngram | suffix |",
        "| :-- | --: | --: |",
        "| 1 | 1.20 (1.30) |  |",
        "| 4 | 1.50 (1.40) | 1.10 |",
        "",
        "On the same prompts `auto`: 1.60 (1.70).",
    ]
    assert SCRIPT_MODULE.bench_sweep(bench, "batch_sweep").splitlines()[2:] == [
        "| 1 | 1.50 (1.40) |",
        "| 8 | 0.80 (0.90) |",
        "| no gain from | 5.2 (never) |",
    ]
    assert SCRIPT_MODULE.bench_sweep({}, "k_sweep") == "The stored measurement has no such sweep."


def test_predictions_are_shown_better_than_they_were() -> None:
    found = {
        "num_cells": 40,
        "num_even": 3,
        "share_within_10_percent": 0.925,
        "share_of_right_signs": 0.975,
        "median_error": 0.031,
        "worst_error": -0.21,
        "rule": "A rule.",
    }
    assert SCRIPT_MODULE.bench_prediction({"prediction": found}) == (
        "92% of 40 cells were predicted within 10 % (median error 3.1%, worst -21.0%) and 98% with the right sign; 3 were measured "
        "within noise of 1.00. A rule."
    )
    assert "no predictions" in SCRIPT_MODULE.bench_prediction({})


def test_rendering_does_not_mend_a_stale_page_or_changes_a_current_one(copy: Path) -> None:
    page = copy / "docs" / "benchmarks.md"
    current = page.read_text(encoding="utf-8")
    page.write_text(current.replace("| chat |", "| chit-chat |"), encoding="utf-8")
    assert SCRIPT_MODULE.main([], copy) == 0
    assert page.read_text(encoding="utf-8") == current
    assert SCRIPT_MODULE.main(["--wrong"], copy) == 2


@pytest.mark.parametrize(
    ("marks", "says"),
    [
        (["bench:begin", "bench:end"], "unknown section 'bench'"),
        (["a:begin"], "section 'a' has no end"),
        (["a:end"], "not a begin and then an end"),
        (["a:begin", "b:begin", "b:end", "a:end"], "not a begin and then an end"),
        (["a:begin", "b:end"], "not a begin and then an end"),
    ],
)
def test_a_page_with_broken_marks_loses_text(marks: list[str], says: str) -> None:
    text = "".join(f"text\n<!-- figures:{mark} -->\n" for mark in marks)
    with pytest.raises(ValueError, match=says):
        SCRIPT_MODULE.render(text, {"a": lambda: "A", "b": lambda: "B"}, "page.md")


def test_only_what_is_between_the_marks_changes() -> None:
    begin, end = "<!-- figures:a:begin -->\n", "<!-- figures:a:end -->\n"
    page = f"before\n{begin}old\n{end}between\n{begin}{end}after\n"
    assert SCRIPT_MODULE.render(page, {"a": lambda: "new"}, "p") == f"before\n{begin}new\n{end}between\n{begin}new\n{end}after\n"


def test_a_command_is_not_documented() -> None:
    for name in SCRIPT_MODULE.commands():
        assert SCRIPT_MODULE.help_text(name) in read("docs/cli.md")


def test_a_module_is_missing_from_the_file_map() -> None:
    package = REPOSITORY / "src" / "foredraft"
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.+) \|$", read("README.md"), re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(path.relative_to(package).as_posix() for path in package.rglob("*.py"))
    assert all(line.endswith(".") for _, line in rows)


def test_the_figures_do_not_say_where_they_come_from() -> None:
    bench = json.loads(read("docs/data/bench_smollm2-135m_cpu.json"))
    assert "runs" not in bench
    assert {"cpu", "cores", "memory_bytes", "torch", "threads", "load"} <= bench["machine"].keys()
    assert {cell["method"] for cell in bench["overall"]} == {"none", *bench["options"]["methods"]}
    for name in (SCRIPT_MODULE.PASSES, SCRIPT_MODULE.EXPERIMENTS, *SCRIPT_MODULE.COMPARISONS):
        text = read(name.as_posix())
        assert {"cpu", "cores", "load"} <= json.loads(text)["machine"].keys()
        assert not re.search(r"\"/\w", text), "a path of the machine"


# ------------------------------------------------------------------------------------------------ written sections


@pytest.mark.parametrize("page", ALL_PAGES)
def test_a_link_leads_nowhere(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", read(page), flags=re.MULTILINE | re.DOTALL)
    for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text)):
        if target.startswith(("http:", "https:")):
            continue
        path = (REPOSITORY / page).parent / target if target else REPOSITORY / page
        assert path.is_file() or (path.is_dir() and not anchor), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, (
                f"{target}#{anchor}"
            )


@pytest.mark.parametrize("page", ["README.md", "docs/drafters.md"])
def test_a_key_of_speculative_config_is_missing_or_has_another_default(page: str) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", read(page), re.MULTILINE))
    defaults = {field.name: field.default for field in dataclasses.fields(SpeculativeConfig)}
    if page == "README.md":
        assert "suffix_decoding_*" in read(page)
        defaults = {name: value for name, value in defaults.items() if not name.startswith("suffix_decoding_")}
    assert {name: json.loads(value) for name, value in rows.items()} == defaults


def test_a_method_is_not_described() -> None:
    own = set(re.findall(r"^\| `(\w+)` \| \D", read("docs/drafters.md"), re.MULTILINE))
    assert {"none", *registry._MODULES} <= own


def commands_of(page: str) -> list[list[str]]:
    """Every ``foredraft`` command line in the page's code blocks, without its first word."""
    lines = "\n".join(re.findall(r"^````?\n(.*?)^````?$", read(page), flags=re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    found = re.findall(r"^(?:\$ )?(?:echo [^|]*\| )?(?:\.venv/bin/)?foredraft ([a-z]+ .*)$", lines, re.MULTILINE)
    return [shlex.split(re.sub(r"\s{2,}[a-z].*$", "", line), comments=True) for line in found]


def test_a_command_line_in_the_pages_is_refused() -> None:
    import typer

    lines = [line for page in PAGES for line in commands_of(page)]
    group: Any = typer.main.get_command(SCRIPT_MODULE.app)
    for name, *arguments in lines:
        group.commands[name].make_context(name, list(arguments))
    assert {line[0] for line in lines} == set(group.commands)


@pytest.mark.model
@pytest.mark.parametrize("page", [page for page in PAGES if code_blocks(page, "python")])
def test_a_snippet_does_not_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for snippet in code_blocks(page, "python"):
        exec(compile(snippet, page, "exec"), names)
    if page == "README.md":
        assert "same tokens: True" in capsys.readouterr().out
