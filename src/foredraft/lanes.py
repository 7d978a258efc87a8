"""Several ways to decode, side by side on one target in short alternating segments, so that a drift of the machine cancels.

Owns: engines that share a target, the turns that they take, and the time of each segment.  Does not know: what the figures are
for.

Under the coupled rule every lane emits the same tokens for the same request, so segment i of one lane is the same piece of text
as segment i of another, and their times can be compared one by one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import count

from foredraft.controller import Controller
from foredraft.cost import PassTimes
from foredraft.drafters import registry
from foredraft.engine import Engine
from foredraft.kv_cache import KVCache
from foredraft.llm import LLM
from foredraft.loader import Detokenizer
from foredraft.types import (
    PHASES,
    Clock,
    ConfigError,
    Drafter,
    SamplingParams,
    Sequence,
    SpeculationStats,
    StepStats,
    Target,
    TokenRules,
)
from foredraft.verify import RULES

PLAIN = registry.NONE
# One pass of 16 sequences with 8 drafts each, and the prompts that are read meanwhile in parts.
MAX_BATCHED_TOKENS = 512
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Way:
    """A way to decode: ``none`` is plain; ``num_speculative_tokens`` is the most when ``adaptive``, and fixed otherwise."""

    method: str = PLAIN
    num_speculative_tokens: int = 0
    adaptive: bool = False

    @property
    def label(self) -> str:
        """A short name, as ``plain``, ``ngram K=4`` or ``auto``."""
        if self.method == PLAIN or not self.num_speculative_tokens:
            return "plain"
        return self.method if self.adaptive else f"{self.method} K={self.num_speculative_tokens}"


PLAIN_WAY = Way()


@dataclass
class Segment:
    """A stretch of one lane: what it emitted in how many seconds, and the steps it took."""

    num_tokens: int = 0
    seconds: float = 0.0
    steps: list[StepStats] = field(default_factory=list)


class Lane:
    """An engine of its own, with a controller and drafters of its own, over a target and a cache that others use in turn.

    Args:
        llm: whose target, cache and tokenizer are used; it must have no requests of its own meanwhile.
        way: how to decode.
        drafters: by name, in place of those that ``way.method`` names.
        target, kv: in place of the LLM's.
        ids: numbers for sequences; lanes that share a cache share them.
    """

    def __init__(
        self,
        llm: LLM,
        way: Way,
        ids: Iterator[int],
        *,
        drafters: Mapping[str, Drafter] | None = None,
        target: Target | None = None,
        kv: KVCache | None = None,
        times: PassTimes | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.way, self.clock = way, clock
        self._llm, self._ids = llm, ids
        self._drafters = dict(llm.new_drafters(way.method, kv) if drafters is None else drafters)
        self.controller = Controller(times or llm.calibrate())
        self.engine = Engine(
            target or llm.target,
            kv or llm.kv,
            self._drafters,
            RULES["coupled"],
            self.controller,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            clock=clock,
        )
        self.seqs: list[Sequence] = []
        self.segments: list[Segment] = []
        self.seconds_to_begin = 0.0
        self._due = 0

    def begin(self, prompts: Seq[Seq[int]], params: Seq[SamplingParams], tenant: str = "") -> None:
        """Take a batch of prompts and step until each has its first token, or its end; the time of that is kept apart.

        Every one of ``params`` must have a seed.
        """
        self.seqs = [self._sequence(list(prompt), one, tenant) for prompt, one in zip(prompts, params, strict=True)]
        self.segments, self._due = [], 0
        start = self.clock()
        for seq in self.seqs:
            self.engine.add(seq)
        while any(not seq.num_output and seq.finish_reason is None for seq in self.seqs):
            self.engine.step()
        self.seconds_to_begin = self.clock() - start

    def recall(self, prompts: Seq[Seq[int]], answers: Seq[Seq[int]], tenant: str = "") -> None:
        """Show the drafters requests that were answered elsewhere, as if they had just ended here."""
        for prompt, answer in zip(prompts, answers, strict=True):
            seq = self._sequence(list(prompt), SamplingParams(seed=0), tenant)
            for name in seq.drafters:
                self._drafters[name].open(seq)
            seq.tokens.extend(answer)
            seq.finish_reason = "length"
            for name in seq.drafters:
                self._drafters[name].close(seq)

    def _sequence(self, prompt: list[int], params: SamplingParams, tenant: str) -> Sequence:
        assert params.seed is not None, params
        checkpoint, way = self._llm.checkpoint, self.way
        return Sequence(
            seq_id=next(self._ids),
            tokens=list(prompt),
            num_prompt=len(prompt),
            params=params,
            seed=params.seed,
            rules=TokenRules(checkpoint.eos_ids),
            sink=Detokenizer(checkpoint.tokenizer, prompt, stop=params.stop),
            tenant=tenant,
            drafters=tuple(self._drafters) if way.num_speculative_tokens else (),
            num_speculative_tokens=way.num_speculative_tokens,
            adaptive=way.adaptive,
        )

    @property
    def done(self) -> bool:
        """Whether all of the present batch have ended."""
        return all(seq.finish_reason is not None for seq in self.seqs)

    def run_segment(self, num_tokens: int) -> None:
        """Step until ``num_tokens`` more per sequence are due; what one segment emitted too much the next emits less."""
        segment = Segment()
        emitted = sum(one.num_tokens for one in self.segments)
        self._due += num_tokens * len(self.seqs)
        start = self.clock()
        while not self.done and emitted < self._due:
            self.engine.step()
            step = self.engine.metrics.last_step
            assert step is not None, "an engine with sequences did nothing"
            segment.steps.append(step)
            segment.num_tokens += step.num_emitted
            emitted += step.num_emitted
        segment.seconds = self.clock() - start
        self.segments.append(segment)

    def cancel(self) -> None:
        """End what has not ended."""
        for seq in self.seqs:
            self.engine.cancel(seq)

    # -------------------------------------------------------------------------------------------- what came of a batch

    @property
    def answers(self) -> list[list[int]]:
        """Token ids of each answer so far."""
        return [seq.tokens[seq.num_prompt :] for seq in self.seqs]

    @property
    def seconds(self) -> float:
        """Of all segments."""
        return sum(segment.seconds for segment in self.segments)

    @property
    def num_tokens(self) -> int:
        """Emitted in all segments."""
        return sum(segment.num_tokens for segment in self.segments)

    @property
    def steps(self) -> list[StepStats]:
        """Of all segments."""
        return [step for segment in self.segments for step in segment.steps]

    @property
    def speculation(self) -> SpeculationStats:
        """Of all sequences, the pass that emitted the first token included."""
        return SpeculationStats.merged(seq.stats for seq in self.seqs)

    def milliseconds(self) -> dict[str, float]:
        """By phase, summed over the steps of all segments."""
        steps = self.steps
        return {phase: sum(step.milliseconds[phase] for step in steps) for phase in PHASES}


class Race:
    """Lanes over one LLM.  Each keeps its engine from batch to batch, so that what it learns lasts."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.lanes: list[Lane] = []
        self._ids = count()

    def add(self, way: Way, drafters: Mapping[str, Drafter] | None = None) -> Lane:
        """One more lane."""
        lane = Lane(self.llm, way, self._ids, drafters=drafters)
        self.lanes.append(lane)
        return lane

    def warm_up(self, prompt: Seq[int], params: SamplingParams) -> SamplingParams:
        """One short request in each lane, which wakes threads and takes the memory that drafters need; what it asked for."""
        short = replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens))
        self.run([prompt], [short], tenant="warm-up")
        return short

    def run(
        self,
        prompts: Seq[Seq[int]],
        params: Seq[SamplingParams],
        segment_tokens: int = 16,
        turn: int = 0,
        tenant: str = "",
    ) -> None:
        """Answer the same prompts in all lanes, segment by segment, in an order that rotates.

        ``tenant``: whose earlier answers the drafters know; each lane has drafters of its own.

        Raises:
            ConfigError: the prompts and answers of all lanes do not fit into the cache together.
        """
        needed, free = blocks_needed(self.llm, len(self.lanes), prompts, params[0].max_tokens), self.llm.kv.num_available
        if needed > free:
            raise ConfigError(
                f"{len(self.lanes)} lanes of {len(prompts)} prompts may need {needed} cache blocks, but {free} are free; "
                "raise kv_cache_memory or lower max_tokens."
            )
        try:
            for lane in rotated(self.lanes, turn):
                lane.begin(prompts, params, tenant)
            while not all(lane.done for lane in self.lanes):
                for lane in rotated(self.lanes, turn):
                    if not lane.done:
                        lane.run_segment(segment_tokens)
                turn += 1
        finally:
            for lane in self.lanes:
                lane.cancel()


def blocks_needed(llm: LLM, num_lanes: int, prompts: Seq[Seq[int]], max_tokens: int) -> int:
    """Cache blocks that lanes may hold at the same time for the same prompts."""
    return num_lanes * sum(llm.kv.blocks_for(len(prompt) + max_tokens) for prompt in prompts)


def rotated(items: Seq[Lane], turn: int) -> list[Lane]:
    """The same items, beginning with another one each turn."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]


def seeded(params: SamplingParams, count_of: int) -> list[SamplingParams]:
    """One for each of a batch, with seeds that follow the first's."""
    assert params.seed is not None, params
    return [replace(params, seed=params.seed + index) for index in range(count_of)]
