"""The official client against a whole server: every feature, with and without drafts, streamed and not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import openai
import pytest

from foredraft import LLM, SamplingParams
from server_helpers import MODEL, SETTINGS, Running, ask, joined_chat, open_tiny, read_events, running, said, write_tiny_model

TEXT = "hello hello hello one 12 12"
CASES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.9},
    "several": {"temperature": 1.2, "n": 3},
    "logprobs": {"temperature": 0.7, "logprobs": True, "top_logprobs": 3},
    "chosen_logprobs": {"temperature": 0.7, "logprobs": True},
    "bias": {"logit_bias": {"110": 6.0, "50": -100}},
    "penalties": {"temperature": 0.3, "presence_penalty": 1.1, "frequency_penalty": 0.7},
    "stop_id": {"temperature": 0.0, "extra_body": {"stop_token_ids": list(range(4, 60))}},
    "ends_by_itself": {"temperature": 1.0, "logit_bias": {"1": 5.0}, "extra_body": {"ignore_eos": False}},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 7},
    "of_vllm": {"extra_body": {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 9, "bad_words": ["he"]}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(open_tiny(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf"))) as server:
        yield server


def request_of(case: str, setting: str, **options: Any) -> dict[str, Any]:
    given = {"max_tokens": 24, **CASES[case], **options}
    extra = {"ignore_eos": True, "speculative": SETTINGS[setting], **given.pop("extra_body", {})}
    given = {name: value for name, value in given.items() if value is not None}
    return {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], "seed": 11, **given, "extra_body": extra}


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def whole(client: openai.OpenAI, request: Mapping[str, Any]) -> dict[str, Any]:
    return said(client.chat.completions.create(**request).model_dump())


def streamed(client: openai.OpenAI, request: Mapping[str, Any]) -> dict[str, Any]:
    chunks = client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    return joined_chat([chunk.model_dump() for chunk in chunks])


@pytest.mark.parametrize("case", CASES)
def test_drafts_or_streaming_change_an_answer(client: openai.OpenAI, case: str) -> None:
    expected = whole(client, request_of(case, "none"))
    for setting in SETTINGS:
        assert whole(client, request_of(case, setting)) == expected, setting
        assert streamed(client, request_of(case, setting)) == expected, setting
    assert len(expected["choices"]) == CASES[case].get("n", 1)
    limit = CASES[case].get("max_completion_tokens", 24)
    ended = {choice["finish_reason"] for choice in expected["choices"]}
    assert ended == ({"stop"} if case in ("stop_id", "ends_by_itself") else {"length"})
    if ended == {"length"}:
        assert expected["usage"]["completion_tokens"] == limit * len(expected["choices"])


def test_a_stop_string_is_streamed_or_missed(client: openai.OpenAI) -> None:
    full = whole(client, request_of("sampled", "none", max_tokens=60))["choices"][0]["text"]
    stop = full[20:23]
    for setting in SETTINGS:
        request = request_of("sampled", setting, max_tokens=60, stop=["never there", stop])
        answer = whole(client, request)
        assert answer == streamed(client, request)
        assert answer["choices"][0]["text"] == full[: full.index(stop)] and answer["choices"][0]["finish_reason"] == "stop"


def test_an_answer_differs_from_that_of_the_library(server: Running, client: openai.OpenAI) -> None:
    llm = open_tiny(server.llm.checkpoint.path)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True, logprobs=2, n=2)
    (output,) = llm.chat([[{"role": "user", "content": TEXT}]], params)
    request = request_of("sampled", "auto", temperature=0.8, top_p=1.0, seed=3, max_tokens=30, logprobs=True, top_logprobs=2, n=2)
    answer = whole(client, request)
    for choice, ours in zip(answer["choices"], output.outputs, strict=True):
        assert ours.logprobs is not None
        assert choice["text"] == ours.text
        pairs = zip(ours.token_ids, ours.logprobs, strict=True)
        assert [entry["logprob"] for entry in choice["logprobs"]] == [entry[token].logprob for token, entry in pairs]
        assert [bytes(entry["bytes"]) for entry in choice["logprobs"]] == [
            llm.checkpoint.tokenizer.token_bytes(token) for token in ours.token_ids
        ]
    assert answer["usage"]["prompt_tokens"] == len(output.prompt_token_ids)


@pytest.mark.parametrize("setting", SETTINGS)
def test_completions_of_several_prompts_are_mixed_up(client: openai.OpenAI, setting: str) -> None:
    extra = {"ignore_eos": True, "speculative": SETTINGS[setting]}

    def complete(prompt: Any, **options: Any) -> Any:
        given = {"n": 2, "seed": 4, "max_tokens": 12, "logprobs": 2, "extra_body": extra, **options}
        return client.completions.create(model=MODEL, prompt=prompt, **given)

    together = complete(["hello", "one 12"])
    alone = [complete(prompt) for prompt in ("hello", "one 12")]
    assert [choice.text for choice in together.choices] == [choice.text for answer in alone for choice in answer.choices]
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert together.usage.completion_tokens == 48
    assert together.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)
    texts, logprobs = [""] * 4, [[] for _ in range(4)]  # type: ignore[var-annotated]
    for chunk in complete(["hello", "one 12"], stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            logprobs[choice.index] += zip(
                choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.text_offset, strict=True
            )
    assert texts == [choice.text for choice in together.choices]
    for found, choice in zip(logprobs, together.choices, strict=True):
        assert found == list(zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.text_offset, strict=True))


def test_token_ids_as_prompts_mean_something_else(server: Running) -> None:
    ids = server.post("/tokenize", {"prompt": "hello"}).json()["tokens"]
    bodies = [{"prompt": prompt, "seed": 1, "max_tokens": 5} for prompt in ("hello", ids, ["hello"], [ids])]
    texts = {server.post("/v1/completions", body).json()["choices"][0]["text"] for body in bodies}
    assert len(texts) == 1


def test_the_seed_in_a_response_does_not_give_the_answer_again(server: Running) -> None:
    first = server.post("/v1/chat/completions", {k: v for k, v in ask().items() if k != "seed"}).json()
    seed = first["foredraft"]["seed"]
    assert 0 <= seed < 2**53
    again = server.post("/v1/chat/completions", ask(seed=seed)).json()
    assert said(again) == said(first)
    other = server.post("/v1/chat/completions", ask(seed=seed + 1)).json()
    assert said(other) != said(first)
    chunks = read_events(server.post("/v1/chat/completions", ask(seed=seed, stream=True)))
    assert chunks[0]["foredraft"]["seed"] == seed
    assert joined_chat(chunks)["choices"] == said(first)["choices"]


def test_a_stream_names_the_wrong_tokens(server: Running) -> None:
    options = {"stream_options": {"include_usage": True, "include_speculation": True}}
    body = ask(TEXT, temperature=0.0, max_tokens=60, stream=True, speculative=SETTINGS["fixed"], **options)
    chunks = read_events(server.post("/v1/chat/completions", body))
    parts = [chunk["foredraft"] for chunk in chunks[1:-1]]
    tokens = [token for part in parts for token in part["tokens"]]
    last = chunks[-1]["foredraft"]
    assert len(tokens) == chunks[-1]["usage"]["completion_tokens"] == 60
    origins = [token["origin"] for token in tokens]
    assert last["statistics"]["accepted_tokens"] == origins.count("accepted") > 0
    assert last["statistics"]["drafted_tokens"] == sum(part["num_drafted"] for part in parts)
    assert {part["drafter"] for part in parts if part["num_drafted"]} == {"ngram"}
    assert last["statistics"]["speedup_estimate"] > 0.0 and last["seed"] == 5
    text = joined_chat(chunks)["choices"][0]["text"]
    assert text.startswith("".join(token["text"] for token in tokens))
    decoded = server.post("/detokenize", {"tokens": [token["id"] for token in tokens]}).json()["prompt"]
    assert decoded == text


def test_a_stream_leaves_out_special_tokens_that_were_asked_for(server: Running) -> None:
    # The end-of-sequence token is made so likely that the answer has it.
    body = ask(logit_bias={"1": 8.0}, temperature=1.0, stream=True, stream_options={"include_speculation": True})
    for skips in (False, True):
        chunks = read_events(server.post("/v1/chat/completions", {**body, "skip_special_tokens": skips}))
        text = joined_chat(chunks)["choices"][0]["text"]
        tokens = [token for chunk in chunks[1:-1] for token in chunk["foredraft"]["tokens"]]
        told = "".join(token["text"] for token in tokens)
        assert any(token["id"] == 1 for token in tokens) and ("</s>" in told) == (not skips)
        assert text.startswith(told)


def test_statistics_come_unasked_or_not_at_all(server: Running) -> None:
    assert "statistics" not in server.post("/v1/chat/completions", ask()).json()["foredraft"]
    answer = server.post("/v1/chat/completions", ask(speculation_statistics=True)).json()
    assert answer["foredraft"]["statistics"]["emitted_tokens"] == answer["usage"]["completion_tokens"] == 24
    chunks = read_events(server.post("/v1/chat/completions", ask(stream=True, speculation_statistics=True)))
    assert chunks[-1]["foredraft"]["statistics"]["emitted_tokens"] == 24 and "usage" not in chunks[-1]


def test_a_chat_without_a_limit_ends_early_or_never(server: Running) -> None:
    body = {name: value for name, value in ask(temperature=0.0).items() if name != "max_tokens"}
    usage = server.post("/v1/chat/completions", body).json()["usage"]
    assert usage["total_tokens"] == server.llm.max_model_len


def test_the_list_of_models_or_the_tokenizer_is_wrong(server: Running, client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    messages = [{"role": "user", "content": "hé"}]
    ids = server.post("/tokenize", {"messages": messages, "return_token_strs": True}).json()
    assert ids["tokens"] == server.llm.chat_prompt(messages) and ids["count"] == len(ids["tokens"]) == len(ids["token_strs"])
    assert server.post("/detokenize", {"tokens": ids["tokens"]}).json()["prompt"].endswith("assistant\n")
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "é"}]}]
    assert server.post("/tokenize", {"messages": parts}).json()["tokens"] == ids["tokens"]


def test_a_server_without_speculation_answers_otherwise(server: Running) -> None:
    expected = server.post("/v1/chat/completions", ask(TEXT)).json()
    with running(open_tiny(server.llm.checkpoint.path, speculative_config={"method": "none"})) as plain:
        answer = plain.post("/v1/chat/completions", ask(TEXT, speculation_statistics=True)).json()
        state = plain.post("/v1/chat/completions", ask(TEXT, speculative=SETTINGS["fixed"])).json()
        with plain.http() as http:
            assert http.get("/v1/speculation").json()["default"]["method"] == "none"
    assert said(answer) == said(expected) == said(state)
    assert answer["foredraft"]["statistics"]["drafted_tokens"] == 0


def test_the_engine_of_this_suite_is_not_exact(server: Running) -> None:
    assert isinstance(server.llm, LLM) and server.llm.target.exactness == "bitwise"
