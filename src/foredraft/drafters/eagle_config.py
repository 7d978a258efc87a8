"""A draft head as data: which network its ``config.json`` describes, in each of the formats that heads come in.

Owns: the settings of a head, their defaults, and the refusal of options that would change the result.  Does not know: where the
weights are, or how a head is computed.

Formats: *speculators* (``speculators_model_type`` ``eagle3`` or ``eagle``), the original EAGLE-3 (``draft_vocab_size`` beside the
fields of a Llama model; 2503.01840), and the original EAGLE (a one-layer Llama model; 2401.15077).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foredraft.architecture import Rope
from foredraft.loader.fields import Fields
from foredraft.loader.folder_config import folder_architecture
from foredraft.types import ConfigError, ModelFileError, UnsupportedModelError, refuse_unknown

EAGLE, EAGLE3 = "eagle", "eagle3"
KINDS = (EAGLE, EAGLE3)
MAX_STATES = 16
MAX_LAYERS = 8


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


# What changes nothing in a forward pass, or is said elsewhere: training, sampling, and the bookkeeping of libraries.
_SILENT = _names(
    """
    architectures auto_map dtype torch_dtype transformers_version speculators_version speculators_config model_type
    has_no_defaults_at_init embed_requires_grad enable_sp_ulysses _name_or_path return_dict tie_word_embeddings
    bos_token_id eos_token_id pad_token_id initializer_range attention_dropout use_cache pretraining_tp
    _attn_implementation attn_implementation _experts_implementation output_attentions output_hidden_states is_decoder
    is_encoder_decoder cross_attention_hidden_size add_cross_attention tie_encoder_decoder chunk_size_feed_forward
    id2label label2id problem_type tokenizer_class prefix task_specific_params num_labels ttt_length
    """
)
_LAYER = _names(
    """
    hidden_size intermediate_size num_attention_heads num_key_value_heads num_hidden_layers head_dim hidden_act
    rms_norm_eps vocab_size max_position_embeddings rope_theta rope_scaling rope_parameters attention_bias bias
    sliding_window use_sliding_window max_window_layers layer_types
    """
)
_HEAD = _names(
    """
    speculators_model_type transformer_layer_config transformer_layer_architecture draft_vocab_size target_hidden_size
    norm_before_residual norm_before_fc fc_norm norm_output eagle_aux_hidden_state_layer_ids eagle_config fusion_bias
    """
)
# Of Llama's configuration, which leaves out what has its default.
_LLAMA: Mapping[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-6,
}
_FAMILIES = ("llama", "qwen3")


@dataclass(frozen=True)
class HeadConfig:
    """One head.

    ``kind`` ``eagle3``: ``layer_ids`` name the target's residual streams that are fused, each the one that enters that layer; the
    first layer reads the normalised embedding beside the normalised feature.  ``eagle``: the state is the target's last, after its
    final norm, and the first layer reads what ``fc`` makes of embedding and state; ``layer_ids`` is empty, since only the target
    knows how many layers it has.
    ``vocab_size`` is the target's, ``draft_vocab_size`` that of the head's logits.
    ``norm_before_fc`` normalises all states of a token together, ``fc_norm`` each by itself.  With ``norm_before_residual`` the
    residual stream begins with the normalised feature, and with ``norm_output`` the final norm's output is the next feature.
    """

    kind: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    rope: Rope
    rms_norm_eps: float
    activation: str
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    layer_ids: tuple[int, ...] = ()
    attention_bias: bool = False
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def num_states(self) -> int:
        """States of the target that one token comes with."""
        return len(self.layer_ids) if self.kind == EAGLE3 else 1

    @property
    def kv_values_per_token(self) -> int:
        """Numbers in the keys and values of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def taps(self, num_target_layers: int) -> tuple[int, ...]:
        """The target's layers whose entering states the head needs; ``num_target_layers`` is the last one's output."""
        return self.layer_ids if self.kind == EAGLE3 else (num_target_layers,)


def read_config(values: Mapping[str, Any], source: str, *, kind: str | None = None) -> HeadConfig:
    """The head that a ``config.json`` describes; ``kind`` decides where the file does not say.

    Raises:
        UnsupportedModelError: an option that changes the computation and is not known.
        ModelFileError: a setting is missing or senseless.
    """
    named = kind_of(values)
    kind = named or kind or EAGLE
    is_speculators = "speculators_model_type" in values
    layer = values.get("transformer_layer_config") if is_speculators else values
    if not isinstance(layer, Mapping):
        raise ModelFileError(f"{source}: transformer_layer_config must be an object, not {layer!r}; fetch it again.")
    _refuse_unknown_options(values, _HEAD | (frozenset() if is_speculators else _LAYER), source)
    if is_speculators:
        _refuse_unknown_options(layer, _LAYER, f"{source} (transformer_layer_config)")
    _check_speculators(values, kind, source)
    fields = Fields(source, values)
    extra = values.get("eagle_config")
    if isinstance(extra, Mapping):
        _refuse_unknown_options(extra, {"eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state"}, f"{source} (eagle_config)")
        if extra.get("use_aux_hidden_state") is False:
            raise UnsupportedModelError(f"{source} sets use_aux_hidden_state = False, which is not supported; choose another head.")
    network = _network(layer, source)
    flags = {name: _flag(values, name, source) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    if kind == EAGLE and any(flags.values()):
        name = next(name for name, value in flags.items() if value)
        raise UnsupportedModelError(f"{source} sets {name}, which an 'eagle' head does not have; choose another head.")
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise UnsupportedModelError(f"{source} sets both norm_before_fc and fc_norm, of which a head has one; choose another head.")
    draft_vocab_size = fields.size("draft_vocab_size", network["vocab_size"])
    return HeadConfig(
        kind=kind,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=fields.size("target_hidden_size", network["hidden_size"]),
        layer_ids=_layer_ids(values, extra, source) if kind == EAGLE3 else (),
        norm_before_residual=flags["norm_before_residual"],
        norm_before_fc=flags["norm_before_fc"],
        fc_norm=flags["fc_norm"],
        norm_output=flags["norm_output"],
        **network,
    )


def kind_of(values: Mapping[str, Any]) -> str | None:
    """``eagle3`` or ``eagle`` where a ``config.json`` says that it is of a head, else None.

    Raises:
        UnsupportedModelError: it is of another kind of drafter.
    """
    kind = values.get("speculators_model_type")
    if kind is not None:
        refuse_unknown("speculators_model_type", str(kind), KINDS, UnsupportedModelError)
        return str(kind)
    names = values.get("architectures")
    text = " ".join(map(str, names)).lower() if isinstance(names, list) else ""
    if values.get("draft_vocab_size") is not None or "eagle3" in text or values.get("model_type") == EAGLE3:
        return EAGLE3
    return EAGLE if "eagle" in text or values.get("model_type") == EAGLE else None


def default_layer_ids(num_target_layers: int) -> tuple[int, ...]:
    """Where a config is silent: an early, a middle and a late layer (EAGLE-3, 2503.01840)."""
    return (2, num_target_layers // 2, num_target_layers - 3)


def _refuse_unknown_options(values: Mapping[str, Any], known: frozenset[str] | set[str], source: str) -> None:
    """What is false, null or empty asks for nothing."""
    for name, value in values.items():
        if name not in known and name not in _SILENT and value not in (None, False, 0, "", [], {}):
            raise UnsupportedModelError(
                f"{source} sets {name} = {_short(value)}, which is not known and may change the result; choose a head without it."
            )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_speculators(values: Mapping[str, Any], kind: str, source: str) -> None:
    if kind == EAGLE3:
        return
    if values.get("layernorms"):
        raise UnsupportedModelError(f"{source} sets layernorms, which is not supported; choose a head without it.")
    architecture = values.get("transformer_layer_architecture", "LlamaDecoderLayer")
    refuse_unknown("transformer_layer_architecture", str(architecture), ("LlamaDecoderLayer",), UnsupportedModelError)


def _flag(values: Mapping[str, Any], name: str, source: str) -> bool:
    value = values.get(name, False)
    if value is not None and not isinstance(value, bool):
        raise ModelFileError(f"{source}: {name} must be true or false, not {_short(value)}.")
    return bool(value)


def _network(layer: Mapping[str, Any], source: str) -> dict[str, Any]:
    """What the decoder layers of a head share with a language model."""
    family = layer.get("model_type", "llama")
    family = "llama" if family in (EAGLE, EAGLE3) else str(family)
    refuse_unknown("model_type of a head's layers", family, _FAMILIES, UnsupportedModelError)
    bias = bool(layer.get("attention_bias") or layer.get("bias"))
    plain = {
        key: value for key, value in layer.items() if key not in ("attention_bias", "bias", "model_type") and value is not None
    }
    architecture = folder_architecture({**_LLAMA, **plain, "model_type": family}, source)
    if any(kind.window is not None for kind in architecture.layers):
        raise UnsupportedModelError(f"{source} sets sliding_window, which is not supported for a head; choose a head without it.")
    if architecture.num_layers > MAX_LAYERS:
        raise ModelFileError(f"{source}: num_hidden_layers must be from 1 to {MAX_LAYERS}, not {architecture.num_layers}.")
    return {
        "hidden_size": architecture.hidden_size,
        "intermediate_size": architecture.intermediate_size,
        "num_heads": architecture.num_heads,
        "num_kv_heads": architecture.num_kv_heads,
        "head_dim": architecture.head_dim,
        "num_layers": architecture.num_layers,
        "rope": architecture.layers[0].rope,
        "rms_norm_eps": architecture.rms_norm_eps,
        "activation": architecture.activation,
        "max_position_embeddings": architecture.max_position_embeddings,
        "vocab_size": architecture.vocab_size,
        "attention_bias": bias,
        "qk_norm": architecture.qk_norm,
    }


def _layer_ids(values: Mapping[str, Any], extra: Any, source: str) -> tuple[int, ...]:
    """Empty where the file does not name them."""
    ids = values.get("eagle_aux_hidden_state_layer_ids")
    if ids is None and isinstance(extra, Mapping):
        ids = extra.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        return ()
    if not isinstance(ids, list) or not 1 <= len(ids) <= MAX_STATES or not all(type(one) is int and one >= 0 for one in ids):
        raise ModelFileError(f"{source}: eagle_aux_hidden_state_layer_ids must be layer numbers, not {_short(ids)}.")
    if len(set(ids)) < len(ids):
        raise ModelFileError(f"{source}: eagle_aux_hidden_state_layer_ids names a layer twice: {ids}.")
    return tuple(ids)


def check_target(config: HeadConfig, source: str, *, name: str, hidden_size: int, vocab_size: int, num_layers: int) -> None:
    """Refuse a head that was made for another target than the one of these sizes.

    Raises:
        ConfigError: names what differs.
    """
    pairs = (("hidden size", config.target_hidden_size, hidden_size), ("vocabulary size", config.vocab_size, vocab_size))
    for what, ours, theirs in pairs:
        if ours != theirs:
            raise ConfigError(
                f"{source} is a head for a target of {what} {ours}, but {name} has {theirs}; give a head that was made for {name}."
            )
    wrong = [layer for layer in config.layer_ids if not 0 <= layer <= num_layers]
    if wrong:
        raise ConfigError(
            f"{source} needs the states of layer {wrong[0]}, but {name} has layers 0 to {num_layers - 1}; "
            f"give a head that was made for {name}."
        )
