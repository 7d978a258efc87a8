from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from foredraft.kv_cache import KVCache

Slot = tuple[str, tuple[int, ...]]
SIZE = 2


class _Model:
    """What one sequence believes: its tokens, and how many of them it has computed and committed."""

    def __init__(self, namespace: str, tokens: list[int], num_computed: int) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.num_computed = num_computed


class KVCacheMachine(RuleBasedStateMachine):
    """Random lives of several sequences over a cache whose contents are simulated.

    A slot's content is (namespace, all tokens up to its own), since keys and values depend on all of these; so a match, a
    rollback or an eviction that is wrong leaves some sequence with a slot that does not hold what the sequence needs.
    """

    @initialize(num_blocks=st.integers(1, 9), prefix_caching=st.booleans())
    def start(self, num_blocks: int, prefix_caching: bool) -> None:
        self.kv = KVCache(num_blocks, SIZE, prefix_caching)
        self.prefix_caching = prefix_caching
        self.slots: dict[tuple[int, int], Slot] = {}
        self.models: dict[int, _Model] = {}
        self.next_id = 0
        # Complete while nothing was evicted or rolled back: then every prefix in it must be found.
        self.registered: set[Slot] | None = set()

    def num_held(self) -> int:
        return len({block for seq_id in self.models for block in self.kv.block_table(seq_id)})

    def slot(self, seq_id: int, index: int) -> tuple[int, int]:
        return self.kv.block_table(seq_id)[index // SIZE], index % SIZE

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.models)), label="sequence")

    @rule(
        namespace=st.sampled_from(["", "a", "0"]), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), reuse=st.booleans()
    )
    def open(self, namespace: str, tokens: list[int], reuse: bool) -> None:
        seq_id, self.next_id = self.next_id, self.next_id + 1
        num_hit = self.kv.open(seq_id, tokens, namespace, reuse=reuse)
        assert num_hit % SIZE == 0 and 0 <= num_hit < len(tokens)
        assert num_hit == 0 or (reuse and self.prefix_caching)
        assert self.kv.length(seq_id) == num_hit
        if self.registered is not None and reuse and self.prefix_caching:
            ends = [end for end in range(0, len(tokens), SIZE) if not end or (namespace, tuple(tokens[:end])) in self.registered]
            assert num_hit == max(ends), f"{num_hit} tokens found of {max(ends)} cached"
        self.models[seq_id] = _Model(namespace, tokens, num_hit)

    @precondition(lambda self: self.models)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=4))
    def reserve_and_write(self, data: st.DataObject, more: list[int]) -> None:
        """A pass: known tokens and drafts are computed, if there is room."""
        seq_id = self.pick(data)
        model = self.models[seq_id]
        tokens = [*model.tokens, *more]
        before = list(self.kv.block_table(seq_id)), self.kv.length(seq_id), self.kv.num_available
        num_new = max(0, self.kv.blocks_for(len(tokens)) - len(before[0]))
        num_free = self.kv.num_available
        granted = self.kv.reserve(seq_id, len(tokens))
        assert granted == (num_new <= num_free), (num_new, num_free)
        if not granted:
            assert before == (self.kv.block_table(seq_id), self.kv.length(seq_id), self.kv.num_available)
            return
        assert self.kv.block_table(seq_id)[: len(before[0])] == before[0]
        assert self.kv.length(seq_id) == max(before[1], len(tokens))
        written = {self.slot(seq_id, index)[0] for index in range(model.num_computed, len(tokens))}
        for other in self.models:
            assert other == seq_id or not written & set(self.kv.block_table(other)), f"{seq_id} writes into {other}'s blocks"
        for index in range(model.num_computed, len(tokens)):
            self.slots[self.slot(seq_id, index)] = (model.namespace, tuple(tokens[: index + 1]))
        model.tokens, model.num_computed = tokens, len(tokens)
        if len({block for block, _ in self.slots}) == self.kv.num_blocks:
            self.registered = None  # from here on, taking a block may evict another

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        seq_id = self.pick(data)
        model = self.models[seq_id]
        num_committed = data.draw(st.integers(0, model.num_computed), label="committed")
        self.kv.commit(seq_id, model.tokens[:num_committed])
        if self.registered is not None:
            self.registered |= {(model.namespace, tuple(model.tokens[:end])) for end in range(SIZE, num_committed + 1, SIZE)}

    @precondition(lambda self: self.models)
    @rule(data=st.data(), continue_differently=st.booleans())
    def truncate(self, data: st.DataObject, continue_differently: bool) -> None:
        """Also into registered and shared blocks, which the engine never does."""
        seq_id = self.pick(data)
        model = self.models[seq_id]
        length = data.draw(st.integers(0, self.kv.length(seq_id)), label="length")
        table = list(self.kv.block_table(seq_id))
        others = [set(self.kv.block_table(other)) for other in self.models if other != seq_id]
        remaining = self.kv.truncate(seq_id, length)
        shared = length % SIZE and any(table[length // SIZE] in blocks for blocks in others)
        assert remaining == (length - length % SIZE if shared else length)
        assert self.kv.block_table(seq_id) == table[: self.kv.blocks_for(remaining)]
        assert self.kv.length(seq_id) == remaining
        model.num_computed = min(model.num_computed, remaining)
        if continue_differently:
            model.tokens = model.tokens[: max(1, model.num_computed)]
        if length % SIZE:
            self.registered = None

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        seq_id = self.pick(data)
        self.kv.close(seq_id)
        del self.models[seq_id]

    @invariant()
    def every_sequence_finds_what_it_computed(self) -> None:
        for seq_id, model in self.models.items():
            for index in range(model.num_computed):
                assert self.slots[self.slot(seq_id, index)] == (model.namespace, tuple(model.tokens[: index + 1])), (seq_id, index)

    @invariant()
    def blocks_add_up(self) -> None:
        self.kv.check_integrity()
        assert self.kv.num_available == self.kv.num_blocks - self.num_held()
        for seq_id in self.models:
            assert len(self.kv.block_table(seq_id)) == self.kv.blocks_for(self.kv.length(seq_id))

    def teardown(self) -> None:
        for seq_id in self.models:
            self.kv.close(seq_id)
        self.kv.check_integrity()
        assert self.kv.num_available == self.kv.num_blocks


TestKVCacheMachine = KVCacheMachine.TestCase
TestKVCacheMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


# ------------------------------------------------------------------------------------------------ one thing at a time


def run(kv: KVCache, seq_id: int, tokens: list[int], namespace: str = "") -> int:
    """Open, compute and commit all tokens; returns the length found in the cache."""
    num_hit = kv.open(seq_id, tokens, namespace)
    assert kv.reserve(seq_id, len(tokens))
    kv.commit(seq_id, tokens)
    kv.check_integrity()
    return num_hit


def tokens_of(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


@pytest.mark.parametrize(("length", "expected"), [(1, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8)])
def test_match_leaves_no_token_to_compute(length: int, expected: int) -> None:
    kv = KVCache(10, 4)
    run(kv, 0, tokens_of(9))
    assert kv.open(1, tokens_of(length)) == expected


@pytest.mark.parametrize("keep_open", [True, False])
def test_second_identical_request_computes_again(keep_open: bool) -> None:
    kv = KVCache(10, 4)
    assert run(kv, 0, tokens_of(9)) == 0
    blocks = list(kv.block_table(0))
    if not keep_open:
        kv.close(0)
    assert run(kv, 1, tokens_of(9)) == 8
    assert kv.block_table(1)[:2] == blocks[:2]
    assert kv.block_table(1)[2] != blocks[2] or not keep_open
    assert (kv.num_queried_tokens, kv.num_hit_tokens) == (18, 8)


def test_block_with_the_same_tokens_after_another_prefix_matches() -> None:
    kv = KVCache(10, 2)
    run(kv, 0, [1, 1, 5, 5, 9])
    assert kv.open(1, [2, 2, 5, 5, 9]) == 0
    assert kv.open(2, [5, 5, 9]) == 0


def test_uncommitted_draft_rows_are_found_by_others() -> None:
    kv = KVCache(10, 2)
    kv.open(0, [1, 2, 3])
    kv.reserve(0, 6)
    kv.commit(0, [1, 2, 3])
    assert kv.open(1, [1, 2, 3, 4, 5]) == 2


def test_namespaces_share_blocks() -> None:
    kv = KVCache(20, 2)
    run(kv, 0, [1, 2, 3], "tenant")
    for seq_id, namespace in enumerate(["", "other", "tenant2", "0", "1"], start=1):
        assert run(kv, seq_id, [1, 2, 3], namespace) == 0
    assert kv.open(9, [1, 2, 3], "tenant") == 2


def test_namespace_that_looks_like_an_identity_shares_a_chain() -> None:
    """The parent of a first block is a namespace and that of a later one a number; the two must never meet."""
    kv = KVCache(20, 2)
    run(kv, 0, [1, 2, 3, 4, 5])
    for seq_id in range(1, 5):
        assert kv.open(seq_id, [3, 4, 5], str(seq_id - 1)) == 0


def test_disabled_prefix_cache_or_reuse_attaches_blocks() -> None:
    kv = KVCache(10, 2, prefix_caching=False)
    run(kv, 0, [1, 2, 3])
    assert kv.open(1, [1, 2, 3]) == 0 and kv.num_queried_tokens == 0
    kv = KVCache(10, 2)
    run(kv, 0, [1, 2, 3])
    assert kv.open(1, [1, 2, 3], reuse=False) == 0
    assert (kv.num_queried_tokens, kv.num_hit_tokens) == (3, 0)


def test_eviction_is_not_least_recently_used() -> None:
    kv = KVCache(4, 2)
    for seq_id, first in enumerate((10, 20, 30)):
        run(kv, seq_id, tokens_of(2, first))
        kv.close(seq_id)
    assert kv.open(3, [10, 11, 0]) == 2  # used again, so now the youngest
    kv.close(3)
    kv.open(4, [0])
    assert kv.reserve(4, 4)  # the free block, and one eviction
    hits = {first: kv.open(first, [first, first + 1, 0]) for first in (10, 20, 30)}
    assert hits == {10: 2, 20: 0, 30: 2}


def test_beginning_of_a_prefix_is_evicted_before_its_end() -> None:
    kv = KVCache(4, 2)
    run(kv, 0, tokens_of(8))
    kv.close(0)
    for num_evicted, expected in ((1, 6), (2, 4), (3, 2), (4, 0)):
        kv.open(1, [99])
        assert kv.reserve(1, 2 * num_evicted)
        kv.close(1)
        assert kv.open(2, tokens_of(9)) == expected
        kv.close(2)


def test_idle_block_is_evicted_while_a_free_one_remains() -> None:
    kv = KVCache(4, 2)
    run(kv, 0, [1, 2])
    kv.close(0)
    kv.open(1, [9])
    assert kv.reserve(1, 6)
    assert kv.open(2, [1, 2, 3]) == 2


def test_held_block_is_evicted() -> None:
    kv = KVCache(3, 2)
    run(kv, 0, [1, 2, 3, 4])
    kv.open(1, [9])
    assert kv.reserve(1, 2) and not kv.reserve(1, 3)
    assert not set(kv.block_table(0)) & set(kv.block_table(1))
    kv.check_integrity()


def test_orphan_of_an_evicted_parent_is_found_under_a_new_one() -> None:
    """A first block that is computed anew gets a new identity, and the old continuation must not be reachable by chance."""
    kv = KVCache(3, 2)
    run(kv, 0, [1, 2])
    assert run(kv, 1, [1, 2, 3, 4]) == 2
    kv.close(1)
    kv.close(0)
    kv.open(2, [9])
    assert kv.reserve(2, 4)
    kv.close(2)
    run(kv, 3, [7, 7])
    assert kv.open(4, [7, 7, 3, 4, 5]) == 2
    kv.check_integrity()


def test_refused_reservation_changes_something() -> None:
    kv = KVCache(3, 2)
    run(kv, 0, [1, 2])
    kv.close(0)
    kv.open(1, [5])
    assert not kv.reserve(1, 7)
    assert kv.block_table(1) == [] and kv.length(1) == 0 and kv.num_available == 3
    assert kv.open(2, [1, 2, 3]) == 2


def test_shorter_reservation_gives_blocks_up() -> None:
    kv = KVCache(3, 2)
    kv.open(0, [5])
    kv.reserve(0, 5)
    assert kv.reserve(0, 1) and kv.length(0) == 5 and len(kv.block_table(0)) == 3


def test_truncate_overwrites_a_shared_block() -> None:
    kv = KVCache(6, 4)
    run(kv, 0, tokens_of(8))
    assert kv.open(1, tokens_of(9)) == 8
    assert kv.truncate(1, 6) == 4
    assert kv.reserve(1, 6)
    assert kv.block_table(1)[0] == kv.block_table(0)[0] and kv.block_table(1)[1] != kv.block_table(0)[1]
    assert kv.truncate(0, 6) == 6  # no longer shared, but it must not be found any more
    assert kv.open(2, tokens_of(9)) == 4
    kv.check_integrity()


def test_truncated_block_is_registered_again_under_stale_tokens() -> None:
    kv = KVCache(6, 2)
    run(kv, 0, [1, 2, 3, 4])
    kv.truncate(0, 3)
    kv.reserve(0, 4)
    kv.commit(0, [1, 2, 3, 7])
    assert kv.open(1, [1, 2, 3, 4, 0]) == 2
    assert kv.open(2, [1, 2, 3, 7, 0]) == 4


def test_same_content_computed_twice_at_once_breaks_the_chain() -> None:
    """Two sequences that ran side by side: the second one's blocks stay its own, and both may go on."""
    kv = KVCache(10, 2)
    kv.open(0, [1, 2, 3])
    kv.open(1, [1, 2, 3])
    for seq_id in (0, 1):
        kv.reserve(seq_id, 3)
        kv.commit(seq_id, [1, 2, 3])
    assert not set(kv.block_table(0)) & set(kv.block_table(1))
    kv.reserve(1, 4)
    kv.commit(1, [1, 2, 3, 4])
    kv.close(1)
    kv.close(0)
    kv.check_integrity()
    assert kv.open(2, [1, 2, 3, 4, 5]) == 4


def test_misuse_passes_unnoticed() -> None:
    kv = KVCache(4, 2)
    kv.open(0, [1])
    kv.reserve(0, 3)
    with pytest.raises(AssertionError, match="sequence 0 is open already"):
        kv.open(0, [1])
    with pytest.raises(AssertionError, match="4 tokens committed, 3 reserved"):
        kv.commit(0, [1, 2, 3, 4])
    for length in (-1, 4):
        with pytest.raises(AssertionError, match=f"cannot truncate 3 tokens to {length}"):
            kv.truncate(0, length)
    for sizes in ((0, 1), (1, 0)):
        with pytest.raises(AssertionError):
            KVCache(*sizes)


@pytest.mark.parametrize("break_it", ["leak", "free twice", "double hold", "registered free block"])
def test_integrity_check_is_blind(break_it: str) -> None:
    kv: Any = KVCache(4, 2)
    run(kv, 0, [1, 2, 3])
    if break_it == "leak":
        kv._free.pop()
    elif break_it == "free twice":
        kv._free.append(kv._free[0])
    elif break_it == "double hold":
        kv._holdings[0].blocks[1] = kv._holdings[0].blocks[0]
    else:
        kv._release(kv._holdings[0].blocks.pop())
        kv._holdings[0].length = 2
        kv._key_of[kv._free[-1]] = ("", (7, 7))
    with pytest.raises(AssertionError):
        kv.check_integrity()
