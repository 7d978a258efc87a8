"""Claims of the literature on speculative decoding, each as a measurement with a rule for its verdict.

Owns: what is measured for each claim, and when it holds.  Does not know: which are asked for, or how they are printed.

Where a claim is about acceptance, the real engine runs with a drafter that knows the plain answer and errs with a chosen
probability, so that acceptance is what it is meant to be whatever the model and the prompts are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from foredraft.bench_figures import quartiles
from foredraft.config import SpeculativeConfig
from foredraft.drafters import registry
from foredraft.lanes import PLAIN_WAY, Lane, Race, Way, seeded
from foredraft.llm import LLM
from foredraft.passes import PassTimer, verifying
from foredraft.planner import tokens_per_pass
from foredraft.synthetic import SyntheticDrafter
from foredraft.types import SamplingParams

SYNTHETIC = "synthetic"
FREE_PASS, ROWS, CONTEXT, PASS_REPEATS = 1.5, 5, 64, 25
ACCEPTANCES, K = (0.5, 0.7, 0.9), 4
LARGE_KS, SATURATED = (1, 2, 4, 8, 16), 0.1
BATCHES = (1, 4, 16)
ECHO, OWN = ("extraction", "summary"), "chat"
# The lever experiment: a setting, and each of its parts made better by the same share.
BASE_ACCEPTANCE, BASE_COST, BASE_K, BETTER = 0.7, 0.1, 5, 0.2


@dataclass(frozen=True)
class Finding:
    """Of one experiment: what is claimed and where, when it holds and whether it does, and the numbers, in words and as data."""

    claim: str
    source: str
    rule: str
    holds: bool
    said: str
    numbers: Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """A drafter that errs on purpose: it is right with probability ``acceptance``; ``cost`` of a draft token is in plain passes."""

    acceptance: float
    num_tokens: int
    cost: float = 0.0


class Bench:
    """What the experiments run on: a model, prompts by category, and a seed for all that is random."""

    def __init__(self, llm: LLM, prompts: Mapping[str, Seq[Seq[int]]], max_tokens: int, repeats: int = 1, seed: int = 0) -> None:
        self.llm, self.prompts, self.max_tokens, self.repeats, self.seed = llm, prompts, max_tokens, repeats, seed

    @property
    def firsts(self) -> list[Seq[int]]:
        """One prompt of each category."""
        return [some[0] for some in self.prompts.values()]

    def params(self, temperature: float = 0.0, ignore_eos: bool = True) -> SamplingParams:
        """Of every request; to go on behind the end gives all ways and batches the same number of tokens."""
        return SamplingParams(temperature=temperature, seed=self.seed, max_tokens=self.max_tokens, ignore_eos=ignore_eos)

    def answers(self, batches: Seq[Seq[Seq[int]]]) -> dict[tuple[int, ...], list[int]]:
        """What plain decoding says, by prompt."""
        race = Race(self.llm)
        lane = race.add(PLAIN_WAY)
        found: dict[tuple[int, ...], list[int]] = {}
        for prompts in batches:
            race.run(prompts, seeded(self.params(), len(prompts)))
            found.update(zip(map(tuple, prompts), lane.answers, strict=True))
        return found

    def race(self, settings: Seq[Setting], answers: Mapping[tuple[int, ...], Seq[int]]) -> Race:
        """Plain decoding, and a lane per setting; each draws its errors from the seed and its place in the list."""
        race = Race(self.llm)
        race.add(PLAIN_WAY)
        pass_seconds = self.llm.calibrate().at(1)
        for index, setting in enumerate(settings):
            drafter = SyntheticDrafter(
                answers,
                setting.acceptance,
                np.random.default_rng((self.seed, index)),
                self.llm.target.vocab_size,
                seconds_per_token=setting.cost * pass_seconds,
            )
            race.add(Way(SYNTHETIC, setting.num_tokens), {SYNTHETIC: drafter})
        return race

    def compare(self, race: Race, batches: Seq[Seq[Seq[int]]], each: Callable[[Race], None] | None = None) -> list[float]:
        """Run all batches; by lane, the median of its speed-ups over plain decoding.  ``each`` is called after each batch."""
        race.warm_up(batches[0][0], self.params())
        ratios: list[list[float]] = [[] for _ in race.lanes]
        for turn in range(self.repeats * len(batches)):
            prompts = batches[turn % len(batches)]
            race.run(prompts, seeded(self.params(), len(prompts)), turn=turn)
            for lane, some in zip(race.lanes, ratios, strict=True):
                some.append(race.lanes[0].seconds / lane.seconds)
            if each is not None:
                each(race)
        return [statistics.median(some) for some in ratios]


def _alone(prompts: Seq[Seq[int]]) -> list[list[Seq[int]]]:
    return [[prompt] for prompt in prompts]


# ------------------------------------------------------------------------------------------------ experiments


def verification(bench: Bench) -> Finding:
    """Passes of 1 and of 5 rows, in turn."""
    llm = bench.llm
    timer = PassTimer(llm.target, llm.kv.num_blocks, llm.kv.block_size)
    kinds = [verifying(rows, CONTEXT) for rows in (1, ROWS)]
    seconds = timer.time(kinds, PASS_REPEATS * bench.repeats)
    one, five = (statistics.median(seconds[kind]) for kind in kinds)
    return Finding(
        claim=f"Verifying {ROWS - 1} draft tokens takes hardly longer than decoding one: the weights are read once",
        source="Leviathan et al., 2211.17192, section 3.4; Chen et al., 2302.01318",
        rule=f"A pass of {ROWS} rows takes at most {FREE_PASS} times as long as a pass of 1.",
        holds=five <= FREE_PASS * one,
        said=f"A pass of 1 row takes {1e3 * one:.2f} ms, one of {ROWS} rows {1e3 * five:.2f} ms: {five / one:.2f} times as long.",
        numbers={
            "ms_by_rows": {str(kind.rows): quartiles([1e3 * value for value in seconds[kind]]) for kind in kinds},
            "ratio": five / one,
        },
    )


def acceptance_formula(bench: Bench) -> Finding:
    """Tokens per pass at three acceptances."""
    prompts = _alone([prompt for some in bench.prompts.values() for prompt in some])
    settings = [Setting(acceptance, K) for acceptance in ACCEPTANCES]
    seen: list[list[int]] = [[] for _ in settings]

    def collect(race: Race) -> None:
        for lane, some in zip(race.lanes[1:], seen, strict=True):
            some += whole_passes(lane, K)

    bench.compare(bench.race(settings, bench.answers(prompts)), prompts, collect)
    rows = [_expectation(setting, some) for setting, some in zip(settings, seen, strict=True)]
    return Finding(
        claim="Tokens per pass follow (1 - a^(K+1)) / (1 - a)",
        source="Leviathan et al., 2211.17192, equation 1",
        rule="At each acceptance a the mean is within three standard errors of the formula.",
        holds=all(abs(row["measured"] - row["expected"]) <= 3 * row["standard_error"] for row in rows),
        said=f"At K = {K}: "
        + ", ".join(f"{row['measured']:.2f} at a = {row['acceptance']} (formula {row['expected']:.2f})" for row in rows)
        + ".",
        numbers={"K": K, "by_acceptance": rows},
    )


def whole_passes(lane: Lane, num_tokens: int) -> list[int]:
    """Tokens of each pass that verified a whole draft; near its end an answer has no room for one."""
    return [step.num_accepted + 1 for step in lane.steps if step.num_drafted == num_tokens]


def _expectation(setting: Setting, seen: Seq[int]) -> dict[str, float]:
    spread = statistics.stdev(seen) if len(seen) > 1 else math.inf
    return {
        "acceptance": setting.acceptance,
        "expected": tokens_per_pass([setting.acceptance] * setting.num_tokens),
        "measured": statistics.fmean(seen),
        "standard_error": spread / math.sqrt(len(seen)),
        "num_passes": len(seen),
    }


def large_k(bench: Bench) -> Finding:
    """Tokens per pass and speed-up by K, at one acceptance."""
    prompts = _alone(bench.firsts)
    settings = [Setting(BASE_ACCEPTANCE, k) for k in LARGE_KS]
    seen: list[list[int]] = [[] for _ in settings]

    def collect(race: Race) -> None:
        for lane, some in zip(race.lanes[1:], seen, strict=True):
            some += whole_passes(lane, lane.way.num_speculative_tokens)

    speedups = bench.compare(bench.race(settings, bench.answers(prompts)), prompts, collect)[1:]
    tokens = [statistics.fmean(some) for some in seen]
    gained = tokens[-1] / tokens[-2] - 1.0
    best = LARGE_KS[max(range(len(speedups)), key=lambda index: speedups[index])]
    return Finding(
        claim="Large K saturates: tokens per pass approach 1 / (1 - a), and the best K is not the largest",
        source="Leviathan et al., 2211.17192, section 3.5",
        rule=f"From K = {LARGE_KS[-2]} to {LARGE_KS[-1]} a pass gains less than {SATURATED:.0%}, and a smaller K is fastest.",
        holds=gained < SATURATED and best < LARGE_KS[-1],
        said=f"At a = {BASE_ACCEPTANCE} a pass brings "
        + ", ".join(f"{value:.2f} tokens at K = {k}" for k, value in zip(LARGE_KS, tokens, strict=True))
        + f" (limit {1 / (1 - BASE_ACCEPTANCE):.2f}); K = {best} is fastest, {max(speedups):.2f} times plain.",
        numbers={
            "acceptance": BASE_ACCEPTANCE,
            "tokens_per_pass": dict(zip(map(str, LARGE_KS), tokens, strict=True)),
            "speedup": dict(zip(map(str, LARGE_KS), speedups, strict=True)),
            "best_K": best,
        },
    )


def same_output(bench: Bench) -> Finding:
    """Answers with and without drafts, greedy and sampled."""
    race = Race(bench.llm)
    ways = [Way(registry.MODEL_FREE[0], K), Way(registry.MODEL_FREE[1], K), Way(registry.AUTO, 8, adaptive=True)]
    for way in (PLAIN_WAY, *ways):
        race.add(way)
    counts: dict[str, dict[str, int]] = {}
    for name, temperature in (("greedy", 0.0), ("sampled", 0.8)):
        same = total = accepted = 0
        for prompt in bench.firsts:
            race.run([prompt], [bench.params(temperature, ignore_eos=False)])
            plain, *others = race.lanes
            total += len(others)
            same += sum(lane.answers == plain.answers for lane in others)
            accepted += sum(lane.speculation.accepted_tokens for lane in others)
        counts[name] = {"answers": total, "same": same, "accepted_tokens": accepted}
    words = (f"{count['same']} of {count['answers']} {name}" for name, count in counts.items())
    return Finding(
        claim="Speculation does not change the output: same tokens for the same seed, greedy and sampled",
        source="for the distribution Leviathan et al., 2211.17192, appendix A.1; for the tokens Daliri et al., 2408.07978",
        rule="All token ids are those of plain decoding, and drafts were accepted in both.",
        holds=all(count["same"] == count["answers"] and count["accepted_tokens"] > 0 for count in counts.values()),
        said=f"{' and '.join(words)} answers are the same, by {', '.join(way.label for way in ways)}.",
        numbers=counts,
    )


def batch_fades(bench: Bench) -> Finding:
    """Speed-up at a few batch sizes, acceptance being the same."""
    speedups = {}
    for size in BATCHES:
        pool = bench.firsts * size
        prompts = [pool[:size]] if size > 1 else _alone(bench.firsts)
        race = bench.race([Setting(BASE_ACCEPTANCE, K)], bench.answers(prompts))
        speedups[size] = bench.compare(race, prompts)[1]
    first, last = speedups[BATCHES[0]], speedups[BATCHES[-1]]
    return Finding(
        claim="The gain fades with the batch",
        source="Su et al., 2310.18813; Liu et al., 2406.14066",
        rule=f"The speed-up at batch {BATCHES[-1]} is less than at batch {BATCHES[0]}.",
        holds=last < first,
        said=f"At a = {BASE_ACCEPTANCE} and K = {K}: "
        + ", ".join(f"{value:.2f} times plain at batch {size}" for size, value in speedups.items())
        + ".",
        numbers={"acceptance": BASE_ACCEPTANCE, "K": K, "speedup": {str(size): value for size, value in speedups.items()}},
    )


def ngram_echo(bench: Bench) -> Finding:
    """n-gram drafts where the answer repeats the prompt and where it does not, and what they take of the memory."""
    way = Way("ngram", K)
    speedups = {}
    for category in (*ECHO, OWN):
        race = Race(bench.llm)
        race.add(PLAIN_WAY)
        race.add(way)
        speedups[category] = bench.compare(race, _alone(bench.prompts[category]))[1]
    longest = max((prompt for some in bench.prompts.values() for prompt in some), key=len)
    # What is planned for, since the compiled index is in nobody's books; tests hold plans against resident memory.
    index_bytes = registry.memory(SpeculativeConfig(way.method)).per_token * len(longest)
    model_bytes = bench.llm.target.weight_bytes
    echo = min(speedups[category] for category in ECHO)
    return Finding(
        claim="n-gram drafts win where the answer echoes the prompt, and take no model memory",
        source="Yang et al., 2304.04487; Saxena, prompt lookup decoding",
        rule=f"{' and '.join(ECHO)} are faster than plain and gain more than {OWN}; the index takes less than 1 % of the weights.",
        holds=echo > 1.0 and echo > speedups[OWN] and index_bytes < 0.01 * model_bytes,
        said="ngram, "
        + ", ".join(f"{category} {value:.2f} times plain" for category, value in speedups.items())
        + f"; no weights, and an index of at most {index_bytes / 1e3:.0f} KB for {len(longest)} tokens beside "
        f"{model_bytes / 1e6:.0f} MB of the target's.",
        numbers={"speedup": speedups, "index_bytes": index_bytes, "indexed_tokens": len(longest), "weight_bytes": model_bytes},
    )


def biggest_lever(bench: Bench) -> Finding:
    """Speed-up when acceptance, draft cost or K changes by the same share."""
    prompts = _alone(bench.firsts)
    step = round(BETTER * BASE_K)
    settings = {
        "base": Setting(BASE_ACCEPTANCE, BASE_K, BASE_COST),
        "acceptance": Setting(BASE_ACCEPTANCE * (1 + BETTER), BASE_K, BASE_COST),
        "draft_cost": Setting(BASE_ACCEPTANCE, BASE_K, BASE_COST * (1 - BETTER)),
        "K_up": Setting(BASE_ACCEPTANCE, BASE_K + step, BASE_COST),
        "K_down": Setting(BASE_ACCEPTANCE, BASE_K - step, BASE_COST),
    }
    measured = bench.compare(bench.race(list(settings.values()), bench.answers(prompts)), prompts)[1:]
    speedups = dict(zip(settings, measured, strict=True))
    gains = {name: value / speedups["base"] - 1.0 for name, value in speedups.items() if name != "base"}
    best = max(gains, key=lambda name: gains[name])
    return Finding(
        claim="Acceptance is the biggest lever, before the draft's cost and K",
        source="Leviathan et al., 2211.17192, section 3.3",
        rule=f"Of acceptance, draft cost and K, each made better by {BETTER:.0%}, acceptance gains most.",
        holds=best == "acceptance",
        said=f"From a = {BASE_ACCEPTANCE}, K = {BASE_K} and a draft token at {BASE_COST:.0%} of a pass "
        f"({speedups['base']:.2f} times plain): acceptance {gains['acceptance']:+.0%}, draft cost {gains['draft_cost']:+.0%}, "
        f"K {BASE_K + step} {gains['K_up']:+.0%}, K {BASE_K - step} {gains['K_down']:+.0%}.",
        numbers={"speedup": speedups, "gain": gains, "changed_by": BETTER},
    )


EXPERIMENTS: Mapping[str, Callable[[Bench], Finding]] = {
    "verification": verification,
    "acceptance_formula": acceptance_formula,
    "large_k": large_k,
    "same_output": same_output,
    "batch": batch_fades,
    "ngram_echo": ngram_echo,
    "lever": biggest_lever,
}
