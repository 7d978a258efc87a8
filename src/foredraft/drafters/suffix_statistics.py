"""Where the present end of a text occurred before: in the request itself, and in earlier requests' outputs.

Owns: both indexes, their size limits, and the separation of tenants.  Does not know: what is drafted from an occurrence.

An *anchor* is an n-gram of 8, 4, 2 or 1 tokens; an *occurrence* is a position where the anchor at the sequence's end also ended.
Occurrences of an anchor are chained from the most recent backwards, as in LZ77 compressors.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np

from foredraft.drafters.ngram_table import context_keys
from foredraft.types import CapacityError

ANCHORS = (8, 4, 2, 1)
MAX_OCCURRENCES = 16
MAX_VISITED = 48
_LONGEST = max(ANCHORS)


class Statistics(Protocol):
    """Where to look for occurrences; ``is_own`` when ``tokens`` is the very sequence that is drafted for."""

    is_own: bool

    @property
    def tokens(self) -> Seq[int]:
        """What an end indexes; a negative number belongs to no text."""
        ...

    def ends(self, level: int, suffix: list[int]) -> list[int]:
        """Where the last ``ANCHORS[level]`` tokens of ``suffix`` ended before, most recent first."""
        ...

    def ends_after(self, token: int) -> list[int]:
        """Where ``token`` occurred, most recent first."""
        ...


class RequestStatistics:
    """One sequence's own tokens; ``ends`` are positions in ``seq.tokens``."""

    is_own = True

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._num_indexed = 0
        self._last: list[dict[int, int]] = [{} for _ in ANCHORS]
        self._previous = [array("i") for _ in ANCHORS]

    def extend(self, tokens: list[int]) -> None:
        """Index what was committed since the last call; ``tokens`` is the whole sequence."""
        self.tokens = tokens
        assert len(tokens) >= self._num_indexed, (len(tokens), self._num_indexed)
        for n, last, previous in zip(ANCHORS, self._last, self._previous, strict=True):
            for end in range(self._num_indexed, len(tokens)):
                if end + 1 < n:
                    previous.append(-1)
                    continue
                key = hash(tuple(tokens[end + 1 - n : end + 1]))
                previous.append(last.get(key, -1))
                last[key] = end
        self._num_indexed = len(tokens)

    def ends(self, level: int, suffix: list[int]) -> list[int]:
        """Where the last ``ANCHORS[level]`` tokens of ``suffix`` ended before, most recent first."""
        # Equal hashes are taken for equal tokens: were they not, a draft would be worse, and nothing else.
        previous = self._previous[level]
        return self._chain(previous, previous[-1] if previous else -1)

    def ends_after(self, token: int) -> list[int]:
        """Where ``token`` occurred, most recent first."""
        return self._chain(self._previous[-1], self._last[-1].get(hash((token,)), -1))

    def _chain(self, previous: array[int], end: int) -> list[int]:
        ends = list[int]()
        while end >= 0 and len(ends) < MAX_OCCURRENCES:
            ends.append(end)
            end = previous[end]
        return ends


def _zeros(count: int, dtype: np.dtype[Any]) -> memoryview:
    """Zeros straight from the system, in small pages: numpy asks for huge ones, and to clear those takes tens of milliseconds when
    the first answer ends."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    pages = mmap.mmap(-1, max(1, count * dtype.itemsize), **private)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype, count).data


class SharedStatistics:
    """Outputs of earlier requests in a ring of fixed size, each visible to its own tenant only.

    Every document occupies one header slot and then its tokens, never across the ring's end.  A position counts slots ever
    used; what lies before ``_oldest`` is evicted, and its memory is simply used again.  ``ends`` are slots.

    Args:
        max_bytes: of all arrays and of the tenants' names together.
        max_requests: documents kept at most; 0 keeps none.

    Raises:
        CapacityError: the arrays cannot be allocated.
    """

    is_own = False

    # tokens, owner and the chains: 4 bytes each per slot; one 8-byte chain head per anchor for every second slot.
    _BYTES_PER_SLOT = 4 + 4 + 4 * len(ANCHORS) + 8 * len(ANCHORS) // 2
    _BYTES_PER_TENANT = 512

    def __init__(self, max_bytes: int, max_requests: int) -> None:
        self.num_requests = 0
        self._max_requests = max_requests
        self._max_tenant_bytes = max_bytes // 8
        num_slots = min((max_bytes - self._max_tenant_bytes) // self._BYTES_PER_SLOT, 2**31 - 2)
        self._num_slots = num_slots if max_requests > 0 and num_slots >= 4 else 0
        self._num_heads = max(self._num_slots // 2, 1)
        try:
            # Zeroed by the system when first touched: an unused ring occupies no memory.
            self.tokens = _zeros(self._num_slots + 1, np.dtype(np.intc))
            self._owner = _zeros(self._num_slots + 1, np.dtype(np.intc))
            self._back = [_zeros(self._num_slots + 1, np.dtype(np.intc)) for _ in ANCHORS]
            self._heads = [_zeros(self._num_heads, np.dtype(np.int64)) for _ in ANCHORS]
        except (MemoryError, OSError, ValueError, OverflowError) as error:
            raise CapacityError(f"suffix_decoding_max_bytes ({max_bytes}) cannot be allocated; lower it.") from error
        self.tokens[self._num_slots] = -1
        self._tenants: dict[str, list[int]] = {}
        self._names: dict[int, str] = {}
        self._tenant_bytes = 0
        self._next_tenant = 1
        # Positions start above 0, so that an untouched head (0) is older than everything.
        self._oldest = self._next = self._num_slots
        self._active = 0

    @property
    def arrays(self) -> tuple[memoryview, memoryview, list[memoryview], list[memoryview]]:
        """(tokens, owners, chains, chain heads), the last two by anchor; they stay in place."""
        return self.tokens, self._owner, self._back, self._heads

    @property
    def selected(self) -> tuple[int, int]:
        """(number of the selected tenant, 0 for none; the oldest position that is kept)."""
        return self._active, self._oldest

    def select(self, tenant: str) -> bool:
        """Make ``ends`` answer for ``tenant``; False when there is nothing of it."""
        self._active = self._tenants[tenant][0] if tenant in self._tenants else 0
        return self._active > 0

    def ends(self, level: int, suffix: list[int]) -> list[int]:
        """Where the last ``ANCHORS[level]`` tokens of ``suffix`` ended before, most recent first."""
        n, num_slots, active, oldest = ANCHORS[level], self._num_slots, self._active, self._oldest
        wanted = suffix[-n:]
        if len(wanted) < n:
            return []
        tokens, owner, back, last, ends = self.tokens, self._owner, self._back[level], wanted[-1], list[int]()
        position = self._heads[level][context_keys(wanted, n, active)[-1] % self._num_heads]
        for _ in range(MAX_VISITED):
            if position < oldest:
                break
            slot = position % num_slots
            # Other n-grams and other tenants share the chain when their hashes do.
            if owner[slot] == active and tokens[slot] == last and (n == 1 or tokens[slot + 1 - n : slot].tolist() == wanted[:-1]):
                ends.append(slot)
            distance = back[slot]
            if not distance or len(ends) == MAX_OCCURRENCES:
                break
            position -= distance
        return ends

    def ends_after(self, token: int) -> list[int]:
        """Where ``token`` occurred, most recent first."""
        return self.ends(len(ANCHORS) - 1, [token])

    def add(self, tenant: str, tokens: list[int]) -> None:
        """Take in one finished output, evicting the oldest for it; of one larger than the ring the end is kept."""
        if not self._num_slots or not tokens or self._tenant_size(tenant) > self._max_tenant_bytes:
            return
        tokens = tokens[-(self._num_slots - 1) :]
        needed = len(tokens) + 1
        room = self._num_slots - self._next % self._num_slots
        if needed > room:
            self._make_room(room)
            self._write_header(0, room - 1)
            self._next += room
        self._make_room(needed)
        while self.num_requests >= self._max_requests:
            self._evict()
        number = self._tenant_number(tenant)
        self._write_header(number, len(tokens))
        self._write(number, tokens)
        self._next += needed
        self._tenants[tenant][1] += 1
        self.num_requests += 1

    def _make_room(self, num_slots: int) -> None:
        while self._next + num_slots - self._oldest > self._num_slots:
            self._evict()

    def _write_header(self, number: int, length: int) -> None:
        """Start a document of tenant ``number``, or, for number 0, mark the unused rest of the ring."""
        slot = self._next % self._num_slots
        self.tokens[slot] = -1
        self._owner[slot] = number
        self._back[0][slot] = length

    def _write(self, number: int, document: list[int]) -> None:
        first = self._next + 1
        slot = first % self._num_slots
        self.tokens[slot : slot + len(document)] = memoryview(array("i", document))
        self._owner[slot : slot + len(document)] = memoryview(array("i", [number]) * len(document))
        # The slot behind is a header or not in use; either way nothing may run over it.
        self.tokens[slot + len(document)] = -1
        self._index(number, document, first)

    def _index(self, number: int, document: list[int], first: int) -> None:
        """Chain the tokens of a document, the first of which is at position ``first``."""
        slot = first % self._num_slots
        chains = [(n - 1, back, heads) for n, back, heads in zip(ANCHORS, self._back, self._heads, strict=True)]
        for index in range(len(document)):
            keys, position = context_keys(document[max(0, index + 1 - _LONGEST) : index + 1], _LONGEST, number), first + index
            for before, back, heads in chains:
                if before > index:
                    back[slot + index] = 0
                    continue
                bucket = keys[before] % self._num_heads
                previous = heads[bucket]
                back[slot + index] = position - previous if previous >= self._oldest else 0
                heads[bucket] = position

    def _evict(self) -> None:
        assert self._oldest < self._next, (self._oldest, self._next)
        slot = self._oldest % self._num_slots
        number = self._owner[slot]
        self._oldest += self._back[0][slot] + 1
        if not number:
            return
        self.num_requests -= 1
        name = self._names[number]
        self._tenants[name][1] -= 1
        if not self._tenants[name][1]:
            del self._tenants[name], self._names[number]
            self._tenant_bytes -= self._tenant_size(name)

    def _tenant_size(self, tenant: str) -> int:
        return self._BYTES_PER_TENANT + 4 * len(tenant)

    def _tenant_number(self, tenant: str) -> int:
        """A number that no other tenant ever had; those of forgotten tenants are not used again."""
        if tenant not in self._tenants:
            while self._tenant_bytes + self._tenant_size(tenant) > self._max_tenant_bytes:
                self._evict()
            self._tenants[tenant] = [self._next_tenant, 0]
            self._names[self._next_tenant] = tenant
            self._tenant_bytes += self._tenant_size(tenant)
            self._next_tenant += 1
        return self._tenants[tenant][0]
