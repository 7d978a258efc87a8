"""The finished parts of a measurement, in a file that grows as it goes, so that an interrupted one goes on where it was.

Owns: the file, and when its parts still hold.  Does not know: what is measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.array_file import write_whole
from foredraft.types import CapacityError


class Journal:
    """Parts by name, each a line of JSON behind a first line that says what they are parts of.

    Args:
        path: of the file; None keeps nothing.
        key: all that the parts depend on; a file with another key is written over.

    Raises:
        CapacityError: the file cannot be written.
    """

    def __init__(self, path: Path | None, key: Mapping[str, Any]) -> None:
        self.path = path
        self._parts: dict[str, Any] = {}
        # What JSON makes of the key is what will be read back.
        head = json.loads(json.dumps(key))
        if path is None:
            return
        lines = self._lines(path)
        if lines and lines[0] == {"key": head}:
            self._parts = {line["part"]: line["data"] for line in lines[1:]}
        # Written anew: a line that an interruption cut off is gone, and with it what would be appended to it.
        text = [json.dumps({"key": head}), *(_line(name, data) for name, data in self._parts.items())]
        write_whole(path, "".join(f"{line}\n" for line in text).encode())

    @staticmethod
    def _lines(path: Path) -> list[Any]:
        """The whole lines of the file."""
        found: list[Any] = []
        try:
            for line in path.read_text(encoding="utf-8").splitlines():
                found.append(json.loads(line))
        except (OSError, ValueError):
            pass
        return found

    def __len__(self) -> int:
        """How many parts are finished."""
        return len(self._parts)

    def get(self, name: str) -> Any:
        """A finished part, or None."""
        return self._parts.get(name)

    def add(self, name: str, data: Any) -> None:
        """Keep a part; when this returns it is in the file.

        Raises:
            CapacityError: it cannot be written; the parts before it are still there.
        """
        self._parts[name] = data
        if self.path is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(name, data) + "\n")
        except OSError as error:
            raise CapacityError(
                f"{self.path} cannot be written ({error.strerror or error}); free some space and run the same command again, it "
                "goes on from there."
            ) from error


def _line(name: str, data: Any) -> str:
    return json.dumps({"part": name, "data": data}, separators=(",", ":"))
