"""A draft head's folder: ``config.json``, safetensors weights, and the provenance that foredraft's own training leaves there.

Owns: what the tensors of each format are called, which of them a head must have, and whether a head fits a target.  Does not know:
how a head is computed.

Canonical names of a head's weights (d hidden size, S states of t values, D draft vocabulary; optional ones marked ?)::

    fc [d, S*t] (eagle: [d, 2d])   fc_bias? [d]         fc_norm? [S*t]      input_norm? [S*t]     hidden_norm? [d]
    embed? [V, d]                  norm? [d]            lm_head? [D, d]     (absent: the target's own)
    layers.I.*                     as in ``architecture``, beside o_bias? [d]; the first layer's qkv of eagle3 has 2d columns
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.architecture import Weight
from foredraft.drafters.eagle_config import EAGLE, EAGLE3, HeadConfig, check_target, default_layer_ids, kind_of, read_config
from foredraft.drafters.ngram_table import TargetIdentity
from foredraft.loader.assemble import release_pages, stack_rows
from foredraft.loader.folder import TensorFiles, open_tensors, read_json
from foredraft.types import ConfigError, IntArray, ModelFileError

CONFIG, PROVENANCE = "config.json", "provenance.json"
# The tensors of a decoder layer, by what they are stacked into.
_STACKS = {"qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "gate_up": ("mlp.gate_proj", "mlp.up_proj")}
_SINGLES = {
    "o": "self_attn.o_proj.weight",
    "down": "mlp.down_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "attn_norm": "input_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o_bias": "self_attn.o_proj.bias",
}
_VOCABULARY = ("d2t", "t2d")
# Parts of the target that some trainers save with the head.
_TARGETS_OWN = ("verifier_norm.weight", "verifier_lm_head.weight")


@dataclass(frozen=True)
class HeadFile:
    """A head, opened: its weights are read when asked for.

    ``target_ids``: int64 [draft_vocab_size], the target's id of each draft token.  ``identity`` is the target that it was trained
    for, where the folder says so.  ``release()`` gives back the memory of what was read.
    """

    path: Path
    config: HeadConfig
    weights: Mapping[str, Weight]
    target_ids: IntArray
    identity: TargetIdentity | None
    release: Callable[[], None] = lambda: None


def head_kind(folder: Path) -> str | None:
    """``eagle3`` or ``eagle`` for the folder of a head, None for that of a language model or of nothing.

    Raises:
        UnsupportedModelError: a drafter of a kind that is not known.
        ModelFileError: ``config.json`` cannot be read.
    """
    if not (folder / CONFIG).is_file():
        return None
    kind = kind_of(read_json(folder / CONFIG))
    if kind is None and not (folder / "tokenizer.json").is_file() and (folder / "model.safetensors").is_file():
        # The first heads had the configuration of a plain Llama model.
        names = open_tensors(folder, also=("I64", "BOOL")).shapes
        return EAGLE if "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names else None
    return kind


def open_head(folder: Path) -> HeadFile:
    """Open a head's folder.

    Raises:
        ModelFileError: a file or tensor is missing, unexpected, or of the wrong shape.
        UnsupportedModelError: an option that is not known.
    """
    kind = head_kind(folder)
    if kind is None:
        raise ModelFileError(
            f"{folder} holds no draft head: its {CONFIG} names neither a speculators_model_type nor a draft_vocab_size; "
            "give the folder of a head, or use method 'draft_model' for a small language model."
        )
    source = str(folder / CONFIG)
    config = read_config(read_json(folder / CONFIG), source, kind=kind)
    files = open_tensors(folder, also=("I64", "BOOL"))
    reader = _Reader(folder, files, config)
    weights = reader.weights()
    reader.check_layer_ids()
    target_ids = _target_ids(folder, files, config)
    return HeadFile(folder, config, weights, target_ids, _identity(folder), partial(release_pages, *files.files))


def fitted(head: HeadFile, target: TargetIdentity, hidden_size: int, num_layers: int) -> HeadFile:
    """The head for this target, with the layers whose states it takes named.

    Raises:
        ConfigError: it was made for another target.
    """
    if head.identity is not None and not head.identity.fits(target):
        raise ConfigError(
            f"{head.path} is a head for {head.identity.model}, whose vocabulary is not that of {target.model}; "
            f"train one with `foredraft train eagle3 {target.model}`."
        )
    config = head.config
    if config.kind == EAGLE3 and not config.layer_ids:
        config = replace(config, layer_ids=default_layer_ids(num_layers))
    check_target(
        config,
        str(head.path),
        name=target.model,
        hidden_size=hidden_size,
        vocab_size=target.vocab_size,
        num_layers=num_layers,
    )
    for name in ("embed", "lm_head"):
        if name not in head.weights and config.hidden_size != hidden_size:
            raise ConfigError(
                f"{head.path} has no {name} of its own and cannot use that of {target.model}, since its hidden size is "
                f"{config.hidden_size} and not {hidden_size}; give a head that was made for {target.model}."
            )
    return replace(head, config=config)


class _Reader:
    """Takes the tensors of a folder one by one; what is left over at the end has no place in a head."""

    def __init__(self, folder: Path, files: TensorFiles, config: HeadConfig) -> None:
        self._folder, self._files, self._config = folder, files, config
        self._used = {*_VOCABULARY, *_TARGETS_OWN}
        names = files.shapes
        is_speculators_eagle = "fusion_fc.weight" in names
        self._fc = "fusion_fc" if is_speculators_eagle else "fc"
        self._first = "midlayer." if any(n.startswith("midlayer.") for n in names) else "layers.0."
        if is_speculators_eagle:
            self._first = "transformer."

    def weights(self) -> dict[str, Weight]:
        config, d = self._config, self._config.hidden_size
        is_eagle3 = config.kind == EAGLE3
        found: dict[str, Weight] = {}
        state = config.target_hidden_size
        if not is_eagle3:
            if state != d:
                raise ModelFileError(
                    f"{self._folder}: an 'eagle' head's own state takes the place of the target's, but target_hidden_size is "
                    f"{state} and hidden_size {d}; fetch the head again."
                )
            found["fc"] = self._take(f"{self._fc}.weight", (d, 2 * d))
        else:
            width = self._shape(f"{self._fc}.weight")[-1]
            if width % state or (config.layer_ids and width != state * len(config.layer_ids)):
                wanted = f"{len(config.layer_ids)} times {state}" if config.layer_ids else f"a multiple of {state}"
                raise ModelFileError(
                    f"{self._folder}: tensor fc.weight has {width} columns, but its config asks for {wanted}; fetch the head again."
                )
            found["fc"] = self._take(f"{self._fc}.weight", (d, width))
            found["hidden_norm"] = self._take(f"{self._first}hidden_norm.weight", (d,))
            if config.norm_before_fc:
                found["input_norm"] = self._take("input_norm.weight", (width,))
            if config.fc_norm:
                found["fc_norm"] = stack_rows([self._take(f"fc_norm.{i}.weight", (state,)) for i in range(width // state)])
            found["norm"] = self._take("norm.weight", (d,))
        self._take_optional(found, "fc_bias", f"{self._fc}.bias", (d,))
        for i in range(config.num_layers):
            self._take_layer(found, i)
        self._take_optional(found, "embed", "embed_tokens.weight", (config.vocab_size, d))
        self._take_optional(found, "lm_head", "lm_head.weight", (config.draft_vocab_size, d))
        if "lm_head" not in found and config.draft_vocab_size != config.vocab_size:
            raise ModelFileError(f"{self._folder} has no tensor lm_head.weight; fetch the head again.")
        unused = sorted(set(self._files.shapes) - self._used)
        if unused:
            raise ModelFileError(
                f"{self._folder} holds the tensor {unused[0]}, which a head as its config describes it does not have; "
                "fetch config and weights of the same head."
            )
        return found

    def check_layer_ids(self) -> None:
        """The default has three layers, so without names there must be as many states."""
        config, name = self._config, f"{self._fc}.weight"
        if config.kind == EAGLE3 and not config.layer_ids and self._shape(name)[-1] != 3 * config.target_hidden_size:
            raise ModelFileError(
                f"{self._folder / CONFIG} names no eagle_aux_hidden_state_layer_ids, and tensor fc.weight is not made for the "
                "usual three; fetch the head again."
            )

    def _take_layer(self, found: dict[str, Weight], i: int) -> None:
        config, d, f = self._config, self._config.hidden_size, self._config.intermediate_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        prefix = self._first if i == 0 else f"layers.{i}."
        columns = 2 * d if i == 0 and config.kind == EAGLE3 else d
        rows = {"qkv": (q, kv, kv), "gate_up": (f, f)}
        for stem, names in _STACKS.items():
            parts = zip(names, rows[stem], strict=True)
            width = columns if stem == "qkv" else d
            found[f"layers.{i}.{stem}"] = stack_rows([self._take(f"{prefix}{name}.weight", (n, width)) for name, n in parts])
        if config.attention_bias or f"{prefix}self_attn.q_proj.bias" in self._files.shapes:
            parts = zip(_STACKS["qkv"], rows["qkv"], strict=True)
            found[f"layers.{i}.qkv_bias"] = stack_rows([self._take(f"{prefix}{name}.bias", (n,)) for name, n in parts])
        shapes: dict[str, tuple[int, ...]] = {"o": (d, q), "down": (d, f), "mlp_norm": (d,)}
        # The first layer of an EAGLE head has no norm of its own, unless the folder holds one.
        if i > 0 or config.kind == EAGLE3:
            shapes["attn_norm"] = (d,)
        if config.qk_norm:
            shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
        for stem, shape in shapes.items():
            found[f"layers.{i}.{stem}"] = self._take(prefix + _SINGLES[stem], shape)
        for stem in ("attn_norm", "o_bias"):
            self._take_optional(found, f"layers.{i}.{stem}", prefix + _SINGLES[stem], (d,))

    def _take_optional(self, found: dict[str, Weight], name: str, tensor: str, shape: tuple[int, ...]) -> None:
        if tensor in self._files.shapes:
            found[name] = self._take(tensor, shape)

    def _shape(self, tensor: str) -> tuple[int, ...]:
        if tensor not in self._files.shapes:
            raise ModelFileError(
                f"{self._folder} has no tensor {tensor}; the head is incomplete or of another kind, fetch it again."
            )
        return self._files.shapes[tensor]

    def _take(self, tensor: str, shape: tuple[int, ...]) -> Weight:
        found = self._shape(tensor)
        if found != shape:
            raise ModelFileError(
                f"{self._folder}: tensor {tensor} has shape {list(found)}, but the head's config asks for {list(shape)}; "
                "fetch config and weights of the same head."
            )
        if self._files.formats[tensor] in ("I64", "BOOL"):
            raise ModelFileError(
                f"{self._folder}: tensor {tensor} holds {self._files.formats[tensor]}, not numbers; fetch it again."
            )
        self._used.add(tensor)
        return self._files.weight(tensor)


def _target_ids(folder: Path, files: TensorFiles, config: HeadConfig) -> IntArray:
    """``d2t`` holds what to add to a draft id; without it both vocabularies are one.

    Raises:
        ModelFileError: it is missing, or names ids that the target does not have.
    """
    num = config.draft_vocab_size
    if "d2t" not in files.shapes:
        if num != config.vocab_size:
            raise ModelFileError(
                f"{folder} has no tensor d2t, though its draft vocabulary is a part of the target's; fetch it again."
            )
        return np.arange(num, dtype=np.int64)
    if files.formats["d2t"] != "I64" or files.shapes["d2t"] != (num,):
        raise ModelFileError(f"{folder}: tensor d2t must be {num} whole numbers of 64 bits; fetch the head again.")
    ids: IntArray = np.arange(num, dtype=np.int64) + files.contents["d2t"].view("<i8")
    if ids.min() < 0 or ids.max() >= config.vocab_size or len(np.unique(ids)) < num:
        raise ModelFileError(f"{folder}: tensor d2t must map each draft token to an id of its own below {config.vocab_size}.")
    if "t2d" in files.shapes and files.formats["t2d"] == "BOOL":
        mask = files.contents["t2d"].view(np.bool_)
        if mask.shape != (config.vocab_size,) or not np.array_equal(np.flatnonzero(mask), np.sort(ids)):
            raise ModelFileError(f"{folder}: tensors d2t and t2d name different tokens; fetch the head again.")
    return ids


def _identity(folder: Path) -> TargetIdentity | None:
    """The target that ``provenance.json`` names, if there is one.

    Raises:
        ModelFileError: the file is there and cannot be read.
    """
    target: Any = read_json(folder / PROVENANCE, required=False).get("target")
    if target is None:
        return None
    try:
        identity = TargetIdentity(**target)
    except TypeError as error:
        raise ModelFileError(
            f"{folder / PROVENANCE}: target must name a model and its vocabulary ({error}); fetch it again."
        ) from error
    return identity
