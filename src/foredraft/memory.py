"""How many bytes each buffer takes, and how many blocks of keys and values fit.

Owns: the lines of the memory plan, and the division of the KV budget between the target and a draft model.  Does not know: what is
stored in a block, or which model takes what.

A plan counts every buffer as if it were in full use: all pages of the caches written, a pass of as many rows as there may be, the
drafter's statistics full.  The system gives a page when it is first written, so an engine that was just started has less resident.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.types import CapacityError

GIB = 1024**3
# An entry of a large dict from int to int in CPython: two objects of 32 bytes, and 28 to 60 for the table, by how full it is.
BYTES_PER_DICT_ENTRY = 110


# ------------------------------------------------------------------------------------------------ the plan


@dataclass(frozen=True)
class ModelBytes:
    """What one model takes: ``weights`` by their run-time format, keys and values ``kv_per_token``, and activations of the
    largest pass in ``scratch``.
    """

    weights: Mapping[str, int]
    kv_per_token: int
    scratch: int

    def __add__(self, other: ModelBytes) -> ModelBytes:
        """Both together."""
        names = dict.fromkeys([*self.weights, *other.weights])
        weights = {name: self.weights.get(name, 0) + other.weights.get(name, 0) for name in names}
        return ModelBytes(weights, self.kv_per_token + other.kv_per_token, self.scratch + other.scratch)


@dataclass(frozen=True)
class DrafterBytes:
    """A drafter's statistics: ``fixed`` for all requests together, and ``per_token`` of every running request."""

    fixed: int = 0
    per_token: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by buffer, each in full use; see the module's docstring.

    ``libraries`` is what the process held before it loaded weights: interpreter, libraries and tokenizers.  ``statistics`` are a
    drafter's own.  ``num_blocks`` blocks of ``block_size`` tokens are each model's cache, and ``max_model_len`` is the longest
    sequence in tokens.  ``formats`` says what ``weights`` and ``draft_weights`` together are kept in.
    """

    libraries: int
    weights: int
    draft_weights: int
    kv: int
    draft_kv: int
    logits: int
    scratch: int
    statistics: int
    formats: Mapping[str, int]
    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def lines(self) -> dict[str, int]:
        """Bytes by the name of the buffer; their sum is ``total``."""
        names = ("libraries", "weights", "draft_weights", "kv", "draft_kv", "logits", "scratch", "statistics")
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> int:
        """Bytes that the process takes."""
        return sum(self.lines.values())

    @property
    def num_tokens(self) -> int:
        """Tokens that a cache holds."""
        return self.num_blocks * self.block_size

    def num_requests(self, context: int) -> int:
        """Requests of ``context`` tokens each that the cache holds at the same time, when they share no prefix."""
        assert context >= 1, context
        return self.num_blocks // -(-context // self.block_size)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        sizes = {"num_blocks": self.num_blocks, "block_size": self.block_size, "max_model_len": self.max_model_len}
        return {**self.lines, "total": self.total, "num_tokens": self.num_tokens, **sizes, "formats": dict(self.formats)}


def make_plan(
    target: ModelBytes,
    draft: ModelBytes | None,
    drafter: DrafterBytes,
    *,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    logits: int,
    libraries: int,
) -> MemoryPlan:
    """The plan of a target, of draft model and head if there are any, and of statistics; ``logits`` and ``libraries`` in bytes."""
    num_tokens = num_blocks * block_size
    models = [target] if draft is None else [target, draft]
    names = dict.fromkeys(name for model in models for name in model.weights)
    return MemoryPlan(
        libraries=libraries,
        weights=sum(target.weights.values()),
        draft_weights=sum(draft.weights.values()) if draft is not None else 0,
        kv=num_tokens * target.kv_per_token,
        draft_kv=num_tokens * draft.kv_per_token if draft is not None else 0,
        logits=logits,
        scratch=sum(model.scratch for model in models),
        statistics=drafter.fixed + num_tokens * drafter.per_token,
        formats={name: sum(model.weights.get(name, 0) for model in models) for name in names},
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
    )


# ------------------------------------------------------------------------------------------------ the KV budget


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


def check_weights_fit(name: str, empty: MemoryPlan, free_bytes: int) -> None:
    """Raise CapacityError when a plan without a cache takes more than ``free_bytes`` beside what the process holds."""
    needed = empty.total - empty.libraries
    if needed > free_bytes:
        weights = empty.weights + empty.draft_weights
        raise CapacityError(
            f"{name} needs {_megabytes(weights)} for its weights and {_megabytes(needed - weights)} to compute, beside a KV cache, "
            f"but only {_megabytes(free_bytes)} of memory are free; choose a smaller model or quantization."
        )


def check_cache_fits(plan: MemoryPlan, free_bytes: int) -> None:
    """Raise CapacityError when a plan whose models fit takes more than ``free_bytes`` with its cache full."""
    needed, cache = plan.total - plan.libraries, plan.kv + plan.draft_kv
    if needed > free_bytes:
        raise CapacityError(
            f"a KV cache of {_megabytes(cache)} needs {_megabytes(needed)} of memory with the weights and all buffers, but only "
            f"{_megabytes(free_bytes)} are free; lower kv_cache_memory to at most {max(0, cache - (needed - free_bytes))} bytes."
        )


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"


# ------------------------------------------------------------------------------------------------ the machine


def resident_bytes() -> int:
    """Bytes of main memory that this process holds; where only the system's record of the peak is to be had, that."""
    if os.path.exists("/proc/self/statm"):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes of main memory that this process can still take: the system's estimate, or less where a container's limit is nearer.

    ``root`` is where ``proc`` and ``sys`` are.
    """
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return min([1024 * int(fields["MemAvailable"].split()[0]), *_allowed_by_control_groups(root)])


def _allowed_by_control_groups(root: Path) -> list[int]:
    """What each limit on the way from this process's control groups (version 1 and 2) to their roots leaves."""
    versions = {
        "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    memberships = root / "proc/self/cgroup"
    left = []
    for line in memberships.read_text().splitlines() if memberships.exists() else []:
        _, controllers, path = line.split(":", 2)
        key = "memory" if "memory" in controllers.split(",") else controllers
        if key not in versions:
            continue
        mount, limit_name, usage_name, cache_name = versions[key]
        group = root / mount / path.lstrip("/")
        # Inside a container the path may be the host's, and what is mounted is the container's own group.
        for folder in (group, *group.parents):
            if folder.is_relative_to(root / mount) and (folder / limit_name).exists():
                limit = (folder / limit_name).read_text().strip()
                if limit != "max":
                    statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    used = int((folder / usage_name).read_text()) - int(statistics.get(cache_name, 0))
                    left.append(max(0, int(limit) - used))
    return left
