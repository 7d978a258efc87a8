"""The suffix drafter as it is used: with index and drafting loop in C++, where they were compiled.

Owns: one compiled index per sequence, and the drafter's options.  Does not know: what is drafted and why (``suffix``), or how
(csrc/suffix.cpp).  Drafts are those of ``SuffixDrafter``, to the last bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foredraft.acceptance import RESOLUTION, confidence_class
from foredraft.config import SpeculativeConfig
from foredraft.drafters.context import DrafterContext
from foredraft.drafters.ngram_table import DECODED_BYTES, TargetIdentity, load_table
from foredraft.drafters.suffix import SuffixDrafter
from foredraft.drafters.suffix_statistics import ANCHORS, SharedStatistics
from foredraft.memory import BYTES_PER_DICT_ENTRY, DrafterBytes
from foredraft.sampling import extension
from foredraft.types import Draft, FloatArray, Sequence, Verdict


class NativeStatistics(SharedStatistics):
    """See SharedStatistics."""

    def __init__(self, max_bytes: int, max_requests: int) -> None:
        super().__init__(max_bytes, max_requests)
        self.view = extension().SharedView(*self.arrays)

    def _index(self, number: int, document: list[int], first: int) -> None:
        self.view.index(number, document, first, self._oldest)


class NativeSuffixDrafter(SuffixDrafter):
    """See SuffixDrafter, whose arguments it takes."""

    statistics = NativeStatistics

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        native, calibration = extension(), self.calibration
        rest = list(self._rest)
        self._new_text = native.SuffixText
        self._core = native.SuffixCore(
            min(self._max_tree_depth, 2**31 - 1),
            self._max_spec_factor,
            self._min_token_prob,
            [confidence_class(part / RESOLUTION) for part in range(RESOLUTION + 1)],
            self._weights,
            [token for token, _ in rest],
            [share for _, share in rest],
            calibration.hits,
            calibration.promised,
        )
        assert isinstance(self.shared, NativeStatistics)
        self._core.set_shared(self.shared.view)
        if self.table is not None:
            self._core.set_table(*self.table.arrays, self.table.bucket_bits)
        self._texts: dict[int, Any] = {}

    def open(self, seq: Sequence) -> None:
        """See SuffixDrafter.open."""
        super().open(seq)
        self._texts[seq.seq_id] = self._new_text()

    def observe(self, seq: Sequence, verdict: Verdict, hidden: FloatArray | None) -> None:
        """See SuffixDrafter.observe."""
        self._core.observe(self._texts[seq.seq_id], seq.tokens)

    def close(self, seq: Sequence) -> None:
        """See SuffixDrafter.close."""
        super().close(seq)
        self._texts.pop(seq.seq_id, None)

    def _draft(self, seq: Sequence, num_tokens: int) -> Draft:
        self.shared.select(seq.tenant)
        tokens, score, probs = self._core.draft(self._texts[seq.seq_id], seq.tokens, *self.shared.selected, num_tokens)
        return Draft(tokens, score=score, confidence=probs)


def memory(config: SpeculativeConfig) -> DrafterBytes:
    """The limit of the shared statistics, the table, and what indexing a request takes for each of its tokens.

    That is when no anchor comes twice.
    """
    shared = config.suffix_decoding_max_bytes if config.suffix_decoding_max_cached_requests else 0
    path = Path(config.suffix_decoding_base or "")
    # The compiled form reads the table where it lies, and decodes nothing to keep.
    decoded = DECODED_BYTES if extension() is None else 0
    table = path.stat().st_size + decoded if path.is_file() else 0
    return DrafterBytes(fixed=shared + table, per_token=len(ANCHORS) * (BYTES_PER_DICT_ENTRY + 4))


def create(config: SpeculativeConfig, context: DrafterContext) -> SuffixDrafter:
    """Factory for method ``suffix``."""
    path, table = config.suffix_decoding_base, None
    if path is not None:
        identity = TargetIdentity.of(context.model, context.vocab_size, context.vocabulary())
        table = load_table(Path(path), identity)
    drafter = SuffixDrafter if extension() is None else NativeSuffixDrafter
    return drafter(
        max_tree_depth=config.suffix_decoding_max_tree_depth,
        max_spec_factor=config.suffix_decoding_max_spec_factor,
        min_token_prob=config.suffix_decoding_min_token_prob,
        max_cached_requests=config.suffix_decoding_max_cached_requests,
        max_bytes=config.suffix_decoding_max_bytes,
        table=table,
    )
