"""The Python modules that decide in every step, translated to C by mypyc for wheels.

Owns: which modules those are, and how they are translated.  Does not know: what they do, or how C is built.

    python csrc/compile_planning.py FOLDER

writes C to FOLDER and prints, line by line, ``module;source`` of the extension modules to build from it, with FOLDER and mypyc's
``lib-rt`` to include.  Built, they lie beside the sources that they come from and are imported in their place: a step decides the
same, in less than half of the time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import mypyc
from mypyc.build import mypycify

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "foredraft"
# The lowest first.  What a program outside could want to replace, as a drafter or a rule, is not among them.
MODULES = ("planner", "acceptance", "cost", "records", "ledger", "step_plan", "controller")
# What they import is read for its types alone, and need not be installed.
CONFIG = "[mypy]\nfollow_imports = silent\nignore_missing_imports = True\n"
SKIPPED = ("numpy", "torch", "transformers")


def translate(folder: Path) -> list[tuple[str, Path]]:
    """Write the C; (dotted module, source) of each extension module."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "mypy.ini"
    config.write_text(CONFIG + "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in SKIPPED))
    os.chdir(PACKAGE.parent)
    paths = [f"{PACKAGE.name}/{name}.py" for name in MODULES]
    options = ["--config-file", str(config), "--cache-dir", str(folder / "cache")]
    extensions = mypycify([*options, *paths], target_dir=str(folder), group_name=f"{PACKAGE.name}.planning")
    return [(extension.name, folder / extension.sources[0]) for extension in extensions]


if __name__ == "__main__":
    built = translate(Path(sys.argv[1]).resolve())
    print("include", Path(mypyc.__file__).parent / "lib-rt", sep=";")
    for module, source in built:
        print(module, source, sep=";")
