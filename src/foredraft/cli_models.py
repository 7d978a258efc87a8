"""``foredraft models``: the models at hand, and the drafters that fit each.

Owns: the command, its tables, and where drafters are looked for.  Does not know: how a model or drafter is loaded; of every folder
only settings and the header of the weights are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

DRAFTERS_FOLDER = "drafters"


@dataclass(frozen=True)
class Found:
    """A drafter that was found: for whom, its method, where, and what its folder says of itself."""

    target: str
    method: str
    where: str
    about: str


def models(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="[PATH]...", help="Folders of heads or models, or folders that hold some.")
    ] = None,
) -> None:
    """List the models at hand, and which drafters fit them."""
    from foredraft.drafters import registry
    from foredraft.loader import cache_dir, known_models
    from foredraft.terminal import format_table
    from foredraft.types import ModelNotFoundError

    for path in paths or []:
        if not path.is_dir():
            raise ModelNotFoundError(f"there is no folder {path}; give folders of heads or models, or folders that hold some.")
    rows = [["MODEL", "CACHED", "SIZE", "LICENCE", "ABOUT"]]
    for known in known_models():
        cached = "yes" if known.cached else "no"
        rows.append([known.alias, cached, f"{known.size / 1e6:.0f} MB", known.licence, known.description])
    rows += [[name, "yes", f"{size / 1e6:.0f} MB", "see its page", "from the Hugging Face hub"] for name, size in hub_models()]
    print(format_table(rows))
    found = [*shipped_drafters(), *drafters_in([cache_dir() / DRAFTERS_FOLDER, *(paths or [])])]
    table = [["FOR", "METHOD", "WHERE", "ABOUT"], ["any model", ", ".join(registry.MODEL_FREE), "built in", "no model needed"]]
    print(f"\n{format_table([*table, *([one.target, one.method, one.where, one.about] for one in found)])}")
    print(f"\ncache: {cache_dir()}\ndrafters: {', '.join(registry.available())}")


def hub_models() -> list[tuple[str, int]]:
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


def shipped_drafters() -> Iterator[Found]:
    """What comes with foredraft, by the model that it was made for."""
    from foredraft.drafters.shipped import contents, identity_of, shipped_folders

    for folder in shipped_folders():
        found, target = contents(folder), identity_of(folder).model
        named = (("suffix", found.suffix_base), (found.head_kind, found.head), ("draft_model", found.draft_model))
        for method, path in named:
            if method and path:
                yield Found(target, method, "comes with foredraft", f"{size_of(Path(path)) / 1e6:.1f} MB")


def drafters_in(places: list[Path]) -> Iterator[Found]:
    """Heads and draft models in these folders and one below; what cannot be read says so."""
    for place in places:
        folders = [place] if (place / "config.json").is_file() else sorted(p.parent for p in place.glob("*/config.json"))
        for folder in folders:
            try:
                yield describe(folder)
            except ValueError as error:
                yield Found("?", "?", str(folder), str(error))


def describe(folder: Path) -> Found:
    """A head or a draft model, by its settings.

    Raises:
        ForedraftError: they cannot be read, or are of nothing that is known.
    """
    from foredraft.drafters.eagle_config import read_config
    from foredraft.drafters.eagle_file import head_kind
    from foredraft.loader.folder import read_json

    values, kind = read_json(folder / "config.json"), head_kind(folder)
    size = f"{size_of(folder) / 1e6:.1f} MB"
    made_for = _target(folder, values)
    if kind is None:
        vocabulary = values.get("vocab_size", "?")
        return Found(made_for or f"models of its {vocabulary} tokens", "draft_model", str(folder), size)
    config = read_config(values, str(folder / "config.json"), kind=kind)
    shape = f"hidden size {config.target_hidden_size}, {config.vocab_size} tokens"
    return Found(made_for or shape, kind, str(folder), f"{size}, draft vocabulary {config.draft_vocab_size}")


def _target(folder: Path, values: dict[str, Any]) -> str | None:
    """The model that provenance or config names."""
    from foredraft.loader.folder import read_json

    target = read_json(folder / "provenance.json", required=False).get("target")
    if isinstance(target, dict) and isinstance(target.get("model"), str):
        return str(target["model"])
    try:
        name = values["speculators_config"]["verifier"]["name_or_path"]
    except (KeyError, TypeError):
        return None
    return name if isinstance(name, str) else None


def size_of(path: Path) -> int:
    """Bytes of a file, or of the files in a folder."""
    files = [path] if path.is_file() else [one for one in path.iterdir() if one.is_file()]
    return sum(one.stat().st_size for one in files)
