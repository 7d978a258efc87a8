"""The bodies that the server takes, OpenAI's names first and vLLM's for what OpenAI has no name for.

Owns: names, types and defaults of their fields.  Does not know: what is done with them, or the ranges that the engine checks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from foredraft.types import RequestError, refuse_unknown

T = TypeVar("T")


@dataclass(unsafe_hash=True)
class _FirstOnly(FailFast):
    """FailFast that may stand in a union, whose parts have to be hashable."""


# Only one wrong item is told; to collect the million that a body can hold would hold up all other requests.
Items = Annotated[list[T], _FirstOnly()]

# To compare a longer name with ours would take long and tell nothing.
LONGEST_NAME = 200
# Fields that OpenAI or vLLM know and this server does not honour.  With null or the value given here they change nothing.
NEUTRAL: Mapping[str, Any] = {
    "audio": None,
    "best_of": 1,
    "echo": False,
    "function_call": None,
    "functions": None,
    "metadata": None,
    "modalities": ["text"],
    "prediction": None,
    "prompt_logprobs": None,
    "reasoning_effort": None,
    "service_tier": "auto",
    "store": False,
    "suffix": None,
    "use_beam_search": False,
    "verbosity": None,
    "web_search_options": None,
}


def _printable(name: object) -> str:
    """A key that can be shown; one that is not valid Unicode is spelled out."""
    return str(name).encode("utf-8", "backslashreplace").decode()


class Body(BaseModel):
    """An object whose unknown fields are refused with the nearest valid name."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        names = [field.alias or name for name, field in cls.model_fields.items()]
        known = {}
        for key, value in data.items():
            name = _printable(key)
            if name in names:
                known[name] = value
            elif name not in NEUTRAL:
                try:
                    refuse_unknown("field", name[:LONGEST_NAME], names, RequestError)
                except RequestError as error:
                    raise PydanticCustomError("unknown_field", "{text}", {"text": str(error), "name": name}) from error
            elif value is not None and value != NEUTRAL[name]:
                text = f"{name} is not supported here; leave it out."
                raise PydanticCustomError("unknown_field", "{text}", {"text": text, "name": name})
        return known


class StreamOptions(Body):
    """What a stream carries beside the answer."""

    include_usage: bool = False
    include_speculation: bool = Field(False, description="Each chunk names its tokens and how they came into the answer.")


class Function(Body):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    """A schema that the answer is to follow."""

    name: str = "answer"
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form that the answer is to have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredFields(Body):
    """vLLM's form of the same; exactly one is given."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def _is_bias(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


class SamplingFields(Body):
    """What chats and completions have in common."""

    model: str | None = None
    n: int | None = Field(None, description="Answers to each prompt.")
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Items[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Items[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: Items[int] | None = None
    bad_words: Items[str] | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    speculative: dict[str, Any] | None = Field(
        None, description="This request's own method, num_speculative_tokens and adaptive.", examples=[{"method": "none"}]
    )
    speculation_statistics: bool = Field(False, description="Put the request's statistics into the response.")
    user: str | None = Field(None, description="Taken for the sake of clients that send it; changes nothing.")

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _first_wrong_bias(cls, bias: Any) -> Any:
        """One wrong entry alone when there is any: objects have no FailFast."""
        if not isinstance(bias, dict):
            return bias
        return next(({token: value} for token, value in bias.items() if not _is_bias(value)), bias)


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """A function's name and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call that the model made before."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None

    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatRequest(SamplingFields):
    """Body of ``POST /v1/chat/completions``."""

    messages: Items[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(SamplingFields):
    """Body of ``POST /v1/completions``."""

    prompt: str | Items[int] | Items[str] | Items[Items[int]]
    logprobs: int | None = None


class TokenizeRequest(Body):
    """Body of ``POST /tokenize``: a prompt, or messages as the chat template writes them."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: Items[int]
