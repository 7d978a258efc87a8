"""The exceptions, and how an unknown name is refused.

Owns: the tree below, and how a wrong value is shown.  Does not know: what raises them.

::

    ForedraftError(ValueError)      a user can mend it; the message says rule, value and next step
    ├── ConfigError                 an option of the engine or of speculation
    ├── RequestError                a prompt or a SamplingParams
    ├── ModelError                  a model that cannot be loaded
    │   ├── ModelNotFoundError      no such folder, file, hub id or alias
    │   ├── ModelFileError          truncated, corrupt, or the wrong checksum
    │   └── UnsupportedModelError   architecture, quantisation or vocabulary not supported
    └── CapacityError               not enough memory or disk
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ForedraftError(ValueError):
    """Base of every error that a user can mend."""


class ConfigError(ForedraftError):
    """An engine or speculation option is wrong."""


class RequestError(ForedraftError):
    """A prompt or its sampling parameters are wrong."""


class ModelError(ForedraftError):
    """A model cannot be loaded."""


class ModelNotFoundError(ModelError):
    """There is no such model."""


class ModelFileError(ModelError):
    """A model's file is broken."""


class UnsupportedModelError(ModelError):
    """A model's architecture, quantisation or vocabulary is not supported."""


class CapacityError(ForedraftError):
    """Memory or disk does not suffice."""


def refuse_unknown(kind: str, name: str, known: Iterable[str], error: type[ForedraftError] = ConfigError) -> None:
    """Raise ``error`` when ``name`` is not among ``known``, naming the nearest valid name."""
    names = sorted(known)
    if name in names:
        return
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of: {', '.join(names)}."
    raise error(f"unknown {kind} {name!r}; {hint}")


def shown(value: object, most: int = 80) -> str:
    """A wrong value for a message: at most ``most`` characters, or the type of what is too large or too deep to be written."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"{type(value).__name__} beyond all measure"
    return text if len(text) <= most else f"{text[:most]}..."
