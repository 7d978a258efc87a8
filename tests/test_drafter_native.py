"""The compiled indexes against those in Python: the same drafts, to the last bit."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_helpers import table_of
from foredraft.config import SpeculativeConfig
from foredraft.drafters import registry, suffix_native
from foredraft.drafters.context import DrafterContext
from foredraft.drafters.ngram import NgramDrafter, PythonIndex
from foredraft.drafters.ngram_table import NgramTable
from foredraft.drafters.suffix import SuffixDrafter
from foredraft.drafters.suffix_native import NativeSuffixDrafter, SharedStatistics, extension
from foredraft.replay import Record
from foredraft.train.suffix import fit
from foredraft.types import Drafter, SamplingParams, Sequence, Verdict

if extension() is None:
    pytest.skip("nothing is compiled", allow_module_level=True)

CONTEXT = DrafterContext(vocab_size=50, max_model_len=100)


def test_a_depth_that_compiled_code_has_no_number_for_is_refused_at_start() -> None:
    drafter = suffix_native.create(SpeculativeConfig(method="suffix", suffix_decoding_max_tree_depth=2**40), CONTEXT)
    assert isinstance(drafter, NativeSuffixDrafter)


@cache
def table(vocab_size: int) -> NgramTable:
    """Statistics of random texts, with token ids of two bytes or of four."""
    rng = np.random.default_rng(3)
    texts = [[1, *(rng.integers(0, 4, 30) % 3).tolist()] for _ in range(20)]
    return table_of(fit([Record(text, 1) for text in texts], vocab_size).arrays)


def converse(drafter: Drafter, requests: list[tuple[str, list[int], list[list[int]]]], num_tokens: int) -> list[object]:
    """Drafts for requests (tenant, prompt, what each pass emits), two at a time, that then join the shared statistics."""
    found: list[object] = []
    for first in range(0, len(requests), 2):
        pair = requests[first : first + 2]
        seqs = [Sequence(i, list(p), len(p), SamplingParams(), seed=0, tenant=tenant) for i, (tenant, p, _) in enumerate(pair)]
        for seq in seqs:
            drafter.open(seq)
        for turn in range(max(len(passes) for _, _, passes in pair)):
            found += drafter.propose(seqs, [num_tokens] * len(seqs))
            for seq, (_, _, passes) in zip(seqs, pair, strict=True):
                emitted = passes[turn] if turn < len(passes) else []
                seq.tokens.extend(emitted)
                drafter.observe(seq, Verdict(tuple(emitted)), None)
        for seq in seqs:
            seq.finish_reason = "stop"
            drafter.close(seq)
    return found


TOKENS = st.lists(st.integers(0, 2), max_size=40)
REQUESTS = st.lists(st.tuples(st.sampled_from("ab"), TOKENS, st.lists(TOKENS, max_size=3)), max_size=6)


@given(
    REQUESTS,
    st.integers(1, 12),
    st.sampled_from([0.0, 0.05, 0.5]),
    st.sampled_from([0.5, 1.0, 8.0]),
    st.sampled_from([0, 9, 20_000]),
    st.sampled_from([500, 3_000, 100_000]),
)
@settings(deadline=None, max_examples=300)
def test_compiled_suffix_drafts_differ(
    requests: list[tuple[str, list[int], list[list[int]]]],
    num_tokens: int,
    min_prob: float,
    factor: float,
    vocab_size: int,
    max_bytes: int,
) -> None:
    """Rings of any size wrap and evict; promises, outcomes and so the calibration accumulate."""
    options = {
        "max_tree_depth": 20,
        "max_spec_factor": factor,
        "min_token_prob": min_prob,
        "max_cached_requests": 100,
        "max_bytes": max_bytes,
        "table": table(70_000 if vocab_size > 9 else 9) if vocab_size else None,
    }
    slow, fast = SuffixDrafter(**options), NativeSuffixDrafter(**options)  # type: ignore[arg-type]
    assert converse(fast, requests, num_tokens) == converse(slow, requests, num_tokens)
    assert list(fast.calibration.hits) == list(slow.calibration.hits)
    assert list(fast.calibration.promised) == list(slow.calibration.promised)


def test_compiled_suffix_drafts_differ_in_long_texts() -> None:
    """Old outcomes fade only after a thousand."""
    rng = np.random.default_rng(0)
    text = (rng.zipf(1.3, 4_000) % 40).tolist()
    requests = [("", text[i : i + 100], [text[j : j + 3] for j in range(i + 100, i + 500, 3)]) for i in range(0, 3_500, 500)]
    create = [lambda: SuffixDrafter(**options()), lambda: NativeSuffixDrafter(**options())]
    slow, fast = (converse(make(), requests, 8) for make in create)
    assert fast == slow and sum(len(draft.tokens) for draft in slow) > 1_000  # type: ignore[attr-defined]


def options() -> dict[str, object]:
    return {"max_tree_depth": 24, "max_spec_factor": 8.0, "min_token_prob": 0.05, "max_cached_requests": 99, "max_bytes": 10**6}


def test_statistics_written_by_one_form_are_not_read_by_the_other() -> None:
    compiled, plain = suffix_native.NativeStatistics(5_000, 50), SharedStatistics(5_000, 50)
    rng = np.random.default_rng(1)
    for number in range(60):
        document = rng.integers(0, 5, rng.integers(1, 40)).tolist()
        for statistics in (compiled, plain):
            statistics.add(f"{number % 3}", document)
        assert [part.tolist() for part in compiled.arrays[2] + compiled.arrays[3]] == [
            part.tolist() for part in plain.arrays[2] + plain.arrays[3]
        ]


@given(TOKENS, st.lists(TOKENS, max_size=4), st.integers(1, 3), st.integers(3, 6))
@settings(deadline=None)
def test_compiled_ngram_drafts_differ(prompt: list[int], passes: list[list[int]], min_n: int, max_n: int) -> None:
    fast, slow = NgramDrafter(min_n, max_n, extension().NgramIndex), NgramDrafter(min_n, max_n, PythonIndex)
    requests = [("", prompt, passes)]
    assert converse(fast, requests, 5) == converse(slow, requests, 5)
    seq = Sequence(0, prompt, len(prompt), SamplingParams(), seed=0)
    for drafter in (fast, slow):
        drafter.open(seq)
    assert fast.candidates(seq, 3, 4) == slow.candidates(seq, 3, 4)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_without_a_compiler_there_are_no_drafters(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = registry.create(method, SpeculativeConfig(), CONTEXT)
    for module in ("foredraft.drafters.ngram", "foredraft.drafters.suffix_native"):
        monkeypatch.setattr(f"{module}.extension", lambda: None)
    slow = registry.create(method, SpeculativeConfig(), CONTEXT)
    requests = [("", [1, 2, 3, 4, 1, 2], [[3], [4, 1]])]
    assert converse(slow, requests, 4) == converse(fast, requests, 4)
    assert any(draft.tokens for draft in converse(slow, requests, 4))  # type: ignore[attr-defined]
