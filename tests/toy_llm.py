"""A stand-in for LLM on a table target: all that lanes, rehearsals and experiments use of one.

Owns: ToyLLM.  Does not know: any single test.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from cli_helpers import ByteTokenizer
from foredraft.config import SpeculativeConfig
from foredraft.cost import PassTimes
from foredraft.drafters import registry
from foredraft.drafters.context import DrafterContext
from foredraft.llm import LLM
from foredraft.testing.toy import TableTarget
from foredraft.types import Drafter

TIMES = PassTimes((1, 2, 5, 9), (0.010, 0.010, 0.011, 0.020), 1e-6, 1e-7)


class SlowTarget(TableTarget):
    """A table target whose passes take a millisecond at least, so that times are never 0."""

    def forward(self, batch: Any, taps: tuple[int, ...] = ()) -> Any:
        output = super().forward(batch, taps)
        time.sleep(0.0005)
        return output


class ToyLLM:
    """A model of ``vocab_size`` letters.  ``eos_ids`` end an answer."""

    def __init__(
        self,
        *,
        num_blocks: int = 512,
        vocab_size: int = 8,
        eos_ids: Sequence[int] = (),
        max_model_len: int = 128,
        spread: float = 2.0,
    ) -> None:
        self.target = SlowTarget(num_blocks, vocab_size=vocab_size, max_model_len=max_model_len, spread=spread)
        self.target.weight_bytes = 10**9  # type: ignore[attr-defined]
        self.target.threads = 1  # type: ignore[attr-defined]
        self.target.exactness = "bitwise"  # type: ignore[attr-defined]
        self.kv = self.target.kv_cache(prefix_caching=False)
        self.max_model_len = max_model_len
        tokenizer = ByteTokenizer(has_chat_template=False)
        self.checkpoint = SimpleNamespace(eos_ids=frozenset(eos_ids), tokenizer=tokenizer, quantization="F32")
        self.options: Mapping[str, Any] = {}

    def open(self, model: str, **options: Any) -> ToyLLM:
        """In place of the class LLM."""
        self.options = {"model": model, **options}
        return self

    def describe(self) -> list[str]:
        return ["a table"]

    def calibrate(self) -> PassTimes:
        return TIMES

    def time_passes(self, max_rows: int, budget: float) -> PassTimes:
        return TIMES

    def new_drafters(self, method: str, kv: Any = None) -> dict[str, Drafter]:
        config = SpeculativeConfig(method=method, suffix_decoding_max_bytes=2**16)
        context = DrafterContext(self.target.vocab_size, self.max_model_len)
        return {name: registry.create(name, config, context) for name in registry.members(config)}


def toy_llm(**options: Any) -> LLM:
    """One that types say is an LLM."""
    return cast(LLM, ToyLLM(**options))
