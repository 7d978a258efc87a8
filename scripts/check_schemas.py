"""Whether answers to JSON schemas are valid, and whether drafts change them.

Usage: ``python scripts/check_schemas.py MODEL [--prompts 20] [--methods auto ngram]``.  Prints one JSON object: per schema and
method the answers that are valid, that were cut by max_tokens, and that differ from plain decoding's tokens, and tokens per pass.

Ten schemas of different shape, each asked with as many prompts at temperature 1.  Every string and list has a longest length
and no object further properties, so that an answer comes to an end.  Other methods than ``auto`` draft in every step.  The
judge, ``jsonschema``, is independent; it is among the development dependencies.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from foredraft import LLM, RequestOutput, SamplingParams, StructuredOutputs

MAX_TOKENS = 600
TEXT = {"type": "string", "maxLength": 60}
SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "person": {
        "type": "object",
        "properties": {"name": TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 120}, "email": TEXT},
        "required": ["name", "age", "email"],
        "additionalProperties": False,
    },
    "enumeration": {
        "type": "object",
        "properties": {"sentiment": {"enum": ["positive", "neutral", "negative"]}, "sure": {"type": "boolean"}},
        "required": ["sentiment", "sure"],
        "additionalProperties": False,
    },
    "numbers": {"type": "array", "items": {"type": "number", "minimum": -100, "maximum": 100}, "minItems": 2, "maxItems": 6},
    "nested": {
        "$defs": {"address": {"type": "object", "properties": {"city": TEXT}, "required": ["city"], "additionalProperties": False}},
        "type": "object",
        "properties": {
            "title": TEXT,
            "author": {
                "type": "object",
                "properties": {"name": TEXT, "address": {"$ref": "#/$defs/address"}},
                "required": ["name", "address"],
                "additionalProperties": False,
            },
        },
        "required": ["title", "author"],
        "additionalProperties": False,
    },
    "rows": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"item": TEXT, "price": {"type": "number", "minimum": 0}, "in_stock": {"type": "boolean"}},
            "required": ["item", "price", "in_stock"],
            "additionalProperties": False,
        },
        "minItems": 1,
        "maxItems": 3,
    },
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": TEXT, "c": {"type": ["string", "null"], "maxLength": 20}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "alternatives": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "circle"}, "radius": {"type": "number"}},
                "required": ["kind", "radius"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {"kind": {"const": "square"}, "side": {"type": "integer"}},
                "required": ["kind", "side"],
                "additionalProperties": False,
            },
        ]
    },
    "pattern": {
        "type": "object",
        "properties": {
            "phone": {"type": "string", "pattern": "^\\+[0-9]{2} [0-9]{3,9}$"},
            "date": {"type": "string", "format": "date"},
        },
        "required": ["phone", "date"],
        "additionalProperties": False,
    },
    "tree": {
        "$defs": {
            "leaf": {"type": "object", "properties": {"name": TEXT}, "required": ["name"], "additionalProperties": False},
            "node": {
                "type": "object",
                "properties": {"name": TEXT, "children": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 3}},
                "required": ["name", "children"],
                "additionalProperties": False,
            },
        },
        "$ref": "#/$defs/node",
    },
    "tuple": {
        "type": "object",
        "properties": {
            "point": {
                "type": "array",
                "prefixItems": [{"type": "integer"}, {"type": "integer"}, {"enum": ["m", "km"]}],
                "items": False,
                "minItems": 3,
            },
            "label": {"type": "string", "minLength": 2, "maxLength": 12},
        },
        "required": ["point", "label"],
        "additionalProperties": False,
    },
}
TOPICS = (
    "a lighthouse keeper", "the city of Lisbon", "a bakery", "the moon", "an old bicycle", "a football match", "rain in April",
    "a library", "three cats", "a birthday", "the number seven", "a river", "a broken phone", "a concert", "green tea", "a doctor",
    "winter", "a train to Rome", "a chess game", "bread",
)  # fmt: skip


def prompts(llm: LLM, name: str, count: int) -> list[list[int]]:
    """Chat prompts for one schema."""
    asked = (TOPICS[i % len(TOPICS)] for i in range(count))
    return [llm.chat_prompt([{"role": "user", "content": f"Write JSON ({name}) about {topic}."}]) for topic in asked]


def ask(llm: LLM, name: str, count: int, method: str, seed: int = 0) -> list[RequestOutput]:
    """Answers at temperature 1, request i with seed ``seed + i``."""
    shape = StructuredOutputs(json=SCHEMAS[name])
    many = [
        SamplingParams(
            temperature=1.0,
            seed=seed + i,
            max_tokens=MAX_TOKENS,
            structured_outputs=shape,
            speculative={"method": method, "adaptive": method == "auto"},
        )
        for i in range(count)
    ]
    return llm.generate(prompts(llm, name, count), many)


def problem(name: str, text: str) -> str:
    """Why a text is no answer to a schema; empty when it is one."""
    import jsonschema

    try:
        jsonschema.validate(json.loads(text), SCHEMAS[name], format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return ""


def compared(name: str, outputs: Sequence[RequestOutput], plain: Sequence[RequestOutput]) -> dict[str, Any]:
    """The figures of one schema and method."""
    answers = [output.outputs[0] for output in outputs]
    problems = [problem(name, answer.text) for answer in answers if answer.finish_reason == "stop"]
    stats = [output.metrics.speculation for output in outputs]
    passes = sum(stat.target_passes for stat in stats)
    return {
        "valid": problems.count(""),
        "invalid": [text for text in problems if text],
        "cut": sum(answer.finish_reason == "length" for answer in answers),
        "broken": [answer.stop_reason for answer in answers if answer.finish_reason not in ("stop", "length")],
        "differ": sum(a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(outputs, plain, strict=True)),
        "tokens": sum(stat.emitted_tokens for stat in stats),
        "tokens_per_pass": sum(stat.emitted_tokens for stat in stats) / passes,
        "acceptance_rate": sum(stat.accepted_tokens for stat in stats) / max(1, sum(stat.drafted_tokens for stat in stats)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 1 when an answer is invalid or differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=20, help="for each schema")
    parser.add_argument("--methods", nargs="+", default=["auto"])
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args(arguments)
    llm = LLM(options.model, threads=options.threads, kv_cache_memory=200_000_000)
    found: dict[str, dict[str, Any]] = {}
    for name in SCHEMAS:
        start = time.monotonic()
        plain = ask(llm, name, options.prompts, "none")
        others = {method: ask(llm, name, options.prompts, method) for method in options.methods}
        found[name] = {method: compared(name, outputs, plain) for method, outputs in {"none": plain, **others}.items()}
        print(f"{name}: {json.dumps(found[name])} ({time.monotonic() - start:.0f} s)", file=sys.stderr)
    cells = [cell for schema in found.values() for cell in schema.values()]
    totals = {key: sum(cell[key] for cell in cells) for key in ("valid", "cut", "differ")}
    totals |= {key: sum(len(cell[key]) for cell in cells) for key in ("invalid", "broken")}
    print(json.dumps({"model": options.model, "prompts_per_schema": options.prompts, "totals": totals, "schemas": found}))
    return int(totals["invalid"] + totals["broken"] + totals["differ"] > 0)


if __name__ == "__main__":
    sys.exit(main())
