"""What may stand in structured_outputs."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from foredraft import structured
from foredraft.errors import shown
from foredraft.types import RequestError, SamplingParams, StructuredOutputs

NAMES = ["json", "regex", "choice", "grammar", "json_object"]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def itself() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    return schema


WRONG = [
    ("json", 5),
    ("json", 10**5000),
    ("json", [nested(5000)]),
    ("json", "5"),
    ("json", "[1]"),
    ("json", ""),
    ("json", "{"),
    ("json", "[" * 60_000),
    ("json", {"minimum": math.inf}),
    ("json", {"const": {1, 2}}),
    ("json", {"const": "\ud800"}),
    ("json", '{"const": "\\ud800"}'),
    ("json", {"minimum": 10**5000}),
    ("json", nested(structured.MAX_SCHEMA_DEPTH + 1)),
    ("json", nested(5000)),
    ("json", itself()),
    ("json", {"description": "x" * structured.MAX_SCHEMA_BYTES}),
    ("regex", ""),
    ("regex", 5),
    ("regex", "\udfff"),
    ("regex", "a" * (structured.MAX_REGEX_BYTES + 1)),
    ("choice", []),
    ("choice", "ab"),
    ("choice", ["a", ""]),
    ("choice", ["a", 5]),
    ("choice", {"a": 1}),
    ("choice", ["\ud800"]),
    ("choice", ["a"] * (structured.MAX_CHOICES + 1)),
    ("choice", ["a" * structured.MAX_CHOICE_BYTES, "b"]),
    ("grammar", ""),
    ("grammar", ["start: A"]),
    ("grammar", "a" * (structured.MAX_GRAMMAR_BYTES + 1)),
    ("json_object", 1),
    ("json_object", "yes"),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{name}-{shown(value, 25)}" for name, value in WRONG])
def test_a_shape_that_cannot_be_is_accepted_or_crashes(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(structured_outputs={name: value})  # type: ignore[arg-type]
    message = str(caught.value)
    assert f"structured_outputs.{name} " in message and len(message) < 400 and "\n" not in message


@pytest.mark.parametrize("value", [5, "json", ["json"], True])
def test_what_is_no_object_is_accepted(value: Any) -> None:
    with pytest.raises(RequestError, match="structured_outputs must be an object"):
        SamplingParams(structured_outputs=value)


def test_an_unknown_field_is_ignored() -> None:
    with pytest.raises(RequestError, match="did you mean 'regex'"):
        SamplingParams.from_dict({"structured_outputs": {"regexp": "a"}})


@pytest.mark.parametrize(
    "options", [{}, {"json_object": False}, {"regex": "a", "choice": ["a"]}, {"json_object": True, "json": {}}]
)
def test_none_or_two_shapes_are_accepted(options: Any) -> None:
    with pytest.raises(RequestError, match="must set exactly one of " + ", ".join(NAMES)):
        StructuredOutputs(**options)


def test_a_shape_that_can_be_complete_never_ends() -> None:
    with pytest.raises(RequestError, match="ignore_eos must be false with structured_outputs"):
        SamplingParams(ignore_eos=True, structured_outputs=StructuredOutputs(regex="a"))


def test_a_schema_is_shared_with_the_caller_or_loses_its_order() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"const": "é"}}}
    made = StructuredOutputs(json=schema)
    schema["properties"].clear()
    assert made.json == '{"type":"object","properties":{"b":{"type":"string"},"a":{"const":"é"}}}'
    assert made == StructuredOutputs(json=json.dumps(json.loads(made.json), indent=2)) and hash(made) == hash(made)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"json": nested(structured.MAX_SCHEMA_DEPTH)}, "json"),
        ({"regex": "a" * structured.MAX_REGEX_BYTES}, "regex"),
        ({"choice": ["a", "b"]}, "choice"),
        ({"grammar": "start: /a/"}, "grammar"),
        ({"json_object": True}, "json_object"),
        ({"json_object": False, "regex": "a"}, "regex"),
    ],
)
def test_a_shape_within_the_limits_is_refused(options: Any, kind: str) -> None:
    params = SamplingParams.from_dict({"structured_outputs": options})
    assert params.structured_outputs is not None and params.structured_outputs.kind == kind
    assert hash(params.structured_outputs) == hash(StructuredOutputs(**options))
