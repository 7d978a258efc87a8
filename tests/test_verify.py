from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable

import numpy as np
import pytest
import torch

from foredraft.sampling import STREAM_DRAFT, STREAM_RESIDUAL, STREAM_TARGET, Chance, PositionNoise
from foredraft.testing.enumeration import outcome_probabilities
from foredraft.types import Distribution, Draft, Verdict
from foredraft.verify import RULES, RowDistribution, Rule, _positive_part, block, coupled, rejection

Tokens = tuple[int, ...]
Table = Callable[[Tokens], Distribution]
TOLERANCE = 1e-9
POSITION = 10
LEVEL = 1e-5


def make_distribution(probs: np.ndarray | list[float]) -> Distribution:
    support = np.flatnonzero(np.asarray(probs) > 0)
    return Distribution(support, np.log(np.asarray(probs, dtype=np.float64)[support]))


def random_table(seed: int, vocab_size: int, zero_share: float = 0.0) -> Table:
    """A language model: each context has its own random distribution, some of it without some tokens."""
    known: dict[Tokens, Distribution] = {}

    def table(context: Tokens) -> Distribution:
        if context not in known:
            rng = np.random.default_rng([seed, len(context), *context])
            weights = rng.exponential(size=vocab_size) ** 2 * (rng.random(vocab_size) >= zero_share)
            if not weights.any():
                weights[rng.integers(vocab_size)] = 1.0
            known[context] = make_distribution(weights / weights.sum())
        return known[context]

    return table


def joint(target: Table, length: int) -> dict[Tokens, float]:
    strings = {(): 1.0}
    for _ in range(length):
        strings = {
            (*context, token): mass * float(np.exp(log_prob))
            for context, mass in strings.items()
            for token, log_prob in zip(target(context).tokens.tolist(), target(context).log_probs, strict=True)
        }
    return strings


def emitted_joint(
    rule: Rule, target: Table, draft_table: Table, num_draft: int, *, one_hot: bool = False
) -> tuple[dict[Tokens, float], float]:
    """Exact distribution of one pass's output, continued by the target to K + 1 tokens, and the expected accepted tokens.

    ``one_hot``: drafts are the draft table's likeliest tokens and come without probabilities.
    """

    def run(chance: Chance) -> tuple[Tokens, int]:
        tokens: Tokens = ()
        dists = []
        for i in range(num_draft):
            dist = draft_table(tokens)
            dists.append(dist)
            own = int(dist.tokens[np.argmax(dist.log_probs)]) if one_hot else chance.draw(dist, POSITION + i, STREAM_DRAFT)
            tokens = (*tokens, own)
        draft = Draft(tokens, None if one_hot else tuple(dists))
        verdict = rule(draft, lambda i: target(tokens[:i]), chance, POSITION)
        assert verdict.tokens[: verdict.num_accepted] == tokens[: verdict.num_accepted]
        assert len(verdict.tokens) == verdict.num_accepted + 1 <= num_draft + 1
        return verdict.tokens, verdict.num_accepted

    outcomes = outcome_probabilities(run)
    assert sum(outcomes.values()) == pytest.approx(1.0, abs=1e-12)
    totals: dict[Tokens, float] = defaultdict(float)
    for (tokens, _), mass in outcomes.items():
        rest = joint(lambda more, tokens=tokens: target((*tokens, *more)), num_draft + 1 - len(tokens))  # type: ignore[misc]
        for more, probability in rest.items():
            totals[(*tokens, *more)] += mass * probability
    return dict(totals), sum(num * mass for (_, num), mass in outcomes.items())


def largest_error(rule: Rule, target: Table, draft_table: Table, num_draft: int, *, one_hot: bool = False) -> float:
    emitted, _ = emitted_joint(rule, target, draft_table, num_draft, one_hot=one_hot)
    exact = joint(target, num_draft + 1)
    return max(abs(emitted.get(string, 0.0) - exact.get(string, 0.0)) for string in emitted.keys() | exact.keys())


CASES = [  # vocabulary, K, share of zeros in the target, and in the draft
    (vocab_size, num_draft, *zeros)
    for vocab_size, num_draft in [(2, 0), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 2), (2, 3), (3, 3)]
    for zeros in [(0.0, 0.0), (0.4, 0.0), (0.0, 0.4), (0.4, 0.4)]
]


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(("vocab_size", "num_draft", "target_zeros", "draft_zeros"), CASES)
def test_rule_distorts_the_targets_joint_distribution(
    rule: str, vocab_size: int, num_draft: int, target_zeros: float, draft_zeros: float
) -> None:
    for seed in range(3 if vocab_size**num_draft < 20 else 1):
        target, draft_table = random_table(seed, vocab_size, target_zeros), random_table(seed + 100, vocab_size, draft_zeros)
        assert largest_error(RULES[rule], target, draft_table, num_draft) < TOLERANCE


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rule_distorts_four_tokens_and_three_drafts(rule: str) -> None:
    assert largest_error(RULES[rule], random_table(7, 4, 0.2), random_table(8, 4, 0.2), 3) < TOLERANCE


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_draft", range(4))
@pytest.mark.parametrize("target_zeros", [0.0, 0.4])
def test_rule_distorts_under_deterministic_drafts(rule: str, num_draft: int, target_zeros: float) -> None:
    for seed in range(3):
        target, draft_table = random_table(seed, 3, target_zeros), random_table(seed + 50, 3, 0.3)
        assert largest_error(RULES[rule], target, draft_table, num_draft, one_hot=True) < TOLERANCE


@pytest.mark.parametrize("num_draft", range(4))
def test_coupled_distorts_under_drafts_independent_of_its_noise(num_draft: int) -> None:
    for seed in range(3):
        target, draft_table = random_table(seed, 3, 0.2), random_table(seed + 50, 3, 0.2)
        assert largest_error(coupled, target, draft_table, num_draft) < TOLERANCE


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("num_draft", [1, 2, 3])
def test_draft_equal_to_the_target_is_rejected(rule: str, num_draft: int) -> None:
    target = random_table(3, 3, 0.2)
    emitted, num_accepted = emitted_joint(RULES[rule], target, target, num_draft)
    assert num_accepted == pytest.approx(num_draft, abs=1e-12)
    assert emitted == pytest.approx(joint(target, num_draft + 1), abs=TOLERANCE)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_draft_equal_to_the_target_up_to_rounding_is_distorted(rule: str) -> None:
    """Residuals of nothing but rounding must not be drawn from with any noticeable probability."""
    target = random_table(3, 3)

    def nearly(context: Tokens) -> Distribution:
        dist = target(context)
        return Distribution(dist.tokens, dist.log_probs + np.array([3e-16, -2e-16, 1e-16])[: len(dist.tokens)])

    emitted, num_accepted = emitted_joint(RULES[rule], target, nearly, 3)
    assert num_accepted == pytest.approx(3, abs=1e-9)
    assert emitted == pytest.approx(joint(target, 4), abs=TOLERANCE)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_draft_that_shares_no_token_with_the_target_distorts(rule: str) -> None:

    def target(context: Tokens) -> Distribution:
        return make_distribution([0.0, 0.0, 0.3, 0.7])

    emitted, num_accepted = emitted_joint(RULES[rule], target, lambda context: make_distribution([0.4, 0.6, 0.0, 0.0]), 2)
    assert num_accepted == 0.0
    assert emitted == pytest.approx(joint(target, 3), abs=TOLERANCE)


@pytest.mark.parametrize("drafts_are_right", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_greedy_target_emits_another_token(rule: str, drafts_are_right: bool) -> None:
    """At temperature 0 every rule must give the target's argmax, whatever was drafted with whatever probability."""

    def target(context: Tokens) -> Distribution:
        return make_distribution(np.eye(3)[(sum(context) * 2 + len(context)) % 3])

    emitted, num_accepted = emitted_joint(RULES[rule], target, target if drafts_are_right else random_table(4, 3), 3)
    assert emitted == pytest.approx(joint(target, 4), abs=TOLERANCE)
    assert num_accepted == 3 if drafts_are_right else num_accepted < 3


def test_block_accepts_fewer_tokens_than_rejection() -> None:
    gains = []
    for seed in range(12):
        vocab_size, num_draft = [(2, 3), (3, 2), (3, 3), (4, 2)][seed % 4]
        target, draft_table = random_table(seed, vocab_size, 0.2), random_table(seed + 70, vocab_size, 0.2)
        _, by_block = emitted_joint(block, target, draft_table, num_draft)
        _, by_rejection = emitted_joint(rejection, target, draft_table, num_draft)
        gains.append(by_block - by_rejection)
    assert min(gains) > -1e-12
    assert max(gains) > 0.01, "block verification never gained anything; is it rejection in disguise?"


def test_rejection_accepts_other_than_the_overlap() -> None:
    """Leviathan et al., theorem 3.5: the first token is accepted with probability sum of min(target, draft)."""
    target, draft_table = random_table(1, 4), random_table(2, 4)
    _, num_accepted = emitted_joint(rejection, target, draft_table, 1)
    overlap = np.minimum(target(()).dense(4), draft_table(()).dense(4)).sum()
    assert num_accepted == pytest.approx(overlap, abs=1e-12)


# ------------------------------------------------------------------------------------------------ negative controls


def draft_mass(draft: Draft, i: int) -> float:
    assert draft.probs is not None
    return draft.probs[i].probability(draft.tokens[i])


def residual(target: Distribution, draft: Draft, i: int, factor: float = 1.0) -> Distribution:
    weights = _positive_part(target, factor * np.exp(target.log_probs), draft, i)
    support = np.flatnonzero(weights > 0)
    return Distribution(target.tokens[support], np.log(weights[support] / weights.sum())) if len(support) else target


def ratio_rule(invert: bool = False, subtract: bool = True, bonus_from_last_row: bool = False) -> Rule:
    def rule(draft: Draft, row: RowDistribution, chance: Chance, position: int) -> Verdict:
        for i, token in enumerate(draft.tokens):
            ratio = row(i).probability(token) / draft_mass(draft, i)
            if not chance.accept(min(1.0, 1 / ratio if invert and ratio else ratio), position + i):
                own = residual(row(i), draft, i) if subtract else row(i)
                return Verdict((*draft.tokens[:i], chance.draw(own, position + i, STREAM_RESIDUAL)), i)
        num_draft = len(draft.tokens)
        last = row(num_draft - 1 if bonus_from_last_row and num_draft else num_draft)
        return Verdict((*draft.tokens, chance.draw(last, position + num_draft, STREAM_TARGET)), num_draft)

    return rule


def block_rule(clip: bool = True, scale_residual: bool = True, longest: bool = True) -> Rule:
    def rule(draft: Draft, row: RowDistribution, chance: Chance, position: int) -> Verdict:
        num_draft, kept, kept_mass, mass = len(draft.tokens), 0, 1.0, 1.0
        for i in range(1, num_draft + 1):
            mass *= row(i - 1).probability(draft.tokens[i - 1]) / draft_mass(draft, i - 1)
            mass = min(1.0, mass) if clip else mass
            threshold = min(1.0, mass)
            if i < num_draft:
                excess = float(_positive_part(row(i), mass * np.exp(row(i).log_probs), draft, i).sum())
                rest = excess + 1.0 - mass
                threshold = min(1.0, max(0.0, excess / rest)) if rest > 0.0 else 1.0
            if chance.accept(threshold, position + i - 1):
                kept, kept_mass = i, mass
            elif not longest:
                break
        target = row(kept)
        if kept == num_draft:
            return Verdict((*draft.tokens, chance.draw(target, position + kept, STREAM_TARGET)), kept)
        own = residual(target, draft, kept, kept_mass if scale_residual else 1.0)
        return Verdict((*draft.tokens[:kept], chance.draw(own, position + kept, STREAM_RESIDUAL)), kept)

    return rule


WRONG_RULES = {
    "ratio inverted": ratio_rule(invert=True),
    "residual not subtracted": ratio_rule(subtract=False),
    "bonus from the row before": ratio_rule(bonus_from_last_row=True),
    "block without clipping": block_rule(clip=False),
    "block with rejection's residual": block_rule(scale_residual=False),
    "block that stops at the first failure": block_rule(longest=False),
}


def worst_error(rule: Rule) -> float:
    return max(largest_error(rule, random_table(seed, 3), random_table(seed + 100, 3), 2) for seed in range(4))


@pytest.mark.parametrize("rule", WRONG_RULES.values(), ids=WRONG_RULES.keys())
def test_proof_is_blind_to_a_wrong_rule(rule: Rule) -> None:
    assert worst_error(rule) > 1e-3


@pytest.mark.parametrize("rule", [ratio_rule(), block_rule()], ids=["ratio", "block"])
def test_negative_controls_fail_for_another_reason(rule: Rule) -> None:
    """With every deliberate error switched off, the control rules are correct."""
    assert worst_error(rule) < TOLERANCE


class _SharedNoise:
    """One uniform cell of twelve per key; draws invert the distribution's sum at it, as a shared-noise sampler would."""

    def __init__(self, chance: Chance, separate_streams: bool) -> None:
        self._chance = chance
        self._separate_streams = separate_streams
        self._cells: dict[tuple[int, int], int] = {}

    def draw(self, dist: Distribution, position: int, stream: int) -> int:
        key = position, stream if self._separate_streams else 0
        if key not in self._cells:
            self._cells[key] = self._chance.draw(make_distribution(np.full(12, 1 / 12)), position, stream)
        edges = np.cumsum(np.exp(dist.log_probs)) * 12 - 1e-6  # every probability here is a multiple of 1/12
        return int(dist.tokens[np.searchsorted(edges, self._cells[key])])

    def accept(self, probability: float, position: int) -> bool:
        return self._chance.accept(probability, position)


@pytest.mark.parametrize("separate_streams", [True, False])
def test_ratio_rule_with_noise_shared_between_draft_and_residual_seems_right(separate_streams: bool) -> None:
    """Why rejection and block draw their residual from a stream of its own: with the draft's noise the output is biased."""
    target, draft_dist = make_distribution(np.array([2, 5, 5]) / 12), make_distribution(np.array([8, 2, 2]) / 12)

    def run(chance: Chance) -> int:
        noise = _SharedNoise(chance, separate_streams)
        draft = Draft((noise.draw(draft_dist, POSITION, STREAM_DRAFT),), (draft_dist,))
        return rejection(draft, lambda i: target, noise, POSITION).tokens[0]

    outcomes = outcome_probabilities(run)
    error = max(abs(outcomes[token] - target.dense(3)[token]) for token in range(3))
    assert error < TOLERANCE if separate_streams else error > 0.05, outcomes


# ------------------------------------------------------------------------------------------------ the rules' contract


class _Script:
    """A Chance that draws the likeliest token, accepts as told, and notes what it was asked for."""

    def __init__(self, coins: list[bool] | None = None) -> None:
        self.coins = coins or []
        self.draws: list[tuple[int, int]] = []
        self.flips: list[tuple[int, float]] = []

    def draw(self, dist: Distribution, position: int, stream: int) -> int:
        self.draws.append((position, stream))
        return int(dist.tokens[np.argmax(dist.log_probs)])

    def accept(self, probability: float, position: int) -> bool:
        self.flips.append((position, probability))
        return self.coins[len(self.flips) - 1]


FLAT = make_distribution([0.4, 0.3, 0.3])
DRAWN = make_distribution([0.1, 0.8, 0.1])


def test_coupled_draws_at_other_positions_or_streams_than_plain_decoding() -> None:
    script = _Script()
    assert coupled(Draft((0, 0, 2, 0)), lambda i: FLAT, script, 20) == Verdict((0, 0, 0), 2)
    assert script.draws == [(20, STREAM_TARGET), (21, STREAM_TARGET), (22, STREAM_TARGET)] and not script.flips
    script = _Script()
    assert coupled(Draft((0, 0)), lambda i: FLAT, script, 20) == Verdict((0, 0, 0), 2)
    assert script.draws == [(20 + i, STREAM_TARGET) for i in range(3)]


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_row_after_a_rejected_token_is_read(rule: str) -> None:
    """What a drafter proposes past a rejected row may be nonsense that the target cannot even score."""
    read: list[int] = []

    def row(i: int) -> Distribution:
        read.append(i)
        return FLAT

    RULES[rule](Draft((0, 2, 0, 0)), row, _Script([True, False]), 0)
    assert set(read) == {0, 1}


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_streams_of_recovered_and_bonus_are_swapped(rule: str) -> None:
    draft = Draft((1, 1), (DRAWN, DRAWN))
    script = _Script([False, False])
    assert RULES[rule](draft, lambda i: FLAT, script, 5).num_accepted == 0
    assert script.draws == [(5, STREAM_RESIDUAL)]
    script = _Script([True, True])
    assert RULES[rule](draft, lambda i: FLAT, script, 5) == Verdict((1, 1, 0), 2)
    assert script.draws == [(7, STREAM_TARGET)] and [position for position, _ in script.flips] == [5, 6]


def test_block_drops_a_failed_prefix_of_a_longer_accepted_one() -> None:
    assert block(Draft((1, 1), (DRAWN, DRAWN)), lambda i: FLAT, _Script([False, True]), 5) == Verdict((1, 1, 0), 2)


@pytest.mark.parametrize("rule", RULES)
def test_empty_draft_needs_more_than_one_plain_draw(rule: str) -> None:
    script = _Script()
    assert RULES[rule](Draft(), lambda i: FLAT, script, 9) == Verdict((0,), 0)
    assert RULES[rule](Draft((), ()), lambda i: FLAT, script, 9) == Verdict((0,), 0)
    assert script.draws == [(9, STREAM_TARGET)] * 2 and not script.flips


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_draft_token_that_its_own_distribution_excludes_passes(rule: str) -> None:
    with pytest.raises(AssertionError, match="draft token 2 at 0 has draft probability 0"):
        RULES[rule](Draft((2,), (make_distribution([0.5, 0.5, 0.0]),)), lambda i: FLAT, _Script([True]), 0)


# ------------------------------------------------------------------------------------------------ with the real noise

LENGTH = 3
VOCAB = 2


def generate(rule: Rule, target: Table, draft_table: Table, seed: int, num_draft: int, *, fixed_origin: bool = False) -> Tokens:
    tokens: Tokens = ()
    while len(tokens) < LENGTH:
        position = len(tokens)
        noise = PositionNoise(seed, origin=0 if fixed_origin else position)
        draft: Tokens = ()
        dists: list[Distribution] = []
        for i in range(num_draft):
            dists.append(draft_table((*tokens, *draft)))
            draft = (*draft, noise.draw(dists[-1], position + i, STREAM_DRAFT))
        known = tokens
        verdict = rule(Draft(draft, tuple(dists)), lambda i: target((*known, *draft[:i])), noise, position)  # noqa: B023
        tokens = (*tokens, *verdict.tokens)
    return tokens[:LENGTH]


def skewed(likely: float) -> Table:
    """Prefers to repeat the last token, more or less strongly."""

    def table(context: Tokens) -> Distribution:
        probs = np.full(VOCAB, (1 - likely) / (VOCAB - 1))
        probs[context[-1] if context else 0] = likely
        return make_distribution(probs)

    return table


def p_value(rule: Rule, num_seeds: int, *, fixed_origin: bool = False) -> float:
    """Chi-square of generated strings against the target's exact joint distribution."""
    target, draft_table = skewed(0.5), skewed(0.1)
    counts = Counter(generate(rule, target, draft_table, seed, 2, fixed_origin=fixed_origin) for seed in range(num_seeds))
    exact = joint(target, LENGTH)
    strings = list(itertools.product(range(VOCAB), repeat=LENGTH))
    expected = np.array([num_seeds * exact[string] for string in strings])
    assert expected.min() >= 5
    statistic = float(((np.array([counts[string] for string in strings]) - expected) ** 2 / expected).sum())
    freedom = torch.tensor((len(strings) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_passes_with_real_noise_distort_the_joint_distribution(rule: str) -> None:
    assert p_value(RULES[rule], 1000) > LEVEL


def test_block_with_coins_and_drafts_seen_before_is_not_noticed() -> None:
    """Why noise has an origin: block looks past the tokens it keeps, so what it saw there must not come up again."""
    assert p_value(block, 1000, fixed_origin=True) < LEVEL


def test_wrong_rule_with_real_noise_is_not_noticed() -> None:
    assert p_value(ratio_rule(subtract=False), 500) < LEVEL
