"""The engine's own account: origins, counters, clock, hidden states, who is opened and closed, and what is refused."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from engine_helpers import Lab, Outcome, Request, plain, reference, scripted
from foredraft.controller import Controller
from foredraft.cost import PassTimes
from foredraft.engine import Engine
from foredraft.sampling import token_logprobs
from foredraft.scheduler import MAX_PROMPT_LOGPROB_ROWS
from foredraft.step_plan import Ask, StepPlan
from foredraft.testing.toy import ScriptedDrafter, TableTarget
from foredraft.types import (
    PHASES,
    ConfigError,
    Distribution,
    Draft,
    FloatArray,
    RequestError,
    Rows,
    SamplingParams,
    Sequence,
    TokenRules,
    Verdict,
)
from foredraft.verify import RULES

PROMPT = (1, 2, 3, 4, 1, 2)
SAMPLED = SamplingParams(max_tokens=13)


def knowing(name: str, *requests: Request, hidden_layers: tuple[int, ...] = ()) -> ScriptedDrafter:
    return scripted(name, [request.prompt + plain(request).tokens for request in requests], hidden_layers=hidden_layers)


# ------------------------------------------------------------------------------------------------ origins and counters


def test_origins_name_each_token() -> None:
    request = Request(PROMPT, SAMPLED)
    runs = {
        "right": ["accepted"] * 4 + ["bonus"],
        "wrong": ["recovered"],
        "wrong_at_2": ["accepted"] * 2 + ["recovered"],
        "empty": ["plain"],
    }
    for name, cycle in runs.items():
        lab = Lab({"drafter": knowing(name, request)})
        seq = request.sequence("drafter", 4)
        lab.run(seq)
        # The last tokens have a shorter draft: max_tokens leaves no more.
        num_checked = 13 - 5
        assert seq.origins[:num_checked] == list(itertools.islice(itertools.cycle(cycle), num_checked)), name
        assert [origin for emission in lab.emissions for origin in emission.origins] == seq.origins
        assert len(seq.origins) == 13


def test_counters_add_up_over_requests_drafters_and_the_engine() -> None:
    requests = [Request(PROMPT[: 2 + i], SAMPLED, seed=i) for i in range(5)]
    names = ("right", "wrong", "wrong_at_2", "fewer", "right")
    lab = Lab(
        {f"{i}": knowing(name, request) for i, (name, request) in enumerate(zip(names[:4], requests, strict=False))}
        | {"4": knowing("right", requests[4])}
    )
    seqs = [request.sequence(f"{i}", 1 + i, i) for i, request in enumerate(requests)]
    lab.run(*seqs)
    metrics = lab.engine.metrics
    for seq in seqs:
        stats = seq.stats
        assert stats.emitted_tokens == 13 and stats.accepted_tokens == seq.origins.count("accepted")
        assert sum(stats.drafted_per_position) == stats.drafted_tokens and sum(stats.accepted_per_position) == stats.accepted_tokens
        assert stats.drafted_per_position == sorted(stats.drafted_per_position, reverse=True)
        assert all(a <= d for a, d in zip(stats.accepted_per_position, stats.drafted_per_position, strict=False))
        # Every pass emits one token of the target's own; with none of them cut off, the rest was accepted.
        assert stats.emitted_tokens == stats.accepted_tokens + stats.target_passes
        mine = metrics.per_drafter[seq.drafters[0]]
        assert (stats.drafted_tokens, stats.accepted_tokens) == (mine.drafted_tokens, mine.accepted_tokens)
        assert stats.accepted_per_position == mine.accepted_per_position
    assert sum(stats.target_passes for stats in metrics.per_drafter.values()) == metrics.total.target_passes
    for field in ("drafted_tokens", "accepted_tokens", "emitted_tokens", "target_passes"):
        assert getattr(metrics.total, field) == sum(getattr(seq.stats, field) for seq in seqs)
    assert metrics.num_steps == lab.target.num_passes
    assert metrics.num_rows == sum(seq.num_prompt + 13 - 1 + seq.stats.drafted_tokens - seq.stats.accepted_tokens for seq in seqs)


def test_acceptance_length_is_counted_after_trimming() -> None:
    request = Request(PROMPT, SAMPLED)
    tokens = plain(request).tokens
    index = next(i for i, token in enumerate(tokens) if i >= 2 and token not in tokens[:i])
    ending = replace(request, rules=TokenRules(frozenset({tokens[index]})))
    seq = ending.sequence("drafter", 8)
    Lab({"drafter": knowing("right", request)}).run(seq)
    assert (seq.stats.target_passes, seq.stats.drafted_tokens) == (1, 8)
    assert seq.stats.emitted_tokens == seq.stats.accepted_tokens == index + 1
    assert seq.stats.acceptance_length == index + 1 and seq.stats.acceptance_rate == (index + 1) / 8
    assert seq.stats.accepted_per_position == [1] * (index + 1)


def test_a_pass_that_only_fills_the_cache_counts_as_a_step_but_not_as_a_verified_pass() -> None:
    lab = Lab(max_num_seqs=1, max_num_batched_tokens=2)
    seq = Request(PROMPT, SamplingParams(max_tokens=3)).sequence()
    lab.run(seq)
    assert lab.engine.metrics.num_steps == 3 + 2 and seq.stats.target_passes == 3
    assert lab.engine.metrics.num_rows == len(PROMPT) + 2


class StepClock:
    """Each reading is one second later than the one before."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_time_is_booked_by_phase_and_in_full_for_each_request_of_a_batch() -> None:
    lab = Lab(clock=StepClock())
    seqs = [Request(PROMPT, SamplingParams(max_tokens=num), seed=num).sequence(seq_id=num) for num in (2, 4)]
    lab.run(*seqs)
    snapshot = lab.engine.metrics.snapshot()
    assert snapshot["steps"] == 4 and snapshot["milliseconds"] == dict.fromkeys(PHASES, 4000.0)
    assert seqs[0].stats.milliseconds == dict.fromkeys(PHASES, 2000.0)
    assert seqs[1].stats.milliseconds == dict.fromkeys(PHASES, 4000.0)
    assert lab.engine.metrics.last_step is not None and lab.engine.metrics.last_step.num_seqs == 1


def test_a_step_without_work_does_nothing() -> None:
    lab = Lab()
    assert lab.step() == [] and not lab.engine.has_work
    assert lab.engine.metrics.num_steps == lab.target.num_passes == 0


def test_snapshot_is_plain_data_and_counts_how_requests_ended() -> None:
    request = Request(PROMPT, SAMPLED)
    lab = Lab({"drafter": knowing("right", request)}, target=TableTarget(num_blocks=7, block_size=4))
    stopping = request.but(stop_token_ids=(plain(request).tokens[0],))
    seqs = [
        request.sequence("drafter", 3, 0),
        stopping.sequence("drafter", 3, 1),
        request.sequence("none", 0, 2),
        request.sequence("none", 0, 3),
    ]
    for seq in seqs:
        lab.engine.add(seq)
    lab.engine.cancel(seqs[3])
    lab.finish()
    snapshot = lab.engine.metrics.snapshot()
    assert snapshot["finished"] == {"length": 2, "stop": 1, "abort": 1}
    assert snapshot["per_drafter"].keys() == {"drafter", "none"}
    assert snapshot["emitted_tokens"] == 13 + 1 + 13 == sum(stats["emitted_tokens"] for stats in snapshot["per_drafter"].values())
    assert snapshot["per_drafter"]["none"]["drafted_tokens"] == 0

    def is_plain(value: object) -> bool:
        if isinstance(value, dict):
            return all(type(key) is str and is_plain(item) for key, item in value.items())
        return all(map(is_plain, value)) if isinstance(value, list) else type(value) in (int, float)

    assert is_plain(snapshot)


# ------------------------------------------------------------------------------------------------ drafters


class BusyDrafter(ScriptedDrafter):
    """Asserts the protocol: opened once, used while open, closed once, and tokens that are all committed."""

    def __init__(self, drafter: ScriptedDrafter) -> None:
        super().__init__(drafter.script, drafter.hidden_layers)
        self.present: dict[int, int] = {}
        self.num_proposed = 0

    def open(self, seq: Sequence) -> None:
        super().open(seq)
        assert seq.seq_id not in self.present, f"sequence {seq.seq_id} was opened twice"
        assert seq.num_computed == seq.num_cached
        self.present[seq.seq_id] = len(seq.tokens)

    def propose(self, seqs: list[Sequence], num_tokens: list[int]) -> list[Draft]:
        assert all(num >= 1 for num in num_tokens)
        assert len({seq.seq_id for seq in seqs}) == len(seqs) > 0
        for seq in seqs:
            assert len(seq.tokens) == self.present[seq.seq_id]
        self.num_proposed += 1
        return super().propose(seqs, num_tokens)

    def observe(self, seq: Sequence, verdict: Verdict, hidden: FloatArray | None) -> None:
        super().observe(seq, verdict, hidden)
        self.present[seq.seq_id] += len(verdict.tokens)
        assert len(seq.tokens) == self.present[seq.seq_id]
        assert tuple(seq.tokens[len(seq.tokens) - len(verdict.tokens) :]) == verdict.tokens

    def close(self, seq: Sequence) -> None:
        super().close(seq)
        del self.present[seq.seq_id]


@pytest.mark.parametrize("k", [0, 3, 8])
def test_drafters_are_opened_and_closed_in_pairs_despite_cancellation_and_preemption(k: int) -> None:
    requests = [Request((*PROMPT, i), SAMPLED, seed=i) for i in range(6)]
    drafter = BusyDrafter(knowing("wrong_at_2", *requests))
    lab = Lab({"drafter": drafter}, target=TableTarget(num_blocks=8, block_size=3))
    seqs = [request.sequence("drafter", k, i) for i, request in enumerate(requests)]
    for seq in seqs:
        lab.engine.add(seq)
    lab.step()
    lab.engine.cancel(seqs[0])
    lab.engine.cancel(seqs[-1])
    while not lab.engine.metrics.num_preemptions:
        lab.step()
    preempted = next(seq for seq in seqs if seq.finish_reason is None and seq.seq_id in drafter.closed)
    lab.engine.cancel(preempted)
    lab.finish()
    assert not drafter.present and Counter(drafter.opened) == Counter(drafter.closed)
    assert seqs[-1].seq_id not in drafter.opened, "a request that never ran was opened"
    # A sequence leaves with its reason set when it ends, and without when it is preempted.
    assert [seq.finish_reason for seq in (seqs[0], seqs[-1], preempted)] == ["abort"] * 3
    assert (drafter.num_proposed > 0) == (k > 0)


def test_one_propose_serves_all_sequences_of_a_drafter() -> None:
    requests = [Request(PROMPT, SAMPLED, seed=i) for i in range(4)]
    drafters = {"a": BusyDrafter(knowing("right", *requests)), "b": BusyDrafter(knowing("right", *requests))}
    lab = Lab(drafters)
    for i, request in enumerate(requests):
        lab.engine.add(request.sequence("ab"[i % 2], 4, i))
    lab.step()
    assert drafters["a"].num_proposed == drafters["b"].num_proposed == 1 and lab.target.num_passes == 1
    lab.finish()


@pytest.mark.parametrize("name", ["right", "wrong", "wrong_at_2", "empty", "negative"])
@pytest.mark.parametrize("budget", [6, 9, 64])
def test_hidden_states_are_those_of_the_rows_that_stand_and_of_the_layers_asked_for(name: str, budget: int) -> None:
    requests = [Request((*PROMPT, i), SAMPLED, seed=i) for i in range(6)]
    layers = {"a": (2,), "b": (7, 0), "c": ()}
    drafters = {key: knowing(name, *requests, hidden_layers=value) for key, value in layers.items()}
    lab = Lab(
        drafters,
        target=TableTarget(num_blocks=40, block_size=3),
        max_num_seqs=5,
        max_num_batched_tokens=budget,
        prefix_caching=False,
    )
    seqs = [request.sequence("abc"[i % 3], 3, i) for i, request in enumerate(requests)]
    lab.run(*seqs)
    assert lab.engine.metrics.num_preemptions == 0
    for seq in seqs:
        mine = [hidden for seq_id, hidden in drafters[seq.drafters[0]].hidden if seq_id == seq.seq_id]
        wanted = layers[seq.drafters[0]]
        if not wanted:
            assert mine == [None] * len(mine)
            continue
        found = np.concatenate([hidden for hidden in mine if hidden is not None]).reshape(-1, len(wanted), 3).tolist()
        # The last token is never computed, unless it was a draft token that stood.
        assert len(found) == seq.num_computed in (len(seq.tokens) - 1, len(seq.tokens))
        expected = [[[token, position, layer] for layer in wanted] for position, token in enumerate(seq.tokens[: len(found)])]
        assert found == expected


def test_a_drafter_that_reads_hidden_states_misses_those_of_computed_tokens_or_after_a_preemption() -> None:
    requests = [Request(PROMPT + PROMPT + (i,), SAMPLED, seed=i) for i in range(6)]
    drafter = knowing("wrong_at_2", *requests, hidden_layers=(1,))
    positions: dict[int, list[list[int]]] = {}
    num_cached: list[int] = []

    class Listening(BusyDrafter):
        def open(self, seq: Sequence) -> None:
            super().open(seq)
            # States of cached tokens never come: they count as seen.
            positions.setdefault(seq.seq_id, []).append(list(range(seq.num_cached)))
            num_cached.append(seq.num_cached)

        def observe(self, seq: Sequence, verdict: Verdict, hidden: FloatArray | None) -> None:
            super().observe(seq, verdict, hidden)
            assert hidden is not None
            assert hidden[:, 0].tolist() == seq.tokens[seq.num_computed - len(hidden) : seq.num_computed]
            positions[seq.seq_id][-1] += [int(p) for p in hidden[:, 1]]

    lab = Lab({"drafter": Listening(drafter)}, target=TableTarget(num_blocks=9, block_size=4))
    # One after the other, so that the second finds the first one's blocks; then all others at once, so that some are preempted.
    first, second, *others = [request.sequence("drafter", 2, i) for i, request in enumerate(requests)]
    lab.run(first)
    lab.run(second)
    lab.run(*others)
    assert lab.engine.metrics.num_preemptions > 0
    assert max(map(len, positions.values())) > 1 and max(num_cached) > 0
    for seq in (first, second, *others):
        visits = positions[seq.seq_id]
        assert all(visit == list(range(len(visit))) for visit in visits)
        assert len(visits[-1]) == seq.num_computed >= len(seq.tokens) - 1


def test_a_drawn_draft_that_leaves_the_vocabulary_is_judged_up_to_there() -> None:
    seen: list[tuple[Draft, int]] = []

    def rule(draft: Draft, row: object, chance: object, position: int) -> Verdict:
        seen.append((draft, position))
        return Verdict((3,), 0)

    class Drawing(ScriptedDrafter):
        def propose(self, seqs: list[Sequence], num_tokens: list[int]) -> list[Draft]:
            dist = Distribution(np.arange(12), np.full(12, -np.log(12.0)))
            return [Draft((1, 2, 9, 3), (dist,) * 4)]

    lab = Lab({"drafter": Drawing(lambda tokens, num: [])}, rule)
    lab.engine.add(Request(PROMPT, SAMPLED).sequence("drafter", 4))
    lab.step()
    assert seen[0][0].tokens == (1, 2, 9) and seen[0][0].probs is not None and len(seen[0][0].probs) == 3
    assert lab.engine.metrics.total.drafted_tokens == 2 and lab.engine.metrics.num_rows == len(PROMPT) + 2


def test_numpy_ids_in_a_draft_become_plain_ones() -> None:
    request = Request(PROMPT, SAMPLED)
    script = knowing("right", request).script
    drafter = ScriptedDrafter(lambda tokens, num: list(np.array(script(tokens, num))))
    assert Lab({"drafter": drafter}).run(request.sequence("drafter", 4)) == [plain(request)]


def test_numpy_confidences_stop_a_compiled_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, a plan takes floats and nothing like them."""
    heard: list[Draft] = []
    hear = StepPlan.hear

    def watched(plan: StepPlan, ask: Ask, drafts: list[Draft], seconds: float) -> None:
        heard.extend(drafts)
        hear(plan, ask, drafts, seconds)

    class Believing(ScriptedDrafter):
        def propose(self, seqs: list[Sequence], num_tokens: list[int]) -> list[Draft]:
            drafts = super().propose(seqs, num_tokens)
            return [replace(draft, confidence=np.full(len(draft.tokens), 0.5, np.float32)) for draft in drafts]

    monkeypatch.setattr(StepPlan, "hear", watched)
    request = Request(PROMPT, SAMPLED)
    assert Lab({"drafter": Believing(knowing("right", request).script)}).run(request.sequence("drafter", 4)) == [plain(request)]
    assert {type(one) for draft in heard for one in draft.confidence or ()} == {float}
    assert {type(draft.confidence) for draft in heard if draft.tokens} == {tuple}


# ------------------------------------------------------------------------------------------------ limits


def test_the_budget_bounds_every_pass_and_everyone_gets_a_row() -> None:
    rows_seen: list[list[int]] = []

    class Watching(TableTarget):
        def forward(self, batch: list[Rows], taps: tuple[int, ...] = ()):
            rows_seen.append([len(rows.tokens) for rows in batch])
            return super().forward(batch, taps)

    requests = [Request(PROMPT * 2, SAMPLED, seed=i) for i in range(5)]
    target = Watching()
    lab = Lab({"drafter": knowing("right", *requests)}, target=target, max_num_seqs=4, max_num_batched_tokens=7)
    lab.run(*[request.sequence("drafter", 8, i) for i, request in enumerate(requests)])
    assert max(map(sum, rows_seen)) == 7 and max(map(len, rows_seen)) == 4
    assert all(min(rows) >= 1 for rows in rows_seen)


def test_prompt_logprobs_of_a_long_prompt_come_in_bounded_chunks() -> None:
    rows_seen: list[int] = []

    class Watching(TableTarget):
        def forward(self, batch: list[Rows], taps: tuple[int, ...] = ()):
            rows_seen.extend(rows.num_logits for rows in batch)
            return super().forward(batch, taps)

    prompt = tuple(i * i % 8 for i in range(3 * MAX_PROMPT_LOGPROB_ROWS))
    target = Watching(64, 8, max_model_len=300)
    request = Request(prompt, SamplingParams(max_tokens=2, prompt_logprobs=1))
    outcome = Lab(target=target, max_num_batched_tokens=500).run(request.sequence())[0]
    assert rows_seen == [MAX_PROMPT_LOGPROB_ROWS] * 3 + [1]
    assert outcome == reference(request, target)
    assert outcome.prompt_logprobs[100] == token_logprobs(target.row(list(prompt[:100])), prompt[100], 1)


def test_blocks_of_rejected_rows_come_back_in_the_same_step() -> None:
    request = Request(PROMPT, SAMPLED)
    lab = Lab({"drafter": knowing("wrong", request)}, target=TableTarget(num_blocks=40, block_size=1), prefix_caching=False)
    seq = request.sequence("drafter", 8)
    lab.engine.add(seq)
    while lab.step() and seq.finish_reason is None:
        assert lab.kv.num_blocks - lab.kv.num_available == seq.num_computed == len(seq.tokens) - 1


def test_a_preempted_request_is_the_next_to_come_back() -> None:
    lab = Lab(target=TableTarget(num_blocks=8, block_size=3), max_num_seqs=3)
    seqs = [Request((*PROMPT, i), SAMPLED, seed=i).sequence(seq_id=i) for i in range(5)]
    lab.run(*seqs)
    assert lab.engine.metrics.num_preemptions > 0
    firsts = [emission.seq.seq_id for emission in lab.emissions if emission.seq.num_output]
    assert list(dict.fromkeys(firsts)) == [0, 1, 2, 3, 4]
    lasts = list(dict.fromkeys(reversed([emission.seq.seq_id for emission in lab.emissions])))
    assert lasts == [4, 3, 2, 1, 0]


def test_a_finished_request_frees_its_place_at_once() -> None:
    lab = Lab(max_num_seqs=1)
    seqs = [Request(PROMPT, SamplingParams(max_tokens=1), seed=i).sequence(seq_id=i) for i in range(3)]
    lab.run(*seqs)
    assert lab.target.num_passes == 3


def test_cancelling_what_waits_or_has_ended_or_is_unknown_is_harmless() -> None:
    lab = Lab(max_num_seqs=1)
    first, second, stranger = (Request(PROMPT, SAMPLED).sequence(seq_id=i) for i in range(3))
    lab.engine.add(first)
    lab.engine.add(second)
    lab.step()
    lab.engine.cancel(second)
    lab.engine.cancel(stranger)
    lab.finish()
    lab.engine.cancel(first)
    assert [seq.finish_reason for seq in (first, second, stranger)] == ["length", "abort", None]
    assert Outcome.of(second).tokens == () and lab.engine.metrics.finished == {"length": 1, "abort": 1}


def test_tenants_do_not_share_cached_prefixes() -> None:
    lab = Lab()
    request = Request(PROMPT * 2, SAMPLED)
    lab.run(request.sequence())
    lab.run(replace(request, tenant="other").sequence(seq_id=1))
    assert lab.kv.num_hit_tokens == 0
    seq = request.sequence(seq_id=2)
    lab.run(seq)
    assert lab.kv.num_hit_tokens == seq.num_cached == 8


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "message"),
    [
        (0, 1, "a prompt must have at least 1 token, not 0; write a prompt."),
        (32, 1, "a prompt must have at most 31 tokens, so that one can follow within the context of 32, not 32; shorten it."),
        (10, 12, "this request may need 21 tokens of KV cache, which holds 20; lower max_tokens or raise kv_cache_memory."),
        (31, 5, "this request may need 31 tokens of KV cache, which holds 20; lower max_tokens or raise kv_cache_memory."),
    ],
)
def test_requests_that_can_never_fit_are_refused_in_clear_words(num_tokens: int, max_tokens: int, message: str) -> None:
    lab = Lab(target=TableTarget(num_blocks=5, block_size=4, max_model_len=32))
    with pytest.raises(RequestError) as refused:
        lab.engine.check(num_tokens, max_tokens)
    assert str(refused.value) == message
    with pytest.raises(RequestError):
        lab.engine.add(Request((1,) * num_tokens, SamplingParams(max_tokens=max_tokens)).sequence())
    assert not lab.engine.has_work


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [(1, 20), (10, 11), (20, 1), (17, 4)])
def test_requests_that_fill_the_cache_to_the_last_slot_are_served(num_tokens: int, max_tokens: int) -> None:
    request = Request(tuple(i % 8 for i in range(num_tokens)), SamplingParams(max_tokens=max_tokens))
    drafter = knowing("right", request)
    for k in (0, 4, 8):
        lab = Lab({"drafter": drafter}, target=TableTarget(num_blocks=5, block_size=4, max_model_len=32))
        assert lab.run(request.sequence("drafter", k)) == [plain(request)]


def test_a_drafter_that_is_not_there_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="ngrm"):
        Lab().engine.add(Request(PROMPT).sequence("ngrm", 2))


class _NotANumberTarget(TableTarget):
    """Goes wrong for contexts that start with token 5."""

    def row(self, context: list[int]) -> FloatArray:
        logits = super().row(context)
        return np.full_like(logits, np.nan) if context[0] == 5 and len(context) > 4 else logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_sequence_with_broken_logits_takes_its_batch_mates_down(temperature: float) -> None:
    target = _NotANumberTarget()
    kv = target.kv_cache()
    engine = Engine(target, kv, {"none": ScriptedDrafter(lambda tokens, k: [])}, RULES["coupled"], Controller(PassTimes.unknown()))
    params = SamplingParams(temperature=temperature, max_tokens=9)
    broken, sound = (Sequence(i, list(prompt), 3, params, seed=1) for i, prompt in enumerate(([5, 1, 2], [4, 1, 2])))
    engine.add(broken)
    engine.add(sound)
    ended = []
    while engine.has_work:
        ended += [emission.seq for emission in engine.step() if emission.seq.finish_reason]
    assert (broken.finish_reason, broken.num_output) == ("error", 2) and "dtype float32" in str(broken.stop_reason)
    assert (sound.finish_reason, sound.num_output) == ("length", 9)
    assert ended == [broken, sound] and kv.num_available == kv.num_blocks


def test_a_tree_is_verified_as_a_chain() -> None:
    class TreeDrafter(ScriptedDrafter):
        def propose(self, seqs: list[Sequence], num_tokens: list[int]) -> list[Draft]:
            return [Draft((1, 2), parents=(-1, -1)) for _ in seqs]

    target = TableTarget()
    drafters = {"tree": TreeDrafter(lambda tokens, k: [])}
    engine = Engine(target, target.kv_cache(), drafters, RULES["coupled"], Controller(PassTimes.unknown()))
    engine.add(Sequence(0, [1, 2], 2, SamplingParams(max_tokens=9), seed=1, drafters=("tree",), num_speculative_tokens=2))
    with pytest.raises(ConfigError, match="chains only"):
        engine.step()
