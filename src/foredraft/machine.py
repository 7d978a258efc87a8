"""The machine that this runs on: its parts by name, and how fast it reads memory.

Owns: what is measured and read about a machine.  Does not know: what runs on it.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from foredraft import _native
from foredraft.types import Clock

MIN_BUFFER_BYTES, MAX_BUFFER_BYTES = 2**28, 2**30


def describe_machine() -> dict[str, Any]:
    """CPU model, its kernels' instructions, cores that this process may use, memory, GPU, versions, torch's threads, day, ``load``.

    ``load`` is the number of programs that wanted a core over the last minute; other work on the machine spoils timings.
    ``planning`` says whether the modules that decide in every step are ``compiled``, as in a wheel, or run as ``source``.
    """
    import torch

    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "instructions": _native.instruction_sets()[0],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "planning": "source" if _planning_file().endswith(".py") else "compiled",
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d"),
        "load": os.getloadavg()[0],
    }


def measure_read_bandwidth(
    device: str,
    *,
    num_bytes: int | None = None,
    threads: int | None = None,
    repeats: int = 25,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Bytes per second at which torch sums a float32 buffer of ``num_bytes`` bytes again and again, on ``threads`` CPU threads.

    ``device`` is ``cpu`` or ``cuda``.

    Passes read the same weights again and again too, so a buffer as large as they are gives what a pass can at most reach: caches
    keep a part of it, more of a small one.  None takes a buffer that no cache holds a notable part of.  ``threads`` None takes as
    many as torch is set to.  ``best`` is nearest to what the machine can do, ``median`` to what it did under its present load.
    """
    import torch

    # Numpy asks for huge pages, as the native ops' weights have them; with small ones the CPU spends time on finding addresses.
    values = torch.from_numpy(np.ones((num_bytes or _buffer_bytes()) // 4, np.float32))
    buffer = values if device == "cpu" else values.to(device)
    # A GPU reads the buffer in a fraction of a millisecond, beside which one launch would be seen.
    num_passes = 8 if device == "cuda" else 1
    speeds = []
    num_before = torch.get_num_threads()
    torch.set_num_threads(threads or num_before)
    try:
        for _ in range(repeats + 1):
            start = clock()
            sums = [buffer.sum() for _ in range(num_passes)]
            sums[-1].item()
            speeds.append(num_passes * buffer.nbytes / (clock() - start))
    finally:
        torch.set_num_threads(num_before)
    timed = speeds[1:]  # the first one also wakes threads and the device
    return {"best": max(timed), "median": statistics.median(timed), "buffer_bytes": buffer.nbytes, "repeats": repeats}


def _planning_file() -> str:
    """Where the modules that decide in every step come from; see csrc/compile_planning.py."""
    found = find_spec("foredraft.planner")
    assert found is not None and found.origin is not None, found
    return found.origin


def _buffer_bytes() -> int:
    """Four times the last-level cache as Linux reports it, from 256 MiB to 1 GiB."""
    try:
        size = int(Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        size = 0
    return min(max(4 * size, MIN_BUFFER_BYTES), MAX_BUFFER_BYTES)
