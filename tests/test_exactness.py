"""Every drafter, rule and K against plain decoding, and plain decoding against its definition."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest

from engine_helpers import (
    DRAFTERS,
    Lab,
    Outcome,
    Request,
    Tokens,
    draft_model,
    make_drafter,
    plain,
    reference,
    related,
    scripted,
    text_of,
)
from foredraft import kv_cache
from foredraft.config import SpeculativeConfig
from foredraft.drafters import registry
from foredraft.drafters.context import DrafterContext
from foredraft.drafters.ngram import NgramDrafter
from foredraft.sampling import Chance, token_logprobs
from foredraft.testing.toy import ScriptedDrafter, TableTarget
from foredraft.types import (
    ConfigError,
    Draft,
    PassOutput,
    RequestError,
    Rows,
    SamplingParams,
    Sequence,
    TokenRules,
    Verdict,
)
from foredraft.verify import RULES, RowDistribution, coupled

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
SAMPLED = SamplingParams(max_tokens=20)
PROMPT = (1, 2, 3, 4, 1, 2)
every_drafter = pytest.mark.parametrize("name", DRAFTERS)
every_rule = pytest.mark.parametrize("rule", RULES)


def speculative(request: Request, name: str, k: int, rule: str = "coupled", **options: int) -> tuple[Outcome, Sequence]:
    """The request alone, drafted for by ``name``, in a fresh engine."""
    target = TableTarget(**options)
    # What the scripted drafters know goes on where the request stops.
    endless = replace(request, rules=TokenRules(bad_words=request.rules.bad_words)).but(
        stop=(), stop_token_ids=(), ignore_eos=True, max_tokens=40
    )
    answer = request.prompt + reference(endless.but(min_tokens=request.params.min_tokens), target).tokens
    seq = request.sequence("drafter", k)
    return Lab({"drafter": make_drafter(name, target, [answer], rule)}, rule, target=target).run(seq)[0], seq


def params_for(rule: str, **options: object) -> SamplingParams:
    """Sampled where the rule promises plain decoding's very tokens, else greedy."""
    return SamplingParams(temperature=1.0 if rule == "coupled" else 0.0, **options)


# ------------------------------------------------------------------------------------------------ the definition

HARD = {
    "greedy": Request(PROMPT, GREEDY),
    "sampled": Request(PROMPT, SAMPLED, seed=2**62 + 5, sample_index=3),
    "truncated": Request(PROMPT, SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.02, max_tokens=20, logprobs=2)),
    "penalised": Request(
        PROMPT, SamplingParams(repetition_penalty=1.6, presence_penalty=0.7, frequency_penalty=1.1, max_tokens=20, logprobs=0)
    ),
    "biased": Request(PROMPT, SamplingParams(logit_bias={3: 4.0, 5: -6.0}, allowed_token_ids=(1, 3, 5, 6), max_tokens=20)),
    "forbidding": Request(PROMPT, SAMPLED, rules=TokenRules(bad_words=((4,), (1, 2), (6, 6, 6)))),
    "late": Request(
        PROMPT, SamplingParams(min_tokens=9, max_tokens=20, stop_token_ids=(3, 4), stop=("a",)), rules=TokenRules(frozenset({6, 7}))
    ),
    # Masking all that ends the request would leave nothing: the tokens come, but do not end it before min_tokens.
    "forced": Request(
        PROMPT,
        SamplingParams(allowed_token_ids=(3, 4), min_tokens=5, max_tokens=20, stop_token_ids=(3,), stop=("e",)),
        rules=TokenRules(frozenset({4})),
    ),
    "explained": Request(PROMPT, SamplingParams(max_tokens=9, logprobs=8, prompt_logprobs=3)),
    "short": Request((5,), SAMPLED),
}


@pytest.mark.parametrize("request_name", HARD)
def test_plain_decoding_follows_the_definition(request_name: str) -> None:
    assert plain(HARD[request_name]) == reference(HARD[request_name], TableTarget())


@every_drafter
@pytest.mark.parametrize("request_name", HARD)
def test_coupled_tokens_are_those_of_plain_decoding_for_every_k(name: str, request_name: str) -> None:
    request = HARD[request_name]
    expected = reference(request, TableTarget())
    for k in range(9):
        assert speculative(request, name, k)[0] == expected, f"K = {k}"


@every_drafter
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_greedy_tokens_are_those_of_plain_decoding_under_the_other_rules(name: str, rule: str) -> None:
    for request in HARD.values():
        request = request.but(temperature=0.0)
        expected = reference(request, TableTarget())
        for k in (1, 2, 3, 5, 8):
            assert speculative(request, name, k, rule)[0] == expected, f"K = {k}"


# ------------------------------------------------------------------------------------------------ T1 to T4: ends


@every_drafter
@every_rule
def test_t1_stop_string_across_draft_tokens_and_at_max_tokens(name: str, rule: str) -> None:
    request = Request(PROMPT, params_for(rule, max_tokens=12), seed=3)
    text = plain(request).text
    for length, k in itertools.product((1, 3), (1, 3, 8)):
        word = text[6 : 6 + length]
        end = text.index(word) + length
        for max_tokens in (end - 1, end, end + 1):
            stopping = request.but(stop=("zz", word), max_tokens=max_tokens)
            outcome, seq = speculative(stopping, name, k, rule)
            assert outcome == reference(stopping, TableTarget())
            assert (outcome.text, outcome.finish_reason) == (
                text[: min(end, max_tokens)],
                "stop" if end <= max_tokens else "length",
            )
            assert outcome.stop_reason == (word if end <= max_tokens else None)
            assert seq.num_output == seq.stats.emitted_tokens == len(seq.origins) == min(end, max_tokens)


@cache
def stream_of_new_tokens(temperature: float) -> tuple[int, Tokens]:
    """A target's seed with which each of the first tokens is a new one, so that each can be the EOS in turn; and the tokens."""
    for seed in range(200):
        params = SamplingParams(temperature=temperature, max_tokens=9)
        tokens = plain(Request((1, 2, 3), params), TableTarget(vocab_size=24, seed=seed)).tokens
        if len(set(tokens)) == len(tokens):
            return seed, tokens
    raise AssertionError("no seed")


@every_drafter
@every_rule
def test_t2_eos_at_every_index_of_the_accepted_run(name: str, rule: str) -> None:
    request = Request((1, 2, 3), params_for(rule, max_tokens=12))
    seed, tokens = stream_of_new_tokens(request.params.temperature)
    for index, k in itertools.product(range(9), (1, 4, 8)):
        by_eos = replace(request, rules=TokenRules(frozenset({tokens[index]})))
        for ending, stop_reason in ((by_eos, None), (request.but(stop_token_ids=(tokens[index],)), tokens[index])):
            outcome, seq = speculative(ending, name, k, rule, vocab_size=24, seed=seed)
            assert outcome.tokens == tokens[: index + 1] and outcome.text == text_of(outcome.tokens)
            assert (outcome.finish_reason, outcome.stop_reason) == ("stop", stop_reason)
            assert seq.num_computed <= len(seq.tokens) and seq.stats.emitted_tokens == index + 1


@every_rule
def test_t3_eos_on_a_rejected_row_does_not_stop(rule: str) -> None:
    eos = 0
    request = replace(Request(PROMPT, params_for(rule, max_tokens=12)), rules=TokenRules(frozenset({eos}))).but(
        stop_token_ids=(7,), allowed_token_ids=(1, 2, 3, 4, 5, 6)
    )
    expected = plain(request)
    assert expected.finish_reason == "length"
    for wrong, at in itertools.product((eos, 7), range(6)):
        answer = list(request.prompt + expected.tokens)

        def script(tokens: list[int], num: int, wrong: int = wrong, at: int = at, answer: list[int] = answer) -> list[int]:
            return [*answer[len(tokens) :][:at], wrong, wrong, *answer[len(tokens) + at :]][:num]

        seq = request.sequence("drafter", 6)
        assert Lab({"drafter": ScriptedDrafter(script)}, rule).run(seq) == [expected]
        assert seq.stats.drafted_tokens > seq.stats.accepted_tokens


@every_rule
@pytest.mark.parametrize("k", range(1, 9))
def test_t4_max_tokens_is_met_exactly(rule: str, k: int) -> None:
    for max_tokens in (1, k, k + 1, k + 2):
        for name in ("right", "too_many", "wrong", "draft_twin"):
            request = Request(PROMPT, params_for(rule, max_tokens=max_tokens))
            outcome, seq = speculative(request, name, k, rule)
            assert (len(outcome.tokens), outcome.finish_reason) == (max_tokens, "length")
            assert seq.stats.emitted_tokens == max_tokens and len(seq.tokens) == len(PROMPT) + max_tokens
            if name == "right":
                assert seq.stats.target_passes == -(-max_tokens // (k + 1))


# ------------------------------------------------------------------------------------------------ T6 to T8: all options


@every_drafter
def test_t6_logprobs_are_teacher_forced_scores_despite_chunks_preemption_and_cache(name: str) -> None:
    target = TableTarget(num_blocks=7, block_size=4)
    params = SamplingParams(max_tokens=10, logprobs=3, prompt_logprobs=2, frequency_penalty=0.8, temperature=0.7)
    requests = [Request((1, 2, 3, 4, 5, 6, 7, 0, 1, 2), params, seed=seed) for seed in (1, 2, 3)]
    answers = [request.prompt + reference(request, target).tokens for request in requests]
    for k, budget in itertools.product((0, 1, 3, 8), (3, 5, 32)):
        lab = Lab({"drafter": make_drafter(name, target, answers)}, target=target, max_num_seqs=3, max_num_batched_tokens=budget)
        for round_number in range(2):
            seqs = [request.sequence("drafter", k, 10 * round_number + i) for i, request in enumerate(requests)]
            for seq, outcome in zip(seqs, lab.run(*seqs), strict=True):
                scores = [
                    token_logprobs(target.row(seq.tokens[:i]), seq.tokens[i], 3) for i in range(seq.num_prompt, len(seq.tokens))
                ]
                assert list(outcome.logprobs) == scores
                prompt = [token_logprobs(target.row(seq.tokens[:i]), seq.tokens[i], 2) for i in range(1, seq.num_prompt)]
                assert list(outcome.prompt_logprobs) == [None, *prompt]
        assert lab.engine.metrics.num_preemptions > 0 or k > 0


REPEATS = {
    "repetition_penalty": SamplingParams(repetition_penalty=3.0, max_tokens=12),
    "presence_penalty": SamplingParams(presence_penalty=2.0, max_tokens=12),
    "frequency_penalty": SamplingParams(frequency_penalty=2.0, max_tokens=12),
    "logit_bias": SamplingParams(logit_bias={2: 5.0}, max_tokens=12),
    "min_tokens": SamplingParams(min_tokens=7, stop_token_ids=(1, 2, 3), max_tokens=12),
    "bad_words": SamplingParams(max_tokens=12),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("option", REPEATS)
def test_t7_options_see_the_draft_tokens_before_their_row(option: str, temperature: float) -> None:
    rules = TokenRules(bad_words=((2, 2), (3, 3), (2, 3, 2), (5,))) if option == "bad_words" else TokenRules()
    request = Request((1, 2), replace(REPEATS[option], temperature=temperature), rules=rules)
    without = Request((1, 2), SamplingParams(temperature=temperature, max_tokens=40))
    expected = plain(request)
    unaware = request.prompt + plain(without).tokens
    assert expected.tokens != plain(without).tokens[: len(expected.tokens)], f"{option} changes nothing here"
    # One drafter ignores the option, one honours it, one repeats a single token throughout the window.
    scripts = [
        scripted("right", [unaware]).script,
        scripted("right", [request.prompt + reference(request.but(stop_token_ids=()), TableTarget()).tokens]).script,
        *[lambda tokens, num, token=token: [token] * num for token in range(8)],
    ]
    for script, k, rule in itertools.product(scripts, (1, 2, 4, 8), RULES):
        if rule == "coupled" or temperature == 0.0:
            assert Lab({"drafter": ScriptedDrafter(script)}, rule).run(request.sequence("drafter", k)) == [expected]


@every_drafter
def test_t8_mates_chunks_blocks_and_cache_change_nothing(name: str) -> None:
    shared = (1, 2, 3, 4, 5, 6, 7, 0)
    requests = [replace(request, prompt=shared + request.prompt) for request in HARD.values()]
    wanted = [reference(request, TableTarget()) for request in requests]
    answers = [request.prompt + outcome.tokens for request, outcome in zip(requests, wanted, strict=True)]
    for caching, (num_blocks, block_size), (max_num_seqs, budget) in itertools.product(
        (True, False), ((64, 4), (40, 1), (13, 3)), ((1, 1), (3, 4), (9, 200))
    ):
        target = TableTarget(num_blocks, block_size)
        mixed = {"drafter": make_drafter(name, target, answers), "other": make_drafter("ngram", target, answers)}
        lab = Lab(mixed, target=target, prefix_caching=caching, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        seqs = [request.sequence(("drafter", "other", "none")[i % 3], i, i) for i, request in enumerate(requests)]
        assert lab.run(*seqs) == wanted, (caching, num_blocks, block_size, max_num_seqs, budget)
        assert caching or lab.kv.num_hit_tokens == 0


# Suffix statistics are shared between requests on purpose, so its drafts depend on mates, and these rules' tokens on drafts.
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", ["ngram", "draft_model", "draft_twin"])
def test_t8_sampled_tokens_of_the_other_rules_do_not_depend_on_mates(name: str, rule: str) -> None:
    requests = [Request(PROMPT[: 2 + i], SAMPLED, seed=i) for i in range(4)]
    alone = [speculative(request, name, 3, rule)[0] for request in requests]
    target = TableTarget()
    seqs = [request.sequence("drafter", 3, i) for i, request in enumerate(requests)]
    assert Lab({"drafter": make_drafter(name, target, [], rule)}, rule, target=target).run(*seqs) == alone


# ------------------------------------------------------------------------------------------------ T9 to T12: shapes


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_t9_prompts_shorter_than_the_ngram(n: int) -> None:
    with pytest.raises(RequestError, match="at least 1 token"):
        Lab({"ngram": NgramDrafter(n, n)}).engine.add(Request(()).sequence("ngram", 4))
    for length, k in itertools.product(sorted({1, max(1, n - 1), n, n + 1}), (1, 4, 8)):
        for prompt in ((1, 2, 3, 4, 5, 6)[:length], (2,) * length):
            request = Request(prompt, SAMPLED)
            for drafter in (NgramDrafter(n, n), NgramDrafter(1, n)):
                assert Lab({"ngram": drafter}).run(request.sequence("ngram", k)) == [plain(request)]


@every_rule
@pytest.mark.parametrize("difference", [-64, -1, 0, 1, 64])
def test_t10_draft_model_with_a_padded_or_smaller_vocabulary(rule: str, difference: int) -> None:
    options = {"vocab_size": 80}
    target = TableTarget(**options)
    for request in (
        Request((79, 1, 78, 2, 3), params_for(rule, max_tokens=20)),
        Request((79, 1), params_for(rule, max_tokens=20, allowed_token_ids=(77, 78, 79), logit_bias={79: 2.0})),
        Request(
            (79, 1),
            params_for(rule, max_tokens=20, frequency_penalty=1.0, repetition_penalty=2.0, min_tokens=20),
            rules=TokenRules(frozenset({79, 5})),
        ),
    ):
        expected = plain(request, TableTarget(**options))
        for k in (1, 3, 8):
            drafter = draft_model(related(target, vocab_size=80 + difference), target, rule)
            assert Lab({"drafter": drafter}, rule, target=target).run(request.sequence("drafter", k)) == [expected]


@every_rule
@every_drafter
def test_t11_context_limit_reached_in_a_draft(name: str, rule: str) -> None:
    for num_prompt, k in itertools.product((1, 4, 9, 14, 15), (1, 3, 8)):
        request = Request((1, 2, 3, 4, 5) * 3, params_for(rule, max_tokens=100))
        request = replace(request, prompt=request.prompt[:num_prompt])
        outcome, seq = speculative(request, name, k, rule, max_model_len=16)
        assert outcome == plain(request, TableTarget(max_model_len=16))
        assert (len(seq.tokens), outcome.finish_reason) == (16, "length")


@every_rule
@pytest.mark.parametrize("draft_len", [1, 2, 7, 12, 30])
def test_t11_draft_model_with_a_shorter_context_or_too_few_blocks(rule: str, draft_len: int) -> None:
    target = TableTarget()
    requests = [Request(PROMPT, params_for(rule, max_tokens=20), seed=seed) for seed in range(3)]
    for num_blocks in (40, 3, 1):
        draft = TableTarget(num_blocks, 4, max_model_len=draft_len)
        seqs = [request.sequence("drafter", 4, i) for i, request in enumerate(requests)]
        assert Lab({"drafter": draft_model(draft, target, rule)}, rule, target=target).run(*seqs) == [
            plain(request) for request in requests
        ]


class ChangingController:
    """Asks for another K at every step, whatever the request wants."""

    def __init__(self, plan: list[int]) -> None:
        self._plan: Iterator[int] = itertools.cycle(plan)

    def plan(self, seqs: list[Sequence], max_model_len: int, num_rows_left: int) -> list[int]:
        return [min(next(self._plan), seq.params.max_tokens - seq.num_output - 1) for seq in seqs]


@every_drafter
@every_rule
def test_t12_k_may_change_at_every_step(name: str, rule: str) -> None:
    requests = [Request(PROMPT[:length], params_for(rule, max_tokens=25), seed=length) for length in (3, 6)]
    answers = [request.prompt + plain(request).tokens for request in requests]
    for ks in ([0, 3], [3, 0, 0], [8, 1, 0, 4], [0, 0, 0, 0, 0, 8]):
        target = TableTarget()
        lab = Lab({"drafter": make_drafter(name, target, answers, rule)}, rule, target=target)
        lab.engine._controller = ChangingController(ks)
        seqs = [request.sequence("drafter", 1, i) for i, request in enumerate(requests)]
        assert lab.run(*seqs) == [plain(request) for request in requests]


# ------------------------------------------------------------------------------------------------ T13 to T16: a long life


@every_drafter
@every_rule
def test_t13_blocks_of_cancelled_and_preempted_requests_are_clean(name: str, rule: str) -> None:
    requests = [Request((*PROMPT, i), params_for(rule, max_tokens=14, logprobs=1), seed=i) for i in range(6)]
    wanted = [plain(request) for request in requests]
    answers = [request.prompt + outcome.tokens for request, outcome in zip(requests, wanted, strict=True)]
    for k, steps_before_cancel in itertools.product((0, 2, 8), (0, 1, 2, 4)):
        target = TableTarget(num_blocks=8, block_size=3)
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


@every_rule
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_t14_draft_model_equal_to_the_target_is_always_right(rule: str, temperature: float) -> None:
    for k in range(1, 9):
        request = Request(PROMPT, SamplingParams(temperature=temperature, top_p=0.95, presence_penalty=0.3, max_tokens=30))
        _, seq = speculative(request, "draft_twin", k, rule)
        assert seq.stats.accepted_tokens == seq.stats.drafted_tokens > 0
        assert seq.stats.target_passes == -(-30 // (k + 1))
        assert set(seq.origins) <= {"accepted", "bonus", "plain"}


@every_drafter
def test_t15_the_second_identical_request_behaves_as_the_first(name: str) -> None:
    for request, k in itertools.product(HARD.values(), (1, 4)):
        target = TableTarget()
        expected = reference(request, target)
        lab = Lab({"drafter": make_drafter(name, target, [request.prompt + expected.tokens])}, target=target)
        for seq_id in (0, 1, 2, 2):
            assert lab.run(request.sequence("drafter", k, seq_id)) == [expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1.0}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"best_of": 2}, "best_of"),
        ({"top_k": "many"}, "top_k"),
    ],
)
def test_t16_sampling_options_that_cannot_be_honoured_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams.from_dict(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 2.5}, "top_k"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"first": 1.0}}, "logit_bias"),
        ({"speculative": 5}, "speculative"),
    ],
)
def test_t16_values_of_a_wrong_type_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams.from_dict(options)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "ngrm"},
        {"method": "eagle"},
        {"num_speculative_tokens": 65},
        {"draft_model": "x"},
        {"rejection_sample_method": "typical"},
    ],
)
def test_t16_speculation_that_cannot_be_honoured_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        config = SpeculativeConfig.parse(options)
        for name in registry.members(config):
            registry.create(name, config, DrafterContext(8, 128))


# ------------------------------------------------------------------------------------------------ negative controls


def accepts_the_first_draft_token(draft: Draft, row: RowDistribution, chance: Chance, position: int) -> Verdict:
    if not draft.tokens:
        return coupled(draft, row, chance, position)
    rest = coupled(Draft(draft.tokens[1:]), lambda i: row(i + 1), chance, position + 1)
    return Verdict((draft.tokens[0], *rest.tokens), rest.num_accepted + 1)


def reads_the_row_before(draft: Draft, row: RowDistribution, chance: Chance, position: int) -> Verdict:
    return coupled(draft, lambda i: row(max(i - 1, 0)), chance, position)


def draws_with_noise_of_the_next_position(draft: Draft, row: RowDistribution, chance: Chance, position: int) -> Verdict:
    return coupled(draft, row, chance, position + bool(draft.tokens))


@pytest.mark.parametrize("rule", [accepts_the_first_draft_token, reads_the_row_before, draws_with_noise_of_the_next_position])
def test_a_wrong_verifier_is_found_out(rule: Callable[..., Verdict]) -> None:
    request = Request(PROMPT, SAMPLED)
    expected = reference(request, TableTarget())
    drafter = scripted("wrong_at_2", [request.prompt + expected.tokens])
    if rule is accepts_the_first_draft_token:
        drafter = scripted("wrong", [request.prompt + expected.tokens])
    assert Lab({"drafter": drafter}, rule).run(request.sequence("drafter", 3)) != [expected]


class AppendOnlyTarget(TableTarget):
    """Keeps what was written to a slot first, as a cache does that is never rolled back."""

    def forward(self, batch: list[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        before = self._slots.copy()
        places = [self._slots_of(rows)[rows.start :] for rows in batch]
        tokens = [
            [int(old) if old >= 0 else new for old, new in zip(before[p], r.tokens, strict=True)]
            for p, r in zip(places, batch, strict=True)
        ]
        return super().forward([replace(rows, tokens=kept) for rows, kept in zip(batch, tokens, strict=True)], taps)


def test_a_cache_that_does_not_roll_back_is_found_out() -> None:
    request = Request(PROMPT, SAMPLED)
    expected = reference(request, TableTarget())
    answer = request.prompt + expected.tokens
    assert Lab({"drafter": scripted("right", [answer])}, target=AppendOnlyTarget()).run(request.sequence("drafter", 4)) == [
        expected
    ]
    assert Lab({"drafter": scripted("wrong_at_2", [answer])}, target=AppendOnlyTarget()).run(request.sequence("drafter", 4)) != [
        expected
    ]


def test_a_prefix_cache_that_takes_in_rejected_rows_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = kv_cache.KVCache.truncate

    def registers_first(self: kv_cache.KVCache, seq_id: int, length: int) -> int:
        holding = self._holdings[seq_id]
        tokens = wrong_stream[: holding.length // self.block_size * self.block_size]
        self.commit(seq_id, tokens[: holding.length])
        return original(self, seq_id, length)

    request = Request(PROMPT, SAMPLED)
    expected = reference(request, TableTarget())
    wrong_stream = list(request.prompt + expected.tokens)
    monkeypatch.setattr(kv_cache.KVCache, "truncate", registers_first)
    lab = Lab({"drafter": scripted("wrong", [request.prompt + expected.tokens])})
    first = lab.run(request.sequence("drafter", 8))
    longer = replace(request, prompt=request.prompt + expected.tokens[:10])
    second = lab.run(longer.sequence("none", 0, 1))
    assert first + second != [expected, reference(longer, TableTarget())]
