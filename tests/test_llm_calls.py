"""Calls of an LLM that cross each other, that are wrong, or that come late; over a scripted model, in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice, zip_longest
from typing import Any

import pytest

from foredraft import RequestError, SamplingParams
from foredraft.cost import PassTimes
from foredraft.engine import Engine
from foredraft.kv_cache import KVCache
from foredraft.llm import Prompt, Request
from foredraft.outputs import RequestOutput
from foredraft.verify import RULES
from page_helpers import ScriptLLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PLAIN = SamplingParams(temperature=0.0, max_tokens=12, speculative={"method": "none"})
ADAPTIVE = SamplingParams(temperature=0.0, max_tokens=4, speculative={"method": "ngram", "adaptive": True})
FAR_MORE_PIECES_THAN_ANY_TEST_NEEDS = 200


def open_script(answers: Mapping[str, str] | None = None) -> ScriptLLM:
    """A model that answers with the question, or as ``answers`` says."""
    return ScriptLLM(answers or {}, pause=0.0)


def asked(llm: ScriptLLM, text: str) -> list[int]:
    """The prompt that is answered with ``text``."""
    return llm.chat_prompt([{"role": "user", "content": text}])


def with_cache(llm: ScriptLLM, num_blocks: int, block_size: int = 16) -> ScriptLLM:
    """The same with few blocks."""
    llm.kv = KVCache(num_blocks, block_size, True)
    llm.engine = Engine(llm.target, llm.kv, llm._drafters, RULES["coupled"], llm.controller, max_num_seqs=4)
    return llm


def joined(pieces: list[RequestOutput]) -> tuple[str, bool]:
    """(the text of a stream of one answer, whether it was told to be at its end)."""
    assert all(not piece.finished for piece in pieces[:-1])
    return "".join(piece.outputs[0].text for piece in pieces), pieces[-1].finished


def bounded(stream: Iterator[RequestOutput]) -> Iterator[RequestOutput]:
    yield from islice(stream, FAR_MORE_PIECES_THAN_ANY_TEST_NEEDS)
    assert next(stream, None) is None, "the stream does not come to an end"


# ------------------------------------------------------------------------------------------------ calls that cross


def test_a_stream_stops_without_its_last_tokens_when_another_call_ends_it() -> None:
    llm, pieces = open_script(), []
    for piece in bounded(llm.stream(asked(llm, "the first answer"), GREEDY)):
        pieces.append(piece)
        other = llm.generate(asked(llm, "another"), GREEDY)[0]
        assert other.finished and other.outputs[0].text == "another"
    assert joined(pieces) == ("the first an", True)
    assert not llm.engine.has_work and not llm._requests


def test_two_streams_in_turn_lose_each_others_tokens() -> None:
    llm = open_script()
    streams = [bounded(llm.stream([asked(llm, text)], PLAIN)) for text in ("one", "the other")]
    pairs = list(zip_longest(*streams))
    assert [joined([pair[i] for pair in pairs if pair[i] is not None]) for i in (0, 1)] == [("one", True), ("the other", True)]
    assert not llm.engine.has_work and not llm._requests


def test_a_batch_whose_requests_end_in_another_call_is_told_of_some_twice_or_never() -> None:
    llm, pieces = open_script(), {}
    prompts = [asked(llm, text) for text in ("a", "bb", "the third")]
    for piece in bounded(llm.stream(prompts, PLAIN)):
        pieces.setdefault(piece.request_id, []).append(piece)
        llm.generate(asked(llm, "cc"), PLAIN)
    assert [joined(parts) for parts in pieces.values()] == [("a", True), ("bb", True), ("the third", True)]


def test_a_stream_that_ended_in_a_failed_step_of_another_call_goes_on_for_ever() -> None:
    llm, pieces = open_script(), []
    for piece in bounded(llm.stream(asked(llm, "ab"), SamplingParams(temperature=0.0, max_tokens=2))):
        pieces.append(piece)
        if len(pieces) == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(llm._drafters["ngram"], "observe", lambda seq, verdict, hidden: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    llm.generate(asked(llm, "other"), GREEDY)
    assert joined(pieces) == ("ab", True)


def test_every_step_looks_at_all_prompts_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    num_looks = 0

    def finished(request: Request) -> bool:
        nonlocal num_looks
        num_looks += 1
        return all(seq.finish_reason is not None for seq in request.seqs)

    monkeypatch.setattr(Request, "finished", property(finished))
    llm = open_script()
    prompts = [asked(llm, "ab")] * 100
    assert len(llm.generate(prompts, PLAIN)) == 100
    num_emissions = llm.engine.metrics.total.target_passes
    assert num_emissions == 300 and num_looks <= num_emissions + 100


def test_an_abort_stops_at_the_first_answer_whose_drafter_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_script()
    requests = [llm.submit(asked(llm, "abc"), SamplingParams(n=2, max_tokens=9)) for _ in range(2)]
    llm.step()
    monkeypatch.setattr(llm._drafters["ngram"], "close", lambda seq: 1 / 0)
    for request in requests:
        with pytest.raises(ZeroDivisionError):
            llm.abort(request)
        assert [seq.finish_reason for seq in request.seqs] == ["abort", "abort"]
    assert not llm.engine.has_work and not llm._requests and llm.kv.num_available == llm.kv.num_blocks


# ------------------------------------------------------------------------------------------------ wrong calls


@pytest.mark.parametrize("prompts", [5, None, 0.5, True, object(), [None], [0.5], ["a", 3], {"prompt_token_ids": 5}])
def test_a_prompt_of_a_wrong_type_ends_in_a_traceback(prompts: Any) -> None:
    llm = open_script()
    with pytest.raises(RequestError, match=r"a prompt must be text or a list of token ids, not .*; write it as text"):
        llm.generate(prompts, GREEDY)
    with pytest.raises(RequestError, match="a prompt must be"):
        next(llm.stream(prompts))
    assert not llm.engine.has_work


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, "greedy", 0, [{"temperature": 0}], [GREEDY, 5], [5, GREEDY]])
@pytest.mark.parametrize("num_prompts", [1, 2])
def test_sampling_params_of_a_wrong_type_end_in_a_traceback(params: Any, num_prompts: int) -> None:
    llm = open_script()
    with pytest.raises(RequestError, match=r"sampling_params must be"):
        llm.generate(["hi"] * num_prompts, params)
    assert not llm.engine.has_work and not llm._requests


def test_sampling_params_that_are_a_mapping_are_called_too_few() -> None:
    with pytest.raises(RequestError) as refused:
        open_script().generate(["a", "b"], {"temperature": 0})  # type: ignore[arg-type]
    assert str(refused.value) == "sampling_params must be SamplingParams, not {'temperature': 0}; write SamplingParams(...)."


@pytest.mark.parametrize("prompt", ["hi", [104, 105], {"prompt": "hi"}, {"prompt_token_ids": [104, 105]}])
def test_a_right_prompt_is_refused(prompt: Prompt) -> None:
    llm = open_script()
    assert llm.generate(prompt)[0].prompt_token_ids == llm.generate([prompt], [GREEDY])[0].prompt_token_ids == [104, 105]


# ------------------------------------------------------------------------------------------------ late calibration


@pytest.fixture
def uncalibrated(monkeypatch: pytest.MonkeyPatch) -> tuple[ScriptLLM, list[int]]:
    """An LLM that has measured nothing, and the blocks that were free at each measurement."""
    llm, free = open_script(), list[int]()
    llm._is_calibrated = False

    def measure() -> PassTimes:
        free.append(llm.kv.num_available)
        return PassTimes((1, 5), (0.5, 0.75))

    monkeypatch.setattr(llm, "_pass_times", measure)
    return llm, free


def test_passes_are_timed_in_the_blocks_that_others_leave(uncalibrated: tuple[ScriptLLM, list[int]]) -> None:
    llm, free = uncalibrated
    running = llm.stream(asked(llm, "hello"), PLAIN)
    next(running)
    before = llm.controller.cost.times
    late = llm.submit(asked(llm, "late"), ADAPTIVE)
    assert llm.calibrate() == before and not free and not llm._is_calibrated
    llm.abort(late)
    assert joined(list(running))[1]
    for _ in range(2):
        llm.generate(asked(llm, "again"), ADAPTIVE)
    assert free == [llm.kv.num_blocks] and llm._is_calibrated


def test_a_measurement_waits_in_front_of_requests_that_are_queued(uncalibrated: tuple[ScriptLLM, list[int]]) -> None:
    llm, free = uncalibrated
    first = llm.submit(asked(llm, "hello"), PLAIN)
    llm.abort(llm.submit(asked(llm, "late"), ADAPTIVE))
    llm.abort(first)
    assert not free and llm.calibrate().at(1) == 0.5


def test_a_measurement_that_failed_counts_as_made(
    uncalibrated: tuple[ScriptLLM, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, free = uncalibrated
    with monkeypatch.context() as patch:
        patch.setattr(llm, "_pass_times", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.calibrate()
    assert llm.calibrate().at(1) == 0.5 and len(free) == 1


# ------------------------------------------------------------------------------------------------ what is reported


def test_a_preempted_request_reports_its_own_answer_as_a_cached_prompt() -> None:
    """The younger of two is preempted after its 27th token, and finds a block of 16 when it comes back; its prompt has 14."""
    llm = with_cache(open_script({"o" * 18: "a" * 40, "y" * 12: "b" * 40}), num_blocks=4)
    older, younger = asked(llm, "o" * 18), asked(llm, "y" * 12)
    params = SamplingParams(temperature=0.0, max_tokens=16, speculative={"method": "none"})
    requests = [llm.submit(prompt, params) for prompt in (older, younger)]
    while llm.engine.has_work:
        llm.step()
    seq = requests[1].seqs[0]
    assert llm.engine.metrics.num_preemptions == 1 and seq.num_cached == 16 > len(younger) == 14
    assert llm.take(requests[1]).num_cached_tokens == 0
    output = llm.generate(older, params)[0]
    assert output.num_cached_tokens == 16 <= len(older)


def test_prompt_logprobs_are_decoded_again_for_every_piece_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_script()
    prompt, num_decoded = asked(llm, "some words"), 0
    params = SamplingParams(temperature=0.0, max_tokens=10, prompt_logprobs=0, speculative={"method": "none"})
    whole = llm.generate(prompt, params)[0].prompt_logprobs
    decode = llm.checkpoint.tokenizer.decode

    def counted(*args: Any, **kwargs: Any) -> str:
        nonlocal num_decoded
        num_decoded += 1
        return decode(*args, **kwargs)

    monkeypatch.setattr(llm.checkpoint.tokenizer, "decode", counted)
    pieces = [piece.prompt_logprobs for piece in llm.stream(prompt, params)]
    assert whole is not None and len(whole) == len(prompt) and pieces == [whole] * 10
    assert num_decoded == len(prompt) - 1
    assert pieces[0] is not pieces[1], "who changes one piece changes those to come"
