"""Write what README.md and docs/*.md take from elsewhere: measured figures, help texts, the file map and the tree of exceptions.

Usage: ``python scripts/render_docs.py [--check]``.  Everything between ``<!-- figures:NAME:begin -->`` and
``<!-- figures:NAME:end -->`` is replaced.  With ``--check`` nothing is written, and the exit status is 1 when a file is stale.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from foredraft.bench_figures import over_best
from foredraft.bench_table import pair
from foredraft.cli import app
from foredraft.hardware import HARDWARE
from foredraft.plan import run_plan
from foredraft.plan_options import PlanOptions
from foredraft.plan_table import format_plan

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src/foredraft")
BENCH = Path("docs/data/bench_smollm2-135m_cpu.json")
PASSES = Path("docs/data/passes_smollm2-135m_cpu.json")
PLAN = Path("docs/data/plan_smollm2-135m_cpu.json")
EXPERIMENTS = Path("docs/data/experiments_smollm2-135m_cpu.json")
ACCEPTANCE = Path("docs/data/acceptance_smollm2-135m.json")
ACCEPTANCE_OF_ITSELF = Path("docs/data/acceptance_smollm2-135m_itself.json")
HEAD_IN_VLLM = Path("docs/data/vllm_head_smollm2-135m.json")
NEVER_BACKFIRES = tuple(Path(f"docs/data/never_backfires_{name}.json") for name in ("q4_1", "q8_0"))
COMPARISONS = tuple(Path(f"docs/data/compare_llama_cpp_{name}.json") for name in ("q4_1", "q8_0", "q4_0"))
LOAD = Path("docs/data/load_smollm2-135m_cpu.json")
DRAFTING = Path("docs/data/compare_drafting_q4_1.json")
SERVERS = Path("docs/data/compare_servers_q4_1.json")
HELP_WIDTH = 100
SECTION = re.compile(r"<!-- figures:([\w-]+):(begin|end) -->\n")

Sections = Mapping[str, Callable[[], str]]


# ------------------------------------------------------------------------------------------------ replacing


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Write or check the pages below ``root``; return the exit status."""
    if arguments not in ([], ["--check"]):
        print("usage: render_docs.py [--check]", file=sys.stderr)
        return 2
    sections = all_sections(root)
    stale = []
    for path in pages(root):
        text = path.read_text(encoding="utf-8")
        rendered = render(text, sections, str(path.relative_to(root)))
        if rendered != text:
            stale.append(path)
            if not arguments:
                path.write_text(rendered, encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(root)}: {'stale; run scripts/render_docs.py' if arguments else 'written'}")
    return 1 if stale and arguments else 0


def pages(root: Path) -> list[Path]:
    """README.md and every page in docs."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def render(text: str, sections: Sections, page: str) -> str:
    """``text`` with every marked section as it is now.

    Raises:
        ValueError: an unknown section, or marks that are not in pairs.
    """
    parts, position, name = [], 0, None
    for mark in SECTION.finditer(text):
        if mark[1] not in sections:
            raise ValueError(f"{page} has the unknown section {mark[1]!r}; there are: {', '.join(sections)}")
        if (name, mark[2]) not in ((None, "begin"), (mark[1], "end")):
            raise ValueError(f"{page}: the marks of section {mark[1]!r} are not a begin and then an end")
        parts.append(text[position : mark.end()] if name is None else f"{sections[mark[1]]()}\n{mark[0]}")
        name, position = (mark[1] if name is None else None), mark.end()
    if name is not None:
        raise ValueError(f"{page}: section {name!r} has no end")
    return "".join(parts) + text[position:]


def all_sections(root: Path) -> Sections:
    """What each section holds, made when it is asked for."""

    def stored(path: Path) -> Any:
        return json.loads((root / path).read_text(encoding="utf-8"))

    bench, passes, experiments = map(stored, (BENCH, PASSES, EXPERIMENTS))
    comparisons = [stored(path) for path in COMPARISONS]
    return {
        "bench-table": lambda: bench_table(bench),
        "bench-machine": lambda: bench_machine(bench),
        "bench-phases": lambda: bench_phases(bench),
        "bench-k": lambda: bench_sweep(bench, "k_sweep"),
        "bench-batch": lambda: bench_sweep(bench, "batch_sweep"),
        "bench-prediction": lambda: bench_prediction(bench),
        "acceptance-table": lambda: acceptance_table(stored(ACCEPTANCE)),
        "acceptance-of-itself": lambda: acceptance_table(stored(ACCEPTANCE_OF_ITSELF)),
        "head-in-vllm": lambda: head_in_vllm(stored(HEAD_IN_VLLM)),
        "never-backfires": lambda: backfire_table([stored(path) for path in NEVER_BACKFIRES]),
        "experiments-table": lambda: experiments_table(experiments),
        "experiments-machine": lambda: experiments_machine(experiments),
        "experiments-numbers": lambda: experiments_numbers(experiments),
        "passes-table": lambda: passes_table(passes),
        "passes-machine": lambda: passes_machine(passes),
        "comparison-table": lambda: comparison_table(comparisons),
        "comparison-machine": lambda: comparison_machine(comparisons),
        "drafting": lambda: drafting_text(stored(DRAFTING)),
        "load": lambda: load_text(stored(LOAD)),
        "servers": lambda: servers_text(stored(SERVERS)),
        "plan-machine": lambda: plan_text(stored(PLAN)),
        "plan-numbers": lambda: plan_text(computed_plan(alpha=0.7, emit="vllm")),
        "plan-alphas": lambda: plan_text(computed_plan()),
        "hardware": hardware_table,
        "modules": lambda: module_table(root / PACKAGE),
        "errors": lambda: error_tree(root / PACKAGE),
        **{f"help-{name}": lambda name=name: help_text(name) for name in commands()},
    }


def table(rows: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """A Markdown table; the first row is the header, and columns after the first ``num_left`` are aligned at their right."""
    rule = [":--" if index < num_left else "--:" for index in range(len(rows[0]))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))


# ------------------------------------------------------------------------------------------------ figures


def place_of(machine: Mapping[str, Any], threads: int) -> str:
    """Where something was measured, and when."""
    return f"{machine['cores']} cores of an {machine['cpu']} ({machine['instructions']}), {threads} threads, {machine['date']}"


def bench_table(bench: Mapping[str, Any]) -> str:
    """A row per category and one for all: plain speed, then speed-up and acceptance length of each method."""
    cells = {(cell["category"], cell["method"]): cell for cell in [*bench["cells"], *bench["overall"]]}
    methods = bench["options"]["methods"]
    rows = [["category", "plain tok/s"]]
    rows[0] += [name for method in methods for name in (f"{method} speed-up", f"{method} acceptance length")]
    for category in dict.fromkeys(category for category, _ in cells):
        row = [category, f"{cells[category, 'none']['tokens_per_s']['median']:.1f}"]
        for method in methods:
            cell = cells[category, method]
            row += [f"{cell['speedup']['median']:.2f}", f"{cell['acceptance_length']:.2f}"]
        rows.append(row)
    return table(rows)


def bench_machine(bench: Mapping[str, Any]) -> str:
    """One sentence: machine, bandwidth, what it allows, what plain decoding reaches, and whether the answers were the same."""
    machine, model, options, ceiling = (bench[name] for name in ("machine", "model", "options", "ceiling"))
    drafted = [cell for cell in bench["overall"] if cell["method"] != "none"]
    num_runs, num_different = (sum(cell[name] for cell in drafted) for name in ("num_runs", "num_different"))
    sampling = "greedy" if options["temperature"] == 0 else f"temperature {options['temperature']}"
    return (
        f"{model['name']} ({model['quantization']}, computed in {model['dtype']}) on "
        f"{place_of(machine, machine['threads'])} ({machine['memory_bytes'] / 1e9:.1f} GB, torch {machine['torch']}), "
        f"{sampling}, K = {options['num_speculative_tokens']}: memory is read at {bench['bandwidth']['best'] / 1e9:.1f} GB/s at "
        f"best, so that {model['bytes_per_token'] / 1e6:.0f} MB of weights a token allow {ceiling['tokens_per_s']:.1f} plain "
        f"tokens/s, of which plain decoding reaches {ceiling['plain_percent']:.0f} %; {num_runs - num_different} of {num_runs} "
        "drafted answers were the plain ones, token for token."
    )


def bench_phases(bench: Mapping[str, Any]) -> str:
    """Milliseconds of a step by phase, a row per method."""
    phases = list(bench["overall"][0]["ms_per_step"])
    rows = [["ms per step", *phases]]
    for cell in bench["overall"]:
        name = "plain" if cell["method"] == "none" else cell["method"]
        rows.append([name, *(f"{cell['ms_per_step'][phase]:.3f}" for phase in phases)])
    return table(rows)


def bench_sweep(bench: Mapping[str, Any], name: str) -> str:
    """A row per K or batch size: of each method the speed-up, and the predicted one in brackets."""
    cells = {(cell["method"], cell["batch"], cell["num_speculative_tokens"]): cell for cell in bench.get(name, ())}
    if not cells:
        return "The stored measurement has no such sweep."
    by = 2 if name == "k_sweep" else 1
    # auto has no K of its own; beside a sweep of K it is one figure.
    others = ("none", "auto") if by == 2 else ("none",)
    methods = list(dict.fromkeys(key[0] for key in cells if key[0] not in others))
    rows = [["K" if by == 2 else "batch", *methods]]
    for size in sorted({key[by] for key in cells if key[0] not in others}):
        found = {key[0]: pair(cell) for key, cell in cells.items() if key[by] == size}
        rows.append([str(size), *(found.get(method, "") for method in methods)])
    if by == 1:
        ends = ((bench["crossover"][method][kind] for kind in ("measured", "predicted")) for method in methods)
        written = (["never" if end is None else f"{end:.1f}" for end in both] for both in ends)
        rows.append(["no gain from", *(f"{measured} ({predicted})" for measured, predicted in written)])
    auto = next((cell for key, cell in cells.items() if key[0] == "auto"), None)
    return table(rows) + (f"\n\nOn the same prompts `auto`: {pair(auto)}." if by == 2 and auto is not None else "")


def bench_prediction(bench: Mapping[str, Any]) -> str:
    """One sentence on how good the predictions were, and by which rule that is said."""
    found = bench.get("prediction")
    if found is None:
        return "The stored measurement has no predictions."
    return (
        f"{found['share_within_10_percent']:.0%} of {found['num_cells']} cells were predicted within 10 % (median error "
        f"{found['median_error']:.1%}, worst {found['worst_error']:+.1%}) and {found['share_of_right_signs']:.0%} with the right "
        f"sign; {found['num_even']} were measured within noise of 1.00. {found['rule']}"
    )


def acceptance_table(result: Mapping[str, Any]) -> str:
    """A row per drafter and temperature: acceptance length, and the share of drafted tokens that came, by position."""
    num = result["num_speculative_tokens"]
    rows = [["method", "temperature", "acceptance length", *(f"position {i + 1}" for i in range(num))]]
    for method, cells in result["methods"].items():
        for temperature, cell in cells.items():
            shares = [f"{share:.2f}" for share in cell["accepted_by_position"]]
            rows.append([f"`{method}`", temperature, f"{cell['acceptance_length']:.2f}", *shares])
    said = f"{result['num_prompts']} prompts of {result['prompts']}, answers of up to {result['max_tokens']} tokens, K = {num}."
    return f"{table(rows, num_left=2)}\n\n{said}"


def head_in_vllm(result: Mapping[str, Any]) -> str:
    """The same head, target and prompts in foredraft and in vLLM."""
    num = result["num_speculative_tokens"]
    rows = [["engine", "acceptance length", *(f"position {i + 1}" for i in range(num))]]
    for name in ("foredraft", "vllm"):
        one = result[name]
        shares = [f"{count / one['num_drafts']:.3f}" for count in one["accepted_per_position"]]
        rows.append([f"{name} {one[name]}", f"{one['acceptance_length']:.3f}", *shares])
    same = f"{result['num_same_answers']} of {result['num_prompts']} answers are the same, token for token"
    asked = f"{result['num_prompts']} prompts of {result['prompts']}, answers of up to {result['max_tokens']} tokens"
    return f"{table(rows)}\n\n{asked}, greedy, float32, K = {num}; {same}."


def backfire_table(results: Sequence[Mapping[str, Any]]) -> str:
    """``auto`` over plain decoding, and over the best fixed setting where one was sought, in each case and format."""
    names = [path.stem.removeprefix("never_backfires_").upper() for path in NEVER_BACKFIRES]
    rows = [["workload", *(f"{name}: auto over plain" for name in names), *(f"{name}: best fixed, auto over it" for name in names)]]
    for cases in zip(*(result["cases"] for result in results), strict=True):
        best = ["" if c["best_fixed"] is None else f"{c['best_fixed']}, {c['auto_over_best']:.2f}" for c in cases]
        rows.append([cases[0]["name"], *(f"{c['segments_median']:.2f} ({c['speedup_in_all']:.2f})" for c in cases), *best])
    mixtures = [mixture(result["cases"]) for result in results]
    rows.append(
        [
            "the groups together",
            *(f"{m['paired']:.2f} ({m['in_all']:.2f})" for m in mixtures),
            *(f"{m['best']}, {m['auto_over_best']:.2f}" for m in mixtures),
        ]
    )
    same = all(case["same_tokens"] for result in results for case in result["cases"])
    given, where = results[0]["options"], place_of(results[0]["machine"], results[0]["machine"]["threads"])
    said = "All answers are those of plain decoding." if same else "NOT all answers are those of plain decoding."
    how = "Medians of pairs of segments, in brackets by all of the time; the best fixed setting by all of the time."
    return f"{table(rows)}\n\n{where}; {given['limit']} prompts of each group, {given['max_tokens']} tokens each. {how} {said}"


def mixture(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All groups with a sweep as one workload: by pairs, and by the time over plain decoding's, where each weighs as much."""
    groups = [case for case in cases if case["fixed"]]

    def in_all(speedups: Iterable[float]) -> float:
        return len(groups) / sum(1.0 / speedup for speedup in speedups)

    timed = {label: [ms for case in groups for ms in case["ms_per_token"][label]] for label in groups[0]["ms_per_token"]}
    auto = timed.pop("auto")
    return {
        "paired": statistics.median(plain / own for plain, own in zip(timed["plain"], auto, strict=True)),
        "in_all": in_all(case["speedup_in_all"] for case in groups),
        "best": max(groups[0]["fixed"], key=lambda label: in_all(case["fixed"][label] for case in groups)),
        "auto_over_best": over_best(auto, timed),
    }


def load_text(result: Mapping[str, Any]) -> str:
    """What came of many clients at once: a table of waiting times, and a sentence."""
    names = {"first_token_ms": "ms to the first token", "per_token_ms": "ms per further token"}
    rows = [["", "p50", "p95", "p99"]]
    rows += [[title, *(f"{result[name][p]:.1f}" for p in ("p50", "p95", "p99"))] for name, title in names.items()]
    machine, outcomes = result["machine"], result["outcomes"]
    where = place_of(machine, machine["threads"])
    ended = ", ".join(f"{num:,} {name}" for name, num in sorted(outcomes.items(), key=lambda item: -item[1]) if name != "wrong")
    return (
        f"{table(rows)}\n\n{result['clients']} clients for {result['seconds']:.0f} s on {where}: "
        f"{result['tokens_per_second']:.0f} tokens/s in all; requests by what their client did: {ended}. "
        f"{outcomes.get('wrong', 0)} answers were lost or others; memory grew by {result['growth']:.1%}. "
        f"Killed outright and started anew, the server serves after {result['restart_seconds']:.1f} s."
    )


def servers_text(result: Mapping[str, Any]) -> str:
    """A row per number of clients: both servers' speeds and slowest answers; then the machine."""
    rows = [["clients", "foredraft tok/s", "llama.cpp tok/s", "times as fast", "foredraft p95 s", "llama.cpp p95 s"]]
    for one in result["results"]:
        ours, theirs = one["foredraft"], one["llama.cpp"]
        speeds = ours["tokens_per_second"], theirs["tokens_per_second"]
        numbers = (f"{speeds[0]:.1f}", f"{speeds[1]:.1f}", f"{speeds[0] / speeds[1]:.2f}")
        rows.append([str(one["clients"]), *numbers, *(f"{server['p95_seconds']:.2f}" for server in (ours, theirs))])
    return (
        f"{table(rows)}\n\n{result['model']} on {place_of(result['machine'], result['threads'])}; llama.cpp is "
        f"{result['peer_version']}. Medians of {result['rounds']} rounds in turn, answers of {result['max_tokens']} tokens, "
        f"greedy; p95 is the latency of a whole answer."
    )


def drafting_text(result: Mapping[str, Any]) -> str:
    """A row per group of prompts: plain and ``auto``, and llama.cpp's best setting; then the machine."""
    rows = [
        [
            "group",
            "plain tok/s",
            "auto tok/s",
            "auto over plain",
            "acceptance length",
            "llama.cpp's best",
            "its tok/s",
            "auto over it",
        ]
    ]
    for one in result["groups"]:
        rates, best = one["tokens_per_second"], one["best_peer"]
        speeds = (f"{rates['foredraft plain']:.1f}", f"{rates['foredraft auto']:.1f}", f"{one['speedup']:.2f}")
        rows.append(
            [one["group"], *speeds, f"{one['acceptance_length']:.2f}", best, f"{rates[best]:.1f}", f"{one['over_best_peer']:.2f}"]
        )
    return (
        f"{table(rows)}\n\n{result['model']['file']} on {place_of(result['machine'], result['threads'])}; llama.cpp is "
        f"{result['peer_version']}. {result['limit']} prompts of each group, answers of up to {result['max_tokens']} tokens, "
        "greedy, each prompt in all settings in turn; tokens per second of decoding."
    )


def experiments_table(result: Mapping[str, Any]) -> str:
    """A row per claim with its verdict."""
    rows = [[f"`{one['name']}`", one["claim"], one["source"], one["verdict"]] for one in result["findings"]]
    return table([["experiment", "claim", "source", "verdict"], *rows], num_left=4)


def experiments_machine(result: Mapping[str, Any]) -> str:
    """One sentence: model and machine."""
    machine, model = result["machine"], result["model"]
    return (
        f"{model['name']} ({model['quantization']}, exactness: {model['exactness']}) on {place_of(machine, machine['threads'])}; "
        f"load before the run {machine['load']:.1f}."
    )


def experiments_numbers(result: Mapping[str, Any]) -> str:
    """A point per experiment: what was found, and when the claim would hold."""
    return "\n".join(f"- **{one['name']}**: {one['said']} *Holds when:* {one['rule']}" for one in result["findings"])


def passes_table(result: Mapping[str, Any]) -> str:
    """A row per number of rows: milliseconds of a pass and how many passes of one row that is, for each context; then the floor."""
    contexts = list(result["passes"])
    rows = [["rows", *(title for context in contexts for title in (f"ms at context {context}", "of 1 row"))]]
    for count in result["passes"][contexts[0]]:
        figures = ((result["passes"][context].get(count), result["ratios"][context].get(count)) for context in contexts)
        rows.append([count, *("" if value is None else f"{value:.2f}" for pair in figures for value in pair)])
    floors = ((result["floor"][context], result["passes"][context]["1"]) for context in contexts)
    rows.append(["memory floor", *(text for floor, one in floors for text in (f"{floor:.2f}", f"{floor / one:.2f}"))])
    return table(rows)


def passes_machine(result: Mapping[str, Any]) -> str:
    """One sentence: model, machine, bandwidth, and what a prompt, a batch and further rows cost."""
    machine, model, bandwidth = (result[name] for name in ("machine", "model", "bandwidth"))
    low, high = result["compute"]["rows"]
    slopes = " and ".join(f"{ms:.2f} ms at context {context}" for context, ms in result["compute"]["ms_per_row"].items())
    return (
        f"{model['name']} ({model['quantization']}, exactness: {result['exactness']}) on "
        f"{place_of(machine, result['threads'])}: {model['bytes_per_pass'] / 1e6:.0f} MB are read at "
        f"{bandwidth['best'] / 1e9:.1f} GB/s at best; from {low} to {high} rows each further row takes {slopes}; a prompt of "
        f"{result['prefill']['num_tokens']} tokens is read at {result['prefill']['tokens_per_s']:,.0f} tokens/s, and a batch of "
        f"{result['batch']['num_seqs']} makes {result['batch']['tokens_per_s']:,.0f} tokens/s in all."
    )


def comparison_table(results: Sequence[Mapping[str, Any]]) -> str:
    """A row per format and measure: both medians, and how many times as fast foredraft is."""
    rows = [["format", "measure", "unit", "foredraft", "llama.cpp", "times as fast"]]
    for result in results:
        for line in result["measures"]:
            sides = (f"{line[side]['median']:,.1f}" for side in ("foredraft", "llama_cpp"))
            rows.append([result["model"]["quantization"], line["title"], line["unit"], *sides, f"{line['times_as_fast']:.2f}"])
        copy = result["copy"]
        figures = (f"{copy['ngram']['median']:,.1f}", "", "")
        rows.append([result["model"]["quantization"], "copying a text, ngram K = 4", "tok/s", *figures])
    return table(rows, num_left=3)


def comparison_machine(results: Sequence[Mapping[str, Any]]) -> str:
    """Sentences: machine, version of llama.cpp, and what drafting adds to plain decoding of the same text."""
    first = results[0]
    machine = first["machine"]
    gains = ", ".join(f"{result['copy']['speedup']['median']:.2f} ({result['model']['quantization']})" for result in results)
    same = "the same tokens" if all(result["copy"]["identical"] for result in results) else "not always the same tokens"
    floors = ", ".join(f"{result['floor_ms']['best']:.2f} ms ({result['model']['quantization']})" for result in results)
    return (
        f"Medians of {first['rounds']} rounds in turn on {place_of(machine, first['threads'])}; llama.cpp is "
        f"{first['peer_version']}. The limit: weights are read once in {floors} at best. Copying a text with "
        f"ngram drafts is {gains} times as fast as foredraft's own plain decoding of it, with {same}."
    )


# ------------------------------------------------------------------------------------------------ from the code


@functools.cache
def computed_plan(**options: Any) -> dict[str, Any]:
    """A plan from numbers alone: the page's example, with further options."""

    def no_model(*arguments: Any, **settings: Any) -> Any:
        raise AssertionError("a plan from numbers opens no model")

    example = {"hardware": "h100", "target_params": 70e9, "draft_params": 1e9, "gpus": 4, "batches": (1, 16, 64, 256)}
    return run_plan(PlanOptions(**{**example, **options}), lambda line: None, no_model)


def plan_text(result: Mapping[str, Any]) -> str:
    """What ``foredraft plan`` prints."""
    return f"```\n{format_plan(result)}\n```"


def hardware_table() -> str:
    """A row per accelerator that is known by name."""
    rows = [["name", "GB/s", "bfloat16", "fp8", "float32", "GiB", "source"]]
    for name, hardware in HARDWARE.items():
        flops = (
            f"{hardware.flops[dtype] / 1e12:,g}" if dtype in hardware.flops else "-" for dtype in ("bfloat16", "fp8", "float32")
        )
        rows.append(
            [f"`{name}`", f"{hardware.bandwidth / 1e9:,.0f}", *flops, f"{hardware.memory_bytes / 2**30:.0f}", hardware.source]
        )
    rule = [":--", *["--:"] * 5, ":--"]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))


def commands() -> Mapping[str, Any]:
    """The program's commands by name; one in a group is called ``group-command``."""
    group: Any = typer.main.get_command(app)
    found = {}
    for name, command in group.commands.items():
        inner = getattr(command, "commands", {})
        found |= {f"{name}-{part}": (command, inner[part]) for part in inner} or {name: (None, command)}
    return found


@functools.cache  # a test renders many times, and these change with nothing that it changes
def help_text(name: str) -> str:
    """What ``foredraft NAME --help`` prints on a terminal of 100 columns."""
    root: Any = typer.main.get_command(app)
    context = root.context_class(root, info_name="foredraft", terminal_width=HELP_WIDTH, **root.context_settings)
    command: Any = None
    for command in filter(None, commands()[name]):
        context = command.context_class(command, info_name=command.name, parent=context)
    return f"```\n{command.get_help(context)}\n```"


def modules(package: Path) -> Iterator[tuple[str, str]]:
    """(path, docstring) of every module; those of subpackages come last."""
    for path in sorted(package.rglob("*.py"), key=lambda path: (len(path.parts), path)):
        yield path.relative_to(package).as_posix(), ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def module_table(package: Path) -> str:
    """Every module with the first line of its docstring."""
    rows = [[f"`{path}`", text.partition("\n")[0].replace("``", "`").replace("|", "\\|")] for path, text in modules(package)]
    return table([["module", "what it is"], *rows], num_left=2)


def error_tree(package: Path) -> str:
    """The tree in the docstring of errors.py."""
    text = dict(modules(package))["errors.py"]
    return f"```\n{textwrap.dedent(text.partition('::')[2]).strip()}\n```"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
