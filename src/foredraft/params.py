"""How one request is sampled, checked where it is made.

Owns: SamplingParams, its names and ranges.  Does not know: the model, so token ids are only checked to be ids.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from foredraft.errors import RequestError, refuse_unknown, shown
from foredraft.structured import StructuredOutputs as StructuredOutputs

MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 64
MAX_LOGIT_BIAS = 1e6


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    """A finite real number; an integer that no float can hold is none."""
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        return False
    return bool(-sys.float_info.max <= value <= sys.float_info.max)


def _as_tuple(value: Any) -> Any:
    """Lists as tuples; whatever cannot be one is left for the check that follows."""
    return tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else value


def _token_bias(entries: Any) -> dict[int, float]:
    if not isinstance(entries, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers from -1e6 to 1e6, not {shown(entries)}; change logit_bias.")
    bias = {}
    for token, value in entries.items():
        # JSON has string keys only; more digits than ten are no token id of any model.
        index = int(token) if isinstance(token, str) and token.isdecimal() and len(token) <= 10 else token
        if not (_is_int(index) and index >= 0 and _is_number(value) and abs(value) <= MAX_LOGIT_BIAS):
            raise RequestError(
                f"logit_bias must map token ids to numbers from -1e6 to 1e6, not {shown(token)}: {shown(value)}; remove that entry."
            )
        bias[int(index)] = float(value)
    return bias


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.  Names, defaults and order of effect are vLLM's.

    ``temperature=0`` is greedy.  ``top_k=0`` (or -1) and ``top_p=1`` are off.  ``logprobs`` are those of the model's
    raw distribution, before penalties, bias and temperature.  ``speculative`` overrides the engine's
    ``speculative_config`` for this request; ``{"method": "none"}`` decodes plainly.  ``structured_outputs`` says what shape the
    answer must have; a mapping of its fields serves as well.

    Raises:
        RequestError: a value is outside its range or of a wrong type; the message says the range.
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
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ("stop", "bad_words"):
            words = getattr(self, name)
            put(self, name, () if words is None else (words,) if isinstance(words, str) else _as_tuple(words))
        put(self, "stop_token_ids", _as_tuple(() if self.stop_token_ids is None else self.stop_token_ids))
        put(self, "logit_bias", _token_bias({} if self.logit_bias is None else self.logit_bias))
        put(self, "allowed_token_ids", _as_tuple(self.allowed_token_ids))
        self._check_numbers()
        self._check_lists()
        if self.top_k == -1:
            put(self, "top_k", 0)
        if self.structured_outputs is not None:
            put(self, "structured_outputs", StructuredOutputs.parse(self.structured_outputs))
            # Where the shape is complete there is nothing to go on with.
            self._require("ignore_eos", not self.ignore_eos, "false with structured_outputs")

    def _check_numbers(self) -> None:
        self._require_int("n", 1, 64, "a whole number from 1 to 64")
        self._require_int("top_k", -1, math.inf, "a whole number of at least 1, or 0 or -1 for off")
        self._require_int("max_tokens", 1, math.inf, "a whole number of at least 1")
        self._require_int("min_tokens", 0, self.max_tokens, "a whole number from 0 to max_tokens")
        for name, high in (("seed", 2**63 - 1), ("logprobs", MAX_LOGPROBS), ("prompt_logprobs", MAX_LOGPROBS)):
            if getattr(self, name) is not None:
                self._require_int(name, 0, high, "a whole number from 0 to " + ("2^63-1" if name == "seed" else str(high)))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            self._require(name, _is_number(getattr(self, name)), "a finite number")
        self._require("temperature", self.temperature >= 0.0, "a finite number of at least 0")
        self._require("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        self._require("min_p", 0.0 <= self.min_p <= 1.0, "from 0 to 1")
        self._require("repetition_penalty", 0.01 <= self.repetition_penalty <= 100.0, "from 0.01 to 100")
        self._require("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "from -2 to 2")
        self._require("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "from -2 to 2")

    def _check_lists(self) -> None:
        for name in ("stop", "bad_words"):
            words = getattr(self, name)
            rule = "a list of non-empty strings"
            self._require(name, isinstance(words, tuple) and all(isinstance(word, str) and word for word in words), rule)
            if len(words) > MAX_STOP_STRINGS:
                raise RequestError(f"{name} may hold at most {MAX_STOP_STRINGS} strings, not {len(words)}; shorten the list.")
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            holds = isinstance(ids, tuple) and all(_is_int(token) and token >= 0 for token in ids)
            self._require(name, ids is None or holds, "a list of token ids")
        self._require("allowed_token_ids", self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "a non-empty list")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            self._require(name, isinstance(getattr(self, name), bool), "true or false")
        self._require("speculative", self.speculative is None or isinstance(self.speculative, Mapping), "an object")

    def _require_int(self, name: str, low: int, high: float, rule: str) -> None:
        value = getattr(self, name)
        self._require(name, _is_int(value) and low <= value <= high, rule)

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise RequestError(f"{name} must be {rule}, not {shown(getattr(self, name))}; change {name}.")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Build from outside data; an unknown name is refused with the nearest valid one."""
        names = [f.name for f in fields(cls)]
        for name in options:
            refuse_unknown("sampling parameter", name, names, RequestError)
        return cls(**options)
