"""A MODEL string to everything that is needed to run it.

Owns: what a loaded checkpoint is.  Does not know: how its weights are computed with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from foredraft.architecture import Architecture, Weights
from foredraft.loader.aliases import ALIASES, Alias, KnownModel, cache_dir, known_models
from foredraft.loader.assemble import most_common_format, release_pages
from foredraft.loader.detokenizer import Detokenizer
from foredraft.loader.download import Progress
from foredraft.loader.resolve import resolve_model
from foredraft.loader.tokenizer import Tokenizer, turn_end_ids

__all__ = [
    "ALIASES",
    "Alias",
    "Checkpoint",
    "Detokenizer",
    "KnownModel",
    "Progress",
    "Tokenizer",
    "cache_dir",
    "known_models",
    "load_checkpoint",
]


@dataclass(frozen=True)
class Checkpoint:
    """A model on this machine.

    ``name`` is what the user typed, ``path`` the folder or ``.gguf`` file.  ``weights`` have canonical names and are read when
    asked for.  ``eos_ids`` end an output.  ``quantization`` is the format that holds most bytes of the matrices;
    ``weight_bytes`` is the size of the weight files.  ``release()`` gives back the memory of what was read from a mapped file;
    reading on brings it back.
    """

    name: str
    path: Path
    architecture: Architecture
    weights: Weights
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    quantization: str
    weight_bytes: int
    release: Callable[[], None] = lambda: None


def load_checkpoint(model: str, *, progress: Progress | None = None) -> Checkpoint:
    """Open a folder, a ``.gguf`` file, a hub id or an alias; fetches the latter two when they are not cached.

    Raises:
        ModelNotFoundError: there is no such model, or it cannot be fetched.
        ModelFileError: a file is truncated, corrupt or missing.
        UnsupportedModelError: an architecture, option, format or tokenizer that is not supported.
        CapacityError: no room for the download.
    """
    path = resolve_model(model, progress=progress)
    return _load_gguf(model, path) if path.is_file() else _load_folder(model, path)


def _load_gguf(name: str, path: Path) -> Checkpoint:
    from foredraft.loader.gguf_file import open_gguf
    from foredraft.loader.gguf_model import gguf_architecture, gguf_weights
    from foredraft.loader.gguf_tokenizer import gguf_eos_ids, gguf_tokenizer

    file = open_gguf(path)
    architecture = gguf_architecture(file)
    weights = gguf_weights(file, architecture)
    tokenizer = gguf_tokenizer(file)
    matrices = [(info.format, info.num_bytes) for info in file.tensors.values() if len(info.shape) > 1]
    eos_ids = frozenset(gguf_eos_ids(file) | turn_end_ids(tokenizer))
    # Not a method of the file: that would keep its metadata, which holds a second copy of the vocabulary.
    release = partial(release_pages, file.data)
    return Checkpoint(name, path, architecture, weights, tokenizer, eos_ids, most_common_format(matrices), len(file.data), release)


def _load_folder(name: str, path: Path) -> Checkpoint:
    from foredraft.loader.folder import folder_eos_ids, folder_tokenizer, folder_weights, open_tensors, read_json
    from foredraft.loader.folder_config import folder_architecture

    config = read_json(path / "config.json")
    architecture = folder_architecture(config, str(path / "config.json"))
    files = open_tensors(path)
    weights = folder_weights(path, files, architecture)
    tokenizer = folder_tokenizer(path)
    matrices = [(files.formats[key], shape[0] * shape[1]) for key, shape in files.shapes.items() if len(shape) == 2]
    own = {tokenizer.eos_id} if tokenizer.eos_id is not None else set()
    eos_ids = frozenset(folder_eos_ids(path, config) | own | turn_end_ids(tokenizer))
    release = partial(release_pages, *files.files)
    return Checkpoint(name, path, architecture, weights, tokenizer, eos_ids, most_common_format(matrices), files.num_bytes, release)
