"""foredraft: an LLM inference engine built around speculative decoding.

Owns: the public names, loaded when first used, so that ``import foredraft`` costs nothing.  Does not know: what is behind them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.config import EngineConfig, SpeculativeConfig
    from foredraft.llm import LLM
    from foredraft.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from foredraft.server.async_llm import AsyncLLM
    from foredraft.types import (
        CapacityError,
        ConfigError,
        Draft,
        Drafter,
        ForedraftError,
        ModelError,
        RequestError,
        SamplingParams,
        Sequence,
        SpeculationStats,
        StructuredOutputs,
        Verdict,
    )

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "foredraft.server.async_llm",
    "CapacityError": "foredraft.types",
    "CompletionOutput": "foredraft.outputs",
    "ConfigError": "foredraft.types",
    "Draft": "foredraft.types",
    "Drafter": "foredraft.types",
    "EngineConfig": "foredraft.config",
    "ForedraftError": "foredraft.types",
    "LLM": "foredraft.llm",
    "ModelError": "foredraft.types",
    "RequestError": "foredraft.types",
    "RequestMetrics": "foredraft.outputs",
    "RequestOutput": "foredraft.outputs",
    "SamplingParams": "foredraft.types",
    "Sequence": "foredraft.types",
    "SpeculationStats": "foredraft.types",
    "SpeculativeConfig": "foredraft.config",
    "StructuredOutputs": "foredraft.types",
    "Verdict": "foredraft.types",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "Draft",
    "Drafter",
    "EngineConfig",
    "ForedraftError",
    "ModelError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Sequence",
    "SpeculationStats",
    "SpeculativeConfig",
    "StructuredOutputs",
    "Verdict",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'foredraft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
