"""What every training has in common: a budget, the order of texts, checkpoints, progress and the curve.

Owns: when to stop, the learning rate's course, and what survives a kill.  Does not know: what is trained.

A training depends on its seed, its texts and its budget of texts alone, unless that is in hours.  A checkpoint is written whole or
not at all, so that a killed run goes on from the last one.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from foredraft.types import CapacityError, ConfigError

# Names of torch.cpu.get_capabilities(), x86-64 and Arm.
BFLOAT16_UNITS = ("amx_bf16", "avx512_bf16", "arm_bf16", "bf16")
SECONDS_PER_CHECKPOINT, SECONDS_PER_REPORT = 60.0, 15.0
Report = Callable[[str], None]


@dataclass(frozen=True)
class Budget:
    """``epochs`` passes over the texts, or ``hours`` of training where given.

    The learning rate rises over ``warmup`` steps and falls to nothing over the last ``decay`` of the budget.

    Raises:
        ConfigError: nothing to spend.
    """

    epochs: float = 8.0
    hours: float | None = None
    warmup: int = 50
    decay: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("epochs", self.epochs), ("hours", self.hours)):
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, not {value}; change it.")

    def progress(self, epochs: float, seconds: float) -> float:
        """The share of the budget that is used up, 0 to 1."""
        used = epochs / self.epochs if self.hours is None else seconds / (3600 * self.hours)
        return min(1.0, used)

    def rate(self, progress: float, step: int) -> float:
        """Factor on the learning rate."""
        return min(1.0, (step + 1) / self.warmup, max(0.0, 1.0 - progress) / self.decay)


@dataclass
class Position:
    """How far a training is: steps, texts of the present epoch that are done, and tokens and seconds in all."""

    step: int = 0
    epoch: int = 0
    next_text: int = 0
    tokens: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)

    def outcome(self) -> dict[str, Any]:
        """What provenance says of a training that has ended; ``held_out`` are the last figures on texts held out."""
        return {
            "steps": self.step,
            "tokens_seen": self.tokens,
            "training_seconds": self.seconds,
            "held_out": dict(self.curve[-1]),
        }


class Job(Protocol):
    """What is trained."""

    num_texts: int

    def step(self, texts: list[int], progress: float, rate: float) -> Mapping[str, float]:
        """Learn from these texts; figures of the step, among them ``tokens`` and ``loss``."""
        ...

    def evaluate(self) -> Mapping[str, float]:
        """Figures on texts held out."""
        ...

    def state(self) -> dict[str, Any]:
        """Everything that a step changes, as tensors and plain data."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        ...


def run(
    job: Job,
    budget: Budget,
    *,
    texts_per_step: int,
    seed: int,
    checkpoint: Path,
    settings: Mapping[str, Any],
    report: Report,
    on_evaluate: Callable[[Position], None] = lambda position: None,
    evaluations: int = 20,
) -> Position:
    """Train to the end of the budget, from ``checkpoint`` where it was written under the same ``settings``.

    Raises:
        CapacityError: a checkpoint cannot be written.
    """
    position = _resume(job, checkpoint, settings, report)
    before, started = position.seconds, time.monotonic()
    saved = reported = started
    recent: list[Mapping[str, float]] = []
    evaluated = 0
    if position.curve:
        evaluated = int(budget.progress(position.curve[-1]["epochs"], position.curve[-1]["seconds"]) * evaluations) + 1
    while True:
        position.seconds = before + time.monotonic() - started
        epochs = position.epoch + position.next_text / job.num_texts
        progress = budget.progress(epochs, position.seconds)
        if progress * evaluations >= evaluated or progress >= 1.0:
            figures = dict(job.evaluate())
            point = {"step": position.step, "tokens": position.tokens, "seconds": position.seconds, "epochs": epochs}
            point |= means(recent) | figures
            position.curve.append(point)
            report(line(progress, point))
            evaluated, recent = int(progress * evaluations) + 1, []
            on_evaluate(position)
        if progress >= 1.0 or time.monotonic() - saved >= SECONDS_PER_CHECKPOINT:
            save_checkpoint(checkpoint, {"settings": dict(settings), "position": asdict(position), "state": job.state()})
            saved = time.monotonic()
        if progress >= 1.0:
            return position
        texts = order(seed, position.epoch, job.num_texts)[position.next_text :][:texts_per_step]
        learned = job.step(texts, progress, budget.rate(progress, position.step))
        recent.append(learned)
        position.step += 1
        position.tokens += int(learned["tokens"])
        position.next_text += len(texts)
        if position.next_text >= job.num_texts:
            position.epoch, position.next_text = position.epoch + 1, 0
        if time.monotonic() - reported >= SECONDS_PER_REPORT:
            reported = time.monotonic()
            seconds = before + reported - started
            report(line(progress, {"tokens": position.tokens, "seconds": seconds} | means(recent[-50:])))


def order(seed: int, epoch: int, num_texts: int) -> list[int]:
    """The texts in the order of an epoch."""
    shuffled: list[int] = np.random.default_rng([seed, epoch]).permutation(num_texts).tolist()
    return shuffled


def means(figures: list[Mapping[str, float]]) -> dict[str, float]:
    """Means over steps, and tokens per second."""
    if not figures:
        return {}
    mean = {name: sum(one[name] for one in figures) / len(figures) for name in figures[0] if name not in ("tokens", "seconds")}
    seconds = sum(one["seconds"] for one in figures)
    return mean | {"tokens_per_second": sum(one["tokens"] for one in figures) / max(seconds, 1e-9)}


def line(progress: float, figures: Mapping[str, float]) -> str:
    """A line of progress."""
    shown = [f"{progress:4.0%}"]
    for name, value in figures.items():
        if name in ("step", "epochs"):
            continue
        shown.append(f"{name.replace('_', ' ')} {value:,.0f}" if value >= 100 else f"{name.replace('_', ' ')} {value:.3g}")
    return ", ".join(shown)


def product_dtype(device: torch.device) -> torch.dtype:
    """What products are computed in: bfloat16 where the device has units for it, float32 where it would be converted at each."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    has = getattr(torch.cpu, "get_capabilities", dict[str, Any])()  # torch 2.4 has none
    return torch.bfloat16 if any(has.get(unit) for unit in BFLOAT16_UNITS) else torch.float32


def autocast(device: torch.device) -> torch.autocast:
    """Products within are computed in ``product_dtype``."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=product_dtype(device) is torch.bfloat16)


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write tensors and plain data; what was there stays until all of it is written.

    Raises:
        CapacityError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as out:
                torch.save(dict(state), out)
                out.flush()
                os.fsync(out.fileno())
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except (OSError, RuntimeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error).splitlines()[0]
        raise CapacityError(
            f"{path} cannot be written ({reason}); free some space and start again, the run goes on from the last one."
        ) from error


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """What ``save_checkpoint`` wrote; None when there is none, or it is broken."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except Exception:  # torch raises whatever its zip and pickle readers do
        return None
    return state


def _resume(job: Job, checkpoint: Path, settings: Mapping[str, Any], report: Report) -> Position:
    found = load_checkpoint(checkpoint)
    if found is None:
        return Position()
    if found["settings"] != dict(settings):
        report(f"{checkpoint} is of a training with other settings or texts; starting anew")
        return Position()
    job.restore(found["state"])
    position = Position(**found["position"])
    report(f"going on from a checkpoint after {position.tokens:,} tokens")
    return position
