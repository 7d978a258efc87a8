"""What an engine keeps, and who suffers, when a drafter fails or says what makes no sense, and when requests end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from engine_helpers import Lab, Request, plain, scripted
from foredraft.controller import Controller
from foredraft.kv_cache import KVCache
from foredraft.scheduler import Scheduler
from foredraft.testing.toy import ScriptedDrafter, TableTarget
from foredraft.types import ConfigError, Distribution, Draft, FloatArray, SamplingParams, Sequence, TokenRules, Verdict

PROMPT = (1, 2, 3, 4, 1, 2)
SAMPLED = SamplingParams(max_tokens=13)


class Sure(ScriptedDrafter):
    """Believes in its drafts."""

    def propose(self, seqs: list[Sequence], num_tokens: list[int]) -> list[Draft]:
        return [replace(draft, confidence=(0.99,) * len(draft.tokens)) for draft in super().propose(seqs, num_tokens)]


class Failing(ScriptedDrafter):
    """Raises in the method ``where`` for the sequences ``whom``, and holds those that it was opened for."""

    def __init__(self, where: str, *whom: int) -> None:
        super().__init__(lambda tokens, num: [1] * num)
        self.where, self.whom = where, whom
        self.held: set[int] = set()

    def _fail(self, where: str, seq: Sequence) -> None:
        if where == self.where and seq.seq_id in self.whom:
            raise RuntimeError(f"{where} of {seq.seq_id}")

    def open(self, seq: Sequence) -> None:
        self._fail("open", seq)
        self.held.add(seq.seq_id)

    def observe(self, seq: Sequence, verdict: Verdict, hidden: FloatArray | None) -> None:
        self._fail("observe", seq)

    def close(self, seq: Sequence) -> None:
        self.held.remove(seq.seq_id)
        self._fail("close", seq)


def remembered(controller: Controller) -> list[int]:
    """Ids of all sequences of which a controller knows anything."""
    return [*controller._tracks, *controller._resting, *controller._pending, *controller.audits]


def is_empty(lab: Lab) -> bool:
    return not lab.engine.has_work and lab.kv.num_available == lab.kv.num_blocks and not remembered(lab.controller)


# ------------------------------------------------------------------------------------------------ the controller


def test_the_draft_that_ended_a_request_is_not_counted() -> None:
    request = Request(PROMPT, SAMPLED)
    answer = plain(request).tokens
    ending = replace(request, rules=TokenRules(frozenset({answer[0]})))
    lab = Lab({"drafter": Sure(scripted("right", [PROMPT + answer]).script)})
    lab.run(ending.sequence("drafter", 4, adaptive=True))
    acceptance = lab.controller.record("drafter").acceptance
    assert sum(acceptance._trials) == sum(acceptance._hits) == 1.0
    assert is_empty(lab)


def test_a_request_that_ends_in_an_audited_step_is_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit waits for the rest of its drafts, and after an end none comes."""
    request = Request(PROMPT, SamplingParams(max_tokens=40))
    answer = plain(request).tokens
    known = [PROMPT + answer]
    lab = Lab({name: Sure(scripted("right", known).script) for name in ("a", "b")})
    learnt: list[int] = []
    compare = Controller.compare

    def watched(self: Controller, seqs: list[Sequence], emitted: list[tuple[int, ...]]) -> None:
        compare(self, seqs, emitted)
        learnt.extend(seq.seq_id for seq in seqs if seq.finish_reason is not None and seq.seq_id in self.audits)

    monkeypatch.setattr(Controller, "compare", watched)
    for seq_id, last in enumerate(answer * 2):
        lab.run(replace(request, rules=TokenRules(frozenset({last}))).sequence("a+b", 8, seq_id, adaptive=True))
        assert is_empty(lab), seq_id
    assert learnt, "no request ended while it was audited"


# ------------------------------------------------------------------------------------------------ drafters that fail


def two(where: str, *whom: int) -> tuple[Lab, dict[str, Failing]]:
    """An engine with drafters a, which fails, and b, which does not."""
    drafters = {"a": Failing(where, *whom), "b": Failing("never")}
    return Lab(drafters, target=TableTarget(num_blocks=20, block_size=3)), drafters


def sequences(num: int, max_tokens: int = 6) -> list[Sequence]:
    params = SamplingParams(max_tokens=max_tokens)
    return [Request((*PROMPT, i), params, seed=i).sequence("a+b", 2, i, adaptive=bool(i % 2)) for i in range(num)]


def test_a_drafter_that_fails_at_a_cancelled_request_keeps_its_blocks() -> None:
    lab, drafters = two("close", 0, 1)
    seqs = sequences(2, max_tokens=30)
    for seq in seqs:
        lab.engine.add(seq)
    lab.step()
    for seq in seqs:
        with pytest.raises(RuntimeError, match=f"close of {seq.seq_id}"):
            lab.engine.cancel(seq)
    assert is_empty(lab) and not any(drafter.held for drafter in drafters.values())


@pytest.mark.parametrize("where", ["close", "observe"])
def test_a_drafter_that_fails_at_the_end_of_a_request_keeps_blocks_of_all_that_end(where: str) -> None:
    lab, drafters = two(where, 0)
    lab.engine.add(first := Request((*PROMPT, 0), SamplingParams(max_tokens=1)).sequence("a+b", 2, 0, adaptive=True))
    lab.engine.add(second := Request((*PROMPT, 1), SamplingParams(max_tokens=1)).sequence("a+b", 2, 1, adaptive=True))
    lab.engine.add(third := Request((*PROMPT, 2), SamplingParams(max_tokens=9)).sequence("b", 2, 2, adaptive=True))
    with pytest.raises(RuntimeError, match=where):
        lab.step()
    assert (first.finish_reason, second.finish_reason, third.finish_reason) == ("length", "length", None)
    lab.finish()
    assert third.finish_reason == "length" and is_empty(lab)
    assert not any(drafter.held for drafter in drafters.values())
    assert lab.engine.metrics.finished == {"length": 3}


def test_a_request_that_a_drafter_refuses_is_lost_with_its_cached_blocks() -> None:
    lab, drafters = two("open", 7)
    prompt = PROMPT * 2
    lab.run(Request(prompt, SAMPLED).sequence("b", 2, 0))
    refused = Request(prompt, SAMPLED).sequence("b+a", 2, 7, adaptive=True)
    lab.engine.add(refused)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="open of 7"):
            lab.step()
        assert refused.num_cached > 0 and refused.num_computed == 0
        assert lab.kv.num_available == lab.kv.num_blocks and not drafters["b"].held
    assert lab.engine.num_waiting == 1
    lab.engine.cancel(refused)
    assert refused.finish_reason == "abort" and is_empty(lab)
    request = Request(prompt, SAMPLED)
    assert lab.run(request.sequence("b+a", 2, 8)) == [plain(request)]


def test_a_request_that_is_preempted_while_a_drafter_fails_is_lost() -> None:
    drafters = {"a": Failing("close", 1, 2), "b": Failing("never")}
    lab = Lab(drafters, target=TableTarget(num_blocks=8, block_size=3))
    seqs = sequences(3, max_tokens=12)
    for seq in seqs:
        lab.engine.add(seq)
    with pytest.raises(RuntimeError, match="close of"):
        lab.finish()
    assert lab.engine.metrics.num_preemptions == 1 and lab.engine.num_running + lab.engine.num_waiting == 3
    drafters["a"].whom = ()
    lab.finish()
    assert [seq.num_output for seq in seqs] == [12, 12, 12] and is_empty(lab)


def test_a_scheduler_loses_what_could_not_be_admitted() -> None:
    def refuse(seq: Sequence) -> None:
        raise RuntimeError("no")

    scheduler = Scheduler(KVCache(8, 4), max_num_seqs=2, max_num_batched_tokens=8, on_admit=refuse, on_preempt=refuse)
    first, second = (Request(PROMPT).sequence(seq_id=i) for i in range(2))
    scheduler.add(first)
    scheduler.add(second)
    with pytest.raises(RuntimeError):
        scheduler.schedule()
    assert list(scheduler.waiting) == [first, second] and scheduler.remove(first) is False


# ------------------------------------------------------------------------------------------------ drafts of no sense


class Saying(ScriptedDrafter):
    """Right drafts, as ``change`` makes them."""

    def __init__(self, request: Request, change: Callable[[Draft], Draft]) -> None:
        super().__init__(scripted("right", [request.prompt + plain(request).tokens]).script)
        self.change = change

    def propose(self, seqs: list[Sequence], num_tokens: list[int]) -> list[Draft]:
        return [self.change(draft) for draft in super().propose(seqs, num_tokens)]


CONFIDENCES = {
    "none": lambda num: (),
    "shorter": lambda num: (0.9,) * (num - 1),
    "longer": lambda num: (0.9,) * (num + 2),
    "one": lambda num: 0.9,
    "unknown": lambda num: (None,) * num,
    "words": lambda num: ("high",) * num,
    "complex": lambda num: (0.9j,) * num,
    "huge": lambda num: (10**400,) * num,
    "array": lambda num: np.full((num, 2), 0.5),
    "list": lambda num: [0.9] * num,
}


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("kind", CONFIDENCES)
def test_a_confidence_of_no_sense_stops_every_request(kind: str, adaptive: bool) -> None:
    request = Request(PROMPT, SAMPLED)

    def change(draft: Draft) -> Draft:
        return replace(draft, confidence=CONFIDENCES[kind](len(draft.tokens)))

    lab = Lab({"drafter": Saying(request, change)})
    seq = request.sequence("drafter", 4, adaptive=adaptive)
    assert lab.run(seq) == [plain(request)]
    assert adaptive or seq.stats.accepted_tokens > 6, "a draft that is right was dropped with its confidence"


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("num_more", [-1, 1])
def test_probabilities_of_more_or_fewer_tokens_end_in_a_traceback(num_more: int, rule: str) -> None:
    even = Distribution(np.arange(8), np.full(8, -np.log(8.0)))
    request = Request(PROMPT, SAMPLED)
    drafter = Saying(request, lambda draft: replace(draft, probs=(even,) * (len(draft.tokens) + num_more)))
    lab = Lab({"drafter": drafter}, rule)
    seq = request.sequence("drafter", 4)
    lab.engine.add(seq)
    with pytest.raises(ConfigError, match=f"proposed 4 tokens with {4 + num_more}; give each token"):
        lab.step()
    lab.engine.cancel(seq)
    assert is_empty(lab)
