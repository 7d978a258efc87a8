"""From a body's wish for a form of the answer to the engine's.

Owns: which fields say so.  Does not know: how a form is enforced, or how large it may be.
"""

from __future__ import annotations

from typing import Any

from foredraft.server.problems import STRUCTURED, bad_request
from foredraft.server.protocol import ResponseFormat, SamplingFields

# vLLM's older names, and what they are called now.
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def form_of(body: SamplingFields, call_schema: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """(the field that asks for a form, ``SamplingParams.structured_outputs``); ("", {}) when the answer is free.

    ``call_schema`` is that of a function call that is asked for.

    Raises:
        Problem: more than one form is asked for, or it is incomplete.
    """
    forms: dict[str, dict[str, Any]] = {}
    if call_schema is not None:
        forms["tools"] = {"json": call_schema}
    if body.response_format is not None and body.response_format.type != "text":
        forms["response_format"] = _response_format(body.response_format)
    if body.structured_outputs is not None:
        forms[STRUCTURED] = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    forms.update({name: {now: value} for name, now in GUIDED.items() if (value := getattr(body, name)) is not None})
    if len(forms) > 1:
        raise bad_request(f"{' and '.join(forms)} cannot be combined; leave out all but one.", list(forms)[1])
    return next(iter(forms.items()), ("", {}))


def _response_format(wish: ResponseFormat) -> dict[str, Any]:
    if wish.type == "json_object":
        return {"json_object": True}
    if wish.json_schema is None or wish.json_schema.json_schema is None:
        raise bad_request(
            "response_format.json_schema.schema is required; add it.", "response_format.json_schema.schema", "missing_field"
        )
    return {"json": wish.json_schema.json_schema}
