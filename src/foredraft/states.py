"""Hidden states of text that is known already.

Owns: the passes that compute them.  Does not know: who reads them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from foredraft.kv_cache import KVCache
from foredraft.types import FloatArray, Rows, Target

# No sequence of an engine has it.
SEQ_ID = -1


def states_of(target: Target, kv: KVCache, tokens: Seq[int], taps: tuple[int, ...], max_rows: int) -> FloatArray:
    """States entering the layers ``taps``, float32 [tokens, len(taps) * hidden_size]; at most ``max_rows`` rows a pass.

    ``kv`` accounts for the target's blocks, and has room for ``tokens``.
    """
    parts = list[FloatArray]()
    kv.open(SEQ_ID, list(tokens), reuse=False)
    try:
        assert kv.reserve(SEQ_ID, len(tokens)), "the cache is in use"
        for start in range(0, len(tokens), max_rows):
            rows = Rows(tokens[start : start + max_rows], start, 0, kv.block_table(SEQ_ID))
            hidden = target.forward([rows], taps).hidden
            assert hidden is not None, taps
            parts.append(hidden[0])
    finally:
        kv.close(SEQ_ID)
    return np.concatenate(parts)
