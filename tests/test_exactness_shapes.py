"""Exactness at the edges of prompts, vocabularies, contexts and caches, and over a long life: T9 to T15, on both worlds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from engine_helpers import Lab, Outcome, draft_model, make_drafter, related, twin
from exactness_requests import HARD, hard, params_for, prompt, tokens
from foredraft.drafters.ngram import NgramDrafter
from foredraft.types import RequestError, SamplingParams, TokenRules
from worlds import World, every_drafter, every_drafter_and_rule, every_rule, every_world, run_drafted

# ------------------------------------------------------------------------------------------------ T9 to T12: shapes


@every_world
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_t9_prompts_shorter_than_the_ngram(world: World, n: int) -> None:
    params = SamplingParams(max_tokens=world.length)
    with pytest.raises(RequestError, match="at least 1 token"):
        Lab({"ngram": NgramDrafter(n, n)}, target=world.target()).engine.add(world.request((), params).sequence("ngram", 4))
    lengths = sorted({1, max(1, n - 1), n, n + 1})
    prompts = [which for length in lengths for which in (tokens(world, 1, 2, 3, 4, 5, 6)[:length], world.ids[2:3] * length)]
    visits = [(world.request(which, params), k) for which in prompts for k in world.choose((1, 4, 8), (8,))]
    for min_n in {1, n}:
        found = run_drafted(world, visits, lambda target, min_n=min_n: NgramDrafter(min_n, n))
        for (request, _), (outcome, _) in zip(visits, found, strict=True):
            assert outcome == world.expected(request)


@every_world
@every_rule
@pytest.mark.parametrize("difference", [-64, -1, 0, 1, 64])
def test_t10_draft_model_with_a_padded_or_smaller_vocabulary(world: World, rule: str, difference: int) -> None:
    size = world.target(**world.wide).vocab_size
    params = params_for(rule, max_tokens=world.length)
    biased = replace(params, allowed_token_ids=(size - 3, size - 2, size - 1), logit_bias={size - 1: 2.0})
    penalised = replace(params, frequency_penalty=1.0, repetition_penalty=2.0, min_tokens=world.length)
    requests = [
        world.request((size - 1, 1, size - 2, 2, 3), params),
        world.request((size - 1, 1), biased),
        world.request((size - 1, 1), penalised, rules=TokenRules(frozenset({size - 1, 5}))),
    ]
    visits = [(request, k) for request in requests for k in world.choose((1, 3, 8), (8,))]
    found = run_drafted(
        world,
        visits,
        lambda target: draft_model(related(target, vocab_size=size + difference), target, rule),
        rule,
        **world.wide,
    )
    for (request, _), (outcome, _) in zip(visits, found, strict=True):
        assert outcome == world.expected(request, **world.wide)
    # A draft model that lacks most of a small vocabulary is never right.
    assert difference == -64 or sum(seq.stats.accepted_tokens for _, seq in found) > 0


@every_drafter_and_rule
def test_t11_context_limit_reached_in_a_draft(world: World, name: str, rule: str) -> None:
    long = tokens(world, 1, 2, 3, 4, 5) * 3
    requests = [world.request(long[:num], params_for(rule, max_tokens=100)) for num in (1, 4, 9, 14, 15)]
    visits = [(request, k) for request in requests for k in world.choose((1, 3, 8), (3, 8))]
    for (request, _), (outcome, seq) in zip(visits, run_drafted(world, visits, name, rule, max_model_len=16), strict=True):
        assert outcome == world.expected(request, max_model_len=16)
        assert (len(seq.tokens), outcome.finish_reason) == (16, "length")


@every_world
@every_rule
@pytest.mark.parametrize("draft_len", [1, 2, 7, 12, 30])
def test_t11_draft_model_with_a_shorter_context_or_too_few_blocks(world: World, rule: str, draft_len: int) -> None:
    requests = [world.request(prompt(world), params_for(rule, max_tokens=world.length), seed=seed) for seed in range(3)]
    wanted = [world.expected(request) for request in requests]
    for num_blocks in world.choose((40, 3, 1), (40, 3)):
        target = world.target()
        draft = twin(target, num_blocks, 4, max_model_len=draft_len)
        seqs = [request.sequence("drafter", 4, i) for i, request in enumerate(requests)]
        assert Lab({"drafter": draft_model(draft, target, rule)}, rule, target=target).run(*seqs) == wanted


@every_drafter_and_rule
def test_t12_k_may_change_at_every_step(world: World, name: str, rule: str) -> None:
    params = params_for(rule, max_tokens=25)
    requests = [world.request(prompt(world)[:length], params, seed=length) for length in (3, 6)]
    wanted = [world.expected(request) for request in requests]
    answers = [request.prompt + outcome.tokens for request, outcome in zip(requests, wanted, strict=True)]
    plans = ([8, 1, 0, 4], [0, 0, 0, 0, 0, 8], [0, 3], [3, 0, 0])
    for ks in world.choose(plans, plans[:2]):
        target = world.target()
        lab = Lab({"drafter": make_drafter(name, target, answers, rule)}, rule, target=target)
        seqs = [request.sequence("drafter", 1, i) for i, request in enumerate(requests)]
        for seq in seqs:
            lab.engine.add(seq)
        plan = itertools.cycle(ks)
        while lab.engine.has_work:
            for seq in seqs:
                seq.num_speculative_tokens = next(plan)
            lab.step()
        lab.finish()
        assert [Outcome.of(seq) for seq in seqs] == wanted
        if name in ("wrong_at_2", "right"):
            assert max(len(seq.stats.drafted_per_position) for seq in seqs) == max(ks)


# ------------------------------------------------------------------------------------------------ T13 to T15: a long life


@every_drafter_and_rule
def test_t13_blocks_of_cancelled_and_preempted_requests_are_clean(world: World, name: str, rule: str) -> None:
    params = params_for(rule, max_tokens=14, logprobs=1)
    requests = [world.request((*prompt(world), world.ids[i]), params, seed=i) for i in range(6)]
    wanted = [world.expected(request) for request in requests]
    answers = [request.prompt + outcome.tokens for request, outcome in zip(requests, wanted, strict=True)]
    for k, steps_before_cancel in world.choose(tuple(itertools.product((0, 2, 8), (0, 1, 2, 4))), ((3, 2),)):
        target = world.target(num_blocks=8, block_size=3)
        lab = Lab({"drafter": make_drafter(name, target, answers, rule)}, rule, target=target)
        seqs = [request.sequence("drafter", k, i) for i, request in enumerate(requests)]
        for seq in seqs:
            lab.engine.add(seq)
        for _ in range(steps_before_cancel):
            lab.step()
        cancelled = [seq for seq in (seqs[0], seqs[2], seqs[5]) if seq.finish_reason is None]
        for seq in cancelled:
            lab.engine.cancel(seq)
            lab.engine.cancel(seq)
            lab.kv.check_integrity()
        lab.finish()
        for seq, outcome in zip(seqs, wanted, strict=True):
            if seq in cancelled:
                assert seq.finish_reason == "abort" and tuple(seq.tokens[seq.num_prompt :]) == outcome.tokens[: seq.num_output]
            else:
                assert Outcome.of(seq) == outcome
        assert lab.engine.metrics.num_preemptions > 0
        again = [request.sequence("drafter", k, 10 + i) for i, request in enumerate(requests)]
        assert lab.run(*again) == wanted


@every_world
def test_t13_a_block_of_the_same_tokens_behind_another_prefix_is_taken_for_its_own(world: World) -> None:
    one, other, end = tokens(world, 1, 2, 3, 4), tokens(world, 5, 6, 7, 3), tokens(world, 1)
    params = SamplingParams(max_tokens=8, logprobs=1)
    requests = [world.request(which + end, params) for which in (one + other, other + one, one + one, one + other)]
    wanted = [world.expected(request) for request in requests]
    lab = Lab({"ngram": NgramDrafter(1, 3)}, target=world.target(block_size=4))
    assert [lab.run(request.sequence("ngram", 3, i))[0] for i, request in enumerate(requests)] == wanted
    # The first block of the third request, and both of the fourth.
    assert lab.kv.num_hit_tokens == 3 * 4


@every_world
@every_rule
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_t14_draft_model_equal_to_the_target_is_always_right(world: World, rule: str, temperature: float) -> None:
    num = world.choose(30, 20)
    params = SamplingParams(temperature=temperature, top_p=0.95, presence_penalty=0.3, max_tokens=num)
    ks = range(1, 9)
    found = run_drafted(world, [(world.request(prompt(world), params), k) for k in ks], "draft_twin", rule)
    for k, (_, seq) in zip(ks, found, strict=True):
        assert seq.stats.accepted_tokens == seq.stats.drafted_tokens > 0
        assert seq.stats.target_passes == -(-num // (k + 1))
        assert set(seq.origins) <= {"accepted", "bonus", "plain"}


@every_drafter
def test_t15_the_second_identical_request_behaves_as_the_first(world: World, name: str) -> None:
    for request_name, k in itertools.product(world.choose(HARD, ("truncated", "explained")), world.choose((1, 4), (4,))):
        request = hard(world, request_name)
        expected = world.expected(request)
        target = world.target()
        lab = Lab({"drafter": make_drafter(name, target, [request.prompt + expected.tokens])}, target=target)
        for seq_id in (0, 1, 2, 2):
            assert lab.run(request.sequence("drafter", k, seq_id)) == [expected]
