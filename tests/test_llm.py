from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from foredraft import LLM, ConfigError, RequestError, RequestOutput, SamplingParams
from foredraft.controller import replay_decision
from model_helpers import PROMPTS, reference_logits

pytestmark = pytest.mark.model

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=24)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    yield LLM("smollm2-135m", speculative_config={"method": "ngram", "num_speculative_tokens": 4}, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def chats(llm: LLM) -> list[list[int]]:
    return [llm.chat_prompt([{"role": "user", "content": prompt}]) for prompt in PROMPTS]


def with_options(params: SamplingParams, **changes: Any) -> SamplingParams:
    return dataclasses.replace(params, **changes)


def plain(params: SamplingParams, **changes: Any) -> SamplingParams:
    return with_options(params, speculative={"method": "none"}, **changes)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_greedy_output_is_that_of_transformers(llm: LLM, chats: list[list[int]]) -> None:
    params = plain(GREEDY, max_tokens=64, ignore_eos=True)
    for prompt, answer in zip(chats, tokens(llm.generate(chats, params)), strict=True):
        # Feeding our answer back: if each token is the argmax after those before it, greedy decoding would have produced it.
        logits = reference_logits(llm, prompt + answer)[len(prompt) - 1 : -1]
        for position, (row, token) in enumerate(zip(logits, answer, strict=True)):
            best = int(row.argmax())
            margin = float(row[best] - row[token])
            assert best == token or margin < 1e-4, f"position {position}: {token} instead of {best}, margin {margin}"


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_speculation_changes_tokens(llm: LLM, chats: list[list[int]], params: SamplingParams, method: str) -> None:
    expected = llm.generate(chats[:6], plain(params, logprobs=2))
    for k in (1, 4, 8):
        speculative = with_options(params, logprobs=2, speculative={"method": method, "num_speculative_tokens": k})
        for want, got in zip(expected, llm.generate(chats[:6], speculative), strict=True):
            a, b = want.outputs[0], got.outputs[0]
            assert b.token_ids == a.token_ids and b.text == a.text
            assert (b.finish_reason, b.stop_reason, got.usage) == (a.finish_reason, a.stop_reason, want.usage)
            assert a.logprobs is not None and b.logprobs is not None
            for x, y in zip(a.logprobs, b.logprobs, strict=True):
                assert x.keys() == y.keys()
                np.testing.assert_allclose([v.logprob for v in y.values()], [v.logprob for v in x.values()], atol=1e-4)


def test_batch_mates_or_the_prefix_cache_change_tokens(llm: LLM, chats: list[list[int]]) -> None:
    together = tokens(llm.generate(chats[:5], SAMPLED))
    alone = [tokens(llm.generate([prompt], SAMPLED))[0] for prompt in chats[:5]]
    again = llm.generate([chats[0]], SAMPLED)
    assert together == alone
    assert again[0].num_cached_tokens > 0 and tokens(again)[0] == alone[0]


def test_chunked_prompts_change_tokens(llm: LLM, chats: list[list[int]]) -> None:
    small_steps = {"max_num_batched_tokens": 7, "max_num_seqs": 2, "enable_prefix_caching": False, "max_model_len": 256}
    chunked = LLM("smollm2-135m", dtype="float32", device="cpu", **small_steps)
    assert tokens(chunked.generate(chats[:3], SAMPLED)) == tokens(llm.generate(chats[:3], SAMPLED))


def test_a_draft_model_equal_to_the_target_is_not_always_right(chats: list[list[int]]) -> None:
    config = {"method": "draft_model", "model": "smollm2-135m", "num_speculative_tokens": 3, "adaptive": False}
    llm = LLM("smollm2-135m", speculative_config=config, max_model_len=512, device="cpu")
    for params in (GREEDY, SAMPLED):
        output = llm.generate([chats[0]], with_options(params, ignore_eos=True))[0]
        stats = output.metrics.speculation
        assert stats.acceptance_rate == 1.0 and stats.drafted_tokens > 12
        assert tokens([output]) == tokens(llm.generate([chats[0]], plain(params, ignore_eos=True)))


def test_stop_strings_are_missed_inside_a_draft(llm: LLM) -> None:
    prompt = llm.chat_prompt([{"role": "user", "content": "Count from one to ten in words, separated by commas, twice."}])
    text = llm.generate([prompt], plain(GREEDY, max_tokens=40))[0].outputs[0].text
    for length in (2, 5, 9):
        stop = text[12 : 12 + length]
        for speculative in ({"method": "none"}, {"method": "ngram", "num_speculative_tokens": 6}):
            output = llm.generate([prompt], with_options(GREEDY, max_tokens=40, stop=stop, speculative=speculative))[0].outputs[0]
            assert output.text == text[: text.index(stop)]
            assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_streamed_pieces_do_not_add_up(llm: LLM, chats: list[list[int]]) -> None:
    whole = llm.generate(chats[:3], with_options(SAMPLED, logprobs=1))
    texts: dict[str, str] = {}
    ids: dict[str, list[int]] = {}
    num_origins: dict[str, int] = {}
    for piece in llm.stream(chats[:3], with_options(SAMPLED, logprobs=1)):
        output = piece.outputs[0]
        texts[piece.request_id] = texts.get(piece.request_id, "") + output.text
        ids.setdefault(piece.request_id, []).extend(output.token_ids)
        num_origins[piece.request_id] = num_origins.get(piece.request_id, 0) + len(output.origins)
        assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
    assert list(texts.values()) == [output.outputs[0].text for output in whole]
    assert list(ids.values()) == tokens(whole)
    assert list(num_origins.values()) == [len(answer) for answer in tokens(whole)]


def test_several_answers_are_the_same_answer(llm: LLM, chats: list[list[int]]) -> None:
    output = llm.generate([chats[0]], with_options(SAMPLED, n=3))[0]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    assert output.outputs[0].token_ids == tokens(llm.generate([chats[0]], SAMPLED))[0]
    assert output.usage["completion_tokens"] == sum(len(answer.token_ids) for answer in output.outputs)


def test_an_answer_without_a_seed_cannot_be_replayed(llm: LLM, chats: list[list[int]]) -> None:
    first = llm.generate([chats[0]], with_options(SAMPLED, seed=None))[0]
    other = llm.generate([chats[0]], with_options(SAMPLED, seed=None))[0]
    assert first.seed != other.seed
    assert tokens(llm.generate([chats[0]], with_options(SAMPLED, seed=first.seed))) == tokens([first])


def test_prompt_logprobs_differ_from_a_whole_pass(llm: LLM) -> None:
    prompt = llm.checkpoint.tokenizer.encode(" ".join(PROMPTS) * 2)
    assert len(prompt) > 130, "several chunks are wanted"
    output = llm.generate([prompt], with_options(GREEDY, max_tokens=2, prompt_logprobs=1))[0]
    expected = torch.log_softmax(reference_logits(llm, prompt), dim=-1)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt) and output.prompt_logprobs[0] is None
    got = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True) if entry is not None]
    want = [float(row[token]) for row, token in zip(expected[:-1], prompt[1:], strict=True)]
    np.testing.assert_allclose(got, want, atol=1e-3)


def test_leaving_a_stream_early_keeps_its_blocks(llm: LLM, chats: list[list[int]]) -> None:
    before = llm.kv.num_available
    stream = llm.stream(chats[:2], GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_work and llm.kv.num_available == before


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", {}, "at least 1 token"),
        ([], {}, "at least 1 token"),
        ([10**9], {}, "prompt token ids must be from 0 to 49151"),
        ("a", {"logit_bias": {10**6: 1.0}}, "logit_bias must be from 0"),
        ("a", {"allowed_token_ids": [-1]}, "allowed_token_ids must be a list of token ids"),
        ("a", {"stop_token_ids": [49152]}, "stop_token_ids must be from 0"),
        ([5] * 8192, {}, "at most 8191 tokens"),
        ("a", {"speculative": {"method": "ngran"}}, "did you mean 'ngram'"),
        ("a", {"speculative": {"num_speculative_tokens": -1}}, "from 0 to 64"),
        ("a", {"speculative": {"method": "draft_model"}}, "must have a model"),
        ({"text": "a"}, {}, "must have 'prompt' or 'prompt_token_ids'"),
        ([0.5], {}, "text or a list of token ids"),
    ],
)
def test_a_bad_request_is_accepted(llm: LLM, prompt: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises((RequestError, ConfigError), match=message):
        llm.generate([prompt], SamplingParams(**params))
    assert not llm.engine.has_work


def test_one_bad_prompt_leaves_the_others_queued(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.generate(["fine", ""], GREEDY)
    assert not llm.engine.has_work
    with pytest.raises(RequestError, match="one for each of the 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 9000}, "max_model_len must be at most 8192"),
        ({"kv_cache_memory": 1000}, "fewer than max_model_len"),
        ({"max_model_length": 10}, "did you mean 'max_model_len'"),
        ({"speculative_config": {"method": "eagle3", "shipped": False}}, "must have a model"),
        ({"speculative_config": {"method": "ngram", "model": "x"}}, "takes no model"),
        ({"speculative_config": {"method": "ngram", "prompt_lookup_maximum": 3}}, "did you mean 'prompt_lookup_max'"),
        ({"device": "cudaa"}, "did you mean 'cuda'"),
    ],
)
def test_a_bad_option_is_ignored(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM("smollm2-135m", **options)


def test_overhead_is_counted_into_no_phase(llm: LLM, chats: list[list[int]]) -> None:
    output = llm.generate([chats[0]], GREEDY)[0]
    spent = sum(output.metrics.speculation.milliseconds.values()) / 1e3
    assert 0.5 * output.metrics.latency < spent <= output.metrics.latency


def test_a_trace_does_not_lead_to_the_decisions_that_were_made(chats: list[list[int]]) -> None:
    lines: list[str] = []
    llm = LLM("smollm2-135m", device="cpu", max_model_len=512, trace=lambda decision: lines.append(json.dumps(decision)))
    prompt = llm.chat_prompt([{"role": "user", "content": "Repeat five times: one two three four five six seven eight"}])
    output = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True))[0]
    decisions = [json.loads(line) for line in lines]
    assert decisions and all(replay_decision(decision) == decision["num_tokens"] for decision in decisions)
    assert sum(sum(decision["num_tokens"]) for decision in decisions) == output.metrics.speculation.drafted_tokens
