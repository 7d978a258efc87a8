"""A trained head as a folder in the speculators format.

Owns: the folder's settings, tensor names and provenance.  Does not know: how a head was trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.architecture import Architecture, Rope
from foredraft.array_file import write_whole
from foredraft.drafters.eagle_config import EAGLE3, read_config
from foredraft.drafters.eagle_file import HeadFile, fitted, open_head
from foredraft.drafters.ngram_table import TargetIdentity
from foredraft.train.eagle3 import Eagle3Network
from foredraft.types import ConfigError

CONFIG, WEIGHTS, PROVENANCE = "config.json", "model.safetensors", "provenance.json"
# What a reader drafts with when it is not told.
NUM_DRAFTED = 3
# Of a head as it is written here, by the canonical names of ``drafters.eagle_file``.
OWN_WEIGHTS = {"fc", "hidden_norm", "norm", "lm_head"} | {
    f"layers.0.{stem}" for stem in ("qkv", "o", "gate_up", "down", "attn_norm", "mlp_norm")
}


def write_head(
    folder: Path,
    network: Eagle3Network,
    architecture: Architecture,
    taps: Sequence[int],
    identity: TargetIdentity,
    provenance: Mapping[str, Any],
) -> None:
    """Write a head; each file is written whole or not at all, and the weights last.

    Embeddings are the target's own and left out.

    Raises:
        CapacityError: a file cannot be written.
    """
    from safetensors.torch import save

    config = json.dumps(head_config(architecture, taps, len(network.draft_vocab), identity.model), indent=2)
    write_whole(folder / CONFIG, config.encode())
    write_whole(folder / PROVENANCE, json.dumps({**provenance, "target": asdict(identity)}, indent=2).encode())
    write_whole(folder / WEIGHTS, save(head_tensors(network, architecture), {"format": "pt"}))


def head_tensors(network: Eagle3Network, architecture: Architecture) -> dict[str, Tensor]:
    """Weights as bfloat16, by their names in the format; ``d2t`` int64 [V'], what to add to a draft id; ``t2d`` bool [V]."""
    layer, attention, mlp = "layers.0.", "layers.0.self_attn.", "layers.0.mlp."
    q, kv = architecture.num_heads * architecture.head_dim, architecture.num_kv_heads * architecture.head_dim
    q_proj, k_proj, v_proj = torch.split(network.qkv, [q, kv, kv])
    gate, up = network.gate_up.chunk(2)
    weights = {
        # The states are divided on their way in; here the matrix does it.
        "fc": network.fc / network.feature_scale,
        layer + "input_layernorm": network.input_norm,
        layer + "hidden_norm": network.hidden_norm,
        layer + "post_attention_layernorm": network.mlp_norm,
        attention + "q_proj": q_proj,
        attention + "k_proj": k_proj,
        attention + "v_proj": v_proj,
        attention + "o_proj": network.o,
        mlp + "gate_proj": gate,
        mlp + "up_proj": up,
        mlp + "down_proj": network.down,
        "norm": network.norm,
        "lm_head": network.lm_head,
    }
    tensors = {f"{name}.weight": weight.detach().cpu().bfloat16().contiguous() for name, weight in weights.items()}
    vocab = network.draft_vocab.cpu()
    known = torch.zeros(architecture.vocab_size, dtype=torch.bool)
    known[vocab] = True
    return tensors | {"d2t": vocab - torch.arange(len(vocab)), "t2d": known}


def open_own_head(folder: Path, architecture: Architecture, taps: Sequence[int], identity: TargetIdentity) -> HeadFile:
    """The head in ``folder``, if it is one that ``write_head`` writes for this target.

    Raises:
        ConfigError: it is for another target, or of a shape that is not trained here.
        ModelFileError: it cannot be read.
    """
    head = fitted(open_head(folder), identity, architecture.hidden_size, architecture.num_layers)
    own = head_config(architecture, taps, len(head.target_ids), identity.model)
    if head.config != read_config(own, CONFIG, kind=EAGLE3) or set(head.weights) != OWN_WEIGHTS:
        raise ConfigError(
            f"{folder} holds a head of another shape than those that are trained here, so it cannot be gone on from; "
            "give one that `foredraft train eagle3` made, or none."
        )
    return head


def head_config(architecture: Architecture, taps: Sequence[int], draft_vocab_size: int, target: str) -> dict[str, Any]:
    """The settings of a head, as plain data."""
    a = architecture
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": a.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": a.hidden_size,
            "intermediate_size": a.intermediate_size,
            "num_attention_heads": a.num_heads,
            "num_key_value_heads": a.num_kv_heads,
            "head_dim": a.head_dim,
            "num_hidden_layers": 1,
            "vocab_size": a.vocab_size,
            "hidden_act": "silu",
            "rms_norm_eps": a.rms_norm_eps,
            "max_position_embeddings": a.max_position_embeddings,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            **_rope(a.layers[-1].rope),
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": NUM_DRAFTED}],
            "verifier": {"name_or_path": target, "architectures": ["LlamaForCausalLM"]},
        },
    }


def _rope(rope: Rope) -> dict[str, Any]:
    scaling: dict[str, Any] | None = None
    if rope.llama3 is not None:
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        scaling = {"rope_type": "llama3", **dict(zip(names, rope.llama3, strict=True))}
    elif rope.linear_factor != 1.0:
        scaling = {"rope_type": "linear", "factor": rope.linear_factor}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}
