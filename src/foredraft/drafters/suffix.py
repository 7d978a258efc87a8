"""SuffixDecoding (Oliaro et al., 2411.04975), with one distribution: continue as the present end of the text was continued before.

Owns: which evidence is asked for each draft token, the score of a draft, and its calibration.  Does not know: any model, how
occurrences are found, or how statistics of a target's texts are made.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from foredraft.acceptance import NUM_CLASSES, confidence_class
from foredraft.drafters.backoff import OWN, SHARED, Shares, base_cell, counts_cell, first_weights, group_of, mix
from foredraft.drafters.ngram_table import MAX_ORDER, Match, NgramTable
from foredraft.drafters.suffix_statistics import ANCHORS, RequestStatistics, SharedStatistics, Statistics
from foredraft.types import Draft, FloatArray, Sequence, Verdict

# With this many levels further ones take time and change nothing: the longer ones then agree.
MAX_LEVELS = 10
LONG_MATCH = 16


class Calibration:
    """Turns what the distribution promises into how often it comes true.

    The likeliest of several tokens was chosen because it looked likely, so it is a little less likely than it looks.  Promises and
    outcomes are summed per class of odds, apart for tokens that the request itself suggests and for others.
    """

    PRIOR_WEIGHT = 6.0
    MAX_PROMISED = 1024.0
    NUM_CELLS = 2 * NUM_CLASSES

    def __init__(self, hits: Seq[float] = (), promised: Seq[float] = ()) -> None:
        nothing = [0.0] * self.NUM_CELLS
        self.hits, self.promised = array("d", hits or nothing), array("d", promised or nothing)

    @staticmethod
    def cell(promise: float, is_own: bool) -> int:
        """The class of a promise; ``is_own`` when the request itself has an occurrence that suggests the token."""
        return 2 * confidence_class(promise) + is_own

    def probability(self, cell: int, promise: float) -> float:
        """Estimated probability that a token that is promised with ``promise`` comes next."""
        kept = (self.hits[cell] + self.PRIOR_WEIGHT) / (self.promised[cell] + self.PRIOR_WEIGHT)
        return min(promise * kept, 1.0)

    def learn(self, cell: int, promise: float, came: bool) -> None:
        """Count one outcome; old ones fade."""
        if self.promised[cell] >= self.MAX_PROMISED:
            self.promised[cell] /= 2
            self.hits[cell] /= 2
        self.promised[cell] += promise
        self.hits[cell] += came


@dataclass
class _Path:
    """A draft in the making: ``score`` sums path probabilities, the lists have one entry per token."""

    score: float = 0.0
    tokens: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    promises: list[float] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)

    def add(self, token: int, prob: float, path_prob: float, promise: float, cell: int) -> None:
        """One more token; ``path_prob`` is the probability of it and all before it."""
        self.score += path_prob
        self.tokens.append(token)
        self.probs.append(prob)
        self.promises.append(promise)
        self.cells.append(cell)


@dataclass
class _Followed:
    """A sequence that is open, and its last draft, made when it had ``base`` tokens."""

    statistics: RequestStatistics
    base: int = 0
    path: _Path = field(default_factory=_Path)


class _Level:
    """Occurrences that match the end of text and draft in ``length`` tokens, most recent first, and what followed each.

    ``ends`` index ``source.tokens``, or, beyond the request's own tokens, the draft.  A negative successor is none.
    """

    __slots__ = ("ends", "length", "source", "successors")

    def __init__(self, source: Statistics, length: int, ends: list[int], draft: list[int]) -> None:
        self.source, self.length, self.ends = source, length, ends
        text, size = source.tokens, len(source.tokens)
        # In a loop of text an occurrence runs into the draft itself.
        self.successors = [text[end + 1] if end + 1 < size else draft[end + 1 - size] for end in ends]

    def moved(self, token: int, draft: list[int]) -> _Level | None:
        """The occurrences that ``token`` followed, one token further; None without any."""
        ends = [end + 1 for end, successor in zip(self.ends, self.successors, strict=True) if successor == token]
        return _Level(self.source, self.length + 1, ends, draft) if ends else None

    def counts(self) -> dict[int, int]:
        """How often each token followed."""
        counts = dict[int, int]()
        for token in self.successors:
            if token >= 0:
                counts[token] = counts.get(token, 0) + 1
        return counts


class SuffixDrafter:
    """Drafts what most often followed the same end of text: in this request, in earlier ones of its tenant, in the target's texts.

    All three give evidence for each draft token, for every length of match; mixed by ``backoff`` it is one distribution, whose
    likeliest token is drafted.  The expected number of accepted tokens is the draft's ``score``.  Drafts are deterministic.

    Args:
        max_tree_depth: longest match looked for, in tokens.
        max_spec_factor: at most this many draft tokens per matched token.
        min_token_prob: a draft ends when the probability of all of it falls below this.
        max_cached_requests, max_bytes: see SharedStatistics.
        table: statistics of texts that the target wrote.
    """

    hidden_layers: tuple[int, ...] = ()
    statistics: type[SharedStatistics] = SharedStatistics

    def __init__(
        self,
        *,
        max_tree_depth: int,
        max_spec_factor: float,
        min_token_prob: float,
        max_cached_requests: int,
        max_bytes: int,
        table: NgramTable | None = None,
    ) -> None:
        self.shared = self.statistics(max_bytes, max_cached_requests)
        self.table = table
        self.calibration = Calibration(table.hits, table.promised) if table else Calibration()
        self._weights = table.weights if table else first_weights()
        self._rest: Shares = table.unigrams if table else ()
        self._max_tree_depth = max_tree_depth
        self._max_spec_factor = max_spec_factor
        self._min_token_prob = min_token_prob
        self._followed: dict[int, _Followed] = {}

    def open(self, seq: Sequence) -> None:
        """Start without an index; the first ``propose`` makes it, so a sequence that never drafts costs nothing."""
        self._followed[seq.seq_id] = _Followed(RequestStatistics())

    def propose(self, seqs: list[Sequence], num_tokens: list[int]) -> list[Draft]:
        """One draft per sequence, at most ``num_tokens[i]`` tokens; empty when nothing is likely enough."""
        return [self._draft(seq, num) for seq, num in zip(seqs, num_tokens, strict=True)]

    def observe(self, seq: Sequence, verdict: Verdict, hidden: FloatArray | None) -> None:
        """Learn how far the last draft was right; new tokens are indexed by the next ``propose``."""
        followed = self._followed[seq.seq_id]
        path = followed.path
        came_next = seq.tokens[followed.base : followed.base + len(path.tokens)]
        for token, came, cell, promise in zip(path.tokens, came_next, path.cells, path.promises, strict=False):
            self.calibration.learn(cell, promise, token == came)
            if token != came:
                break
        followed.path = _Path()

    def close(self, seq: Sequence) -> None:
        """Forget the sequence; if it is finished (not just preempted), its output joins the shared statistics."""
        if self._followed.pop(seq.seq_id, None) is not None and seq.finish_reason is not None:
            self.shared.add(seq.tenant, seq.tokens[seq.num_prompt :])

    def evidence(self, seq: Sequence) -> list[tuple[int, Shares]]:
        """All evidence for the next token of an open sequence, longest match first, as ``backoff.mix`` takes it."""
        statistics = self._followed[seq.seq_id].statistics
        statistics.extend(seq.tokens)
        return list(self._evidence(self._levels(seq, statistics), self._matches(seq.tokens)))

    # -------------------------------------------------------------------------------------------- drafting

    def _draft(self, seq: Sequence, num_tokens: int) -> Draft:
        followed = self._followed[seq.seq_id]
        followed.statistics.extend(seq.tokens)
        followed.base, followed.path = len(seq.tokens), self._follow(seq, followed.statistics, num_tokens)
        path = followed.path
        return Draft(tuple(path.tokens), score=path.score, confidence=tuple(path.probs))

    def _follow(self, seq: Sequence, own: RequestStatistics, num_tokens: int) -> _Path:
        """Draft one likeliest token after another."""
        path, path_prob = _Path(), 1.0
        levels, matches = self._levels(seq, own), self._matches(seq.tokens)
        recent = seq.tokens[-MAX_ORDER:]
        # Without occurrences at the start the tenant may have no earlier requests at all, and must not see those of others.
        sources: Seq[Statistics] = (own,) if all(level.source.is_own for level in levels) else (own, self.shared)
        limit = self._limit(seq.tokens, levels, matches, num_tokens)
        while len(path.tokens) < limit:
            if path.tokens:
                levels = self._move_on(levels, sources, path.tokens)
                matches = self._matches(recent)
            probs = mix(self._evidence(levels, matches), self._weights, self._rest)
            if not probs:
                break
            # Of equals the first is the one of the longest match, and there the most recent.
            token = max(probs, key=probs.__getitem__)
            promise = probs[token]
            is_own = any(level.source.is_own and token in level.successors for level in levels)
            cell = self.calibration.cell(promise, is_own)
            prob = self.calibration.probability(cell, promise)
            path_prob *= prob
            if path_prob < self._min_token_prob:
                break
            path.add(token, prob, path_prob, promise, cell)
            recent.append(token)
        return path

    def _limit(self, tokens: list[int], levels: list[_Level], matches: list[Match], num_tokens: int) -> int:
        """How many tokens to draft at most; ``levels`` and ``matches`` are those at the start."""
        length = max(levels[0].length if levels else 0, len(matches))
        if levels and int(self._max_spec_factor * length) < num_tokens:
            suffix = tokens[-self._max_tree_depth :]
            for source in (True, False):
                first = next((level for level in levels if level.source.is_own == source), None)
                if first is not None:
                    length = max(length, _longest(first.source.tokens, first.ends, suffix, first.length)[0])
        return min(num_tokens, int(self._max_spec_factor * length))

    def _levels(self, seq: Sequence, own: RequestStatistics) -> list[_Level]:
        """Occurrences of the present end, longest match first; of equal lengths the request's own first."""
        suffix = seq.tokens[-self._max_tree_depth :]
        levels = self._levels_in(own, suffix)
        if self.shared.select(seq.tenant):
            levels += self._levels_in(self.shared, suffix)
            levels.sort(key=lambda level: -level.length)
        return levels

    def _levels_in(self, source: Statistics, suffix: list[int]) -> list[_Level]:
        levels = list[_Level]()
        for index, anchor in enumerate(ANCHORS):
            ends = source.ends(index, suffix) if anchor <= len(suffix) else []
            if not ends:
                continue
            level = _Level(source, anchor, ends, [])
            # Where the text went on in different ways after the longest anchor, a longer match may tell which way is meant; and
            # one that is far longer says that all of a text comes again.
            is_split = level.successors.count(level.successors[0]) < len(ends)
            if not levels and (is_split or anchor == ANCHORS[0]):
                longest, furthest = _longest(source.tokens, ends, suffix, anchor)
                if longest > anchor if is_split else longest >= LONG_MATCH:
                    levels.append(_Level(source, longest, furthest, []))
            levels.append(level)
        return levels

    def _move_on(self, levels: list[_Level], sources: Seq[Statistics], draft: list[int]) -> list[_Level]:
        """The levels after the last token of ``draft`` was drafted."""
        moved = [level for level in (level.moved(draft[-1], draft) for level in levels) if level is not None]
        if len(moved) < MAX_LEVELS:
            for source in sources:
                ends = source.ends_after(draft[-1])
                if ends:
                    moved.append(_Level(source, 1, ends, draft))
        return moved

    def _matches(self, tokens: list[int]) -> list[Match]:
        return self.table.matches(tokens) if self.table else []

    def _evidence(self, levels: list[_Level], matches: list[Match]) -> Iterator[tuple[int, Shares]]:
        """Cells and shares, longest match first; what occurred here comes before what the table says of equal length."""
        waiting = list(matches)
        for level in levels:
            while waiting and waiting[-1].order > level.length:
                yield self._of_table(waiting.pop())
            counts = level.counts()
            total = sum(counts.values())
            if total:
                group = group_of(OWN if level.source.is_own else SHARED, level.length)
                yield counts_cell(group, total, len(counts)), [(token, num / total) for token, num in counts.items()]
        while waiting:
            yield self._of_table(waiting.pop())

    def _of_table(self, match: Match) -> tuple[int, Shares]:
        assert self.table is not None
        return base_cell(match.order, match.cell), self.table.successors(match)


def _longest(tokens: Seq[int], ends: list[int], suffix: list[int], anchor: int) -> tuple[int, list[int]]:
    """The longest match that ends at any of ``ends`` (all match ``anchor`` tokens), and the ends that have it."""
    longest, furthest = anchor, list[int]()
    for end in ends:
        limit, length = min(len(suffix), end + 1), anchor
        # In a loop of text nearly every occurrence matches as far as is looked: one comparison of slices then tells.
        if list(tokens[end + 1 - limit : end + 1]) == suffix[len(suffix) - limit :]:
            length = limit
        while length < limit and tokens[end - length] == suffix[-1 - length]:
            length += 1
        if length > longest:
            longest, furthest = length, []
        if length == longest:
            furthest.append(end)
    return longest, furthest
