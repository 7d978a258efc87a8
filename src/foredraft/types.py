"""The nouns of the engine and the two protocols it is built on.

Owns: what a request, a sequence, a draft, a verdict and a pass are.  Does not know: how any of them is computed.

Words (used everywhere in this sense): a *draft token* was proposed by a drafter; it is *accepted* when the target agrees;
a *recovered* token is the target's own at the first mismatch; a *bonus* token is the target's own after all drafts were
accepted; *emitted* tokens are what the request receives.  *Acceptance length* is emitted tokens per target pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from foredraft.errors import CapacityError as CapacityError
from foredraft.errors import ConfigError as ConfigError
from foredraft.errors import ForedraftError as ForedraftError
from foredraft.errors import ModelError as ModelError
from foredraft.errors import ModelFileError as ModelFileError
from foredraft.errors import ModelNotFoundError as ModelNotFoundError
from foredraft.errors import RequestError as RequestError
from foredraft.errors import UnsupportedModelError as UnsupportedModelError
from foredraft.errors import refuse_unknown as refuse_unknown
from foredraft.params import MAX_LOGPROBS as MAX_LOGPROBS
from foredraft.params import MAX_STOP_STRINGS as MAX_STOP_STRINGS
from foredraft.params import SamplingParams as SamplingParams
from foredraft.structured import StructuredOutputs as StructuredOutputs

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

MAX_SPECULATIVE_TOKENS = 64

# ------------------------------------------------------------------------------------------------ requests


@dataclass(frozen=True)
class TokenRules:
    """What a request forbids or ends on, as token ids: the part of SamplingParams that needs a tokenizer or a model."""

    eos_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()


class TextSink(Protocol):
    """Turns emitted tokens into text and watches for stop strings; the engine only pushes ids into it."""

    def push(self, token: int, *, may_stop: bool) -> str | None:
        """Take one token; return the stop string that it completed, or None."""
        ...


class Grammar(Protocol):
    """What one sequence's output may be.

    It follows ``seq.tokens`` and any draft behind them by itself, and answers the same whatever was asked before.  Nothing here
    raises; ``error`` tells why no token is allowed, when that is for another reason than the tokens.
    """

    error: str

    def allowed(self, seq: Sequence, draft: Seq[int] = ()) -> BoolArray | None:
        """Which tokens may follow ``seq.tokens + draft``, bool [vocab_size]; None where these have come to an end before.

        An end-of-sequence id is among them where the output so far is a whole.
        """
        ...

    def num_allowed(self, seq: Sequence, draft: Seq[int]) -> int:
        """Length of the draft up to the first token that may not follow."""
        ...

    def forced(self, seq: Sequence, num_tokens: int) -> tuple[int, ...]:
        """The tokens that must follow, ``num_tokens`` at most; none where there is a choice, or an end."""
        ...

    def is_complete(self, seq: Sequence) -> bool:
        """Whether nothing but an end-of-sequence id may follow ``seq.tokens``."""
        ...


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token under the model's raw distribution, and its rank (1 = most likely).

    ``decoded_token`` is filled where text is known.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]


@dataclass(eq=False)
class Sequence:
    """One stream of tokens being continued.  Only the engine writes to it.

    ``num_computed`` tokens have their keys and values in the target's cache; a step computes the rest, plus a draft.
    The token at index ``t`` of ``tokens`` is drawn with noise keyed by (seed, t, token, sample_index).  ``drafters`` may be
    asked for drafts of at most ``num_speculative_tokens``; an ``adaptive`` sequence verifies as much of them as pays.
    ``num_cached`` tokens came from the prefix cache at the latest admission, ``num_prompt_cached`` at the first: after a preemption
    a request finds even its own answer there.
    """

    seq_id: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    sample_index: int = 0
    rules: TokenRules = field(default_factory=TokenRules)
    sink: TextSink | None = None
    tenant: str = ""
    drafters: tuple[str, ...] = ()
    num_speculative_tokens: int = 0
    adaptive: bool = False
    num_computed: int = 0
    num_cached: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    origins: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=lambda: SpeculationStats())
    last_drafter: str = "none"
    grammar: Grammar | None = None
    num_prompt_cached: int | None = None

    @property
    def num_output(self) -> int:
        """Tokens emitted so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Known tokens whose keys and values are not computed yet."""
        return len(self.tokens) - self.num_computed


# ------------------------------------------------------------------------------------------------ speculation


@dataclass(frozen=True)
class Distribution:
    """The one distribution of a row, on its support only.

    ``tokens``: int64 [S], ascending.  ``log_probs``: float64 [S], normalised.  Greedy is S = 1.
    """

    tokens: IntArray
    log_probs: FloatArray

    def dense(self, vocab_size: int) -> FloatArray:
        """Probabilities over the whole vocabulary, float64 [vocab_size]."""
        probs = np.zeros(vocab_size)
        probs[self.tokens] = np.exp(self.log_probs)
        return probs

    def probability(self, token: int) -> float:
        """Probability of one token."""
        index = int(np.searchsorted(self.tokens, token))
        inside = index < len(self.tokens) and self.tokens[index] == token
        return float(np.exp(self.log_probs[index])) if inside else 0.0


@dataclass(frozen=True)
class Draft:
    """Proposed continuation of one sequence.

    ``probs``: what each token was drawn from; None means a deterministic draft.  ``parents``: None means a chain.
    ``score``: expected number of accepted tokens, if the drafter knows.  ``confidence``: per token, the drafter's own belief
    that it is right given that those before it are; it need not be calibrated, but must not depend on how it turned out.
    """

    tokens: tuple[int, ...] = ()
    probs: tuple[Distribution, ...] | None = None
    parents: tuple[int, ...] | None = None
    score: float | None = None
    confidence: tuple[float, ...] | None = None

    def cut(self, length: int) -> Draft:
        """The first ``length`` tokens, and what is said of each; nearly always that is all of it."""
        if length == len(self.tokens):
            return self
        probs = None if self.probs is None else self.probs[:length]
        return Draft(self.tokens[:length], probs, confidence=None if self.confidence is None else self.confidence[:length])


@dataclass(frozen=True)
class Verdict:
    """What the target said: ``num_accepted`` draft tokens and then one recovered or bonus token.

    After the engine's commit, ``tokens`` is what was emitted, so it may be trimmed at a stop; a pass that only filled
    the cache has an empty verdict.
    """

    tokens: tuple[int, ...] = ()
    num_accepted: int = 0


def num_agreeing(draft: Iterable[int], emitted: Iterable[int]) -> int:
    """How many tokens a draft and what came begin with in common."""
    num = 0
    for token, came in zip(draft, emitted, strict=False):
        if token != came:
            break
        num += 1
    return num


class Drafter(Protocol):
    """A source of drafts.  See examples/own_drafter.py for a complete one.

    A sequence is opened when it starts (and again after a preemption), and closed when it ends (or is preempted).
    Between the two, ``observe`` follows every pass, whether or not ``propose`` was called before it; ``seq.tokens`` then holds
    committed tokens only.

    The first ``seq.num_cached`` tokens came from the target's prefix cache: no pass computed them, so their hidden states never
    come. The sequence has its cache blocks from before ``open`` until after ``close``.
    """

    hidden_layers: tuple[int, ...]

    def open(self, seq: Sequence) -> None:
        """Start to follow a sequence."""
        ...

    def propose(self, seqs: list[Sequence], num_tokens: list[int]) -> list[Draft]:
        """Draft at most ``num_tokens[i]`` (>= 1) tokens that continue ``seqs[i].tokens``."""
        ...

    def observe(self, seq: Sequence, verdict: Verdict, hidden: FloatArray | None) -> None:
        """Learn the outcome; ``seq.tokens`` already holds ``verdict.tokens``.

        ``verdict.num_accepted`` counts the tokens of this drafter's own last draft that came, whether they were verified, or
        another drafter's were, or none; 0 when there was no draft.

        ``hidden``: float32 [rows, len(hidden_layers) * hidden_size], states of the tokens that this pass computed and that
        stand, or None when ``hidden_layers`` is empty.
        """
        ...

    def close(self, seq: Sequence) -> None:
        """Forget a sequence."""
        ...


# ------------------------------------------------------------------------------------------------ the target pass


@dataclass(frozen=True)
class Rows:
    """One sequence's part of a target pass.

    ``tokens``: the T tokens to compute, at positions ``start .. start+T-1``; the cache already holds ``start`` tokens.
    ``num_logits``: logits are wanted for the last that many rows.  ``block_table``: cache blocks covering all positions.
    """

    tokens: Seq[int]
    start: int
    num_logits: int
    block_table: Seq[int]


@dataclass(frozen=True)
class PassOutput:
    """``logits``: float32, one [num_logits, vocab_size] per entry of the batch.

    ``hidden``: float32, per entry [T, len(taps) * hidden_size], or None without taps.
    """

    logits: list[FloatArray]
    hidden: list[FloatArray] | None = None


class Target(Protocol):
    """The model whose distribution the output follows."""

    vocab_size: int
    max_model_len: int

    def forward(self, batch: list[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        """Compute all rows in one pass: write their keys and values, return logits and tapped hidden states."""
        ...


# ------------------------------------------------------------------------------------------------ statistics

PHASES = ("schedule", "draft", "pass", "verify", "rest")


@dataclass
class SpeculationStats:
    """Counters of one request, or of a whole engine.  ``milliseconds`` are wall time by phase.

    A batch's time is counted in full for each of its requests: it is the time that the request waited.  ``plain_tokens`` are those
    that plain decoding would have given a request in the same time, by the estimates of the moment.
    """

    drafted_tokens: int = 0
    accepted_tokens: int = 0
    emitted_tokens: int = 0
    target_passes: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    milliseconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    plain_tokens: float = 0.0

    @property
    def speedup_estimate(self) -> float:
        """Emitted tokens over ``plain_tokens``; 1 before the first."""
        return self.emitted_tokens / self.plain_tokens if self.plain_tokens > 0.0 else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 when nothing was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per target pass, the bonus token included; 0 before the first."""
        return self.emitted_tokens / self.target_passes if self.target_passes else 0.0

    def count(self, num_drafted: int, num_accepted: int, num_emitted: int) -> None:
        """Add one verified pass; ``num_accepted`` and ``num_emitted`` are counted after trimming."""
        assert num_accepted <= num_drafted and num_accepted <= num_emitted, (num_drafted, num_accepted, num_emitted)
        self.target_passes += 1
        self.drafted_tokens += num_drafted
        self.accepted_tokens += num_accepted
        self.emitted_tokens += num_emitted
        for counts, num in ((self.drafted_per_position, num_drafted), (self.accepted_per_position, num_accepted)):
            counts.extend([0] * (num - len(counts)))
            for position in range(num):
                counts[position] += 1

    @classmethod
    def merged(cls, parts: Iterable[SpeculationStats]) -> SpeculationStats:
        """Sums over several; ``milliseconds`` are the largest of each phase, since the parts waited together."""
        total = cls()
        for part in parts:
            total.drafted_tokens += part.drafted_tokens
            total.accepted_tokens += part.accepted_tokens
            total.emitted_tokens += part.emitted_tokens
            total.target_passes += part.target_passes
            total.plain_tokens += part.plain_tokens
            for name in ("drafted_per_position", "accepted_per_position"):
                pairs = zip_longest(getattr(total, name), getattr(part, name), fillvalue=0)
                setattr(total, name, [a + b for a, b in pairs])
            for phase, milliseconds in part.milliseconds.items():
                total.milliseconds[phase] = max(total.milliseconds[phase], milliseconds)
        return total

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "emitted_tokens": self.emitted_tokens,
            "target_passes": self.target_passes,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_length": self.acceptance_length,
            "drafted_per_position": list(self.drafted_per_position),
            "accepted_per_position": list(self.accepted_per_position),
            "milliseconds": dict(self.milliseconds),
        }


@dataclass(frozen=True)
class StepStats:
    """One engine step: rows that the pass computed, sequences in it, drafts, emissions and milliseconds by phase."""

    num_seqs: int
    num_rows: int
    num_drafted: int
    num_accepted: int
    num_emitted: int
    milliseconds: Mapping[str, float]


Clock = Callable[[], float]
