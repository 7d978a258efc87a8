"""The command ``foredraft plan``.

Owns: its options and how they are read.  Does not know: what a plan is computed from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli_options import STANDARD_OUTPUT, check_output

if TYPE_CHECKING:
    from foredraft.plan_options import PlanOptions


def plan(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A model as elsewhere, or the path of a config.json.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(metavar="NAME", help="Draft model, as MODEL; a name only with --draft-params.")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Probability that a draft token is accepted, from 0 to below 1.")] = None,
    from_log: Annotated[
        str | None, typer.Option(metavar="FILE", help="Replay drafters over recorded prompts and completions (JSON Lines).")
    ] = None,
    measure: Annotated[
        str | None, typer.Option(metavar="PROMPTS", help="Answer these prompts with MODEL here, and replay drafters over that.")
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="this (measured), h100, h200, a100, b200, l4, l40s, rtx3090, ... or a JSON file."),
    ] = None,
    batch: Annotated[str, typer.Option(metavar="N,N", help="Numbers of requests at a time.")] = "1,4,16,64,256",
    context: Annotated[int | None, typer.Option(help="Tokens of one request, prompt and answer; 2048 or the model's own.")] = None,
    memory: Annotated[float | None, typer.Option(metavar="GIB", help="Memory in all; the hardware's when not given.")] = None,
    target_params: Annotated[
        float | None, typer.Option(metavar="N", help="Parameters of the target, such as 70e9, not MODEL.")
    ] = None,
    draft_params: Annotated[float | None, typer.Option(metavar="N", help="Parameters of the draft model.")] = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="The largest K that is considered.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Format of the weights: bfloat16, float16, float32 or fp8.")] = None,
    gpus: Annotated[int, typer.Option(help="GPUs that share the model.")] = 1,
    emit: Annotated[str | None, typer.Option(metavar="vllm", help="Print the options of another engine, too.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help='Every figure goes here; "-" prints it.')] = None,
) -> None:
    """Predict whether drafts pay, with which method and K, up to which batch size, and what memory they take.

    Without a word on acceptance, MODEL answers a few prompts here, or a table by acceptance is printed.
    """
    from foredraft.plan_options import PlanOptions

    ceiling = {} if num_speculative_tokens is None else {"num_speculative_tokens": num_speculative_tokens}
    options = PlanOptions(
        model=model,
        draft=draft,
        alpha=alpha,
        from_log=from_log,
        measure=measure,
        hardware=hardware,
        batches=_batches(batch),
        context=context,
        memory_gib=memory,
        target_params=target_params,
        draft_params=draft_params,
        dtype=dtype,
        gpus=gpus,
        emit=emit,
        **ceiling,
    )
    _run(options, json_file)


def _run(options: PlanOptions, json_file: Path | None) -> None:
    from foredraft.array_file import write_text
    from foredraft.plan import run_plan
    from foredraft.plan_table import format_plan
    from foredraft.terminal import note, open_llm

    to_stdout = json_file == STANDARD_OUTPUT
    check_output("--json", None if to_stdout else json_file)
    result = run_plan(options, note, open_llm)
    print(format_plan(result), flush=True)
    if json_file is not None and not to_stdout:
        write_text(json_file, json.dumps(result, indent=1) + "\n")
    if to_stdout:
        print(json.dumps(result, separators=(",", ":")))


def _batches(text: str) -> tuple[int, ...]:
    from foredraft.types import ConfigError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--batch must be whole numbers with commas between them, as 1,4,16, not {text!r}; write it so."
        ) from error
