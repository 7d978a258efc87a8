"""What shape a request's answer must have, checked where it is written.

Owns: StructuredOutputs, its names and its limits on size.  Does not know: how a grammar is compiled, so only what can be said of
the text alone is checked here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import Any

from foredraft.errors import RequestError, refuse_unknown, shown

MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 32
MAX_REGEX_BYTES = 8 * 1024
MAX_CHOICES = 1024
MAX_CHOICE_BYTES = 64 * 1024
MAX_GRAMMAR_BYTES = 64 * 1024
_FIELD = "structured_outputs"


@dataclass(frozen=True)
class StructuredOutputs:
    """The shape of an answer; exactly one field is set.  Names are vLLM's.

    Args:
        json: a JSON schema, as an object or as JSON text; kept as text.
        regex: a regular expression that the whole answer matches, in the syntax of Rust's ``regex`` (no look-around).
        choice: the texts of which the answer is one.
        grammar: a context-free grammar in llguidance's Lark syntax, or in GBNF or EBNF with ``::=``.
        json_object: True for any JSON object.

    Raises:
        RequestError: none or several are set, or one is of a wrong type, too large or too deep; the message names the field.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise _wrong("json_object", "true", self.json_object)
        if self.json_object is False:
            put(self, "json_object", None)
        names = [field.name for field in fields(self)]
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise RequestError(f"{_FIELD} must set exactly one of {', '.join(names)}, not {found}; set one.")
        if self.json is not None:
            put(self, "json", _schema_text(self.json))
        if self.choice is not None:
            put(self, "choice", _choices(self.choice))
        for name, limit in (("regex", MAX_REGEX_BYTES), ("grammar", MAX_GRAMMAR_BYTES)):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name), limit)

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        return next(field.name for field in fields(self) if getattr(self, field.name) is not None)

    @classmethod
    def parse(cls, value: object) -> StructuredOutputs:
        """From outside data: an object of its fields, or one that is made already.

        Raises:
            RequestError: it is no object, or has an unknown field.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise RequestError(f'{_FIELD} must be an object, not {shown(value)}; write it like {{"json": {{"type": "object"}}}}.')
        for name in value:
            refuse_unknown(f"field of {_FIELD}", name, [field.name for field in fields(cls)], RequestError)
        return cls(**value)


def _wrong(name: str, rule: str, value: object) -> RequestError:
    return RequestError(f"{_FIELD}.{name} must be {rule}, not {shown(value)}; change it.")


def _size(name: str, text: str) -> int:
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise RequestError(f"{_FIELD}.{name} has a lone surrogate at character {error.start}; send valid Unicode.") from error


def _check_text(name: str, text: object, limit: int) -> None:
    if not isinstance(text, str) or not text:
        raise _wrong(name, "a non-empty text", text)
    if (size := _size(name, text)) > limit:
        raise RequestError(f"{_FIELD}.{name} may have at most {limit} bytes, not {size}; shorten it.")


def _choices(choice: object) -> tuple[str, ...]:
    texts: tuple[Any, ...] = tuple(choice) if isinstance(choice, list | tuple) else ()
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise _wrong("choice", "a non-empty list of non-empty texts", choice)
    if len(texts) > MAX_CHOICES:
        raise RequestError(f"{_FIELD}.choice may hold at most {MAX_CHOICES} texts, not {len(texts)}; shorten the list.")
    if (size := sum(_size("choice", text) for text in texts)) > MAX_CHOICE_BYTES:
        raise RequestError(f"{_FIELD}.choice may have at most {MAX_CHOICE_BYTES} bytes in all, not {size}; shorten the list.")
    return texts


def _schema_text(schema: object) -> str:
    """The schema as JSON text, its keys in their order: properties are answered in the order of the schema."""
    if isinstance(schema, str):
        _check_text("json", schema, MAX_SCHEMA_BYTES)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{_FIELD}.json is not valid JSON ({error}); mend the schema.") from error
    if not isinstance(schema, Mapping):
        raise _wrong("json", "a JSON schema, an object", schema)
    _check_depth(schema)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
    except (ValueError, TypeError) as error:
        raise RequestError(f"{_FIELD}.json cannot be written as JSON ({error}); mend the schema.") from error
    _check_text("json", text, MAX_SCHEMA_BYTES)
    return text


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _check_depth(schema: object) -> None:
    """Level by level, so that neither a deep schema nor one that contains itself can exhaust the stack."""
    level: Seq[object] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
        if len(level) > MAX_SCHEMA_BYTES:
            raise RequestError(f"{_FIELD}.json may have at most {MAX_SCHEMA_BYTES} bytes; shorten the schema.")
    raise RequestError(f"{_FIELD}.json may be nested at most {MAX_SCHEMA_DEPTH} deep; flatten the schema, or use $defs and $ref.")


def _children(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return [child for child in value.values() if isinstance(child, Mapping | list | tuple)]
    return [child for child in value if isinstance(child, Mapping | list | tuple)] if isinstance(value, list | tuple) else []
