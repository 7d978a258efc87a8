"""Sampled output of whole engine runs against the target's distribution (T5), by enumeration and with the real noise."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from engine_helpers import Lab, LabTarget, Request, draft_model, make_drafter, related
from exactness_requests import prompt
from foredraft import engine
from foredraft.drafters import draft_model as draft_model_module
from foredraft.drafters.ngram import NgramDrafter
from foredraft.sampling import STREAM_DRAFT, Chance, distribution
from foredraft.testing.enumeration import outcome_probabilities
from foredraft.testing.toy import ScriptedDrafter, TableTarget
from foredraft.types import Distribution, Draft, Drafter, SamplingParams, Sequence, TokenRules
from foredraft.verify import RULES
from worlds import ModelWorld


class SampledDrafter(ScriptedDrafter):
    """Draws its drafts from a table and says so; the table may have ids that the target does not have."""

    def __init__(self, chance: Chance, table: TableTarget) -> None:
        super().__init__(lambda tokens, num: [])
        self.chance, self.table = chance, table

    def propose(self, seqs: list[Sequence], num_tokens: list[int]) -> list[Draft]:
        drafts = []
        for seq, num in zip(seqs, num_tokens, strict=True):
            tokens: list[int] = []
            probs: list[Distribution] = []
            for _ in range(num):
                known = [*seq.tokens, *tokens]
                probs.append(distribution(self.table.row(known), replace(seq, params=SamplingParams())))
                tokens.append(self.chance.draw(probs[-1], len(known), STREAM_DRAFT))
            drafts.append(Draft(tuple(tokens), tuple(probs)))
        return drafts


def exact_marginals(request: Request, target: LabTarget) -> dict[tuple[int, ...], float]:
    """Probability of each whole output, by the product of its rows."""
    found: dict[tuple[int, ...], float] = defaultdict(float)

    def follow(seq: Sequence, probability: float) -> None:
        tokens = tuple(seq.tokens[seq.num_prompt :])
        if len(tokens) == request.params.max_tokens or (tokens and tokens[-1] in request.rules.eos_ids):
            found[tokens] += probability
            return
        dist = distribution(target.row(seq.tokens), seq)
        for token, log_prob in zip(dist.tokens, dist.log_probs, strict=True):
            follow(replace(seq, tokens=[*seq.tokens, int(token)]), probability * float(np.exp(log_prob)))

    follow(request.sequence(), 1.0)
    return dict(found)


def enumerated_marginals(
    request: Request, target: LabTarget, rule: str, k: int, make: Callable[[Chance], Drafter], monkeypatch: pytest.MonkeyPatch
) -> dict[tuple[int, ...], float]:
    """Probability of each whole output, by running the engine once for every way that chance can fall."""

    def run(chance: Chance) -> tuple[int, ...]:
        monkeypatch.setattr(engine, "noise_for", lambda seq: chance)
        monkeypatch.setattr(draft_model_module, "noise_for", lambda seq: chance)
        return (
            Lab({"drafter": make(chance)}, rule, target=target, prefix_caching=False).run(request.sequence("drafter", k))[0].tokens
        )

    return outcome_probabilities(run)


SAMPLERS: dict[str, Callable[[Chance, TableTarget, str], Drafter]] = {
    "sampled": lambda chance, target, rule: SampledDrafter(chance, TableTarget(vocab_size=3, seed=9)),
    "out_of_vocabulary": lambda chance, target, rule: SampledDrafter(chance, TableTarget(vocab_size=5, seed=9)),
    "draft_model": lambda chance, target, rule: draft_model(TableTarget(vocab_size=3, seed=9), target, rule),
    "wide_draft_model": lambda chance, target, rule: draft_model(TableTarget(vocab_size=5, seed=9), target, rule),
    "narrow_draft_model": lambda chance, target, rule: draft_model(TableTarget(vocab_size=2, seed=9), target, rule),
    "deterministic": lambda chance, target, rule: ScriptedDrafter(lambda tokens, num: [0, 1, 1, 2][:num]),
    "ngram": lambda chance, target, rule: NgramDrafter(1, 3),
}


ENUMERATED = {
    "penalised": (2, SamplingParams(temperature=0.9, frequency_penalty=0.6, min_tokens=1, max_tokens=3)),
    # Of two tokens each, so that a longer draft stays small enough to enumerate.
    "truncated": (3, SamplingParams(temperature=0.7, top_k=2, max_tokens=4)),
}


def combinations() -> list[tuple[str, str, str]]:
    """All but coupled drafts that share the target's noise (their tokens are equal), and those with too many ways to fall."""
    return [
        (rule, sampler, params_name)
        for rule, sampler, params_name in itertools.product(RULES, SAMPLERS, ENUMERATED)
        if (rule != "coupled" or sampler in ("deterministic", "ngram"))
        and (params_name != "truncated" or sampler not in ("sampled", "out_of_vocabulary"))
    ]


@pytest.mark.parametrize(("rule", "sampler", "params_name"), combinations())
def test_t5_whole_runs_have_the_targets_distribution(
    rule: str, sampler: str, params_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, (k, params) = SAMPLERS[sampler], ENUMERATED[params_name]
    target = TableTarget(vocab_size=3, spread=0.8)
    request = Request((0, 1, 0), params, rules=TokenRules(frozenset({2})))
    found = enumerated_marginals(request, target, rule, k, lambda chance: make(chance, target, rule), monkeypatch)
    expected = exact_marginals(request, target)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    for tokens in found.keys() | expected.keys():
        assert found.get(tokens, 0.0) == pytest.approx(expected.get(tokens, 0.0), abs=1e-12), tokens


def model_marginals(
    world: ModelWorld, rule: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[tuple[int, ...], float], dict[tuple[int, ...], float]]:
    """What whole runs of the demo model yield, and what they should; of two tokens, so that every fall of chance can be run."""
    two = world.ids[2:4]
    params = SamplingParams(temperature=1.5, frequency_penalty=0.6, allowed_token_ids=two, max_tokens=3)
    # Eight tokens: the draft model errs in the row after them, and is right in the next.
    request, target = world.request(prompt(world) + two, params), world.target()

    def make(chance: Chance) -> Drafter:
        if name == "draft_model":
            return draft_model(related(target), target, rule)
        return ScriptedDrafter(lambda tokens, num: [two[0], two[1], two[1]][:num])

    return enumerated_marginals(request, target, rule, 2, make, monkeypatch), exact_marginals(request, target)


@pytest.mark.model
@pytest.mark.parametrize(
    ("rule", "name"), [("coupled", "scripted"), ("rejection", "scripted"), ("rejection", "draft_model"), ("block", "draft_model")]
)
def test_t5_whole_runs_of_the_model_have_its_distribution(
    model_world: ModelWorld, rule: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, expected = model_marginals(model_world, rule, name, monkeypatch)
    assert len(expected) == 8 and min(expected.values()) > 1e-4, expected
    for tokens in found.keys() | expected.keys():
        assert found.get(tokens, 0.0) == pytest.approx(expected.get(tokens, 0.0), abs=1e-12), tokens


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", ["draft_model", "ngram"])
def test_t5_own_noise_has_the_targets_distribution(rule: str, name: str) -> None:
    # Enumeration takes the noise out; here the real one has to be independent of what the drafter drew with it.
    target, num_runs = TableTarget(512, vocab_size=3, spread=0.8), 2000
    request = Request((0, 1, 0), SamplingParams(max_tokens=3))
    expected = exact_marginals(request, target)
    drafter = draft_model(TableTarget(512, vocab_size=3, seed=9, spread=0.8), target, rule)
    lab = Lab(
        {"drafter": drafter if name == "draft_model" else make_drafter(name, target, [(0, 1, 0, 2, 1, 1)], rule)},
        rule,
        target=target,
        max_num_seqs=64,
        max_num_batched_tokens=512,
    )
    seqs = [replace(request, seed=seed // 8, sample_index=seed % 8).sequence("drafter", 2, seed) for seed in range(num_runs)]
    counts = Counter(outcome.tokens for outcome in lab.run(*seqs))
    chi_square = sum((counts[tokens] - num_runs * p) ** 2 / (num_runs * p) for tokens, p in expected.items())
    degrees = len(expected) - 1
    assert chi_square < degrees + 4.5 * (2 * degrees) ** 0.5, f"chi-square {chi_square:.1f} with {degrees} degrees of freedom"


# The bias that shipped elsewhere: after a rejection, draw from the target instead of from the residual.
def no_residual(target: Distribution, target_mass: object, draft: Draft, i: int) -> Distribution:
    return target


def test_a_wrong_verifier_is_found_out_by_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.verify._residual", no_residual)
    target = TableTarget(vocab_size=3, spread=0.8)
    request = Request((0, 1, 0), SamplingParams(max_tokens=2))
    found = enumerated_marginals(
        request, target, "rejection", 1, lambda chance: SampledDrafter(chance, TableTarget(vocab_size=3, seed=9)), monkeypatch
    )
    expected = exact_marginals(request, target)
    assert max(abs(found[tokens] - expected[tokens]) for tokens in expected) > 1e-3


@pytest.mark.model
@pytest.mark.parametrize(("rule", "name"), [("rejection", "scripted"), ("rejection", "draft_model"), ("block", "draft_model")])
def test_a_wrong_verifier_is_found_out_by_enumeration_of_the_model(
    model_world: ModelWorld, rule: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.verify._residual", no_residual)
    found, expected = model_marginals(model_world, rule, name, monkeypatch)
    assert max(abs(found[tokens] - expected[tokens]) for tokens in expected) > 1e-3
