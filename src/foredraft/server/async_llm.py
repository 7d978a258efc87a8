"""An LLM for asynchronous callers: one thread runs the engine, many coroutines wait for their answers.

Owns: the hand-over between event loops and the engine's thread.  Does not know: HTTP, or what a step does.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from foredraft.llm import LLM, Prompt, Request
from foredraft.outputs import RequestOutput
from foredraft.types import RequestError, SamplingParams

Reply = RequestOutput | BaseException


@dataclass
class _Client:
    """A waiting coroutine: ``send`` puts a reply into its queue from the engine's thread."""

    loop: asyncio.AbstractEventLoop
    replies: asyncio.Queue[Reply]
    request: Request | None = None

    def send(self, reply: Reply) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.replies.put_nowait, reply)


class AsyncLLM:
    """Serves requests from any event loop or thread with one ``llm``, batched together.

    Use as ``async for output in AsyncLLM(llm).generate(...)``; leaving the loop early cancels the request.  Call ``close`` in the
    end; it aborts what still runs.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._clients: dict[str, _Client] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="foredraft-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, tenant: str = ""
    ) -> AsyncIterator[RequestOutput]:
        """Yield what is new of one answer, as it comes; see LLM.stream.

        Raises:
            RequestError: the request is wrong, or the engine is closed.
        """
        client = _Client(asyncio.get_running_loop(), asyncio.Queue())
        if not self._post(lambda: self._submit(client, prompt, sampling_params, tenant)):
            raise RequestError("the engine is closed; start a new one.")
        try:
            while True:
                reply = await client.replies.get()
                if isinstance(reply, BaseException):
                    raise reply
                yield reply
                if reply.finished:
                    break
        finally:
            self._post(lambda: self._abort(client))

    def close(self) -> None:
        """Abort what runs and end the thread; further requests are refused."""
        with self._lock:
            self._closed = True
            self._commands.put(lambda: None)
        self._thread.join()

    def _post(self, command: Callable[[], None]) -> bool:
        """Hand a command to the engine's thread; False when nobody would ever run it."""
        with self._lock:
            if not self._closed:
                self._commands.put(command)
            return not self._closed

    # Everything below runs in the engine's thread.

    def _work(self) -> None:
        while not self._closed:
            self._drain(wait=not self._clients)
            if self._clients and not self._closed:
                self._step()
        self._drain(wait=False)
        for client in list(self._clients.values()):
            self._abort(client)
            client.send(RequestError("the engine was closed before this request ended; send it again."))

    def _drain(self, wait: bool) -> None:
        while True:
            try:
                self._commands.get(block=wait)()
            except queue.Empty:
                return
            wait = False

    def _step(self) -> None:
        try:
            touched = self._llm.step()
        except Exception as error:
            # The step may have failed for any of them, and its state is unknown: all get the error, none hangs.
            for client in list(self._clients.values()):
                self._abort(client)
                client.send(error)
            return
        for request in touched:
            client = self._clients[request.request_id]
            client.send(self._llm.take(request))
            if request.finished:
                del self._clients[request.request_id]

    def _submit(self, client: _Client, prompt: Prompt, params: SamplingParams | None, tenant: str) -> None:
        try:
            client.request = self._llm.submit(prompt, params, tenant=tenant)
        except Exception as error:
            client.send(error)
        else:
            self._clients[client.request.request_id] = client

    def _abort(self, client: _Client) -> None:
        if client.request is not None and self._clients.pop(client.request.request_id, None) is not None:
            self._llm.abort(client.request)
