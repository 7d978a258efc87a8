"""What passes of a target take on this machine, measured once and kept.

Owns: the file of earlier measurements, and when one still holds.  Does not know: how the measurement is fitted or used.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.cost import PassTimes, calibrate
from foredraft.kv_cache import KVCache
from foredraft.types import Clock, Rows, Target

# A measurement that took less is not worth a file.
MIN_SECONDS_TO_KEEP = 0.2
# Beyond this the machine is not what it was; within, all passes are taken to have changed alike.
MAX_CHANGE = 2.0
MOST_ROWS = 65
NUM_CHECKS = 7
# No sequence of a request has a negative id.
_OWN_SEQ_ID = -1


@dataclass(frozen=True)
class Identity:
    """All that a measurement depends on; two that are equal share one.  ``folder`` None keeps nothing."""

    folder: Path | None
    parts: tuple[str, ...]

    @property
    def path(self) -> Path | None:
        """Where the measurement is kept."""
        name = hashlib.sha256("\n".join(self.parts).encode()).hexdigest()[:32]
        return None if self.folder is None else self.folder / f"{name}.json"


def pass_times(
    target: Target, kv: KVCache, identity: Identity, *, max_rows: int, budget: float = 1.5, clock: Clock = time.perf_counter
) -> PassTimes:
    """Times of passes of ``target``: from an earlier measurement if a few passes agree with it, else of about ``budget`` seconds.

    Takes blocks of ``kv`` for the duration, and computes on whatever they hold.  Where sequences hold some, the longest contexts
    may not be measured, and nothing is kept.
    """
    room = min(target.max_model_len, kv.num_available * kv.block_size)
    is_whole = room == min(target.max_model_len, kv.num_blocks * kv.block_size)
    kv.open(_OWN_SEQ_ID, [], "", reuse=False)
    try:
        reserved = kv.reserve(_OWN_SEQ_ID, room)
        assert reserved, (room, kv.num_available, kv.block_size)
        blocks = kv.block_table(_OWN_SEQ_ID)

        def run_pass(num_rows: int, context: int) -> None:
            # A GPU is done only when a value has come back.
            target.forward([Rows([0] * num_rows, context, num_rows, blocks)]).logits[0][-1, -1].item()

        most = min(MOST_ROWS, max_rows, room)
        kept = _read(identity.path)
        if kept is not None and kept.rows[-1] <= most:
            checked = _checked(kept, run_pass, clock)
            if checked is not None:
                return checked
        start = clock()
        times = calibrate(run_pass, max_rows=most, max_context=room, budget=budget, clock=clock)
        if is_whole and clock() - start >= MIN_SECONDS_TO_KEEP:
            _write(identity.path, times)
        return times
    finally:
        kv.close(_OWN_SEQ_ID)


def _checked(times: PassTimes, run_pass: Any, clock: Clock) -> PassTimes | None:
    """``times``, all scaled to the present speed of a pass of one row; None if that has changed too much."""
    seconds = []
    for _ in range(NUM_CHECKS):
        start = clock()
        run_pass(1, 0)
        seconds.append(clock() - start)
    change = statistics.median(seconds) / times.base[0]
    if not 1.0 / MAX_CHANGE <= change <= MAX_CHANGE:
        return None
    base = tuple(change * value for value in times.base)
    return PassTimes(times.rows, base, change * times.per_read, change * times.per_score)


def _read(path: Path | None) -> PassTimes | None:
    """An earlier measurement; None when there is none, or what is there is none."""
    if path is None:
        return None
    try:
        return PassTimes.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        return None


def _write(path: Path | None, times: PassTimes) -> None:
    """Keep a measurement; where nothing can be written it is made again next time."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(times.to_dict()), encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        return
