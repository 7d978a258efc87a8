"""Drafters that come with foredraft, found by the target that they were made for.

Owns: the layout of ``shipped/``, and which of it fits a target.  Does not know: how a drafter is loaded.

``shipped/<alias>/provenance.json`` names the target; beside it may be ``suffix.table`` (statistics), ``eagle3/`` or ``eagle/``
(a head) and ``draft_model/draft.gguf`` (a small language model).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.drafters.ngram_table import TargetIdentity

if TYPE_CHECKING:
    from foredraft.loader import Checkpoint

FOLDER = Path(__file__).resolve().parents[1] / "shipped"
STATISTICS, DRAFT_MODEL, HEADS = "suffix.table", "draft_model/draft.gguf", ("eagle3", "eagle")


@dataclass(frozen=True)
class Target:
    """The target as far as it decides what fits; ``identity`` is asked for only where the sizes agree."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    identity: Callable[[], TargetIdentity]


def target_of(checkpoint: Checkpoint) -> Target:
    """A target as it was opened.  Its identity is worked out at most once, since that reads the whole vocabulary."""
    architecture = checkpoint.architecture

    @cache
    def identity() -> TargetIdentity:
        return TargetIdentity.of(checkpoint.name, architecture.vocab_size, checkpoint.tokenizer.vocabulary())

    return Target(architecture.vocab_size, architecture.hidden_size, architecture.num_layers, identity)


@dataclass(frozen=True)
class Shipped:
    """What there is for one target: paths, None for what there is not.  ``head_kind`` is the method of ``head``."""

    name: str = ""
    suffix_base: str | None = None
    draft_model: str | None = None
    head: str | None = None
    head_kind: str | None = None


def shipped_folders(folder: Path = FOLDER) -> list[Path]:
    """One for each target that anything is shipped for."""
    return sorted(path.parent for path in folder.glob("*/provenance.json"))


def contents(folder: Path) -> Shipped:
    """Everything that lies in one target's folder."""
    statistics, draft = folder / STATISTICS, folder / DRAFT_MODEL
    kind = next((kind for kind in HEADS if (folder / kind / "config.json").is_file()), None)
    return Shipped(
        folder.name,
        str(statistics) if statistics.is_file() else None,
        str(draft) if draft.is_file() else None,
        str(folder / kind) if kind else None,
        kind,
    )


def identity_of(folder: Path) -> TargetIdentity:
    """The target that a folder's files were made for."""
    return TargetIdentity(**json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["target"])


def find(target: Target, folder: Path = FOLDER) -> Shipped:
    """What is shipped for ``target``.  A model of the same vocabulary but other sizes gets no head."""
    for one in shipped_folders(folder):
        made_for = identity_of(one)
        if made_for.vocab_size != target.vocab_size or not made_for.fits(target.identity()):
            continue
        found = contents(one)
        if found.head is not None and not _head_fits(Path(found.head), target):
            return Shipped(found.name, found.suffix_base, found.draft_model)
        return found
    return Shipped()


def _head_fits(head: Path, target: Target) -> bool:
    from foredraft.drafters.eagle_config import read_config
    from foredraft.loader.folder import read_json

    config = read_config(read_json(head / "config.json"), str(head))
    return config.target_hidden_size == target.hidden_size and all(layer <= target.num_layers for layer in config.layer_ids)
