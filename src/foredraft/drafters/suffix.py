"""SuffixDecoding (Oliaro et al., 2411.04975): continue by vote of everything that followed the present end before.

Owns: the vote, the score of a draft, and its calibration.  Does not know: any model, or how occurrences are found.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from foredraft.config import SpeculativeConfig
from foredraft.drafters.context import DrafterContext
from foredraft.drafters.suffix_statistics import ANCHORS, RequestStatistics, SharedStatistics, Statistics
from foredraft.memory import BYTES_PER_DICT_ENTRY, DrafterBytes
from foredraft.types import Draft, FloatArray, Sequence, Verdict


class Calibration:
    """Turns vote shares into probabilities by what came of earlier drafts.

    Raw shares promise too much: one occurrence always votes unanimously, and the draft with the best score was chosen
    because of its score.  So outcomes are counted per class of (own or shared, match length, number of votes, share).  Until a
    class has outcomes, an escape of 1/match length more votes is assumed, as prediction by partial matching does.
    """

    PRIOR_WEIGHT = 2.0
    MAX_TRIALS = 1024.0

    def __init__(self) -> None:
        self._hits = [0.0] * 200
        self._trials = [0.0] * 200

    @staticmethod
    def bucket(is_own: bool, match_length: int, num_votes: int, votes: int) -> int:
        """The class of a vote: ``votes`` of ``num_votes`` occurrences, all of which match ``match_length`` tokens."""
        length, total = min(match_length.bit_length(), 5) - 1, min(num_votes.bit_length(), 5) - 1
        return ((is_own * 5 + length) * 5 + total) * 4 + min(votes * 4 // num_votes, 3)

    def probability(self, bucket: int, match_length: int, num_votes: int, votes: int) -> float:
        """Estimated probability that the elected token comes next."""
        prior = votes / (num_votes + 1.0 / match_length)
        return (self._hits[bucket] + self.PRIOR_WEIGHT * prior) / (self._trials[bucket] + self.PRIOR_WEIGHT)

    def learn(self, bucket: int, came: bool) -> None:
        """Count one outcome; old ones fade."""
        if self._trials[bucket] >= self.MAX_TRIALS:
            self._trials[bucket] /= 2
            self._hits[bucket] /= 2
        self._trials[bucket] += 1
        self._hits[bucket] += came


@dataclass
class _Path:
    """A draft in the making: ``score`` sums path probabilities, ``probs`` and ``buckets`` are those of each vote."""

    match_length: int = 0
    score: float = 0.0
    tokens: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)


@dataclass
class _Followed:
    """A sequence that is open, and its last draft, made when it had ``base`` tokens."""

    statistics: RequestStatistics
    base: int = 0
    path: _Path = field(default_factory=_Path)


class SuffixDrafter:
    """Drafts what most often followed the same end of text, in this request or in earlier ones of its tenant.

    For the longest match and for each shorter anchor the occurrences vote on one token after another; the path with the
    highest expected number of accepted tokens becomes the draft, and that number its ``score``.  Drafts are deterministic.

    Args:
        max_tree_depth: longest match looked for, in tokens.
        max_spec_factor: at most this many draft tokens per matched token.
        min_token_prob: a path ends when its probability falls below this.
        max_cached_requests, max_bytes: see SharedStatistics.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self, *, max_tree_depth: int, max_spec_factor: float, min_token_prob: float, max_cached_requests: int, max_bytes: int
    ) -> None:
        self.shared = SharedStatistics(max_bytes, max_cached_requests)
        self.calibration = Calibration()
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
        for token, came, bucket in zip(path.tokens, came_next, path.buckets, strict=False):
            self.calibration.learn(bucket, token == came)
            if token != came:
                break
        followed.path = _Path()

    def close(self, seq: Sequence) -> None:
        """Forget the sequence; if it is finished (not just preempted), its output joins the shared statistics."""
        if self._followed.pop(seq.seq_id, None) is not None and seq.finish_reason is not None:
            self.shared.add(seq.tenant, seq.tokens[seq.num_prompt :])

    def _draft(self, seq: Sequence, num_tokens: int) -> Draft:
        followed = self._followed[seq.seq_id]
        followed.statistics.extend(seq.tokens)
        best = self._best(followed.statistics, seq.tokens, num_tokens, _Path())
        if self.shared.select(seq.tenant):
            best = self._best(self.shared, seq.tokens, num_tokens, best)
        followed.base, followed.path = len(seq.tokens), best
        return Draft(tuple(best.tokens), score=best.score, confidence=tuple(best.probs))

    def _best(self, source: Statistics, tokens: list[int], num_tokens: int, best: _Path) -> _Path:
        """The better of ``best`` and the best path from ``source``; of equals the longer match."""
        suffix = tokens[-self._max_tree_depth :]
        is_longest = True
        for level, anchor in enumerate(ANCHORS):
            ceiling = suffix if is_longest else suffix[-anchor:]
            if self._limit(len(ceiling), num_tokens) <= best.score:
                break
            ends = source.ends(level, suffix) if anchor <= len(suffix) else []
            if not ends:
                continue
            if is_longest:
                is_longest = False
                longest, furthest = _longest(source.tokens, ends, suffix, anchor)
                if longest > anchor:
                    best = self._better(best, source, furthest, longest, num_tokens)
            best = self._better(best, source, ends, anchor, num_tokens)
        return best

    def _limit(self, match_length: int, num_tokens: int) -> int:
        return min(num_tokens, int(self._max_spec_factor * match_length))

    def _better(self, best: _Path, source: Statistics, ends: list[int], match_length: int, num_tokens: int) -> _Path:
        limit = self._limit(match_length, num_tokens)
        if limit <= best.score:
            return best
        path = self._follow(source, ends, match_length, limit)
        return max(best, path, key=lambda candidate: (candidate.score, candidate.match_length))

    def _follow(self, source: Statistics, ends: list[int], match_length: int, limit: int) -> _Path:
        """Elect one token after another; those who voted otherwise, or whose text has ended, drop out."""
        tokens, length, path = source.tokens, len(source.tokens), _Path(match_length)
        path_prob = 1.0
        for ahead in range(1, limit + 1):
            votes: dict[int, list[int]] = {}
            for end in ends:
                token = tokens[end + ahead] if end + ahead < length else -1
                if token >= 0:
                    votes.setdefault(token, []).append(end)
            if not votes and source.is_own:
                # Every occurrence has run into the draft itself: the text is in a loop, which the most recent one follows.
                votes[path.tokens[ends[0] + ahead - length]] = ends[:1]
            if not votes:
                break
            # Voters stand most recent first, and max takes the first of equals.
            token = max(votes, key=lambda candidate: len(votes[candidate]))
            num_votes, ends = sum(map(len, votes.values())), votes[token]
            matched = match_length + ahead - 1
            bucket = self.calibration.bucket(source.is_own, matched, num_votes, len(ends))
            prob = self.calibration.probability(bucket, matched, num_votes, len(ends))
            path_prob *= prob
            if path_prob < self._min_token_prob:
                break
            path.score += path_prob
            path.tokens.append(token)
            path.probs.append(prob)
            path.buckets.append(bucket)
        return path


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


def memory(config: SpeculativeConfig) -> DrafterBytes:
    """The limit of the shared statistics, and what indexing a request takes for each of its tokens, when no anchor comes twice."""
    shared = config.suffix_decoding_max_bytes if config.suffix_decoding_max_cached_requests else 0
    return DrafterBytes(fixed=shared, per_token=len(ANCHORS) * (BYTES_PER_DICT_ENTRY + 4))


def create(config: SpeculativeConfig, context: DrafterContext) -> SuffixDrafter:
    """Factory for method ``suffix``."""
    return SuffixDrafter(
        max_tree_depth=config.suffix_decoding_max_tree_depth,
        max_spec_factor=config.suffix_decoding_max_spec_factor,
        min_token_prob=config.suffix_decoding_min_token_prob,
        max_cached_requests=config.suffix_decoding_max_cached_requests,
        max_bytes=config.suffix_decoding_max_bytes,
    )
