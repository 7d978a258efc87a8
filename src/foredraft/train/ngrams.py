"""Counting n-grams, and packing the counts into a table of limited size.

Owns: what is counted, which contexts are kept, and the table's arrays.  Does not know: where texts come from, or how a table is
used.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foredraft.drafters.backoff import counts_cell
from foredraft.drafters.ngram_table import (
    CHECK_BITS,
    KEY_BITS,
    MAX_ORDER,
    MULTIPLIER,
    SHARE_UNIT,
    bucket_bits,
    num_bytes,
    token_dtype,
)
from foredraft.replay import Record

Array = npt.NDArray[Any]

MAX_SUCCESSORS = 8
NUM_UNIGRAMS = 8
# A longer context that occurred in one text only hardly ever says more than the shorter ones.
MIN_TEXTS, MIN_TEXTS_FROM_ORDER = 2, 3


class Contexts(NamedTuple):
    """Contexts of all orders, and for each a stretch of ``tokens`` and ``counts``, the most frequent first."""

    keys: Array
    orders: Array
    totals: Array
    kinds: Array
    starts: Array
    lengths: Array
    tokens: Array
    counts: Array


def count(records: Seq[Record]) -> Contexts:
    """Everything that followed 1 to MAX_ORDER tokens in the answers; contexts reach into the prompts.

    In how many texts it did, not how often: a text that repeats itself would else outweigh all others, and of its own repetitions
    a request knows by itself.
    """
    lengths = np.array([len(record.tokens) for record in records])
    flat = np.concatenate([np.asarray(record.tokens, np.uint64) for record in records])
    text = np.repeat(np.arange(len(records)), lengths)
    place = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    answered = np.nonzero(place >= np.array([record.num_prompt for record in records])[text])[0]
    keys, parts = np.zeros(len(answered), np.uint64), []
    for order in range(1, MAX_ORDER + 1):
        inside = place[answered] >= order
        answered, keys = answered[inside], keys[inside]
        keys = (keys ^ (flat[answered - order] + np.uint64(1))) * np.uint64(MULTIPLIER)
        keys ^= keys >> np.uint64(29)
        parts.append(_contexts(order, keys, flat[answered], text[answered]))
    offsets = np.cumsum([0, *(len(part.tokens) for part in parts)])[:-1]
    moved = [part._replace(starts=part.starts + offset) for part, offset in zip(parts, offsets, strict=True)]
    return Contexts(*(np.concatenate(columns) for columns in zip(*moved, strict=True)))


def _contexts(order: int, keys: Array, tokens: Array, text: Array) -> Contexts:
    """The contexts of one order from (key, successor, text) of each place."""
    by = np.lexsort((text, tokens, keys))
    keys, tokens, text = keys[by], tokens[by], text[by]
    new_pair = _changes(keys, tokens)
    new = new_pair | np.concatenate([[True], text[1:] != text[:-1]])[: len(text)]
    first = np.nonzero(new_pair)[0]
    counts = np.add.reduceat(new.astype(np.int64), first) if len(first) else np.zeros(0, np.int64)
    keys, tokens = keys[first], tokens[first]
    by = np.lexsort((tokens, -counts, keys))
    keys, tokens, counts = keys[by], tokens[by], counts[by]
    starts = np.nonzero(_changes(keys))[0]
    kinds = np.diff([*starts, len(keys)])
    totals = np.add.reduceat(counts, starts) if len(starts) else np.zeros(0, np.int64)
    orders = np.full(len(starts), order)
    return Contexts(keys[starts], orders, totals, kinds, starts, np.minimum(kinds, MAX_SUCCESSORS), tokens, counts)


def _changes(*columns: Array) -> Array:
    """Where a row of sorted columns differs from the row before."""
    changed = np.zeros(len(columns[0]), bool)
    changed[:1] = True
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return changed


def pack(contexts: Contexts, vocab_size: int, unigrams: tuple[Array, Array], max_bytes: int) -> dict[str, Array]:
    """The arrays of a table of at most ``max_bytes``; ``unigrams`` are tokens and their shares, the most frequent first."""
    kept = _worth_keeping(contexts, vocab_size, max_bytes)
    kept = kept[np.argsort(contexts.keys[kept], kind="stable")]
    keys, lengths = contexts.keys[kept], contexts.lengths[kept]
    bits = bucket_bits(len(kept))
    buckets = keys >> np.uint64(KEY_BITS - bits) if bits else np.zeros(len(kept), np.uint64)
    first_context = np.searchsorted(buckets, np.arange(2**bits + 1, dtype=np.uint64))
    ends = np.concatenate([[0], np.cumsum(lengths)])
    at = np.repeat(contexts.starts[kept] - ends[:-1], lengths) + np.arange(ends[-1])
    shares = contexts.counts[at] / np.repeat(contexts.totals[kept], lengths)
    cells = [
        counts_cell(0, total, kinds)
        for total, kinds in zip(*(c[kept].tolist() for c in (contexts.totals, contexts.kinds)), strict=True)
    ]
    return {
        "checks": (keys >> np.uint64(KEY_BITS - bits - CHECK_BITS)).astype("<u2"),
        "cells": np.array(cells, "<u1"),
        "lengths": lengths.astype("<u1"),
        "first_context": first_context.astype("<u4"),
        "first_successor": ends[first_context].astype("<u4"),
        "tokens": contexts.tokens[at].astype(token_dtype(vocab_size)),
        "shares": np.rint(SHARE_UNIT * shares).astype("<u1"),
        "unigrams": unigrams[0].astype(token_dtype(vocab_size)),
        "unigram_shares": np.rint(SHARE_UNIT * unigrams[1]).astype("<u1"),
    }


def _worth_keeping(contexts: Contexts, vocab_size: int, max_bytes: int) -> Array:
    """Indices of the contexts to keep: the most frequent first, of equals the shorter, as many as fit.

    A context is at most as frequent as its shorter ones, so that these are kept with it.
    """
    once = (contexts.totals < MIN_TEXTS) & (contexts.orders >= MIN_TEXTS_FROM_ORDER)
    ranked = np.lexsort((contexts.orders, -contexts.totals, once))[: np.count_nonzero(~once)]
    successors = np.cumsum(contexts.lengths[ranked])
    low, high = 0, len(ranked)
    while low < high:
        middle = (low + high + 1) // 2
        fits = num_bytes(middle, int(successors[middle - 1]), vocab_size) <= max_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return ranked[:low]


def unigrams(records: Seq[Record]) -> tuple[Array, Array]:
    """The most frequent tokens of the answers, and their shares."""
    answers = np.concatenate([np.asarray(record.tokens[record.num_prompt :], np.int64) for record in records])
    tokens, counts = np.unique(answers, return_counts=True)
    best = np.lexsort((tokens, -counts))[:NUM_UNIGRAMS]
    return tokens[best], counts[best] / len(answers)


def summary(arrays: Mapping[str, Array]) -> str:
    """Numbers of contexts and successors, for people."""
    return f"{len(arrays['checks']):,} contexts, {len(arrays['tokens']):,} successors"
