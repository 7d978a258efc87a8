"""Gemma 3 270M, fetched once (238 MB): sliding windows, four norms a layer, 262 144 tokens, and no chat template."""

from __future__ import annotations

import math

import pytest

from foredraft.llm import LLM
from foredraft.types import RequestError, SamplingParams, UnsupportedModelError

pytestmark = pytest.mark.model

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("gemma3-270m", dtype="float32", max_model_len=1024, enable_prefix_caching=False)


def test_a_fact_is_not_continued_sensibly(llm: LLM) -> None:
    answers = {
        "The capital of Germany is Berlin. The capital of France is": "Paris",
        "Paris is the capital of": "France",
        "1, 2, 3, 4, 5,": "6, 7, 8",
    }
    for prompt, expected in answers.items():
        assert expected in llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0].text


def test_log_probabilities_are_not_those_that_transformers_computes(llm: LLM) -> None:
    output = llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=1, logprobs=5))[0].outputs[0]
    assert output.logprobs is not None
    found = {entry.decoded_token: entry.logprob for entry in output.logprobs[0].values()}
    # transformers 5.24 on the same file, dequantised to float32.
    expected = {" the": -1.654, " a": -2.198, " Paris": -2.477, " one": -2.632, " known": -2.962}
    assert found.keys() == expected.keys()
    assert all(math.isclose(found[text], expected[text], abs_tol=0.01) for text in expected), found


def test_drafts_change_the_answer_behind_the_sliding_window_too(llm: LLM) -> None:
    counting = ", ".join(str(number) for number in range(1, 150)) + ","
    for prompt in ("red, green, blue, red, green, blue, red,", counting):
        plain = llm.generate(prompt, GREEDY)[0]
        drafted = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=16, speculative=NGRAM))[0]
        assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
        assert drafted.metrics.speculation.accepted_tokens > 0
    assert len(plain.prompt_token_ids) > 512


def test_a_model_without_a_chat_template_is_asked_to_chat(llm: LLM) -> None:
    with pytest.raises(RequestError, match="chat template"):
        llm.chat([{"role": "user", "content": "Hello"}], GREEDY)


def test_a_draft_model_of_another_vocabulary_is_taken() -> None:
    speculative_config = {"method": "draft_model", "model": "gemma3-270m", "num_speculative_tokens": 2}
    with pytest.raises(UnsupportedModelError) as refused:
        LLM("smollm2-135m", speculative_config=speculative_config, max_model_len=256)
    assert str(refused.value) == (
        "the draft model must have the target's vocabulary, but token id 0 is '<|endoftext|>' for the target and '<pad>' for the "
        "draft model; choose a draft model of the same family."
    )


def test_a_k_quant_file_is_not_repacked_or_does_not_say_so() -> None:
    llm = LLM("gemma3-270m", max_model_len=1024)
    assert "Q8_0 (repacked from " in llm.describe()[0] and "exactness: bitwise" in llm.describe()[0]
    prompt, sampled = "1, 2, 3, 4, 5,", SamplingParams(temperature=0.9, seed=5, max_tokens=24, logprobs=1)
    plain = llm.generate(prompt, sampled)[0].outputs[0]
    drafted = llm.generate(prompt, SamplingParams(temperature=0.9, seed=5, max_tokens=24, logprobs=1, speculative=NGRAM))[
        0
    ].outputs[0]
    assert plain.text.startswith(" 6, 7, 8")
    assert (drafted.token_ids, drafted.logprobs) == (plain.token_ids, plain.logprobs)
