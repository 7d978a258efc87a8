"""What a way to decode is expected to take for answers that are already known, without running the model.

Owns: the prediction that stands beside each measurement.  Does not know: how it is measured, or what a cell is.

The whole engine runs, with its drafters, planner, scheduler and verification, on a target that repeats recorded tokens; only its
passes are not computed: the clock is set forward by what they are calibrated to take.  Under the coupled rule the tokens do not
depend on the drafts, so the same drafts are accepted as in earnest.  Nothing of a speculative run is used.

What the rehearsal cannot know is taken from the plain run alone: how much slower or faster than calibrated its passes were, and
how much longer its steps took beside the passes than the rehearsed ones, whose code has the caches to itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count

import numpy as np

from foredraft.cost import PassTimes, PassWork
from foredraft.kv_cache import KVCache
from foredraft.lanes import PLAIN_WAY, Lane, Way
from foredraft.llm import LLM
from foredraft.states import states_of
from foredraft.types import PHASES, Clock, Drafter, FloatArray, PassOutput, Rows, SamplingParams, SpeculationStats, StepStats

OTHER_PHASES = tuple(phase for phase in PHASES if phase != "pass")
# Low enough to leave no probability at any temperature, and finite, so that every sampling parameter can work on it.
NEVER = -1e6


class PresetClock:
    """A clock whose reading can be set forward or back by what something takes in place of what it took."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._offset = 0.0

    def __call__(self) -> float:
        """The reading, in seconds."""
        return self._clock() + self._offset

    def replace(self, since: float, seconds: float) -> None:
        """Pretend that ``seconds`` have passed since the reading ``since``."""
        self._offset += since + seconds - self()


class RecordedTarget:
    """A target whose likeliest token is always the recorded one.

    A sequence is known by its first block; the first rows that come for a block are compared with the streams' beginnings.
    ``states(stream, taps)`` are a stream's hidden states, which some drafters read; rows beyond its end get those of its last
    token.
    """

    def __init__(
        self,
        vocab_size: int,
        max_model_len: int,
        clock: PresetClock,
        seconds: Callable[[PassWork, int], float],
        states: Callable[[Seq[int], tuple[int, ...]], FloatArray],
    ) -> None:
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self._states, self._known_states = states, dict[int, FloatArray]()
        self._clock, self._seconds = clock, seconds
        self._waiting: list[Seq[int]] = []
        self._streams: dict[int, Seq[int]] = {}
        # Rows are used again: to fill a whole vocabulary for each would take longer than all else.
        self._rows = np.full((16, vocab_size), NEVER, np.float32)
        self._chosen: list[int] = []

    def expect(self, streams: Seq[Seq[int]]) -> None:
        """Prompt and answer, as ids, of each sequence that will come."""
        self._waiting, self._streams, self._known_states = list(streams), {}, {}

    def forward(self, batch: list[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        """Logits that choose the recorded tokens, after as many seconds as such a pass takes."""
        start = self._clock()
        logits = self._logits(batch)
        num_drafts = sum(max(0, rows.num_logits - 1) for rows in batch)
        work = PassWork(sum(len(rows.tokens) for rows in batch) - num_drafts, sum(rows.start for rows in batch))
        hidden = [self._hidden(rows, taps) for rows in batch] if taps else None
        self._clock.replace(start, self._seconds(work, num_drafts))
        return PassOutput(logits, hidden)

    def _hidden(self, rows: Rows, taps: tuple[int, ...]) -> FloatArray:
        block = rows.block_table[0]
        if rows.start == 0 or block not in self._known_states:
            self._known_states[block] = self._states(self._streams[block], taps)
        known = self._known_states[block]
        found: FloatArray = known[np.minimum(np.arange(rows.start, rows.start + len(rows.tokens)), len(known) - 1)]
        return found

    def _logits(self, batch: list[Rows]) -> list[FloatArray]:
        self._rows[range(len(self._chosen)), self._chosen] = NEVER
        self._chosen = []
        for rows in batch:
            stream, first = self._stream(rows), rows.start + len(rows.tokens) - rows.num_logits + 1
            # Behind the recorded end anything may come: no draft goes so far and is kept.
            known = [*stream[first : first + rows.num_logits], *[0] * rows.num_logits]
            self._chosen += known[: rows.num_logits]
        if len(self._chosen) > len(self._rows):
            self._rows = np.full((2 * len(self._chosen), self.vocab_size), NEVER, np.float32)
        self._rows[range(len(self._chosen)), self._chosen] = 0.0
        return np.split(self._rows[: len(self._chosen)], np.cumsum([rows.num_logits for rows in batch])[:-1])

    def _stream(self, rows: Rows) -> Seq[int]:
        block = rows.block_table[0]
        if rows.start == 0:
            known_tokens = list(rows.tokens[: len(rows.tokens) - max(0, rows.num_logits - 1)])
            known = [list(stream[: len(known_tokens)]) == known_tokens for stream in self._waiting]
            assert any(known), "a sequence came that was not expected"
            self._streams[block] = self._waiting.pop(known.index(True))
        return self._streams[block]


@dataclass(frozen=True)
class Rehearsed:
    """One batch: milliseconds by phase over all its steps from the first tokens on, those of the pass as calibrated."""

    milliseconds: Mapping[str, float]
    num_tokens: int
    num_steps: int
    speculation: SpeculationStats

    @property
    def seconds(self) -> float:
        """Of all phases."""
        return 1e-3 * sum(self.milliseconds.values())


@dataclass(frozen=True)
class Correction:
    """What a plain run says of itself: its passes over the calibrated ones, and its other phases over the rehearsed ones."""

    passes: float = 1.0
    others: float = 1.0

    @classmethod
    def between(cls, measured: Mapping[str, float], rehearsed: Mapping[str, float]) -> Correction:
        """From milliseconds by phase of the same plain batch; 1 where there are none."""
        measured_others, rehearsed_others = (sum(some[phase] for phase in OTHER_PHASES) for some in (measured, rehearsed))
        return cls(_quotient(measured["pass"], rehearsed["pass"]), _quotient(measured_others, rehearsed_others))

    def seconds(self, rehearsed: Rehearsed) -> float:
        """The prediction."""
        others = sum(rehearsed.milliseconds[phase] for phase in OTHER_PHASES)
        return 1e-3 * (self.passes * rehearsed.milliseconds["pass"] + self.others * others)


def _quotient(one: float, other: float) -> float:
    return one / other if one > 0.0 and other > 0.0 else 1.0


class Rehearsal:
    """A way to decode, rehearsed batch after batch: like a lane, it learns as it goes.

    ``times`` are what its passes take; they may be changed from batch to batch.
    """

    def __init__(
        self,
        llm: LLM,
        way: Way = PLAIN_WAY,
        drafters: Mapping[str, Drafter] | None = None,
        times: PassTimes | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.times = times or llm.calibrate()
        preset = PresetClock(clock)
        # Nothing is stored in these blocks, so there may be as many as in earnest.
        kv = KVCache(llm.kv.num_blocks, llm.kv.block_size, prefix_caching=False)

        def states(stream: Seq[int], taps: tuple[int, ...]) -> FloatArray:
            """Computed once more by the model itself; no pass reads the last token."""
            return states_of(llm.target, llm.kv, stream[:-1], taps, llm.config.max_num_batched_tokens)

        def seconds(work: PassWork, num_drafts: int) -> float:
            return self.times.seconds(work, num_drafts)

        self._target = RecordedTarget(llm.target.vocab_size, llm.max_model_len, preset, seconds, states)
        self._lane = Lane(llm, way, count(), drafters=drafters, target=self._target, kv=kv, times=self.times, clock=preset)

    def play(
        self, prompts: Seq[Seq[int]], params: Seq[SamplingParams], answers: Seq[Seq[int]], tenant: str = ""
    ) -> tuple[Rehearsed, list[StepStats]]:
        """Decode the recorded answers.  Returns what it took, and the steps from the first tokens on."""
        lane = self._lane
        self._target.expect([[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)])
        try:
            lane.begin(prompts, params, tenant)
            if not lane.done:
                lane.run_segment(max(one.max_tokens for one in params))
        finally:
            lane.cancel()
        assert lane.answers == [list(answer) for answer in answers], "the rehearsal departed from the record"
        return Rehearsed(lane.milliseconds(), lane.num_tokens, len(lane.steps), lane.speculation), lane.steps

    def recall(self, prompts: Seq[Seq[int]], answers: Seq[Seq[int]], tenant: str = "") -> None:
        """See Lane.recall."""
        self._lane.recall(prompts, answers, tenant)
