"""Nobody waits for ever, whatever fails in the engine's thread; over a scripted model, in milliseconds."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import pytest

from foredraft import AsyncLLM, RequestError, RequestOutput, SamplingParams
from foredraft.cost import PassTimes
from foredraft.llm import LLM, Request
from foredraft.server import serve
from foredraft.server.settings import ServerConfig
from page_helpers import ScriptLLM

PATIENCE = 20.0
ENDLESS = SamplingParams(temperature=0.0, max_tokens=1000)
T = TypeVar("T")


@pytest.fixture
def engine() -> Iterator[tuple[ScriptLLM, AsyncLLM]]:
    """A model that answers with the question, but "?" with very much."""
    llm = ScriptLLM({"?": "-" * 1000}, pause=0.001)
    server = AsyncLLM(llm)
    yield llm, server
    server.close()


async def soon(waiting: Awaitable[T]) -> T:
    return await asyncio.wait_for(waiting, PATIENCE)


async def answer(llm: LLM, server: AsyncLLM, text: str) -> str:
    prompt = llm.chat_prompt([{"role": "user", "content": text}])
    return "".join([output.outputs[0].text async for output in server.generate(prompt, ENDLESS)])


def failing(where: Callable[..., Any], error: BaseException, whom: Callable[[Any], bool]) -> Callable[..., Any]:
    """``where``, but for ``whom`` it raises when it is done."""

    def fail(one: Any, *rest: Any) -> Any:
        result = where(one, *rest)
        if whom(one):
            raise error
        return result

    return fail


async def test_a_caller_whose_request_cannot_be_ended_takes_all_others_along(engine: tuple[ScriptLLM, AsyncLLM]) -> None:
    llm, server = engine
    drafter = llm._drafters["ngram"]
    drafter.close = failing(drafter.close, OSError("disk"), lambda seq: True)  # type: ignore[method-assign]
    leaving = server.generate(llm.chat_prompt([{"role": "user", "content": "?"}]), ENDLESS)
    await soon(anext(leaving))
    await leaving.aclose()  # type: ignore[attr-defined]
    assert not await soon(server.ask(lambda llm: llm.engine.has_work))
    del drafter.close
    assert await soon(answer(llm, server, "still here")) == "still here" and server.is_alive
    assert not llm.engine.has_work and llm.kv.num_available == llm.kv.num_blocks


async def test_a_failed_step_whose_requests_cannot_be_ended_lets_callers_wait(engine: tuple[ScriptLLM, AsyncLLM]) -> None:
    llm, server = engine
    drafter = llm._drafters["ngram"]
    waiting = [asyncio.create_task(answer(llm, server, "?")) for _ in range(3)]
    while await soon(server.ask(lambda llm: llm.engine.num_running)) < 3:
        await asyncio.sleep(0.001)
    drafter.close = failing(drafter.close, OSError("disk"), lambda seq: True)  # type: ignore[method-assign]
    drafter.observe = lambda seq, verdict, hidden: 1 / 0  # type: ignore[method-assign, assignment]
    for task in waiting:
        with pytest.raises(ZeroDivisionError):
            await soon(task)
    del drafter.close, drafter.observe
    assert await soon(answer(llm, server, "still here")) == "still here" and server.is_alive
    assert llm.kv.num_available == llm.kv.num_blocks


async def test_an_answer_that_cannot_be_read_takes_all_others_along(
    engine: tuple[ScriptLLM, AsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, server = engine

    def take(request: Request) -> RequestOutput:
        if len(request.seqs[0].tokens) > 90:
            raise UnicodeError("no text")
        return LLM.take(llm, request)

    monkeypatch.setattr(llm, "take", take)
    broken, sound = asyncio.create_task(answer(llm, server, "?")), asyncio.create_task(answer(llm, server, "fine"))
    assert await soon(sound) == "fine"
    with pytest.raises(UnicodeError, match="no text"):
        await soon(broken)
    assert await soon(answer(llm, server, "still here")) == "still here"
    assert not llm.engine.has_work and llm.kv.num_available == llm.kv.num_blocks


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_thread_that_ended_is_waited_for(engine: tuple[ScriptLLM, AsyncLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, server = engine

    def step() -> list[Request]:
        raise SystemExit(3)

    monkeypatch.setattr(llm, "step", step)
    with pytest.raises(RequestError, match="closed before this request ended"):
        await soon(answer(llm, server, "?"))
    await asyncio.to_thread(server._thread.join, PATIENCE)
    assert not server.is_alive
    with pytest.raises(RequestError, match="the engine is closed"):
        await soon(server.ask(lambda llm: 1))
    assert not llm.engine.has_work and llm.kv.num_available == llm.kv.num_blocks


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_a_server_times_passes_when_the_first_request_speculates(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without speculation may be asked for it while others run."""
    llm = ScriptLLM({}, pause=0.0)
    llm.speculative_config = llm.speculative_config.override({"method": method})
    llm._is_calibrated = False
    monkeypatch.setattr(llm, "_pass_times", lambda: PassTimes((1, 5), (0.5, 0.75)))
    monkeypatch.setattr(serve, "set_up_log", lambda: None)
    served: list[float] = []

    class Unlistening:
        def __init__(self, llm: LLM, *rest: object) -> None:
            self.llm = llm

        async def serve(self, sockets: object) -> None:
            served.append(self.llm.controller.cost.times.at(1))

    monkeypatch.setattr(serve, "make_server", Unlistening)
    serve.serve(lambda: llm, ServerConfig(port=0), lambda line: None)
    assert served == [0.5]


def test_the_interpreter_ends_while_the_engine_computes() -> None:
    program = (
        "import atexit\n"
        "engines = []\n"
        "atexit.register(lambda: print('alive' if engines[0].is_alive else 'closed'))\n"
        "from foredraft.server.async_llm import AsyncLLM\n"
        "engines.append(AsyncLLM(None))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "closed\n"), ended.stderr
