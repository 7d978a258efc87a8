from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from foredraft import LLM, AsyncLLM, RequestError, SamplingParams

pytestmark = pytest.mark.model

PARAMS = SamplingParams(temperature=0.7, seed=3, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[LLM, AsyncLLM]]:
    llm = LLM("smollm2-135m", max_model_len=512, device="cpu")
    server = AsyncLLM(llm)
    yield llm, server
    server.close()


async def collect(server: AsyncLLM, prompt: str, params: SamplingParams = PARAMS) -> list[int]:
    return [token async for output in server.generate(prompt, params) for token in output.outputs[0].token_ids]


async def test_concurrent_callers_get_each_others_tokens(engine: tuple[LLM, AsyncLLM]) -> None:
    _, server = engine
    prompts = ["The sea is", "A recipe for bread:", "Once upon a time"]
    together = await asyncio.gather(*(collect(server, prompt) for prompt in prompts))
    alone = [await collect(server, prompt) for prompt in prompts]
    assert together == alone and all(len(answer) == 12 for answer in together)


async def test_a_caller_that_leaves_keeps_the_engine_busy(engine: tuple[LLM, AsyncLLM]) -> None:
    llm, server = engine
    stream = server.generate("The sea is", SamplingParams(max_tokens=400, ignore_eos=True))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    await collect(server, "Next")
    assert not llm.engine.has_work


async def test_a_bad_request_hurts_the_others(engine: tuple[LLM, AsyncLLM]) -> None:
    _, server = engine
    good = asyncio.create_task(collect(server, "The sea is"))
    with pytest.raises(RequestError, match="at least 1 token"):
        await collect(server, "")
    assert len(await good) == 12


async def test_a_closed_engine_hangs_its_callers() -> None:
    server = AsyncLLM(LLM("smollm2-135m", max_model_len=512, device="cpu"))
    running = asyncio.create_task(collect(server, "The sea is", SamplingParams(max_tokens=400, ignore_eos=True)))
    await asyncio.sleep(0.3)
    await asyncio.to_thread(server.close)
    with pytest.raises(RequestError, match="closed"):
        await running
    with pytest.raises(RequestError, match="closed"):
        await collect(server, "again")
