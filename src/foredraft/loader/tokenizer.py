"""Text to token ids and back.

Owns: encoding, the bytes that each token stands for, chat templates.  Does not know: which file a tokenizer came from.

A token stands for a run of bytes, and the text of ids is the UTF-8 decoding of their bytes, put together; bytes that are no
UTF-8 read as U+FFFD.  That one definition makes streamed text equal to text decoded at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foredraft.types import RequestError, UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

Messages = Sequence[Mapping[str, Any]]
ChatRenderer = Callable[[list[dict[str, Any]], bool], str]

SPACE_MARK = "\u2581"


class Tokenizer:
    """A model's tokenizer.

    ``render`` writes messages as the model's chat format, with or without the header of the answer; None without a template.
    ``bos_id`` and ``eos_id`` are None where the model has none.

    Raises:
        UnsupportedModelError: its decoder is neither byte-level nor SentencePiece-like.
    """

    def __init__(self, backend: Backend, *, bos_id: int | None, eos_id: int | None, render: ChatRenderer | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._render = render
        self._pieces: dict[int, bytes] = {}
        self.bos_id = bos_id
        self.eos_id = eos_id
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_level, self._byte_fallback, self.strips_first_space = _decoder_kind(backend)
        self._bytes_of_char = _byte_level_alphabet() if self._byte_level else {}

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether ``encode_chat`` can be used."""
        return self._render is not None

    def vocabulary(self) -> dict[str, int]:
        """Every token's string in the model's own spelling, and its id."""
        return self._backend.get_vocab(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; ``add_special_tokens`` puts a beginning-of-sequence token first, for models that want one.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"the text has a lone surrogate at character {error.start}; send valid Unicode.") from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary have no text."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(token) for token in ids if token not in skipped)
        if self.strips_first_space:
            text = text.removeprefix(b" ")
        return text.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; empty for an id outside the vocabulary."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._compute_bytes(token)
            # Requests may name any number of ids outside the vocabulary, so nothing is kept of those.
            if piece:
                self._pieces[token] = piece
        return piece

    def _compute_bytes(self, token: int) -> bytes:
        text = self._backend.id_to_token(token) if 0 <= token < 2**31 else None
        if text is None:
            return b""
        if self._byte_level:
            values = [self._bytes_of_char.get(char) for char in text]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else text.encode("utf-8")
        if self._byte_fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            try:
                return bytes([int(text[3:5], 16)])
            except ValueError:
                return text.encode("utf-8")
        return text.replace(SPACE_MARK, " ").encode("utf-8")

    def render_chat(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        """Messages (each with ``role`` and ``content``) in the model's chat format.

        Raises:
            RequestError: the model has no template, or the template refuses the messages.
        """
        if self._render is None:
            raise RequestError("this model has no chat template; send a plain prompt instead of messages.")
        if not messages:
            raise RequestError("messages must hold at least one message; add one with a role and a content.")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(f"each message must be an object with a role and a content, not {message!r}.")
        return self._render([dict(message) for message in messages], add_generation_prompt)

    def encode_chat(self, messages: Messages, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of ``render_chat``; the template itself writes the special tokens, so none are added."""
        return self.encode(self.render_chat(messages, add_generation_prompt), add_special_tokens=False)


def chat_renderer(open_tokenizer: Callable[[], Any]) -> ChatRenderer:
    """A renderer over a transformers tokenizer, which runs the template in a Jinja sandbox; opened at its first use."""
    opened: list[Any] = []

    def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        if not opened:
            opened.append(open_tokenizer())
        try:
            text = opened[0].apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template is code of the model's author and may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RequestError(
                f"the model's chat template refuses these messages ({reason}); change their roles or content."
            ) from error
        assert isinstance(text, str), type(text)
        return text

    return render


def template_renderer(template: str, special_tokens: Mapping[str, str]) -> ChatRenderer:
    """A renderer for a bare template; ``special_tokens`` such as ``bos_token`` are what it may refer to."""

    def open_tokenizer() -> Any:
        from tokenizers import Tokenizer as Backend
        from tokenizers.models import BPE
        from transformers import PreTrainedTokenizerFast

        # Rendering needs the special tokens' strings only, and wrapping a large vocabulary would take over a second.
        return PreTrainedTokenizerFast(tokenizer_object=Backend(BPE()), chat_template=template, **special_tokens)

    return chat_renderer(open_tokenizer)


def turn_end_ids(tokenizer: Tokenizer) -> set[int]:
    """The special token with which the chat template ends an answer, if it has one."""
    if not tokenizer.has_chat_template:
        return set()
    answer = "foredraft-answer"
    try:
        text = tokenizer.render_chat(
            [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}], add_generation_prompt=False
        )
    except RequestError:  # a template that takes no such pair tells nothing; the ids in the settings stand
        return set()
    _, found, tail = text.rpartition(answer)
    ids = tokenizer.encode(tail.lstrip(), add_special_tokens=False)[:1] if found else []
    return {token for token in ids if token in tokenizer.special_ids}


def _decoder_kind(backend: Backend) -> tuple[bool, bool, bool]:
    """Whether tokens are byte-level, fall back to byte tokens, and lose the first space of a text."""
    decoder = backend.decoder
    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    steps = state.get("decoders", [state])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return True, False, False
    marks = any(step.get("type") == "Replace" and step.get("pattern") == {"String": SPACE_MARK} for step in steps)
    if not marks and "Metaspace" not in kinds:
        raise UnsupportedModelError(
            f"the tokenizer's decoder {state.get('type')!r} is not supported; "
            "use a model with a byte-level or SentencePiece tokenizer."
        )
    strips = any(
        (step.get("type") == "Strip" and step.get("content") == " " and step.get("start", 0) > 0)
        or (step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )
    return False, "ByteFallback" in kinds, strips


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (Radford et al., 2019): itself, or 256 + n."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
