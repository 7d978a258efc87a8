"""The division of memory, and what is said when it does not suffice."""

from __future__ import annotations

import pytest

from foredraft.memory import GIB, check_context_fits, default_kv_bytes, plan_kv_blocks
from foredraft.types import CapacityError


def test_a_draft_models_cache_is_not_counted() -> None:
    assert plan_kv_blocks(1600, [10], 16) == 10
    assert plan_kv_blocks(1600, [7, 3], 16) == 10
    assert plan_kv_blocks(1599, [10], 16) == 9


def test_the_default_takes_more_than_half_of_what_is_free_or_less_than_a_context() -> None:
    assert default_kv_bytes(1000, 8192, 8 * GIB) == GIB
    assert default_kv_bytes(GIB, 3, 8 * GIB) == 3 * GIB
    assert default_kv_bytes(GIB, 3, 2 * GIB) == GIB


def test_the_memory_that_a_refusal_asks_for_does_not_suffice() -> None:
    budget, block_size = 3_000_000, 16
    with pytest.raises(CapacityError) as refused:
        check_context_fits(plan_kv_blocks(budget, [46080], block_size), block_size, 8192, budget)
    asked = int(str(refused.value).split("at least ")[1].split()[0])
    check_context_fits(plan_kv_blocks(asked, [46080], block_size), block_size, 8192, asked)


def test_a_budget_below_one_block_is_answered_with_a_made_up_number() -> None:
    with pytest.raises(CapacityError, match=r"holds 0 tokens.* many times as much or lower max_model_len"):
        check_context_fits(0, 16, 8192, 1)
