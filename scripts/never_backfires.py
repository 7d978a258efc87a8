"""Whether adaptive speculation ever costs more than plain decoding, and how near it comes to the best fixed setting.

Usage: ``python scripts/never_backfires.py MODEL [--dataset FILE]``.  Prints a table on stderr while it goes, and one JSON object on
stdout at the end.

Cases: categories of a data set (the six groups of Spec-Bench when it is one; the built-in prompts without), prompts of random
tokens at temperature 1.5, a drafter that is always wrong, one that is right and wrong in turn for 50 tokens each, one that is
slow, and batches of 16.  All ways of a case decode in turn, in segments of a few tokens of the same text; figures are medians
over prompts of plain seconds over the way's seconds, and over segments.  What is meant to backfire runs on ``LEAST_HOSTILE``
prompts or more, since there two per cent count; not on the same ones again, since drafters remember answers.

The fastest of many ways that are timed once looks faster than it is.  So the best fixed setting is chosen by every other segment
and compared with ``auto`` in those between, both ways round, by the median of pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from foredraft.bench import prompt_tokens
from foredraft.bench_figures import over_best
from foredraft.lanes import PLAIN_WAY, Lane, Race, Way, seeded
from foredraft.llm import LLM
from foredraft.machine import describe_machine
from foredraft.synthetic import SyntheticDrafter
from foredraft.types import Drafter, SamplingParams
from foredraft.workloads import WORKLOADS, load_dataset

AUTO = Way("auto", 8, adaptive=True)
# Spec-Bench groups MT-bench's eight categories as multi-turn conversation (Xia et al., 2401.07851, section 4.1).
CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
GROUPS = {
    "chat": CHAT,
    "translation": ("translation",),
    "summarization": ("summarization",),
    "qa": ("qa",),
    "math": ("math_reasoning",),
    "rag": ("rag",),
}
FLIP_EVERY = 50
SEGMENT = 16
BATCH = 16
LEAST_HOSTILE, BATCHES = 16, 4
Prompts = list[list[int]]
MakeDrafters = Callable[[Mapping[tuple[int, ...], Sequence[int]]], dict[str, Drafter]]


@dataclass
class Case:
    """Prompts that are run ``batch`` at a time; ``make`` gives the adaptive lane's drafters once the plain answers are known."""

    name: str
    prompts: Prompts
    batch: int = 1
    temperature: float = 0.0
    make: MakeDrafters | None = None
    fixed: list[Way] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------ cases


def group_prompts(llm: LLM, dataset: str | None, limit: int, max_tokens: int) -> dict[str, Prompts]:
    """Token ids by group; prompts beyond the model's context are left out."""
    pool = WORKLOADS if dataset is None else load_dataset(dataset)
    known = {workload.category for workload in pool}
    groups = GROUPS if known >= set(GROUPS["rag"]) else {name: (name,) for name in dict.fromkeys(w.category for w in pool)}
    found: dict[str, Prompts] = {}
    for name, categories in groups.items():
        # One of each category in turn, so that a few prompts of a group of many categories are of many of them.
        by_category = [[w for w in pool if w.category == category] for category in categories]
        ordered = [some[i] for i in range(max(map(len, by_category))) for some in by_category if i < len(some)]
        ids = (prompt_tokens(llm, workload) for workload in ordered)
        found[name] = [one for one in ids if len(one) + max_tokens <= llm.max_model_len][:limit]
    return found


def all_cases(llm: LLM, options: argparse.Namespace) -> list[Case]:
    """The groups, and what is meant to make speculation backfire."""
    num_first, num_batched = max(LEAST_HOSTILE, options.limit), BATCHES * BATCH
    most = max(num_first, num_batched)
    pool = group_prompts(llm, options.dataset, most, options.max_tokens)
    groups = {name: prompts[: options.limit] for name, prompts in pool.items()}
    # One of each group in turn, as long as there are any.
    mixed = [prompts[i] for i in range(max(map(len, pool.values()))) for prompts in pool.values() if i < len(prompts)]
    first, mixed = mixed[:num_first], mixed[:num_batched]
    rng = np.random.default_rng(options.seed)
    vocab_size = llm.target.vocab_size
    noise = rng.integers(0, vocab_size, (most, 64)).tolist()
    pass_seconds = llm.calibrate().at(1)
    ks = [k for k in options.k_sweep if k > 0]
    fixed = [Way(method, k) for method in ("ngram", "suffix") for k in ks]

    def synthetic(acceptance: Any, delay: float = 0.0) -> MakeDrafters:
        return lambda answers: {
            "synthetic": SyntheticDrafter(
                answers, acceptance, np.random.default_rng(options.seed), vocab_size, seconds_per_token=delay * pass_seconds
            )
        }

    def flipping(index: int) -> float:
        return 0.0 if index // FLIP_EVERY % 2 else 0.9

    return [
        *(Case(name, prompts, fixed=fixed) for name, prompts in groups.items()),
        Case("random tokens, temperature 1.5", noise[:num_first], temperature=1.5),
        Case("always wrong", first, make=synthetic(0.0)),
        Case("flips every 50 tokens", first, make=synthetic(flipping)),
        Case("slow and right", first, make=synthetic(0.9, delay=1.0)),
        Case("slow and wrong", first, make=synthetic(0.1, delay=1.0)),
        Case("batch 16", mixed, batch=BATCH),
        Case("batch 16, random tokens, temperature 1.5", noise[:num_batched], batch=BATCH, temperature=1.5),
        Case("batch 16, always wrong", mixed, batch=BATCH, make=synthetic(0.0)),
    ]


# ------------------------------------------------------------------------------------------------ measuring


def measure(llm: LLM, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every way, prompt by prompt, and their ratios to plain."""
    race = Race(llm)
    params = SamplingParams(
        temperature=case.temperature, seed=options.seed, max_tokens=options.max_tokens, ignore_eos=case.batch > 1 or bool(case.make)
    )
    plain = race.add(PLAIN_WAY)
    drafters = None if case.make is None else case.make(answers(llm, case, params))
    auto = race.add(AUTO, drafters)
    tried = [race.add(way) for way in case.fixed]
    rounds: dict[str, list[tuple[float, float]]] = {lane.way.label: [] for lane in (auto, *tried)}
    timed: dict[str, list[float]] = {lane.way.label: [] for lane in (plain, auto, *tried)}
    same = True
    batches = [case.prompts[i : i + case.batch] for i in range(0, len(case.prompts), case.batch)]
    race.warm_up(case.prompts[0], params)
    for repeat in range(options.repeats):
        for index, prompts in enumerate(batches):
            race.run(prompts, seeded(params, len(prompts)), SEGMENT, turn=repeat + index)
            for lane in (auto, *tried):
                same = same and lane.answers == plain.answers
                if plain.num_tokens and lane.num_tokens:
                    rounds[lane.way.label].append((plain.seconds, lane.seconds))
            for label, found in paces((plain, auto, *tried)).items():
                timed[label] += found
    return summary(case, rounds, timed, auto, same)


def paces(lanes: Sequence[Lane]) -> dict[str, list[float]]:
    """Seconds a token of each lane, in the segments in which all of them emitted."""
    rounds = zip(*(lane.segments for lane in lanes), strict=False)
    shared = [segments for segments in rounds if all(segment.num_tokens for segment in segments)]
    return {lane.way.label: [some[i].seconds / some[i].num_tokens for some in shared] for i, lane in enumerate(lanes)}


def answers(llm: LLM, case: Case, params: SamplingParams) -> dict[tuple[int, ...], list[int]]:
    """What plain decoding says, by prompt."""
    race = Race(llm)
    lane = race.add(PLAIN_WAY)
    found: dict[tuple[int, ...], list[int]] = {}
    for start in range(0, len(case.prompts), case.batch):
        prompts = case.prompts[start : start + case.batch]
        race.run(prompts, seeded(params, len(prompts)))
        found.update(zip(map(tuple, prompts), lane.answers, strict=True))
    return found


def summary(
    case: Case,
    rounds: Mapping[str, Sequence[tuple[float, float]]],
    timed: Mapping[str, Sequence[float]],
    auto: Lane,
    same: bool,
) -> dict[str, Any]:
    """Figures of a case."""
    speedups = {label: statistics.median(p / s for p, s in pairs) for label, pairs in rounds.items() if pairs}
    in_all = {label: sum(p for p, _ in pairs) / sum(s for _, s in pairs) for label, pairs in rounds.items() if pairs}
    fixed = {label: value for label, value in in_all.items() if label != "auto"}
    best = max(fixed, key=lambda label: fixed[label]) if fixed else None
    # Where no draft pays the best setting is none at all.
    best = None if best is not None and fixed[best] < 1.0 else best
    snapshot = auto.controller.snapshot()
    others = {label: found for label, found in timed.items() if label != "auto"}
    pairs = [one / other for one, other in zip(timed[PLAIN_WAY.label], timed["auto"], strict=True)]
    return {
        "name": case.name,
        "num_prompts": len(case.prompts),
        "batch": case.batch,
        "speedup": speedups["auto"],
        "speedup_in_all": in_all["auto"],
        "segments_median": statistics.median(pairs),
        "segments_lowest_tenth": float(np.quantile(pairs, 0.1)),
        "best_fixed": None if not fixed else best or "plain",
        "best_fixed_speedup": None if not fixed else fixed[best] if best else 1.0,
        "auto_over_best": over_best(timed["auto"], others) if fixed else None,
        "auto_over_highest": in_all["auto"] / (fixed[best] if best else 1.0) if fixed else None,
        "fixed": fixed,
        "ms_per_token": {label: [round(1e3 * seconds, 3) for seconds in found] for label, found in timed.items()},
        "same_tokens": same,
        "drafters": snapshot["drafters"],
    }


# ------------------------------------------------------------------------------------------------ command line


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="Whether adaptive speculation ever costs more than plain decoding.")
    parser.add_argument("model")
    parser.add_argument("--dataset", help="prompts in Spec-Bench's format; the built-in ones when not given")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each group")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--k-sweep", default="1,2,3,4,6,8", help="fixed K to compare with, in the groups; empty for none")
    parser.add_argument("--only", help="run only cases whose name has this text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args(arguments)
    options.k_sweep = [int(k) for k in options.k_sweep.split(",") if k]
    return options


def row(result: Mapping[str, Any]) -> str:
    """A line of the table."""
    best = "" if result["best_fixed"] is None else f"{result['best_fixed']} {result['best_fixed_speedup']:.3f}"
    share = "" if result["auto_over_best"] is None else f"{result['auto_over_best']:.3f}"
    figures = "".join(f"{result[name]:9.3f}" for name in ("speedup", "speedup_in_all", "segments_median", "segments_lowest_tenth"))
    return f"{result['name']:42}{figures}  {best:18}{share:>7}  {'same' if result['same_tokens'] else 'DIFFERENT'}"


def report(lines: Iterable[str]) -> None:
    """To stderr at once."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases; the exit status is 1 when a token differed."""
    options = parse(arguments)
    config = {"method": "auto"}
    llm = LLM(options.model, speculative_config=config, device=options.device, threads=options.threads, enable_prefix_caching=False)
    report([*llm.describe(), f"{'case':42}   auto   in all  segments  low 10%  best fixed       auto/best"])
    results = []
    for case in all_cases(llm, options):
        if options.only is None or options.only in case.name:
            results.append(measure(llm, case, options))
            report([row(results[-1])])
    worst = min(results, key=lambda result: float(result["speedup_in_all"]), default=None)
    print(
        json.dumps(
            {
                "options": vars(options),
                "machine": describe_machine(),
                "times": asdict(llm.calibrate()),
                "worst": None if worst is None else {"name": worst["name"], "speedup_in_all": worst["speedup_in_all"]},
                "cases": results,
            }
        )
    )
    return 0 if all(result["same_tokens"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
