"""Answers jobs: admits them, has the engine run them, and writes the reply, whole or as events.

Owns: how many may run and wait, time limits, and the end of a request for whatever reason.  Does not know: fields of bodies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foredraft.outputs import RequestOutput
from foredraft.server.async_llm import AnswerStream, AsyncLLM
from foredraft.server.gate import EventStream, unless_gone
from foredraft.server.jobs import Job
from foredraft.server.problems import Problem, dumps, json_response, problem_of
from foredraft.server.prometheus import Metrics
from foredraft.server.replies import Reply
from foredraft.server.settings import ServerConfig

MAX_RETRY_SECONDS = 30


class Admission:
    """Counts the answers that run or wait, and refuses those for which there is no place."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._max_running, self._capacity = max_running, max_running + max_waiting
        self._seconds = 1.0
        self.num_open = 0
        self.is_draining = False

    def enter(self, num: int) -> None:
        """Take places for ``num`` answers.

        Raises:
            Problem: 503 when the server is about to stop, 429 when there are not enough places.
        """
        if self.is_draining:
            raise Problem(503, "the server is shutting down; send the request to another.", code="shutting_down", retry_after=5)
        if self.num_open + num > self._capacity:
            rounds = 1 + self.num_open // self._max_running
            seconds = max(1, min(MAX_RETRY_SECONDS, round(rounds * self._seconds)))
            message = f"{self.num_open} answers run or wait, and {self._capacity} may; try again in {seconds} s."
            raise Problem(429, message, code="queue_full", retry_after=seconds)
        self.num_open += num

    def leave(self, num: int, seconds: float) -> None:
        """Give the places back after ``seconds``."""
        self.num_open -= num
        self._seconds += 0.1 * (seconds - self._seconds)


class _Run:
    """One job in the engine: its places and its streams, given back once."""

    def __init__(self, service: Service, job: Job, log: dict[str, Any]) -> None:
        self.job, self.log = job, log
        self.streams: list[AnswerStream] = []
        self._service = service
        self._start = time.perf_counter()
        self._is_open = True
        self.deadline = time.monotonic() + service.config.request_timeout
        service.admission.enter(job.num_choices)

    async def open(self, tenant: str) -> None:
        """Submit every prompt."""
        engine, job = self._service.engine, self.job
        for prompt in job.prompts:
            self.streams.append(await engine.open(prompt, job.params, tenant=tenant, whole=not job.stream))
            self._service.metrics.count_prompt(len(prompt))

    async def close(self) -> None:
        """Cancel what still runs and give the places back; does nothing the second time."""
        if self._is_open:
            self._is_open = False
            for stream in self.streams:
                stream.close()
            self._service.admission.leave(self.job.num_choices, time.perf_counter() - self._start)

    def note(self, outputs: Sequence[RequestOutput], num_tokens: Sequence[int], finish_reasons: Sequence[str | None]) -> None:
        """Put what came of it into log and metrics; ``num_tokens`` are those of each prompt's answers."""
        first = outputs[0].metrics.time_to_first_token
        self.log.update(
            prompt_tokens=sum(len(prompt) for prompt in self.job.prompts),
            completion_tokens=sum(num_tokens),
            finish_reasons=list(finish_reasons),
            seconds_to_first_token=None if first is None else round(first, 4),
        )
        for output, num in zip(outputs, num_tokens, strict=True):
            self._service.metrics.count_answer(output, num)


class Service:
    """Runs jobs on one engine."""

    def __init__(self, engine: AsyncLLM, config: ServerConfig, metrics: Metrics, max_num_seqs: int) -> None:
        self.engine, self.config, self.metrics = engine, config, metrics
        self.admission = Admission(max_num_seqs, config.max_queue)

    async def answer(self, request: Request, job: Job, reply: Reply) -> Response:
        """The response to a job.

        Raises:
            Problem, RequestError: it cannot be answered.
        """
        state = request.scope["state"]
        run = _Run(self, job, state["log"])
        try:
            await run.open(state.get("tenant", ""))
            if job.stream:
                return EventStream(self._events(run, reply), run.close, self.config.write_timeout)
            outputs = await unless_gone(request.receive, self._collect(run))
        except BaseException:
            await run.close()
            raise
        await run.close()
        if outputs is None:
            run.log["ended"] = "the client left"
            return Response(status_code=499)
        body = reply.whole(outputs)
        run.note(outputs, reply.num_tokens, [choice.finish_reason for output in outputs for choice in output.outputs])
        if self.config.log_prompts:
            run.log["answers"] = [choice.text for output in outputs for choice in output.outputs]
        return json_response(body)

    async def _collect(self, run: _Run) -> list[RequestOutput]:
        last: dict[int, RequestOutput] = {}
        async for index, output in _merged(run):
            last[index] = output
        outputs = [last[index] for index in sorted(last)]
        _check(outputs)
        return outputs

    async def _events(self, run: _Run, reply: Reply) -> AsyncIterator[str]:
        """Chunks as JSON, then ``[DONE]``; an error ends them instead."""
        last: dict[int, RequestOutput] = {}
        reasons: list[str | None] = []
        pieces: dict[tuple[int, int], list[str]] = {}
        try:
            for chunk in reply.opening():
                yield dumps(chunk)
            async for index, output in _merged(run):
                last[index] = output
                _check([output])
                if self.config.log_prompts:
                    for choice in output.outputs:
                        pieces.setdefault((index, choice.index), []).append(choice.text)
                for chunk in reply.chunks(index, output):
                    yield dumps(chunk)
                    reasons += [reason for one in chunk["choices"] if (reason := one["finish_reason"]) is not None]
            outputs = [last[index] for index in sorted(last)]
            run.note(outputs, reply.num_tokens, reasons)
            if self.config.log_prompts:
                run.log["answers"] = ["".join(pieces[place]) for place in sorted(pieces)]
            for chunk in reply.closing(outputs):
                yield dumps(chunk)
            yield "[DONE]"
        except Exception as error:
            problem = problem_of(error)
            run.log["ended"] = problem.message
            yield dumps(problem.body())


def _check(outputs: Sequence[RequestOutput]) -> None:
    """Raise when an answer ended for no reason of its own."""
    for output in outputs:
        for choice in output.outputs:
            if choice.finish_reason == "error":
                reason = str(choice.stop_reason)
                # What a request forbids may leave nothing to say; anything else is the model's own failure.
                is_ours = "the model produced" in reason and "-inf" not in reason
                raise Problem(500 if is_ours else 400, f"the model cannot go on: {reason}", code="no_next_token")


async def _merged(run: _Run) -> AsyncIterator[tuple[int, RequestOutput]]:
    """What comes from the streams, with the index of its prompt, until the deadline.

    Raises:
        Problem: the time is over.
    """
    iterators = [stream.__aiter__() for stream in run.streams]
    waiting = {asyncio.ensure_future(_next(iterator)): index for index, iterator in enumerate(iterators)}
    try:
        while waiting:
            seconds = max(0.0, run.deadline - time.monotonic())
            done, _ = await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise Problem(408, "the answer took longer than this server allows; lower max_tokens.", code="request_timeout")
            for task in done:
                index = waiting.pop(task)
                output = task.result()
                if not output.finished:
                    waiting[asyncio.ensure_future(_next(iterators[index]))] = index
                yield index, output
    finally:
        for task in waiting:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*waiting, return_exceptions=True)


async def _next(iterator: AsyncIterator[RequestOutput]) -> RequestOutput:
    return await iterator.__anext__()
