"""From a body's wish for a form of the answer to the engine's.

Owns: which fields say so, and their limits.  Does not know: how a form is enforced.
"""

from __future__ import annotations

from typing import Any

from foredraft.server.problems import Problem, bad_request
from foredraft.server.protocol import ChatRequest, SamplingFields
from foredraft.server.settings import ServerConfig


def structured_options(body: SamplingFields, config: ServerConfig) -> dict[str, Any]:
    """The options of SamplingParams that give the answer its form; none when it is free.

    Raises:
        Problem: more than one form is asked for, or one that is not supported or too large.
    """
    if body.response_format is not None and body.response_format.type != "text":
        raise _unsupported("response_format")
    for name in ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        if getattr(body, name) is not None:
            raise _unsupported(name)
    if isinstance(body, ChatRequest) and body.tools and body.tool_choice != "none":
        raise _unsupported("tools")
    return {}


def _unsupported(name: str) -> Problem:
    return bad_request(f"{name} is not supported by this version; leave it out.", name, "unsupported_field")
