"""A world without a model, in which a controller plays against known costs and acceptance, on a clock that only counts.

Owns: the costs, the draws of what is accepted, and what other policies reach.  Does not know: how a controller decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from foredraft.controller import Controller
from foredraft.cost import PassTimes, PassWork
from foredraft.types import Draft, SamplingParams, Sequence

CONTEXT = 200
# The text is one token again and again, so a draft is right where it has that token.
RIGHT, WRONG = 1, 0


@dataclass(frozen=True)
class Source:
    """A drafter: seconds of a call, and the probability that each token is right.

    ``seconds(num_seqs, depth)``.  ``acceptance(length, seq_id)`` at a length of the text; ``confidence`` reports it as the
    drafter's own belief, and ``None`` drafts mean that the drafter has nothing to say there.
    """

    acceptance: Callable[[int, int], float]
    seconds: Callable[[int, int], float] = lambda num_seqs, depth: 2e-5 * num_seqs
    confident: bool = False
    presence: float = 1.0


@dataclass
class World:
    """``noise``: standard deviation of the logarithm of a pass's time; ``outliers``: share of passes that take five times it."""

    times: PassTimes
    sources: dict[str, Source]
    num_seqs: int = 1
    max_drafts: int = 8
    noise: float = 0.0
    outliers: float = 0.0
    speed: Callable[[float], float] = lambda now: 1.0
    per_token: float = 1e-4
    per_step: float = 1e-4
    own_seconds: float = 2e-5
    seed: int = 0
    now: float = 0.0
    num_emitted: int = 0
    num_drafted: int = 0
    history: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        # By place in the text, so that policies that draft at other places meet the same luck.
        luck = random.Random(self.seed)
        self.luck = {
            id(source): [[luck.random() for _ in range(20_000)] for _ in range(self.num_seqs)] for source in self.sources.values()
        }
        names = tuple(self.sources)
        params = SamplingParams(max_tokens=10**9)
        self.seqs = [
            Sequence(
                i, [RIGHT] * CONTEXT, CONTEXT, params, 0, drafters=names, num_speculative_tokens=self.max_drafts, adaptive=True
            )
            for i in range(self.num_seqs)
        ]
        self.lengths = [CONTEXT] * self.num_seqs

    def draft(self, source: Source, index: int, num_tokens: int) -> Draft:
        if self.random.random() >= source.presence:
            return Draft()
        probability, first = source.acceptance(self.lengths[index], index), self.lengths[index]
        luck = self.luck[id(source)][index][first : first + num_tokens]
        tokens = tuple(RIGHT if one < probability else WRONG for one in luck)
        return Draft(tokens, confidence=(probability,) * num_tokens if source.confident else None)

    def work(self) -> PassWork:
        return PassWork(self.num_seqs, CONTEXT * self.num_seqs)

    def pass_seconds(self, num_drafts: int) -> float:
        seconds = self.times.seconds(self.work(), num_drafts) * self.speed(self.now)
        if self.noise:
            seconds *= self.random.lognormvariate(0.0, self.noise)
        return seconds * (5.0 if self.random.random() < self.outliers else 1.0)

    def finish_step(self, drafts: list[Draft], counts: list[int], draft_seconds: float) -> tuple[list[list[int]], dict[str, float]]:
        emitted = []
        for i, (draft, count) in enumerate(zip(drafts, counts, strict=True)):
            num_right = next((j for j in range(count) if draft.tokens[j] != RIGHT), count)
            emitted.append([RIGHT] * (num_right + 1))
            self.lengths[i] += num_right + 1
        num_emitted = sum(map(len, emitted))
        phases = {
            "schedule": self.per_step / 2,
            "draft": draft_seconds,
            "pass": self.pass_seconds(sum(counts)),
            "verify": self.per_token * num_emitted,
            "rest": self.per_step / 2,
        }
        self.now += sum(phases.values())
        self.num_emitted += num_emitted
        self.num_drafted += sum(counts)
        self.history.append(sum(counts))
        return emitted, {name: 1e3 * seconds for name, seconds in phases.items()}

    def play(self, controller: Controller, num_steps: int) -> float:
        """Tokens per second with ``controller``."""
        for _ in range(num_steps):
            plan = controller.plan(self.seqs, [self.max_drafts] * self.num_seqs, self.work(), 10_000)
            heard: dict[tuple[int, str], Draft] = {}
            seconds = 0.0
            for ask in plan.asks():
                source = self.sources[ask.drafter]
                drafts = [self.draft(source, i, num) for i, num in zip(ask.slots, ask.num_tokens, strict=True)]
                heard |= {(i, ask.drafter): draft for i, draft in zip(ask.slots, drafts, strict=True)}
                asked = source.seconds(len(ask.slots), max(ask.num_tokens))
                plan.hear(ask, drafts, asked)
                seconds += asked + self.own_seconds
            chosen = plan.choose()
            counts = [count for _, count in chosen]
            drafts = [heard[i, name] if count else Draft() for i, (name, count) in enumerate(chosen)]
            emitted, milliseconds = self.finish_step(drafts, counts, seconds)
            plan.learn(counts, emitted, milliseconds)
        return self.num_emitted / self.now

    def play_fixed(self, name: str | None, num_drafts: int, num_steps: int) -> float:
        """Tokens per second when every request drafts ``num_drafts`` tokens with one drafter in every step; None is plain."""
        for _ in range(num_steps):
            drafts, counts, seconds = [Draft()] * self.num_seqs, [0] * self.num_seqs, 0.0
            if name is not None and num_drafts:
                source = self.sources[name]
                drafts = [self.draft(source, i, num_drafts) for i in range(self.num_seqs)]
                counts = [len(draft.tokens) for draft in drafts]
                seconds = source.seconds(self.num_seqs, num_drafts)
            self.finish_step(drafts, counts, seconds)
        return self.num_emitted / self.now
