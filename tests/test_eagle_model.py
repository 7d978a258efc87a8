"""A head on the demo model: with random weights nothing of the output changes, whatever asks for drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, SamplingParams
from foredraft.capacity import plan_memory
from foredraft.drafters.eagle import EagleDrafter
from foredraft.types import ConfigError
from head_files import HeadSpec

pytestmark = pytest.mark.model
SPEC = HeadSpec(hidden=576, target_hidden=576, vocab_size=49152, draft_vocab=1000, layer_ids=(2, 15, 27), max_positions=64)
TEXT = "red green blue yellow red green blue yellow red green"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = SPEC.write(tmp_path_factory.mktemp("head"))
    config = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3, "adaptive": False}
    yield LLM("smollm2-135m", speculative_config=config, max_model_len=128, kv_cache_memory=2**25)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.8, "seed": 3, "logprobs": 1},
        {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 6, "logit_bias": {28: 1.0}},
    ],
)
def test_a_random_head_changes_nothing(llm: LLM, params: dict[str, Any]) -> None:
    # The second prompt begins as the first, so it finds the head's keys of that in the cache.
    prompts = [TEXT, TEXT + " blue", "Once"]
    many = [SamplingParams(**{"max_tokens": 10, "seed": 5} | params) for _ in prompts]
    plain = [SamplingParams(**{"max_tokens": 10, "seed": 5} | params, speculative={"method": "none"}) for _ in prompts]
    for found, expected in zip(llm.generate(prompts, many), llm.generate(prompts, plain), strict=True):
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert found.outputs[0].logprobs == expected.outputs[0].logprobs
        assert found.metrics.speculation.drafted_tokens > 0 and expected.metrics.speculation.drafted_tokens == 0


def test_drafting_ends_at_the_heads_context(llm: LLM) -> None:
    prompt = llm.checkpoint.tokenizer.encode(TEXT * 6)[:58]
    params = {"max_tokens": 14, "temperature": 0.0, "ignore_eos": True}
    (found,) = llm.generate([prompt], SamplingParams(**params))
    (expected,) = llm.generate([prompt], SamplingParams(**params, speculative={"method": "none"}))
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    # Tokens 59 to 63 are drafted for; the head has positions up to 64.
    assert 0 < found.metrics.speculation.drafted_tokens <= 12


def test_each_engine_gets_keys_of_its_own_and_shares_the_weights(llm: LLM) -> None:
    first, second = (llm.new_drafters("eagle3")["eagle3"] for _ in range(2))
    assert isinstance(first, EagleDrafter) and isinstance(second, EagleDrafter)
    assert first._runner is not second._runner
    assert first._runner._weights is second._runner._weights  # type: ignore[attr-defined]


def test_memory_counts_the_head(llm: LLM) -> None:
    alone = plan_memory(llm.checkpoint, None, llm.config, llm.speculative_config)
    assert llm._parts.head_weights is not None
    # The plan rounds each matrix up to whole cache lines.
    assert 0 <= llm.memory.draft_weights - llm._parts.head_weights.num_bytes < 64 * 10
    assert alone.draft_weights == alone.draft_kv == 0
    per_token = 2 * 2 * 16 * 2 + 4 * 576 // 16
    assert llm.memory.draft_kv == llm.memory.num_tokens * per_token
    assert llm.memory.scratch > alone.scratch


def test_auto_finds_out_that_the_model_is_a_head(llm: LLM) -> None:
    model = llm.speculative_config.model
    assert model is not None
    auto = LLM("smollm2-135m", speculative_config={"method": "auto", "model": model}, max_model_len=128, kv_cache_memory=2**25)
    assert "eagle3" in auto.describe()[1]
    (found,) = auto.generate([TEXT], SamplingParams(max_tokens=8, temperature=0.0))
    (expected,) = llm.generate([TEXT], SamplingParams(max_tokens=8, temperature=0.0))
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "eagle"}, "is a head for method 'eagle3', not 'eagle'"),
        ({"method": "eagle3", "model": None}, "must have a model|must have a head"),
    ],
)
def test_a_wrong_head_is_an_error_before_the_first_token(llm: LLM, config: dict[str, Any], message: str) -> None:
    given = {"model": llm.speculative_config.model, "shipped": False} | config
    with pytest.raises(ConfigError, match=message):
        LLM("smollm2-135m", speculative_config={k: v for k, v in given.items() if v is not None}, max_model_len=128)


def test_a_head_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = HeadSpec().write(tmp_path)
    with pytest.raises(ConfigError, match="a head for a target of hidden size 64, but smollm2-135m has 576"):
        LLM("smollm2-135m", speculative_config={"method": "eagle3", "model": str(folder)}, max_model_len=128)
