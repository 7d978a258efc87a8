"""The commands ``foredraft train ...``.

Owns: their options, and the order of collecting, fitting and saving.  Does not know: how any of these is done.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft import __version__

if TYPE_CHECKING:
    from foredraft.llm import LLM

MIN_TOKENS = 1000

train = typer.Typer(
    help="Fit a drafter to a model by texts that the model writes itself; no data set is needed.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@train.callback()
def root() -> None:
    """Fit a drafter to a model by texts that the model writes itself; no data set is needed."""


@train.command()
def suffix(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder, a .gguf file, a hub id or an alias.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help='Where the statistics go; then "suffix_decoding_base": FILE.')],
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of answers to learn from.")] = 300_000,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="Prompts to answer besides those that the model makes up (JSON Lines).")
    ] = None,
    temperatures: Annotated[str, typer.Option(metavar="T,T", help="Of the answers, in turn.")] = "0,0,0,0.7",
    seed: Annotated[int, typer.Option(help="Same seed, same texts, same file.")] = 0,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
) -> None:
    """Count what the model tends to say, so that `suffix` and `auto` draft from the first token on.

    What the model has written so far is kept in the cache folder: a run that was stopped goes on where it was, and more tokens
    cost only the difference.
    """
    from foredraft.array_file import check_writable
    from foredraft.drafters.ngram_table import TargetIdentity, save_table
    from foredraft.loader import cache_dir
    from foredraft.request_log import read_prompts
    from foredraft.terminal import note, open_llm
    from foredraft.train.collect import TEXTS_PER_FILE, Collector, Recipe
    from foredraft.train.suffix import NUM_DRAFTED, fit
    from foredraft.types import ConfigError

    if tokens < MIN_TOKENS:
        raise ConfigError(f"tokens must be at least {MIN_TOKENS}, not {tokens}; ask for more.")
    recipe = Recipe(seed=seed, temperatures=_numbers(temperatures))
    given = read_prompts(prompts) if prompts is not None else []
    check_writable(out)
    engine: dict[str, Any] = {name: value for name, value in (("device", device), ("threads", threads)) if value is not None}
    llm = open_llm(model, speculative_config={"method": "none"}, max_num_seqs=TEXTS_PER_FILE, **engine)
    tokenizer, name = llm.checkpoint.tokenizer, llm.checkpoint.name
    folder = cache_dir() / "texts"
    collector = Collector(llm, tokenizer, folder, model=_weights_of(llm), recipe=recipe, prompts=given, report=note)
    fitted = fit(collector.collect(tokens), llm.target.vocab_size)
    provenance = {
        "foredraft": __version__,
        "recipe": asdict(recipe),
        "num_prompts": len(given),
        "num_tokens": fitted.num_tokens,
        "cold_acceptance_length": fitted.cold_acceptance_length,
        "warm_acceptance_length": fitted.warm_acceptance_length,
    }
    save_table(out, TargetIdentity.of(name, llm.target.vocab_size, tokenizer.vocabulary()), provenance, fitted.arrays)
    note(
        f"{out}: {out.stat().st_size:,} bytes from {fitted.num_tokens:,} tokens; texts that were held out take "
        f"{fitted.warm_acceptance_length:.2f} tokens a pass with it, {fitted.cold_acceptance_length:.2f} without "
        f"(K = {NUM_DRAFTED})"
    )


def _weights_of(llm: LLM) -> str:
    """What tells the model's texts from those of others: its file, and the format that it is computed in."""
    checkpoint, config = llm.checkpoint, llm.config
    stat = checkpoint.path.stat()
    parts = (checkpoint.path, stat.st_mtime_ns, checkpoint.weight_bytes, checkpoint.quantization, config.device, config.dtype)
    return " ".join(map(str, parts))


def _numbers(text: str) -> tuple[float, ...]:
    from foredraft.types import ConfigError

    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--temperatures must be numbers with commas between them, not {text!r}; write it like 0,0.7.") from error
