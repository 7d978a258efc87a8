"""From what the user typed to a folder or file on this machine.

Owns: the order in which a MODEL string is understood, and the Hugging Face hub.  Does not know: what is in the files.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Callable
from pathlib import Path

from foredraft.loader.aliases import ALIASES
from foredraft.loader.download import Fetch, Progress, ensure_cached
from foredraft.types import CapacityError, ModelFileError, ModelNotFoundError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Settings, safetensors and tokenizer files of the top folder; never pickles, code, or a second copy of the weights.
HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
HUB_IGNORED = ("*/*", "consolidated*.safetensors")
SETTINGS_PATTERNS = tuple(pattern for pattern in HUB_PATTERNS if pattern != "*.safetensors")

Snapshot = Callable[[str], str]


def resolve_model(
    model: str,
    *,
    progress: Progress | None = None,
    fetch: Fetch | None = None,
    snapshot: Snapshot | None = None,
    settings_only: bool = False,
) -> Path:
    """A folder with ``config.json`` or a ``.gguf`` file for a path, an alias or a hub id, in that order.

    A folder that holds one ``.gguf`` file and no ``config.json`` stands for that file.

    ``settings_only`` fetches no weights from the hub.

    Raises:
        ModelNotFoundError: none of these, or it cannot be fetched.
        ModelFileError: the path exists and is no model.
        CapacityError: no room for the download.
    """
    if not model.strip() or "\0" in model:
        raise ModelNotFoundError(f"MODEL is {model!r}; give a folder, a .gguf file, a hub id or one of: {', '.join(ALIASES)}.")
    try:
        path = Path(model).expanduser()
        if path.is_file() or (path.is_dir() and ((path / "config.json").is_file() or model not in ALIASES)):
            return _check_path(path)
    except (OSError, RuntimeError) as error:  # a name too long, a folder without permission, an unknown ~user
        raise ModelNotFoundError(f"MODEL {model[:80]!r} cannot be opened ({error}); check the path and its permissions.") from error
    if model in ALIASES:
        return ensure_cached(ALIASES[model], progress=progress, fetch=fetch)
    if _HUB_ID.fullmatch(model) and not model.endswith(".gguf"):
        return Path(snapshot(model) if snapshot is not None else _hub_snapshot(model, settings_only))
    near = difflib.get_close_matches(model, ALIASES, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"the aliases are: {', '.join(ALIASES)}."
    raise ModelNotFoundError(
        f"there is no model {model!r}: no such folder or .gguf file, and neither an alias nor a hub id; {hint}"
    )


def fingerprint(path: Path) -> tuple[str, ...]:
    """What changes when a model's files do: name, size and time of each that it consists of."""
    files = [path]
    if path.is_dir():
        files = sorted(file for pattern in HUB_PATTERNS for file in path.glob(pattern))
    return tuple(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)


def _check_path(path: Path) -> Path:
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return path
        raise ModelFileError(f"{path} is not a .gguf file; give the folder that holds config.json, or a .gguf file.")
    if (path / "config.json").is_file():
        return path
    inside = sorted(path.glob("*.gguf"))
    if len(inside) == 1:
        return inside[0]
    hint = f"name the file, as in {inside[0]}." if inside else "give a folder with config.json and safetensors weights."
    raise ModelFileError(f"{path} has no config.json; {hint}")


def _hub_snapshot(model: str, settings_only: bool) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = SETTINGS_PATTERNS if settings_only else HUB_PATTERNS
    try:
        return str(snapshot_download(model, allow_patterns=list(patterns), ignore_patterns=list(HUB_IGNORED)))
    except GatedRepoError as error:
        raise ModelNotFoundError(f"{model} is gated: accept its licence on its page and log in with `hf auth login`.") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"the hub has no model {model}, or it is private; check the name or log in with `hf auth login`."
        ) from error
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ModelNotFoundError(
            f"{model} is neither a folder here nor in the hub's cache, "
            "and the hub cannot be reached or is switched off by HF_HUB_OFFLINE; "
            "connect, or give a local folder."
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise CapacityError(
                f"cannot store {model} in the hub's cache ({error.strerror}); free some space or set HF_HOME."
            ) from error
        raise ModelNotFoundError(
            f"{model} could not be fetched from the hub ({error}); try again, or give a local folder."
        ) from error
    except Exception as error:  # the hub's HTTP library has its own errors, which differ between versions
        raise ModelNotFoundError(
            f"{model} could not be fetched from the hub ({error}); try again, or give a local folder."
        ) from error
