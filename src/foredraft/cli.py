"""The command line: ``foredraft generate | chat | bench | plan | models | demo``.

Owns: commands, options and exit codes (0 done, 1 a check failed, 2 the user's mistake, 130 stopped by Ctrl-C).  Does not know: how
anything is computed; each command imports what it needs when it runs, so that ``--help`` is quick.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from foredraft import __version__, cli_plan

if TYPE_CHECKING:
    from foredraft.llm import LLM
    from foredraft.types import SamplingParams

STOPPED = 130
PIPE_CLOSED = 141
BYTE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


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


def fetch_model(model: str) -> None:
    """Fetch a model that is not on this machine yet; tests put nothing in its place."""
    from foredraft.loader.resolve import resolve_model
    from foredraft.terminal import DownloadBar

    with DownloadBar(model) as progress:
        resolve_model(model, progress=progress)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"foredraft {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Run language models with speculative decoding: exact, and faster where drafts pay."""


# ------------------------------------------------------------------------------------------------ options

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder, a .gguf file, a hub id or an alias.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="System message of the chat.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of one answer.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same answer; drawn and printed when not given.")]
TopP = Annotated[float | None, typer.Option(help="Sample from the likeliest tokens that make up this much probability.")]
TopK = Annotated[int | None, typer.Option(help="Sample from this many of the likeliest tokens.")]
MinP = Annotated[float | None, typer.Option(help="Sample from tokens at least this likely, relative to the likeliest.")]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End the answer before this text; may be repeated.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")]
Speculative = Annotated[
    str | None,
    typer.Option("--speculative-config", metavar="JSON", help='As {"method": "ngram"} or {"method": "none"}; auto without.'),
]
ShowDrafts = Annotated[bool, typer.Option("--show-drafts", help="Mark the tokens that came from accepted drafts.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")]
Ops = Annotated[str | None, typer.Option(help="auto, native or torch.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Most tokens of prompt and answer together; the model's own when not given.")]
KvMemory = Annotated[str | None, typer.Option("--kv-cache-memory", metavar="SIZE", help="As 512MB, 1GiB or a number of bytes.")]


def given(**options: Any) -> dict[str, Any]:
    """The options that the user gave; the others keep the defaults of the classes that they go to."""
    return {name: value for name, value in options.items() if value is not None}


def parse_bytes(text: str | None) -> int | None:
    """A size such as ``512MB``, ``1GiB``, ``1.5 GiB`` or ``1000000`` in bytes; None for None.

    Raises:
        ConfigError: it is none of these.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    unit = BYTE_UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        from foredraft.types import ConfigError

        raise ConfigError(f"kv_cache_memory must be a size like 512MB, 1GiB or a number of bytes, not {text!r}; write it so.")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def engine_options(
    device: str | None, dtype: str | None, ops: str | None, threads: int | None, max_model_len: int | None, kv_memory: str | None
) -> dict[str, Any]:
    """The engine's options among those that the user gave, as EngineConfig takes them."""
    num_bytes = parse_bytes(kv_memory)
    return given(device=device, dtype=dtype, ops=ops, threads=threads, max_model_len=max_model_len, kv_cache_memory=num_bytes)


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


# ------------------------------------------------------------------------------------------------ bench, models, demo


@app.command()
def bench(
    model: Model,
    methods: Annotated[str | None, typer.Option(metavar="A,B", help="Drafters to compare with plain decoding.")] = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="Draft tokens, at most.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of one answer.")] = None,
    categories: Annotated[str | None, typer.Option(metavar="A,B", help="Kinds of prompts; all when not given.")] = None,
    limit: Annotated[int | None, typer.Option(help="Most prompts of each category.")] = None,
    dataset: Annotated[str | None, typer.Option(metavar="FILE", help="Prompts of your own, in Spec-Bench's format.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Times that each prompt is run.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the first repeat.")] = None,
    passes: Annotated[bool, typer.Option("--passes", help="Time passes of 1 to 32 rows instead of answers.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write every figure and run here.")] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="With --passes: write a page with a plot.")
    ] = None,
    speculative_config: Annotated[str | None, typer.Option(metavar="JSON", help="Further settings of the drafters.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    ops: Ops = None,
    threads: Threads = None,
    max_model_len: MaxModelLen = None,
    kv_cache_memory: KvMemory = None,
) -> None:
    """Measure plain and speculative decoding side by side, or with --passes what a pass costs by its number of rows.

    Progress goes to stderr, a table to stdout, and its figures as one line of JSON after it.
    """
    options = given(num_speculative_tokens=num_speculative_tokens, max_tokens=max_tokens, temperature=temperature, seed=seed)
    options.update(given(methods=_names(methods), categories=_names(categories), dataset=dataset, limit=limit))
    options.update(given(speculative_config=_json_object(speculative_config)))
    engine = engine_options(device, dtype, ops, threads, max_model_len, kv_cache_memory) | given(repeats=repeats)
    if not passes and html_file is not None:
        raise typer.BadParameter("a page with a plot is made with --passes only.", param_hint="--html")
    if passes and options:
        name = next(iter(options)).replace("_", "-")
        raise typer.BadParameter("--passes times no answers; leave it out.", param_hint=f"--{name}")
    _check_files({"--json": json_file, "--html": html_file})
    if passes:
        _bench_passes(model, engine, json_file, html_file)
    else:
        _bench_answers(model, options | engine, json_file)


def _check_files(files: Mapping[str, Path | None]) -> None:
    """Find out now rather than after minutes of measuring."""
    from foredraft.types import ConfigError

    for name, path in files.items():
        if path is not None and (path.is_dir() or not os.access(path.resolve().parent, os.W_OK)):
            raise ConfigError(f"{name} must name a file in a folder that can be written to, not {str(path)!r}; choose another.")


def _bench_answers(model: str, options: Mapping[str, Any], json_file: Path | None) -> None:
    from foredraft import bench as module
    from foredraft.terminal import note

    chosen = module.BenchOptions(model, **options)
    fetch_model(model)
    result = module.run_bench(chosen, note)
    _print_figures(result, module.format_table(result), json_file)


def _bench_passes(model: str, options: Mapping[str, Any], json_file: Path | None, html_file: Path | None) -> None:
    from foredraft import passes as module
    from foredraft import report
    from foredraft.terminal import note

    chosen = module.PassOptions(model, **options)
    if html_file is not None:
        report.plotting()
    fetch_model(model)
    result = module.run_passes(chosen, note)
    if html_file is not None:
        report.write_passes(result, html_file)
    _print_figures(result, module.format_table(result), json_file)


def _print_figures(result: Mapping[str, Any], table: str, json_file: Path | None) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table)
    print(json.dumps({name: value for name, value in result.items() if name != "runs"}, separators=(",", ":")))


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def _json_object(text: str | None) -> Any:
    from foredraft.types import ConfigError

    try:
        value = None if text is None else json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f'--speculative-config is not valid JSON ({error}); write it like {{"model": "..."}}.') from error
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f'--speculative-config must be a JSON object, not {text!r}; write it like {{"model": "..."}}.')
    return value


app.command()(cli_plan.plan)


@app.command()
def models() -> None:
    """List the models at hand and the drafters."""
    from foredraft.drafters import registry
    from foredraft.loader import cache_dir, known_models
    from foredraft.terminal import format_table

    rows = [["MODEL", "CACHED", "SIZE", "LICENCE", "ABOUT"]]
    for known in known_models():
        cached = "yes" if known.cached else "no"
        rows.append([known.alias, cached, f"{known.size / 1e6:.0f} MB", known.licence, known.description])
    rows += [[name, "yes", f"{size / 1e6:.0f} MB", "see its page", "from the Hugging Face hub"] for name, size in _hub_models()]
    print(format_table(rows))
    print(f"\ncache: {cache_dir()}\ndrafters: {', '.join(registry.available())}")


def _hub_models() -> list[tuple[str, int]]:
    """(id, bytes) of the models in the hub's cache that have the files of a loadable folder."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    return sorted(
        (repo.repo_id, repo.size_on_disk)
        for repo in repos
        if repo.repo_type == "model"
        and any(
            any(file.file_name == "config.json" for file in revision.files)
            and any(file.file_name.endswith(".safetensors") for file in revision.files)
            for revision in repo.revisions
        )
    )


@app.command()
def demo(model: Annotated[str, typer.Argument(metavar="MODEL", help="As elsewhere.")] = "smollm2-135m") -> None:
    """See one answer decoded plainly and with drafts, side by side, and whether both are the same."""
    from foredraft import demo as module

    raise typer.Exit(module.run(model, load_llm))
