"""The models behind the drafters of one target: what the user names, or what is shipped for it.

Owns: which of them there are, and loading each when its drafter is made.  Does not know: requests, or when a drafter is asked.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters import registry
from foredraft.drafters.context import DrafterContext, DraftModel, Head, draws_for
from foredraft.drafters.shipped import target_of
from foredraft.kv_cache import KVCache
from foredraft.loader import Checkpoint, Progress, load_checkpoint
from foredraft.target import ModelTarget

if TYPE_CHECKING:
    from foredraft.drafters.eagle_file import HeadFile
    from foredraft.drafters.eagle_loader import HeadWeights


def build_target(checkpoint: Checkpoint, config: EngineConfig, max_model_len: int, num_blocks: int) -> ModelTarget:
    """A model with its weights and a cache of ``num_blocks`` blocks; raises what ModelTarget does."""
    return ModelTarget(
        checkpoint.architecture,
        checkpoint.weights,
        device=config.device,
        dtype=config.dtype,
        ops=config.ops,
        threads=config.threads,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        release=checkpoint.release,
    )


class DraftParts:
    """Draft model and head for ``checkpoint``, opened and checked, with no weight read yet.

    ``sources`` are those of the method of ``speculative``, and what the models of ``also``, methods too, add.  ``progress`` is
    called while a draft model is fetched.

    Raises:
        ForedraftError: one of them cannot be read, or is not for this target.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        speculative: SpeculativeConfig,
        progress: Progress | None = None,
        also: Seq[str] = (),
    ) -> None:
        self._checkpoint, self._config = checkpoint, config
        self._rule = speculative.rejection_sample_method
        self._made_for = target_of(checkpoint)
        self._by_method = {name: registry.sources(replace(speculative, method=name), self._made_for) for name in also}
        self.sources = registry.together(
            [registry.sources(speculative, self._made_for), *(self._by_method[name] for name in registry.asking_models(also))]
        )
        name = self.sources.draft_model
        self.draft_model = load_checkpoint(name, progress=progress) if name is not None else None
        self.head = self._find_head()
        self.head_weights: HeadWeights | None = None

    def sources_of(self, method: str) -> registry.Sources:
        """What an engine of that method would have, for one of ``also``; all there is for any other."""
        return self._by_method.get(method, self.sources)

    def context(self, target: ModelTarget, kv: KVCache) -> DrafterContext:
        """What drafters that serve ``target``, whose blocks ``kv`` accounts for, are made with."""
        stream, with_probs = draws_for(self._rule)
        return DrafterContext(
            vocab_size=target.vocab_size,
            max_model_len=target.max_model_len,
            stream=stream,
            with_probs=with_probs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            max_num_seqs=self._config.max_num_seqs,
            model=self._checkpoint.name,
            vocabulary=self._checkpoint.tokenizer.vocabulary,
            load_draft_model=lambda name: self._load_draft_model(name, target.max_model_len, kv.num_blocks),
            kv=kv,
            load_head=lambda name, num_scratch: self._load_head(name, num_scratch, target, kv),
        )

    def _find_head(self) -> HeadFile | None:
        if self.sources.head is None or self.sources.head_kind is None:
            return None
        from foredraft.drafters.eagle_loader import find_head

        return find_head(self.sources.head, self.sources.head_kind, self._made_for.identity(), self._checkpoint.architecture)

    def _load_head(self, name: str, num_scratch: int, target: ModelTarget, kv: KVCache) -> Head:
        """A head with a cache of its own for the blocks of ``kv``; all of them share its weights."""
        from foredraft.drafters.eagle_loader import head_with_cache, load_weights

        assert self.head is not None and name == self.sources.head, (name, self.sources)
        if self.head_weights is None:
            self.head_weights = load_weights(self.head, target, self._checkpoint.weights, self._config.dtype)
        num_layers = self._checkpoint.architecture.num_layers
        return head_with_cache(self.head, self.head_weights, num_layers, kv.num_blocks + num_scratch, kv.block_size)

    def _load_draft_model(self, name: str, max_model_len: int, num_blocks: int) -> DraftModel:
        checkpoint, config = self.draft_model, self._config
        assert checkpoint is not None and name == self.sources.draft_model, (name, self.sources)
        longest = min(max_model_len, checkpoint.architecture.max_position_embeddings)
        target = build_target(checkpoint, config, longest, num_blocks)
        kv = KVCache(num_blocks, config.block_size, config.enable_prefix_caching)
        return DraftModel(target, kv, checkpoint.tokenizer.vocabulary())
