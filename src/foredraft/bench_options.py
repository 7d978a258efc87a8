"""What a bench is asked for, checked before a model is loaded.

Owns: BenchOptions.  Does not know: how anything is measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from foredraft.config import MeasuredEngine, SpeculativeConfig
from foredraft.drafters import registry
from foredraft.lanes import PLAIN, Way
from foredraft.types import MAX_SPECULATIVE_TOKENS, ConfigError, refuse_unknown
from foredraft.workloads import CATEGORIES

WITHOUT_MODEL = (PLAIN, registry.AUTO, *registry.MODEL_FREE)
# Every lane has drafters of its own, and a bench makes few tokens that they could remember.
SUFFIX_BYTES = 4 * 1024 * 1024
LARGEST_BATCH = 64


@dataclass(frozen=True)
class BenchOptions(MeasuredEngine):
    """What to measure.

    ``methods`` are compared with plain decoding, which always runs.  ``categories`` None means all; ``limit`` keeps at most that
    many prompts of each.  ``dataset`` is a file for ``load_dataset`` and replaces the built-in prompts.  Repeat r samples with
    ``seed + r``.  ``k_sweep``: each K of it with each method, on the first prompt of each category; ``batch_sweep``: prompts of all
    categories that many at a time.  Either may be empty.  ``speculative_config`` holds further settings of the drafters, such as
    ``model`` for ``draft_model``.  For the rest see MeasuredEngine.

    Raises:
        ConfigError: an unknown name, or a value out of its range.
    """

    model: str
    methods: tuple[str, ...] = ("ngram", "suffix", registry.AUTO)
    num_speculative_tokens: int = 4
    max_tokens: int = 96
    categories: tuple[str, ...] | None = None
    repeats: int = 1
    temperature: float = 0.0
    seed: int = 0
    dataset: str | None = None
    limit: int | None = None
    k_sweep: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8)
    batch_sweep: tuple[int, ...] = (1, 2, 4, 8, 16)
    speculative_config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "methods", tuple(dict.fromkeys(method for method in self.methods if method != PLAIN)))
        put(self, "speculative_config", dict(self.speculative_config or {}))
        for name, low in (("num_speculative_tokens", 1), ("max_tokens", 2), ("repeats", 1), ("limit", 1), ("seed", 0)):
            value = getattr(self, name)
            if not (value is None and name == "limit") and (not isinstance(value, int) or value < low):
                raise ConfigError(f"{name} must be a whole number of at least {low}, not {value!r}; change {name}.")
        for name, low, high in (("k_sweep", 0, MAX_SPECULATIVE_TOKENS), ("batch_sweep", 1, LARGEST_BATCH)):
            values = getattr(self, name)
            if not all(isinstance(value, int) and low <= value <= high for value in values):
                raise ConfigError(f"{name} must hold whole numbers from {low} to {high}, not {values!r}; change {name}.")
            put(self, name, tuple(sorted(set(values))))
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature must be a finite number of at least 0, not {self.temperature!r}; change temperature.")
        if self.categories is not None and not self.categories:
            raise ConfigError("categories must name at least one category, not none; leave them out for all.")
        if self.dataset is None:
            for category in self.categories or ():
                refuse_unknown("category", category, CATEGORIES)
        self._check_methods()
        self.engine_config()

    def _check_methods(self) -> None:
        """Refuse here what would otherwise fail after the model is loaded."""
        for name, instead in (("method", "methods"), ("num_speculative_tokens", "num_speculative_tokens")):
            if name in (self.speculative_config or {}):
                raise ConfigError(f"a bench's speculative_config must not hold {name!r}; use the bench's own option {instead}.")
        config = self.engine_speculation()
        if config.rejection_sample_method != "coupled":
            raise ConfigError(
                "a bench compares answers token for token, which takes rejection_sample_method 'coupled', not "
                f"{config.rejection_sample_method!r}; leave it out."
            )
        for method in self.methods:
            registry.check(replace(config, method=method, model=None if method in WITHOUT_MODEL else config.model))
        registry.check(config)

    def engine_speculation(self) -> SpeculativeConfig:
        """What the engine is opened with: lanes have drafters of their own, but a draft model is loaded at the start."""
        named = next((method for method in self.methods if method not in WITHOUT_MODEL), PLAIN)
        method = registry.AUTO if named == PLAIN and registry.AUTO in self.methods else named
        options = {"method": method, "num_speculative_tokens": self.num_speculative_tokens}
        return SpeculativeConfig.parse({"suffix_decoding_max_bytes": SUFFIX_BYTES, **(self.speculative_config or {}), **options})

    def ways(self) -> list[Way]:
        """The methods as they are compared; ``auto`` may draft as much as it does when nothing is said."""
        most = max(self.num_speculative_tokens, SpeculativeConfig().num_speculative_tokens)
        return [
            Way(method, most, adaptive=True) if method == registry.AUTO else Way(method, self.num_speculative_tokens)
            for method in self.methods
        ]

    def swept_ways(self) -> list[Way]:
        """The methods with each K of the sweep, and ``auto``, which chooses its K itself, to compare them with."""
        fixed = [Way(method, k) for method in self.methods if method != registry.AUTO for k in self.k_sweep if k > 0]
        return [*fixed, *(way for way in self.ways() if way.adaptive)] if fixed else []
