"""Prompt lookup: continue as the text did after the last occurrence of its present end.

Owns: the index from n-grams of one sequence to where they occurred before.  Does not know: other sequences, or any model.

The index is a trie over all n-grams up to ``max_n``; the nodes of the present suffixes move down by one token per commit, so a
commit costs one dictionary look-up per n and a lookup reads an array per n.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

from foredraft.config import SpeculativeConfig
from foredraft.drafters.context import DrafterContext
from foredraft.memory import BYTES_PER_DICT_ENTRY, DrafterBytes
from foredraft.sampling import extension
from foredraft.types import Draft, FloatArray, Sequence, Verdict

MAX_OCCURRENCES = 64
# Longer matches promise no more.
MAX_MATCH_LENGTH = 32


class Index(Protocol):
    """Where the n-grams of one sequence ended, n up to a most."""

    @property
    def num_tokens(self) -> int:
        """How many tokens are indexed."""
        ...

    def extend(self, tokens: list[int]) -> None:
        """Index the tokens that were committed since the last call."""
        ...

    def before(self, n: int, end: int) -> int:
        """Where the n-gram that ends at ``end`` (-1: the present one) ended before; -1 for nowhere."""
        ...

    def match_length(self, end: int, known: int, most: int) -> int:
        """How many tokens up to ``end`` equal the last ones: at least ``known``, counted up to ``most``."""
        ...


class PythonIndex:
    """See Index; the compiled one does the same.

    ``_previous[n][t]`` is the last position before ``t`` where the n-gram that ends at ``t`` also ended; -1 for none.
    """

    def __init__(self, max_n: int) -> None:
        self.num_tokens = 0
        self._tokens: list[int] = []
        self._previous = [array("i") for _ in range(max_n + 1)]
        self._max_n = max_n
        self._children: dict[int, int] = {}
        self._last_end = array("i", [-1])
        self._suffix_nodes = [0] * (max_n + 1)

    def extend(self, tokens: list[int]) -> None:
        """Index the tokens that were committed since the last call."""
        assert len(tokens) >= self.num_tokens, (len(tokens), self.num_tokens)
        for position in range(self.num_tokens, len(tokens)):
            self._append(tokens[position], position)
        self.num_tokens, self._tokens = len(tokens), tokens

    def before(self, n: int, end: int) -> int:
        """Where the n-gram that ends at ``end`` (-1: the present one) ended before; -1 for nowhere."""
        previous = self._previous[n]
        return previous[end] if previous else -1

    def match_length(self, end: int, known: int, most: int) -> int:
        """How many tokens up to ``end`` equal the last ones: at least ``known``, counted up to ``most``."""
        tokens, limit = self._tokens, min(most, end + 1)
        while known < limit and tokens[end - known] == tokens[-1 - known]:
            known += 1
        return known

    def _append(self, token: int, position: int) -> None:
        children, last_end, nodes = self._children, self._last_end, self._suffix_nodes
        # Longest first: the node for n is a child of the old node for n - 1.
        for n in range(self._max_n, 0, -1):
            if n > position + 1:
                self._previous[n].append(-1)
                continue
            edge = nodes[n - 1] << 32 | token
            node = children.get(edge)
            if node is None:
                node = children[edge] = len(last_end)
                last_end.append(-1)
            self._previous[n].append(last_end[node])
            last_end[node] = position
            nodes[n] = node


class NgramDrafter:
    """Drafts by the longest match of n tokens, ``max_n`` >= n >= ``min_n``, and of those the most recent.

    A match that overlaps the end continues into its own draft, so text in a loop of any period yields full drafts.
    Drafts are deterministic.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, min_n: int, max_n: int, new_index: Callable[[int], Index] = PythonIndex) -> None:
        assert 1 <= min_n <= max_n, (min_n, max_n)
        self._min_n = min_n
        self._max_n = max_n
        self._new_index = new_index
        self._indexes: dict[int, Index] = {}

    def open(self, seq: Sequence) -> None:
        """Start with an empty index; the first ``propose`` fills it, so a sequence that never drafts costs nothing."""
        self._indexes[seq.seq_id] = self._new_index(self._max_n)

    def propose(self, seqs: list[Sequence], num_tokens: list[int]) -> list[Draft]:
        """One draft per sequence: ``num_tokens[i]`` tokens, or none when nothing matches."""
        drafts = []
        for seq, num in zip(seqs, num_tokens, strict=True):
            index = self._indexes[seq.seq_id]
            index.extend(seq.tokens)
            n, end = next(self._matches(index), (0, -1))
            if not n or num < 1:
                drafts.append(Draft())
                continue
            # Longer matches are believed more; how much is for those to find out who know the outcomes.
            length = index.match_length(end, n, MAX_MATCH_LENGTH)
            drafts.append(Draft(_copy(seq.tokens, end + 1, num), confidence=(length / (length + 1.0),) * num))
        return drafts

    def candidates(self, seq: Sequence, num_tokens: int, limit: int) -> list[tuple[int, ...]]:
        """Up to ``limit`` distinct continuations of ``num_tokens`` tokens: longer matches first, then the more recent."""
        index = self._indexes[seq.seq_id]
        index.extend(seq.tokens)
        if num_tokens < 1:
            return []
        return list(islice(dict.fromkeys(_copy(seq.tokens, end + 1, num_tokens) for _, end in self._matches(index)), limit))

    def _matches(self, index: Index) -> Iterator[tuple[int, int]]:
        """(n, where the present last n tokens ended before), longest first, and of equals the most recent first."""
        if not index.num_tokens:
            return
        for n in range(self._max_n, self._min_n - 1, -1):
            end = index.before(n, -1)
            for _ in range(MAX_OCCURRENCES):
                if end < 0:
                    break
                yield n, end
                end = index.before(n, end)

    def observe(self, seq: Sequence, verdict: Verdict, hidden: FloatArray | None) -> None:
        """Nothing to do: ``propose`` indexes whatever was committed meanwhile, and drafts are never indexed."""

    def close(self, seq: Sequence) -> None:
        """Drop the sequence's index."""
        self._indexes.pop(seq.seq_id, None)


def _copy(tokens: list[int], start: int, num_tokens: int) -> tuple[int, ...]:
    """``num_tokens`` tokens from ``start`` on, running over the end of ``tokens`` into the copy itself."""
    copied = tokens[start : start + num_tokens]
    period = len(tokens) - start
    for i in range(len(copied), num_tokens):
        copied.append(copied[i - period])
    return tuple(copied)


def memory(config: SpeculativeConfig) -> DrafterBytes:
    """What an index takes for each token of a running request, when no n-gram comes twice."""
    entries = config.prompt_lookup_max
    return DrafterBytes(per_token=entries * (BYTES_PER_DICT_ENTRY + 4) + 4 * (entries + 1))


def create(config: SpeculativeConfig, context: DrafterContext) -> NgramDrafter:
    """Factory for method ``ngram``."""
    native = extension()
    new_index = PythonIndex if native is None else native.NgramIndex
    return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max, new_index)
