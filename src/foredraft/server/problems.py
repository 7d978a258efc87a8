"""What a refused request is answered with, in OpenAI's shape.

Owns: Problem, its status codes and bodies, and how errors from elsewhere become one.  Does not know: what was asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from foredraft.types import ForedraftError

MAX_MESSAGE = 600
STRUCTURED = "structured_outputs"
# By status: OpenAI's ``type`` of an error.
TYPES: Mapping[int, str] = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error"}
# How pydantic names the forms of a value in a place: ``str``, ``list[TextPart]``, ``NamedTool``.
FORM = re.compile(r"str|int|float|bool|[a-z-]+\[.*|[A-Z]\w*", re.DOTALL)


class Problem(Exception):
    """A request that is answered with an error.

    ``param`` names the field that is to blame; ``code`` is a word for programs.  ``retry_after``: seconds.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    def body(self) -> dict[str, Any]:
        """``{"error": {"message", "type", "param", "code"}}``."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = self.message if len(self.message) <= MAX_MESSAGE else self.message[:MAX_MESSAGE] + " ..."
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """As a whole response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (408, 413):
            # The rest of the body was not read, so the connection cannot be used again.
            headers["Connection"] = "close"
        return json_response(self.body(), self.status, headers)


def dumps(data: Any) -> str:
    """Strict JSON in ASCII, which holds even for text that is not valid Unicode."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Plain data as a response."""
    return Response(dumps(data), status, headers=dict(headers or {}), media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> Problem:
    """A request that is wrong in itself."""
    return Problem(400, message, param=param, code=code)


def problem_of(error: BaseException, fields: Sequence[str] = (), form: str = "") -> Problem:
    """What a request that raised ``error`` is answered with.

    ``fields`` are the names that a message may begin with; ``form`` is the field by which the request asked for structured outputs.
    """
    if isinstance(error, Problem):
        return error
    if isinstance(error, ForedraftError):
        message = str(error)
        first = re.match(r"\w+", message)
        param = first[0] if first and first[0] in fields else None
        return bad_request(message, form if form and param == STRUCTURED else param)
    return Problem(500, "the server failed to answer; its log says why.", code="internal_error")


def problem_of_validation(errors: Sequence[Mapping[str, Any]]) -> Problem:
    """One of pydantic's errors as a sentence that names the field; where a value may have several forms, that of the nearest."""
    error = max(errors, key=lambda one: (one["type"] == "unknown_field", len(one["loc"])))
    where = [part for part in error["loc"] if part != "body" and not FORM.fullmatch(str(part))]
    if error["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON ({error.get('ctx', {}).get('error', 'syntax error')}); send valid JSON.")
    if error["type"] == "unknown_field":
        where.append(error["ctx"]["name"])
        return bad_request(str(error["msg"]), _path(where), "unknown_field")
    if not where:
        return bad_request(f"the body must be a JSON object ({error['msg']}); send one with Content-Type: application/json.")
    if error["type"] == "missing":
        return bad_request(f"{_path(where)} is required; add it.", _path(where), "missing_field")
    message = str(error["msg"])
    return bad_request(f"{_path(where)}: {message[:1].lower()}{message[1:]}.", _path(where))


def _path(parts: Sequence[Any]) -> str:
    return ".".join(str(part)[:64] for part in parts)
