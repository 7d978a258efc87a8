"""Recorded requests: prompts and completions from a JSON Lines file, as token ids.

Owns: the shapes of a line that are understood, and the pseudo-tokens of a log without a tokenizer.  Does not know: what is done
with a record.

Pseudo-tokens: a run of letters is cut into pieces of at most 7, a run of digits into pieces of at most 3, a single space goes with
what follows it, other white space is one piece a run, and every other character is a piece of its own.  The ids are numbers in the
order of first appearance.  Tokenizers cut otherwise, so acceptance over pseudo-tokens is an estimate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from foredraft.loader import Tokenizer
from foredraft.replay import Record
from foredraft.types import RequestError

Message = Mapping[str, Any]
Prompt = str | list[Message]
COMPLETION_KEYS = ("completion", "response")
SHAPES = (
    '{"prompt": "...", "completion": "..."}, {"prompt": "...", "response": "..."}, {"messages": [...]} that end with the '
    'assistant, or {"prompt_token_ids": [...], "token_ids": [...]}'
)
# Token ids are kept in 32 bits.
MOST_IDS = 2**31
_PIECES = re.compile(r" ?[^\W\d_]{1,7}| ?\d{1,3}| ?[^\w\s]| ?_|\s+")
_Entry = TypeVar("_Entry")


class Encoder(Protocol):
    """Text to token ids."""

    def prompt(self, prompt: Prompt) -> list[int]:
        """A prompt, or a conversation up to the answer."""
        ...

    def completion(self, text: str) -> list[int]:
        """What came after it."""
        ...


class PseudoTokens:
    """The module's own rule; each instance numbers its tokens anew."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def prompt(self, prompt: Prompt) -> list[int]:
        """See Encoder."""
        return self.completion(_plain(prompt))

    def completion(self, text: str) -> list[int]:
        """See Encoder."""
        return [self._ids.setdefault(piece, len(self._ids)) for piece in _PIECES.findall(text)]


class ModelTokens:
    """A model's tokenizer, and its chat template where it has one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prompt(self, prompt: Prompt) -> list[int]:
        """See Encoder."""
        if isinstance(prompt, str) or not self._tokenizer.has_chat_template:
            return self._tokenizer.encode(_plain(prompt))
        return self._tokenizer.encode_chat([{**message, "content": _content(message)} for message in prompt])

    def completion(self, text: str) -> list[int]:
        """See Encoder."""
        return self._tokenizer.encode(text, add_special_tokens=False)


def read_log(path: str, encoder: Encoder, vocab_size: int = MOST_IDS) -> list[Record]:
    """Every recorded request of a JSON Lines file; blank lines are skipped.  Recorded token ids are below ``vocab_size``.

    Raises:
        RequestError: the file cannot be read, or a line is no request with a completion; the message names the line.
    """
    records = list(_lines(path, lambda entry: _record(entry, encoder, vocab_size)))
    if not records:
        raise RequestError(f"the log {path} holds no requests; give one with at least one line.")
    return records


def read_prompts(path: str) -> list[Prompt]:
    """Prompts: JSON Lines of ``{"prompt"}``, ``{"messages"}`` or Spec-Bench's ``{"turns"}`` (``.jsonl``), else a prompt a line.

    Raises:
        RequestError: the file cannot be read or holds none, or a line is wrong; the message names the line.
    """
    if path.endswith((".jsonl", ".json")):
        prompts = list(_lines(path, _prompt))
    else:
        prompts = [line.strip() for line in _read(path).decode("utf-8", "replace").splitlines() if line.strip()]
    if not prompts:
        raise RequestError(f"the file {path} holds no prompts; give one with at least one line.")
    return prompts


# ------------------------------------------------------------------------------------------------ lines


def _read(path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no such home; ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"the file {path} cannot be read ({reason}); give a JSON Lines file.") from error


def _lines(path: str, parse: Callable[[Mapping[str, Any]], _Entry]) -> Iterator[_Entry]:
    for number, line in enumerate(_read(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            try:
                entry: Any = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RequestError(f"not valid JSON ({error})") from error
            if not isinstance(entry, dict):
                raise RequestError(f"a line must be a JSON object, not {type(entry).__name__}")
            yield parse(entry)
        except RequestError as error:
            raise RequestError(f"{path}, line {number}: {error}; mend or remove the line.") from error


def _record(entry: Mapping[str, Any], encoder: Encoder, vocab_size: int) -> Record:
    """One line; raises RequestError with the rule alone, to which the caller adds the place and the next step."""
    if "prompt_token_ids" in entry or "token_ids" in entry:
        prompt, completion = (_ids(entry, name, vocab_size) for name in ("prompt_token_ids", "token_ids"))
    else:
        asked, answer = _texts(entry)
        prompt, completion = encoder.prompt(asked), encoder.completion(answer)
    for name, ids in (("prompt", prompt), ("completion", completion)):
        if not ids:
            raise RequestError(f"the {name} is empty")
    return Record([*prompt, *completion], len(prompt))


def _ids(entry: Mapping[str, Any], name: str, vocab_size: int) -> list[int]:
    ids = entry.get(name)
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise RequestError(f"{name} must be a list of token ids, not {ids!r:.60}")
    if max(ids, default=0) >= vocab_size:
        raise RequestError(f"{name} must be below {vocab_size}, the size of the vocabulary, not {max(ids)!s:.20}")
    return ids


def _texts(entry: Mapping[str, Any]) -> tuple[Prompt, str]:
    if "messages" in entry:
        messages = _messages(entry["messages"])
        if messages[-1].get("role") != "assistant":
            raise RequestError("there is no completion: the last of the messages is not the assistant's")
        return messages[:-1], _content(messages[-1])
    completion = next((entry[key] for key in COMPLETION_KEYS if key in entry), None)
    if completion is None:
        raise RequestError(f"there is no completion; a line is one of {SHAPES}")
    for name, value in (("prompt", entry.get("prompt")), ("completion", completion)):
        if not isinstance(value, str):
            raise RequestError(f"{name} must be a text, not {value!r:.60}")
    return entry["prompt"], completion


def _prompt(entry: Mapping[str, Any]) -> Prompt:
    if "messages" in entry:
        messages = _messages(entry["messages"])
        asked = messages[:-1] if messages[-1].get("role") == "assistant" and len(messages) > 1 else messages
        return [{**one, "content": _content(one)} for one in asked]
    turns = entry.get("turns")
    prompt = turns[0] if isinstance(turns, list) and turns else entry.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise RequestError('there is no prompt; a line is {"prompt": "..."}, {"messages": [...]} or {"turns": [...]}')
    return prompt


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) and "role" in one for one in value):
        raise RequestError(f"messages must be a list of objects with role and content, not {value!r:.60}")
    return value


def _content(message: Message) -> str:
    """The text of a message; of a list of parts, its text parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    if not isinstance(content, str):
        raise RequestError(f"a message's content must be a text, not {content!r:.60}")
    return content


def _plain(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else "\n\n".join(_content(message) for message in prompt) + "\n\n"
