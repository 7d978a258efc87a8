"""Checked reading of a checkpoint's settings, whatever file they come from.

Owns: that a setting has the right type and a sane range before it is used.  Does not know: which settings a family has.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foredraft.types import ModelFileError

LARGEST_SIZE = 2**31


@dataclass(frozen=True)
class Fields:
    """Settings named ``prefix + key``; ``source`` is the file, for messages.  A null value counts as absent."""

    source: str
    values: Mapping[str, Any]
    prefix: str = ""

    def get(self, key: str) -> Any:
        """The raw value, or None."""
        return self.values.get(self.prefix + key)

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least ``least``.

        Raises:
            ModelFileError: absent without a default, or not such a number.
        """
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST_SIZE:
            raise ModelFileError(
                f"{self.source}: {self.prefix}{key} must be a whole number of at least {least}, not {_short(value)}."
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0.

        Raises:
            ModelFileError: absent without a default, or not such a number.
        """
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
            raise ModelFileError(f"{self.source}: {self.prefix}{key} must be a finite number above 0, not {_short(value)}.")
        return float(value)

    def _present(self, key: str, default: float | None) -> Any:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelFileError(f"{self.source} has no {self.prefix}{key}; the file is incomplete, fetch it again.")
        return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
