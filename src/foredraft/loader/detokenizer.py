"""Tokens to streamed text, with stop strings.

Owns: which characters are final, which must wait, and where a stop string cuts.  Does not know: when a request ends otherwise.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from foredraft.loader.tokenizer import Tokenizer

LONGEST_TAIL = 3


class Detokenizer:
    """Text of one output, token by token; a ``TextSink``.

    The text equals ``tokenizer.decode`` of all output ids.  Two things come from ``prompt_ids``: a character whose first bytes
    end the prompt is completed, and the space before a first word is kept when the prompt has text.  A pass costs time in the
    length of the token and of the stop strings, not in that of the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
    ) -> None:
        assert all(stop), stop
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stop = tuple(stop)
        self._include_stop = include_stop_str_in_output
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips = tokenizer.strips_first_space
        self._taken: list[str] = []
        self._fresh: list[str] = []
        self._window = max(map(len, stop), default=1) - 1
        self._tail = ""
        self._ended = False
        self._read_prompt(prompt_ids)

    def _read_prompt(self, prompt_ids: Sequence[int]) -> None:
        tail = b""
        for token in reversed(prompt_ids):
            tail = self._bytes(token) + tail
            if len(tail) > LONGEST_TAIL:
                break
        self._strips = self._strips and not tail
        self._decoder.decode(tail)

    def _bytes(self, token: int) -> bytes:
        return b"" if token in self._skipped else self._tokenizer.token_bytes(token)

    @property
    def text(self) -> str:
        """All text so far, cut at the stop string; an incomplete last character reads as U+FFFD."""
        return "".join(self._taken) + "".join(self._fresh) + self._unfinished()

    def _unfinished(self) -> str:
        return "" if self._ended else self._decoder.getstate()[0].decode("utf-8", "replace")

    def push(self, token: int, *, may_stop: bool) -> str | None:
        """Take one token; return the stop string that it completed, or None.

        Of several stop strings, the one that starts first in the text wins; of those, the one that ends first.  A stop string
        that is complete while ``may_stop`` is False is text like any other.
        """
        assert not self._ended, "a token after the end of the text"
        piece = self._bytes(token)
        if self._strips and piece:
            piece, self._strips = piece.removeprefix(b" "), False
        chunk = self._decoder.decode(piece)
        if not chunk:
            return None
        found = self._find(chunk) if may_stop else None
        text = self._tail + chunk
        self._fresh.append(chunk)
        self._tail = text[-self._window :] if self._window else ""
        if found is None:
            return None
        start, stop_string = found
        self._cut(len(text) - start - (len(stop_string) if self._include_stop else 0))
        return stop_string

    def _find(self, chunk: str) -> tuple[int, str] | None:
        """Start within tail + chunk, and the stop string, of the first match that ends inside ``chunk``."""
        text, old = self._tail + chunk, len(self._tail)
        starts = [(text.find(string, max(0, old - len(string) + 1)), len(string), string) for string in self._stop]
        matches = [match for match in starts if match[0] >= 0]
        if not matches:
            return None
        start, _, string = min(matches)
        return start, string

    def _cut(self, num_chars: int) -> None:
        fresh = "".join(self._fresh)
        assert num_chars <= len(fresh), (num_chars, len(fresh))
        self._fresh = [fresh[: len(fresh) - num_chars]]
        self._ended = True

    def take_delta(self, final: bool) -> str:
        """New text that no later token can change; with ``final``, all that is left.

        Held back until then: an incomplete character, and an ending that could be the beginning of a stop string.  The deltas
        put together are ``text``.
        """
        if final and not self._ended:
            self._fresh.append(self._unfinished())
            self._ended = True
        fresh = "".join(self._fresh)
        keep = 0 if self._ended else self._held(fresh)
        delta = fresh[: len(fresh) - keep]
        self._taken.append(delta)
        self._fresh = [fresh[len(fresh) - keep :]] if keep else []
        return delta

    def _held(self, fresh: str) -> int:
        """Length of the longest ending of ``fresh`` that begins a stop string without completing it."""
        end = fresh[-self._window :] if self._window else ""
        for length in range(len(end), 0, -1):
            ending = end[len(end) - length :]
            if any(len(string) > length and string.startswith(ending) for string in self._stop):
                return length
        return 0
