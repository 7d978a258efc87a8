"""The nouns of the engine, the two protocols it is built on, and its exceptions.

Owns: what a request, a sequence, a draft, a verdict and a pass are.  Does not know: how any of them is computed.

Words (used everywhere in this sense): a *draft token* was proposed by a drafter; it is *accepted* when the target agrees;
a *recovered* token is the target's own at the first mismatch; a *bonus* token is the target's own after all drafts were
accepted; *emitted* tokens are what the request receives.  *Acceptance length* is emitted tokens per target pass.

Exceptions::

    ForedraftError(ValueError)      a user can mend it; the message says rule, value and next step
    ├── ConfigError                 an option of the engine or of speculation
    ├── RequestError                a prompt or a SamplingParams
    ├── ModelError                  a model that cannot be loaded
    │   ├── ModelNotFoundError      no such folder, file, hub id or alias
    │   ├── ModelFileError          truncated, corrupt, or the wrong checksum
    │   └── UnsupportedModelError   architecture, quantisation or vocabulary not supported
    └── CapacityError               not enough memory or disk
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]

MAX_SPECULATIVE_TOKENS = 64
MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 64


class ForedraftError(ValueError):
    """Base of every error that a user can mend."""


class ConfigError(ForedraftError):
    """An engine or speculation option is wrong."""


class RequestError(ForedraftError):
    """A prompt or its sampling parameters are wrong."""


class ModelError(ForedraftError):
    """A model cannot be loaded."""


class ModelNotFoundError(ModelError):
    """There is no such model."""


class ModelFileError(ModelError):
    """A model's file is broken."""


class UnsupportedModelError(ModelError):
    """A model's architecture, quantisation or vocabulary is not supported."""


class CapacityError(ForedraftError):
    """Memory or disk does not suffice."""


def refuse_unknown(kind: str, name: str, known: Iterable[str], error: type[ForedraftError] = ConfigError) -> None:
    """Raise ``error`` when ``name`` is not among ``known``, naming the nearest valid name."""
    names = sorted(known)
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of: {', '.join(names)}."
    raise error(f"unknown {kind} {name!r}; {hint}")


# ------------------------------------------------------------------------------------------------ requests


def _strings(value: str | Iterable[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.  Names, defaults and order of effect are vLLM's.

    ``temperature=0`` is greedy.  ``top_k=0`` (or -1) and ``top_p=1`` are off.  ``logprobs`` are those of the model's
    raw distribution, before penalties, bias and temperature.  ``speculative`` overrides the engine's
    ``speculative_config`` for this request; ``{"method": "none"}`` decodes plainly.

    Raises:
        RequestError: a value is outside its range; the message says the range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    speculative: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "stop", _strings(self.stop))
        put(self, "bad_words", _strings(self.bad_words))
        put(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        put(self, "logit_bias", {int(k): float(v) for k, v in (self.logit_bias or {}).items()})
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.top_k == -1:
            put(self, "top_k", 0)
        self._check_numbers()
        self._check_lists()

    def _check_numbers(self) -> None:
        self._require("n", 1 <= self.n <= 64, "from 1 to 64")
        self._require("temperature", 0.0 <= self.temperature < math.inf, "a finite number of at least 0")
        self._require("top_k", self.top_k >= 0, "at least 1, or 0 or -1 for off")
        self._require("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        self._require("min_p", 0.0 <= self.min_p <= 1.0, "from 0 to 1")
        self._require("repetition_penalty", 0.0 < self.repetition_penalty < math.inf, "a finite number above 0")
        self._require("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "from -2 to 2")
        self._require("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "from -2 to 2")
        self._require("seed", self.seed is None or 0 <= self.seed < 2**63, "from 0 to 2^63-1")
        self._require("max_tokens", self.max_tokens >= 1, "at least 1")
        self._require("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "from 0 to max_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            self._require(name, value is None or 0 <= value <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}")

    def _check_lists(self) -> None:
        for name in ("stop", "bad_words"):
            words = getattr(self, name)
            if len(words) > MAX_STOP_STRINGS:
                raise RequestError(f"{name} may hold at most {MAX_STOP_STRINGS} strings, not {len(words)}; shorten the list.")
            self._require(name, all(isinstance(w, str) and w for w in words), "a list of non-empty strings")
        for token, bias in self.logit_bias.items():
            if not (token >= 0 and math.isfinite(bias)):
                raise RequestError(f"logit_bias must map token ids to finite numbers, not {token}: {bias}; remove that entry.")
        self._require("allowed_token_ids", self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "a non-empty list")

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise RequestError(f"{name} must be {rule}, not {getattr(self, name)!r}; change {name}.")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Build from outside data; an unknown name is refused with the nearest valid one."""
        names = [f.name for f in fields(cls)]
        for name in options:
            refuse_unknown("sampling parameter", name, names, RequestError)
        try:
            return cls(**options)
        except (TypeError, AttributeError) as error:
            raise RequestError(f"a sampling parameter has the wrong type ({error}); see SamplingParams for the types.") from error


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
    The token at index ``t`` of ``tokens`` is drawn with noise keyed by (seed, t, token, sample_index).
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
    drafter: str = "none"
    num_speculative_tokens: int = 0
    num_computed: int = 0
    num_cached: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    origins: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=lambda: SpeculationStats())

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


@dataclass(frozen=True)
class Draft:
    """Proposed continuation of one sequence.

    ``probs``: what each token was drawn from; None means a deterministic draft.  ``parents``: None means a chain.
    ``score``: expected number of accepted tokens, if the drafter knows.
    """

    tokens: tuple[int, ...] = ()
    probs: tuple[Distribution, ...] | None = None
    parents: tuple[int, ...] | None = None
    score: float | None = None


@dataclass(frozen=True)
class Verdict:
    """What the target said: ``num_accepted`` draft tokens and then one recovered or bonus token.

    After the engine's commit, ``tokens`` is what was emitted, so it may be trimmed at a stop; a pass that only filled
    the cache has an empty verdict.
    """

    tokens: tuple[int, ...] = ()
    num_accepted: int = 0


class Drafter(Protocol):
    """A source of drafts.  See examples/own_drafter.py for a complete one.

    A sequence is opened when it starts (and again after a preemption), and closed when it ends (or is preempted).
    Between the two, ``propose`` and ``observe`` alternate; ``seq.tokens`` then holds committed tokens only.
    """

    hidden_layers: tuple[int, ...]

    def open(self, seq: Sequence) -> None:
        """Start to follow a sequence."""
        ...

    def propose(self, seqs: list[Sequence], num_tokens: list[int]) -> list[Draft]:
        """Draft at most ``num_tokens[i]`` (>= 1) tokens that continue ``seqs[i].tokens``."""
        ...

    def observe(self, seq: Sequence, verdict: Verdict, hidden: Tensor | None) -> None:
        """Learn the outcome; ``seq.tokens`` already holds ``verdict.tokens``.

        ``hidden``: [rows, len(hidden_layers) * hidden_size] states of the tokens that this pass computed and that
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

    ``hidden``: per entry [T, len(taps) * hidden_size], or None without taps.
    """

    logits: list[Tensor]
    hidden: list[Tensor] | None = None


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

    A batch's time is counted in full for each of its requests: it is the time that the request waited.
    """

    drafted_tokens: int = 0
    accepted_tokens: int = 0
    emitted_tokens: int = 0
    target_passes: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    milliseconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

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
