"""Warm statistics for the ``suffix`` drafter: counts from a target's texts, weighted by what they predict in texts held out.

Owns: which texts are held out, and how weights and calibration are learned on them.  Does not know: where texts come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foredraft.array_file import ArrayFile
from foredraft.config import SpeculativeConfig
from foredraft.drafters.backoff import first_weights
from foredraft.drafters.ngram_table import NgramTable
from foredraft.drafters.suffix import Calibration, SuffixDrafter
from foredraft.replay import Record, replay_all
from foredraft.train import ngrams
from foredraft.types import ConfigError, SamplingParams, Sequence

Array = npt.NDArray[Any]

MAX_BYTES = 8_000_000
MIN_TEXTS = 4
# Every tenth text is held out, while there are no more than suffice.
HELD_OUT_EVERY, MAX_HELD_OUT = 10, 200
NUM_ROUNDS = 20
# The weights that hold before anything is learned count as much as this many tokens.
PRIOR_WEIGHT = 2.0
NUM_DRAFTED = 3
# The probability of a token that no evidence speaks for and that is not among the most frequent.
RARE = 1e-5
# Per class, in promised tokens.
MAX_PROMISED = 64.0


@dataclass(frozen=True)
class Fitted:
    """A table's arrays, see ``ngram_table.save_table``, and what it brings for texts that were held out.

    Acceptance lengths at ``NUM_DRAFTED`` draft tokens: by the request's own text alone, and with a table of the other texts.
    """

    arrays: dict[str, Array]
    num_tokens: int
    cold_acceptance_length: float
    warm_acceptance_length: float


def fit(records: Seq[Record], vocab_size: int, max_bytes: int = MAX_BYTES) -> Fitted:
    """A table of at most ``max_bytes`` for ``records``.

    Raises:
        ConfigError: too few texts.
    """
    if len(records) < MIN_TEXTS:
        raise ConfigError(f"statistics take at least {MIN_TEXTS} texts, not {len(records)}; ask for more tokens.")
    every = max(HELD_OUT_EVERY, -(-len(records) // MAX_HELD_OUT)) if len(records) >= HELD_OUT_EVERY else 2
    held_out = records[every - 1 :: every]
    counted = [record for index, record in enumerate(records) if index % every != every - 1]
    nothing = np.zeros(Calibration.NUM_CELLS, "<f4")
    learned = {"weights": np.array(first_weights(), "<f4"), "hits": nothing, "promised": nothing}
    part = _table(counted, vocab_size, max_bytes)
    learned["weights"] = weights(held_out, _open(part | learned))
    warm = drafter_with(_open(part | learned))
    warm_length = replay_all(warm, held_out, NUM_DRAFTED).acceptance_length
    learned["hits"], learned["promised"] = _shrunk(warm.calibration)
    return Fitted(
        arrays=_table(records, vocab_size, max_bytes) | learned,
        num_tokens=sum(len(record.tokens) - record.num_prompt for record in records),
        cold_acceptance_length=replay_all(drafter_with(None), held_out, NUM_DRAFTED).acceptance_length,
        warm_acceptance_length=warm_length,
    )


def _table(records: Seq[Record], vocab_size: int, max_bytes: int) -> dict[str, Array]:
    return ngrams.pack(ngrams.count(records), vocab_size, ngrams.unigrams(records), max_bytes)


def _open(arrays: Mapping[str, Array]) -> NgramTable:
    identity = {"model": "", "vocab_size": 0, "vocabulary": ""}
    return NgramTable(ArrayFile({"identity": identity, "provenance": {}}, arrays))


def drafter_with(table: NgramTable | None) -> SuffixDrafter:
    """A drafter as it is used, but which drafts however unlikely it is."""
    config = SpeculativeConfig()
    return SuffixDrafter(
        max_tree_depth=config.suffix_decoding_max_tree_depth,
        max_spec_factor=64.0,
        min_token_prob=0.0,
        max_cached_requests=config.suffix_decoding_max_cached_requests,
        max_bytes=config.suffix_decoding_max_bytes,
        table=table,
    )


def _shrunk(calibration: Calibration) -> tuple[Array, Array]:
    """(hits, promised), so few that outcomes of real drafts soon count for more."""
    hits, promised = np.array(calibration.hits), np.array(calibration.promised)
    shrink = np.minimum(1.0, MAX_PROMISED / np.maximum(promised, 1e-9))
    return (hits * shrink).astype("<f4"), (promised * shrink).astype("<f4")


def weights(records: Iterable[Record], table: NgramTable) -> Array:
    """The weight of each cell of ``backoff`` under which ``records`` are likeliest, by expectation maximisation.

    A token was drawn from the first level that was not passed over; how often each cell was reached, and how often it was drawn
    from, is estimated by the weights of the round before.
    """
    cells, shares, rests = _observations(records, table)
    known, first = cells >= 0, np.array(first_weights())
    safe = np.where(known, cells, 0)
    weight = first
    for _ in range(NUM_ROUNDS):
        taken = np.where(known, weight[safe], 0.0)
        left = np.cumprod(1.0 - taken, axis=1)
        drawn = np.concatenate([np.ones((len(left), 1)), left[:, :-1]], axis=1) * taken * shares
        beyond = left[:, -1] * rests
        probs = drawn.sum(axis=1) + beyond
        # From level i or a later one.
        reached = np.cumsum(np.concatenate([beyond[:, None], drawn[:, ::-1]], axis=1), axis=1)[:, :0:-1]
        num_drawn = np.bincount(safe[known], (drawn / probs[:, None])[known], len(first))
        num_reached = np.bincount(safe[known], (reached / probs[:, None])[known], len(first))
        weight = (num_drawn + PRIOR_WEIGHT * first) / (num_reached + PRIOR_WEIGHT)
    return weight.astype("<f4")


def _observations(records: Iterable[Record], table: NgramTable) -> tuple[Array, Array, Array]:
    """Of each token of the answers: its evidence's cells (-1 behind the last) and shares, and its share without evidence."""
    drafter, common = drafter_with(table), dict(table.unigrams)
    rows: list[list[tuple[int, float]]] = []
    rests = []
    for record in records:
        seq = Sequence(0, list(record.tokens[: record.num_prompt]), record.num_prompt, SamplingParams(temperature=0.0), seed=0)
        drafter.open(seq)
        for token in record.tokens[record.num_prompt :]:
            rows.append([(cell, dict(shares).get(token, 0.0)) for cell, shares in drafter.evidence(seq)])
            rests.append(common.get(token, RARE))
            seq.tokens.append(token)
        # So that those behind it see it, as requests see earlier ones.
        seq.finish_reason = "stop"
        drafter.close(seq)
    width = max(map(len, rows))
    cells, shares = np.full((len(rows), width + 1), -1), np.zeros((len(rows), width + 1))
    for index, row in enumerate(rows):
        for level, (cell, share) in enumerate(row):
            cells[index, level], shares[index, level] = cell, share
    return cells, shares, np.array(rests)
