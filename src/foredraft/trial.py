"""One batch of prompts, decoded in several ways: what each took, and what it was expected to take.

Owns: a Run, and how measurement and prediction of it are made.  Does not know: which batches there are, or what a figure is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from foredraft.cost import PassTimes, pooled
from foredraft.lanes import PLAIN, PLAIN_WAY, Lane, Race, Way, seeded
from foredraft.llm import LLM
from foredraft.rehearsal import Correction, Rehearsal, Rehearsed
from foredraft.types import PHASES, SamplingParams, SpeculationStats, StepStats

SEGMENT_TOKENS = 16
# Of passes without drafting, for the prediction, before each batch.
TIMING_SECONDS = 0.4


@dataclass(frozen=True)
class Batch:
    """Prompts that are answered together.  ``name`` is unique in its category."""

    category: str
    name: str
    prompts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Run:
    """A batch in one way.  ``decode_*`` exclude everything up to the step that gave the last of the batch its first token.

    ``token_ids``: one list per answer.  ``ms_per_step``: milliseconds by phase, mean over the decoding steps; empty when there was
    none.  ``noise``: standard error of the seconds per token, over themselves, where all segments do the same, as in plain
    decoding; None with fewer than two segments.
    ``steps``: rows, drafted, accepted, emitted and milliseconds of the pass, for each decoding step.
    ``predicted``: None, or ``seconds``, ``speedup`` over the measured plain run, ``acceptance_length`` and ``steps``.
    """

    category: str
    prompt: str
    method: str
    num_speculative_tokens: int
    batch: int
    repeat: int
    num_prompt_tokens: int
    token_ids: list[list[int]]
    time_to_first_token: float
    decode_seconds: float
    decode_tokens: int
    decode_steps: int
    ms_per_step: dict[str, float]
    noise: float | None
    steps: list[tuple[int, int, int, int, float]]
    speculation: SpeculationStats
    predicted: dict[str, float] | None = None

    @property
    def pair(self) -> tuple[str, str, int]:
        """What a run shares with the runs that it is compared with."""
        return self.category, self.prompt, self.repeat

    @property
    def tokens_per_s(self) -> float | None:
        """Decoded tokens per second, of all answers; None when everything was emitted at once."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens and self.decode_seconds > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        own = {name: value for name, value in vars(self).items() if name != "speculation"}
        return {**own, "tokens_per_s": self.tokens_per_s, "speculation": self.speculation.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Run:
        """What ``to_dict`` gave, also by way of JSON."""
        counters = {f.name for f in fields(SpeculationStats)}
        speculation = SpeculationStats(**{name: value for name, value in data["speculation"].items() if name in counters})
        own = {f.name: data[f.name] for f in fields(cls) if f.name != "speculation"}
        steps = [(rows, drafted, accepted, emitted, ms) for rows, drafted, accepted, emitted, ms in data["steps"]]
        return cls(**{**own, "steps": steps}, speculation=speculation)


class Contest:
    """Plain decoding and ``ways``, batch after batch; each way keeps what it learns.

    ``predict`` False measures only.  Predictions go by passes that are timed before each batch, pooled with those of the batches
    before: an hour ago the machine may have been another.
    """

    def __init__(self, llm: LLM, ways: Seq[Way], *, predict: bool = True) -> None:
        self.ways = (PLAIN_WAY, *ways)
        self._llm = llm
        self._timed: list[PassTimes] = []
        self._race = Race(llm)
        for way in self.ways:
            self._race.add(way)
        self._rehearsals = [Rehearsal(llm, way) for way in self.ways] if predict else []

    def warm_up(self, batch: Batch, params: SamplingParams) -> None:
        """A short request in every way, in earnest and rehearsed."""
        prompt, short = batch.prompts[0], self._race.warm_up(batch.prompts[0], params)
        answers = self._race.lanes[0].answers
        for rehearsal in self._rehearsals:
            rehearsal.play([prompt], [short], answers, "warm-up")

    def run(self, batch: Batch, params: SamplingParams, repeat: int, turn: int) -> list[Run]:
        """One run per way, plain first.  The prompts' seeds follow that of ``params``."""
        each = seeded(params, len(batch.prompts))
        tenant = f"repeat {repeat}"
        if self._rehearsals:
            most = len(batch.prompts) * (1 + max(way.num_speculative_tokens for way in self.ways))
            self._timed.append(self._llm.time_passes(most, TIMING_SECONDS))
            for rehearsal in self._rehearsals:
                rehearsal.times = pooled(self._timed)
        self._race.run(batch.prompts, each, SEGMENT_TOKENS, turn, tenant)
        plain = self._race.lanes[0]
        runs, correction = [], Correction()
        for index, lane in enumerate(self._race.lanes):
            predicted = None
            if self._rehearsals:
                rehearsed, _ = self._rehearsals[index].play(batch.prompts, each, plain.answers, tenant)
                if lane is plain:
                    correction = Correction.between(plain.milliseconds(), rehearsed.milliseconds)
                elif rehearsed.num_steps:
                    predicted = _prediction(plain, correction, rehearsed)
            runs.append(_run(batch, lane, repeat, predicted))
        return runs

    def recall(self, batch: Batch, plain: Run) -> None:
        """Let drafters know the answers of a batch that was run earlier, as they would if they had been asked."""
        answers, tenant = plain.token_ids, f"repeat {plain.repeat}"
        for lane in self._race.lanes:
            lane.recall(batch.prompts, answers, tenant)
        for rehearsal in self._rehearsals:
            rehearsal.recall(batch.prompts, answers, tenant)


def _prediction(plain: Lane, correction: Correction, rehearsed: Rehearsed) -> dict[str, float]:
    seconds = correction.seconds(rehearsed)
    return {
        "seconds": seconds,
        "speedup": plain.seconds / seconds,
        "acceptance_length": rehearsed.speculation.acceptance_length,
        "steps": rehearsed.num_steps,
    }


def _run(batch: Batch, lane: Lane, repeat: int, predicted: dict[str, float] | None) -> Run:
    steps, way = lane.steps, lane.way
    return Run(
        category=batch.category,
        prompt=batch.name,
        method=way.method if way.num_speculative_tokens else PLAIN,
        num_speculative_tokens=way.num_speculative_tokens,
        batch=len(batch.prompts),
        repeat=repeat,
        num_prompt_tokens=sum(map(len, batch.prompts)),
        token_ids=lane.answers,
        time_to_first_token=lane.seconds_to_begin,
        decode_seconds=lane.seconds,
        decode_tokens=lane.num_tokens,
        decode_steps=len(steps),
        ms_per_step={phase: statistics.fmean(step.milliseconds[phase] for step in steps) for phase in PHASES if steps},
        noise=_noise(lane),
        steps=[_brief(step) for step in steps],
        speculation=lane.speculation,
        predicted=predicted,
    )


def _noise(lane: Lane) -> float | None:
    """From how neighbouring segments differ (von Neumann, 1941): contexts grow and batches empty, which is no noise.

    Of plain decoding only, which does the same in all of them.
    """
    each = [one.seconds / one.num_tokens for one in lane.segments if one.num_tokens]
    if len(each) < 2:
        return None
    variance = statistics.fmean((b - a) ** 2 for a, b in pairwise(each)) / 2
    return math.sqrt(variance / len(each)) / statistics.fmean(each)


def _brief(step: StepStats) -> tuple[int, int, int, int, float]:
    return step.num_rows, step.num_drafted, step.num_accepted, step.num_emitted, round(step.milliseconds["pass"], 4)
