"""Frozen configurations, checked where they are made.

Owns: the names, defaults and ranges of engine and speculation options.  Does not know: which of the optional parts are installed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from foredraft.types import MAX_SPECULATIVE_TOKENS, ConfigError, refuse_unknown

RULES = ("coupled", "rejection", "block")
DEVICES = ("auto", "cpu", "cuda")
OPS = ("auto", "native", "torch")
DTYPES = ("auto", "float32", "bfloat16", "float16")
# Far more than any machine has, and few enough that starting them does not crash the process.
MAX_THREADS = 1024


def _require(name: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{name} must be {rule}, not {value!r}; change {name}.")


def _is_int(value: object, low: int, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are made and verified.  Names are vLLM's where vLLM has one.

    ``method`` ``auto`` lets ngram, suffix and, where ``model`` names one, a draft model or head compete; ``none`` decodes plainly.
    ``num_speculative_tokens`` is K; 0 decodes plainly.  With ``adaptive`` it is the most that is drafted, and as much of a draft
    is verified as pays, often none; without, every draft is verified whole.
    ``model`` is the draft model of ``draft_model``, or the head of ``eagle`` and ``eagle3``.
    ``shipped`` lets drafters use what comes with foredraft for their target, where nothing else is named.
    ``rejection_sample_method``: ``coupled`` gives the same tokens as plain decoding with the same seed; ``rejection``
    (Leviathan et al., 2211.17192) and ``block`` (Sun et al., 2403.10444) give the same distribution.
    ``suffix_decoding_max_bytes`` limits the statistics that are shared between requests of one tenant or all;
    ``suffix_decoding_base`` is a file that ``foredraft train suffix`` made, with statistics of the target's own texts.

    Raises:
        ConfigError: an unknown name, or a value out of its range.
    """

    method: str = "auto"
    model: str | None = None
    num_speculative_tokens: int = 8
    rejection_sample_method: str = "coupled"
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 2
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 8.0
    suffix_decoding_min_token_prob: float = 0.05
    suffix_decoding_max_bytes: int = 64 * 1024 * 1024
    suffix_decoding_base: str | None = None
    adaptive: bool = True
    shipped: bool = True

    def __post_init__(self) -> None:
        _require("method", self.method, isinstance(self.method, str) and bool(self.method), "the name of a drafter")
        _require("model", self.model, self.model is None or isinstance(self.model, str), "a model's name or path")
        _require("adaptive", self.adaptive, isinstance(self.adaptive, bool), "true or false")
        _require("shipped", self.shipped, isinstance(self.shipped, bool), "true or false")
        k = self.num_speculative_tokens
        _require("num_speculative_tokens", k, _is_int(k, 0, MAX_SPECULATIVE_TOKENS), f"from 0 to {MAX_SPECULATIVE_TOKENS}")
        refuse_unknown("rejection_sample_method", str(self.rejection_sample_method), RULES)
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        _require("prompt_lookup_min", low, _is_int(low, 1), "at least 1")
        _require("prompt_lookup_max", high, _is_int(high, low, 64), f"from prompt_lookup_min ({low}) to 64")
        self._check_suffix()

    def _check_suffix(self) -> None:
        for name, low in (("max_tree_depth", 1), ("max_cached_requests", 0), ("max_bytes", 0)):
            value = getattr(self, f"suffix_decoding_{name}")
            _require(f"suffix_decoding_{name}", value, _is_int(value, low), f"a whole number of at least {low}")
        base = self.suffix_decoding_base
        _require("suffix_decoding_base", base, base is None or (isinstance(base, str) and bool(base)), "the path of a file")
        factor, prob = self.suffix_decoding_max_spec_factor, self.suffix_decoding_min_token_prob
        _require("suffix_decoding_max_spec_factor", factor, _is_number(factor, 0.0, 64.0), "from 0 to 64")
        _require("suffix_decoding_min_token_prob", prob, _is_number(prob, 0.0, 1.0), "from 0 to 1")

    @classmethod
    def parse(cls, options: SpeculativeConfig | Mapping[str, Any] | str | None) -> SpeculativeConfig:
        """From a config, a mapping, JSON text, or None for the default, ``auto``."""
        if isinstance(options, cls):
            return options
        if isinstance(options, str):
            try:
                options = json.loads(options)
            except (ValueError, RecursionError) as error:  # also a number of too many digits, and brackets nested too deep
                raise ConfigError(
                    f'speculative_config is not valid JSON ({error}); write it like {{"method": "ngram"}}.'
                ) from error
        if options is None:
            return cls()
        if not isinstance(options, Mapping):
            raise ConfigError(f'speculative_config must be a JSON object, not {options!r}; write it like {{"method": "ngram"}}.')
        return cls(**_known(cls, "speculative_config key", options))

    def override(self, options: Mapping[str, Any] | None) -> SpeculativeConfig:
        """This config with a request's own keys: ``method``, ``num_speculative_tokens`` and ``adaptive``."""
        if options is None:
            return self
        if not isinstance(options, Mapping):
            raise ConfigError(
                f'a request\'s speculative override must be an object, not {options!r}; write it like {{"method": "none"}}.'
            )
        for name in options:
            refuse_unknown("key in a request's speculative override", name, ("method", "num_speculative_tokens", "adaptive"))
        merged = {f.name: getattr(self, f.name) for f in fields(self)} | dict(options)
        return type(self)(**merged)


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine.  ``kv_cache_memory`` in bytes, None for a default; ``max_model_len`` None for the model's own.

    ``dtype`` auto keeps the weights in the file's own format with native ops, and is float32 (bfloat16 on CUDA) with torch ops.

    Raises:
        ConfigError: an unknown name, or a value out of its range.
    """

    device: str = "auto"
    dtype: str = "auto"
    ops: str = "auto"
    seed: int | None = None
    max_model_len: int | None = None
    kv_cache_memory: int | None = None
    threads: int | None = None
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        refuse_unknown("device", str(self.device), DEVICES)
        refuse_unknown("dtype", str(self.dtype), DTYPES)
        refuse_unknown("ops", str(self.ops), OPS)
        _require("seed", self.seed, self.seed is None or _is_int(self.seed, 0, 2**63 - 1), "from 0 to 2^63-1")
        # A context holds one token of the prompt and one of the answer.
        for name, low in (("max_model_len", 2), ("kv_cache_memory", 1)):
            value = getattr(self, name)
            _require(name, value, value is None or _is_int(value, low), f"a whole number of at least {low}")
        num = self.threads
        _require("threads", num, num is None or _is_int(num, 1, MAX_THREADS), f"a whole number from 1 to {MAX_THREADS}")
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            _require(name, getattr(self, name), _is_int(getattr(self, name), 1), "a whole number of at least 1")
        _require("enable_prefix_caching", self.enable_prefix_caching, isinstance(self.enable_prefix_caching, bool), "true or false")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs}), "
                "so that every running request gets a row; raise the first or lower the second."
            )

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> EngineConfig:
        """From keyword options; an unknown name is refused with the nearest valid one."""
        return cls(**_known(cls, "engine option", options))


@dataclass(frozen=True, kw_only=True)
class MeasuredEngine:
    """What a measurement lets its user choose of the engine: the fields of EngineConfig of these names."""

    device: str = "auto"
    dtype: str = "auto"
    ops: str = "auto"
    threads: int | None = None
    max_model_len: int | None = None
    kv_cache_memory: int | None = None

    def engine_config(self) -> EngineConfig:
        """The engine's sizes; a cached prefix would make a prompt's second run unlike its first.

        Raises:
            ConfigError: an unknown name, or a value out of its range.
        """
        return EngineConfig(enable_prefix_caching=False, **{f.name: getattr(self, f.name) for f in fields(MeasuredEngine)})


def _known(cls: type, kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    names = [f.name for f in fields(cls)]
    for name in options:
        refuse_unknown(kind, name, names)
    return dict(options)
