"""What the engine did of late, for the live page and for metrics.

Owns: sums over short stretches of time, and the reason why speculation is on or off.  Does not know: who reads it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from foredraft.drafters import registry
from foredraft.llm import LLM

SLICE_SECONDS, NUM_SLICES, LATE_SLICES = 0.5, 120, 4


@dataclass
class _Slice:
    """Sums over one stretch of time that began at ``start``, in seconds since the epoch."""

    start: float
    steps: int = 0
    emitted: int = 0
    passes: int = 0
    drafted: int = 0
    pass_ms: float = 0.0
    draft_ms: float = 0.0
    drafters: Counter[str] = field(default_factory=Counter)


class Monitor:
    """Follows the steps of one LLM.  ``clock``: seconds since the epoch.  All methods are called in the engine's thread."""

    def __init__(self, llm: LLM, model: str, clock: Callable[[], float]) -> None:
        self._model = model
        self._clock = clock
        self._slices: deque[_Slice] = deque(maxlen=NUM_SLICES)
        self._methods = list(llm.methods)
        self._counted: dict[str, int] = {}
        self._is_adaptive = llm.speculative_config.adaptive
        self._is_off = not registry.members(llm.speculative_config, {}) or not llm.speculative_config.num_speculative_tokens

    def on_step(self, llm: LLM) -> None:
        """Count the step that has just ended."""
        step = llm.engine.metrics.last_step
        if step is None:
            return
        now = self._clock()
        if not self._slices or now - self._slices[-1].start >= SLICE_SECONDS:
            self._slices.append(_Slice(now))
        part = self._slices[-1]
        part.steps += 1
        part.emitted += step.num_emitted
        part.drafted += step.num_drafted
        part.pass_ms += step.milliseconds["pass"]
        part.draft_ms += step.milliseconds["draft"]
        for name, stats in llm.engine.metrics.per_drafter.items():
            before = self._counted.get(name, 0)
            if stats.target_passes != before:
                part.passes += stats.target_passes - before
                part.drafters[name] += stats.target_passes - before
                self._counted[name] = stats.target_passes

    def state(self, llm: LLM) -> dict[str, Any]:
        """The present state, as plain data; see docs/serving.md for its fields."""
        now = self._clock()
        late = [part for part in self._slices if now - part.start <= LATE_SLICES * SLICE_SECONDS]
        steps, passes = sum(part.steps for part in late), sum(part.passes for part in late)
        known = llm.controller.snapshot()
        rate = sum(part.emitted for part in late) / (LATE_SLICES * SLICE_SECONDS)
        drafters = sum((part.drafters for part in late), Counter[str]())
        del drafters["none"]
        is_drafting = any(part.drafted for part in late)
        reason = self._reason(steps > 0, is_drafting)
        total = llm.engine.metrics.total
        config = llm.speculative_config
        return {
            "model": self._model,
            "now": now,
            "exactness": llm.target.exactness,
            "methods": self._methods,
            "default": {
                "method": config.method,
                "num_speculative_tokens": config.num_speculative_tokens,
                "adaptive": config.adaptive,
            },
            "running": llm.engine.num_running,
            "waiting": llm.engine.num_waiting,
            "kv_usage": 1.0 - llm.kv.num_available / llm.kv.num_blocks,
            "tokens_per_second": rate,
            "plain_tokens_per_second": rate / known["speedup_estimate"],
            "speedup_estimate": known["speedup_estimate"],
            "k": sum(part.drafted for part in late) / passes if passes else 0.0,
            "drafter": drafters.most_common(1)[0][0] if drafters else "none",
            "state": "on" if is_drafting else "off",
            "reason": reason,
            "acceptance_per_position": [
                accepted / drafted
                for accepted, drafted in zip(total.accepted_per_position, total.drafted_per_position, strict=False)
            ],
            "pass_ms": sum(part.pass_ms for part in late) / steps if steps else 0.0,
            "draft_ms": sum(part.draft_ms for part in late) / steps if steps else 0.0,
            "history": [self._point(part) for part in self._slices if now - part.start <= SLICE_SECONDS * NUM_SLICES],
        }

    def _reason(self, is_busy: bool, is_drafting: bool) -> str:
        """One sentence on why drafts are verified now, or not."""
        if is_drafting:
            return "Drafts pay for their time." if self._is_adaptive else "Every draft is verified; this server is not adaptive."
        if not is_busy:
            return "No request is running."
        if self._is_off:
            return "Speculation is off for this server; a request may turn it on."
        return "No draft is expected to pay for its time." if self._is_adaptive else "The drafter finds nothing to draft."

    @staticmethod
    def _point(part: _Slice) -> dict[str, Any]:
        drafters = Counter({name: num for name, num in part.drafters.items() if name != "none"})
        return {
            "t": part.start,
            "k": part.drafted / part.passes if part.passes else 0.0,
            "drafter": drafters.most_common(1)[0][0] if drafters else "none",
            "tokens_per_second": part.emitted / SLICE_SECONDS,
        }
