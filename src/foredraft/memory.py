"""How many bytes each buffer takes, and how many blocks of keys and values fit.

Owns: the division of the KV budget between the target and a draft model.  Does not know: what is stored in a block.
"""

from __future__ import annotations

import os

from foredraft.types import CapacityError

GIB = 1024**3


def available_bytes() -> int:
    """Bytes of main memory that a program can still take, by the operating system's estimate."""
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def default_kv_bytes(bytes_per_token: int, max_model_len: int, free_bytes: int) -> int:
    """One whole context or 1 GiB, whichever is more, but at most half of what is free."""
    return min(max(bytes_per_token * max_model_len, GIB), free_bytes // 2)


def plan_kv_blocks(budget: int, bytes_per_token: list[int], block_size: int) -> int:
    """Blocks that each cache gets when caches with these ``bytes_per_token`` share ``budget`` bytes, all for the same tokens."""
    return budget // (sum(bytes_per_token) * block_size)


def check_context_fits(num_blocks: int, block_size: int, max_model_len: int, budget: int) -> None:
    """Raise CapacityError when not even one sequence of ``max_model_len`` tokens fits."""
    room = num_blocks * block_size
    if room < max_model_len:
        # A budget below one block tells nothing about the size of a block.
        needed = f"at least {-(-budget * max_model_len // room)} bytes" if room else "many times as much"
        raise CapacityError(
            f"kv_cache_memory of {budget} bytes holds {room} tokens, fewer than max_model_len {max_model_len}; "
            f"give kv_cache_memory {needed} or lower max_model_len."
        )
