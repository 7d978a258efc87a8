"""Every drafter, rule and K against plain decoding, and plain decoding against its definition: T1 to T8.

Every test runs on the toy world and on the demo model.  T5's distributions are in test_exactness_distribution.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from engine_helpers import Lab, make_drafter, plain, reference, scripted
from exactness_requests import HARD, REPEATS, hard, params_for, prompt, repeating, tokens
from foredraft.sampling import token_logprobs
from foredraft.testing.toy import ScriptedDrafter
from foredraft.types import SamplingParams, TokenRules
from foredraft.verify import RULES
from worlds import (
    NAMES,
    World,
    every_drafter,
    every_drafter_and_other_rule,
    every_drafter_and_rule,
    every_rule,
    every_world,
    run_drafted,
)

every_request = pytest.mark.parametrize("request_name", HARD)


# ------------------------------------------------------------------------------------------------ the definition


@every_world
@every_request
def test_plain_decoding_follows_the_definition(world: World, request_name: str) -> None:
    request = hard(world, request_name)
    assert plain(request, world.target()) == reference(request, world.target())


@every_drafter
@every_request
def test_coupled_tokens_are_those_of_plain_decoding_for_every_k(world: World, name: str, request_name: str) -> None:
    request = hard(world, request_name)
    expected = world.expected(request)
    for k, (outcome, _) in enumerate(run_drafted(world, [(request, k) for k in range(9)], name)):
        assert outcome == expected, f"K = {k}"


@every_drafter_and_other_rule
def test_greedy_tokens_are_those_of_plain_decoding_under_the_other_rules(world: World, name: str, rule: str) -> None:
    requests = [hard(world, request_name).but(temperature=0.0) for request_name in world.choose(HARD, HARD[2:6])]
    visits = [(request, k) for request in requests for k in (1, 2, 3, 5, 8)]
    for (request, k), (outcome, _) in zip(visits, run_drafted(world, visits, name, rule), strict=True):
        assert outcome == world.expected(request), f"K = {k}"


@every_world
@pytest.mark.parametrize("name", NAMES["smollm2"])
def test_a_drafter_under_test_is_only_right_or_only_wrong(world: World, name: str) -> None:
    request = hard(world, "greedy").but(max_tokens=24)
    visits = [(request.but(temperature=temperature), 4) for temperature in (0.0, 0.8)]
    stats = [seq.stats for _, seq in run_drafted(world, visits, name)]
    assert 0 < sum(s.accepted_tokens for s in stats) < sum(s.drafted_tokens for s in stats), stats


# ------------------------------------------------------------------------------------------------ T1 to T4: ends


@every_drafter_and_rule
def test_t1_stop_string_across_draft_tokens_and_at_max_tokens(world: World, name: str, rule: str) -> None:
    request = world.request(prompt(world), params_for(rule, max_tokens=12, include_stop_str_in_output=True), seed=3)
    whole = world.expected(request)
    for stop in world.stop_words(whole.tokens):
        end = next(n for n in range(1, 12) if stop in world.text_of(whole.tokens[:n]))
        text = whole.text[: whole.text.index(stop) + len(stop)]
        endings = [request.but(stop=("zz", stop), max_tokens=max_tokens) for max_tokens in (end - 1, end, end + 1)]
        visits = [(stopping, k) for stopping in endings for k in (1, 3, 8)]
        for (stopping, _), (outcome, seq) in zip(visits, run_drafted(world, visits, name, rule), strict=True):
            assert outcome == world.expected(stopping)
            num, stops = min(end, stopping.params.max_tokens), end <= stopping.params.max_tokens
            assert outcome.text == (text if stops else world.text_of(whole.tokens[:num]))
            assert (outcome.finish_reason, outcome.stop_reason) == (("stop", stop) if stops else ("length", None))
            assert seq.num_output == seq.stats.emitted_tokens == len(seq.origins) == num


@every_drafter_and_rule
def test_t2_eos_at_every_index_of_the_accepted_run(world: World, name: str, rule: str) -> None:
    params = params_for(rule, max_tokens=12)
    request, options, answer = world.all_new(params.temperature)
    visits = []
    for token in answer:
        by_eos = replace(request.but(max_tokens=12), rules=TokenRules(frozenset({token})))
        by_id = request.but(max_tokens=12, stop_token_ids=(token,))
        visits += [(ending, k) for ending in (by_eos, by_id) for k in world.choose((1, 4, 8), (8,))]
    for (ending, _), (outcome, seq) in zip(visits, run_drafted(world, visits, name, rule, **options), strict=True):
        (token,) = ending.rules.eos_ids or ending.params.stop_token_ids
        num = answer.index(token) + 1
        assert outcome.tokens == answer[:num] and outcome.text == world.text_of(outcome.tokens)
        assert (outcome.finish_reason, outcome.stop_reason) == ("stop", token if ending.params.stop_token_ids else None)
        assert seq.num_computed <= len(seq.tokens) and seq.stats.emitted_tokens == num


@every_world
@every_rule
def test_t3_eos_on_a_rejected_row_does_not_stop(world: World, rule: str) -> None:
    eos, stop = tokens(world, 0, 7)
    params = params_for(rule, max_tokens=12, stop_token_ids=(stop,), allowed_token_ids=tokens(world, 1, 2, 3, 4, 5, 6))
    request = world.request(prompt(world), params, rules=TokenRules(frozenset({eos})))
    expected = world.expected(request)
    assert expected.finish_reason == "length"
    answer = list(request.prompt + expected.tokens)
    for wrong, at in itertools.product((eos, stop), range(6)):

        def script(tokens: list[int], num: int, wrong: int = wrong, at: int = at) -> list[int]:
            return [*answer[len(tokens) :][:at], wrong, wrong, *answer[len(tokens) + at :]][:num]

        ((outcome, seq),) = run_drafted(world, [(request, 6)], lambda target, script=script: ScriptedDrafter(script), rule)
        assert outcome == expected
        assert seq.stats.drafted_tokens > seq.stats.accepted_tokens


@every_world
@every_rule
@pytest.mark.parametrize("k", range(1, 9))
def test_t4_max_tokens_is_met_exactly(world: World, rule: str, k: int) -> None:
    visits = [(world.request(prompt(world), params_for(rule, max_tokens=num)), k) for num in (1, k, k + 1, k + 2)]
    for name in world.choose(("right", "too_many", "wrong", "draft_twin"), ("right", "wrong")):
        for (request, _), (outcome, seq) in zip(visits, run_drafted(world, visits, name, rule), strict=True):
            max_tokens = request.params.max_tokens
            assert (len(outcome.tokens), outcome.finish_reason) == (max_tokens, "length")
            assert seq.stats.emitted_tokens == max_tokens and len(seq.tokens) == seq.num_prompt + max_tokens
            if name == "right":
                assert seq.stats.target_passes == -(-max_tokens // (k + 1))


# ------------------------------------------------------------------------------------------------ T6 to T8: all options


@every_drafter
def test_t6_logprobs_are_teacher_forced_scores_despite_chunks_preemption_and_cache(world: World, name: str) -> None:
    params = SamplingParams(max_tokens=10, logprobs=3, prompt_logprobs=2, frequency_penalty=0.8, temperature=0.7)
    requests = [world.request(tokens(world, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2), params, seed=seed) for seed in (1, 2, 3)]
    answers = [request.prompt + world.expected(request).tokens for request in requests]
    for k, budget in world.choose(tuple(itertools.product((0, 1, 3, 8), (3, 5, 32))), ((0, 5), (3, 32))):
        target = world.target(num_blocks=7, block_size=4)
        lab = Lab({"drafter": make_drafter(name, target, answers)}, target=target, max_num_seqs=3, max_num_batched_tokens=budget)
        for round_number in range(2):
            seqs = [request.sequence("drafter", k, 10 * round_number + i) for i, request in enumerate(requests)]
            for seq, outcome in zip(seqs, lab.run(*seqs), strict=True):
                rows = world.scores(seq.tokens)
                scores = [token_logprobs(rows[i - 1], seq.tokens[i], 3) for i in range(seq.num_prompt, len(seq.tokens))]
                assert list(outcome.logprobs) == scores
                known = [token_logprobs(rows[i - 1], seq.tokens[i], 2) for i in range(1, seq.num_prompt)]
                assert list(outcome.prompt_logprobs) == [None, *known]
        assert lab.engine.metrics.num_preemptions > 0 or k > 0


@every_world
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("option", REPEATS)
def test_t7_options_see_the_draft_tokens_before_their_row(world: World, option: str, temperature: float) -> None:
    request = repeating(world, option, temperature)
    without = world.request(request.prompt, SamplingParams(temperature=temperature, max_tokens=40))
    expected, unaware = world.expected(request), world.expected(without)
    assert expected.tokens != unaware.tokens[: len(expected.tokens)], f"{option} changes nothing here"
    assert option != "min_tokens" or expected.finish_reason == "stop", "a draft across min_tokens meets no stop"
    # One drafter ignores the option, one honours it, one repeats a single token throughout the window.
    vocab_size = world.target().vocab_size
    scripts = [
        scripted("right", [request.prompt + unaware.tokens], vocab_size).script,
        scripted("right", [request.prompt + expected.tokens], vocab_size).script,
        *[lambda known, num, token=token: [token] * num for token in world.choose(world.ids, (expected.tokens[0], world.ids[2]))],
    ]
    for script, rule in itertools.product(scripts, world.choose(tuple(RULES), ("coupled", "rejection"))):
        if rule == "coupled" or temperature == 0.0:
            visits = [(request, k) for k in world.choose((1, 2, 4, 8), (2, 8))]
            found = run_drafted(world, visits, lambda target, script=script: ScriptedDrafter(script), rule)
            assert [outcome for outcome, _ in found] == [expected] * len(visits)


@every_drafter
def test_t8_mates_chunks_blocks_and_cache_change_nothing(world: World, name: str) -> None:
    shared = tokens(world, 1, 2, 3, 4, 5, 6, 7, 0)
    plain_requests = [hard(world, request_name) for request_name in HARD]
    requests = [replace(request, prompt=shared + request.prompt) for request in plain_requests]
    wanted = [world.expected(request) for request in requests]
    answers = [request.prompt + outcome.tokens for request, outcome in zip(requests, wanted, strict=True)]
    houses = tuple(itertools.product((True, False), ((64, 4), (40, 1), (13, 3)), ((1, 1), (3, 4), (9, 200))))
    few = ((True, (13, 3), (2, 9)), (False, (64, 4), (9, 200)))
    for caching, (num_blocks, block_size), (max_num_seqs, budget) in world.choose(houses, few):
        target = world.target(num_blocks, block_size)
        mixed = {"drafter": make_drafter(name, target, answers), "other": make_drafter("ngram", target, answers)}
        lab = Lab(mixed, target=target, prefix_caching=caching, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        seqs = [request.sequence(("drafter", "other", "none")[i % 3], i, i) for i, request in enumerate(requests)]
        assert lab.run(*seqs) == wanted, (caching, num_blocks, block_size, max_num_seqs, budget)
        assert caching == (lab.kv.num_hit_tokens > 0)


# Suffix statistics are shared between requests on purpose, so its drafts depend on mates, and these rules' tokens on drafts.
@every_world
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", ["ngram", "draft_model", "draft_twin"])
def test_t8_sampled_tokens_of_the_other_rules_do_not_depend_on_mates(world: World, name: str, rule: str) -> None:
    params = SamplingParams(max_tokens=world.length)
    requests = [world.request(prompt(world)[: 2 + i], params, seed=i) for i in range(4)]
    alone = [run_drafted(world, [(request, 3)], name, rule)[0][0] for request in requests]
    target = world.target()
    seqs = [request.sequence("drafter", 3, i) for i, request in enumerate(requests)]
    assert Lab({"drafter": make_drafter(name, target, [], rule)}, rule, target=target).run(*seqs) == alone
