from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foredraft import sampling
from foredraft.sampling import (
    STREAM_ACCEPT,
    STREAM_DRAFT,
    STREAM_RESIDUAL,
    STREAM_TARGET,
    PositionNoise,
    _nucleus,
    distribution,
    noise_for,
    philox,
    token_logprobs,
)
from foredraft.types import Distribution, SamplingParams, Sequence, TokenRules

STREAMS = (STREAM_TARGET, STREAM_DRAFT, STREAM_RESIDUAL, STREAM_ACCEPT)
# All random numbers below are fixed by their keys, so a test either always passes or always fails; the level says how unlucky
# a correct implementation would have to be.
LEVEL = 1e-5


def chi_square_p_value(observed: np.ndarray, expected: np.ndarray) -> float:
    """Upper tail of the chi-square statistic; ``expected`` are counts, all positive."""
    assert expected.min() >= 5, expected
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(torch.special.gammaincc(torch.tensor((observed.size - 1) / 2.0).double(), torch.tensor(statistic / 2).double()))


def make_sequence(
    prompt: list[int], output: list[int] | None = None, *, rules: TokenRules | None = None, **options: Any
) -> Sequence:
    tokens = [*prompt, *(output or [])]
    return Sequence(0, tokens, len(prompt), SamplingParams(**options), seed=0, rules=rules or TokenRules())


def make_distribution(probs: list[float]) -> Distribution:
    support = np.flatnonzero(np.array(probs) > 0)
    return Distribution(support, np.log(np.array(probs)[support]))


# ------------------------------------------------------------------------------------------------ Philox


def slow_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return tuple(c)


KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = words(counter)
    k0, k1 = words(key)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), (k0, k1))) == words(expected)
    assert slow_philox(words(counter), words(key)) == words(expected)


word32 = st.integers(0, 2**32 - 1)


@given(st.lists(word32, min_size=1, max_size=4), word32, word32, word32, st.tuples(word32, word32))
@settings(max_examples=60, deadline=None)
def test_philox_over_an_array_differs_from_the_scalar_definition(
    c0s: list[int], c1: int, c2: int, c3: int, key: tuple[int, int]
) -> None:
    result = philox((np.array(c0s, dtype=np.uint64), c1, c2, c3), key)
    columns = list(zip(*(np.broadcast_to(word, len(c0s)).tolist() for word in result), strict=True))
    assert columns == [slow_philox((c0, c1, c2, c3), key) for c0 in c0s]


def test_philox_overflow_must_not_warn() -> None:
    top = 2**32 - 1
    with np.errstate(all="raise"):
        philox((top, top, top, top), (top, top))
        philox((np.full(3, top, dtype=np.uint64), top, top, top), (top, top))


# ------------------------------------------------------------------------------------------------ noise


def gumbel_at(
    seed: int = 3, sample: int = 0, origin: int = 0, position: int = 5, stream: int = STREAM_TARGET, num: int = 20_000
) -> np.ndarray:
    return PositionNoise(seed, sample, origin).gumbel(np.arange(num), position, stream)


def to_uniform(gumbel: np.ndarray) -> np.ndarray:
    return np.exp(-np.exp(-gumbel))


def test_noise_follows_its_definition_bit_for_bit() -> None:
    """Pins the layout of the counter: changing it silently would change every seeded output."""
    seed, sample, origin, position, token = 0x0123456789ABCDEF, 7, 11, 13, 17
    for stream in STREAMS:
        last = (0 if stream == STREAM_TARGET else origin) * 4 + stream
        w0, w1, _, _ = slow_philox((token, position, sample, last), (0x89ABCDEF, 0x01234567))
        uniform = ((w0 << 20 | w1 >> 12) + 0.5) / 2**52
        noise = PositionNoise(seed, sample, origin).gumbel(np.array([token]), position, stream)
        assert noise[0] == -np.log(-np.log(uniform))


@pytest.mark.parametrize("stream", STREAMS)
def test_noise_is_not_gumbel(stream: int) -> None:
    """Kolmogorov-Smirnov over tokens, and over positions, seeds and sample indices."""
    over_tokens = gumbel_at(stream=stream, num=40_000)
    one_token = np.zeros(1, dtype=np.int64)
    over_keys = [
        PositionNoise(seed, sample).gumbel(one_token, position, stream)[0]
        for seed in range(20)
        for sample in range(4)
        for position in range(30)
    ]
    for noise in (over_tokens, np.array(over_keys)):
        ranks = np.arange(1, len(noise) + 1) / len(noise)
        cdf = np.sort(to_uniform(noise))
        distance = max(np.abs(cdf - ranks).max(), np.abs(cdf - ranks + 1 / len(noise)).max())
        assert distance < math.sqrt(-math.log(LEVEL / 2) / 2 / len(noise)), f"distance {distance} over {len(noise)}"


def test_extreme_random_words_give_infinite_noise() -> None:
    from foredraft.sampling import _uniform

    ends = _uniform(np.array([0, 2**32 - 1], dtype=np.uint64), np.array([0, 2**32 - 1], dtype=np.uint64))
    assert ends[0] > 0.0 and ends[1] < 1.0
    with np.errstate(all="raise"):
        assert np.isfinite(-np.log(-np.log(ends))).all()


KEYS = {
    "stream draft": ({}, {"stream": STREAM_DRAFT}),
    "stream residual": ({}, {"stream": STREAM_RESIDUAL}),
    "stream accept": ({}, {"stream": STREAM_ACCEPT}),
    "draft and residual": ({"stream": STREAM_DRAFT}, {"stream": STREAM_RESIDUAL}),
    "draft and accept": ({"stream": STREAM_DRAFT}, {"stream": STREAM_ACCEPT}),
    "next position": ({}, {"position": 6}),
    "next seed": ({}, {"seed": 4}),
    "high half of the seed": ({}, {"seed": 3 + 2**32}),
    "next sample": ({}, {"sample": 1}),
    "next origin": ({"stream": STREAM_DRAFT, "origin": 5}, {"stream": STREAM_DRAFT, "origin": 6}),
    "position against sample": ({"position": 1, "sample": 0}, {"position": 0, "sample": 1}),
    "origin against stream": ({"stream": STREAM_DRAFT, "origin": 1}, {"stream": STREAM_TARGET, "origin": 1}),
}


def independence_p_value(first: np.ndarray, second: np.ndarray) -> float:
    cells = 8 * np.floor(8 * to_uniform(first)).astype(int) + np.floor(8 * to_uniform(second)).astype(int)
    return chi_square_p_value(np.bincount(cells, minlength=64), np.full(64, len(cells) / 64))


@pytest.mark.parametrize(("first", "second"), KEYS.values(), ids=KEYS.keys())
def test_noise_of_different_keys_depends_on_each_other(first: dict[str, int], second: dict[str, int]) -> None:
    assert independence_p_value(gumbel_at(**first), gumbel_at(**second)) > LEVEL


def test_noise_of_neighbouring_tokens_depends_on_each_other() -> None:
    noise = gumbel_at(num=40_001)
    assert independence_p_value(noise[:-1], noise[1:]) > LEVEL


def test_independence_check_is_blind() -> None:
    noise = gumbel_at()
    assert independence_p_value(noise, noise + 0.1) < LEVEL
    assert independence_p_value(noise, np.where(np.arange(len(noise)) % 10 == 0, noise, gumbel_at(position=6))) < LEVEL


@given(st.lists(st.integers(0, 300_000), min_size=1, max_size=6, unique=True), st.sampled_from(STREAMS))
@settings(max_examples=20, deadline=None)
def test_noise_of_a_token_depends_on_which_others_are_asked_for(tokens: list[int], stream: int) -> None:
    noise = PositionNoise(1, 2, 3)
    alone = [noise.gumbel(np.array([token]), 9, stream)[0] for token in tokens]
    assert noise.gumbel(np.array(tokens), 9, stream).tolist() == alone


def test_noise_of_a_subset_differs_from_that_of_the_vocabulary() -> None:
    noise, subset = PositionNoise(5), np.array([3, 4, 900, 49_151])
    assert noise.gumbel(np.arange(49_152), 77)[subset].tolist() == noise.gumbel(subset, 77).tolist()


def test_target_noise_depends_on_the_pass_that_asks() -> None:
    """Otherwise plain and speculative decoding would diverge."""
    assert gumbel_at(origin=1, num=50).tolist() == gumbel_at(origin=99, num=50).tolist()
    for stream in (STREAM_DRAFT, STREAM_RESIDUAL, STREAM_ACCEPT):
        assert gumbel_at(origin=1, stream=stream, num=50).tolist() != gumbel_at(origin=2, stream=stream, num=50).tolist()


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 - 1])
def test_seed_at_the_edge_of_its_range_fails(seed: int) -> None:
    assert np.isfinite(PositionNoise(seed, 63, 2**24).gumbel(np.array([0, 2**20]), 2**24, STREAM_ACCEPT)).all()


def test_noise_for_forgets_seed_sample_or_origin() -> None:
    seq = make_sequence([1, 2], [3])
    seq.seed, seq.sample_index = 9, 4
    tokens = np.arange(10)
    expected = PositionNoise(9, 4, origin=3)
    assert noise_for(seq).gumbel(tokens, 5, STREAM_DRAFT).tolist() == expected.gumbel(tokens, 5, STREAM_DRAFT).tolist()


DRAW_KEYS = {
    "positions": lambda i: (PositionNoise(11), i),
    "seeds": lambda i: (PositionNoise(i), 3),
    "high seeds": lambda i: (PositionNoise(i << 32), 3),
    "sample indices": lambda i: (PositionNoise(11, i % 64, i // 64), 1000 + i // 64),
}
PROBS = [0.5, 0.25, 0.0, 0.125, 0.1, 0.025]


def count_draws(dist: Distribution, vary: str, stream: int, num: int = 2000) -> np.ndarray:
    counts = Counter(noise.draw(dist, position, stream) for noise, position in map(DRAW_KEYS[vary], range(num)))
    return np.array([counts[token] for token in dist.tokens.tolist()])


@pytest.mark.parametrize("stream", [STREAM_TARGET, STREAM_DRAFT, STREAM_RESIDUAL])
@pytest.mark.parametrize("vary", DRAW_KEYS)
def test_draws_do_not_follow_their_distribution(vary: str, stream: int) -> None:
    counts = count_draws(make_distribution(PROBS), vary, stream)
    assert chi_square_p_value(counts, counts.sum() * np.array([p for p in PROBS if p])) > LEVEL


def test_chi_square_is_blind_to_a_biased_draw() -> None:
    """Negative control: draws from a slightly flatter distribution must be told apart."""
    flat = np.array([p for p in PROBS if p]) ** 0.8
    biased = Distribution(make_distribution(PROBS).tokens, np.log(flat / flat.sum()))
    counts = count_draws(biased, "positions", STREAM_TARGET)
    assert chi_square_p_value(counts, counts.sum() * np.array([p for p in PROBS if p])) < LEVEL


@pytest.mark.parametrize("probability", [0.02, 0.5, 0.9])
def test_coins_do_not_fall_with_their_probability(probability: float) -> None:
    num = 3000
    heads = sum(PositionNoise(4, origin=i).accept(probability, i % 7) for i in range(num))
    expected = np.array([num * probability, num * (1 - probability)])
    assert chi_square_p_value(np.array([heads, num - heads]), expected) > LEVEL


def test_certain_and_impossible_coins_fall_wrong() -> None:
    assert all(PositionNoise(1).accept(1.0, i) and not PositionNoise(1).accept(0.0, i) for i in range(200))


# ------------------------------------------------------------------------------------------------ distribution


def slow_distribution(logits: list[float], seq: Sequence, draft: list[int]) -> dict[int, float]:
    """The documented rules, one after the other, over a dict: token -> probability."""
    params, rules = seq.params, seq.rules
    prompt, output = seq.tokens[: seq.num_prompt], [*seq.tokens[seq.num_prompt :], *draft]
    row = {token: float(logit) for token, logit in enumerate(logits)}
    if params.allowed_token_ids is not None:
        row = {token: logit if token in params.allowed_token_ids else -math.inf for token, logit in row.items()}

    def forbid(tokens: set[int]) -> dict[int, float]:
        masked = {token: -math.inf if token in tokens else logit for token, logit in row.items()}
        return masked if any(logit > -math.inf for logit in masked.values()) else row

    row = forbid(
        {word[-1] for word in rules.bad_words if tuple(output)[len(output) - len(word) + 1 :] == word[:-1] or len(word) == 1}
    )
    if len(output) < params.min_tokens:
        row = forbid({*params.stop_token_ids, *(set() if params.ignore_eos else rules.eos_ids)})
    for token, bias in params.logit_bias.items():
        row[token] += bias
    for token in row:
        if token in prompt or token in output:
            penalty = params.repetition_penalty
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        if token in output:
            row[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    top = max(row.values())
    order = sorted((token for token in row if row[token] > -math.inf), key=lambda token: (-row[token], token))
    if params.temperature == 0:
        return {order[0]: 1.0}
    weights = {token: math.exp((row[token] - top) / params.temperature) for token in order}
    order = [token for token in order if (row[token] - top) / params.temperature > -math.inf]
    if params.min_p:  # compared as logarithms: at a huge temperature every weight rounds to 1
        order = [token for token in order if (row[token] - top) / params.temperature >= math.log(params.min_p)]
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        order.sort(key=lambda token: (-weights[token], token))  # logits that differ by less than an ulp weigh the same
        total, mass, kept = math.fsum(weights[token] for token in order), 0.0, []
        for token in order:
            kept.append(token)
            mass += weights[token] / total
            assume(abs(mass - params.top_p) > 1e-12)
            if mass >= params.top_p:
                break
        order = kept
    total = math.fsum(weights[token] for token in order)
    return {token: weights[token] / total for token in order}


def assert_matches(dist: Distribution, expected: dict[int, float]) -> None:
    assert dist.tokens.tolist() == sorted(expected)
    assert dist.tokens.dtype == np.int64 and dist.log_probs.dtype == np.float64
    np.testing.assert_allclose(np.exp(dist.log_probs), [expected[token] for token in sorted(expected)], rtol=1e-12, atol=1e-300)


VOCAB = 7
tokens_of = st.lists(st.integers(0, VOCAB - 1), max_size=5)
quarters = st.integers(-12, 12).map(lambda n: n / 4)  # exact in every dtype, and ties are common
rows = st.lists(st.one_of(quarters, st.sampled_from([-math.inf, 0.0, 2.0])), min_size=VOCAB, max_size=VOCAB)
rare = st.integers(0, 2)  # one option in three is on, so that every pair of options meets


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[float], Sequence, list[int]]:
    options: dict[str, Any] = {"temperature": draw(st.sampled_from([0.0, 5e-324, 1e-300, 0.25, 0.7, 1.0, 2.0, 1e30, 1e308]))}
    choices: dict[str, st.SearchStrategy[Any]] = {
        "allowed_token_ids": st.lists(st.integers(0, VOCAB - 1), min_size=1, unique=True),
        "min_tokens": st.integers(1, 10),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=2),
        "ignore_eos": st.booleans(),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), quarters),
        "repetition_penalty": st.sampled_from([0.5, 2.0, 4.0]),
        "presence_penalty": st.sampled_from([-2.0, -0.25, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, -0.25, 0.5, 2.0]),
        "min_p": st.sampled_from([0.0, 0.03, 0.2, 0.6, 1.0]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 3, VOCAB, 100]),
        "top_p": st.sampled_from([1e-300, 0.13, 0.37, 0.61, 0.913, 0.9999999]),
    }
    for name, values in choices.items():
        if draw(rare) == 0:
            options[name] = draw(values)
    words_of = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3).map(tuple), max_size=4)
    rules = TokenRules(
        frozenset(draw(st.sets(st.integers(0, VOCAB - 1), max_size=2))), tuple(draw(words_of)) if draw(rare) == 0 else ()
    )
    seq = make_sequence([0, *draw(tokens_of)], draw(tokens_of), rules=rules, **options)
    return draw(rows), seq, draw(tokens_of)


@given(requests(), st.sampled_from([np.float32, np.float64]))
@settings(max_examples=250, deadline=None)
def test_distribution_differs_from_the_slow_rules(request: tuple[list[float], Sequence, list[int]], dtype: type) -> None:
    logits, seq, draft = request
    allowed = seq.params.allowed_token_ids or range(VOCAB)
    assume(any(logits[token] > -math.inf for token in allowed))
    row = np.array(logits, dtype=dtype)
    row.flags.writeable = False
    assert_matches(distribution(row, seq, draft), slow_distribution(logits, seq, draft))


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=40),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.integers(0, 50),
    st.floats(0.01, 0.999),
)
@settings(max_examples=60, deadline=None)
def test_truncation_of_arbitrary_logits_differs_from_the_slow_rules(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    seq = make_sequence([0], temperature=temperature, top_k=top_k, top_p=top_p)
    assert_matches(distribution(np.array(logits, dtype=np.float32), seq), slow_distribution(logits, seq, []))


@given(requests())
@settings(max_examples=60, deadline=None)
def test_a_draft_is_judged_by_other_rules_than_committed_tokens(request: tuple[list[float], Sequence, list[int]]) -> None:
    """Draft tokens count as output for every option, so a row does not change when its draft is committed."""
    logits, seq, draft = request
    allowed = seq.params.allowed_token_ids or range(VOCAB)
    assume(any(logits[token] > -math.inf for token in allowed))
    row = np.array(logits, dtype=np.float32)
    drafted = distribution(row, seq, draft)
    seq.tokens = [*seq.tokens, *draft]
    committed = distribution(row, seq)
    assert drafted.tokens.tolist() == committed.tokens.tolist()
    assert drafted.log_probs.tolist() == committed.log_probs.tolist()


def test_draft_token_does_not_count_as_output() -> None:
    """Each option on its own: what it does to a row after a draft of [1, 1]."""
    logits = np.zeros(4)

    def dense(**options: Any) -> list[float]:
        rules = TokenRules(frozenset({0}), options.pop("words", ()))
        return distribution(logits, make_sequence([3], [2], rules=rules, **options), [1, 1]).dense(4).tolist()

    third = pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    assert dense(min_tokens=3) == pytest.approx([1 / 4] * 4) and dense(min_tokens=4) == third
    assert dense(words=((1, 1, 0),)) == dense(words=((2, 1, 1, 0),)) == third
    assert dense(words=((2, 1, 0), (1, 1, 1, 0), (3, 2, 1, 1, 0))) == pytest.approx([1 / 4] * 4)
    for options, expected in (
        ({"presence_penalty": 1.0}, [0.0, -1.0, -1.0, 0.0]),
        ({"frequency_penalty": 1.0}, [0.0, -2.0, -1.0, 0.0]),
        ({"repetition_penalty": 2.0, "logit_bias": dict.fromkeys(range(4), 1.0)}, [1.0, 0.5, 0.5, 0.5]),
    ):
        assert dense(**options) == pytest.approx((np.exp(expected) / np.exp(expected).sum()).tolist())


EVERYTHING: dict[str, Any] = {
    "allowed_token_ids": [0, 1, 2, 3],
    "min_tokens": 9,
    "stop_token_ids": [1],
    "logit_bias": {0: 1.0},
    "repetition_penalty": 2.0,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "options", [{}, *({name: EVERYTHING[name]} for name in EVERYTHING), EVERYTHING, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}]
)
def test_distribution_writes_to_the_callers_logits(options: dict[str, Any], temperature: float) -> None:
    logits = np.array([1.0, 0.5, 0.25, -1.0, 3.0], dtype=np.float32)
    before = logits.copy()
    rules = TokenRules(frozenset({2}), ((3,),))
    dist = distribution(logits, make_sequence([0, 1], [2, 0], rules=rules, temperature=temperature, **options), [1])
    assert np.array_equal(logits, before)
    assert not np.shares_memory(dist.log_probs, logits)


def test_ties_are_broken_by_memory_layout() -> None:
    logits = np.zeros(6)
    assert distribution(logits, make_sequence([0], temperature=0.0)).tokens.tolist() == [0]
    assert distribution(logits, make_sequence([0], top_k=2)).tokens.tolist() == [0, 1]
    assert distribution(logits, make_sequence([0], top_p=0.4)).tokens.tolist() == [0, 1, 2]
    assert distribution(logits, make_sequence([0], top_p=0.5)).tokens.tolist() == [0, 1, 2]
    assert distribution(np.array([0.0, 1.0, 0.0, 1.0, 0.0]), make_sequence([0], top_k=3)).tokens.tolist() == [0, 1, 3]


def test_tiny_temperature_differs_from_greedy_where_nothing_ties() -> None:
    logits = np.array([0.5, 0.75, -3.0], dtype=np.float32)
    for temperature in (5e-324, 1e-300):
        dist = distribution(logits, make_sequence([0], temperature=temperature))
        assert dist.dense(3).tolist() == [0.0, 1.0, 0.0]
    tied = distribution(np.array([0.75, 0.75, -3.0]), make_sequence([0], temperature=1e-300))
    assert tied.dense(3).tolist() == [0.5, 0.5, 0.0]


def test_min_p_is_applied_after_top_k() -> None:
    """One reads the documented order from outside only through top_p: min_p first leaves two tokens to share the mass."""
    logits = np.log(np.array([0.4, 0.3, 0.1, 0.1, 0.1]))
    seq = make_sequence([0], min_p=0.5, top_p=0.55)  # 0.4 of 0.7 is 0.57 and enough alone; 0.4 of 1.0 would not be
    assert distribution(logits, seq).tokens.tolist() == [0]


def test_mask_that_leaves_no_token_is_applied() -> None:
    logits = np.array([1.0, 2.0])
    every = TokenRules(frozenset({0, 1}), ((0,), (1,)))
    dist = distribution(logits, make_sequence([0], rules=every, min_tokens=3))
    np.testing.assert_allclose(dist.dense(2), np.exp(logits) / np.exp(logits).sum())


def test_bad_word_is_completed_across_the_end_of_the_prompt() -> None:
    """Only output counts, as in vLLM: a prompt that ends with the start of a bad word does not forbid its end."""
    rules = TokenRules(bad_words=((1, 2),))
    assert 2 in distribution(np.zeros(4), make_sequence([0, 1], rules=rules)).tokens
    assert 2 not in distribution(np.zeros(4), make_sequence([0], [1], rules=rules)).tokens
    assert 2 not in distribution(np.zeros(4), make_sequence([0], rules=rules), [1]).tokens


def test_eos_outside_of_the_vocabulary_fails() -> None:
    rules = TokenRules(frozenset({50}), ((60,),))
    assert len(distribution(np.zeros(4), make_sequence([0], rules=rules, min_tokens=2)).tokens) == 4


def test_prompt_token_outside_of_the_vocabulary_fails_under_penalties() -> None:
    seq = make_sequence([0, 50], [1], repetition_penalty=2.0, presence_penalty=1.0)
    assert len(distribution(np.ones(4), seq).tokens) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [[math.nan, 1.0], [1.0, math.nan], [-math.inf] * 2, [math.inf, 1.0], [math.nan] * 2])
def test_broken_row_is_sampled_from(row: list[float], temperature: float) -> None:
    with pytest.raises(FloatingPointError, match="largest is"):
        distribution(np.array(row, dtype=np.float32), make_sequence([0], temperature=temperature))


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 2.0}, {"logit_bias": {0: 1.0}}]
)
def test_padded_entries_of_a_row_are_drawn(options: dict[str, Any]) -> None:
    logits = np.array([-math.inf, 1.0, 2.0, -math.inf, 0.5], dtype=np.float32)
    dist = distribution(logits, make_sequence([0, 3], **options))
    assert set(dist.tokens.tolist()) <= {1, 2, 4}
    assert np.isfinite(dist.log_probs).all()
    assert math.isclose(np.exp(dist.log_probs).sum(), 1.0)


@pytest.mark.parametrize(
    "options", [{"logit_bias": {0: 1e6}}, {"logit_bias": {0: -1e6, 1: -1e6, 2: -1e6}}, {"repetition_penalty": 0.01}]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_extreme_but_valid_option_breaks_the_row(options: dict[str, Any], temperature: float) -> None:
    """Options are applied in float64: what a request may legally ask for must not overflow and end the whole batch."""
    seq = make_sequence([0, 1], temperature=temperature, **options)
    dist = distribution(np.array([1.0, 0.5, -2.0], dtype=np.float32), seq)
    assert np.isfinite(dist.log_probs).all()


def full_sort_nucleus(probs: np.ndarray, top_p: float) -> list[int]:
    probs = probs / probs.sum()
    order = np.argsort(-probs, kind="stable")
    num = int(np.searchsorted(np.cumsum(probs[order]), top_p)) + 1
    return sorted(order[:num].tolist())


@given(st.integers(0, 10_000), st.integers(1, 400), st.floats(0.001, 0.9999), st.sampled_from([0.1, 1.0, 4.0]))
@settings(max_examples=200, deadline=None)
def test_nucleus_shortcut_differs_from_a_full_sort(seed: int, size: int, top_p: float, spread: float) -> None:
    logits = spread * np.random.default_rng(seed).integers(-8, 8, size) / 2
    probs = np.exp(logits) / np.exp(logits).sum()
    assert _nucleus(probs, probs.sum(), top_p).tolist() == full_sort_nucleus(probs, top_p)


@pytest.mark.parametrize("size", [1, 2, 3, 10, 49_152])
@pytest.mark.parametrize("top_p", [1e-300, 0.5, 0.9, 1 - 2**-53])
def test_nucleus_of_a_flat_row_loses_its_mass(size: int, top_p: float) -> None:
    probs = np.full(size, 1 / size)
    kept = _nucleus(probs, probs.sum(), top_p)
    assert kept.tolist() == list(range(len(kept)))
    assert probs[kept].sum() >= top_p * (1 - 1e-9)
    assert (len(kept) - 1) / size < top_p * (1 + 1e-9) or len(kept) == 1


# ------------------------------------------------------------------------------------------------ log-probabilities


@given(st.lists(st.integers(-1000, 1000).map(lambda n: n / 32), min_size=1, max_size=30), st.data())
@settings(max_examples=60, deadline=None)
def test_token_logprobs_differ_from_log_softmax(logits: list[float], data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(logits) - 1))
    num_top = data.draw(st.integers(0, len(logits) + 2))
    row = np.array(logits, dtype=np.float32)
    before = row.copy()
    found = token_logprobs(row, token, num_top)
    expected = torch.log_softmax(torch.tensor(row).double(), 0)
    assert np.array_equal(row, before)
    assert next(iter(found)) == token
    assert set(found) == {token, *sorted(range(len(logits)), key=lambda t: (-logits[t], t))[:num_top]}
    for t, entry in found.items():
        assert entry.logprob == pytest.approx(float(expected[t]), abs=1e-12)
        num_above = sum(other > logits[t] for other in logits)
        num_equal = sum(other == logits[t] for other in logits)
        assert num_above < entry.rank <= num_above + num_equal


@given(st.lists(st.integers(0, 3).map(float), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_rank_of_a_token_depends_on_how_many_tops_were_asked_for(logits: list[float]) -> None:
    """Two tokens of one answer must not share a rank, and a token's rank is its place however many are listed."""
    row = np.array(logits)
    for token in range(len(logits)):
        ranks = {token_logprobs(row, token, num_top)[token].rank for num_top in range(len(logits) + 1)}
        assert len(ranks) == 1, ranks


def test_token_logprobs_of_a_padded_row_fail() -> None:
    found = token_logprobs(np.array([0.0, -math.inf, 0.0], dtype=np.float32), 1, 2)
    assert found[1].logprob == -math.inf and found[1].rank == 3
    assert found[0].logprob == pytest.approx(-math.log(2)) and found[2].rank == 2


@pytest.fixture
def numpy_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "extension", lambda: None)


@given(st.integers(0, 10_000), st.sampled_from([0.2, 1.0, 3.0, 1e-300]), st.sampled_from([np.float32, np.float64]))
@settings(max_examples=60)
def test_native_sum_of_weights_differs_from_numpy(seed: int, temperature: float, dtype: type) -> None:
    rng = np.random.default_rng(seed)
    row = (rng.standard_normal(rng.integers(1, 700)) * 10.0 ** rng.integers(-2, 3)).astype(dtype)
    row[rng.random(len(row)) < 0.1] = -np.inf
    row[0] = max(row[0], 0.0)
    top = float(row.max())
    with np.errstate(over="ignore"):
        expected = np.exp((row.astype(np.float64) - top) / temperature).sum()
    assert math.isclose(sampling._sum_weights(row, top, temperature), expected, rel_tol=1e-13)


@given(st.integers(0, 2**63 - 1), st.integers(0, 10_000), st.sampled_from([0.0, 0.5, 4.0]), st.sampled_from([300, 1000, 5000]))
@settings(max_examples=150)
def test_native_draw_differs_from_numpy(seed: int, position: int, spread: float, size: int) -> None:
    logits = spread * np.random.default_rng(position).standard_normal(size)
    dist = Distribution(np.arange(0, 3 * size, 3), logits - np.log(np.exp(logits).sum()))
    noise = PositionNoise(seed, position % 7, origin=position)
    for stream in (STREAM_TARGET, STREAM_DRAFT):
        slow = dist.tokens[np.argmax(dist.log_probs + noise.gumbel(dist.tokens, position, stream))]
        assert noise.draw(dist, position, stream) == slow


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**30 - 1), st.integers(0, 63), st.integers(0, 400))
@settings(max_examples=150)
def test_native_random_words_differ_from_the_definition(seed: int, position: int, sample: int, size: int) -> None:
    tokens = np.random.default_rng(seed).integers(0, 2**20, size)
    noise = PositionNoise(seed, sample, origin=position)
    for stream in (STREAM_TARGET, STREAM_DRAFT):
        w0, w1, _, _ = philox((tokens.astype(np.uint64), position, sample, noise._last_word(stream)), noise._key)
        high, low = noise._words(tokens, position, stream)
        assert high.tolist() == w0.tolist() and low.tolist() == w1.tolist()


def test_native_draw_keeps_too_many_contenders() -> None:
    """The bound must be worth its while: of 50 000 equally likely tokens a handful may need logarithms."""
    dist = Distribution(np.arange(50_000), np.full(50_000, -np.log(50_000.0)))
    assert len(PositionNoise(3)._contenders(dist.tokens, dist.log_probs, 5, STREAM_TARGET)) < 100


@pytest.mark.usefixtures("numpy_only")
def test_without_the_compiled_module_nothing_can_be_drawn() -> None:
    logits = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    seq = make_sequence([0], temperature=0.7)
    dist = distribution(logits, seq)
    expected = (logits.astype(np.float64) - logits.max()) / 0.7
    np.testing.assert_allclose(dist.log_probs, expected - np.log(np.exp(expected).sum()), rtol=1e-12)
    assert PositionNoise(1).draw(dist, 4, STREAM_TARGET) in dist.tokens
