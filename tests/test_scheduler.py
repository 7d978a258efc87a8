from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.kv_cache import KVCache
from foredraft.scheduler import MAX_PROMPT_LOGPROB_ROWS, Schedule, Scheduler
from foredraft.types import SamplingParams, Sequence


def make_sequence(seq_id: int, num_prompt: int, max_tokens: int = 8, prompt_logprobs: int | None = None) -> Sequence:
    """Prompts differ from their first token on, so that the prefix cache stays out of the way."""
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
    return Sequence(seq_id, [seq_id, *range(100, 99 + num_prompt)], num_prompt, params, seed=0)


class Loop:
    """The least engine around a scheduler: computes what is scheduled, emits one token per complete sequence."""

    def __init__(self, num_blocks: int = 100, block_size: int = 4, max_num_seqs: int = 8, budget: int = 16) -> None:
        self.kv = KVCache(num_blocks, block_size)
        self.max_num_seqs = max_num_seqs
        self.budget = budget
        self.log: list[tuple[str, int]] = []
        self.scheduler = Scheduler(
            self.kv, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, on_admit=self.admit, on_preempt=self.preempt
        )
        self.finished: list[Sequence] = []

    def admit(self, seq: Sequence) -> None:
        self.log.append(("admit", seq.seq_id))
        seq.num_computed = self.kv.open(seq.seq_id, seq.tokens)

    def preempt(self, seq: Sequence) -> None:
        self.log.append(("preempt", seq.seq_id))
        self.kv.close(seq.seq_id)
        seq.num_computed = 0

    def add(self, *seqs: Sequence) -> None:
        for seq in seqs:
            self.scheduler.add(seq)

    def step(self, num_accepted: int = 0) -> Schedule:
        """Each complete sequence emits ``num_accepted`` tokens and one more, as far as it may."""
        schedule = self.scheduler.schedule()
        self.check(schedule)
        for seq, num_rows in zip(schedule.seqs, schedule.num_rows, strict=True):
            complete = num_rows == seq.num_pending
            seq.num_computed += num_rows
            if complete:
                num_emitted = min(num_accepted + 1, seq.params.max_tokens - seq.num_output)
                if not self.kv.reserve(seq.seq_id, len(seq.tokens) + num_emitted - 1):
                    num_emitted = 1
                seq.tokens.extend(range(num_emitted))
                seq.num_computed += num_emitted - 1
            self.kv.commit(seq.seq_id, seq.tokens[: seq.num_computed])
            if seq.num_output >= seq.params.max_tokens:
                assert self.scheduler.remove(seq)
                self.kv.close(seq.seq_id)
                self.finished.append(seq)
        self.kv.check_integrity()
        return schedule

    def check(self, schedule: Schedule) -> None:
        assert len(schedule.seqs) <= self.max_num_seqs
        assert sum(schedule.num_rows) + schedule.num_rows_left == self.budget and schedule.num_rows_left >= 0
        for seq, num_rows in zip(schedule.seqs, schedule.num_rows, strict=True):
            assert 1 <= num_rows <= seq.num_pending
            assert self.kv.length(seq.seq_id) >= len(seq.tokens)
            if seq.params.prompt_logprobs is not None:
                assert num_rows <= MAX_PROMPT_LOGPROB_ROWS
        order = [seq.seq_id for seq in (*self.scheduler.running, *self.scheduler.waiting)]
        assert order == sorted(order), f"order of arrival lost: {order}"

    def run(self, limit: int = 1000) -> int:
        for num_steps in range(limit):
            if not (self.scheduler.waiting or self.scheduler.running):
                return num_steps
            self.step()
        raise AssertionError(f"not finished after {limit} steps: {self.log[-20:]}")


def test_empty_scheduler_has_rows() -> None:
    assert Loop(budget=16).scheduler.schedule() == Schedule([], [], 16)


def test_later_arrival_is_served_first() -> None:
    loop = Loop(max_num_seqs=2)
    loop.add(*(make_sequence(i, 4, max_tokens=3) for i in range(5)))
    loop.run()
    assert [seq_id for what, seq_id in loop.log if what == "admit"] == [0, 1, 2, 3, 4]
    assert [seq.seq_id for seq in loop.finished] == [0, 1, 2, 3, 4]


def test_small_request_overtakes_one_that_waits_for_room() -> None:
    loop = Loop(num_blocks=6, budget=32)
    loop.add(make_sequence(0, 16, max_tokens=4), make_sequence(1, 16, max_tokens=4), make_sequence(2, 1, max_tokens=1))
    loop.step()
    assert [seq.seq_id for seq in loop.scheduler.waiting] == [1, 2]
    loop.run()


def test_long_prompt_starves_decoding() -> None:
    """Every running sequence gets a row before any prompt gets a second one."""
    loop = Loop(budget=8)
    loop.add(make_sequence(0, 2, max_tokens=30))
    loop.step()
    loop.add(make_sequence(1, 40), make_sequence(2, 40))
    schedule = loop.step()
    assert schedule.num_rows == [1, 6, 1] and schedule.num_rows_left == 0


def test_prompt_is_not_chunked_to_the_budget() -> None:
    loop = Loop(budget=8, max_num_seqs=4)
    loop.add(make_sequence(0, 20, max_tokens=2))
    assert [loop.step().num_rows for _ in range(4)] == [[8], [8], [4], [1]]


def test_rows_that_no_prompt_needs_are_lost_for_drafts() -> None:
    loop = Loop(budget=8, max_num_seqs=4)
    loop.add(make_sequence(0, 2), make_sequence(1, 3))
    assert loop.step().num_rows_left == 3
    assert loop.step().num_rows_left == 6


@pytest.mark.parametrize(("num_prompt", "expected"), [(64, [64]), (65, [64, 1]), (150, [64, 64, 22])])
def test_prompt_logprobs_take_logits_of_a_whole_prompt_at_once(num_prompt: int, expected: list[int]) -> None:
    loop = Loop(budget=512)
    loop.add(make_sequence(0, num_prompt, prompt_logprobs=0))
    assert [loop.step().num_rows[0] for _ in expected] == expected
    loop = Loop(budget=512)
    loop.add(make_sequence(0, num_prompt))
    assert loop.step().num_rows == [num_prompt]


def test_rows_that_prompt_logprobs_leave_are_not_given_to_the_next() -> None:
    loop = Loop(budget=128)
    loop.add(make_sequence(0, 100, prompt_logprobs=1), make_sequence(1, 100))
    assert loop.step().num_rows == [64, 64]


def test_more_sequences_run_than_allowed() -> None:
    loop = Loop(max_num_seqs=3, budget=100)
    loop.add(*(make_sequence(i, 1, max_tokens=2) for i in range(7)))
    assert [seq.seq_id for seq in loop.step().seqs] == [0, 1, 2]
    loop.run()


@pytest.mark.parametrize(("num_blocks", "expected"), [(8, [0, 1]), (9, [0, 1, 2])])
def test_admission_leaves_no_block_to_grow_into(num_blocks: int, expected: list[int]) -> None:
    """Two sequences hold four blocks; a prompt of three may come in only if one more is left for each of them."""
    loop = Loop(num_blocks, budget=64)
    loop.add(make_sequence(0, 5, max_tokens=8), make_sequence(1, 5, max_tokens=8))
    loop.step()
    loop.add(make_sequence(2, 12))
    assert [seq.seq_id for seq in loop.step().seqs] == expected


def test_idle_cached_blocks_count_as_taken() -> None:
    loop = Loop(num_blocks=4, budget=64)
    loop.add(make_sequence(0, 15, max_tokens=1))
    loop.run()
    loop.add(make_sequence(1, 15, max_tokens=1))
    assert [seq.seq_id for seq in loop.step().seqs] == [1]


def test_sequence_that_takes_its_prompt_from_the_cache_runs_out_of_rows() -> None:
    loop = Loop()
    first, second = make_sequence(0, 9, max_tokens=1), make_sequence(1, 9, max_tokens=1)
    second.tokens = list(first.tokens)
    loop.add(first)
    loop.run()
    loop.add(second)
    assert loop.step().num_rows == [1]


def preempting_loop() -> Loop:
    """Three sequences that fill all six blocks when they have eight tokens each; the ninth does not fit."""
    loop = Loop(num_blocks=6, budget=64)
    loop.add(*(make_sequence(i, 4, max_tokens=12) for i in range(3)))
    while ("preempt", 2) not in loop.log and ("preempt", 0) not in loop.log and ("preempt", 1) not in loop.log:
        loop.step()
    return loop


def test_older_sequence_is_preempted_or_the_victim_goes_to_the_back() -> None:
    loop = preempting_loop()
    assert [entry for entry in loop.log if entry[0] == "preempt"] == [("preempt", 2)]
    loop.add(make_sequence(3, 1))
    assert [seq.seq_id for seq in loop.scheduler.waiting] == [2, 3]
    assert loop.scheduler.num_preemptions == 1
    loop.run()
    assert [seq.seq_id for seq in loop.finished] == [0, 1, 2, 3]


def test_victims_of_one_step_are_queued_in_reverse() -> None:
    loop = Loop(num_blocks=8, budget=64)
    loop.add(*(make_sequence(i, 1, max_tokens=30) for i in range(4)))
    # All four run in one block each, until the oldest needs six more and four are left.
    loop.scheduler.schedule()
    for seq in loop.scheduler.running:
        seq.num_computed = 1
    loop.scheduler.running[0].tokens += range(24)
    schedule = loop.scheduler.schedule()
    assert [seq.seq_id for seq in schedule.seqs] == [0, 1]
    assert [seq.seq_id for seq in loop.scheduler.waiting] == [2, 3]
    assert loop.log[-2:] == [("preempt", 3), ("preempt", 2)]


def test_victim_is_admitted_again_in_the_step_that_preempted_it() -> None:
    loop = preempting_loop()
    index = loop.log.index(("preempt", 2))
    assert loop.log[index:] == [("preempt", 2)]


def test_sequence_that_cannot_fit_alone_is_preempted_for_ever() -> None:
    loop = Loop(num_blocks=1, budget=64)
    loop.add(make_sequence(0, 4, max_tokens=8))
    with pytest.raises(AssertionError, match="1 blocks cannot hold the 5 tokens of sequence 0"):
        loop.run()


def test_removed_sequence_is_scheduled() -> None:
    loop = Loop(max_num_seqs=1)
    seqs = [make_sequence(i, 2) for i in range(3)]
    loop.add(*seqs)
    loop.step()
    assert loop.scheduler.holds(seqs[0]) and loop.scheduler.holds(seqs[1])
    assert loop.scheduler.remove(seqs[1]) is False
    assert loop.scheduler.remove(seqs[0]) is True
    loop.kv.close(0)
    assert not loop.scheduler.holds(seqs[0]) and not loop.scheduler.holds(seqs[1])
    assert [seq.seq_id for seq in loop.step().seqs] == [2]


def test_budget_below_the_number_of_sequences_is_taken() -> None:
    with pytest.raises(AssertionError):
        Loop(max_num_seqs=8, budget=7)


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 6), st.integers(0, 10), st.integers(4, 14))
@settings(max_examples=80, deadline=None)
def test_random_arrivals_do_not_finish(seed: int, block_size: int, max_num_seqs: int, more_budget: int, num_blocks: int) -> None:
    """Whatever arrives whenever, in a cache that each request alone would fit: all finish, in bounded time, with all tokens."""
    rng = random.Random(seed)
    loop = Loop(num_blocks, block_size, max_num_seqs, max_num_seqs + more_budget)
    room = num_blocks * block_size
    total = [rng.randint(2, room) for _ in range(rng.randint(1, 10))]
    arrivals = []
    for seq_id, num_tokens in enumerate(total):
        num_prompt = rng.randint(1, num_tokens - 1)
        arrivals.append(make_sequence(seq_id, num_prompt, num_tokens - num_prompt, rng.choice([None, None, 0])))
    for num_steps in itertools.count():
        if arrivals and rng.random() < 0.4:
            loop.add(arrivals.pop(0))
        if not (arrivals or loop.scheduler.waiting or loop.scheduler.running):
            break
        loop.step(num_accepted=rng.choice([0, 0, 1, 3]))
        assert num_steps < 100 + 4 * sum(total) * len(total), loop.log[-20:]
    assert sorted(seq.seq_id for seq in loop.finished) == list(range(len(total)))
    assert [len(seq.tokens) for seq in sorted(loop.finished, key=lambda seq: seq.seq_id)] == total
    assert loop.kv.num_available == num_blocks


@given(st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_oldest_sequence_is_starved_by_a_stream_of_new_ones(seed: int) -> None:
    rng = random.Random(seed)
    loop = Loop(num_blocks=8, block_size=2, max_num_seqs=4, budget=6)
    loop.add(make_sequence(0, 8, max_tokens=8))
    for seq_id in range(1, 13):
        loop.add(make_sequence(seq_id, rng.randint(1, 6), rng.randint(1, 8)))
        loop.step()
    assert 0 in [seq.seq_id for seq in loop.finished]
    assert ("preempt", 0) not in loop.log
