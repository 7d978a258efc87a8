"""From the headers of the models' files and the engine's options to the memory plan; no weight is read.

Owns: which buffers a configuration has, and refusing what does not fit.  Does not know: how anything is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters import registry
from foredraft.drafters.eagle_file import HeadFile
from foredraft.loader import Checkpoint
from foredraft.memory import (
    DrafterBytes,
    MemoryPlan,
    ModelBytes,
    check_cache_fits,
    check_context_fits,
    check_weights_fit,
    default_kv_bytes,
    make_plan,
    plan_kv_blocks,
    resident_bytes,
)
from foredraft.target import free_bytes, model_bytes, resolve_device, resolve_ops
from foredraft.types import ConfigError

# Rows of the vocabulary in float64 that sampling works on.
SAMPLING_ROWS = 4


@dataclass(frozen=True)
class Buffers:
    """What a configuration takes, whatever the size of its cache; ``draft`` is of draft model and head together."""

    target: ModelBytes
    draft: ModelBytes | None
    statistics: DrafterBytes
    logits: int

    def plan(self, num_blocks: int, block_size: int, max_model_len: int, libraries: int) -> MemoryPlan:
        """With a cache of so many blocks."""
        return make_plan(
            self.target,
            self.draft,
            self.statistics,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            logits=self.logits,
            libraries=libraries,
        )


def plan_memory(
    checkpoint: Checkpoint,
    draft: Checkpoint | None = None,
    config: EngineConfig | None = None,
    speculative: SpeculativeConfig | None = None,
    *,
    head: HeadFile | None = None,
    sources: registry.Sources | None = None,
    within: int | None = None,
) -> MemoryPlan:
    """What an LLM with these options takes, and the blocks and the context that it gets.

    ``draft`` is the draft model of ``speculative``, ``head`` its draft head, and ``sources`` where they come from; both count as
    the plan's draft weights and draft cache.  ``within``: instead of the cache that ``config`` asks for, plan the largest
    with which the whole process stays below that many bytes.  ``libraries`` of the plan is what the process holds now, so call
    this with the checkpoints open and before any weights are loaded.

    Raises:
        ConfigError: ``max_model_len`` is more than the model was made for.
        CapacityError: the models, the cache, or one sequence of ``max_model_len`` tokens do not fit into memory.
    """
    config, speculative = config or EngineConfig(), speculative or SpeculativeConfig()
    most = checkpoint.architecture.max_position_embeddings
    context = config.max_model_len or most
    if context > most:
        raise ConfigError(f"max_model_len must be at most {most}, the context of {checkpoint.name}, not {context}; lower it.")
    libraries = _held_bytes([model for model in (checkpoint, draft) if model is not None], config)
    free = free_bytes(resolve_device(config.device)) if within is None else max(0, within - libraries)
    buffers = buffers_of(checkpoint, draft, config, speculative, head=head, sources=sources, max_model_len=context)
    empty = buffers.plan(0, config.block_size, context, libraries)
    check_weights_fit(checkpoint.name if draft is None else f"{checkpoint.name} with {draft.name}", empty, free)
    left = free - (empty.total - libraries)
    per_token = [model.kv_per_token for model in (buffers.target, buffers.draft) if model is not None]
    if within is not None:
        budget = left
        num_blocks = plan_kv_blocks(budget, [*per_token, buffers.statistics.per_token], config.block_size)
    else:
        budget = config.kv_cache_memory or default_kv_bytes(sum(per_token), context, left)
        num_blocks = plan_kv_blocks(budget, per_token, config.block_size)
    if config.max_model_len is None and (within is not None or config.kv_cache_memory is None):
        context = min(context, num_blocks * config.block_size)
    check_context_fits(num_blocks, config.block_size, context, budget)
    full = buffers.plan(num_blocks, config.block_size, context, libraries)
    check_cache_fits(full, free)
    return full


def buffers_of(
    checkpoint: Checkpoint,
    draft: Checkpoint | None,
    config: EngineConfig,
    speculative: SpeculativeConfig,
    *,
    head: HeadFile | None = None,
    sources: registry.Sources | None = None,
    max_model_len: int,
) -> Buffers:
    """What ``plan_memory`` plans with, whether it fits or not."""
    beside = None
    if draft is not None:
        beside = _bytes_of(draft, config, min(max_model_len, draft.architecture.max_position_embeddings))
    if head is not None:
        of_head = _head_bytes(head, checkpoint, config, max_model_len)
        beside = of_head if beside is None else beside + of_head
    statistics, logits = registry.memory(speculative, sources), _logits_bytes(checkpoint, config, speculative)
    return Buffers(_bytes_of(checkpoint, config, max_model_len), beside, statistics, logits)


def _held_bytes(checkpoints: list[Checkpoint], config: EngineConfig) -> int:
    """What the process holds without any weights, torch included if it will be imported."""
    device = resolve_device(config.device)
    if any(resolve_ops(config.ops, checkpoint.architecture, device) == "torch" for checkpoint in checkpoints):
        import torch  # noqa: F401
    for checkpoint in checkpoints:
        checkpoint.release()
    return resident_bytes()


def _bytes_of(checkpoint: Checkpoint, config: EngineConfig, max_model_len: int) -> ModelBytes:
    return model_bytes(
        checkpoint.architecture,
        checkpoint.weights,
        device=config.device,
        dtype=config.dtype,
        ops=config.ops,
        threads=config.threads,
        num_rows=config.max_num_batched_tokens,
        max_model_len=max_model_len,
    )


def _head_bytes(head: HeadFile, checkpoint: Checkpoint, config: EngineConfig, max_model_len: int) -> ModelBytes:
    from foredraft.drafters.eagle_loader import head_bytes

    return head_bytes(
        head,
        checkpoint.architecture,
        checkpoint.weights,
        device=config.device,
        dtype=config.dtype,
        ops=config.ops,
        threads=config.threads,
        num_rows=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        block_size=config.block_size,
    )


def _logits_bytes(checkpoint: Checkpoint, config: EngineConfig, speculative: SpeculativeConfig) -> int:
    """Rows of all running requests and their drafts.  With prompt log-probabilities there may be one for each batched token.

    The passes that are timed at the start may have more, but then the cache is still empty.
    """
    drafted = speculative.num_speculative_tokens if registry.members(speculative) else 0
    num_rows = min(config.max_num_batched_tokens, config.max_num_seqs * (1 + drafted))
    return checkpoint.architecture.vocab_size * (4 * num_rows + 8 * SAMPLING_ROWS)
