"""What every request passes before and after it is handled: who asks, how much is sent, and a line in the log.

Owns: authentication, the names that requests may be sent to, the limit on bodies, the log of requests, and the end of a response
whose reader has gone.  Does not know: what a body means.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import anyio
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.errors import shown
from foredraft.server.problems import Problem, problem_of
from foredraft.server.settings import ServerConfig

T = TypeVar("T")

# Pages and the health check are open: the page asks for the key and sends it along with what it asks.
OPEN_PATHS = ("/", "/health", "/favicon.ico")
OPEN_PREFIX = "/page/"
# Asked for again and again by pages and watchers; logged only when something is wrong.
POLLED_PATHS = ("/health", "/metrics", "/v1/speculation")
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")

logger = logging.getLogger("foredraft.server")


class Keys:
    """The API keys.  Keeps hashes only."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def tenant(self, authorization: str) -> str | None:
        """A name for whoever has the key in ``Authorization: Bearer KEY``; None for a wrong or missing key.

        All keys are compared, each in constant time.  Without keys there is one tenant, "".
        """
        if not self._digests:
            return ""
        scheme, _, key = authorization.partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return given.hex() if any(matches) and scheme.lower() == "bearer" else None


class Hosts:
    """The names that requests may be sent to: any, but for a server without keys that only this machine can reach.

    The page of another site can let its own name point to this machine (DNS rebinding).  The browser then takes the server for a
    part of that site, so that the rules on origins do not hold; what gives it away is the ``Host`` header.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._names = {*LOCAL_NAMES, config.host.lower()} if config.is_local and not config.api_keys else None

    def check(self, host: bytes | None) -> None:
        """Let a request with this ``Host`` header pass; HTTP/1.0, which no browser speaks, needs none.

        Raises:
            Problem: it was sent to another name.
        """
        if self._names is None or host is None:
            return
        name = host.decode("latin-1")
        if re.sub(r":[0-9]*\Z", "", name).lower() not in self._names:
            raise Problem(
                403,
                f"without API keys the Host header must be localhost, 127.0.0.1 or [::1], not {shown(name)}; "
                "ask one of them, or start the server with --api-key.",
                code="wrong_host",
            )


class Gate:
    """ASGI middleware.  ``scope["state"]`` gets ``request_id``, ``tenant`` and a ``log`` that handlers may add to."""

    def __init__(self, app: ASGIApp, config: ServerConfig, count: Callable[[str, int], None]) -> None:
        self._app = app
        self._config = config
        self._count = count
        self._hosts = Hosts(config)
        self._keys = Keys(config.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, request_id = time.perf_counter(), f"req-{uuid.uuid4().hex}"
        log: dict[str, Any] = {}
        scope["state"] = {**scope.get("state", {}), "request_id": request_id, "log": log}
        status = 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._admit(scope, receive, send_on)
        except Exception as error:
            if status:  # too late for another answer
                raise
            # Answered here, so that what is counted, logged and sent along is that of any other answer.
            logger.error("a request failed", exc_info=error)
            await problem_of(error).response()(scope, receive, send_on)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "other")
            self._count(path, status)
            seconds = round(time.perf_counter() - start, 4)
            tenant = scope["state"].get("tenant", "")[:8]
            fields = {"request_id": request_id, "method": scope["method"], "path": path, "status": status, "seconds": seconds}
            level = logging.DEBUG if path in POLLED_PATHS and status < 500 else logging.INFO
            logger.log(level, "request", extra={"fields": {**fields, **({"tenant": tenant} if tenant else {}), **log}})

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        try:
            self._hosts.check(headers.get(b"host"))
            self._check_key(headers, scope)
            body = await read_body(headers, receive, self._config.max_body_bytes, self._config.body_timeout)
        except Problem as problem:
            await problem.response()(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, replay(body, receive), send)

    def _check_key(self, headers: Mapping[bytes, bytes], scope: Scope) -> None:
        path = scope["path"]
        if path not in OPEN_PATHS and not path.startswith(OPEN_PREFIX) and scope["method"] != "OPTIONS":
            tenant = self._keys.tenant(headers.get(b"authorization", b"").decode("latin-1"))
            if tenant is None:
                raise Problem(401, "the API key is missing or wrong; send Authorization: Bearer KEY.", code="invalid_api_key")
            scope["state"]["tenant"] = tenant


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, max_bytes: int, seconds: float) -> bytes | None:
    """The whole body; None when the client left while sending it.

    Raises:
        Problem: it is too large, or takes too long to come.
    """
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    deadline = time.monotonic() + seconds
    while True:
        try:
            with anyio.fail_after(max(0.0, deadline - time.monotonic())):
                message = await receive()
        except TimeoutError:
            raise Problem(408, f"the body did not come within {seconds:g} s; send it faster.", code="body_timeout") from None
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(max_bytes: int) -> Problem:
    return Problem(413, f"the body is larger than {max_bytes} bytes; send less.", code="body_too_large")


def replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives ``body`` first."""
    given = False

    async def receive_again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


# ------------------------------------------------------------------------------------------------ readers that leave


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """What ``work`` returns; None, with the work cancelled, when the client has left."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_departure(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, written as fast as the client takes them.

    ``close`` is awaited in any case.  A client that takes nothing for ``write_timeout`` seconds is left.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], close: Callable[[], Awaitable[None]], write_timeout: float) -> None:
        super().__init__(None, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._write_timeout = write_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write everything."""
        try:
            if await unless_gone(receive, self._write(scope, send)) is None:
                scope["state"]["log"]["ended"] = "the client left"
        finally:
            await self._close()

    async def _write(self, scope: Scope, send: Send) -> bool:
        async def push(message: Message) -> None:
            # asyncio.wait_for, until Python 3.12, loses a cancellation that comes as the write ends: the stream would go on.
            with anyio.fail_after(self._write_timeout):
                await send(message)

        try:
            await push({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                await push({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
            await push({"type": "http.response.body", "body": b"", "more_body": False})
            return True
        except TimeoutError:
            scope["state"]["log"]["ended"] = "the client took no data"
            return False
