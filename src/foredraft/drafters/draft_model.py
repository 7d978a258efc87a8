"""Drafts by a small language model with the target's vocabulary (Leviathan et al., 2211.17192).

Owns: the draft model's passes, its own key-value blocks, and how its logits become draft tokens.  Does not know: how the model is
computed or loaded, or what the verification rule does with a draft.

A draft token is drawn as the target draws: from the same one distribution of its row, and under the coupled rule with the very
noise that the target will use at that position, so a draft model equal to the target is always right (Daliri et al., 2408.07978).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from foredraft.config import SpeculativeConfig
from foredraft.drafters.context import DrafterContext
from foredraft.kv_cache import KVCache
from foredraft.sampling import PositionNoise, distribution, noise_for, top_probability
from foredraft.types import (
    ConfigError,
    Distribution,
    Draft,
    FloatArray,
    Rows,
    Sequence,
    Target,
    UnsupportedModelError,
    Verdict,
    num_agreeing,
)


@dataclass
class _State:
    """The draft model's cache of one sequence.

    It holds ``num_computed`` tokens: of the ``base`` tokens that were committed, and then of ``draft``.
    """

    num_computed: int
    base: int
    draft: list[int] = field(default_factory=list)


@dataclass
class _Job:
    """One sequence in one ``propose``: it drafts until it has ``num_wanted`` tokens."""

    seq: Sequence
    state: _State
    num_wanted: int
    noise: PositionNoise
    probs: list[Distribution] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    def result(self, with_probs: bool) -> Draft:
        """What was drafted; its probabilities only where the rule weighs them."""
        if not self.state.draft:
            return Draft()
        return Draft(tuple(self.state.draft), tuple(self.probs) if with_probs else None, confidence=tuple(self.confidence))


class DraftModelDrafter:
    """Drafts with ``target``, a small model behind the same interface as the large one.

    A ``propose`` first catches up with all tokens that its model has not computed, of all sequences together, then draws the
    first token of each draft, and runs one row per sequence for every further one.  It drafts less, or nothing, at the model's
    own context limit and when its blocks run out.

    Args:
        target: the draft model.
        kv: accounts for the blocks that ``target`` writes to; used by nothing else.
        vocab_size: of the large model; no id beyond is ever drafted.
        stream: noise that tokens are drawn with; see ``context.draws_for``.
        with_probs: report the distributions that tokens were drawn from.
        max_num_batched_tokens: rows per pass, at most.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self, target: Target, kv: KVCache, *, vocab_size: int, stream: int, with_probs: bool, max_num_batched_tokens: int = 512
    ) -> None:
        assert vocab_size >= 1 and max_num_batched_tokens >= 1, (vocab_size, max_num_batched_tokens)
        self._target = target
        self._kv = kv
        self._vocab_size = vocab_size
        self._stream = stream
        self._with_probs = with_probs
        self._max_num_rows = max_num_batched_tokens
        self._states: dict[int, _State] = {}

    def open(self, seq: Sequence) -> None:
        """Attach what the draft model's prefix cache holds of the sequence; the rest is computed at the next ``propose``."""
        self.close(seq)
        self._states[seq.seq_id] = _State(self._kv.open(seq.seq_id, seq.tokens, seq.tenant), base=len(seq.tokens))

    def propose(self, seqs: list[Sequence], num_tokens: list[int]) -> list[Draft]:
        """One draft per sequence, at most ``num_tokens[i]`` tokens."""
        jobs = [self._start(seq, num) for seq, num in zip(seqs, num_tokens, strict=True)]
        pending = [job for job in jobs if job.num_wanted]
        while pending:
            for job, logits in zip(pending, self._compute(pending), strict=True):
                self._draw(job, logits)
            pending = [job for job in pending if len(job.state.draft) < job.num_wanted]
        return [job.result(self._with_probs) for job in jobs]

    def observe(self, seq: Sequence, verdict: Verdict, hidden: FloatArray | None) -> None:
        """Roll the cache back to what was committed, and offer that to the prefix cache."""
        self._settle(seq)

    def close(self, seq: Sequence) -> None:
        """Give up the sequence's blocks."""
        if self._states.pop(seq.seq_id, None) is not None:
            self._kv.close(seq.seq_id)

    def _settle(self, seq: Sequence) -> _State:
        """Keep of the cache what agrees with ``seq.tokens``, but for one token: a pass must have a row to yield logits."""
        state = self._states[seq.seq_id]
        num_right = state.base + num_agreeing(state.draft, seq.tokens[state.base :])
        state.num_computed = max(0, min(state.num_computed, num_right, len(seq.tokens) - 1))
        if self._kv.length(seq.seq_id) != state.num_computed:
            state.num_computed = self._kv.truncate(seq.seq_id, state.num_computed)
            self._kv.commit(seq.seq_id, seq.tokens[: state.num_computed])
        state.base, state.draft = len(seq.tokens), []
        return state

    def _start(self, seq: Sequence, num_tokens: int) -> _Job:
        """Reserve blocks for as many draft tokens as there is room for; the last one of a draft is never computed."""
        state = self._settle(seq)
        num_known = len(seq.tokens)
        num_wanted = max(0, min(num_tokens, self._target.max_model_len - num_known)) if num_known else 0
        while num_wanted and not self._kv.reserve(seq.seq_id, num_known + num_wanted - 1):
            num_wanted -= 1
        return _Job(seq, state, num_wanted, noise_for(seq))

    def _compute(self, jobs: list[_Job]) -> list[FloatArray]:
        """Compute every token not computed yet, in as few passes as possible; the last logits row of each job, [draft vocab]."""
        logits: dict[int, FloatArray] = {}
        batch: list[tuple[int, Rows]] = []
        num_rows_left = self._max_num_rows
        for index, job in enumerate(jobs):
            start = job.state.num_computed
            known = [*job.seq.tokens[start:], *job.state.draft[max(0, start - len(job.seq.tokens)) :]]
            # A token that the draft model does not have is read as its last one: worse drafts, but no failure.
            known = [min(token, self._target.vocab_size - 1) for token in known]
            while known:
                chunk, known = known[:num_rows_left], known[num_rows_left:]
                batch.append((index, Rows(chunk, start, 0 if known else 1, self._kv.block_table(job.seq.seq_id))))
                start += len(chunk)
                num_rows_left -= len(chunk)
                if not num_rows_left:
                    self._forward(batch, logits)
                    batch, num_rows_left = [], self._max_num_rows
            job.state.num_computed = start
        self._forward(batch, logits)
        return [logits[index] for index in range(len(jobs))]

    def _forward(self, batch: list[tuple[int, Rows]], logits: dict[int, FloatArray]) -> None:
        if not batch:
            return
        output = self._target.forward([rows for _, rows in batch])
        for (index, rows), row_logits in zip(batch, output.logits, strict=True):
            if rows.num_logits:
                logits[index] = row_logits[-1]

    def _draw(self, job: _Job, logits: FloatArray) -> None:
        draft, position = job.state.draft, len(job.seq.tokens) + len(job.state.draft)
        try:
            dist = distribution(fit_vocabulary(logits, self._vocab_size), job.seq, draft)
        except FloatingPointError:
            # The draft model has no token that the request allows, or no finite logits; the target decides alone.
            job.num_wanted = len(draft)
            return
        token = job.noise.draw(dist, position, self._stream)
        draft.append(token)
        job.probs.append(dist)
        job.confidence.append(top_probability(logits) if len(dist.tokens) == 1 else dist.probability(token))


def fit_vocabulary(logits: FloatArray, vocab_size: int) -> FloatArray:
    """A row of draft logits cut, or filled up with -inf, to [vocab_size]."""
    if len(logits) >= vocab_size:
        return logits[:vocab_size]
    return np.concatenate([logits, np.full(vocab_size - len(logits), -np.inf, dtype=logits.dtype)])


def check_vocabularies(target_vocabulary: Mapping[str, int], draft_vocabulary: Mapping[str, int]) -> None:
    """Require that every id which both models have stands for the same token; either may have more ids at its end.

    Raises:
        UnsupportedModelError: an id differs; the message names the first one.
    """
    target_tokens = {index: token for token, index in target_vocabulary.items()}
    draft_tokens = {index: token for token, index in draft_vocabulary.items()}
    for index in sorted(target_tokens.keys() & draft_tokens.keys()):
        if target_tokens[index] != draft_tokens[index]:
            raise UnsupportedModelError(
                f"the draft model must have the target's vocabulary, but token id {index} is {target_tokens[index]!r} for the "
                f"target and {draft_tokens[index]!r} for the draft model; choose a draft model of the same family."
            )


def create(config: SpeculativeConfig, context: DrafterContext) -> DraftModelDrafter:
    """Factory for method ``draft_model``; loads the model that ``config.model`` names.

    Raises:
        ConfigError: no model is named, or none can be loaded here.
        UnsupportedModelError: the vocabularies differ.
    """
    if config.model is None:
        raise ConfigError("method 'draft_model' must have a model; add \"model\" to speculative_config.")
    if context.load_draft_model is None:
        raise ConfigError("method 'draft_model' cannot load models here; choose 'ngram' or 'suffix'.")
    draft = context.load_draft_model(config.model)
    check_vocabularies(context.vocabulary(), draft.vocabulary)
    return DraftModelDrafter(
        draft.target,
        draft.kv,
        vocab_size=context.vocab_size,
        stream=context.stream,
        with_probs=context.with_probs,
        max_num_batched_tokens=context.max_num_batched_tokens,
    )
