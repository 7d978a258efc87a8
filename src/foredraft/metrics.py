"""Counters of an engine's life.

Owns: sums over steps and requests, in all and per drafter.  Does not know: how a number came about; the engine reports plain data.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from foredraft.types import PHASES, Clock, SpeculationStats, StepStats


class Stopwatch:
    """Wall time by phase: each ``lap`` books the time since the one before."""

    def __init__(self, clock: Clock) -> None:
        self.milliseconds = dict.fromkeys(PHASES, 0.0)
        self._clock = clock
        self._last = clock()

    def lap(self, phase: str) -> None:
        """End a phase."""
        now = self._clock()
        self.milliseconds[phase] += (now - self._last) * 1e3
        self._last = now


class EngineMetrics:
    """What an engine did since it started.  ``milliseconds`` are summed once per step, not per request."""

    def __init__(self) -> None:
        self.total = SpeculationStats()
        self.per_drafter: dict[str, SpeculationStats] = {}
        self.num_steps = 0
        self.num_rows = 0
        self.num_preemptions = 0
        self.finished: Counter[str] = Counter()
        self.last_step: StepStats | None = None

    def count_pass(self, drafter: str, num_drafted: int, num_accepted: int, num_emitted: int) -> None:
        """One verified sequence of a step, after trimming."""
        for stats in (self.total, self.per_drafter.setdefault(drafter, SpeculationStats())):
            stats.count(num_drafted, num_accepted, num_emitted)

    def count_step(self, step: StepStats) -> None:
        """One whole step."""
        self.num_steps += 1
        self.num_rows += step.num_rows
        self.last_step = step
        for phase, milliseconds in step.milliseconds.items():
            self.total.milliseconds[phase] += milliseconds

    def snapshot(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            **self.total.to_dict(),
            "steps": self.num_steps,
            "rows": self.num_rows,
            "preemptions": self.num_preemptions,
            "finished": dict(self.finished),
            "per_drafter": {name: stats.to_dict() for name, stats in self.per_drafter.items()},
        }
