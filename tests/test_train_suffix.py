from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_helpers import table_of
from foredraft.config import SpeculativeConfig
from foredraft.drafters import ngram_table
from foredraft.drafters.backoff import counts_cell, first_weights, mix
from foredraft.drafters.context import DrafterContext
from foredraft.drafters.ngram_table import MAX_ORDER, SHARE_UNIT, NgramTable, TargetIdentity, load_table, save_table
from foredraft.drafters.suffix import Calibration, SuffixDrafter
from foredraft.drafters.suffix_native import create
from foredraft.replay import Record, replay
from foredraft.train import ngrams
from foredraft.train.suffix import drafter_with, fit, weights
from foredraft.types import ConfigError, Draft, ModelFileError, SamplingParams, Sequence

VOCABULARY = {"a": 0, "b": 1, "c": 2}
IDENTITY = TargetIdentity.of("toy", 12, VOCABULARY)
RECORDS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=3), st.lists(st.integers(0, 2), min_size=1, max_size=12)),
    min_size=1,
    max_size=6,
).map(lambda pairs: [Record([*prompt, *answer], len(prompt)) for prompt, answer in pairs])


def markov(seed: int, num: int, vocab_size: int = 12, concentration: float = 0.1, length: int = 60) -> list[Record]:
    """Texts of one second-order Markov chain, which ``seed`` does not change, with prompts of 5 tokens."""
    table = np.random.default_rng(5).dirichlet(np.full(vocab_size, concentration), size=(vocab_size, vocab_size)).cumsum(axis=-1)
    rng = np.random.default_rng(seed)

    def text() -> Iterator[int]:
        before, last = (int(token) for token in rng.integers(0, vocab_size, 2))
        while True:
            before, last = last, min(int(np.searchsorted(table[before, last], rng.random())), vocab_size - 1)
            yield last

    return [Record([token for token, _ in zip(text(), range(length), strict=False)], 5) for _ in range(num)]


def learned(**arrays: Any) -> dict[str, Any]:
    nothing = np.zeros(Calibration.NUM_CELLS, "<f4")
    return {"weights": np.array(first_weights(), "<f4"), "hits": nothing, "promised": nothing} | arrays


def packed(records: list[Record], max_bytes: int = 1 << 20, vocab_size: int = 12) -> dict[str, Any]:
    return ngrams.pack(ngrams.count(records), vocab_size, ngrams.unigrams(records), max_bytes)


# ------------------------------------------------------------------------------------------------ counting


def counted(records: list[Record]) -> dict[tuple[int, ...], Counter[int]]:
    texts: dict[tuple[tuple[int, ...], int], set[int]] = defaultdict(set)
    for number, (tokens, num_prompt) in enumerate(records):
        for place in range(num_prompt, len(tokens)):
            for order in range(1, min(MAX_ORDER, place) + 1):
                texts[tuple(tokens[place - order : place]), tokens[place]].add(number)
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for (context, token), numbers in texts.items():
        counts[context][token] = len(numbers)
    return counts


@given(RECORDS, st.lists(st.integers(0, 2), min_size=1, max_size=9))
@settings(max_examples=150)
def test_the_table_counts_other_than_a_dictionary_does(records: list[Record], tail: list[int]) -> None:
    table, counts = table_of(packed(records) | learned()), counted(records)
    matches = table.matches(tail)
    for order in range(1, MAX_ORDER + 1):
        known = counts.get(tuple(tail[len(tail) - order :]), Counter()) if order <= len(tail) else Counter[int]()
        total = known.total()
        if not total or (order >= ngrams.MIN_TEXTS_FROM_ORDER and total < ngrams.MIN_TEXTS):
            assert len(matches) == order - 1
            return
        match = matches[order - 1]
        assert (match.order, match.cell) == (order, counts_cell(0, total, len(known)))
        shares = {token: round(SHARE_UNIT * num / total) / SHARE_UNIT for token, num in known.items()}
        assert dict(table.successors(match)) == pytest.approx(shares, abs=1e-9)
        assert [token for token, _ in table.successors(match)] == sorted(known, key=lambda token: (-known[token], token))
    assert len(matches) == MAX_ORDER


def test_a_text_that_repeats_itself_outweighs_the_others() -> None:
    records = [Record([0, 1, 2] + [1, 2] * 20, 1), Record([0, 1, 3], 1), Record([0, 1, 3], 1)]
    table = table_of(packed(records) | learned())
    assert table.successors(table.matches([1])[0])[0][0] == 3


def test_large_ids_lose_their_leading_bits() -> None:
    records = [Record([70_000, 262_143, 131_071], 1)] * 4
    table = table_of(packed(records, vocab_size=262_144) | learned())
    assert [table.successors(match)[0][0] for match in table.matches([70_000, 262_143])] == [131_071, 131_071]


@pytest.mark.parametrize("max_bytes", [9_000, 12_000, 20_000])
def test_a_table_is_larger_than_allowed_or_drops_what_is_frequent(tmp_path: Path, max_bytes: int) -> None:
    records = markov(0, 40)
    arrays = packed(records, max_bytes)
    save_table(tmp_path / "t", IDENTITY, {}, arrays | learned())
    assert 0 < len(arrays["checks"]) < len(packed(records)["checks"])
    assert (tmp_path / "t").stat().st_size <= max_bytes
    most = max(counted(records).items(), key=lambda item: item[1].total())[0]
    assert table_of(arrays | learned()).matches(most)


def test_a_million_tokens_do_not_fit_into_eight_megabytes() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.zipf(1.3, size=1_000_000) % 49_152
    records = [Record(tokens[start : start + 250].tolist(), 10) for start in range(0, 1_000_000, 250)]
    arrays = packed(records, 8_000_000, 49_152)
    assert sum(values.nbytes for values in (arrays | learned()).values()) <= 8_000_000
    assert len(arrays["checks"]) > 100_000


def test_a_lookup_reads_more_than_a_bucket_for_each_order() -> None:
    records = markov(0, 60)
    table = table_of(packed(records) | learned())
    buckets = np.diff(np.asarray(table._first_context))
    assert buckets.max() <= 8 * ngram_table.CONTEXTS_PER_BUCKET
    reads: list[int] = []

    class Counting:
        def __getitem__(self, place: slice) -> memoryview:
            reads.append(place.stop - place.start)
            return checks[place]

    checks, table._checks = table._checks, Counting()  # type: ignore[assignment]
    table.matches(records[0].tokens)
    assert 1 <= len(reads) <= MAX_ORDER and max(reads) <= buckets.max()


# ------------------------------------------------------------------------------------------------ files


def saved(path: Path) -> Path:
    save_table(path, IDENTITY, {"num_tokens": 1}, fit(markov(0, 30), 12).arrays)
    return path


@pytest.mark.parametrize("note", ["", "a", "ab", "abc"])
def test_a_saved_table_drafts_differently_or_only_if_its_header_has_a_fitting_length(tmp_path: Path, note: str) -> None:
    fitted = fit(markov(0, 30), 12)
    save_table(tmp_path / "t", IDENTITY, {"num_tokens": fitted.num_tokens, "note": note}, fitted.arrays)
    loaded = load_table(tmp_path / "t", IDENTITY)
    assert loaded.provenance == {"num_tokens": 30 * 55, "note": note} and loaded.identity == IDENTITY
    for record in markov(1, 5):
        assert drafts(drafter_with(loaded), record) == drafts(drafter_with(table_of(fitted.arrays)), record)


def test_numbers_of_an_old_file_that_are_not_aligned_cannot_be_read() -> None:
    fitted, record = fit(markov(0, 30), 12), markov(1, 1)[0]
    shifted = {name: np.frombuffer(b"-" + one.tobytes(), one.dtype, offset=1) for name, one in fitted.arrays.items()}
    assert not all(one.flags.aligned for one in shifted.values())
    assert drafts(drafter_with(table_of(shifted)), record) == drafts(drafter_with(table_of(fitted.arrays)), record)


def test_the_same_texts_give_another_file(tmp_path: Path) -> None:
    assert saved(tmp_path / "a").read_bytes() == saved(tmp_path / "b").read_bytes()


def context(vocab_size: int = 12, vocabulary: dict[str, int] | None = None, model: str = "toy") -> DrafterContext:
    words = VOCABULARY if vocabulary is None else vocabulary
    return DrafterContext(vocab_size=vocab_size, max_model_len=64, model=model, vocabulary=lambda: words)


@pytest.mark.parametrize("method", ["suffix", "auto"])
def test_the_factory_ignores_the_file(tmp_path: Path, method: str) -> None:
    config = SpeculativeConfig(method=method, suffix_decoding_base=str(saved(tmp_path / "t")))
    drafter = create(config, context(model="another name, the same vocabulary"))
    assert drafter.table is not None and drafter.table.num_contexts > 0


@pytest.mark.parametrize("other", [context(13), context(vocabulary={"a": 1, "b": 0, "c": 2}), context(vocabulary={})])
def test_a_file_for_another_target_is_taken(tmp_path: Path, other: DrafterContext) -> None:
    config = SpeculativeConfig(method="suffix", suffix_decoding_base=str(saved(tmp_path / "t")))
    with pytest.raises(ConfigError, match=r"is for the vocabulary of toy with 12 tokens .* not of toy"):
        create(config, other)


def test_another_file_of_arrays_is_taken_for_a_table(tmp_path: Path) -> None:
    ngram_table.write_arrays(tmp_path / "t", {"kind": "texts"}, {})
    with pytest.raises(ModelFileError, match="holds texts, not suffix statistics"):
        load_table(tmp_path / "t", IDENTITY)


MISFITS: list[tuple[str, Any, str]] = [
    ("checks", None, "array checks is missing"),
    ("tokens", lambda one: one.astype("<u1"), "array tokens is of uint8"),
    ("lengths", lambda one: one[:-1], "arrays are of other lengths"),
    ("shares", lambda one: one[:-1], "arrays are of other lengths"),
    ("first_context", lambda one: one[:-1], "arrays are of other lengths"),
    ("first_context", lambda one: one[::-1].copy(), "buckets do not follow each other"),
    ("first_successor", lambda one: one + np.uint32(1), "buckets do not follow each other"),
    ("tokens", lambda one: one + np.uint16(12), "is beyond the vocabulary"),
    ("unigrams", lambda one: one + np.uint16(12), "is beyond the vocabulary"),
    ("cells", lambda one: one + np.uint8(32), "a class that there is not"),
    ("weights", lambda one: one[:-1], "arrays are of other lengths"),
    ("weights", lambda one: one * np.float32("nan"), "weights are not all numbers"),
    ("hits", lambda one: one[:-1], "arrays are of other lengths"),
    ("promised", lambda one: one + np.float32("inf"), "weights are not all numbers"),
]


@pytest.mark.parametrize(("name", "change", "says"), MISFITS)
def test_arrays_that_do_not_fit_together_are_read_past_their_ends(tmp_path: Path, name: str, change: Any, says: str) -> None:
    arrays = fit(markov(0, 30), 12).arrays
    changed = {**arrays, name: change(arrays[name])} if change else {key: one for key, one in arrays.items() if key != name}
    save_table(tmp_path / "t", IDENTITY, {}, changed)
    with pytest.raises(ModelFileError, match=f"t holds statistics whose .*{says}.*; make them again"):
        load_table(tmp_path / "t", IDENTITY)


# ------------------------------------------------------------------------------------------------ what it brings


def drafts(drafter: SuffixDrafter, record: Record, num_tokens: int = 3) -> list[Draft]:
    made: list[Draft] = []
    propose = drafter.propose

    def noting(seqs: list[Sequence], num: list[int]) -> list[Draft]:
        made.extend(propose(seqs, num))
        return made[-1:]

    drafter.propose = noting  # type: ignore[method-assign]
    replay(drafter, list(record.tokens), record.num_prompt, num_tokens)
    drafter.propose = propose  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize("concentration", [0.02, 0.1, 0.4])
def test_the_score_of_a_warm_draft_is_not_the_number_of_tokens_that_get_accepted(concentration: float) -> None:
    table = table_of(fit(markov(0, 200, concentration=concentration), 12).arrays)
    drafter, scores, accepted = drafter_with(table), list[float](), list[int]()
    for record in markov(1, 60, concentration=concentration):
        seq = Sequence(0, record.tokens[:5], 5, SamplingParams(), seed=0)
        drafter.open(seq)
        while len(seq.tokens) < len(record.tokens) - 4:
            draft = drafter.propose([seq], [4])[0]
            pairs = zip(draft.tokens, record.tokens[len(seq.tokens) :], strict=False)
            num = next((i for i, (drafted, came) in enumerate(pairs) if drafted != came), len(draft.tokens))
            assert draft.confidence is not None and draft.score == pytest.approx(np.cumprod(draft.confidence).sum())
            scores.append(draft.score or 0.0)
            accepted.append(num)
            # Not told to the drafter: what was learned before must do.
            seq.tokens.extend(record.tokens[len(seq.tokens) : len(seq.tokens) + num + 1])
        drafter.close(seq)
    assert np.mean(scores) == pytest.approx(np.mean(accepted), rel=0.1)
    for part in (np.array(scores) < np.median(scores), np.array(scores) >= np.median(scores)):
        assert np.mean(np.array(scores)[part]) == pytest.approx(np.mean(np.array(accepted)[part]), rel=0.2, abs=0.05)


def test_warm_statistics_bring_nothing() -> None:
    fitted = fit(markov(0, 200), 12)
    assert fitted.warm_acceptance_length > fitted.cold_acceptance_length + 0.3
    lengths = []
    for table in (None, table_of(fitted.arrays)):
        parts = [replay(drafter_with(table), list(record.tokens), 5, 3) for record in markov(1, 30)]
        lengths.append(sum(part.stats.emitted_tokens for part in parts) / sum(part.num_passes for part in parts))
    assert lengths[1] > lengths[0] + 0.3


def test_a_position_that_nothing_matches_is_not_drafted() -> None:
    table = table_of(fit(markov(0, 50), 12).arrays)
    seq = Sequence(0, [3], 1, SamplingParams(), seed=0)
    drafter = drafter_with(table)
    drafter.open(seq)
    assert len(drafter.propose([seq], [3])[0].tokens) == 3


def test_learned_weights_make_held_out_texts_less_likely() -> None:
    records, held_out = markov(0, 80), markov(1, 20)
    arrays = packed(records)

    def loss(values: Any) -> float:
        table, total = table_of(arrays | learned(weights=values)), 0.0
        drafter = drafter_with(table)
        for record in held_out:
            seq = Sequence(0, record.tokens[:5], 5, SamplingParams(), seed=0)
            drafter.open(seq)
            for token in record.tokens[5:]:
                total -= np.log(mix(drafter.evidence(seq), table.weights, table.unigrams).get(token, 0.0) + 1e-5)
                seq.tokens.append(token)
            drafter.close(seq)
        return total

    first = np.array(first_weights(), "<f4")
    assert loss(weights(held_out, table_of(arrays | learned()))) < loss(first) - 1.0


@pytest.mark.parametrize("num", [0, 3])
def test_too_few_texts_fail_with_a_traceback(num: int) -> None:
    with pytest.raises(ConfigError, match=f"at least 4 texts, not {num}"):
        fit(markov(0, num), 12)


def test_few_texts_are_not_enough_to_hold_some_out() -> None:
    assert isinstance(table_of(fit(markov(0, 4), 12).arrays), NgramTable)
