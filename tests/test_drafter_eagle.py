"""The drafter by a head: what it reads of states and cache, and when it drafts.  The head is a toy that notices a wrong cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine_helpers import Lab, OnCache, Outcome, Request, plain
from foredraft.drafters.eagle import MAX_WAITING, EagleDrafter, scratch_blocks
from foredraft.kv_cache import KVCache
from foredraft.testing.toy import TableTarget
from foredraft.types import SamplingParams, Sequence
from toy_head import ToyHead, toy_eagle

PROMPT = (1, 2, 3, 4, 0, 6, 7, 1, 2)


def request(prompt: tuple[int, ...] = PROMPT, max_tokens: int = 20, **params: Any) -> Request:
    return Request(prompt, SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens} | params))


def lab_with(target: TableTarget | None = None, **options: Any) -> Lab:
    on = target or TableTarget()
    return Lab({"head": OnCache(lambda kv: toy_eagle(on, kv, **options))}, target=on)


def drafter_of(lab: Lab) -> EagleDrafter:
    found = lab.drafters["head"]
    assert isinstance(found, EagleDrafter)
    return found


def rows_read(lab: Lab) -> int:
    runner = drafter_of(lab)._runner
    assert isinstance(runner, ToyHead)
    return runner.num_rows


def run(lab: Lab, asked: Request, k: int = 3, seq_id: int = 0) -> Sequence:
    seq = asked.sequence("head", k, seq_id)
    (outcome,) = lab.run(seq)
    assert outcome == plain(asked, TableTarget(num_blocks=lab.kv.num_blocks, max_model_len=lab.target.max_model_len))
    return seq


def test_drafts_are_often_right_from_the_second_pass_on() -> None:
    lab = lab_with()
    seq = run(lab, request())
    assert seq.stats.accepted_tokens > seq.stats.drafted_tokens / 3
    # The first pass has no states to draft from.
    assert seq.origins[0] == "plain" and seq.stats.drafted_per_position[0] == seq.stats.target_passes - 1


def test_a_cached_prefix_brings_the_heads_keys_with_it() -> None:
    lab = lab_with()
    first = run(lab, request())
    before = rows_read(lab)
    longer = tuple(first.tokens)
    seq = run(lab, request(longer, max_tokens=1), k=2, seq_id=1)
    assert seq.num_cached == 28
    # One token is emitted, so none is drafted, and nothing is read.
    assert rows_read(lab) == before
    seq = run(lab, request(longer, max_tokens=12), seq_id=2)
    state_free = first.stats.drafted_tokens
    assert seq.num_cached == 28 and seq.stats.accepted_tokens and state_free


def test_the_head_attends_to_all_of_a_cached_prefix() -> None:
    seen: list[int] = []
    lab = lab_with()
    runner = drafter_of(lab)._runner
    original = runner.run

    def recording(rows: Any) -> Any:
        seen.extend(rows.first_keys.tolist())
        return original(rows)

    first = run(lab, request())
    runner.run = recording  # type: ignore[method-assign]
    seq = run(lab, request((*first.tokens, 3), max_tokens=8), seq_id=1)
    assert seq.num_cached == 28 and set(seen) == {1}


@pytest.mark.parametrize("length", [8, 9, 10, 11, 12])
def test_blocks_that_end_anywhere_are_found_filled(length: int) -> None:
    """The feature of a block's last token is known only with the state of that token, whatever ends there."""
    lab = lab_with()
    first = run(lab, request(PROMPT[:5], max_tokens=length), k=2)
    drafter = drafter_of(lab)
    seq = request((*first.tokens, 1, 2), max_tokens=6).sequence("head", 3, 1)
    lab.engine.add(seq)
    lab.step()
    assert seq.num_cached == (len(first.tokens) - 1) // 4 * 4
    assert drafter._states[1].first_key == 1
    lab.finish()


def test_blocks_of_a_sequence_without_the_head_are_not_taken_for_filled() -> None:
    lab = lab_with()
    (first,) = lab.run(request().sequence())
    seq = request((*PROMPT, *first.tokens), max_tokens=8).sequence("head", 3, 1)
    lab.engine.add(seq)
    lab.step()
    assert seq.num_cached == 28 and drafter_of(lab)._states[1].first_key == 29
    lab.finish()
    assert seq.stats.drafted_tokens and Outcome.of(seq) == plain(request((*PROMPT, *first.tokens), max_tokens=8))


def test_blocks_that_were_handed_out_again_are_not_taken_for_filled() -> None:
    target = TableTarget(num_blocks=12)
    lab = lab_with(target)
    run(lab, request())
    others = [request((7, 6, 5, n), max_tokens=36).sequence("none", 0, 10 + n) for n in range(4)]
    for other in others:
        lab.run(other)
    assert not any(drafter_of(lab).blocks.is_filled(block) for block in range(12))
    run(lab, request(), seq_id=1)


def test_k_of_zero_for_long_keeps_few_states_and_reads_none() -> None:
    target = TableTarget(num_blocks=256, max_model_len=512)
    lab = lab_with(target, max_positions=512)
    asked = request(max_tokens=400)
    seq = asked.sequence("head", 3)
    lab.engine.add(seq)
    lab.engine.controller.plan = _never(lab.engine.controller.plan)  # type: ignore[method-assign]
    for _ in range(380):
        lab.step()
        assert drafter_of(lab)._states[0].num_waiting <= MAX_WAITING
    assert rows_read(lab) == 0
    del lab.engine.controller.plan
    lab.finish()
    assert Outcome.of(seq) == plain(asked, TableTarget(num_blocks=256, max_model_len=512))
    assert seq.stats.drafted_tokens and drafter_of(lab)._states == {}


def test_a_prompt_is_read_although_nobody_asks_or_kept_for_ever() -> None:
    target = TableTarget(num_blocks=256, max_model_len=512)
    lab = lab_with(target, max_positions=512)
    lab.engine.controller.plan = _never(lab.engine.controller.plan)  # type: ignore[method-assign]
    asked = request(tuple(i * i % 7 for i in range(3 * MAX_WAITING)), max_tokens=30)
    seq = asked.sequence("head", 3)
    lab.engine.add(seq)
    while seq.num_output < 3:
        lab.step()
    assert rows_read(lab) == 0
    assert drafter_of(lab)._states[0].num_waiting <= MAX_WAITING
    del lab.engine.controller.plan
    lab.finish()
    assert Outcome.of(seq) == plain(asked, TableTarget(num_blocks=256, max_model_len=512))
    assert seq.stats.drafted_tokens and 0 < rows_read(lab) < 2 * MAX_WAITING


def test_a_head_that_is_asked_forgets_what_waits() -> None:
    """Once drafts are asked for in every step, the whole of a prompt is read, and all that comes."""
    target = TableTarget(num_blocks=256, max_model_len=512)
    lab = lab_with(target, max_positions=512)
    run(lab, request(max_tokens=60))
    before = rows_read(lab)
    run(lab, request(tuple(i * i % 7 for i in range(3 * MAX_WAITING)), max_tokens=10), seq_id=1)
    assert rows_read(lab) - before >= 3 * MAX_WAITING


def _never(plan: Any) -> Any:
    """A controller's plan that asks nobody."""

    def planned(ready: Any, limits: Any, *others: Any) -> Any:
        return plan(ready, [0] * len(limits), *others)

    return planned


def test_a_long_prompt_is_read_as_it_comes() -> None:
    target = TableTarget(num_blocks=256, max_model_len=512)
    lab = lab_with(target, max_positions=512)
    prompt = tuple(i * i % 7 for i in range(3 * MAX_WAITING))
    seq = run(lab, request(prompt, max_tokens=10))
    assert seq.stats.accepted_tokens


def test_beyond_the_heads_context_only_that_request_stops_drafting() -> None:
    lab = lab_with(max_positions=24)
    long, short = request(max_tokens=40).sequence("head", 3, 0), request(PROMPT[:3], max_tokens=12).sequence("head", 3, 1)
    outcomes = lab.run(long, short)
    assert outcomes == [plain(request(max_tokens=40)), plain(request(PROMPT[:3], max_tokens=12))]
    assert short.stats.drafted_tokens
    num_behind = len(long.tokens) - 24
    assert long.origins[-num_behind:].count("plain") == num_behind


def test_without_room_behind_the_blocks_drafts_are_shorter() -> None:
    lab = lab_with(num_scratch=1)
    seqs = [request(PROMPT[: 3 + i], max_tokens=16).sequence("head", 8, i) for i in range(4)]
    assert lab.run(*seqs) == [plain(request(PROMPT[: 3 + i], max_tokens=16)) for i in range(4)]
    assert all(seq.stats.accepted_tokens for seq in seqs)


def test_a_preempted_sequence_goes_on_drafting() -> None:
    target = TableTarget(num_blocks=14)
    lab = lab_with(target)
    seqs = [request((*PROMPT, i), max_tokens=24).sequence("head", 3, i) for i in range(3)]
    outcomes = lab.run(*seqs)
    assert lab.engine.metrics.num_preemptions
    assert outcomes == [plain(request((*PROMPT, i), max_tokens=24)) for i in range(3)]


def test_cancelling_leaves_nothing_behind() -> None:
    lab = lab_with()
    seqs = [request((*PROMPT, i), max_tokens=24).sequence("head", 3, i) for i in range(2)]
    for seq in seqs:
        lab.engine.add(seq)
    for _ in range(4):
        lab.step()
    lab.engine.cancel(seqs[0])
    lab.finish()
    assert drafter_of(lab)._states == {}
    assert Outcome.of(seqs[1]) == plain(request((*PROMPT, 1), max_tokens=24))


def test_asked_twice_it_says_the_same() -> None:
    lab = lab_with()
    seq = request().sequence("head", 3)
    lab.engine.add(seq)
    lab.step()
    drafter = drafter_of(lab)
    assert lab.kv.reserve(0, len(seq.tokens))
    first = drafter.propose([seq], [3])
    assert first == drafter.propose([seq], [3]) and len(first[0].tokens) == 3
    assert drafter.propose([seq], [1])[0].tokens == first[0].tokens[:1]


@pytest.mark.parametrize(
    "params", [{"temperature": 0.9}, {"logit_bias": {3: 4.0}}, {"min_tokens": 5}, {"top_k": 2, "temperature": 1.2}]
)
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_drafts_follow_the_requests_own_distribution(params: dict[str, Any], rule: str) -> None:
    target = TableTarget()
    lab = Lab({"head": OnCache(lambda kv: toy_eagle(target, kv, rule))}, rule, target=target)
    seq = request(**params).sequence("head", 3)
    lab.engine.add(seq)
    lab.step()
    drafter = drafter_of(lab)
    lab.kv.reserve(0, len(seq.tokens))
    (draft,) = drafter.propose([seq], [3])
    assert (draft.probs is None) == (rule == "coupled")
    assert draft.confidence is not None and all(0 < chance <= 1 for chance in draft.confidence)
    assert all(token % 6 != 5 for token in draft.tokens)
    if draft.probs is not None:
        assert all(dist.probability(token) > 0 for dist, token in zip(draft.probs, draft.tokens, strict=True))
    lab.finish()
    assert seq.stats.accepted_tokens


def test_the_fast_way_drafts_what_the_distribution_says() -> None:
    """Greedy drafts are chained by the head itself; a bias of nothing makes each a draw."""
    drafts = []
    for params in ({}, {"logit_bias": {0: 0.0}}):
        lab = lab_with()
        seq = request(**params).sequence("head", 5)
        lab.engine.add(seq)
        for _ in range(3):
            lab.step()
        lab.kv.reserve(0, len(seq.tokens))
        drafts.append(drafter_of(lab).propose([seq], [5])[0])
    assert drafts[0].tokens == drafts[1].tokens
    assert drafts[0].confidence == pytest.approx(drafts[1].confidence, rel=1e-5)


def test_target_ids_in_any_order_are_drawn_from_the_same_distribution() -> None:
    answers = []
    for order in (slice(None), slice(None, None, -1)):
        target = TableTarget()
        lab = lab_with(target)
        drafter = drafter_of(lab)
        ids = drafter._target_ids[order].copy()
        lab.drafters["head"] = turned = EagleDrafter(
            ToyHead(target, ids, 80, 4), lab.kv, hidden_layers=(5,), target_ids=ids, vocab_size=8, max_positions=128,
            stream=0, with_probs=False,
        )  # fmt: skip
        seq = replace(request(temperature=0.8), seed=3).sequence("head", 4)
        lab.run(seq)
        answers.append((seq.stats.accepted_tokens, seq.stats.drafted_tokens))
        assert turned._is_ascending == bool(np.all(np.diff(ids) > 0))
    assert answers[0] == answers[1]


def test_room_for_drafts_is_for_all_sequences() -> None:
    assert [scratch_blocks(k, 3, 16) for k in (0, 1, 16, 17)] == [3, 3, 3, 6]


def test_a_generation_changes_when_a_block_is_handed_out() -> None:
    kv = KVCache(2, 4)
    kv.open(0, [1, 2, 3, 4, 5])
    kv.reserve(0, 5)
    before = [kv.generation(block) for block in kv.block_table(0)]
    kv.commit(0, [1, 2, 3, 4, 5])
    kv.close(0)
    assert kv.open(1, [1, 2, 3, 4, 9]) == 4 and kv.generation(kv.block_table(1)[0]) == before[0]
    kv.reserve(1, 5)
    assert kv.generation(kv.block_table(1)[1]) == before[1] + 1
