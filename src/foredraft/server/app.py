"""The routes of the server.

Owns: paths, and what each hands to whom.  Does not know: how an answer is made or written.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from foredraft import __version__
from foredraft.llm import LLM
from foredraft.server.async_llm import AsyncLLM
from foredraft.server.gate import Gate
from foredraft.server.jobs import PARAMETER_NAMES, Job, JobMaker
from foredraft.server.live_page import PageFiles, index
from foredraft.server.monitor import Monitor
from foredraft.server.problems import Problem, bad_request, json_response, problem_of, problem_of_validation
from foredraft.server.prometheus import Metrics, engine_counters
from foredraft.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from foredraft.server.replies import ChatReply, CompletionReply, Reply
from foredraft.server.service import Service
from foredraft.server.settings import ServerConfig
from foredraft.server.tools import plain_messages
from foredraft.types import ForedraftError

logger = logging.getLogger("foredraft.server")

ERROR_SCHEMA = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": ERROR_SCHEMA}}}
    for status, text in {
        400: "A field is wrong; the error names it.",
        401: "The API key is missing or wrong.",
        403: "The request was sent to a name that is not this machine's.",
        404: "No such model.",
        408: "It took too long.",
        413: "The body is too large.",
        429: "Too many requests wait.",
        503: "The server is about to stop.",
    }.items()
}


class Server:
    """All parts of one server around an LLM, and the routes over them.

    Args:
        llm: nothing else may use it from then on.
        config: limits and keys.
        draw_seed: gives the seed of a request that has none; small enough for a JavaScript number.
        clock: seconds since the epoch.
    """

    def __init__(
        self, llm: LLM, config: ServerConfig, draw_seed: Callable[[], int], clock: Callable[[], float] = time.time
    ) -> None:
        self.config = config
        self.model = config.served_model_name or llm.checkpoint.name
        self.max_model_len = llm.max_model_len
        self.tokenizer = llm.checkpoint.tokenizer
        self.monitor = Monitor(llm, self.model, clock)
        self.engine = AsyncLLM(llm, self.monitor.on_step)
        self.metrics = Metrics(self.model)
        self.service = Service(self.engine, config, self.metrics, llm.config.max_num_seqs)
        self.jobs = JobMaker(llm, config, draw_seed)
        self._clock = clock
        self._started = int(clock())
        self._fingerprint = f"foredraft-{__version__}-{llm.checkpoint.quantization}-{llm.target.exactness}"

    def app(self) -> FastAPI:
        """The ASGI application; when it ends, the engine is closed."""

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            yield
            await asyncio.to_thread(self.engine.close)

        app = FastAPI(title="foredraft", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
        app.include_router(self._routes())
        app.mount("/page", PageFiles(), name="page")
        app.add_exception_handler(RequestValidationError, _on_validation)
        for error in (Problem, ForedraftError, Exception):
            app.add_exception_handler(error, _on_error)
        app.add_exception_handler(HTTPException, _on_http)
        app.openapi = lambda: _description(app)  # type: ignore[method-assign]
        app.add_middleware(Gate, config=self.config, count=self.metrics.count_response)
        if self.config.cors_origins:
            app.add_middleware(
                CORSMiddleware, allow_origins=list(self.config.cors_origins), allow_methods=["*"], allow_headers=["*"]
            )
        return app

    def _routes(self) -> APIRouter:
        router = APIRouter()
        post, get = router.post, router.get
        post("/v1/chat/completions", responses=ERRORS, tags=["answers"])(self.chat)
        post("/v1/completions", responses=ERRORS, tags=["answers"])(self.complete)
        get("/v1/models", tags=["about"])(self.models)
        get("/v1/speculation", tags=["about"])(self.speculation)
        get("/health", tags=["about"])(self.health)
        get("/metrics", tags=["about"])(self.prometheus)
        get("/", include_in_schema=False)(self.page)
        post("/tokenize", responses=ERRORS, tags=["tokens"])(self.tokenize)
        post("/detokenize", responses=ERRORS, tags=["tokens"])(self.detokenize)
        return router

    # -------------------------------------------------------------------------------------------- answers

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        self._check_model(body.model)
        job = await asyncio.to_thread(self.jobs.chat, body)
        return await self._answer(request, job, ChatReply(self._identity("chatcmpl", request), job, self.tokenizer))

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        """Continue prompts."""
        self._check_model(body.model)
        job = await asyncio.to_thread(self.jobs.completion, body)
        return await self._answer(request, job, CompletionReply(self._identity("cmpl", request), job, self.tokenizer))

    async def _answer(self, request: Request, job: Job, reply: Reply) -> Response:
        if self.config.log_prompts:
            request.scope["state"]["log"]["prompts"] = [self.tokenizer.decode(prompt, False) for prompt in job.prompts]
        try:
            return await self.service.answer(request, job, reply)
        except ForedraftError as error:
            raise problem_of(error, PARAMETER_NAMES, job.form) from error

    def _identity(self, prefix: str, request: Request) -> dict[str, Any]:
        name = f"{prefix}-{request.scope['state']['request_id'].removeprefix('req-')}"
        return {"id": name, "created": int(self._clock()), "model": self.model, "system_fingerprint": self._fingerprint}

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise Problem(
                404,
                f"there is no model {name[:200]!r} here; this server has {self.model!r}.",
                param="model",
                code="model_not_found",
            )

    # -------------------------------------------------------------------------------------------- tokens

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """Token ids of a prompt, or of messages in the model's chat format."""
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages.", "prompt")
        return await asyncio.to_thread(self._tokenized, body)

    def _tokenized(self, body: TokenizeRequest) -> Response:
        if body.prompt is not None:
            ids = self.tokenizer.encode(body.prompt, body.add_special_tokens)
        else:
            ids = self.tokenizer.encode_chat(plain_messages(body.messages or []), body.add_generation_prompt)
        strings = {"token_strs": [self.tokenizer.decode([token], False) for token in ids]} if body.return_token_strs else {}
        return json_response({"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids, **strings})

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        self._check_model(body.model)
        if any(not 0 <= token < 2**31 for token in body.tokens):
            raise bad_request("tokens must be token ids of at least 0.", "tokens")
        return json_response({"prompt": await asyncio.to_thread(self.tokenizer.decode, body.tokens, False)})

    # -------------------------------------------------------------------------------------------- about the server

    async def models(self) -> Response:
        """The one model that is served."""
        entry = {
            "id": self.model,
            "object": "model",
            "created": self._started,
            "owned_by": "foredraft",
            "max_model_len": self.max_model_len,
        }
        return json_response({"object": "list", "data": [entry]})

    async def speculation(self) -> Response:
        """What speculation does now and did in the last minute."""
        return json_response(await self.engine.ask(self.monitor.state))

    async def health(self) -> Response:
        """200 while requests are taken."""
        if not self.engine.is_alive:
            raise Problem(503, "the engine has ended; restart the server.", code="engine_dead")
        if self.service.admission.is_draining:
            raise Problem(503, "the server is shutting down.", code="shutting_down")
        return json_response({"status": "ok", "model": self.model})

    async def page(self) -> Response:
        """The live page."""
        return index()

    async def prometheus(self) -> Response:
        """Metrics in Prometheus's format."""
        state, counters = await self.engine.ask(lambda llm: (self.monitor.state(llm), engine_counters(llm)))
        return Response(self.metrics.render(state, counters), media_type="text/plain; version=0.0.4; charset=utf-8")


def _description(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, with errors as they are answered here."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        app.openapi_schema = document
    return app.openapi_schema


# ------------------------------------------------------------------------------------------------ errors


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), error
    return problem_of_validation(error.errors()).response()


async def _on_error(request: Request, error: Exception) -> Response:
    problem = problem_of(error, PARAMETER_NAMES)
    if problem.status == 500:
        logger.error("a request failed", exc_info=error)
    return problem.response()


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), error
    texts = {404: "there is nothing at this path.", 405: "this path does not take this method."}
    response = Problem(error.status_code, texts.get(error.status_code, str(error.detail)), code="http_error").response()
    response.headers.update(error.headers or {})
    return response
