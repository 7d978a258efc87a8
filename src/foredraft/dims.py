"""The sizes of a decoder network that decide what its passes and its cache take.

Owns: these sizes, read from a loaded model or a ``config.json``, or assumed from a number of parameters.  Does not know: hardware,
number formats, or weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.architecture import Architecture
from foredraft.loader.fields import Fields
from foredraft.types import ConfigError, ModelFileError, UnsupportedModelError

MIN_PARAMS, MAX_PARAMS = 1e7, 2e12
# The shape of Llama 3 (Grattafiori et al., 2407.21783, table 3), which most dense models since resemble.
HEAD_DIM, KV_HEADS, FEED_FORWARD, WIDTH_PER_LAYER = 128, 8, 3.5, 128
VOCAB_SIZE, SMALL_VOCAB_SIZE = 128_256, 32_000
TIED_BELOW, SMALL_BELOW = 4e9, 5e8
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class ModelDims:
    """One network.

    ``num_params`` values are stored; every row of a pass is multiplied with ``pass_params`` of them (an embedding that is not the
    output head too is only looked up).  A cached token is ``kv_per_token`` values; a query is ``attention_width`` values in each
    layer.  ``max_context`` None: not known.  ``assumed`` says in a sentence what was not read but assumed.
    """

    name: str
    num_params: float
    pass_params: float
    num_layers: int
    kv_per_token: int
    attention_width: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_context: int | None = None
    assumed: str = ""


def dims_of(architecture: Architecture, name: str) -> ModelDims:
    """The sizes of a loaded network.  Sliding windows are not considered: keys and values count for the whole context."""
    shapes = architecture.weight_shapes()
    sizes = {key: shape[0] * (shape[1] if len(shape) > 1 else 1) for key, shape in shapes.items()}
    looked_up = 0 if architecture.tie_embeddings else sizes["embed"]
    return ModelDims(
        name=name,
        num_params=sum(sizes.values()),
        pass_params=sum(sizes.values()) - looked_up,
        num_layers=architecture.num_layers,
        kv_per_token=architecture.kv_bytes_per_token(1),
        attention_width=architecture.num_heads * architecture.head_dim,
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.intermediate_size,
        vocab_size=architecture.vocab_size,
        max_context=architecture.max_position_embeddings,
    )


def dims_from_config(path: str, name: str | None = None) -> ModelDims:
    """The sizes in a Hugging Face ``config.json``, of any dense decoder with grouped-query attention and a gated MLP.

    ``name`` None takes the path.

    Raises:
        ModelFileError: unreadable, or a size is missing or senseless.
        UnsupportedModelError: a mixture of experts.
    """
    try:
        values: Any = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no such home, or brackets too deep
        raise ModelFileError(f"{path} cannot be read as JSON ({error}); give a model's config.json.") from error
    if not isinstance(values, dict):
        raise ModelFileError(f"{path} must hold a JSON object, not a {type(values).__name__}; give a model's config.json.")
    if isinstance(values.get("text_config"), Mapping):
        values = {"tie_word_embeddings": values.get("tie_word_embeddings"), **values["text_config"]}
    for key in EXPERT_KEYS:
        if isinstance(values.get(key), int) and values[key] > 1:
            raise UnsupportedModelError(
                f"{path} is a mixture of experts ({key} is {values[key]}), whose passes read more weights the more rows they have; "
                "choose a dense model."
            )
    fields = Fields(path, values)
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    head_dim = fields.size("head_dim", max(1, hidden // heads))
    context = fields.size("max_position_embeddings") if values.get("max_position_embeddings") is not None else None
    return _dims(
        name=path if name is None else name,
        num_layers=fields.size("num_hidden_layers"),
        hidden=hidden,
        intermediate=fields.size("intermediate_size"),
        heads=heads,
        kv_heads=fields.size("num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=fields.size("vocab_size"),
        tied=bool(fields.get("tie_word_embeddings")),
        max_context=context,
    )


def dims_from_params(num_params: float, name: str) -> ModelDims:
    """The sizes that a dense model of so many parameters probably has.

    Raises:
        ConfigError: not from 1e7 to 2e12.
    """
    if not MIN_PARAMS <= num_params <= MAX_PARAMS:
        raise ConfigError(
            f"a number of parameters must be from {MIN_PARAMS:.0e} to {MAX_PARAMS:.0e}, not {num_params:g}; change it."
        )
    tied = num_params < TIED_BELOW
    vocab_size = SMALL_VOCAB_SIZE if num_params < SMALL_BELOW else VOCAB_SIZE
    guesses = (_guess(width, num_params, vocab_size, tied, name) for width in range(HEAD_DIM, 200 * HEAD_DIM, HEAD_DIM))
    best = min(guesses, key=lambda dims: abs(_stored(dims, tied) - num_params))
    embedding = "tied" if tied else "untied"
    assumed = (
        f"{name} of {num_params:.3g} parameters: assumed {best.num_layers} layers of width {best.hidden_size}, "
        f"{best.kv_per_token // (2 * best.num_layers * HEAD_DIM)} key-value heads of {HEAD_DIM}, "
        f"{vocab_size:,} tokens, {embedding} embedding, as Llama 3 is shaped"
    )
    looked_up = 0 if tied else vocab_size * best.hidden_size
    return ModelDims(**{**vars(best), "num_params": num_params, "pass_params": num_params - looked_up, "assumed": assumed})


def _stored(dims: ModelDims, tied: bool) -> float:
    return dims.pass_params + (0 if tied else dims.vocab_size * dims.hidden_size)


def _guess(width: int, num_params: float, vocab_size: int, tied: bool, name: str) -> ModelDims:
    heads = width // HEAD_DIM
    layer = _layer_params(width, int(FEED_FORWARD * width), heads, min(KV_HEADS, heads), HEAD_DIM)
    room = num_params - vocab_size * width * (1 if tied else 2)
    # Depth follows width, and is then set so that the parameters come out; a depth far from the rule is a bad guess.
    usual = max(1, round(width / WIDTH_PER_LAYER))
    num_layers = max(1, min(round(room / layer), round(1.3 * usual)))
    num_layers = max(num_layers, round(usual / 1.3))
    return _dims(
        name=name,
        num_layers=num_layers,
        hidden=width,
        intermediate=int(FEED_FORWARD * width),
        heads=heads,
        kv_heads=min(KV_HEADS, heads),
        head_dim=HEAD_DIM,
        vocab_size=vocab_size,
        tied=tied,
        max_context=None,
    )


def _layer_params(hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int) -> int:
    return hidden * (2 * (heads + kv_heads) * head_dim + 3 * intermediate)


def _dims(
    *,
    name: str,
    num_layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab_size: int,
    tied: bool,
    max_context: int | None,
) -> ModelDims:
    layers = num_layers * _layer_params(hidden, intermediate, heads, kv_heads, head_dim)
    embedding = vocab_size * hidden
    return ModelDims(
        name=name,
        num_params=layers + embedding * (1 if tied else 2),
        pass_params=layers + embedding,
        num_layers=num_layers,
        kv_per_token=2 * num_layers * kv_heads * head_dim,
        attention_width=heads * head_dim,
        hidden_size=hidden,
        intermediate_size=intermediate,
        vocab_size=vocab_size,
        max_context=max_context,
    )
