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
    from foredraft.train.collect import Collector, Recipe
    from foredraft.train.features import StateFiles, StateRecorder, Text

MIN_TOKENS, LEAST_BYTES = 1000, 10_000
RECORDER = "states"

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
    max_bytes: Annotated[int, typer.Option(metavar="N", help="Largest file; what is most frequent is kept.")] = 8_000_000,
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
    from foredraft.terminal import note
    from foredraft.train.collect import Recipe
    from foredraft.train.suffix import NUM_DRAFTED, fit
    from foredraft.types import ConfigError

    recipe = Recipe(seed=seed, temperatures=_numbers(temperatures))
    if max_bytes < LEAST_BYTES:
        raise ConfigError(f"--max-bytes must be at least {LEAST_BYTES}, not {max_bytes}; raise it.")
    check_writable(out)
    _refuse_others_file(out)
    llm, collector = _collector(model, tokens, prompts, recipe, device, threads)
    tokenizer, name = llm.checkpoint.tokenizer, llm.checkpoint.name
    fitted = fit(collector.collect(tokens), llm.target.vocab_size, max_bytes)
    provenance = {
        "foredraft": __version__,
        "recipe": asdict(recipe),
        "num_prompts": collector.num_prompts,
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


@train.command()
def eagle3(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder, a .gguf file, a hub id or an alias.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help='Where the head goes; then {"method": "eagle3", "model": DIR}.')],
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of answers to learn from.")] = 300_000,
    hours: Annotated[float | None, typer.Option(metavar="H", help="Hours of training, in place of --epochs.")] = None,
    epochs: Annotated[float, typer.Option(metavar="E", help="How often to go over the texts.")] = 8.0,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="Prompts to answer besides those that the model makes up (JSON Lines).")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of training-time test: draft tokens that the head learns to be good at.")] = 3,
    loss: Annotated[str, typer.Option(help="ce (cross-entropy), tv (acceptance), or lk (from the first to the second).")] = "ce",
    step_decay: Annotated[float, typer.Option(help="What a step counts, in terms of the one before.")] = 0.5,
    draft_vocab: Annotated[
        int | None, typer.Option(help="Tokens that can be drafted, the most frequent ones: 8192, or those of --start.")
    ] = None,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 2e-3,
    texts_per_step: Annotated[int, typer.Option(help="Texts in a step of the optimiser.")] = 3,
    start: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A head to go on from, in place of the model's own last layer.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same head, on the same device with as many threads.")] = 0,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
) -> None:
    """Train an EAGLE-3 head: a small layer that drafts from what the model thinks.

    No data set is needed: the model makes up questions and answers them.  Its texts and states are kept in the cache folder, and
    the training in DIR: a run that was stopped goes on where it was.
    """
    from foredraft.array_file import check_writable
    from foredraft.drafters.ngram_table import TargetIdentity
    from foredraft.loader.folder import read_json
    from foredraft.target import resolve_device
    from foredraft.terminal import note
    from foredraft.train import fit_eagle3
    from foredraft.train.collect import Recipe
    from foredraft.train.features import StateRecorder
    from foredraft.train.head_file import PROVENANCE, WEIGHTS, open_own_head
    from foredraft.train.loop import Budget
    from foredraft.types import ConfigError

    if start is not None and draft_vocab is not None:
        raise ConfigError("--draft-vocab cannot be given with --start, since a head keeps its draft vocabulary; give one of them.")
    given = {} if draft_vocab is None else {"draft_vocab": draft_vocab}
    options = fit_eagle3.Eagle3Options(steps, loss, step_decay, learning_rate=lr, texts_per_step=texts_per_step, seed=seed, **given)
    budget = Budget(epochs, hours)
    recipe = Recipe(seed=seed)
    check_writable(out / WEIGHTS)
    _refuse_others_folder(out, fit_eagle3.CHECKPOINT)
    recorder = StateRecorder()
    llm, collector = _collector(model, tokens, prompts, recipe, device, threads, recorder)
    checkpoint, architecture = llm.checkpoint, llm.checkpoint.architecture
    fit_eagle3.refuse_target(architecture)
    identity = TargetIdentity.of(checkpoint.name, llm.target.vocab_size, checkpoint.tokenizer.vocabulary())
    taps = fit_eagle3.tapped_layers(architecture.num_layers)
    head = None if start is None else open_own_head(start, architecture, taps, identity)
    texts = _texts_with_states(llm, collector, tokens, recorder, (*taps, architecture.num_layers))
    on = resolve_device(device or "auto")
    del llm
    provenance = {"foredraft": __version__, "recipe": asdict(recipe), "num_prompts": collector.num_prompts}
    if start is not None:
        provenance["went_on_from"] = read_json(start / PROVENANCE, required=False)
    fit = fit_eagle3.Fit(
        architecture, checkpoint.weights, texts, taps, identity, options, budget, out, on, threads, provenance, head
    )
    for file in fit.run(note):
        note(f"{file}: {file.stat().st_size:,} bytes")


@train.command()
def draft(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder, a .gguf file, a hub id or an alias.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help='Where the model goes; then {"method": "draft_model", "model": DIR}.')],
    layers: Annotated[int, typer.Option(metavar="N", help="Layers; with each it is better and slower.")] = 2,
    hidden: Annotated[int | None, typer.Option(metavar="H", help="Hidden size; the target's own when not given.")] = None,
    vocab: Annotated[
        int | None, typer.Option(metavar="V", help="It knows the first V token ids; enough for 95% of the texts when not given.")
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of answers to learn from.")] = 300_000,
    hours: Annotated[float | None, typer.Option(metavar="H", help="Hours of training, in place of --epochs.")] = None,
    epochs: Annotated[float, typer.Option(metavar="E", help="How often to go over the texts.")] = 4.0,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="Prompts to answer besides those that the model makes up (JSON Lines).")
    ] = None,
    loss: Annotated[
        str,
        typer.Option(
            help="By the target's distribution: ce (cross-entropy), tv (acceptance), lk (both); by its texts alone: tokens."
        ),
    ] = "ce",
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 4e-3,
    texts_per_step: Annotated[int, typer.Option(help="Texts in a step of the optimiser.")] = 3,
    seed: Annotated[int, typer.Option(help="Same seed, same model, on the same device with as many threads.")] = 0,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
) -> None:
    """Train a small draft model that starts as a few of the target's own layers.

    No data set is needed: the model makes up questions and answers them.  Its texts are kept in the cache folder, and the training
    in DIR: a run that was stopped goes on where it was.
    """
    import numpy as np

    from foredraft.array_file import check_writable
    from foredraft.drafters.ngram_table import TargetIdentity
    from foredraft.target import resolve_device
    from foredraft.terminal import note
    from foredraft.train import fit_draft
    from foredraft.train.collect import Recipe
    from foredraft.train.draft_file import size_of
    from foredraft.train.features import StateRecorder, Text
    from foredraft.train.loop import Budget

    options = fit_draft.DraftOptions(layers, hidden, vocab, loss, lr, texts_per_step, seed)
    budget, recipe = Budget(epochs, hours), Recipe(seed=seed)
    check_writable(out / fit_draft.CHECKPOINT)
    _refuse_others_folder(out, fit_draft.CHECKPOINT)
    # Of its texts alone a draft model learns without anything that the target thought.
    recorder = None if loss == "tokens" else StateRecorder()
    llm, collector = _collector(model, tokens, prompts, recipe, device, threads, recorder)
    checkpoint = llm.checkpoint
    # Whether there can be such a model shows here, before there are texts.
    options.architecture(checkpoint.architecture)
    identity = TargetIdentity.of(checkpoint.name, llm.target.vocab_size, checkpoint.tokenizer.vocabulary())
    if recorder is None:
        texts = [Text(*record, np.empty((0, 0), np.float16)) for record in collector.collect(tokens)]
    else:
        texts = _texts_with_states(llm, collector, tokens, recorder, (checkpoint.architecture.num_layers,))
    on = resolve_device(device or "auto")
    del llm
    provenance = {"foredraft": __version__, "recipe": asdict(recipe), "num_prompts": collector.num_prompts}
    fit = fit_draft.Fit(checkpoint, texts, identity, options, budget, out, on, threads, provenance)
    for file in fit.run(note):
        note(f"{file}: {size_of(file):,} bytes")


def _refuse_others_file(out: Path) -> None:
    """Refuse to write over what holds no statistics, such as the model itself."""
    from foredraft.array_file import MAGIC
    from foredraft.types import ConfigError

    if out.is_file() and out.stat().st_size:
        with out.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ConfigError(f"--out {out} is there already and holds no statistics; choose another file.")


def _refuse_others_folder(out: Path, checkpoint: str) -> None:
    """Refuse to write over a model that no training here has made, such as the target itself."""
    from foredraft.train.head_file import PROVENANCE
    from foredraft.types import ConfigError

    if (out / "config.json").exists() and not any((out / name).exists() for name in (PROVENANCE, checkpoint)):
        raise ConfigError(f"--out {out} holds a model that was not trained by this command; choose another folder.")


def _collector(
    model: str,
    tokens: int,
    prompts: str | None,
    recipe: Recipe,
    device: str | None,
    threads: int | None,
    recorder: StateRecorder | None = None,
) -> tuple[LLM, Collector]:
    """The model, and what makes its texts; with a ``recorder`` the states are kept that it sees meanwhile."""
    from foredraft.loader import cache_dir
    from foredraft.request_log import read_prompts
    from foredraft.terminal import note, open_llm
    from foredraft.train.collect import TEXTS_PER_FILE, Collector
    from foredraft.train.features import keep_states
    from foredraft.types import ConfigError

    if tokens < MIN_TOKENS:
        raise ConfigError(f"tokens must be at least {MIN_TOKENS}, not {tokens}; ask for more.")
    given = read_prompts(prompts) if prompts is not None else []
    engine: dict[str, Any] = {name: value for name, value in (("device", device), ("threads", threads)) if value is not None}
    collecting: dict[str, Any] = {"report": note}
    if recorder is None:
        engine["speculative_config"] = {"method": "none"}
    else:
        engine["speculative_config"] = {"method": RECORDER, "num_speculative_tokens": 1, "adaptive": False}
        engine["drafters"] = {RECORDER: lambda config, context: recorder}
        # States of what the prefix cache holds are not computed again.
        engine["enable_prefix_caching"] = False
        collecting["on_texts"] = lambda texts: keep_states(recorder, _state_files(recorder), texts)
    llm = open_llm(model, max_num_seqs=TEXTS_PER_FILE, **engine)
    folder, name = cache_dir() / "texts", _weights_of(llm)
    return llm, Collector(llm, llm.checkpoint.tokenizer, folder, model=name, recipe=recipe, prompts=given, **collecting)


def _texts_with_states(llm: LLM, collector: Collector, tokens: int, recorder: StateRecorder, layers: tuple[int, ...]) -> list[Text]:
    """The texts, and what leaves ``layers`` at each of their tokens: seen while they are written, or computed."""
    from foredraft.terminal import note
    from foredraft.train.features import capture

    recorder.hidden_layers = layers
    files = collector.files(tokens)
    return capture(llm.target, files, _state_files(recorder), llm.kv.num_blocks, llm.config.block_size, note)


def _state_files(recorder: StateRecorder) -> StateFiles:
    from foredraft.loader import cache_dir
    from foredraft.train.features import StateFiles

    return StateFiles(cache_dir() / "states", recorder.hidden_layers)


def _weights_of(llm: LLM) -> str:
    """What tells the model's texts from those of others: its files, and the format that it is computed in."""
    from foredraft.loader.resolve import fingerprint

    checkpoint, config = llm.checkpoint, llm.config
    parts = (checkpoint.path, *fingerprint(checkpoint.path), checkpoint.quantization, config.device, config.dtype)
    return " ".join(map(str, parts))


def _numbers(text: str) -> tuple[float, ...]:
    from foredraft.types import ConfigError

    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--temperatures must be numbers with commas between them, not {text!r}; write it like 0,0.7.") from error
