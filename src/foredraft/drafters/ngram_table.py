"""What followed short contexts in the texts that a target wrote: n-gram counts in one memory-mapped file.

Owns: the table's layout and lookup, and the identity of the target that it was made for.  Does not know: how counts are gathered,
or what is made of them.

A context is the last 1 to ``MAX_ORDER`` tokens.  Its key is hashed from the last token backwards, so that the keys of all orders
come from one loop.  Contexts are sorted by key; the leading bits of a key name a bucket of about eight contexts, the next 16 are
compared.  Keys that agree in both are taken for equal: were they not, a draft would be worse, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from foredraft.acceptance import NUM_CLASSES
from foredraft.array_file import ArrayFile, read_arrays, write_arrays
from foredraft.drafters.backoff import CELLS_PER_GROUP, NUM_CELLS
from foredraft.types import ConfigError, ModelFileError

KIND = "suffix statistics"
MAX_ORDER = 6
KEY_BITS = 64
MULTIPLIER = 0x9E3779B97F4A7C15
CHECK_BITS = 16
CONTEXTS_PER_BUCKET = 8
# Shares are kept in parts of this, rounded; one that rounds to 0 is not kept.
SHARE_UNIT = 255
# Contexts whose successors are kept as Python objects, since the same ones are asked for again and again.  Each is a list of at
# most 8 pairs of an int and a float, 56 + 32 + 24 bytes each.
MAX_DECODED = 8192
DECODED_BYTES = MAX_DECODED * 8 * 112
# Where a vocabulary's size is not known.
MOST_TOKENS = 2**24
_DTYPES = {
    **dict.fromkeys(("lengths", "cells", "shares", "unigram_shares"), ("<u1",)),
    **dict.fromkeys(("tokens", "unigrams"), ("<u2", "<u4")),
    **dict.fromkeys(("first_context", "first_successor"), ("<u4",)),
    **dict.fromkeys(("weights", "hits", "promised"), ("<f4",)),
    "checks": ("<u2",),
}
_MASK = 2**KEY_BITS - 1
_PER_CONTEXT, _PER_BUCKET, _PER_FILE = 4, 8, 8192


@dataclass(frozen=True)
class TargetIdentity:
    """Which target a table is for: the number of its logits, a digest of its vocabulary, and the name it was loaded by.

    Two targets with one vocabulary may share a table: it then only predicts worse.
    """

    model: str
    vocab_size: int
    vocabulary: str

    @classmethod
    def of(cls, model: str, vocab_size: int, vocabulary: Mapping[str, int]) -> TargetIdentity:
        """``vocabulary`` maps token text to id."""
        text = json.dumps(sorted((token, piece) for piece, token in vocabulary.items()))
        return cls(model, vocab_size, hashlib.sha256(text.encode()).hexdigest())

    def fits(self, other: TargetIdentity) -> bool:
        """Whether token ids mean the same for both."""
        return (self.vocab_size, self.vocabulary) == (other.vocab_size, other.vocabulary)


def context_keys(tokens: Seq[int], order: int = MAX_ORDER, first: int = 0) -> list[int]:
    """Keys of the last 1, 2, ..., ``order`` tokens, as many as there are; those that begin with another ``first`` differ."""
    keys, key = list[int](), first
    for token in tokens[: -order - 1 : -1]:
        key = (key ^ (token + 1)) * MULTIPLIER & _MASK
        # The multiplication moves nothing downwards; without this the last token alone would decide the low bits.
        key ^= key >> 29
        keys.append(key)
    return keys


def bucket_bits(num_contexts: int) -> int:
    """How many leading bits of a key name its bucket."""
    return max(0, (num_contexts // CONTEXTS_PER_BUCKET).bit_length() - 1)


def num_bytes(num_contexts: int, num_successors: int, vocab_size: int) -> int:
    """Upper bound of the size of a table's file."""
    buckets = (1 << bucket_bits(num_contexts)) + 1
    per_successor = int(token_dtype(vocab_size).itemsize) + 1
    return _PER_FILE + _PER_CONTEXT * num_contexts + _PER_BUCKET * buckets + per_successor * num_successors


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest type for token ids."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class Match(NamedTuple):
    """A known context: its order, how its counts look (see ``backoff.base_cell``), and where its successors are."""

    order: int
    cell: int
    start: int
    stop: int


def _misfit(arrays: Mapping[str, Any], vocab_size: int) -> str | None:
    """What is wrong with a table's arrays, if anything; ``vocab_size`` 0 is not known."""
    missing = sorted(_DTYPES.keys() - arrays.keys())
    if missing:
        return f"array {missing[0]} is missing"
    for name, dtypes in _DTYPES.items():
        if arrays[name].dtype.str.replace("|", "<") not in dtypes:
            return f"array {name} is of {arrays[name].dtype}"
    contexts, successors = len(arrays["checks"]), len(arrays["tokens"])
    first_context, ends = arrays["first_context"], np.concatenate([[0], np.cumsum(arrays["lengths"], dtype=np.int64)])
    lengths_fit = (
        len(arrays["lengths"]) == len(arrays["cells"]) == contexts
        and len(arrays["shares"]) == successors == ends[-1]
        and len(first_context) == len(arrays["first_successor"]) == 2 ** bucket_bits(contexts) + 1
        and len(arrays["unigrams"]) == len(arrays["unigram_shares"])
        and len(arrays["hits"]) == len(arrays["promised"])
        and len(arrays["hits"]) in (0, 2 * NUM_CLASSES)
        and len(arrays["weights"]) == NUM_CELLS
    )
    if not lengths_fit:
        return "arrays are of other lengths than each other says"
    rises = first_context[0] == 0 and first_context[-1] == contexts and bool(np.all(first_context[1:] >= first_context[:-1]))
    if not rises or not np.array_equal(ends[first_context], arrays["first_successor"]):
        return "buckets do not follow each other"
    most = max((int(arrays[name].max()) for name in ("tokens", "unigrams") if len(arrays[name])), default=0)
    if most >= (vocab_size or MOST_TOKENS):
        return f"token {most} is beyond the vocabulary"
    if contexts and int(arrays["cells"].max()) >= CELLS_PER_GROUP:
        return "counts are of a class that there is not"
    if not all(np.isfinite(arrays[name]).all() for name in ("weights", "hits", "promised")):
        return "weights are not all numbers"
    return None


class NgramTable:
    """Contexts and what followed them.

    ``unigrams`` are the most frequent tokens, whatever the context.
    ``weights`` (see ``backoff``), ``hits`` and ``promised`` (see ``suffix.Calibration``) were learned on other texts of the target.

    Raises:
        ModelFileError: arrays that do not fit together, which compiled code would read past.
    """

    def __init__(self, file: ArrayFile) -> None:
        # Files of before numbers were aligned have some that a memoryview cannot read.
        arrays = {name: np.require(values, requirements="A") for name, values in file.arrays.items()}
        self.provenance: Mapping[str, Any] = file.header["provenance"]
        self.identity = TargetIdentity(**file.header["identity"])
        wrong = _misfit(arrays, self.identity.vocab_size)
        if wrong is not None:
            raise ModelFileError(f"statistics whose {wrong}; make them again with `foredraft train suffix`.")
        self.num_contexts = len(arrays["checks"])
        # Reading one element of a memoryview takes a third of the time that numpy takes.
        self._tokens, self._shares = arrays["tokens"].data, arrays["shares"].data
        self.unigrams = list(zip(arrays["unigrams"].tolist(), (arrays["unigram_shares"] / SHARE_UNIT).tolist(), strict=True))
        self.weights: list[float] = arrays["weights"].tolist()
        self.hits: list[float] = arrays["hits"].tolist()
        self.promised: list[float] = arrays["promised"].tolist()
        self._checks, self._lengths, self._cells = arrays["checks"].data, arrays["lengths"].data, arrays["cells"].data
        self._first_context, self._first_successor = arrays["first_context"].data, arrays["first_successor"].data
        bits = bucket_bits(self.num_contexts)
        self._bucket_shift, self._check_shift = KEY_BITS - bits, KEY_BITS - bits - CHECK_BITS
        self._decoded: dict[int, list[tuple[int, float]]] = {}

    @property
    def arrays(self) -> tuple[memoryview, ...]:
        """Tokens and shares of successors; checks, lengths and cells of contexts; first context and successor of buckets."""
        successors, contexts = (self._tokens, self._shares), (self._checks, self._lengths, self._cells)
        return *successors, *contexts, self._first_context, self._first_successor

    @property
    def bucket_bits(self) -> int:
        """See the function of that name."""
        return KEY_BITS - self._bucket_shift

    def matches(self, tokens: Seq[int]) -> list[Match]:
        """The known contexts that end ``tokens``, the shortest first; with one all shorter ones are known."""
        found = list[Match]()
        for order, key in enumerate(context_keys(tokens), 1):
            bucket = key >> self._bucket_shift
            first, stop = self._first_context[bucket], self._first_context[bucket + 1]
            checks, check = self._checks[first:stop].tolist(), key >> self._check_shift & 0xFFFF
            if check not in checks:
                break
            index = first + checks.index(check)
            start = self._first_successor[bucket] + sum(self._lengths[first:index])
            found.append(Match(order, self._cells[index], start, start + self._lengths[index]))
        return found

    def successors(self, match: Match) -> list[tuple[int, float]]:
        """What followed a context, and in which share of the texts, the most frequent first; not to be changed."""
        known = self._decoded.get(match.start)
        if known is None:
            if len(self._decoded) >= MAX_DECODED:
                self._decoded.clear()
            pairs = zip(self._tokens[match.start : match.stop], self._shares[match.start : match.stop], strict=True)
            known = self._decoded[match.start] = [(token, share / SHARE_UNIT) for token, share in pairs]
        return known


def save_table(path: Path, identity: TargetIdentity, provenance: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Write a table.

    Raises:
        CapacityError: it cannot be written.
    """
    write_arrays(path, {"kind": KIND, "identity": asdict(identity), "provenance": provenance}, arrays)


def load_table(path: Path, target: TargetIdentity) -> NgramTable:
    """Open the table that was made for ``target``.

    Raises:
        ModelFileError: the file is missing, truncated, corrupt, or holds something else.
        ConfigError: it was made for a target with another vocabulary.
    """
    file = read_arrays(path)
    if file.header.get("kind") != KIND:
        raise ModelFileError(f"{path} holds {file.header.get('kind')}, not {KIND}; make it with `foredraft train suffix`.")
    try:
        table = NgramTable(file)
    except ModelFileError as error:
        raise ModelFileError(f"{path} holds {error}") from error
    if not table.identity.fits(target):
        ours, theirs = (f"{one.model} with {one.vocab_size} tokens ({one.vocabulary[:8]})" for one in (table.identity, target))
        raise ConfigError(f"{path} is for the vocabulary of {ours}, not of {theirs}; make new ones with `foredraft train suffix`.")
    return table
