"""The commands ``foredraft bench`` and ``foredraft experiments``.

Owns: their options, how they are read, and which files are written.  Does not know: what is measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli_options import (
    STANDARD_OUTPUT,
    Device,
    Dtype,
    KvMemory,
    MaxModelLen,
    Model,
    Ops,
    Threads,
    check_output,
    engine_options,
    given,
)

if TYPE_CHECKING:
    from foredraft.experiments import ExperimentOptions

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write every figure and run here.")]


def bench(
    model: Model,
    methods: Annotated[str | None, typer.Option(metavar="A,B", help="Drafters to compare with plain decoding.")] = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="Draft tokens where no other K is swept.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of one answer.")] = None,
    categories: Annotated[str | None, typer.Option(metavar="A,B", help="Kinds of prompts; all when not given.")] = None,
    limit: Annotated[int | None, typer.Option(help="Most prompts of each category.")] = None,
    dataset: Annotated[str | None, typer.Option(metavar="FILE", help="Prompts of your own, in Spec-Bench's format.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Times that each prompt is run.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the first repeat.")] = None,
    k_sweep: Annotated[str | None, typer.Option(metavar="0-8", help='K to compare, as 0-8 or 1,2,4; "none" for none.')] = None,
    batch_sweep: Annotated[
        str | None, typer.Option(metavar="1,2,4", help='Batch sizes to compare, as 1,2,4; "none" for none.')
    ] = None,
    passes: Annotated[bool, typer.Option("--passes", help="Time passes of 1 to 32 rows instead of answers.")] = False,
    json_file: JsonFile = None,
    report_file: Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write an HTML page with plots.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="With --passes: the same as --report.")] = None,
    speculative_config: Annotated[str | None, typer.Option(metavar="JSON", help="Further settings of the drafters.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    ops: Ops = None,
    threads: Threads = None,
    max_model_len: MaxModelLen = None,
    kv_cache_memory: KvMemory = None,
) -> None:
    """Measure plain and speculative decoding side by side, beside what was predicted, or with --passes what a pass costs.

    Progress goes to stderr, a table to stdout, and its figures as one line of JSON after it. With --json or --report, what is
    finished is kept in FILE.part until all is, and a stopped bench goes on from there.
    """
    options = given(num_speculative_tokens=num_speculative_tokens, max_tokens=max_tokens, temperature=temperature, seed=seed)
    options.update(given(methods=_names(methods), categories=_names(categories), dataset=dataset, limit=limit))
    options.update(given(k_sweep=_numbers("--k-sweep", k_sweep), batch_sweep=_numbers("--batch-sweep", batch_sweep)))
    options.update(given(speculative_config=_json_object(speculative_config)))
    engine = engine_options(device, dtype, ops, threads, max_model_len, kv_cache_memory) | given(repeats=repeats)
    if not passes and html_file is not None:
        raise typer.BadParameter("this name is for --passes; use --report.", param_hint="--html")
    if passes and options:
        name = next(iter(options)).replace("_", "-")
        raise typer.BadParameter("--passes times no answers; leave it out.", param_hint=f"--{name}")
    json_file = None if json_file == STANDARD_OUTPUT else json_file
    for name, path in (("--json", json_file), ("--report", report_file), ("--html", html_file)):
        check_output(name, path)
    if passes:
        _bench_passes(model, engine, json_file, [path for path in (report_file, html_file) if path is not None])
    else:
        _bench_answers(model, options | engine, json_file, report_file)


def experiments(
    model: Model,
    only: Annotated[str | None, typer.Option(metavar="A,B", help="Names of the experiments to run; all when not given.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of one answer.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Times that each measurement is made.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of sampled answers and of drafters that err on purpose.")] = None,
    json_file: JsonFile = None,
    device: Device = None,
    dtype: Dtype = None,
    ops: Ops = None,
    threads: Threads = None,
    max_model_len: MaxModelLen = None,
    kv_cache_memory: KvMemory = None,
) -> None:
    """Try on this machine what is said of speculative decoding: each claim, its numbers here, and whether it holds.

    A table goes to stdout, and its figures as one line of JSON after it. A claim that does not hold here is no error.
    """
    from foredraft import experiments as module

    engine = engine_options(device, dtype, ops, threads, max_model_len, kv_cache_memory)
    chosen = module.ExperimentOptions(
        model, **given(only=_names(only), max_tokens=max_tokens, repeats=repeats, seed=seed), **engine
    )
    json_file = None if json_file == STANDARD_OUTPUT else json_file
    check_output("--json", json_file)
    _run_experiments(chosen, json_file)


# ------------------------------------------------------------------------------------------------ running


def fetch_model(model: str) -> None:
    """Fetch a model that is not on this machine yet; tests put nothing in its place."""
    from foredraft.loader.resolve import resolve_model
    from foredraft.terminal import DownloadBar

    with DownloadBar(model) as progress:
        resolve_model(model, progress=progress)


def _bench_answers(model: str, options: Mapping[str, Any], json_file: Path | None, report_file: Path | None) -> None:
    from foredraft import bench as module
    from foredraft import bench_report, report
    from foredraft.array_file import is_special
    from foredraft.bench_table import format_table
    from foredraft.terminal import PartsBar, note

    chosen = module.BenchOptions(model, **options)
    if report_file is not None:
        report.plotting()
    output = json_file or report_file
    # Beside a device or a pipe there is no place for one.
    journal = None if output is None or is_special(output) else output.with_name(f"{output.name}.part")
    fetch_model(model)
    try:
        with PartsBar() as bar:
            result = module.run_bench(chosen, bar, journal)
    except KeyboardInterrupt:
        if journal is not None and journal.exists():
            note(f"what is finished is kept in {journal}; the same command goes on from there")
        raise
    _print_table(format_table(result))
    if report_file is not None:
        for line in bench_report.write_report(result, report_file):
            note(line)
    _write_json(result, json_file)
    # All of it is in the files that were asked for, whether or not the last line can be printed.
    if journal is not None:
        journal.unlink(missing_ok=True)
    _print_figures(result)


def _bench_passes(model: str, options: Mapping[str, Any], json_file: Path | None, pages: list[Path]) -> None:
    from foredraft import passes as module
    from foredraft import report
    from foredraft.terminal import note

    chosen = module.PassOptions(model, **options)
    if pages:
        report.plotting()
    fetch_model(model)
    result = module.run_passes(chosen, note)
    _print_table(module.format_table(result))
    for page in pages:
        report.write_passes(result, page)
    _write_json(result, json_file)
    _print_figures(result)


def _run_experiments(options: ExperimentOptions, json_file: Path | None) -> None:
    from foredraft import experiments as module
    from foredraft.terminal import PartsBar

    fetch_model(options.model)
    with PartsBar() as bar:
        result = module.run_experiments(options, bar)
    _print_table(module.format_experiments(result))
    _write_json(result, json_file)
    _print_figures(result)


def _print_table(table: str) -> None:
    """Before any file is written, which may fail."""
    print(table, flush=True)


def _write_json(result: Mapping[str, Any], json_file: Path | None) -> None:
    from foredraft.array_file import write_text

    if json_file is not None:
        write_text(json_file, _json_text(result))


def _print_figures(result: Mapping[str, Any]) -> None:
    print(json.dumps({name: value for name, value in result.items() if name != "runs"}, separators=(",", ":")))


def _json_text(result: Mapping[str, Any]) -> str:
    """Indented, but for the runs, which are one to a line: a number to a line would make far too many."""
    if not result.get("runs"):
        return json.dumps(result, indent=1) + "\n"
    text = json.dumps({**result, "runs": []}, indent=1)
    lines = ",\n".join(f"  {json.dumps(run)}" for run in result["runs"])
    return text.replace('\n "runs": []', f'\n "runs": [\n{lines}\n ]') + "\n"


# ------------------------------------------------------------------------------------------------ reading options


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Numbers and ranges with commas between them; ``none`` is no number."""
    from foredraft.types import ConfigError

    if text is None or text.strip() == "none":
        return None if text is None else ()
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        if match is None:
            raise ConfigError(f'{option} must be numbers and ranges like 0-8 or 1,2,4, or "none", not {text!r}; write it so.')
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"{option} must have ranges that rise, not {part.strip()}; write {last}-{first}.")
        found += range(first, last + 1)
    return tuple(found)


def _json_object(text: str | None) -> Any:
    from foredraft.types import ConfigError

    try:
        value = None if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:  # a number may be too long, and brackets too deep
        raise ConfigError(f'--speculative-config is not valid JSON ({error}); write it like {{"model": "..."}}.') from error
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f'--speculative-config must be a JSON object, not {text!r}; write it like {{"model": "..."}}.')
    return value
