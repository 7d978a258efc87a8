"""Random requests and long answers on the demo model with native ops: equality is absolute, log-probabilities included.

The matrix of named cases is in test_exactness.py and test_exactness_shapes.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft import LLM, RequestOutput, SamplingParams
from model_helpers import PROMPTS

pytestmark = pytest.mark.model

PLAIN = {"method": "none"}
METHODS = ("ngram", "suffix", "draft_model")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    config = {"method": "draft_model", "model": "smollm2-135m", "num_speculative_tokens": 3, "adaptive": False}
    model = LLM("smollm2-135m", speculative_config=config, device="cpu", threads=2, max_model_len=768, kv_cache_memory=60_000_000)
    assert model.target.exactness == "bitwise"
    yield model


@pytest.fixture(scope="module")
def cramped() -> Iterator[LLM]:
    """Odd blocks, one thread, short chunks, few blocks: preemption and eviction are the rule."""
    yield LLM(
        "smollm2-135m",
        speculative_config={"method": "suffix", "num_speculative_tokens": 6, "adaptive": False},
        device="cpu",
        threads=1,
        block_size=5,
        max_model_len=200,
        kv_cache_memory=5_700_000,
        max_num_batched_tokens=23,
        max_num_seqs=6,
    )


def seen(output: RequestOutput) -> list[tuple[Any, ...]]:
    """Everything that speculation must not change."""
    return [(o.token_ids, o.text, o.finish_reason, o.stop_reason, o.logprobs, o.cumulative_logprob) for o in output.outputs] + [
        (output.prompt_logprobs, output.usage)
    ]


def replaced(params: SamplingParams, **changes: Any) -> SamplingParams:
    return dataclasses.replace(params, **changes)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    options = {
        "top_k": st.sampled_from([1, 5, 40]),
        "top_p": st.sampled_from([0.3, 0.9, 0.999]),
        "min_p": st.sampled_from([0.02, 0.2]),
        "repetition_penalty": st.sampled_from([0.8, 1.1, 1.5]),
        "presence_penalty": st.sampled_from([-0.5, 0.7]),
        "frequency_penalty": st.sampled_from([-0.2, 0.4]),
        "logit_bias": st.dictionaries(st.integers(0, 49151), st.sampled_from([-100.0, -2.0, 3.0]), min_size=1, max_size=4),
        "bad_words": st.lists(st.sampled_from(["the", "is", ", ", "a b"]), min_size=1, max_size=2),
        "stop": st.lists(st.sampled_from([" the", ".", "\n\n", "and"]), min_size=1, max_size=2),
        "min_tokens": st.sampled_from([1, 4]),
        "ignore_eos": st.just(True),
        "include_stop_str_in_output": st.just(True),
        "prompt_logprobs": st.sampled_from([0, 2]),
        "n": st.just(2),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(options)), unique=True, max_size=5))
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.6, 1.0, 1.6])),
        seed=draw(st.integers(0, 2**63 - 1)),
        max_tokens=draw(st.sampled_from([4, 9, 16])),
        logprobs=draw(st.sampled_from([None, 0, 3])),
        **{name: draw(options[name]) for name in chosen},
    )


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[str], list[SamplingParams], list[dict[str, Any]]]:
    num = draw(st.integers(1, 5))
    prompts = [draw(st.sampled_from(PROMPTS)) * draw(st.sampled_from([1, 1, 3])) for _ in range(num)]
    overrides = [
        {
            "method": draw(st.sampled_from(["none", "ngram", "suffix", "auto"])),
            "num_speculative_tokens": draw(st.integers(0, 8)),
            "adaptive": draw(st.booleans()),
        }
        for _ in range(num)
    ]
    return prompts, [draw(sampling_params()) for _ in range(num)], overrides


@given(requests())
@settings(max_examples=40)
def test_random_requests_together_differ_from_each_alone(llm: LLM, cramped: LLM, drawn: tuple[Any, Any, Any]) -> None:
    prompts, params, overrides = drawn
    alone = [llm.generate([prompt], replaced(one, speculative=PLAIN))[0] for prompt, one in zip(prompts, params, strict=True)]
    mixed = [replaced(one, speculative=override) for one, override in zip(params, overrides, strict=True)]
    for engine in (llm, cramped):
        for want, got in zip(alone, engine.generate(prompts, mixed), strict=True):
            assert seen(got) == seen(want)
        engine.kv.check_integrity()
        assert engine.kv.num_available == engine.kv.num_blocks


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", METHODS)
def test_some_draft_length_changes_the_answer(llm: LLM, method: str, temperature: float) -> None:
    prompt = llm.chat_prompt([{"role": "user", "content": PROMPTS[2]}])
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=40, logprobs=2, ignore_eos=True)
    want = llm.generate([prompt], replaced(params, speculative=PLAIN))[0]
    for k in range(9):
        got = llm.generate([prompt], replaced(params, speculative={"method": method, "num_speculative_tokens": k}))[0]
        assert seen(got) == seen(want), k
        if method == "draft_model" and k:
            assert got.metrics.speculation.acceptance_rate == 1.0


def test_two_hundred_tokens_drift_with_threads_blocks_or_chunks(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True, logprobs=0)
    prompt = llm.checkpoint.tokenizer.encode(" ".join(PROMPTS[:6]))
    want = seen(llm.generate([prompt], replaced(params, speculative=PLAIN))[0])
    for threads, block_size, budget in ((1, 16, 512), (3, 7, 11), (4, 32, 64)):
        other = LLM(
            "smollm2-135m", device="cpu", threads=threads, block_size=block_size, max_num_batched_tokens=budget,
            max_num_seqs=4, max_model_len=512, kv_cache_memory=30_000_000,
        )  # fmt: skip
        assert seen(other.generate([prompt], params)[0]) == want
        assert seen(other.generate([prompt], params)[0]) == want, "with the prefix cached"


def perplexity(llm: LLM, token_ids: list[int], window: int = 900) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    total, count = 0.0, 0
    for start in range(0, len(token_ids) - window, window):
        chunk = token_ids[start : start + window]
        entries = llm.generate([chunk], params)[0].prompt_logprobs or []
        known = [entry[token].logprob for entry, token in zip(entries[1:], chunk[1:], strict=True) if entry is not None]
        total, count = total + sum(known), count + len(known)
    assert count > 1700, count
    return math.exp(-total / count)


def test_computing_on_quantised_weights_costs_more_than_half_a_percent_of_perplexity() -> None:
    """Against float32 arithmetic on the same weights, dequantised, by the torch reference; measured: -0.01 % on these tokens."""
    text = "".join(
        (Path(__file__).parent.parent / name).read_text()
        for name in ("docs/how-it-works.md", "docs/drafters.md", "CONTRIBUTING.md")
    )
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 1024}
    reference = LLM("smollm2-135m", ops="torch", dtype="float32", **options)
    token_ids = reference.checkpoint.tokenizer.encode(text)[:1900]
    expected = perplexity(reference, token_ids)
    assert perplexity(LLM("smollm2-135m", ops="native", dtype="float32", **options), token_ids) == pytest.approx(expected, rel=1e-5)
    assert perplexity(LLM("smollm2-135m", ops="native", **options), token_ids) == pytest.approx(expected, rel=5e-3)
