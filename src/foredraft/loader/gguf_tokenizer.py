"""A tokenizer out of GGUF metadata.

Owns: how ``tokenizer.ggml.*`` keys become a byte-level BPE or a SentencePiece-like BPE.  Does not know: the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foredraft.loader.gguf_file import GGUFFile
from foredraft.loader.tokenizer import SPACE_MARK, Tokenizer, template_renderer
from foredraft.types import ModelFileError, UnsupportedModelError, refuse_unknown

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_OPENING = r"[^\r\n\p{L}\p{N}]?"


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before byte-level BPE: by ``pattern``, or by GPT-2's own rule when it is None."""

    pattern: str | None = None
    single_digits: bool = False
    whole_words_first: bool = False
    compose: bool = False
    adds_bos: bool = False


_GPT2 = PreTokenizer()
_SINGLE_DIGITS = PreTokenizer(single_digits=True)
_LLAMA3 = PreTokenizer(f"{_CONTRACTIONS}|{_LETTERS}|\\p{{N}}{{1,3}}|{_REST}", whole_words_first=True, adds_bos=True)
_QWEN2 = PreTokenizer(f"{_CONTRACTIONS}|{_LETTERS}|\\p{{N}}|{_REST}", compose=True)
_TEKKEN = PreTokenizer(
    f"{_OPENING}{_UPPER}*{_LOWER}+|{_OPENING}{_UPPER}+{_LOWER}*|\\p{{N}}|{_CASED_REST}", whole_words_first=True, adds_bos=True
)
_GPT4O = PreTokenizer(
    f"{_OPENING}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_OPENING}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\\p{{N}}{{1,3}}|{_CASED_REST}"
)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
}


@dataclass(frozen=True)
class Vocabulary:
    """The lists of ``tokenizer.ggml.*``, checked: token strings by id, their types, and the ids that text asks for."""

    source: str
    tokens: list[str]
    types: list[int]
    ids: Mapping[str, int]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer of a GGUF file.

    Raises:
        UnsupportedModelError: another kind of tokenizer or pre-tokenizer.
        ModelFileError: the lists are missing or do not fit each other.
    """
    meta, source = file.metadata, str(file.path)
    kind = meta.get("tokenizer.ggml.model")
    if not isinstance(kind, str):
        raise ModelFileError(f"{source} has no tokenizer.ggml.model; the file has no tokenizer, use another conversion.")
    refuse_unknown("GGUF tokenizer", kind, ("gpt2", "llama"), UnsupportedModelError)
    vocabulary = _vocabulary(meta, source)
    try:
        backend, adds_bos = _byte_level(meta, vocabulary) if kind == "gpt2" else _sentence_piece(meta, vocabulary)
    except ValueError as error:
        if isinstance(error, (ModelFileError, UnsupportedModelError)):
            raise
        raise ModelFileError(f"the tokenizer of {source} is inconsistent ({error}); fetch the file again.") from error
    _add_tokens(backend, vocabulary)
    _add_edges(
        backend,
        vocabulary,
        bool(meta.get("tokenizer.ggml.add_bos_token", adds_bos)),
        bool(meta.get("tokenizer.ggml.add_eos_token")),
    )
    named = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id, "unk_token": vocabulary.unknown_id}
    template = meta.get("tokenizer.chat_template")
    strings = {name: vocabulary.tokens[token] for name, token in named.items() if token is not None}
    render = template_renderer(template, strings) if isinstance(template, str) and template else None
    return Tokenizer(backend, bos_id=vocabulary.bos_id, eos_id=vocabulary.eos_id, render=render)


def gguf_eos_ids(file: GGUFFile) -> set[int]:
    """Ids that end a sequence, a turn or a message according to the metadata."""
    values = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return {value for value in values if isinstance(value, int)}


def _vocabulary(meta: Mapping[str, Any], source: str) -> Vocabulary:
    tokens = _strings(meta, "tokens", source)
    types = meta.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not tokens or not isinstance(types, list) or len(types) != len(tokens):
        raise ModelFileError(f"{source}: tokenizer.ggml.tokens and token_type must be lists of one length; fetch the file again.")
    ids: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        ids.setdefault(token, token_id)

    def named(name: str) -> int | None:
        value = meta.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and not (isinstance(value, int) and 0 <= value < len(tokens)):
            raise ModelFileError(f"{source}: tokenizer.ggml.{name}_token_id is {value}, outside the vocabulary of {len(tokens)}.")
        return value

    return Vocabulary(source, tokens, types, ids, named("bos"), named("eos"), named("unknown"))


def _strings(meta: Mapping[str, Any], key: str, source: str) -> list[str]:
    values = meta.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ModelFileError(f"{source} has no list of strings tokenizer.ggml.{key}; fetch the file again.")
    return values


def _byte_level(meta: Mapping[str, Any], vocabulary: Vocabulary) -> tuple[Backend, bool]:
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    name = meta.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise UnsupportedModelError(
            f"{vocabulary.source}: pre-tokenizer {name!r} is not supported; choose a model with one of {known}."
        )
    pre = PRE_TOKENIZERS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in _strings(meta, "merges", vocabulary.source)]
    if any(len(merge) != 2 for merge in merges):
        raise ModelFileError(f"{vocabulary.source}: each of tokenizer.ggml.merges must be two tokens; fetch the file again.")
    pairs = [(merge[0], merge[-1]) for merge in merges]
    backend = Backend(_bpe(models.BPE, vocabulary, pairs, ignore_merges=pre.whole_words_first))
    steps: list[Any] = []
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if pre.compose:
        backend.normalizer = normalizers.NFC()
    return backend, pre.adds_bos


def _sentence_piece(meta: Mapping[str, Any], vocabulary: Vocabulary) -> tuple[Backend, bool]:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    scores = meta.get("tokenizer.ggml.scores")
    if (
        not isinstance(scores, list)
        or len(scores) != len(vocabulary.tokens)
        or not all(isinstance(score, (int, float)) for score in scores)
    ):
        raise ModelFileError(f"{vocabulary.source}: tokenizer.ggml.scores must have one number per token; fetch the file again.")
    unknown = None if vocabulary.unknown_id is None else vocabulary.tokens[vocabulary.unknown_id]
    options = {"byte_fallback": "<0x00>" in vocabulary.ids, "fuse_unk": True, "unk_token": unknown}
    backend = Backend(_bpe(models.BPE, vocabulary, merges_from_scores(vocabulary, scores), **options))
    prefixes = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    replace = normalizers.Replace(" ", SPACE_MARK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), replace]) if prefixes else replace
    steps: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixes:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend, True


def merges_from_scores(vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """BPE merges that give SentencePiece's segmentation (Kudo and Richardson, 2018): best score first.

    A piece may arise from several pairs; they follow each other in the order of their ids.  262 144 pieces take under a second.
    """
    ids = {token: i for i, token in enumerate(vocabulary.tokens) if vocabulary.types[i] == NORMAL}
    merges: list[tuple[str, str]] = []
    for token_id in sorted(ids.values(), key=scores.__getitem__, reverse=True):
        piece = vocabulary.tokens[token_id]
        pairs = []
        for cut in range(1, len(piece)):
            left = piece[:cut]
            if left in ids and piece[cut:] in ids:
                pairs.append((left, piece[cut:]))
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += pairs
    return merges


def _bpe(model: Any, vocabulary: Vocabulary, merges: list[tuple[str, str]], **options: Any) -> Any:
    try:
        return model(dict(vocabulary.ids), merges, **options)
    except Exception as error:  # the library raises bare Exception for a merge of unknown tokens
        raise ModelFileError(f"the tokenizer of {vocabulary.source} is inconsistent ({error}); fetch the file again.") from error


def _add_tokens(backend: Backend, vocabulary: Vocabulary) -> None:
    from tokenizers import AddedToken

    special, plain = [], []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (UNKNOWN, CONTROL):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _add_edges(backend: Backend, vocabulary: Vocabulary, add_bos: bool, add_eos: bool) -> None:
    from tokenizers import processors

    edges = [(vocabulary.bos_id, add_bos, "{} $A"), (vocabulary.eos_id, add_eos, "$A {}")]
    template, named = "$A", []
    for token_id, wanted, place in edges:
        if wanted and token_id is not None:
            token = vocabulary.tokens[token_id]
            template = template.replace("$A", place.format(token))
            named.append((token, token_id))
    if named:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=list(dict.fromkeys(named)))
