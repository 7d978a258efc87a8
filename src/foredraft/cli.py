"""The command line: ``foredraft generate | chat | serve | bench | experiments | plan | train | models | demo``.

Owns: commands, options and exit codes (0 done, 1 a check failed, 2 the user's mistake, 130 stopped by Ctrl-C).  Does not know: how
anything is computed; each command imports what it needs when it runs, so that ``--help`` is quick.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from foredraft import __version__, cli_bench, cli_models, cli_plan, cli_serve, cli_train
from foredraft.cli_options import (
    Choice,
    Device,
    Dtype,
    IgnoreEos,
    JsonSchema,
    KvMemory,
    MaxModelLen,
    MaxTokens,
    MinP,
    Model,
    Ops,
    Regex,
    Seed,
    ShowDrafts,
    Speculative,
    Stop,
    System,
    Temperature,
    Threads,
    TopK,
    TopP,
    engine_options,
    given,
    structured_outputs,
)

if TYPE_CHECKING:
    from foredraft.llm import LLM
    from foredraft.types import SamplingParams

STOPPED = 130
PIPE_CLOSED = 141


class Commands(TyperGroup):
    """The commands, with every expected end mapped to an exit code and at most one line on stderr."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            raise typer.Exit(STOPPED) from None
        except BrokenPipeError:
            # Whoever read the output has left; what is still buffered must not be complained about at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(PIPE_CLOSED) from None
        except ValueError as error:
            from foredraft.types import ForedraftError

            if not isinstance(error, ForedraftError):
                raise
            from foredraft.terminal import error_line

            error_line(str(error))
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Commands,
    help="Run language models with speculative decoding: exact, and faster where drafts pay.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: the process's arguments) and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A model may write what the terminal's encoding cannot show.
            stream.reconfigure(errors="replace")
    try:
        app(args=None if arguments is None else list(arguments), prog_name="foredraft")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def load_llm(model: str, **options: Any) -> LLM:
    """Make the LLM of a command; tests put another in its place."""
    from foredraft.terminal import open_llm

    return open_llm(model, **options)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"foredraft {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Run language models with speculative decoding: exact, and faster where drafts pay."""


@contextmanager
def open_trace(path: Path | None) -> Iterator[dict[str, Any]]:
    """The option ``trace`` of an LLM that writes its decisions to ``path``, line by line; nothing for None.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        yield {}
        return
    try:
        lines = path.open("w", encoding="utf-8")
    except OSError as error:
        from foredraft.types import ConfigError

        raise ConfigError(f"the trace {path} cannot be written ({error.strerror}); give another file.") from error
    with lines:
        yield {"trace": lambda decision: lines.write(json.dumps(decision) + "\n")}


# ------------------------------------------------------------------------------------------------ generate


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help='The text to continue; "-" reads it from standard input.')],
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt as a question, by the model's chat template.")] = False,
    system: System = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    choice: Choice = None,
    logprobs: Annotated[int | None, typer.Option(help="With --json: this many likeliest tokens at each place.")] = None,
    n: Annotated[int | None, typer.Option("--n", help="Number of answers.")] = None,
    speculative_config: Speculative = None,
    show_drafts: ShowDrafts = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write each decision of the controller here, one line of JSON each.")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    ops: Ops = None,
    threads: Threads = None,
    max_model_len: MaxModelLen = None,
    kv_cache_memory: KvMemory = None,
) -> None:
    """Continue a text, or answer a question with --chat."""
    from foredraft.types import SamplingParams

    if system is not None and not chat:
        raise typer.BadParameter("a system message needs --chat.", param_hint="--system")
    if logprobs is not None and not as_json:
        raise typer.BadParameter("log-probabilities are shown with --json only.", param_hint="--logprobs")
    if show_drafts and as_json:
        raise typer.BadParameter("the JSON names the origin of every token; leave it out.", param_hint="--show-drafts")
    sampling = given(max_tokens=max_tokens, temperature=temperature, seed=seed, top_p=top_p, top_k=top_k, min_p=min_p)
    sampling |= structured_outputs(json_schema, regex, choice)
    params = SamplingParams(**sampling, **given(stop=stop, ignore_eos=ignore_eos, logprobs=logprobs, n=n))
    engine = engine_options(device, dtype, ops, threads, max_model_len, kv_cache_memory)
    if prompt == "-":
        prompt = sys.stdin.read().removesuffix("\n")
    with open_trace(trace) as tracing:
        llm = load_llm(model, speculative_config=speculative_config, **engine, **tracing)
        _generate(llm, model, prompt, system, params, chat, as_json, show_drafts)


def _generate(
    llm: LLM, model: str, prompt: str, system: str | None, params: SamplingParams, chat: bool, as_json: bool, show_drafts: bool
) -> None:
    messages = [*([{"role": "system", "content": system}] if system is not None else []), {"role": "user", "content": prompt}]
    request = llm.chat_prompt(messages) if chat else prompt
    if as_json:
        _print_json(llm, model, prompt, request, params)
    else:
        _print_text(llm, request, params, show_drafts)


def _print_json(llm: LLM, model: str, prompt: str, request: str | list[int], params: SamplingParams) -> None:
    output = llm.generate([request], params)[0].to_dict()
    print(json.dumps({"model": model, "speculative_config": asdict(llm.speculative_config), "prompt": prompt, **output}))


def _print_text(llm: LLM, request: str | list[int], params: SamplingParams, show_drafts: bool) -> None:
    from foredraft.terminal import OriginSplitter, Transcript, explain_drafts, note

    splitters = []
    if show_drafts:
        explain_drafts(llm)
        tokenizer = llm.checkpoint.tokenizer
        prompt_ids = tokenizer.encode(request) if isinstance(request, str) else request
        splitters = [OriginSplitter(tokenizer, prompt_ids) for _ in range(params.n)]
    transcript = Transcript(sys.stdout, params.n, splitters)
    try:
        for output in llm.stream([request], params):
            transcript.add(output)
    finally:
        # What came before Ctrl-C stays on the screen, with its line ended.
        transcript.close()
    note(transcript.statistics())


# ------------------------------------------------------------------------------------------------ chat


@app.command()
def chat(
    model: Model,
    system: System = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    speculative_config: Speculative = None,
    show_drafts: ShowDrafts = False,
    device: Device = None,
    dtype: Dtype = None,
    ops: Ops = None,
    threads: Threads = None,
    max_model_len: MaxModelLen = None,
    kv_cache_memory: KvMemory = None,
) -> None:
    """Talk to a model.

    /reset forgets the conversation, /system TEXT sets the system message, /stats tells the speed, /exit or Ctrl-D ends;
    Ctrl-C stops an answer.
    """
    from foredraft.chat import Conversation
    from foredraft.types import RequestError, SamplingParams

    sampling = given(max_tokens=max_tokens, temperature=temperature, seed=seed, top_p=top_p, top_k=top_k, min_p=min_p, stop=stop)
    params = SamplingParams(**sampling, ignore_eos=ignore_eos)
    engine = engine_options(device, dtype, ops, threads, max_model_len, kv_cache_memory)
    llm = load_llm(model, speculative_config=speculative_config, **engine)
    if not llm.checkpoint.tokenizer.has_chat_template:
        raise RequestError(f"{model} has no chat template; use `foredraft generate`, or choose a model made for chat.")
    Conversation(llm, params, system, show_drafts).run()


# ------------------------------------------------------------------------------------------------ the others

app.command()(cli_serve.serve)
app.command()(cli_bench.bench)
app.command()(cli_bench.experiments)
app.command()(cli_plan.plan)
app.add_typer(cli_train.train, name="train")


app.command()(cli_models.models)


@app.command()
def demo(model: Annotated[str, typer.Argument(metavar="MODEL", help="As elsewhere.")] = "smollm2-135m") -> None:
    """See one answer decoded plainly and with drafts, side by side, and whether both are the same."""
    from foredraft import demo as module

    raise typer.Exit(module.run(model, load_llm))
