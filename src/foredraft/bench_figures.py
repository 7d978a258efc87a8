"""From runs to figures: speed-ups with their spread, acceptance, divergences, and how good the predictions were.

Owns: the arithmetic of a bench.  Does not know: how a run is made, or how a figure is shown.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from foredraft.lanes import PLAIN
from foredraft.trial import Run
from foredraft.types import PHASES, SpeculationStats

ALL_CATEGORIES = "all"
OVERHEAD_PHASES = tuple(phase for phase in PHASES if phase not in ("draft", "pass"))
# A prediction within this of the measurement is called good; a speed-up within LEAST_NOISE of 1 is never called a gain or a loss.
GOOD, LEAST_NOISE = 0.10, 0.01
# 90 % of a normal distribution lie within so many standard errors.
STANDARD_ERRORS = 1.645
PREDICTION_RULE = (
    "A cell is a workload, a method, K and a batch size. Its noise is the 90 % interval of its speed-up by how much the segments "
    f"of its plain runs differ, at least {LEAST_NOISE:.0%}. Its sign is right when prediction and measurement are on the same "
    "side of 1.00; a cell measured within its noise of 1.00 has no sign and counts as right when its error is at most "
    f"{GOOD:.0%}."
)

Plains = Mapping[tuple[str, str, int], Run]


def quartiles(values: Seq[float]) -> dict[str, float] | None:
    """Lower quartile, median and upper quartile, interpolated between the values; None without values."""
    if not values:
        return None
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"lower": lower, "median": median, "upper": upper}


def speeds(runs: Iterable[Run]) -> list[float]:
    """Tokens per second of the runs that decoded anything."""
    return [run.tokens_per_s for run in runs if run.tokens_per_s is not None]


def ratio(run: Run, plain: Run) -> float | None:
    """Tokens per second over plain's; None where one of them decoded nothing."""
    speed, plain_speed = run.tokens_per_s, plain.tokens_per_s
    return None if speed is None or plain_speed is None else speed / plain_speed


def plains_of(runs: Iterable[Run]) -> Plains:
    """The plain runs by what they share with those that are compared with them."""
    return {run.pair: run for run in runs if run.method == PLAIN}


def cells_of(runs: Seq[Run]) -> list[dict[str, Any]]:
    """One cell per (category, method, K, batch) in the order of the runs."""
    plains = plains_of(runs)
    groups: dict[tuple[str, str, int, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.category, run.method, run.num_speculative_tokens, run.batch), []).append(run)
    return [cell(category, some, plains) for (category, *_), some in groups.items()]


def overall(runs: Seq[Run], cells: Seq[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One cell per method over all categories."""
    plains = plains_of(runs)
    found = []
    for method in dict.fromkeys(run.method for run in runs):
        one = cell(ALL_CATEGORIES, [run for run in runs if run.method == method], plains)
        explained = (other["first_divergence"] for other in cells if other["method"] == method)
        found.append({**one, "first_divergence": next((divergence for divergence in explained if divergence is not None), None)})
    return found


def cell(category: str, runs: Seq[Run], plains: Plains) -> dict[str, Any]:
    """Figures of runs of one method, K and batch; see ``run_bench``."""
    total = SpeculationStats.merged(run.speculation for run in runs)
    ratios = [value for run in runs if (value := ratio(run, plains[run.pair])) is not None]
    per_step = [run.ms_per_step for run in runs if run.ms_per_step]
    overheads = [sum(milliseconds[phase] for phase in OVERHEAD_PHASES) for milliseconds in per_step]
    different = [run for run in runs if run.token_ids != plains[run.pair].token_ids]
    drafted, accepted = total.drafted_per_position, total.accepted_per_position
    speedup = quartiles(ratios)
    noise = _noise([plains[run.pair] for run in runs])
    return {
        "category": category,
        "method": runs[0].method,
        "num_speculative_tokens": runs[0].num_speculative_tokens,
        "batch": runs[0].batch,
        "num_runs": len(runs),
        "acceptance_length": total.acceptance_length,
        "acceptance_rate": total.acceptance_rate,
        "acceptance_per_position": [a / d for a, d in zip(accepted + [0] * len(drafted), drafted, strict=False)],
        "tokens_per_s": quartiles(speeds(runs)),
        "speedup": speedup,
        "noise": noise,
        "predicted": _prediction(runs, speedup, noise),
        "ms_per_step": {phase: statistics.median(ms[phase] for ms in per_step) for phase in PHASES if per_step},
        "overhead_ms_per_step": statistics.median(overheads) if overheads else None,
        "identical": not different,
        "num_different": len(different),
        "first_divergence": divergence(different[0], plains[different[0].pair]) if different else None,
    }


def divergence(run: Run, plain: Run) -> dict[str, Any]:
    """The first position, counted from the answer's start, where two answers differ; a token is None behind an answer's end."""
    one, other = next((a, b) for a, b in zip(run.token_ids, plain.token_ids, strict=True) if a != b)
    pairs = zip(one, other, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    token, plain_token = (ids[position] if position < len(ids) else None for ids in (one, other))
    return {
        "category": run.category,
        "prompt": run.prompt,
        "repeat": run.repeat,
        "position": position,
        "plain_token": plain_token,
        "token": token,
    }


# ------------------------------------------------------------------------------------------------ predictions


def _noise(plains: Seq[Run]) -> float | None:
    """Half of the 90 % interval of a speed-up, over the speed-up; both sides of each ratio are as noisy as plain decoding."""
    each = [run.noise for run in plains if run.noise is not None]
    if not each:
        return None
    mean_square = statistics.fmean(value**2 for value in each)
    return max(LEAST_NOISE, STANDARD_ERRORS * math.sqrt(2 * mean_square / len(each)))


def _prediction(runs: Seq[Run], speedup: Mapping[str, float] | None, noise: float | None) -> dict[str, Any] | None:
    each = [run.predicted for run in runs if run.predicted is not None]
    if not each or speedup is None:
        return None
    predicted, measured = statistics.median(one["speedup"] for one in each), speedup["median"]
    error = predicted / measured - 1.0
    is_even = abs(measured - 1.0) <= (LEAST_NOISE if noise is None else noise)
    return {
        "speedup": predicted,
        "acceptance_length": statistics.fmean(one["acceptance_length"] for one in each),
        "error": error,
        "is_even": is_even,
        "is_good": abs(error) <= GOOD,
        "sign_is_right": abs(error) <= GOOD if is_even else (predicted > 1.0) == (measured > 1.0),
    }


def prediction_summary(cells: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """How many cells were predicted well; None without predictions."""
    found = [one["predicted"] for one in cells if one["predicted"] is not None]
    if not found:
        return None
    return {
        "num_cells": len(found),
        "num_even": sum(one["is_even"] for one in found),
        "share_within_10_percent": sum(one["is_good"] for one in found) / len(found),
        "share_of_right_signs": sum(one["sign_is_right"] for one in found) / len(found),
        "median_error": statistics.median(abs(one["error"]) for one in found),
        "worst_error": max((one["error"] for one in found), key=abs),
        "rule": PREDICTION_RULE,
    }


def crossovers(cells: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """By method the batch size where the speed-up falls to 1, on straight lines over log2(batch); None where it never does."""
    methods: dict[str, list[Mapping[str, Any]]] = {}
    for one in cells:
        if one["method"] != PLAIN and one["speedup"] is not None:
            methods.setdefault(one["method"], []).append(one)
    return {
        method: {
            "measured": _crossing([(one["batch"], one["speedup"]["median"]) for one in some]),
            "predicted": _crossing([(one["batch"], one["predicted"]["speedup"]) for one in some if one["predicted"]]),
        }
        for method, some in methods.items()
    }


def _crossing(points: Seq[tuple[int, float]]) -> float | None:
    """The last crossing, so that a cell which is noisy near 1 does not hide a gain behind it."""
    points = sorted(points)
    if not points or points[-1][1] > 1.0:
        return None
    above = [index for index, (_, value) in enumerate(points) if value > 1.0]
    if not above:
        return float(points[0][0])
    (low, high_value), (high, low_value) = points[above[-1]], points[above[-1] + 1]
    share = (high_value - 1.0) / (high_value - low_value)
    return float(low * (high / low) ** share)


def passes_by_rows(runs: Iterable[Run]) -> dict[str, dict[str, float]]:
    """Milliseconds of the decoding passes of all runs, by their number of rows, at least five of each."""
    found: dict[int, list[float]] = {}
    for run in runs:
        for rows, _, _, _, milliseconds in run.steps:
            found.setdefault(rows, []).append(milliseconds)
    return {str(rows): quartiles(found[rows]) or {} for rows in sorted(found) if len(found[rows]) >= 5}


def over_best(way: Seq[float], others: Mapping[str, Seq[float]]) -> float:
    """How many times as fast a way is as the best of ``others``: the median of pairs.

    All are seconds a token in the same segments of text, timed in turn. The fastest of many ways that are timed once looks faster
    than it is, so the best is chosen by every other segment and compared in those between, both ways round; this is the mean.
    """
    assert others and len(way) >= 2 and all(len(other) == len(way) for other in others.values()), (len(way), list(others))
    slower = {label: [pair[0] / pair[1] for pair in zip(other, way, strict=True)] for label, other in others.items()}
    chosen = [min(slower, key=lambda label: statistics.median(slower[label][half::2])) for half in (0, 1)]
    return statistics.fmean(statistics.median(slower[chosen[half]][1 - half :: 2]) for half in (0, 1))
