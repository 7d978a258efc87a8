from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.config import SpeculativeConfig
from foredraft.drafters.context import DrafterContext, DraftModel, draws_for
from foredraft.drafters.draft_model import DraftModelDrafter, check_vocabularies, create, fit_vocabulary
from foredraft.sampling import STREAM_DRAFT, STREAM_TARGET, distribution, noise_for
from foredraft.testing.toy import TableTarget
from foredraft.types import (
    ConfigError,
    Draft,
    FloatArray,
    PassOutput,
    Rows,
    SamplingParams,
    Sequence,
    UnsupportedModelError,
    Verdict,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=100)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5, max_tokens=100)


class Recorder(TableTarget):
    """A table target that notes how many rows each pass has, and how many sequences."""

    def __init__(self, *args: int, **options: int) -> None:
        super().__init__(*args, **options)
        self.rows: list[int] = []
        self.seqs: list[int] = []

    def forward(self, batch: list[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        self.rows.append(sum(len(rows.tokens) for rows in batch))
        self.seqs.append(len(batch))
        return super().forward(batch, taps)


class Padded(TableTarget):
    """The same table with ``extra`` more ids, which are the likeliest of all, or fewer."""

    def __init__(self, extra: int, favourite: float = 50.0) -> None:
        super().__init__()
        self.extra = extra
        self.favourite = favourite
        self.vocab_size += min(extra, 0)

    def row(self, context: list[int]) -> FloatArray:
        self.vocab_size, actual = 8, self.vocab_size
        row = super().row(context)
        self.vocab_size = actual
        return np.append(row, np.full(self.extra, self.favourite, np.float32)) if self.extra >= 0 else row[: self.extra]

    def forward(self, batch: list[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        slots = [self._slots_of(rows) for rows in batch]
        logits = []
        for rows, places in zip(batch, slots, strict=True):
            assert all(0 <= token < 8 + self.extra for token in rows.tokens), rows.tokens
            self._slots[places[rows.start :]] = rows.tokens
            table = [
                self.row([int(t) for t in self._slots[places[:end]]])
                for end in range(len(places) + 1 - rows.num_logits, len(places) + 1)
            ]
            logits.append(np.array(table))
        return PassOutput(logits)


def make(
    model: TableTarget, stream: int = STREAM_TARGET, with_probs: bool = False, num_rows: int = 512, prefix_caching: bool = True
) -> DraftModelDrafter:
    kv = model.kv_cache(prefix_caching)
    return DraftModelDrafter(model, kv, vocab_size=8, stream=stream, with_probs=with_probs, max_num_batched_tokens=num_rows)


def sequence(tokens: list[int], params: SamplingParams = GREEDY, seq_id: int = 0, seed: int = 5, tenant: str = "") -> Sequence:
    return Sequence(seq_id, list(tokens), len(tokens), params, seed=seed, tenant=tenant)


def plain(model: TableTarget, seq: Sequence, num_tokens: int) -> list[int]:
    """What the model alone says next, recomputed from the whole context each time."""
    copy = sequence(seq.tokens, seq.params, seed=seq.seed)
    copy.num_prompt = seq.num_prompt
    for _ in range(num_tokens):
        dist = distribution(model.row(copy.tokens), copy)
        copy.tokens.append(noise_for(copy).draw(dist, len(copy.tokens), STREAM_TARGET))
    return copy.tokens[len(seq.tokens) :]


def commit(drafter: DraftModelDrafter, seq: Sequence, tokens: list[int], num_accepted: int) -> None:
    seq.tokens.extend(tokens)
    drafter.observe(seq, Verdict(tuple(tokens), num_accepted), None)
    drafter._kv.check_integrity()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 7])
def test_a_draft_model_equal_to_the_target_is_always_right(params: SamplingParams, num_tokens: int) -> None:
    model = TableTarget(seed=3)
    drafter, seq = make(model), sequence([1, 2, 3, 4, 5], params)
    drafter.open(seq)
    for _ in range(6):
        (draft,) = drafter.propose([seq], [num_tokens])
        expected = plain(model, seq, num_tokens + 1)
        assert draft.tokens == tuple(expected[:-1]) and draft.probs is None
        commit(drafter, seq, expected, num_tokens)


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_any_course_of_events_leaves_the_draft_that_a_fresh_start_makes(data: st.DataObject) -> None:
    """Different K, rejections, passes without a draft, preemption, shared prefixes, chunks: none may show."""
    model = TableTarget(num_blocks=100, seed=1)
    drafter = make(model, num_rows=data.draw(st.sampled_from([3, 7, 512])), prefix_caching=data.draw(st.booleans()))
    seqs = [sequence([1, 2, 3, 4, 5, 6, 7, 0, 1][: 9 - i], SAMPLED, seq_id=i, tenant="ab"[i % 2]) for i in range(3)]
    for seq in seqs:
        drafter.open(seq)
    for _ in range(data.draw(st.integers(1, 8))):
        chosen = [seq for seq in seqs if data.draw(st.booleans())]
        wanted = [data.draw(st.integers(1, 5)) for _ in chosen]
        drafts = drafter.propose(chosen, wanted)
        for seq, num, draft in zip(chosen, wanted, drafts, strict=True):
            assert list(draft.tokens) == plain(model, seq, num)
        for seq in seqs:
            draft = drafts[chosen.index(seq)] if seq in chosen else Draft()
            num_accepted = data.draw(st.integers(0, len(draft.tokens)))
            own = data.draw(st.integers(0, 7))
            commit(drafter, seq, [*draft.tokens[:num_accepted], own], num_accepted)
        victim = data.draw(st.sampled_from([*seqs, None]))
        if victim is not None:
            drafter.close(victim)
            drafter.open(victim)


def test_a_pass_that_only_filled_the_cache_changes_nothing() -> None:
    model = Recorder()
    drafter, seq = make(model), sequence([1, 2, 3, 4])
    drafter.open(seq)
    drafter.observe(seq, Verdict(), None)
    first = drafter.propose([seq], [3])
    drafter.observe(seq, Verdict(), None)
    assert drafter.propose([seq], [3]) == first


def test_sequences_that_waited_catch_up_in_one_pass_with_different_numbers_of_tokens() -> None:
    model = Recorder()
    drafter = make(model)
    seqs = [sequence([1 + i, 2, 3], seq_id=i) for i in range(3)]
    for seq in seqs:
        drafter.open(seq)
        for token in (4, 5, 6):
            commit(drafter, seq, [token], 0)
    drafts = drafter.propose(seqs, [1, 3, 2])
    assert [len(draft.tokens) for draft in drafts] == [1, 3, 2]
    assert (model.rows, model.seqs) == ([18, 2, 1], [3, 2, 1])


def test_no_pass_has_more_rows_than_allowed() -> None:
    model = Recorder()
    drafter = make(model, num_rows=5)
    seqs = [sequence([1, 2, 3, 4, 5, 6, 7], seq_id=i) for i in range(2)]
    for seq in seqs:
        drafter.open(seq)
    drafts = drafter.propose(seqs, [2, 2])
    assert model.rows == [5, 5, 4, 2]
    assert [list(draft.tokens) for draft in drafts] == [plain(model, seq, 2) for seq in seqs]


def test_a_second_request_computes_only_what_the_prefix_cache_lacks() -> None:
    model = Recorder()
    drafter = make(model)
    for seq_id in range(2):
        seq = sequence([1, 2, 3, 4, 5, 6, 7, 0, 1], seq_id=seq_id)
        drafter.open(seq)
        drafter.propose([seq], [1])
        drafter.observe(seq, Verdict(), None)
        drafter.close(seq)
    assert model.rows == [9, 1]


# ------------------------------------------------------------------------------------------------ limits


def test_drafting_ends_at_the_context_limit_of_the_draft_model() -> None:
    model = TableTarget(max_model_len=8)
    drafter, seq = make(model), sequence([1, 2, 3, 4, 5])
    drafter.open(seq)
    assert len(drafter.propose([seq], [6])[0].tokens) == 3
    commit(drafter, seq, [1, 2, 3], 0)
    assert drafter.propose([seq], [6]) == [Draft()]
    commit(drafter, seq, [4], 0)
    assert drafter.propose([seq], [6]) == [Draft()]


def test_without_blocks_there_is_no_draft_and_no_failure() -> None:
    model = TableTarget(num_blocks=3, block_size=4)
    drafter = make(model, prefix_caching=False)
    first, second = sequence([1, 2, 3, 4, 5, 6], seq_id=0), sequence([1, 2, 3, 4, 5, 6], seq_id=1)
    drafter.open(first)
    drafter.open(second)
    drafts = drafter.propose([first, second], [3, 3])
    assert [len(draft.tokens) for draft in drafts] == [3, 0]
    drafter._kv.check_integrity()
    drafter.close(first)
    assert list(drafter.propose([second], [3])[0].tokens) == plain(model, second, 3)


def test_with_few_blocks_the_draft_is_shorter() -> None:
    model = TableTarget(num_blocks=2, block_size=4)
    drafter, seq = make(model), sequence([1, 2, 3, 4, 5, 6])
    drafter.open(seq)
    # Eight slots: six tokens and two draft tokens; the third draft token needs none.
    assert len(drafter.propose([seq], [8])[0].tokens) == 3


def test_every_block_comes_back_at_close() -> None:
    model = TableTarget(num_blocks=4)
    drafter, seq = make(model), sequence([1, 2, 3, 4, 5])
    drafter.open(seq)
    drafter.propose([seq], [4])
    drafter.close(seq)
    drafter.close(seq)
    drafter._kv.check_integrity()
    assert drafter._kv.num_available == 4


# ------------------------------------------------------------------------------------------------ vocabularies


@pytest.mark.parametrize("extra", [0, 1, 64])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_padding_of_the_draft_vocabulary_is_never_drafted(extra: int, params: SamplingParams) -> None:
    drafter, seq = make(Padded(extra)), sequence([1, 2, 3], params)
    drafter.open(seq)
    assert list(drafter.propose([seq], [5])[0].tokens) == plain(TableTarget(), seq, 5)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_ids_that_the_draft_model_lacks_are_read_but_not_drafted(params: SamplingParams) -> None:
    drafter, seq = make(Padded(-2), with_probs=True), sequence([7, 6, 3, 7], params)
    drafter.open(seq)
    draft = drafter.propose([seq], [5])[0]
    assert len(draft.tokens) == 5 and max(draft.tokens) < 6
    assert all(dist.dense(8)[6:].sum() == 0.0 for dist in draft.probs or ())


def test_a_request_that_allows_only_ids_the_draft_model_lacks_gets_no_draft() -> None:
    params = SamplingParams(temperature=1.0, allowed_token_ids=(7,), max_tokens=9)
    drafter, seq = make(Padded(-2)), sequence([1, 2, 3], params)
    drafter.open(seq)
    for _ in range(2):
        assert drafter.propose([seq], [3]) == [Draft()]
        commit(drafter, seq, [7], 0)


def test_logits_are_cut_or_filled_up() -> None:
    row = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    assert fit_vocabulary(row, 2).tolist() == [1.0, 2.0]
    assert fit_vocabulary(row, 3) is not None
    assert fit_vocabulary(row, 5).tolist() == [1.0, 2.0, 3.0, -np.inf, -np.inf]
    assert fit_vocabulary(row, 5).dtype == np.float32


def test_a_longer_tail_is_no_difference_but_another_token_is() -> None:
    target = {"a": 0, "b": 1, "c": 2, "d": 3}
    check_vocabularies(target, {"a": 0, "b": 1, "c": 2})
    check_vocabularies({}, target)
    with pytest.raises(UnsupportedModelError, match=r"token id 1 is 'b' for the target and 'x'"):
        check_vocabularies(target, {"a": 0, "x": 1, "y": 2})


# ------------------------------------------------------------------------------------------------ streams and probabilities


def test_probs_are_the_distributions_drawn_from_with_noise_of_their_own() -> None:
    model = TableTarget(seed=2)
    stream, with_probs = draws_for("rejection")
    drafter, seq = make(model, stream, with_probs), sequence([1, 2, 3], SAMPLED)
    drafter.open(seq)
    draft = drafter.propose([seq], [4])[0]
    assert draft.probs is not None and len(draft.probs) == 4
    noise = noise_for(seq)
    for i, dist in enumerate(draft.probs):
        expected = distribution(model.row([*seq.tokens, *draft.tokens[:i]]), seq, draft.tokens[:i])
        np.testing.assert_array_equal(dist.tokens, expected.tokens)
        np.testing.assert_array_equal(dist.log_probs, expected.log_probs)
        assert draft.tokens[i] == noise.draw(dist, len(seq.tokens) + i, STREAM_DRAFT)


def test_only_the_coupled_rule_shares_noise() -> None:
    assert draws_for("coupled") == (STREAM_TARGET, False)
    assert draws_for("rejection") == draws_for("block") == (STREAM_DRAFT, True)
    with pytest.raises(ConfigError, match="did you mean 'coupled'"):
        draws_for("couplet")


# ------------------------------------------------------------------------------------------------ factory


def test_the_factory_loads_the_named_model_and_compares_vocabularies() -> None:
    model, asked = TableTarget(), []

    def load(name: str) -> DraftModel:
        asked.append(name)
        return DraftModel(model, model.kv_cache(), {"a": 0})

    config = SpeculativeConfig(method="draft_model", model="small")
    context = DrafterContext(vocab_size=8, max_model_len=128, vocabulary=lambda: {"a": 0, "b": 1}, load_draft_model=load)
    drafter, seq = create(config, context), sequence([1, 2, 3])
    drafter.open(seq)
    assert list(drafter.propose([seq], [3])[0].tokens) == plain(model, seq, 3)
    assert asked == ["small"]
    other = DrafterContext(vocab_size=8, max_model_len=128, vocabulary=lambda: {"b": 0}, load_draft_model=load)
    with pytest.raises(UnsupportedModelError, match="token id 0"):
        create(config, other)


def test_a_draft_model_without_a_name_or_a_loader_is_refused() -> None:
    context = DrafterContext(vocab_size=8, max_model_len=128)
    with pytest.raises(ConfigError, match="must have a model"):
        create(SpeculativeConfig(method="draft_model"), context)
    with pytest.raises(ConfigError, match="cannot load models"):
        create(SpeculativeConfig(method="draft_model", model="small"), context)
