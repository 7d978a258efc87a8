"""Functions that the model may be made to call, for models whose chat format knows of none.

Owns: how functions are told to the model, the form that a call must have, and how it is read back.  Does not know: chat templates,
or how a form is enforced.

A call is one JSON object, ``{"name": ..., "arguments": {...}}``, and its form is enforced while it is written; so the request has
to say that there is to be a call: ``tool_choice`` is ``required`` or names a function.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from foredraft.server.problems import bad_request
from foredraft.server.protocol import ChatRequest, Message, NamedTool, Tool

INTRODUCTION = (
    "You can call one of the following functions. Answer with a JSON object that has the function's name and its arguments, "
    "and nothing else."
)


def chosen_tools(body: ChatRequest) -> list[Tool]:
    """The functions of which one is to be called; none when the answer is to be text.

    Raises:
        Problem: the choice is left to the model, or names no function.
    """
    tools, choice = body.tools or [], body.tool_choice
    if not tools:
        if choice not in (None, "none"):
            raise bad_request("tool_choice needs tools; add some or leave tool_choice out.", "tool_choice")
        return []
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad_request("tools must have different names; rename one.", "tools")
    if choice == "none":
        return []
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in names:
            raise bad_request(f"tool_choice names {name[:64]!r}, which is not among tools; name one of them.", "tool_choice")
        return [tool for tool in tools if tool.function.name == name]
    if choice != "required":
        raise bad_request(
            "the model's chat format has no tools, so it cannot choose whether to call one; set tool_choice to required, none or a "
            "function.",
            "tool_choice",
        )
    return tools


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """The JSON schema of a call of one of the functions."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or {"type": "object", "additionalProperties": False},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def with_tools(messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Messages whose system message tells of the functions."""
    if not tools:
        return list(messages)
    text = "\n".join([INTRODUCTION, *(json.dumps(tool.function.model_dump(exclude_none=True)) for tool in tools)])
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as every chat template takes them: calls and their results are written out."""
    return [_plain(message) for message in messages]


def _plain(message: Message) -> dict[str, Any]:
    name = {"name": message.name} if message.name is not None else {}
    if message.role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.text()}\n</tool_response>", **name}
    calls = [
        f'{{"name": {json.dumps(call.function.name)}, "arguments": {call.function.arguments}}}' for call in message.tool_calls or []
    ]
    text = "\n".join([*([message.text()] if message.text() or not calls else []), *calls])
    return {"role": "system" if message.role == "developer" else message.role, "content": text, **name}


def read_call(text: str, call_id: str) -> dict[str, Any] | None:
    """The call that an answer is, in OpenAI's shape; None when it was cut before its end."""
    try:
        call = json.loads(text)
        function = {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return {"id": call_id, "type": "function", "function": function}
