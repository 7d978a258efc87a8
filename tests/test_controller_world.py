"""The controller against known costs and acceptance: what it loses to plain decoding, and to the best fixed policy."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import pytest

from controller_world import Source, World
from foredraft.controller import Controller, replay_decision
from foredraft.cost import PassTimes, PassWork
from foredraft.types import Draft

ROWS = (1, 2, 5, 9, 17, 33, 65)
# Milliseconds like those of kernels that read the weights once for many rows, and of common libraries.
FLAT = PassTimes(ROWS, (1.9e-3, 2.0e-3, 2.2e-3, 2.6e-3, 3.6e-3, 5.6e-3, 9.5e-3), 2e-7, 1e-7)
STEEP = PassTimes(ROWS, (1.9e-3, 2.9e-3, 4.9e-3, 7e-3, 11e-3, 20e-3, 38e-3), 2e-7, 1e-7)
NUM_STEPS = 1500
FIXED = (1, 2, 3, 4, 6, 8)


def steady(probability: float, **options: Any) -> Source:
    return Source(lambda length, seq_id: probability, **options)


def flipping(high: float, low: float, period: int = 50) -> Source:
    return Source(lambda length, seq_id: high if length // period % 2 else low)


def mixed(length: int, seq_id: int) -> float:
    return 0.9 if (length * 2654435761 >> 8) % 2 else 0.1


@dataclass(frozen=True)
class Case:
    """``floor``: least speed in parts of plain's; ``regret``: in parts of the best fixed drafter and K, or plain."""

    times: PassTimes
    sources: dict[str, Source]
    floor: float
    regret: float
    num_seqs: int = 1
    noise: float = 0.0
    outliers: float = 0.0

    def world(self, seed: int) -> World:
        options = {"num_seqs": self.num_seqs, "noise": self.noise, "outliers": self.outliers, "seed": seed}
        return World(self.times, self.sources, **options)


CASES = {
    "always wrong": Case(FLAT, {"a": steady(0.0)}, 0.98, 0.98),
    "seldom right": Case(FLAT, {"a": steady(0.05)}, 0.98, 0.98),
    "often right": Case(FLAT, {"a": steady(0.5)}, 1.5, 0.94),
    "nearly always right": Case(FLAT, {"a": steady(0.9)}, 3.4, 0.97),
    "rows that cost as much as passes": Case(STEEP, {"a": steady(0.2)}, 0.98, 0.98),
    "at break-even": Case(STEEP, {"a": steady(0.5)}, 0.98, 0.98),
    "flipping": Case(FLAT, {"a": flipping(0.9, 0.0)}, 1.25, 0.94),
    "flipping where rows cost": Case(STEEP, {"a": flipping(0.9, 0.0)}, 0.98, 0.98),
    "slow and wrong": Case(FLAT, {"a": steady(0.0, seconds=lambda num, depth: 5e-3)}, 0.98, 0.98),
    "far too slow": Case(FLAT, {"a": steady(0.9, seconds=lambda num, depth: 5e-2)}, 0.97, 0.97),
    "a model that pays": Case(FLAT, {"a": steady(0.7, seconds=lambda num, depth: 4e-4 * depth)}, 1.25, 0.9),
    "a model that does not pay": Case(FLAT, {"a": steady(0.7, seconds=lambda num, depth: 2.2e-3 * depth)}, 0.98, 0.98),
    "two by turns": Case(FLAT, {"a": flipping(0.8, 0.1, 100), "b": flipping(0.1, 0.8, 100)}, 1.4, 1.0),
    "three that are no use": Case(
        FLAT,
        {"a": steady(0.0), "b": steady(0.0), "c": steady(0.1, seconds=lambda num, depth: 1e-3 * depth)},
        0.97,
        0.97,
    ),
    "seldom has a draft": Case(FLAT, {"a": steady(0.6, presence=0.1)}, 1.02, 0.93),
    "knows when it is right": Case(STEEP, {"a": Source(mixed, confident=True)}, 1.3, 1.1),
    "does not know when it is right": Case(STEEP, {"a": Source(mixed)}, 0.97, 0.8),
    "sixteen, compute-bound": Case(STEEP, {"a": steady(0.5)}, 0.98, 0.98, num_seqs=16),
    "sixteen, wrong": Case(FLAT, {"a": steady(0.0)}, 0.98, 0.98, num_seqs=16),
    "noise and outliers": Case(FLAT, {"a": steady(0.7)}, 1.9, 0.9, noise=0.2, outliers=0.02),
    "noise and no use": Case(FLAT, {"a": steady(0.0)}, 0.94, 0.94, noise=0.2, outliers=0.02),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_speculation_backfires_or_leaves_speed_on_the_table(name: str, seed: int) -> None:
    case = CASES[name]
    adaptive = case.world(seed).play(Controller(case.times), NUM_STEPS)
    plain = case.world(seed).play_fixed(None, 0, NUM_STEPS)
    fixed = [case.world(seed).play_fixed(source, k, NUM_STEPS) for source in case.sources for k in FIXED]
    assert adaptive >= case.floor * plain
    assert adaptive >= case.regret * max(plain, *fixed)


@pytest.mark.parametrize("wrong", [FLAT, STEEP, PassTimes.unknown()])
def test_wrong_first_costs_are_believed_for_ever(wrong: PassTimes) -> None:
    """What a pass takes is learned from passes that ran, whatever was believed first."""
    for true, source in ((STEEP, steady(0.35)), (FLAT, steady(0.7))):
        controller = Controller(wrong)
        World(true, {"a": source}, seed=1).play(controller, 1500)
        later = World(true, {"a": source}, seed=2)
        later.seqs[0].seq_id = 7
        speed = later.play(controller, 800)
        plain = World(true, {}, seed=3).play_fixed(None, 0, 800)
        assert speed >= 0.96 * plain
        assert true is STEEP or wrong is STEEP or speed >= 1.7 * plain


def test_a_machine_that_gets_slower_is_taken_for_drafts_that_do_not_pay() -> None:
    world = World(FLAT, {"a": steady(0.7)}, speed=lambda now: 3.0 if now > 2.0 else 1.0)
    controller = Controller(FLAT)
    world.play(controller, 2000)
    assert world.now > 4.0 and sum(world.history[-300:]) > 300 * 3
    assert 2.0 <= controller.cost.seconds(world.work()) / FLAT.seconds(world.work()) <= 4.0


def test_a_decision_cannot_be_worked_out_again_from_its_trace() -> None:
    lines: list[str] = []
    world = World(FLAT, {"a": flipping(0.9, 0.2), "b": Source(mixed, confident=True)}, num_seqs=3)
    world.play(Controller(FLAT, lambda decision: lines.append(json.dumps(decision))), 300)
    decisions = [json.loads(line) for line in lines]
    assert len(decisions) > 100 and any(sum(decision["num_tokens"]) > 3 for decision in decisions)
    for decision in decisions:
        assert replay_decision(decision) == decision["num_tokens"]
    assert decisions[-1]["step"] < 300 and {i for decision in decisions for i in decision["sequences"]} == {0, 1, 2}


def test_probes_take_more_than_their_share() -> None:
    world = World(FLAT, {"a": steady(0.0, seconds=lambda num, depth: 2e-3)})
    asked = 0.0
    controller = Controller(FLAT)
    for _ in range(3000):
        plan = controller.plan(world.seqs, [8], world.work(), 100)
        seconds = 0.0
        for ask in plan.asks():
            plan.hear(ask, [world.draft(world.sources["a"], 0, 8)], 2e-3)
            seconds += 2e-3
        plan.choose()
        emitted, milliseconds = world.finish_step([Draft()], [0], seconds)
        plan.learn([0], emitted, milliseconds)
        asked += seconds
    assert 0.002 * world.now < asked < 0.015 * world.now


def test_a_request_that_ended_is_remembered() -> None:
    world = World(FLAT, {"a": steady(0.5)}, num_seqs=4)
    controller = Controller(FLAT)
    world.play(controller, 50)
    for seq in world.seqs:
        controller.close(seq)
    assert not controller._tracks and not controller._resting and not controller._pending


def test_metrics_say_nothing_of_why() -> None:
    controller = Controller(FLAT)
    World(FLAT, {"a": steady(0.9)}).play(controller, 400)
    snapshot = controller.snapshot()
    assert snapshot["speculating"] and snapshot["reason"] == "drafts pay" and snapshot["num_speculative_tokens"] > 3
    assert snapshot["speedup_estimate"] > 2 and 0.8 < snapshot["drafters"]["a"]["acceptance_per_position"][0] < 1
    controller = Controller(FLAT)
    World(FLAT, {"a": steady(0.0)}).play(controller, 400)
    snapshot = controller.snapshot()
    assert not snapshot["speculating"] and "no draft is expected to pay" in snapshot["reason"]
    assert snapshot["speedup_estimate"] < 1.02


def test_drawn_tokens_decide_how_much_of_a_draft_is_judged() -> None:
    """Under the rules that weigh draft probabilities that would bias the output."""
    controller = Controller(FLAT)
    world = World(FLAT, {"a": steady(0.8)})
    world.play(controller, 200)
    chosen = set()
    for confidence in (0.01, 0.99):
        plan = controller.plan(world.seqs, [8], world.work(), 100)
        for ask in plan.asks():
            plan.hear(ask, [Draft((1,) * 8, probs=(None,) * 8, confidence=(confidence,) * 8)], 1e-5)  # type: ignore[arg-type]
        chosen.add(tuple(plan.choose()))
    assert len(chosen) == 1


def test_random_limits_are_overstepped() -> None:
    generator = random.Random(0)
    controller = Controller(FLAT)
    world = World(FLAT, {"a": steady(0.9), "b": steady(0.8)}, num_seqs=5)
    for step in range(400):
        limits = [generator.randint(0, 8) for _ in world.seqs]
        for seq in world.seqs:
            seq.adaptive = generator.random() < 0.7
        left = generator.choice([0, 3, 100])
        plan = controller.plan(world.seqs, limits, PassWork(5, 1000), left)
        heard = {}
        for ask in plan.asks():
            assert all(0 < num <= limits[i] for i, num in zip(ask.slots, ask.num_tokens, strict=True))
            drafts = [world.draft(world.sources[ask.drafter], i, num) for i, num in zip(ask.slots, ask.num_tokens, strict=True)]
            heard |= {(ask.drafter, i): draft for i, draft in zip(ask.slots, drafts, strict=True)}
            plan.hear(ask, drafts, 1e-5)
        chosen = plan.choose()
        assert sum(count for _, count in chosen) <= left, step
        drafts = [heard[name, i] if count else Draft() for i, (name, count) in enumerate(chosen)]
        assert all(count <= len(draft.tokens) for draft, (_, count) in zip(drafts, chosen, strict=True))
        emitted, milliseconds = world.finish_step(drafts, [count for _, count in chosen], 1e-5)
        plan.learn([count for _, count in chosen], emitted, milliseconds)
