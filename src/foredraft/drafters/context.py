"""What a drafter's factory is given.

Owns: DrafterContext, DrafterFactory, and which noise a verification rule lets a drafter use.  Does not know: any drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foredraft.config import RULES, SpeculativeConfig
from foredraft.sampling import STREAM_DRAFT, STREAM_TARGET
from foredraft.types import Drafter, IntArray, Target, refuse_unknown

if TYPE_CHECKING:
    from foredraft.drafters.eagle_pass import HeadRunner
    from foredraft.kv_cache import KVCache


@dataclass(frozen=True)
class DraftModel:
    """A loaded draft model.

    ``kv`` accounts for the blocks that ``target`` writes to.  ``vocabulary`` maps token text to id; empty when the model
    comes without a tokenizer, and then nothing is compared.
    """

    target: Target
    kv: KVCache
    vocabulary: Mapping[str, int]


@dataclass(frozen=True)
class Head:
    """A loaded draft head with an empty cache of its own.

    ``hidden_layers``: the target's, whose entering states it reads.  ``target_ids``: int64 [D], the target's id of each of its
    tokens.  ``max_positions`` tokens are the longest text it was made for.
    """

    runner: HeadRunner
    hidden_layers: tuple[int, ...]
    target_ids: IntArray
    max_positions: int


def _no_vocabulary() -> Mapping[str, int]:
    return {}


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter may need to know about the engine that it serves.

    ``vocab_size``, ``max_model_len`` and ``model``, the name it was loaded by, are the target's.  ``vocabulary()`` is its token
    text to id.  ``load_draft_model(name)`` loads a small model when it is called, not before.  ``stream`` is the noise stream that
    sampled drafts draw from, and ``with_probs`` says whether they must report their distributions; see ``draws_for``.

    ``kv`` accounts for the target's blocks: a drafter may keep something of its own for each, and must not change it.
    ``load_head(name, num_scratch)`` loads a draft head with room for those blocks and ``num_scratch`` more behind them.
    """

    vocab_size: int
    max_model_len: int
    stream: int = STREAM_TARGET
    with_probs: bool = False
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    model: str = ""
    vocabulary: Callable[[], Mapping[str, int]] = _no_vocabulary
    load_draft_model: Callable[[str], DraftModel] | None = None
    kv: KVCache | None = None
    load_head: Callable[[str, int], Head] | None = None


DrafterFactory = Callable[[SpeculativeConfig, DrafterContext], Drafter]


def draws_for(rule: str) -> tuple[int, bool]:
    """``(stream, with_probs)`` that a verification rule asks of sampled drafts.

    The coupled rule compares tokens drawn with the same noise (Daliri et al., 2408.07978).  The rejection and block rules
    weigh a draft token by its probability, which is valid only when its noise is independent of theirs.
    """
    refuse_unknown("rejection_sample_method", rule, RULES)
    return (STREAM_TARGET, False) if rule == "coupled" else (STREAM_DRAFT, True)
