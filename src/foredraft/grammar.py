"""What an answer's next token may be, so that it gets the shape that was asked for.

Owns: how structured_outputs become a grammar over tokens, a cache of compiled ones, and each sequence's place in its own.  Does not
know: the model, or whether a token was drafted; it answers for any tokens that continue the output.

llguidance parses.  It is told of one end-of-sequence token that no model has, so that models with several or none are alike, and
its answers are cached per row: a drafter, the check of its draft and the verification ask for the same ones.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from foredraft.types import BoolArray, RequestError, Sequence, StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_COMPILED = 32
# A state of the lexer takes one or two kilobytes, and all requests of one shape share them.
MAX_LEXER_STATES = 25_000
# Between the parts of a JSON text: nothing, a space, or a new line and its indentation.  Any amount of it would let a model that
# is lost write white space to the end.
WHITESPACE = r"\x20|\n[ \t]{0,40}"
ANY_OBJECT = '{"type":"object"}'


@dataclass(frozen=True)
class TokenTable:
    """All that a grammar has to know of a tokenizer.

    ``bytes_of(id)`` for ids below ``vocab_size``, the target's; ``encode`` writes text as the model would, without special tokens.
    """

    vocab_size: int
    bytes_of: Callable[[int], bytes]
    encode: Callable[[str], Seq[int]]
    special_ids: Collection[int] = ()
    eos_ids: Collection[int] = ()


class _Tokens:
    """The table as llguidance takes it; the last token is its end-of-sequence.

    Text that must come is written as the model's tokenizer does, and llguidance takes that for the very text.  But SentencePiece
    begins every text with a space, and others normalise.
    """

    def __init__(self, table: TokenTable) -> None:
        self._encode = table.encode
        self.eos_token_id, self.bos_token_id = table.vocab_size, None
        self.tokens = [*(table.bytes_of(token) for token in range(table.vocab_size)), b"<|end|>"]
        # An end-of-sequence token ends the answer, so whatever its text is, it must never be taken for it.
        special = {token for token in (*table.special_ids, *table.eos_ids) if token < table.vocab_size}
        self.special_token_ids = [*sorted(special), table.vocab_size]

    def __call__(self, text: str) -> list[int]:
        wanted = text.encode("utf-8")
        for before in ("", "\n"):
            ids = list(self._encode(before + text))
            for start in range(min(len(ids), 1 + 3 * len(before))):
                if self._bytes_of(ids[start:]) == wanted:
                    return ids[start:]
        return self._longest(wanted)

    def _bytes_of(self, ids: Seq[int]) -> bytes:
        return b"".join(self.tokens[token] if token < self.eos_token_id else b"" for token in ids)

    def _longest(self, data: bytes) -> list[int]:
        """The longest piece that fits, again and again, as far as it goes."""
        ids, most = [], max(map(len, self._pieces), default=0)
        while data and (fitting := [n for n in range(1, most + 1) if data[:n] in self._pieces]):
            ids.append(self._pieces[data[: fitting[-1]]])
            data = data[fitting[-1] :]
        return ids

    @cached_property
    def _pieces(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {piece: token for token, piece in enumerate(self.tokens) if piece and token not in special}


class Grammars:
    """Compiles what requests ask for, each shape once; may be used from several threads.

    At most ``max_compiled`` shapes are kept, those used last.
    """

    def __init__(self, table: TokenTable, max_compiled: int = MAX_COMPILED) -> None:
        self._table = table
        self._max_compiled = max_compiled
        self._compiled: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def start(self, shape: StructuredOutputs) -> SequenceGrammar:
        """The grammar of one sequence, at its beginning.

        Raises:
            RequestError: the shape cannot be compiled, takes too much to be followed, or has no text.
        """
        return SequenceGrammar(self._matcher(shape), lambda: self._matcher(shape, anew=True), shape.kind, self._table)

    def _matcher(self, shape: StructuredOutputs, anew: bool = False) -> LLMatcher:
        with self._lock:
            tokenizer, found = self._tokenizer, None if anew else self._compiled.get(shape)
        # Not under the lock: others, whose shape is compiled, need not wait.
        found = found or _compile(shape, tokenizer, self._limits)
        with self._lock:
            self._compiled[shape] = found
            self._compiled.move_to_end(shape)
            while len(self._compiled) > self._max_compiled:
                self._compiled.popitem(last=False)
            return found.deep_copy()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Tokens(self._table)), n_vocab=self._table.vocab_size + 1)

    @cached_property
    def _limits(self) -> LLParserLimits:
        from llguidance import LLParserLimits

        return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


class SequenceGrammar:
    """Where one sequence is in its grammar; a ``types.Grammar``.

    The matcher has taken ``_path``, tokens of the output and of a draft behind it; another draft takes it back to where they part.
    ``error`` says why no token is allowed any more, where that is so.
    """

    def __init__(self, matcher: LLMatcher, anew: Callable[[], LLMatcher], kind: str, table: TokenTable) -> None:
        self.error = ""
        self._matcher = matcher
        self._anew = anew
        self._kind = kind
        self._vocab_size = table.vocab_size
        self._eos_ids = frozenset(token for token in table.eos_ids if token < table.vocab_size)
        self._path: list[int] = []
        self._num_known = 0
        self._masks: dict[int, BoolArray] = {}
        self._is_broken = False

    def allowed(self, seq: Sequence, draft: Seq[int] = ()) -> BoolArray | None:
        """See types.Grammar."""
        if not self._follow(seq, draft):
            return None
        mask = self._mask()
        return None if self._is_end(mask) else mask[:-1]

    def num_allowed(self, seq: Sequence, draft: Seq[int]) -> int:
        """See types.Grammar."""
        num = 0
        while num < len(draft) and self._follow(seq, draft[:num]):
            num += self._matcher.validate_tokens(list(draft[num:]))
            # An end-of-sequence token is not the parser's, so what it stops at is looked up.
            mask = self.allowed(seq, draft[:num]) if num < len(draft) else None
            if mask is None or not mask[draft[num]]:
                break
            num += 1
        return num

    def forced(self, seq: Sequence, num_tokens: int) -> tuple[int, ...]:
        """See types.Grammar."""
        if not self._follow(seq, ()) or self._is_end(mask := self._mask()) or np.count_nonzero(mask) != 1:
            return ()
        return tuple(self._matcher.compute_ff_tokens()[:num_tokens])

    def is_complete(self, seq: Sequence) -> bool:
        """See types.Grammar."""
        return not self._follow(seq, ()) or self._is_end(self._mask())

    def _follow(self, seq: Sequence, draft: Seq[int]) -> bool:
        """Bring the matcher behind the output and ``draft``; False where they have ended before, or cannot be."""
        if self._is_broken:
            self._matcher, self._path, self._num_known, self._is_broken = self._anew(), [], 0, False
            self._masks.clear()
        start, path = self._num_known, self._path
        tail = [*seq.tokens[seq.num_prompt + start :], *draft]
        num_same = next((i for i, (old, new) in enumerate(zip(path[start:], tail, strict=False)) if old != new), None)
        num_same = min(len(path) - start, len(tail)) if num_same is None else num_same
        if start + num_same < len(path):
            self._matcher.rollback(len(path) - start - num_same)
            del path[start + num_same :]
            for length in [length for length in self._masks if length > len(path)]:
                del self._masks[length]
        rest = tail[num_same:]
        taken = self._take(rest) if rest else 0
        path += rest[:taken]
        # What is committed stays, so it need not be compared again.
        num_output = seq.num_output
        if num_output > start and len(path) >= num_output:
            self._num_known = num_output
            for length in [length for length in self._masks if length < num_output]:
                del self._masks[length]
        if len(path) < num_output and rest[taken] not in self._eos_ids and not self._is_broken:
            self._break(f"token {rest[taken]} cannot be taken")
        return taken == len(rest) or self._is_broken

    def _take(self, tokens: list[int]) -> int:
        """Let the matcher take tokens behind ``_path``; how many of them it took."""
        taken = self._matcher.try_consume_tokens(tokens)
        if self._matcher.is_error():
            self._renew()
            taken = self._matcher.try_consume_tokens(tokens)
        if self._matcher.is_error():
            self._break(_reason(self._matcher))
        return taken

    def _renew(self) -> None:
        """Begin again with a matcher of its own.

        The parser's limits count what all requests of this shape have explored; alone this one may be within them.
        """
        self._matcher = self._anew()
        self._matcher.try_consume_tokens(self._path)

    def _break(self, reason: str) -> None:
        self.error = f"structured_outputs.{self._kind} is too complex to be followed ({reason}); simplify it."
        self._is_broken = True

    def _mask(self) -> BoolArray:
        """bool [vocab_size + 1] at the matcher's place; the last says whether the answer may end, as do all end-of-sequence ids."""
        if self._is_broken:
            return np.zeros(self._vocab_size + 1, dtype=bool)
        mask = self._masks.get(len(self._path))
        if mask is None:
            mask = self._masks[len(self._path)] = self._compute()
        return mask

    def _compute(self) -> BoolArray:
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._renew()
            bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._break(_reason(self._matcher))
            return np.zeros(self._vocab_size + 1, dtype=bool)
        mask = np.unpackbits(np.frombuffer(bits, np.uint8), count=self._vocab_size + 1, bitorder="little").view(bool)
        mask[list(self._eos_ids)] |= mask[-1]
        return mask

    def _is_end(self, mask: BoolArray) -> bool:
        return bool(mask[-1]) and np.count_nonzero(mask) == 1 + len(self._eos_ids)


def _compile(shape: StructuredOutputs, tokenizer: LLTokenizer, limits: LLParserLimits) -> LLMatcher:
    from llguidance import LLMatcher

    where = f"structured_outputs.{shape.kind}"
    try:
        text = _grammar_text(shape)
    except ValueError as error:
        raise RequestError(f"{where} cannot be compiled ({_one_line(str(error))}); mend it.") from error
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise RequestError(f"{where} cannot be compiled ({_reason(matcher)}); mend or simplify it.")
    first = matcher.deep_copy()
    bits = first.compute_bitmask()
    if first.is_error():
        raise RequestError(f"{where} cannot be followed ({_reason(first)}); mend or simplify it.")
    mask = np.unpackbits(np.frombuffer(bits, np.uint8), count=tokenizer.vocab_size, bitorder="little")
    if not mask[:-1].any():
        raise RequestError(f"{where} allows no text that this model's tokens can write; mend it.")
    return matcher


def _grammar_text(shape: StructuredOutputs) -> str:
    """In llguidance's own form."""
    from llguidance import LLMatcher, grammar_from

    if shape.regex is not None:
        return LLMatcher.grammar_from_regex(shape.regex)
    if shape.choice is not None:
        return grammar_from("choice", json.dumps(shape.choice))
    if shape.grammar is not None:
        return grammar_from("grammar", shape.grammar)
    schema = shape.json if isinstance(shape.json, str) else ANY_OBJECT
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE})


def _reason(matcher: LLMatcher) -> str:
    text = matcher.get_error()
    # Of a message on a text in several lines, those that begin so say what is wrong.
    lines = [line for line in text.splitlines() if line.startswith("error:")] or text.splitlines()[:1]
    if text.startswith("NoExtension"):
        lines = ["it has no text"]
    return _one_line(" ".join(lines))


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:200]}..."
