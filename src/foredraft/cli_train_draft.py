"""The command ``foredraft train draft``.

Owns: its options, and the order of collecting, training and saving.  Does not know: how any of these is done.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft import __version__
from foredraft.cli_options import Device, Threads, given

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foredraft.llm import LLM
    from foredraft.replay import Record
    from foredraft.train.features import Text

DEFAULT_TOKENS, MIN_TOKENS = 300_000, 1000
CHECKPOINT_NAME = "checkpoint.pt"


def draft(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder, a .gguf file, a hub id or an alias.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the draft model goes.")],
    layers: Annotated[int, typer.Option(metavar="N", help="Layers; each makes it better and slower.")] = 2,
    hidden: Annotated[int | None, typer.Option(metavar="H", help="Hidden size; the target's own when not given.")] = None,
    vocab: Annotated[
        int | None, typer.Option(metavar="N", help="Know the first N token ids only; enough for 95% of the texts when not given.")
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of answers to learn from.")] = DEFAULT_TOKENS,
    epochs: Annotated[float, typer.Option(metavar="N", help="How often to read each of them.")] = 3.0,
    hours: Annotated[float | None, typer.Option(metavar="H", help="Train this long instead, however often that is.")] = None,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="Prompts to answer besides those that the model makes up (JSON Lines).")
    ] = None,
    loss: Annotated[str, typer.Option(help="ce, tv or lk: by the target's distribution; tokens: by its texts alone.")] = "ce",
    lr: Annotated[float, typer.Option(help="Learning rate of the matrices.")] = 2e-3,
    seed: Annotated[int, typer.Option(help="Same seed, same texts, same training.")] = 0,
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Make a small draft model of the target's kind and train it on the target's own texts, for `draft_model` and `auto`.

    A run that was stopped goes on where it was when it is started with the same options.
    """
    import torch

    from foredraft.array_file import check_writable
    from foredraft.drafters.ngram_table import TargetIdentity
    from foredraft.loader import cache_dir
    from foredraft.request_log import read_prompts
    from foredraft.target import resolve_device
    from foredraft.terminal import note, open_llm
    from foredraft.train.collect import TEXTS_PER_FILE, Collector, Recipe
    from foredraft.train.draft_file import save_draft, size_of
    from foredraft.train.fit_draft import NUM_DRAFTED, DraftJob, DraftOptions
    from foredraft.train.fit_eagle3 import split
    from foredraft.train.loop import Budget, run
    from foredraft.train.student import student_architecture
    from foredraft.types import ConfigError

    options = DraftOptions(layers, hidden or 0, vocab or 0, loss, lr, seed=seed)
    if tokens < MIN_TOKENS:
        raise ConfigError(f"tokens must be at least {MIN_TOKENS}, not {tokens}; ask for more.")
    if not epochs > 0 or not (hours is None or hours > 0):
        raise ConfigError("epochs and hours must be above 0; change them.")
    recipe, asked = Recipe(seed=seed), read_prompts(prompts) if prompts is not None else []
    check_writable(out / CHECKPOINT_NAME)
    engine = given(device=device, threads=threads)
    llm = open_llm(model, speculative_config={"method": "none"}, max_num_seqs=TEXTS_PER_FILE, **engine)
    checkpoint, target = llm.checkpoint, llm.checkpoint.architecture
    # Before hours of collecting, not after.
    student_architecture(target, layers, hidden or target.hidden_size, vocab or target.vocab_size)
    identity = weights_of(llm)
    folder = cache_dir() / "texts"
    collector = Collector(llm, checkpoint.tokenizer, folder, model=identity, recipe=recipe, prompts=asked, report=note)
    learned, held_out = split(_with_states(llm, collector.collect(tokens), collector.folder.name, loss))
    if threads is not None:
        torch.set_num_threads(threads)
    job = DraftJob(target, checkpoint.weights, learned, held_out, options, device=torch.device(resolve_device(llm.config.device)))
    settings = {"target": identity, "texts": collector.folder.name, "tokens": tokens, "epochs": epochs, "hours": hours}
    position = run(
        job,
        Budget(epochs=epochs, hours=hours),
        texts_per_step=options.texts_per_step,
        seed=seed,
        checkpoint=out / CHECKPOINT_NAME,
        settings=settings | asdict(options),
        report=note,
    )
    provenance = {
        "foredraft": __version__,
        "target": asdict(TargetIdentity.of(checkpoint.name, llm.target.vocab_size, checkpoint.tokenizer.vocabulary())),
        "recipe": asdict(recipe),
        "num_prompts": len(asked),
        "options": settings | asdict(options),
        "num_texts": len(learned),
        "num_parameters": sum(values.numel() for values in job.student.tensors.values()),
        "curve": position.curve,
    }
    tensors = {name: values.detach().float().numpy(force=True) for name, values in job.student.tensors.items()}
    path = save_draft(out, checkpoint, job.architecture, tensors, provenance)
    (out / CHECKPOINT_NAME).unlink(missing_ok=True)
    note(
        f"{path}: {size_of(path):,} bytes; texts that were held out take {position.curve[-1]['acceptance_length']:.2f} tokens a "
        f"pass with it (K = {NUM_DRAFTED}, greedy)"
    )


def _with_states(llm: LLM, records: Sequence[Record], name: str, loss: str) -> list[Text]:
    """The texts, with the target's last states where the loss asks for its distribution."""
    import numpy as np

    from foredraft.loader import cache_dir
    from foredraft.terminal import note
    from foredraft.train.features import Text, capture

    if loss == "tokens":
        return [Text(record.tokens, record.num_prompt, np.empty((0, 0), np.float16)) for record in records]
    taps = (llm.checkpoint.architecture.num_layers,)
    return capture(llm.target, records, taps, cache_dir() / "states" / name, llm.config.block_size, note)
