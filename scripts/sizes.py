"""Print the files and functions that have grown beyond a comfortable size; fail on those beyond the limit.

Usage: ``python scripts/sizes.py [FOLDER]``, by default the package's sources.  Exit status 1 when a hard limit is broken.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

SOFT_LIMITS = {"file": 400, "function": 60}
HARD_LIMITS = {"file": 500, "function": 80}
SUFFIXES = (".py", ".cpp", ".h")


@dataclass(frozen=True)
class Size:
    """Lines of one file or function."""

    kind: str
    name: str
    num_lines: int


def measure(path: Path, label: str) -> list[Size]:
    """Size of a file and, where it is Python, of each function in it (``def`` to last line, docstring included)."""
    text = path.read_text(encoding="utf-8")
    sizes = [Size("file", label, len(text.splitlines()))]
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text, filename=str(path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None, node.name
                sizes.append(Size("function", f"{label}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1))
    return sizes


def main(arguments: list[str]) -> int:
    """Report on the folder named in ``arguments``; return the exit status."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parents[1] / "src" / "foredraft"
    paths = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES)
    sizes = [size for path in paths for size in measure(path, str(path.relative_to(root)))]
    num_lines = sum(size.num_lines for size in sizes if size.kind == "file")
    print(f"sizes: {len(paths)} files, {num_lines} lines")
    status = 0
    for size in sorted(sizes, key=lambda size: -size.num_lines):
        if size.num_lines > HARD_LIMITS[size.kind]:
            status = 1
            print(f"  too long: {size.num_lines} lines, the limit for a {size.kind} is {HARD_LIMITS[size.kind]}: {size.name}")
        elif size.num_lines > SOFT_LIMITS[size.kind]:
            print(f"  long: {size.num_lines} lines, a {size.kind} should stay under {SOFT_LIMITS[size.kind]}: {size.name}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
