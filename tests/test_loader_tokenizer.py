from __future__ import annotations

import itertools
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from foredraft.loader.detokenizer import Detokenizer
from foredraft.loader.gguf_file import GGUFFile
from foredraft.loader.gguf_tokenizer import PRE_TOKENIZERS, gguf_tokenizer
from foredraft.loader.tokenizer import Tokenizer, template_renderer
from foredraft.types import ModelFileError, RequestError, UnsupportedModelError
from loader_files import CHAT, byte_level_json, byte_level_metadata, sentence_piece_metadata, sentence_piece_tokens

TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("hello world 12\n"), max_size=40)


class Metadata:
    """Takes what a GGUF writer would be told."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        key = (
            name.removeprefix("add_")
            .replace("tokenizer_", "")
            .replace("token_list", "tokens")
            .replace("unk_token", "unknown_token")
        )
        key = key.replace("token_scores", "scores").replace("token_types", "token_type").replace("token_merges", "merges")
        prefix = "tokenizer." if key == "chat_template" else "tokenizer.ggml."
        return lambda value: self.values.update({prefix + key: value})


def from_metadata(write: Any = byte_level_metadata, **changes: Any) -> Tokenizer:
    metadata = Metadata()
    write(metadata, **({"space_prefix": changes.pop("space_prefix")} if "space_prefix" in changes else {}))
    values = metadata.values | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return gguf_tokenizer(GGUFFile("m.gguf", {key: value for key, value in values.items() if value is not None}, {}, None))  # type: ignore[arg-type]


BYTES = Tokenizer(Backend.from_str(byte_level_json()), bos_id=0, eos_id=1, render=template_renderer(CHAT, {"bos_token": "<s>"}))
WORDS = from_metadata(sentence_piece_metadata)
PREFIXED = from_metadata(sentence_piece_metadata, space_prefix=True)
ALL = {"bytes": BYTES, "words": WORDS, "prefixed": PREFIXED}
each = pytest.mark.parametrize("tokenizer", ALL.values(), ids=ALL.keys())


@each
@settings(deadline=None)
@given(text=TEXTS)
def test_text_survives_encoding(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids == [tokenizer.bos_id, *tokenizer.encode(text, add_special_tokens=False)]


@each
@settings(deadline=None)
@given(text=TEXTS, skip=st.booleans())
def test_decoding_equals_the_librarys(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    ids = [*tokenizer.encode(text, add_special_tokens=False), 1]
    assert tokenizer.decode(ids, skip) == tokenizer._backend.decode(ids, skip_special_tokens=skip)


def test_gguf_metadata_gives_the_same_tokenizer_as_the_json() -> None:
    from_file = from_metadata()
    assert from_file.vocabulary() == BYTES.vocabulary() and from_file.special_ids == BYTES.special_ids == {0, 1, 2, 3}
    for text in ("hello world", "  12<|end|>é\n", "", "日本 \u0000"):
        assert from_file.encode(text) == BYTES.encode(text)


def sentence_piece_reference(text: str) -> list[str]:
    """SentencePiece's rule, slowly: merge the neighbours whose piece scores best, leftmost first, until none is a piece."""
    tokens, scores, types = sentence_piece_tokens()
    score = {token: scores[i] for i, token in enumerate(tokens) if types[i] == 1}
    pieces = list(text.replace(" ", "▁"))
    while True:
        pairs = [(-score[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in score]
        if not pairs:
            return pieces
        i = min(pairs)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


@settings(deadline=None)
@given(text=st.text("helowrd ", max_size=30))
def test_sentence_piece_segments_as_by_its_scores(text: str) -> None:
    ids = WORDS.vocabulary()
    assert WORDS.encode(text, add_special_tokens=False) == [ids[piece] for piece in sentence_piece_reference(text)]


def test_sentence_piece_falls_back_to_bytes_and_keeps_user_defined_tokens() -> None:
    ids = WORDS.vocabulary()
    assert WORDS.encode("é\n\n", add_special_tokens=False) == [ids["<0xC3>"], ids["<0xA9>"], ids["\n\n"]]
    assert ids["\n\n"] not in WORDS.special_ids and WORDS.decode([ids["\n\n"]]) == "\n\n"
    assert PREFIXED.encode("hello", add_special_tokens=False) == [ids["▁hello"]]


def test_begin_and_end_tokens_follow_the_file() -> None:
    assert from_metadata(add_bos_token=False).encode("h") == BYTES.encode("h", add_special_tokens=False)
    assert from_metadata(add_eos_token=True).encode("h")[-1] == 1
    assert (
        from_metadata(sentence_piece_metadata, add_bos_token=None).encode("h")[0] == 1
    )  # SentencePiece models want one unless told
    assert from_metadata(add_bos_token=None).encode("h") == BYTES.encode("h", add_special_tokens=False)


PRE_CASES = {
    "gpt-2": ["a", "Ġ123", "'s", "ĠĠ", "Ġb"],
    "smollm": ["a", "Ġ", "1", "2", "3", "'s", "ĠĠ", "Ġb"],
    "llama-bpe": ["a", "Ġ", "123", "'s", "ĠĠ", "Ġb"],
    "qwen2": ["a", "Ġ", "1", "2", "3", "'s", "ĠĠ", "Ġb"],
    "tekken": ["a", "Ġ", "1", "2", "3", "'s", "ĠĠ", "Ġb"],
    "gpt-4o": ["a", "Ġ", "123", "'s", "ĠĠ", "Ġb"],
}


@pytest.mark.parametrize("name", PRE_CASES)
def test_each_pre_tokenizer_cuts_as_its_models_were_trained(name: str) -> None:
    cuts = from_metadata(pre=name)._backend.pre_tokenizer.pre_tokenize_str("a 123's   b")
    assert [piece for piece, _ in cuts] == PRE_CASES[name]


BY_PRE = {name: from_metadata(pre=name) for name in PRE_TOKENIZERS}


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@settings(deadline=None)
@given(text=TEXTS)
def test_no_pre_tokenizer_loses_text(name: str, text: str) -> None:
    tokenizer = BY_PRE[name]
    if PRE_TOKENIZERS[name].compose:
        text = unicodedata.normalize("NFC", text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_composed_characters_are_one_for_qwen() -> None:
    tokenizer = from_metadata(pre="qwen2")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"model": "t5"}, UnsupportedModelError, "t5"),
        ({"model": None}, ModelFileError, "tokenizer.ggml.model"),
        ({"pre": "martian"}, UnsupportedModelError, "martian"),
        ({"pre": ["smollm"]}, UnsupportedModelError, "smollm"),
        ({"tokens": None}, ModelFileError, "tokens"),
        ({"token_type": [1]}, ModelFileError, "token_type"),
        ({"merges": ["a"]}, ModelFileError, "merges"),
        ({"merges": ["nothere neither"]}, ModelFileError, "inconsistent"),
        ({"bos_token_id": 10**6}, ModelFileError, "bos_token_id"),
    ],
)
def test_broken_metadata_is_named(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        from_metadata(**changes)


def test_scores_that_cannot_be_ordered_end_in_a_traceback() -> None:
    scores: list[Any] = [[1.0], ["x"]] * len(sentence_piece_tokens()[0])
    with pytest.raises(ModelFileError, match="one number per token"):
        from_metadata(sentence_piece_metadata, scores=scores[: len(scores) // 2])


def test_an_unknown_decoder_is_refused() -> None:
    backend = Backend(models.BPE())
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        Tokenizer(backend, bos_id=None, eos_id=None)


def test_chat_mistakes_are_request_errors_of_one_sentence() -> None:
    assert BYTES.render_chat([{"role": "user", "content": "x"}], False) == "<s><|start|>user\nx<|end|>\n"
    assert BYTES.encode_chat([{"role": "user", "content": "x"}])[:2] == [0, 2]
    with pytest.raises(RequestError, match="no tools here"):
        BYTES.render_chat([{"role": "tool", "content": "x"}])
    with pytest.raises(RequestError, match="at least one message"):
        BYTES.render_chat([])
    with pytest.raises(RequestError, match="role and a content"):
        BYTES.render_chat(["x"])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="plain prompt"):
        WORDS.render_chat([{"role": "user", "content": "x"}])


def test_a_template_cannot_leave_the_sandbox() -> None:
    render = template_renderer("{{ messages.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(RequestError, match="template"):
        render([{"role": "user", "content": "x"}], True)


def test_lone_surrogates_are_refused_and_foreign_ids_have_no_text() -> None:
    with pytest.raises(RequestError, match="surrogate"):
        BYTES.encode("a\ud800")
    assert BYTES.decode([10**6, -1, 2**40]) == ""


@each
def test_an_unknown_token_id_is_kept_for_ever(tokenizer: Tokenizer) -> None:
    tokenizer.decode(range(tokenizer.vocab_size))
    num_kept = len(tokenizer._pieces)
    assert tokenizer.decode([*range(tokenizer.vocab_size, tokenizer.vocab_size + 100), -1, 2**40]) == ""
    assert len(tokenizer._pieces) == num_kept > 0


# ------------------------------------------------------------------------------------------------ streaming


def stream(
    detokenizer: Detokenizer, ids: list[int], take: Any = lambda i: True, may_stop: Any = lambda i: True
) -> tuple[list[str], str | None]:
    deltas = []
    for i, token in enumerate(ids):
        found = detokenizer.push(token, may_stop=may_stop(i))
        if found is not None:
            return [*deltas, detokenizer.take_delta(True)], found
        if take(i):
            deltas.append(detokenizer.take_delta(False))
    return [*deltas, detokenizer.take_delta(True)], None


@each
@settings(deadline=None)
@given(data=st.data())
def test_deltas_put_together_equal_decoding_at_once_for_any_ids(tokenizer: Tokenizer, data: Any) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=30))
    skip, stops = data.draw(st.booleans()), data.draw(st.lists(st.text("helo\n ", min_size=1, max_size=4), max_size=3))
    detokenizer = Detokenizer(tokenizer, [], stops, skip_special_tokens=skip)
    deltas, found = stream(detokenizer, ids, lambda i: data.draw(st.booleans()), lambda i: False)
    assert found is None and "".join(deltas) == detokenizer.text == tokenizer.decode(ids, skip)


@each
@settings(deadline=None)
@given(prompt=TEXTS.filter(bool), text=TEXTS)
def test_a_continuation_keeps_its_first_space(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    before = tokenizer.encode(prompt)
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, before)
    assert "".join(stream(detokenizer, ids)[0]) == tokenizer.decode([*before, *ids])[len(prompt) :]


def test_a_first_word_after_special_tokens_only_has_no_space() -> None:
    word = PREFIXED.vocabulary()["▁hello"]
    for prompt, text in (([], "hello"), ([1], "hello"), ([1, word], " hello")):
        detokenizer = Detokenizer(PREFIXED, prompt)
        detokenizer.push(word, may_stop=True)
        assert detokenizer.text == text


@pytest.mark.parametrize("tokenizer", [BYTES, WORDS])
def test_half_a_character_waits_and_a_lost_one_is_replaced(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a€", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, [])
    deltas = []
    for token in ids:
        detokenizer.push(token, may_stop=True)
        deltas.append(detokenizer.take_delta(False))
    assert deltas == ["a", "", "", "€"]
    cut = Detokenizer(tokenizer, [])
    for token in ids[:-1]:
        cut.push(token, may_stop=True)
    assert cut.take_delta(False) == "a" and cut.text == "a\ufffd" and cut.take_delta(True) == "\ufffd" and cut.text == "a\ufffd"
    rest = Detokenizer(tokenizer, ids[:2])
    assert "".join(stream(rest, ids[2:])[0]) == "€"


def stop_reference(chunks: list[str], stops: list[str], allowed: list[bool]) -> tuple[str, str | None]:
    """The text before the stop string, by looking at the whole text after each token."""
    text = ""
    for chunk, may_stop in zip(chunks, allowed, strict=True):
        old, text = len(text), text + chunk
        hits = [
            (start, len(stop), stop)
            for stop in stops
            for start in range(len(text) - len(stop) + 1)
            if text.startswith(stop, start) and start + len(stop) > old
        ]
        if may_stop and hits:
            start, _, stop = min(hits)
            return text[:start], stop
    return text, None


@settings(deadline=None)
@given(data=st.data())
def test_stop_strings_cut_as_the_slow_reference_does(data: Any) -> None:
    ids = [BYTES.vocabulary()[token] for token in ("h", "e", "l", "o", "he", "ll", "hell", "hello", "Ġw")]
    tokens = data.draw(st.lists(st.sampled_from(ids), max_size=20))
    stops = data.draw(st.lists(st.text("helo w", min_size=1, max_size=5), max_size=4))
    allowed = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    include = data.draw(st.booleans())
    text, stop = stop_reference([BYTES.decode([token]) for token in tokens], stops, allowed)
    detokenizer = Detokenizer(BYTES, [], stops, include_stop_str_in_output=include)
    deltas, found = stream(detokenizer, tokens, lambda i: data.draw(st.booleans()), lambda i: allowed[i])
    assert found == stop
    assert "".join(deltas) == detokenizer.text == text + (stop if include and stop else "")


def test_the_beginning_of_a_stop_string_is_never_streamed_too_early() -> None:
    detokenizer = Detokenizer(BYTES, [], ["hello"])
    ids = BYTES.encode("xhelp", add_special_tokens=False)
    deltas = []
    for token in ids:
        detokenizer.push(token, may_stop=True)
        deltas.append(detokenizer.take_delta(False))
    assert deltas[0] == "x" and deltas[1] == "" and deltas[-1] == "help"


def test_a_stop_string_before_min_tokens_does_not_fire_later() -> None:
    detokenizer = Detokenizer(BYTES, [], ["hello"])
    ids = BYTES.vocabulary()
    assert detokenizer.push(ids["hello"], may_stop=False) is None
    assert detokenizer.push(ids["Ġw"], may_stop=True) is None
    assert detokenizer.take_delta(False) == "hello w"
    assert detokenizer.push(ids["hello"], may_stop=True) == "hello" and detokenizer.text == "hello w"


def test_a_long_output_takes_time_in_proportion() -> None:
    class Counting(Tokenizer):
        calls = 0

        def token_bytes(self, token: int) -> bytes:
            Counting.calls += 1
            return super().token_bytes(token)

    tokenizer = Counting(Backend.from_str(byte_level_json()), bos_id=0, eos_id=1)
    detokenizer = Detokenizer(tokenizer, [5] * 1000, ["zzz"])
    for _ in range(2000):
        detokenizer.push(10, may_stop=True)
        assert len(detokenizer.take_delta(False)) <= 1
    assert Counting.calls <= 2010
