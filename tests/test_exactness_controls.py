"""Exactness tests that have to fail or refuse: T16, and negative controls that show the comparison finds what it is there for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from engine_helpers import Lab, LabTarget, Outcome, Request, plain, scripted
from exactness_requests import prompt
from foredraft import kv_cache
from foredraft.config import SpeculativeConfig
from foredraft.drafters import registry
from foredraft.drafters.context import DrafterContext
from foredraft.sampling import Chance
from foredraft.types import ConfigError, Draft, FloatArray, PassOutput, RequestError, Rows, SamplingParams, Verdict
from foredraft.verify import RowDistribution, Rule, coupled
from worlds import World, every_world

# ------------------------------------------------------------------------------------------------ T16


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


def sampled(world: World) -> Request:
    return world.request(prompt(world), SamplingParams(max_tokens=20, logprobs=0))


def drafted(
    world: World, request: Request, script: str, k: int, rule: str | Rule = "coupled", target: LabTarget | None = None
) -> Outcome:
    """The request alone, with drafts from a script that knows its answer."""
    answer = request.prompt + world.expected(request).tokens
    target = target or world.target()
    drafter = scripted(script, [answer], target.vocab_size)
    return Lab({"drafter": drafter}, rule, target=target).run(request.sequence("drafter", k))[0]


def accepts_the_first_draft_token(draft: Draft, row: RowDistribution, chance: Chance, position: int) -> Verdict:
    if not draft.tokens:
        return coupled(draft, row, chance, position)
    rest = coupled(Draft(draft.tokens[1:]), lambda i: row(i + 1), chance, position + 1)
    return Verdict((draft.tokens[0], *rest.tokens), rest.num_accepted + 1)


def reads_the_row_before(draft: Draft, row: RowDistribution, chance: Chance, position: int) -> Verdict:
    return coupled(draft, lambda i: row(max(i - 1, 0)), chance, position)


def draws_with_noise_of_the_next_position(draft: Draft, row: RowDistribution, chance: Chance, position: int) -> Verdict:
    return coupled(draft, row, chance, position + bool(draft.tokens))


def stops_one_early(draft: Draft, row: RowDistribution, chance: Chance, position: int) -> Verdict:
    verdict = coupled(draft, row, chance, position)
    return Verdict(verdict.tokens[1:], max(0, verdict.num_accepted - 1)) if verdict.num_accepted else verdict


@every_world
@pytest.mark.parametrize(
    "rule",
    [accepts_the_first_draft_token, reads_the_row_before, draws_with_noise_of_the_next_position, stops_one_early],
)
def test_a_wrong_verifier_is_found_out(world: World, rule: Callable[..., Verdict]) -> None:
    request = sampled(world)
    script = "wrong" if rule is accepts_the_first_draft_token else "wrong_at_2"
    assert drafted(world, request, script, 3) == world.expected(request)
    assert drafted(world, request, script, 3, rule) != world.expected(request)


class Tampered:
    """A target with a fault; all else is the target's own."""

    def __init__(self, target: LabTarget) -> None:
        self._target = target
        self.vocab_size, self.max_model_len, self.block_size = target.vocab_size, target.max_model_len, target.block_size

    def forward(self, batch: list[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        return self._target.forward(batch, taps)

    def row(self, context: list[int]) -> FloatArray:
        return self._target.row(context)

    def kv_cache(self, prefix_caching: bool = True) -> kv_cache.KVCache:
        return self._target.kv_cache(prefix_caching)


class AppendOnlyTarget(Tampered):
    """Keeps what was written to a slot first, as a cache does that is never rolled back."""

    def __init__(self, target: LabTarget) -> None:
        super().__init__(target)
        self._first: dict[tuple[int, int], int] = {}

    def forward(self, batch: list[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        return super().forward([replace(rows, tokens=self._kept(rows)) for rows in batch], taps)

    def _kept(self, rows: Rows) -> list[int]:
        places = [divmod(rows.start + i, self.block_size) for i in range(len(rows.tokens))]
        slots = [(rows.block_table[index], offset) for index, offset in places]
        return [self._first.setdefault(slot, token) for slot, token in zip(slots, rows.tokens, strict=True)]


class OneUlpOff(Tampered):
    """Rounds differently when a pass has several rows, as matrix libraries do."""

    def forward(self, batch: list[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        output = super().forward(batch, taps)
        if all(len(rows.tokens) == 1 for rows in batch):
            return output
        return replace(output, logits=[np.nextafter(logits, np.float32(np.inf)) for logits in output.logits])


@every_world
def test_a_cache_that_does_not_roll_back_is_found_out(world: World) -> None:
    request = sampled(world)
    assert drafted(world, request, "right", 4, target=AppendOnlyTarget(world.target())) == world.expected(request)
    assert drafted(world, request, "wrong_at_2", 4, target=AppendOnlyTarget(world.target())) != world.expected(request)


@every_world
def test_one_unit_in_the_last_place_is_found_out(world: World) -> None:
    request = replace(sampled(world), prompt=prompt(world)[:1])
    assert plain(request, OneUlpOff(world.target())) == world.expected(request)
    found = drafted(world, request, "right", 4, target=OneUlpOff(world.target()))
    assert found.tokens == world.expected(request).tokens and found != world.expected(request)


@every_world
def test_a_prefix_cache_that_takes_in_rejected_rows_is_found_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    original = kv_cache.KVCache.truncate

    def registers_first(self: kv_cache.KVCache, seq_id: int, length: int) -> int:
        holding = self._holdings[seq_id]
        tokens = wrong_stream[: holding.length // self.block_size * self.block_size]
        self.commit(seq_id, tokens[: holding.length])
        return original(self, seq_id, length)

    request = sampled(world)
    expected = world.expected(request)
    wrong_stream = list(request.prompt + expected.tokens)
    longer = replace(request, prompt=request.prompt + expected.tokens[:10])
    wanted = [expected, world.expected(longer)]

    def both() -> list[Outcome]:
        target = world.target()
        lab = Lab({"drafter": scripted("wrong", [request.prompt + expected.tokens], target.vocab_size)}, target=target)
        return lab.run(request.sequence("drafter", 8)) + lab.run(longer.sequence("none", 0, 1))

    assert both() == wanted
    monkeypatch.setattr(kv_cache.KVCache, "truncate", registers_first)
    assert both() != wanted
