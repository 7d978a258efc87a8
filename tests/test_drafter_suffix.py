from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.config import SpeculativeConfig
from foredraft.drafters.backoff import LEAST_LEFT, OWN, SHARED, counts_cell, first_weights, group_of
from foredraft.drafters.context import DrafterContext
from foredraft.drafters.suffix import MAX_LEVELS, SuffixDrafter
from foredraft.drafters.suffix_native import create
from foredraft.drafters.suffix_statistics import ANCHORS, MAX_OCCURRENCES, SharedStatistics
from foredraft.types import Draft, SamplingParams, Sequence, Verdict

DEPTH = 20
TOKENS = st.lists(st.integers(0, 2), max_size=50)


def make(max_bytes: int = 100_000, max_requests: int = 100, min_prob: float = 0.1, factor: float = 1.0) -> SuffixDrafter:
    return SuffixDrafter(
        max_tree_depth=DEPTH,
        max_spec_factor=factor,
        min_token_prob=min_prob,
        max_cached_requests=max_requests,
        max_bytes=max_bytes,
    )


def sequence(tokens: list[int], seq_id: int = 0, tenant: str = "", num_prompt: int | None = None) -> Sequence:
    num_prompt = len(tokens) if num_prompt is None else num_prompt
    return Sequence(seq_id, list(tokens), num_prompt, SamplingParams(), seed=0, tenant=tenant)


def finish(drafter: SuffixDrafter, output: list[int], tenant: str = "", prompt: tuple[int, ...] = ()) -> None:
    seq = sequence([*prompt, *output], seq_id=99, tenant=tenant, num_prompt=len(prompt))
    drafter.open(seq)
    seq.finish_reason = "stop"
    drafter.close(seq)


def draft(drafter: SuffixDrafter, tokens: list[int], num_tokens: int = 4, tenant: str = "") -> Draft:
    seq = sequence(tokens, tenant=tenant)
    drafter.open(seq)
    return drafter.propose([seq], [num_tokens])[0]


# ------------------------------------------------------------------------------------------------ slow reference

Spot = tuple[list[int], int]


def scan(documents: list[list[int]], suffix: list[int], is_own: bool) -> list[Spot]:
    """Every place where ``suffix`` ended, most recent first: whole texts are read."""
    n = len(suffix)
    spots = [
        (document, end)
        for document in reversed(documents)
        for end in range(len(document) - 1 - is_own, n - 2, -1)
        if document[end + 1 - n : end + 1] == suffix
    ]
    return spots[:MAX_OCCURRENCES]


def match_length(spot: Spot, tokens: list[int]) -> int:
    document, end = spot
    length = 0
    while length < min(DEPTH, len(tokens), end + 1) and document[end - length] == tokens[-1 - length]:
        length += 1
    return length


def successor(spot: Spot) -> int:
    document, end = spot
    return document[end + 1] if end + 1 < len(document) else -1


def first_levels(tokens: list[int], texts: list[list[int]], is_own: bool) -> list[tuple[int, bool, list[Spot]]]:
    levels: list[tuple[int, bool, list[Spot]]] = []
    for n in ANCHORS:
        spots = scan(texts, tokens[len(tokens) - n :], is_own) if n <= min(len(tokens), DEPTH) else []
        if spots and not levels:
            longest = max(match_length(spot, tokens) for spot in spots)
            if (longest > n and len({successor(spot) for spot in spots}) > 1) or (n == 8 and longest >= 16):
                levels.append((longest, is_own, [spot for spot in spots if match_length(spot, tokens) == longest]))
        if spots:
            levels.append((n, is_own, spots))
    return levels


def mixture(levels: list[tuple[int, bool, list[Spot]]]) -> dict[int, float]:
    left, probs, weights = 1.0, dict[int, float](), first_weights()
    for length, is_own, spots in levels:
        nexts = [token for token in map(successor, spots) if token >= 0]
        if not nexts or left < LEAST_LEFT:
            continue
        taken = left * weights[counts_cell(group_of(OWN if is_own else SHARED, length), len(nexts), len(set(nexts)))]
        for token in dict.fromkeys(nexts):
            probs[token] = probs.get(token, 0.0) + taken * (nexts.count(token) / len(nexts))
        left -= taken
    return probs


def reference(
    tokens: list[int], documents: list[list[int]], num_tokens: int, min_prob: float, factor: float
) -> tuple[tuple[int, ...], float]:
    text, path = list(tokens), list[int]()
    score, prob = 0.0, 1.0
    levels = sorted(first_levels(text, [text], True) + first_levels(text, documents, False), key=lambda level: -level[0])
    sees_others = not all(is_own for _, is_own, _ in levels)
    longest = max((match_length(spot, text) for _, _, spots in levels for spot in spots), default=0)
    while len(path) < min(num_tokens, int(factor * longest)):
        probs = mixture(levels)
        token = max(probs, key=probs.__getitem__) if probs else -1
        prob *= probs.get(token, 0.0)
        if token < 0 or prob < min_prob:
            break
        score += prob
        path.append(token)
        text.append(token)
        moved = [
            (n + 1, own, [(text if own else d, end + 1) for d, end in spots if successor((d, end)) == token])
            for n, own, spots in levels
        ]
        levels = [level for level in moved if level[2]]
        if len(levels) < MAX_LEVELS:
            mine = [(text, end) for end in range(len(tokens) - 1, -1, -1) if text[end] == token]
            others = scan(documents, [token], is_own=False) if sees_others else []
            levels += [(1, own, spots[:MAX_OCCURRENCES]) for own, spots in ((True, mine), (False, others)) if spots]
    return tuple(path), score


@given(TOKENS, st.lists(TOKENS, max_size=4), st.integers(1, 6), st.sampled_from([0.0, 0.1, 0.5]), st.sampled_from([0.5, 1.0, 4.0]))
@settings(deadline=None, max_examples=400)
def test_the_index_votes_as_a_scan_of_all_texts_does(
    tokens: list[int], documents: list[list[int]], num_tokens: int, min_prob: float, factor: float
) -> None:
    drafter = make(min_prob=min_prob, factor=factor)
    for document in documents:
        finish(drafter, document)
    drafted = draft(drafter, tokens, num_tokens)
    assert (drafted.tokens, drafted.score) == reference(tokens, documents, num_tokens, min_prob, factor)


@given(TOKENS, st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=8))
@settings(deadline=None)
def test_growing_step_by_step_gives_what_one_reading_gives(prompt: list[int], steps: list[list[int]]) -> None:
    drafter, seq = make(), sequence(prompt)
    drafter.open(seq)
    for step in steps:
        drafter.propose([seq], [3])
        seq.tokens.extend(step)
        drafter.observe(seq, Verdict(tuple(step)), None)
    fresh = make()
    fresh.calibration = drafter.calibration
    assert drafter.propose([seq], [4])[0] == draft(fresh, seq.tokens)


# ------------------------------------------------------------------------------------------------ one request


@pytest.mark.parametrize("length", range(10))
def test_a_prompt_around_the_length_of_an_anchor_does_not_fail(length: int) -> None:
    found = draft(make(), [7] * length, 3)
    assert found.tokens == (7,) * min(3, max(0, length - 1))


def test_a_loop_yields_a_full_draft() -> None:
    assert draft(make(factor=4.0), [5, 6, 5, 6], 6).tokens == (5, 6) * 3


def test_the_majority_beats_the_most_recent() -> None:
    assert draft(make(), [1, 50, 1, 50, 1, 60, 1], 1).tokens == (50,)


def test_of_equal_votes_the_most_recent_wins() -> None:
    assert draft(make(min_prob=0.0), [1, 50, 1, 60, 1], 1).tokens == (60,)


def test_a_draft_is_no_longer_than_the_match_allows() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 99, 1, 2, 3]
    assert draft(make(factor=1.0), text, 8).tokens == (4, 5, 6)
    assert draft(make(factor=0.0), text, 8).tokens == ()


def test_a_reopened_sequence_drafts_as_before_and_joins_the_shared_part_once() -> None:
    drafter, seq = make(), sequence([1, 2, 3, 4, 1, 2], num_prompt=2)
    drafter.open(seq)
    before = drafter.propose([seq], [2])
    drafter.close(seq)
    assert drafter.shared.num_requests == 0
    drafter.open(seq)
    assert drafter.propose([seq], [2]) == before
    seq.finish_reason = "length"
    drafter.close(seq)
    drafter.close(seq)
    assert drafter.shared.num_requests == 1


# ------------------------------------------------------------------------------------------------ shared statistics


def test_a_finished_output_is_drafted_from_but_its_prompt_is_not() -> None:
    drafter = make()
    finish(drafter, [3, 4, 5, 6], prompt=(1, 2))
    assert draft(drafter, [3, 4]).tokens == (5, 6)
    assert draft(drafter, [1]).tokens == ()


def test_a_continuation_does_not_run_into_the_next_document() -> None:
    drafter = make()
    finish(drafter, [1, 2, 3])
    finish(drafter, [4, 5, 6])
    assert draft(drafter, [1, 2]).tokens == (3,)


def test_no_cached_requests_means_nothing_is_shared() -> None:
    for drafter in (make(max_requests=0), make(max_bytes=0)):
        finish(drafter, [1, 2, 3, 4])
        assert draft(drafter, [1, 2]).tokens == ()


def test_beyond_the_limit_the_oldest_request_is_forgotten() -> None:
    drafter = make(max_requests=2)
    for first in (10, 20, 30):
        finish(drafter, [first, first + 1, first + 2])
    assert [draft(drafter, [first, first + 1]).tokens for first in (10, 20, 30)] == [(), (22,), (32,)]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 1), min_size=1, max_size=12)), max_size=30),
    st.integers(300, 3000),
    st.integers(1, 6),
)
@settings(deadline=None, max_examples=200)
def test_no_tenant_ever_sees_the_tokens_of_another(outputs: list[tuple[str, list[int]]], max_bytes: int, max_requests: int) -> None:
    # A ring this small has a handful of hash buckets, wraps and evicts all the time.
    statistics = SharedStatistics(max_bytes, max_requests)
    statistics._max_tenant_bytes = 1_200
    base = {"a": 0, "b": 2, "c": 4}
    for tenant, output in outputs:
        statistics.add(tenant, [base[tenant] + token for token in output])
        assert statistics.num_requests <= max_requests
        assert statistics.num_requests == sum(num for _, num in statistics._tenants.values())
        for reader in "abc":
            if not statistics.select(reader):
                continue
            for token in range(6):
                for end in statistics.ends(len(ANCHORS) - 1, [token]):
                    assert token - base[reader] in (0, 1)
                    assert statistics.tokens[end + 1] in (-1, base[reader], base[reader] + 1)


def test_a_tenant_that_comes_back_does_not_meet_what_was_evicted() -> None:
    drafter = make(max_requests=1)
    finish(drafter, [1, 2, 3], tenant="a")
    finish(drafter, [1, 2, 9], tenant="b")
    assert draft(drafter, [1, 2], tenant="a").tokens == ()
    assert draft(drafter, [1, 2], tenant="b").tokens == (9,)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30), max_size=20), st.integers(200, 1500))
@settings(deadline=None, max_examples=200)
def test_a_ring_that_wraps_finds_what_a_scan_of_the_kept_documents_finds(documents: list[list[int]], max_bytes: int) -> None:
    statistics = SharedStatistics(max_bytes, 1000)
    statistics._max_tenant_bytes = 10_000
    for document in documents:
        statistics.add("", document)
    kept = documents[len(documents) - statistics.num_requests :]
    if kept and kept[-1] is documents[-1]:
        kept = [document[-(statistics._num_slots - 1) :] for document in kept]
    for suffix in ([0], [1, 0], [0, 1, 0, 1]):
        if statistics.select(""):
            found = statistics.ends(ANCHORS.index(len(suffix)), suffix)
            assert len(found) == len(scan(kept, suffix, is_own=False))


def test_memory_stays_within_the_limit_however_much_is_added() -> None:
    max_bytes, rng = 400_000, np.random.default_rng(0)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        statistics = SharedStatistics(max_bytes, 10_000)
        for number in range(400):
            statistics.add(f"tenant {number % 150}", rng.integers(0, 50_000, 100).tolist())
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0 < statistics.num_requests < 400
    assert after - before <= max_bytes


def test_an_output_larger_than_the_ring_keeps_its_end() -> None:
    drafter = make(max_bytes=8_000)
    finish(drafter, list(range(1000)))
    assert draft(drafter, [996, 997]).tokens == (998, 999)
    assert draft(drafter, [1, 2]).tokens == ()


# ------------------------------------------------------------------------------------------------ score


def markov(rng: np.random.Generator, vocab_size: int, concentration: float) -> Iterator[int]:
    """An endless second-order Markov chain; a low concentration makes it predictable."""
    table = rng.dirichlet(np.full(vocab_size, concentration), size=(vocab_size, vocab_size)).cumsum(axis=-1)
    before, last = 0, 0
    while True:
        before, last = last, min(int(np.searchsorted(table[before, last], rng.random())), vocab_size - 1)
        yield last


@pytest.mark.parametrize("concentration", [0.02, 0.05, 0.2])
def test_the_score_is_the_number_of_tokens_that_get_accepted(concentration: float) -> None:
    rng = np.random.default_rng(1)
    chain, drafter = markov(rng, 12, concentration), make()
    scores: list[float] = []
    accepted: list[int] = []
    for request in range(12):
        answer = [next(chain) for _ in range(300)]
        seq = sequence(answer[:10], seq_id=request)
        drafter.open(seq)
        while len(seq.tokens) < 290:
            found = drafter.propose([seq], [4])[0]
            actual = answer[len(seq.tokens) :]
            num = 0
            while num < len(found.tokens) and found.tokens[num] == actual[num]:
                num += 1
            seq.tokens.extend(actual[: num + 1])
            drafter.observe(seq, Verdict(tuple(actual[: num + 1]), num), None)
            if request >= 2:
                scores.append(found.score or 0.0)
                accepted.append(num)
        seq.finish_reason = "stop"
        drafter.close(seq)
    assert np.mean(scores) == pytest.approx(np.mean(accepted), rel=0.15)
    low = np.array(scores) < np.median(scores)
    assert np.mean(np.array(scores)[low]) == pytest.approx(np.mean(np.array(accepted)[low]), rel=0.25, abs=0.1)


def test_the_factory_takes_every_option() -> None:
    config = SpeculativeConfig(method="suffix", suffix_decoding_max_cached_requests=0, suffix_decoding_max_spec_factor=0.0)
    drafter = create(config, DrafterContext(vocab_size=8, max_model_len=16))
    finish(drafter, [1, 2, 3, 1, 2])
    assert draft(drafter, [1, 2, 3, 1, 2]).tokens == ()
