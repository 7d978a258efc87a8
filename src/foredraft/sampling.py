"""Logits to the one distribution of a row, and the noise that draws from it.

Owns: the order in which masks, bias, penalties, temperature and truncation act, and the position-keyed random numbers.  Does not
know: whether a row belongs to a draft, a verification or plain decoding; all three call the same functions.

Every row is computed alone, in float64, so its result cannot depend on how many rows a pass had.  The compiled module, where it is
there, does what touches the whole vocabulary; numpy is the reference, and what runs without it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence as Seq
from functools import cache
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from foredraft.types import Distribution, FloatArray, IntArray, Logprob, SamplingParams, Sequence, TokenLogprobs

# Streams of noise.  Draws that must be independent of each other never share one.
STREAM_TARGET = 0
STREAM_DRAFT = 1
STREAM_RESIDUAL = 2
STREAM_ACCEPT = 3

_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10
# Below this many tokens numpy is as fast, and its noise is the definition.
_FEW_TOKENS = 256


@cache
def extension() -> Any:
    """The compiled module, or None."""
    try:
        return importlib.import_module("foredraft._native")
    except ImportError:
        return None


# ------------------------------------------------------------------------------------------------ noise

Words = npt.NDArray[np.uint64]


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10 (Salmon et al., SC'11, "Parallel random numbers: as easy as 1, 2, 3").

    ``counter``: four 32-bit words, each a number or a uint64 array; ``key``: two 32-bit words.  Returns four words.
    """
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product0, product1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ np.uint64(k0),
            product1 & _WORD,
            (product0 >> _HALF) ^ c3 ^ np.uint64(k1),
            product0 & _WORD,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _uniform(high: Words, low: Words) -> FloatArray:
    """52 random bits as the middle of their cell, so that neither 0 nor 1 can occur; float64 in (0, 1)."""
    bits = (high << np.uint64(20)) | (low >> np.uint64(12))
    uniform: FloatArray = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return uniform


class Chance(Protocol):
    """Where a verification rule gets its randomness from."""

    def draw(self, dist: Distribution, position: int, stream: int) -> int:
        """A token of ``dist`` for absolute ``position``."""
        ...

    def accept(self, probability: float, position: int) -> bool:
        """True with that probability."""
        ...


class PositionNoise:
    """Noise keyed by (seed, position, token, sample_index): the same draw wherever and however often it is asked for.

    ``STREAM_TARGET`` depends on nothing else, so plain and speculative decoding see the same noise.  The other streams
    also depend on ``origin``, the position of a pass's first row: block verification looks at coins and drafts beyond the
    tokens it keeps, so a later pass must not meet them again.
    """

    def __init__(self, seed: int, sample_index: int = 0, origin: int = 0) -> None:
        self._key = (seed & 0xFFFFFFFF, seed >> 32)
        self._sample_index = sample_index
        self._origin = origin

    def gumbel(self, tokens: IntArray, position: int, stream: int = STREAM_TARGET) -> FloatArray:
        """Standard Gumbel noise of each token, float64, same shape as ``tokens``."""
        high, low = self._words(tokens, position, stream)
        noise: FloatArray = -np.log(-np.log(_uniform(high, low)))
        return noise

    def draw(self, dist: Distribution, position: int, stream: int) -> int:
        """Gumbel-max: argmax of log-probability plus noise is a sample of ``dist``."""
        tokens, log_probs = dist.tokens, dist.log_probs
        if len(tokens) == 1:
            return int(tokens[0])
        if len(tokens) > _FEW_TOKENS and extension() is not None:
            contenders = self._contenders(tokens, log_probs, position, stream)
            tokens, log_probs = tokens[contenders], log_probs[contenders]
        return int(tokens[np.argmax(log_probs + self.gumbel(tokens, position, stream))])

    def accept(self, probability: float, position: int) -> bool:
        """One coin per position and pass."""
        high, low = self._words(np.zeros(1, dtype=np.int64), position, STREAM_ACCEPT)
        return bool(_uniform(high, low)[0] < probability)

    def _contenders(self, tokens: IntArray, log_probs: FloatArray, position: int, stream: int) -> IntArray:
        """Ascending indices of the tokens that can win the draw; the others lose by their first random bits alone."""
        found = np.empty(len(tokens), np.int64)
        words = position, self._sample_index, self._last_word(stream)
        num_found = extension().contenders(tokens, np.ascontiguousarray(log_probs), *words, *self._key, found)
        contenders: IntArray = found[:num_found]
        return contenders

    def _words(self, tokens: IntArray, position: int, stream: int) -> tuple[Words, Words]:
        words = position, self._sample_index, self._last_word(stream)
        if extension() is None:
            w0, w1, _, _ = philox((tokens.astype(np.uint64), *words), self._key)
            return w0, w1
        high, low = np.empty(len(tokens), np.uint32), np.empty(len(tokens), np.uint32)
        extension().philox(np.ascontiguousarray(tokens, np.int64), *words, *self._key, high, low)
        return high.astype(np.uint64), low.astype(np.uint64)

    def _last_word(self, stream: int) -> int:
        return (0 if stream == STREAM_TARGET else self._origin) << 2 | stream


def noise_for(seq: Sequence) -> PositionNoise:
    """The noise of a sequence's next pass."""
    return PositionNoise(seq.seed, seq.sample_index, origin=len(seq.tokens))


# ------------------------------------------------------------------------------------------------ distribution


def distribution(logits: FloatArray, seq: Sequence, draft: Seq[int] = ()) -> Distribution:
    """The distribution of the token that follows ``seq.tokens + draft``.

    Order of effect: structured_outputs, allowed_token_ids, bad_words, min_tokens, logit_bias, penalties, temperature, min_p,
    top_k, top_p.  The first two always hold; one of the other masks that would leave no token at all is not applied.

    Args:
        logits: the target's (or a draft model's) raw row, float [V]; left unchanged.
        seq: gives parameters, token rules and the tokens so far.
        draft: draft tokens between ``seq.tokens`` and this row.

    Raises:
        FloatingPointError: no token has a finite logit, or none is allowed.
    """
    params = seq.params
    row = _adjust(logits, seq, draft)
    if params.temperature == 0.0:
        best = int(np.argmax(row))
        _check_finite(row[best], seq)
        return Distribution(np.array([best], dtype=np.int64), np.zeros(1))
    top = row.max()
    _check_finite(top, seq)
    return _truncate(row, float(top), params)


def is_adjusted(seq: Sequence, num_draft: int = 0) -> bool:
    """Whether anything but temperature and truncation changes a row of this sequence behind ``num_draft`` draft tokens."""
    params = seq.params
    return bool(
        params.allowed_token_ids is not None
        or seq.grammar is not None
        or seq.rules.bad_words
        or seq.num_output + num_draft < params.min_tokens
        or params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
    )


def _check_finite(best: float, seq: Sequence) -> None:
    if not np.isfinite(best):
        if seq.grammar is not None and best == -np.inf:
            raise FloatingPointError(seq.grammar.error or "no token that the request allows continues its structured_outputs.")
        raise FloatingPointError(f"the model produced logits whose largest is {best}; try dtype float32.")


def _adjust(logits: FloatArray, seq: Sequence, draft: Seq[int]) -> FloatArray:
    params, rules = seq.params, seq.rules
    row = logits
    num_output = seq.num_output + len(draft)
    if seq.grammar is not None and (allowed := seq.grammar.allowed(seq, draft)) is not None:
        row = np.where(allowed, row, row.dtype.type(-np.inf))
    if params.allowed_token_ids is not None:
        keep, kept = np.array(params.allowed_token_ids), row
        row = np.full_like(kept, -np.inf)
        row[keep] = kept[keep]
    if rules.bad_words:
        row = _forbid(row, _completing_bad_words(seq, draft))
    if num_output < params.min_tokens:
        enders = () if params.ignore_eos else rules.eos_ids
        row = _forbid(row, sorted({*enders, *params.stop_token_ids}))
    # In float64 from here on: a bias or penalty that is legal but huge would overflow in the logits' own type.
    if params.logit_bias:
        row = row.astype(np.float64)
        row[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), dtype=row.dtype)
    if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
        row = _penalize(row.astype(np.float64), seq, draft)
    return row


def _forbid(row: FloatArray, tokens: list[int]) -> FloatArray:
    inside = [token for token in tokens if token < len(row)]
    if not inside:
        return row
    masked = row.copy()
    masked[inside] = -np.inf
    return masked if np.any(masked > -np.inf) else row


def _completing_bad_words(seq: Sequence, draft: Seq[int]) -> list[int]:
    """Last tokens of the bad words of which everything before stands at the end of the output."""
    longest = max(len(word) for word in seq.rules.bad_words) - 1
    output = [*seq.tokens[max(seq.num_prompt, len(seq.tokens) - longest) :], *draft]
    return [
        word[-1]
        for word in seq.rules.bad_words
        if len(word) == 1 or (len(output) >= len(word) - 1 and tuple(output[-(len(word) - 1) :]) == word[:-1])
    ]


def _penalize(row: FloatArray, seq: Sequence, draft: Seq[int]) -> FloatArray:
    params = seq.params
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.fromiter(chain(seq.tokens, draft), dtype=np.int64))
        seen = seen[seen < len(row)]
        values = row[seen]
        row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        output = np.array([*seq.tokens[seq.num_prompt :], *draft], dtype=np.int64)
        seen, counts = np.unique(output, return_counts=True)
        row[seen] -= (params.presence_penalty + params.frequency_penalty * counts).astype(row.dtype)
    return row


def _truncate(row: FloatArray, top: float, params: SamplingParams) -> Distribution:
    """Temperature, min_p, top_k, top_p and normalisation of a row whose largest value is ``top``.

    Of a large vocabulary only what may survive is gathered and sorted.
    """
    temperature, floor = params.temperature, math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    total = None
    if 0 < params.top_k < len(row):
        tokens = _largest(row, params.top_k)
    elif params.min_p > 0.0:
        tokens = _at_least(row, top, temperature, floor)
    elif params.top_p < 1.0:
        total = _sum_weights(row, top, temperature)
        # Tokens below (1 - top_p) / n of the whole weigh less than 1 - top_p together, so the rest reaches top_p without them.
        tokens = _at_least(row, top, temperature, math.log(total * (1.0 - params.top_p) / len(row)))
    else:
        tokens = np.flatnonzero(row > -np.inf)
    scaled = _scaled(row[tokens], top, temperature)
    kept = np.flatnonzero(scaled >= floor) if params.min_p > 0.0 else np.flatnonzero(scaled > -np.inf)
    if len(kept) < len(tokens):
        tokens, scaled = tokens[kept], scaled[kept]
    weights = np.exp(scaled)
    if params.top_p < 1.0:
        kept = _nucleus(weights, weights.sum() if total is None else total, params.top_p)
        tokens, scaled, weights = tokens[kept], scaled[kept], weights[kept]
    return Distribution(tokens, scaled - np.log(weights.sum()))


def _scaled(values: FloatArray, top: float, temperature: float) -> FloatArray:
    """(values - top) / temperature in float64."""
    scaled: FloatArray = values.astype(np.float64)
    scaled -= top
    with np.errstate(over="ignore"):
        scaled /= temperature
    return scaled


def _at_least(row: FloatArray, top: float, temperature: float, floor: float) -> IntArray:
    """Ascending indices of all values whose scaled value is at least ``floor``, and of a few that are just below."""
    slack = 1e-3 * temperature + 1e-5 * max(1.0, abs(top))
    lowest = float(np.finfo(row.dtype).min)
    return np.flatnonzero(row >= max(lowest, top + temperature * floor - slack))


def top_probability(row: FloatArray) -> float:
    """Softmax probability of the largest of a row's logits."""
    return 1.0 / _sum_weights(row, float(row.max()), 1.0)


def _sum_weights(row: FloatArray, top: float, temperature: float) -> float:
    """Sum of e^((row - top) / temperature)."""
    native = extension()
    if native is None:
        return float(np.exp(_scaled(row, top, temperature)).sum())
    total: float = native.sum_weights(np.ascontiguousarray(row), top, temperature)
    return total


def _largest(values: FloatArray, num: int) -> IntArray:
    """Ascending indices of the ``num`` largest; of equal values the lower index is kept."""
    threshold = np.partition(values, len(values) - num)[len(values) - num]
    above = np.flatnonzero(values > threshold)
    ties = np.flatnonzero(values == threshold)[: num - len(above)]
    return np.sort(np.concatenate([above, ties]))


def _nucleus(weights: FloatArray, total: float, top_p: float) -> IntArray:
    """Ascending indices of the fewest largest weights whose share of ``total`` reaches ``top_p``; the lower index of equal ones."""
    order = np.argsort(-weights, kind="stable")
    num = int(np.searchsorted(np.cumsum(weights[order] / total), top_p)) + 1
    return np.sort(order[:num])


# ------------------------------------------------------------------------------------------------ log-probabilities


def token_logprobs(logits: FloatArray, token: int, num_top: int) -> TokenLogprobs:
    """Log-probability and rank of ``token`` and of the ``num_top`` likeliest, under the raw row ``logits`` [V]."""
    row = logits.astype(np.float64)
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    num_top = min(num_top, len(row))
    top = _largest(row, num_top) if 0 < num_top < len(row) else np.arange(num_top)
    top = top[np.argsort(-row[top], kind="stable")]
    found = {int(t): Logprob(float(row[t]), rank) for rank, t in enumerate(top, start=1)}
    num_before = int((row > row[token]).sum() + (row[:token] == row[token]).sum())
    chosen = Logprob(float(row[token]), num_before + 1)
    return {token: chosen} | found
