"""The planning modules as mypyc compiles them for wheels, against the Python that they come from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from controller_world import Source, World
from foredraft import _native
from foredraft.controller import Controller
from foredraft.cost import PassTimes

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "foredraft"
TIMES = PassTimes((1, 2, 5, 9, 17, 33, 65), (1.9e-3, 2.0e-3, 2.2e-3, 2.6e-3, 3.6e-3, 5.6e-3, 9.5e-3), 2e-7, 1e-7)


def decisions(num_seqs: int, num_steps: int = 600) -> list[Any]:
    """What a controller decides, step by step, in a world of three drafters, and how fast it makes the world."""
    found: list[Any] = []
    sources = {
        "cheap": Source(lambda length, seq_id: 0.8 if length // 50 % 2 else 0.1, presence=0.6),
        "knowing": Source(lambda length, seq_id: 0.9 if (length * 2654435761 >> 8) % 2 else 0.1, confident=True),
        "dear": Source(lambda length, seq_id: 0.6, seconds=lambda num_seqs, depth: 3e-4 * depth),
    }
    world = World(TIMES, sources, num_seqs=num_seqs, noise=0.1, outliers=0.01, seed=num_seqs)
    controller = Controller(TIMES, lambda decision: found.append(json.loads(json.dumps(decision))))
    speed = world.play(controller, num_steps)
    return [*found, speed, json.loads(json.dumps(controller.snapshot()))]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as a wheel has it: sources, and compiled modules beside them."""
    folder = tmp_path_factory.mktemp("compiled")
    script = [sys.executable, "-W", "ignore", str(ROOT / "csrc" / "compile_planning.py"), str(folder / "c")]
    printed = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    lines = [line.split(";") for line in printed.splitlines() if line.startswith(("include;", "foredraft."))]
    (_, runtime), *modules = lines
    assert len(modules) == 8, printed
    package = folder / "foredraft"
    package.mkdir()
    # An editable install has its extension elsewhere.
    for path in {path.name: path for path in (*PACKAGE.iterdir(), Path(_native.__file__))}.values():
        (package / path.name).symlink_to(path)
    include = [f"-I{path}" for path in (folder / "c", runtime, sysconfig.get_path("include"))]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")

    def build(module: str, source: str) -> None:
        target = package / f"{module.removeprefix('foredraft.')}{suffix}"
        options = ["-shared", "-fPIC", "-fwrapv", "-ffp-contract=off", "-O0", "-w"]
        subprocess.run(["gcc", *options, *include, source, "-o", str(target)], check=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda pair: build(*pair), modules))
    return folder


@pytest.mark.parametrize("num_seqs", [1, 5])
def test_an_installed_package_decides_otherwise_than_its_source(compiled: Path, num_seqs: int) -> None:
    program = "; ".join(
        (
            # An editable install finds its sources before any folder.
            "import json, sys; sys.meta_path[:] = [one for one in sys.meta_path if 'Redirect' not in type(one).__name__]",
            "import foredraft.step_plan, foredraft.machine, test_compiled_planning as t",
            "assert not foredraft.step_plan.__file__.endswith('.py'), foredraft.step_plan.__file__",
            "assert foredraft.machine.describe_machine()['planning'] == 'compiled'",
            f"print(json.dumps(t.decisions({num_seqs})))",
        )
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(compiled), str(ROOT / "tests")))}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, cwd=compiled)
    assert run.returncode == 0, run.stderr
    expected = decisions(num_seqs)
    assert len(expected) > 300
    assert json.loads(run.stdout) == expected
