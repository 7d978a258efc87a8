"""From a head's name to a head that runs beside a loaded target.

Owns: which implementation serves a head, and what it takes of memory.  Does not know: drafts, or the files of a head.

torch is imported only where the head runs on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from foredraft.architecture import Architecture, Weight
from foredraft.drafters import eagle_native
from foredraft.drafters.context import Head
from foredraft.drafters.eagle import MAX_PROMPT_WAITING, MAX_WAITING
from foredraft.drafters.eagle_file import HeadFile, fitted, open_head
from foredraft.drafters.eagle_pass import HeadRunner
from foredraft.drafters.ngram_table import TargetIdentity
from foredraft.loader.resolve import resolve_model
from foredraft.memory import ModelBytes
from foredraft.native import NativeModel, has_half_cache
from foredraft.target import BYTES_PER_VALUE, ModelTarget, resolve_device, resolve_dtype, resolve_ops
from foredraft.types import ConfigError


class HeadWeights(Protocol):
    """A head's weights, loaded once; each runner has a cache of its own."""

    num_bytes: int

    def runner(self, num_blocks: int, block_size: int) -> HeadRunner:
        """The head with an empty cache of so many blocks."""
        ...


def find_head(name: str, kind: str, target: TargetIdentity, architecture: Architecture) -> HeadFile:
    """The head of that folder or hub id, opened, for a target.

    Raises:
        ConfigError: it is of another kind than ``kind``, or was made for another target.
        ModelNotFoundError, ModelFileError, UnsupportedModelError: it cannot be read.
    """
    head = open_head(Path(resolve_model(name)))
    if head.config.kind != kind:
        raise ConfigError(
            f"{name} is a head for method {head.config.kind!r}, not {kind!r}; change the method or give another head."
        )
    return fitted(head, target, architecture.hidden_size, architecture.num_layers)


def load_weights(head: HeadFile, target: ModelTarget, weights: Mapping[str, Weight], dtype: str) -> HeadWeights:
    """Load a head for ``target``, whose own weights are ``weights``: on native kernels beside a target that is, else on torch."""
    architecture, runner, norm = target.architecture, target.runner, weights["norm"]
    if isinstance(runner, NativeModel) and eagle_native.why_not(head.config) is None:
        return eagle_native.NativeHeadWeights(head, runner, architecture, norm, dtype)
    from foredraft.drafters.eagle_torch import TorchHeadWeights

    own: dict[str, Any] = {"embed": weights["embed"], "lm_head": weights["embed" if architecture.tie_embeddings else "lm_head"]}
    device, precision = "cpu", "float32"
    if not isinstance(runner, NativeModel):
        from foredraft.torch_model import TorchModel

        assert isinstance(runner, TorchModel), runner
        device, precision, own = str(runner.device), runner.precision, runner.ends
    return TorchHeadWeights(head, own, norm, architecture.rms_norm_eps, device, precision)


def head_with_cache(head: HeadFile, weights: HeadWeights, num_layers: int, num_blocks: int, block_size: int) -> Head:
    """A loaded head with an empty cache of ``num_blocks`` blocks; the target has ``num_layers`` layers."""
    config = head.config
    runner = weights.runner(num_blocks, block_size)
    return Head(runner, config.taps(num_layers), np.asarray(head.target_ids), config.max_position_embeddings)


def head_bytes(
    head: HeadFile,
    architecture: Architecture,
    weights: Mapping[str, Weight],
    *,
    device: str,
    dtype: str,
    ops: str,
    threads: int | None,
    num_rows: int,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
) -> ModelBytes:
    """What a head takes beside a target with the same options, without reading any weight.

    Beside keys and values, a feature for each block, and the states that wait for being read.
    """
    config, on = head.config, resolve_device(device)
    if resolve_ops(ops, architecture, on) == "native" and eagle_native.why_not(config) is None:
        half = has_half_cache(weights, dtype)
        parts = eagle_native.head_bytes(
            head, dtype=dtype, threads=threads, num_rows=num_rows, max_model_len=max_model_len, half=half
        )
    else:
        precision = resolve_dtype(dtype, on)
        size = BYTES_PER_VALUE[precision]
        widths = 4 * config.hidden_size + 3 * config.intermediate_size + 3 * config.num_heads * config.head_dim
        parts = ModelBytes(
            weights={precision: size * sum(math.prod(weight.shape) for weight in head.weights.values())},
            kv_per_token=config.kv_values_per_token * size,
            scratch=size * num_rows * widths,
        )
    num_waiting = max_num_seqs * MAX_WAITING + MAX_PROMPT_WAITING + num_rows
    waiting = 4 * config.num_states * config.target_hidden_size * num_waiting
    features = -(-4 * config.hidden_size // block_size)
    return ModelBytes(parts.weights, parts.kv_per_token + features, parts.scratch + waiting)
