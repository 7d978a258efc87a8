"""Grammars over the tokens of a small alphabet, against a matcher that only knows Python's own regular expressions."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence as Seq

import numpy as np
import pytest

from engine_helpers import letter, text_of
from foredraft import grammar as module
from foredraft.grammar import Grammars, SequenceGrammar, TokenTable
from foredraft.sampling import distribution
from foredraft.types import RequestError, SamplingParams, Sequence, StructuredOutputs

EOS, SPECIAL = 6, 7
# One-letter tokens, two of two letters that rival them, one of no bytes, and the two that stand for no text.
PIECES = (b"a", b"b", b"c", b"ab", b"bc", b"", b"", b"<x>")
VOCAB = len(PIECES)


def encode(text: str) -> list[int]:
    """As a greedy tokenizer of these pieces would; it leaves out what it cannot write."""
    return [PIECES.index(piece.encode()) for piece in re.findall("ab|bc|a|b|c", text)]


def table(eos_ids: Seq[int] = (EOS,)) -> TokenTable:
    return TokenTable(VOCAB, lambda token: PIECES[token], encode, special_ids=(EOS, SPECIAL), eos_ids=eos_ids)


def start(eos_ids: Seq[int] = (EOS,), **shape: object) -> tuple[SequenceGrammar, Sequence]:
    made = Grammars(table(eos_ids)).start(StructuredOutputs(**shape))  # type: ignore[arg-type]
    return made, Sequence(0, [0, 1], 2, SamplingParams(), 0, grammar=made)


def allowed(grammar: SequenceGrammar, seq: Sequence, draft: Seq[int] = ()) -> set[int] | None:
    mask = grammar.allowed(seq, draft)
    assert mask is None or mask.shape == (VOCAB,)
    return None if mask is None else {int(token) for token in np.flatnonzero(mask)}


def text(tokens: Seq[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode()


REGEX, TEXTS = "a(b|bc)*c?|cc", ["cc", *("a" + "".join(parts) for parts in [()])]


def matches(prefix: str) -> bool:
    """Whether a text that begins so matches REGEX."""
    return re.fullmatch(r"a(b|bc)*(bc?)?c?|c|cc|", prefix) is not None


def test_a_mask_lets_through_what_the_shape_forbids_or_forbids_what_it_lets_through() -> None:
    """Every token stream of up to five tokens, asked as drafts in any order."""
    grammar, seq = start(regex=REGEX)
    rng = random.Random(0)
    streams: list[tuple[int, ...]] = [()]
    for stream in streams:
        if len(stream) < 5:
            streams += [(*stream, token) for token in range(5) if matches(text((*stream, token)))]
    rng.shuffle(streams)
    assert len(streams) > 50
    for stream in streams:
        found = allowed(grammar, seq, stream)
        may_end = re.fullmatch(REGEX, text(stream)) is not None
        more = {token for token in range(5) if matches(text((*stream, token)))}
        if not more:
            assert found is None, f"{text(stream)} has come to an end"
        else:
            assert found == more | ({EOS} if may_end else set()), text(stream)


def test_the_answer_depends_on_what_was_asked_before() -> None:
    """Random drafts, commits and questions, against a grammar that starts afresh for each."""
    rng = random.Random(1)
    for turn in range(30):
        grammars = Grammars(table())
        shape = StructuredOutputs(regex="(a|bc|c(ab)*){2,9}")
        grammar = grammars.start(shape)
        seq = Sequence(0, [3], 1, SamplingParams(), 0, grammar=grammar)
        for _ in range(12):
            draft: list[int] = []
            for _ in range(rng.randrange(5)):
                grammar.allowed(seq, draft)
                draft.append(rng.randrange(VOCAB))
            fresh = Sequence(0, list(seq.tokens), 1, SamplingParams(), 0)
            other = grammars.start(shape)
            num = grammar.num_allowed(seq, draft)
            assert num == other.num_allowed(fresh, draft)
            assert allowed(grammar, seq, draft[:num]) == allowed(grammars.start(shape), fresh, draft[:num])
            assert grammar.forced(seq, 3) == grammars.start(shape).forced(fresh, 3)
            assert grammar.is_complete(seq) == grammars.start(shape).is_complete(fresh)
            choices = sorted((allowed(grammar, seq) or set()) - {EOS})
            if not choices:
                break
            seq.tokens.append(rng.choice(choices))
        assert len(seq.tokens) > 2, turn


def test_a_whole_answer_goes_on_or_a_part_is_taken_for_a_whole() -> None:
    grammar, seq = start(choice=["ab", "abc", "b"])
    assert not grammar.is_complete(seq)
    seq.tokens += [0, 1]
    assert allowed(grammar, seq) == {2, EOS} and not grammar.is_complete(seq)
    seq.tokens.append(2)
    assert grammar.is_complete(seq) and allowed(grammar, seq) is None
    assert allowed(grammar, seq, [2]) is None and grammar.num_allowed(seq, [2]) == 0 and grammar.forced(seq, 3) == ()


@pytest.mark.parametrize("eos_ids", [(), (EOS,), (EOS, SPECIAL), (EOS, 99)])
def test_a_model_with_several_ends_or_none_ends_wrongly(eos_ids: tuple[int, ...]) -> None:
    grammar, seq = start(eos_ids, regex="a+")
    known = {token for token in eos_ids if token < VOCAB}
    assert allowed(grammar, seq) == {0}
    assert allowed(grammar, seq, [0]) == {0, *known}
    seq.tokens.append(0)
    assert not grammar.is_complete(seq)
    for token in known:
        assert grammar.num_allowed(seq, [0, token, 0]) == 2
        assert allowed(grammar, seq, [token]) is None
    seq.tokens += sorted(known)[:1]
    assert grammar.is_complete(seq) == bool(known)


def test_a_draft_is_cut_too_early_or_too_late() -> None:
    grammar, seq = start(regex="ab{3}c")
    for draft, num in (([], 0), ([0, 1, 1, 1, 2], 5), ([3, 1, 1, 1], 3), ([1], 0), ([0, 1, SPECIAL], 2), ([0, EOS], 1), ([5], 0)):
        assert grammar.num_allowed(seq, draft) == num, draft


def test_what_must_come_is_not_known_or_more_is_said_than_must_come() -> None:
    grammar, seq = start(regex="abcab(a|b)")
    seen = []
    while not grammar.is_complete(seq):
        forced = grammar.forced(seq, 9)
        for i, token in enumerate(forced):
            assert allowed(grammar, seq, forced[:i]) == {token}
        assert bool(forced) == (len(allowed(grammar, seq) or ()) == 1)
        assert grammar.forced(seq, 1) == forced[:1]
        seen.append(forced)
        seq.tokens.append(min(allowed(grammar, seq) or ()))
    assert max(map(len, seen)) >= 2 and text(seq.tokens[2:]).startswith("abcab")


def test_a_tokenizer_that_adds_a_space_or_normalises_breaks_the_shape() -> None:
    """What must come is asked of the tokenizer, and is believed only if it is the very text."""
    pieces = (b"a", b"b", b"c", b"ab", b" a", b" ab", b"\n", b"AB")

    def spaced(text: str) -> list[int]:
        return [pieces.index(piece.encode()) for piece in re.findall(" ab| a|ab|a|b|c|\n", " " + text)]

    def lossy(text: str) -> list[int]:
        return [pieces.index(b"AB")] * (len(text) // 2)

    for encode_so, forced in (
        (spaced, [3, 2, 3, 1]),
        (lossy, [3, 2, 3, 1]),
        (lambda text: [], [3, 2, 3, 1]),
        (lambda text: [99], [3, 2, 3, 1]),
    ):
        grammar = Grammars(TokenTable(8, lambda token: pieces[token], encode_so)).start(StructuredOutputs(regex="abcabb(a|b)"))
        seq = Sequence(0, [0], 1, SamplingParams(), 0, grammar=grammar)
        while not grammar.is_complete(seq):
            assert grammar.forced(seq, 9) == tuple(forced[len(seq.tokens) - 1 :]), seq.tokens
            seq.tokens.append(min(allowed(grammar, seq) or ()))
        assert seq.tokens == [0, *forced, 0]


def test_the_masks_do_not_reach_the_distribution_or_leave_nothing_unexplained() -> None:
    seq = start(regex="a|b")[1]
    logits = np.array([0.0, 1.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0], dtype=np.float32)
    assert distribution(logits, seq).tokens.tolist() == [0, 1]
    assert distribution(logits, seq, [1]).tokens.tolist() == list(range(VOCAB)), "what follows an end is trimmed, not an error"
    seq.params = SamplingParams(allowed_token_ids=(1, 2))
    assert distribution(logits, seq).tokens.tolist() == [1]
    seq.params = SamplingParams(allowed_token_ids=(2,))
    with pytest.raises(FloatingPointError, match="no token that the request allows continues its structured_outputs"):
        distribution(logits, seq)


def test_a_parser_at_its_limits_spoils_other_requests_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests of a shape share the parser's states; a request alone must get what it gets beside others."""
    compiled = []
    compile_one = module._compile
    monkeypatch.setattr(module, "_compile", lambda *arguments: compiled.append(1) or compile_one(*arguments))
    monkeypatch.setattr(module, "MAX_LEXER_STATES", 150)
    grammars = Grammars(table())
    shape = StructuredOutputs(regex="(a|b)*a(a|b){7}c")
    outcomes = []
    for seed in range(20):
        rng = random.Random(seed)
        grammar = grammars.start(shape)
        seq = Sequence(0, [0], 1, SamplingParams(), 0, grammar=grammar)
        while len(seq.tokens) < 14 and (tokens := allowed(grammar, seq)):
            seq.tokens.append(rng.choice(sorted(tokens - {2, 4})))
        outcomes.append(len(seq.tokens))
    assert outcomes == [14] * 20 and len(compiled) > 2
    grammar = grammars.start(shape)
    seq = Sequence(0, [0], 1, SamplingParams(), 0, grammar=grammar)
    rng = random.Random(9)
    while tokens := allowed(grammar, seq):
        seq.tokens.append(rng.choice(sorted(tokens - {2, 4})))
        assert len(seq.tokens) < 3000
    assert "structured_outputs.regex is too complex to be followed" in grammar.error
    assert not grammar.is_complete(seq) and grammar.forced(seq, 3) == () and grammar.num_allowed(seq, [0]) in (0, 1)
    with pytest.raises(FloatingPointError, match=r"too complex to be followed .*simplify it"):
        distribution(np.zeros(VOCAB, dtype=np.float32), seq)


BROKEN = [
    ({"regex": "(a"}, "structured_outputs.regex cannot be compiled .*unclosed group"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": r"[^\s\S]"}, "structured_outputs.regex cannot be followed .*it has no text"),
    ({"regex": "x"}, "structured_outputs.regex cannot be followed"),
    ({"regex": "(a{0})"}, "structured_outputs.regex allows no text"),
    ({"grammar": "start: undefined_rule"}, "structured_outputs.grammar cannot be compiled"),
    ({"grammar": 'root ::= "a" ('}, "structured_outputs.grammar cannot be compiled"),
    ({"json": {"enum": []}}, "structured_outputs.json cannot be compiled .*Unsatisfiable"),
    ({"json": {"type": "string", "not": {}}}, 'structured_outputs.json cannot be compiled .*Unimplemented keys: .*"not"'),
    ({"json": {"$ref": "http://example.org/schema"}}, "structured_outputs.json cannot be compiled"),
    ({"json": {"$ref": "#"}}, "structured_outputs.json cannot be"),
    ({"json": {"type": "object"}}, "structured_outputs.json cannot be followed"),
    ({"choice": ["xyz"]}, "structured_outputs.choice cannot be followed"),
]


@pytest.mark.parametrize(("shape", "message"), BROKEN, ids=[str(shape)[:40] for shape, _ in BROKEN])
def test_a_shape_that_no_answer_can_have_is_found_out_late_or_unclearly(shape: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        start(**shape)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_shape_is_compiled_again_for_each_request_or_kept_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    compile_one = module._compile
    monkeypatch.setattr(module, "_compile", lambda shape, *rest: compiled.append(shape.regex) or compile_one(shape, *rest))
    grammars = Grammars(table(), max_compiled=2)
    for regex in ("a", "a", "b", "a", "c", "a", "b"):
        grammars.start(StructuredOutputs(regex=regex))
    assert compiled == ["a", "b", "c", "b"]


def test_letters_of_the_toy_target_have_text() -> None:
    assert text_of([0, 1]) == letter(0) + letter(1) == "ab"
