"""Requests with structured_outputs in the engine, on the table target."""

from __future__ import annotations

import numpy as np
import pytest

from engine_helpers import DRAFTERS, Lab, Outcome, Request, draft_model, make_drafter, plain, reference, related, text_of
from foredraft.drafters.forced import ForcedDrafter
from foredraft.testing.toy import ScriptedDrafter, TableTarget
from foredraft.types import Drafter, SamplingParams, StructuredOutputs, TokenRules

EOS = TokenRules(frozenset({7}))
SHAPES = {
    "loose": StructuredOutputs(regex="(ab|c[d-f]*|g)+"),
    "forced": StructuredOutputs(regex="[a-f]{2}bcd[ae]bcdf?"),
    "choice": StructuredOutputs(choice=["abc", "abd", "fffff", "cde", "cdefg"]),
    "nested": StructuredOutputs(grammar='start: "a" start "b" | "c" | "d" start "d"'),
}
each_shape = pytest.mark.parametrize("shape", SHAPES)


def ask(shape: str, **options: object) -> Request:
    params = SamplingParams(**{"max_tokens": 14, "structured_outputs": SHAPES[shape], "logprobs": 2} | options)  # type: ignore[arg-type]
    return Request((1, 2, 3, 1, 2), params, rules=EOS)


def drafter(name: str, target: TableTarget, request: Request, outcome: Outcome, rule: str = "coupled") -> Drafter:
    if name == "forced":
        return ForcedDrafter()
    return make_drafter(name, target, [request.prompt + outcome.tokens], rule)


@each_shape
@pytest.mark.parametrize("name", [*DRAFTERS, "forced"])
def test_a_shaped_answer_depends_on_the_drafter_or_on_k(shape: str, name: str) -> None:
    for temperature in (0.0, 1.0):
        for seed in range(3):
            request = Request(**vars(ask(shape, temperature=temperature)) | {"seed": seed})
            expected = reference(request, TableTarget())
            assert plain(request) == expected
            for k in (1, 3, 8):
                target = TableTarget()
                lab = Lab({"drafter": drafter(name, target, request, expected)}, target=target)
                assert lab.run(request.sequence("drafter", k)) == [expected], (temperature, seed, k)


@each_shape
def test_the_other_rules_ignore_the_shape(shape: str) -> None:
    """Greedy tokens are those of plain decoding; sampled ones have the shape."""
    for rule in ("rejection", "block"):
        for temperature in (0.0, 1.0):
            request = ask(shape, temperature=temperature, max_tokens=30)
            target = TableTarget()
            lab = Lab({"drafter": draft_model(related(target), target, rule)}, rule, target=target)
            (outcome,) = lab.run(request.sequence("drafter", 4))
            sequence = request.sequence()
            assert temperature or outcome == plain(request)
            assert sequence.grammar is not None
            text = [token for token in outcome.tokens if token != 7]
            assert sequence.grammar.num_allowed(sequence, text) == len(text)
            sequence.tokens += outcome.tokens
            assert (outcome.finish_reason == "stop") == sequence.grammar.is_complete(sequence), text_of(outcome.tokens)


def test_a_whole_answer_goes_on_until_it_is_cut() -> None:
    outcome = plain(ask("choice", max_tokens=14))
    assert outcome.finish_reason == "stop" and outcome.stop_reason is None
    assert text_of(token for token in outcome.tokens if token != 7) in ("abc", "abd", "fffff", "cde", "cdefg")


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
def test_max_tokens_or_a_stop_string_does_not_cut_a_shaped_answer(max_tokens: int) -> None:
    outcome = plain(
        Request((1, 2), SamplingParams(max_tokens=max_tokens, structured_outputs=StructuredOutputs(regex="abcd")), rules=EOS)
    )
    assert text_of(outcome.tokens) == "abcd"[:max_tokens]
    assert outcome.finish_reason == ("stop" if max_tokens == 4 else "length")
    stopped = plain(Request((1, 2), SamplingParams(stop="bc", structured_outputs=StructuredOutputs(regex="abcd")), rules=EOS))
    assert (text_of(stopped.tokens), stopped.finish_reason, stopped.stop_reason) == ("abc", "stop", "bc")


def test_min_tokens_or_bad_words_break_a_shape() -> None:
    """The shape comes first: what would leave no token is not applied."""
    params = SamplingParams(min_tokens=9, max_tokens=12, structured_outputs=StructuredOutputs(choice=["abc"]))
    outcome = plain(Request((1, 2), params, rules=TokenRules(frozenset({7}), bad_words=((1,), (0, 1)))))
    assert (text_of(outcome.tokens), outcome.finish_reason) == ("abc", "stop")


def test_an_end_may_come_before_the_shape_is_whole_or_never() -> None:
    ends = set()
    for seed in range(40):
        request = Request(**vars(ask("loose", temperature=1.5, logit_bias={7: 2.0})) | {"seed": seed})
        outcome = plain(request)
        sequence = request.sequence()
        assert sequence.grammar is not None
        if 7 in outcome.tokens:
            assert outcome.tokens.index(7) == len(outcome.tokens) - 1 and outcome.finish_reason == "stop"
            allowed = sequence.grammar.allowed(sequence, outcome.tokens[:-1])
            assert allowed is not None and allowed[7]
        ends.add(outcome.finish_reason)
    assert "stop" in ends


def test_a_forbidden_draft_takes_rows_of_the_pass() -> None:
    request = Request((1, 2), SamplingParams(max_tokens=9, structured_outputs=StructuredOutputs(regex="abcdefabc")), rules=EOS)
    for script, drafted in (([5, 5, 5], 0), ([0, 1, 5, 5], 2), ([0, 1, 2, 3], 4)):
        lab = Lab({"drafter": ScriptedDrafter(lambda tokens, k, script=script: script[:k] if len(tokens) == 2 else [])})
        seq = request.sequence("drafter", 8)
        lab.run(seq)
        assert text_of(seq.tokens[2:]) == "abcdefabc"
        assert (seq.stats.drafted_tokens, seq.stats.accepted_tokens) == (drafted, drafted)


def test_forced_tokens_cost_passes() -> None:
    request = Request((1, 2), SamplingParams(max_tokens=9, structured_outputs=StructuredOutputs(regex="abcdefabc")), rules=EOS)
    seq = request.sequence("drafter", 8)
    Lab({"drafter": ForcedDrafter()}).run(seq)
    assert (seq.stats.target_passes, seq.stats.accepted_tokens, seq.origins) == (1, 8, ["accepted"] * 8 + ["bonus"])
    without = Request((1, 2), SamplingParams(max_tokens=9)).sequence("drafter", 8)
    Lab({"drafter": ForcedDrafter()}).run(without)
    assert without.stats.drafted_tokens == 0


def test_a_shape_that_nothing_allowed_continues_ends_others_too() -> None:
    shape = StructuredOutputs(regex="a+b")
    stuck = Request((1, 2), SamplingParams(allowed_token_ids=(3,), structured_outputs=shape), rules=EOS)
    other = ask("nested")
    for k in (0, 3):
        lab = Lab({"drafter": make_drafter("ngram", TableTarget(), [])})
        outcome, mate = lab.run(stuck.sequence("drafter", k, 0), other.sequence("drafter", k, 1))
        assert (outcome.tokens, outcome.finish_reason) == ((), "error")
        assert outcome.stop_reason == "no token that the request allows continues its structured_outputs."
        assert mate == plain(other)


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_what_was_accepted_before_a_row_without_tokens_is_lost(rule: str) -> None:
    """Plain decoding comes as far, so drafts must."""
    for stop, expected in (((), ((0, 0, 0), "error")), (("aa",), ((0, 0), "stop"))):
        params = SamplingParams(allowed_token_ids=(0,), stop=stop, structured_outputs=StructuredOutputs(regex="aaab"), logprobs=1)
        request = Request((1, 2), params, rules=EOS)
        alone = plain(request)
        assert (alone.tokens, alone.finish_reason) == expected
        for draft in ([0], [0, 0], [0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 1, 5], [0, 1, 0]):
            known = [1, 2, *draft]
            lab = Lab({"drafter": ScriptedDrafter(lambda tokens, k, known=known: known[len(tokens) :][:k])}, rule)
            assert lab.run(request.sequence("drafter", 8)) == [alone], draft


def test_logprobs_are_those_under_the_shape() -> None:
    outcome = plain(ask("forced", temperature=1.0, logprobs=0))
    target, tokens = TableTarget(), [1, 2, 3, 1, 2]
    for token, entry in zip(outcome.tokens, outcome.logprobs, strict=True):
        row = target.row(tokens).astype(np.float64)
        assert entry[token].logprob == pytest.approx(row[token] - np.log(np.exp(row).sum()))
        tokens.append(token)
