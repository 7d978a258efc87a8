"""An LLM for asynchronous callers: one thread runs the engine, many coroutines wait for their answers.

Owns: the hand-over between event loops and the engine's thread.  Does not know: HTTP, or what a step does.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from foredraft.llm import LLM, Prompt, Request
from foredraft.outputs import CompletionOutput, RequestOutput
from foredraft.types import RequestError, SamplingParams

Reply = RequestOutput | BaseException
T = TypeVar("T")

logger = logging.getLogger("foredraft.server")


def joined(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """Two parts of one answer, as ``LLM.take`` gives them, as one."""
    pairs = zip(earlier.outputs, later.outputs, strict=True)
    return replace(later, outputs=[_joined_choice(first, then) for first, then in pairs])


def _joined_choice(earlier: CompletionOutput, later: CompletionOutput) -> CompletionOutput:
    logprobs = None if later.logprobs is None else [*(earlier.logprobs or ()), *later.logprobs]
    return replace(
        later,
        text=earlier.text + later.text,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=logprobs,
        origins=earlier.origins + later.origins,
        drafter=later.drafter if later.num_drafted or not earlier.num_drafted else earlier.drafter,
        num_drafted=earlier.num_drafted + later.num_drafted,
    )


class _Mailbox:
    """Holds what one waiting coroutine has not taken yet, joined into a single reply, so a slow one makes no queue grow."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._ready = asyncio.Event()
        self._reply: Reply | None = None

    def put(self, reply: Reply) -> None:
        """Add a reply; from any thread."""
        with self._lock:
            waiting = self._reply
            if isinstance(waiting, RequestOutput) and isinstance(reply, RequestOutput):
                self._reply = joined(waiting, reply)
            elif not isinstance(waiting, BaseException):
                self._reply = reply
        if waiting is None:
            with suppress(RuntimeError):  # the loop has ended, and with it whoever waited
                self._loop.call_soon_threadsafe(self._ready.set)

    async def get(self) -> Reply:
        """Wait for a reply and take it."""
        await self._ready.wait()
        self._ready.clear()
        with self._lock:
            reply, self._reply = self._reply, None
        assert reply is not None
        return reply


@dataclass(eq=False)
class _Client:
    """A waiting coroutine, and the request that it waits for."""

    mailbox: _Mailbox
    whole: bool
    request: Request | None = None


class AnswerStream:
    """One submitted request.  Iterate to receive what is new of the answer; ``close`` cancels it if it still runs."""

    def __init__(self, client: _Client, close: Callable[[], None]) -> None:
        self._client = client
        self.close = close

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        try:
            while True:
                reply = await self._client.mailbox.get()
                if isinstance(reply, BaseException):
                    raise reply
                yield reply
                if reply.finished:
                    break
        finally:
            self.close()


class AsyncLLM:
    """Serves requests from any event loop or thread with one ``llm``, batched together.

    Use as ``async for output in AsyncLLM(llm).generate(...)``; leaving the loop early cancels the request.  Call ``close`` in the
    end; it aborts what still runs.

    Args:
        llm: nothing else may use it from then on.
        on_step: called with ``llm`` in the engine's thread after each step.
    """

    def __init__(self, llm: LLM, on_step: Callable[[LLM], None] | None = None) -> None:
        self._llm = llm
        self._on_step = on_step
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._clients: dict[str, _Client] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="foredraft-engine", daemon=True)
        self._thread.start()
        # A thread that comes back from a pass while the interpreter ends would abort the process.
        atexit.register(self.close)

    @property
    def is_alive(self) -> bool:
        """Whether the engine takes requests."""
        return self._thread.is_alive() and not self._closed

    async def open(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, tenant: str = "", whole: bool = False
    ) -> AnswerStream:
        """Submit a request, and return when the engine has taken it.

        ``whole`` gives the answer in one piece at its end.

        Raises:
            RequestError: the request is wrong, or the engine is closed.
        """
        client = _Client(_Mailbox(), whole)
        stream = AnswerStream(client, lambda: self._discard(client))
        try:
            await self.ask(lambda llm: self._submit(client, prompt, sampling_params, tenant))
        except BaseException:
            stream.close()
            raise
        return stream

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, tenant: str = ""
    ) -> AsyncIterator[RequestOutput]:
        """Yield what is new of one answer, as it comes; see LLM.stream.

        Raises:
            RequestError: the request is wrong, or the engine is closed.
        """
        stream = await self.open(prompt, sampling_params, tenant=tenant)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def ask(self, question: Callable[[LLM], T]) -> T:
        """What ``question`` returns when it is called with the LLM in the engine's thread, between two steps.

        Raises:
            RequestError: the engine is closed.
        """
        future: Future[T] = Future()

        def answer() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(question(self._llm))
            except BaseException as error:
                future.set_exception(error)

        if not self._post(answer):
            raise RequestError("the engine is closed; start a new one.")
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Abort what runs and end the thread; further requests are refused."""
        with self._lock:
            self._closed = True
            self._commands.put(lambda: None)
        self._thread.join()
        atexit.unregister(self.close)

    def _post(self, command: Callable[[], None]) -> bool:
        """Hand a command to the engine's thread; False when nobody would ever run it."""
        with self._lock:
            if not self._closed:
                self._commands.put(command)
            return not self._closed

    def _discard(self, client: _Client) -> None:
        self._post(lambda: self._abort(client))

    # Everything below runs in the engine's thread.

    def _work(self) -> None:
        try:
            while not self._closed:
                self._drain(wait=not self._clients)
                if self._clients and not self._closed:
                    self._step()
        finally:
            # Also where something ends the thread: from here on nobody may wait for it.
            with self._lock:
                self._closed = True
            self._drain(wait=False)
            self._fail_all(RequestError("the engine was closed before this request ended; send it again."))

    def _drain(self, wait: bool) -> None:
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return
            wait = False
            try:
                command()
            except Exception:
                # Whoever waits for an answer has got the error; the others have no part in it.
                logger.exception("a command to the engine failed")

    def _fail_all(self, error: BaseException) -> None:
        for client in list(self._clients.values()):
            self._fail(client, error)

    def _fail(self, client: _Client, error: BaseException) -> None:
        """End a request with an error, whatever goes wrong at its end."""
        self._abort(client)
        client.mailbox.put(error)

    def _step(self) -> None:
        try:
            touched = self._llm.step()
            if self._on_step is not None:
                self._on_step(self._llm)
        except Exception as error:
            # The step may have failed for any of them, and its state is unknown: all get the error, none hangs.
            self._fail_all(error)
            return
        for request in touched:
            client = self._clients[request.request_id]
            try:
                if request.finished or not client.whole:
                    client.mailbox.put(self._llm.take(request))
            except Exception as error:
                self._fail(client, error)
            if request.finished:
                self._clients.pop(request.request_id, None)

    def _submit(self, client: _Client, prompt: Prompt, params: SamplingParams | None, tenant: str) -> None:
        client.request = self._llm.submit(prompt, params, tenant=tenant)
        self._clients[client.request.request_id] = client

    def _abort(self, client: _Client) -> None:
        if client.request is not None and self._clients.pop(client.request.request_id, None) is not None:
            try:
                self._llm.abort(client.request)
            except Exception:
                # Its blocks are free all the same, and whoever waits for it is told why it ends.
                logger.exception("a request was not ended as it should be")
