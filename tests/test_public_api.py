"""What others build on: names, fields and defaults that must not change unnoticed.

A failure here is no mistake by itself: change the table together with CHANGELOG.md.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft import LLM, CompletionOutput, EngineConfig, RequestOutput, SamplingParams, SpeculativeConfig, StructuredOutputs

NAMES = {
    "AsyncLLM",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "Draft",
    "Drafter",
    "EngineConfig",
    "ForedraftError",
    "LLM",
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
}
REQUIRED = "required"
FIELDS: dict[type[Any], dict[str, Any]] = {
    SamplingParams: {
        "n": 1,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop": (),
        "stop_token_ids": (),
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "logit_bias": {},
        "allowed_token_ids": None,
        "bad_words": (),
        "logprobs": None,
        "prompt_logprobs": None,
        "skip_special_tokens": True,
        "speculative": None,
        "structured_outputs": None,
    },
    StructuredOutputs: {"json": None, "regex": None, "choice": None, "grammar": None, "json_object": None},
    EngineConfig: {
        "device": "auto",
        "dtype": "auto",
        "ops": "auto",
        "seed": None,
        "max_model_len": None,
        "kv_cache_memory": None,
        "threads": None,
        "block_size": 16,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": True,
    },
    SpeculativeConfig: {
        "method": "auto",
        "model": None,
        "num_speculative_tokens": 8,
        "rejection_sample_method": "coupled",
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 2,
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_cached_requests": 10_000,
        "suffix_decoding_max_spec_factor": 8.0,
        "suffix_decoding_min_token_prob": 0.05,
        "suffix_decoding_max_bytes": 64 * 2**20,
        "suffix_decoding_base": None,
        "adaptive": True,
        "shipped": True,
    },
    CompletionOutput: {
        "index": REQUIRED,
        "text": REQUIRED,
        "token_ids": REQUIRED,
        "cumulative_logprob": None,
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
        "origins": [],
        "drafter": "none",
        "num_drafted": 0,
    },
    RequestOutput: {
        "request_id": REQUIRED,
        "prompt": REQUIRED,
        "prompt_token_ids": REQUIRED,
        "outputs": REQUIRED,
        "finished": REQUIRED,
        "seed": REQUIRED,
        "metrics": REQUIRED,
        "prompt_logprobs": None,
        "num_cached_tokens": 0,
    },
}
METHODS = {
    "generate": ["prompts", "sampling_params"],
    "chat": ["conversations", "sampling_params"],
    "chat_prompt": ["conversation"],
    "stream": ["prompts", "sampling_params"],
    "submit": ["prompt", "sampling_params", "tenant"],
    "step": [],
    "take": ["request"],
    "abort": ["request"],
    "describe": [],
    "calibrate": [],
    "time_passes": ["max_rows", "budget"],
    "new_drafters": ["method", "kv"],
}


def test_a_public_name_comes_or_goes() -> None:
    assert set(foredraft.__all__) == NAMES and len(foredraft.__all__) == len(NAMES)
    assert dir(foredraft) == sorted({*NAMES, "__version__"})
    for name in NAMES:
        assert getattr(foredraft, name).__name__ == name
        assert getattr(foredraft, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        foredraft.Engine  # noqa: B018


def test_the_list_of_names_is_not_sorted_as_ruff_sorts_it() -> None:
    """Constants, then classes, then the rest; so LLM stands before AsyncLLM."""
    assert foredraft.__all__ == sorted(NAMES, key=lambda name: (not name.isupper(), name))


def test_importing_the_package_loads_the_engine() -> None:
    code = "import sys, foredraft; print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout == "[]\n"


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_a_field_or_a_default_changes(kind: type[Any]) -> None:
    found = {}
    for field in dataclasses.fields(kind):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        found[field.name] = REQUIRED if default is dataclasses.MISSING else default
    assert list(found) == list(FIELDS[kind]), "the order of positional fields"
    assert found == FIELDS[kind]
    assert all(type(found[name]) is type(value) for name, value in FIELDS[kind].items()), "1 is not True or 1.0"
    assert kind.__dataclass_params__.frozen


def test_a_method_of_llm_comes_or_goes() -> None:
    methods = {name: method for name, method in inspect.getmembers(LLM, inspect.isfunction) if not name.startswith("_")}
    assert {name: list(inspect.signature(method).parameters)[1:] for name, method in methods.items()} == METHODS
    constructor = inspect.signature(LLM).parameters
    assert list(constructor) == ["model", "speculative_config", "drafters", "progress", "trace", "also", "options"]
    assert all(parameter.kind is not parameter.POSITIONAL_OR_KEYWORD for name, parameter in constructor.items() if name != "model")


def test_the_version_is_not_the_distributions() -> None:
    project = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^version = "(.*)"$', project, re.MULTILINE) == [foredraft.__version__]
