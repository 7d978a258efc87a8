"""Small draft heads with random weights in every format, and an independent reference that computes them.

Owns: what the tensors of each format are called, and the recipe (EAGLE, 2401.15077; EAGLE-3, 2503.01840; the options of
speculators) in plain torch, over a whole text at once and without a cache.  Does not know: foredraft's own heads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_weights import VOCAB_SIZE

HEADS, KV_HEADS, DIM, INTERMEDIATE, EPS, THETA = 4, 2, 16, 48, 1e-5, 500.0


@dataclass
class HeadSpec:
    """One head.  ``style``: speculators, original, or eagle (of the first kind)."""

    style: str = "speculators"
    hidden: int = 64
    target_hidden: int = 64
    vocab_size: int = VOCAB_SIZE
    draft_vocab: int = 40
    layer_ids: tuple[int, ...] = (0, 1, 3)
    num_layers: int = 1
    bias: bool = False
    fc_bias: bool = False
    qk_norm: bool = False
    own_embed: bool = False
    max_positions: int = 256
    seed: int = 0
    flags: dict[str, bool] = field(default_factory=dict)

    @property
    def is_eagle3(self) -> bool:
        return self.style != "eagle"

    def tensors(self) -> dict[str, Tensor]:
        """By the names of the speculators format, or of the first EAGLE."""
        generator = torch.Generator().manual_seed(self.seed)

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator) / columns**0.5

        def norm(size: int) -> Tensor:
            return 1 + 0.2 * torch.randn(size, generator=generator)

        d, states = self.hidden, self.target_hidden * len(self.layer_ids)
        found = {"fc.weight": matrix(d, states if self.is_eagle3 else 2 * d)}
        if self.fc_bias:
            found["fc.bias"] = 0.1 * torch.randn(d, generator=generator)
        for i in range(self.num_layers):
            p, columns = f"layers.{i}.", 2 * d if i == 0 and self.is_eagle3 else d
            sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
            found |= {f"{p}self_attn.{name}_proj.weight": matrix(rows, columns) for name, rows in sizes.items()}
            if self.bias:
                found |= {f"{p}self_attn.{name}_proj.bias": 0.2 * torch.randn(n, generator=generator) for name, n in sizes.items()}
                found[f"{p}self_attn.o_proj.bias"] = 0.2 * torch.randn(d, generator=generator)
            if self.qk_norm:
                found |= {f"{p}self_attn.{name}_norm.weight": norm(DIM) for name in "qk"}
            found[f"{p}self_attn.o_proj.weight"] = matrix(d, HEADS * DIM)
            found |= {f"{p}mlp.{name}_proj.weight": matrix(INTERMEDIATE, d) for name in ("gate", "up")}
            found[f"{p}mlp.down_proj.weight"] = matrix(d, INTERMEDIATE)
            found[f"{p}post_attention_layernorm.weight"] = norm(d)
            if i or self.is_eagle3:
                found[f"{p}input_layernorm.weight"] = norm(d)
        if self.own_embed:
            found["embed_tokens.weight"] = 0.3 * torch.randn(self.vocab_size, d, generator=generator)
        if not self.is_eagle3:
            return found
        found |= {"layers.0.hidden_norm.weight": norm(d), "norm.weight": norm(d), "lm_head.weight": matrix(self.draft_vocab, d)}
        if self.flags.get("norm_before_fc"):
            found["input_norm.weight"] = norm(states)
        if self.flags.get("fc_norm"):
            found |= {f"fc_norm.{i}.weight": norm(self.target_hidden) for i in range(len(self.layer_ids))}
        ids = self.target_ids()
        found["d2t"] = torch.from_numpy(ids - np.arange(len(ids)))
        found["t2d"] = torch.from_numpy(np.isin(np.arange(self.vocab_size), ids))
        return found

    def target_ids(self) -> Any:
        if not self.is_eagle3:
            return np.arange(self.vocab_size)
        rng = np.random.Generator(np.random.Philox(self.seed))
        return np.sort(rng.choice(self.vocab_size, self.draft_vocab, replace=False)).astype(np.int64)

    def config(self) -> dict[str, Any]:
        layer = {
            "model_type": "qwen3" if self.qk_norm else "llama",
            "hidden_size": self.hidden,
            "intermediate_size": INTERMEDIATE,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": DIM,
            "num_hidden_layers": self.num_layers,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "hidden_act": "silu",
            "attention_bias": self.bias,
        }
        if self.style == "eagle":
            return {"architectures": ["EagleLlamaForCausalLM"], **layer}
        ids = list(self.layer_ids)
        head = {"draft_vocab_size": self.draft_vocab, "target_hidden_size": self.target_hidden, **self.flags}
        if self.style == "original":
            extra = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}, "tie_word_embeddings": False}
            return {"architectures": ["LlamaForCausalLMEagle3"], **layer, **head, **extra}
        return {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3Speculator"],
            "speculators_version": "0.3.0",
            "eagle_aux_hidden_state_layer_ids": ids,
            "transformer_layer_config": layer,
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny"}},
            **head,
        }

    def write(self, folder: Path) -> Path:
        save(folder, self.config(), self.tensors(), midlayer=self.style == "original")
        return folder


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, midlayer: bool = False) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    renamed = {name.replace("layers.0.", "midlayer.") if midlayer else name: one.contiguous() for name, one in tensors.items()}
    save_file(renamed, str(folder / "model.safetensors"))


# ------------------------------------------------------------------------------------------------ the reference


def rms(x: Tensor, weight: Tensor | None, eps: float = EPS) -> Tensor:
    scaled = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return scaled if weight is None else scaled * weight


def rotate(heads: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [T, heads, D] by complex multiplication of the pairs (i, i + D/2)."""
    half = heads.shape[-1] // 2
    angles = positions[:, None].double() * THETA ** (-torch.arange(half).double() / half)
    turned = (
        torch.complex(heads[..., :half].double(), heads[..., half:].double())
        * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    return torch.cat((turned.real, turned.imag), dim=-1).float()


class Reference:
    """A head on a text: ``states`` of all tokens are known, and rows follow for drafts.

    ``embed`` and ``lm_head`` are the target's; ``final_norm`` is what the first EAGLE reads states through.
    """

    def __init__(self, spec: HeadSpec, embed: Tensor, lm_head: Tensor, final_norm: Tensor, final_eps: float) -> None:
        self.spec, self.t = spec, spec.tensors()
        self.embed = self.t.get("embed_tokens.weight", embed)
        self.lm_head = self.t.get("lm_head.weight", lm_head)
        self.final_norm, self.final_eps = final_norm, final_eps

    def features(self, states: Tensor) -> Tensor:
        spec, t = self.spec, self.t
        if not spec.is_eagle3:
            return rms(states, self.final_norm, self.final_eps)
        if spec.flags.get("fc_norm"):
            parts = states.split(spec.target_hidden, dim=-1)
            states = torch.cat([rms(part, t[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], dim=-1)
        if spec.flags.get("norm_before_fc"):
            states = rms(states, t["input_norm.weight"])
        return states @ t["fc.weight"].T + t.get("fc.bias", 0.0)

    def __call__(self, tokens: list[int], features: Tensor, first: int = 1) -> tuple[Tensor, Tensor]:
        """Logits and next features of the pairs (feature of token i - 1, token i), i = first .. : [T, D], [T, d]."""
        spec, t = self.spec, self.t
        e, f = self.embed[torch.tensor(tokens[first:])], features[first - 1 : len(tokens) - 1]
        positions = torch.arange(first, len(tokens)) - 1
        for i in range(spec.num_layers):
            p = f"layers.{i}."
            if i == 0 and spec.is_eagle3:
                normed = rms(f, t[p + "hidden_norm.weight"])
                x = normed if spec.flags.get("norm_before_residual") else f
                inputs = torch.cat((rms(e, t[p + "input_layernorm.weight"]), normed), dim=-1)
            elif i == 0:
                x = inputs = torch.cat((e, f), dim=-1) @ t["fc.weight"].T + t.get("fc.bias", 0.0)
            else:
                inputs = rms(x, t[p + "input_layernorm.weight"])
            x = x + self._attention(inputs, p, positions)
            h = rms(x, t[p + "post_attention_layernorm.weight"])
            gate, up = h @ t[p + "mlp.gate_proj.weight"].T, h @ t[p + "mlp.up_proj.weight"].T
            x = x + (gate * torch.sigmoid(gate) * up) @ t[p + "mlp.down_proj.weight"].T
        normed = rms(x, t["norm.weight"]) if spec.is_eagle3 else x
        return normed @ self.lm_head.T, normed if spec.flags.get("norm_output") else x

    def _attention(self, inputs: Tensor, p: str, positions: Tensor) -> Tensor:
        t, out = self.t, []
        parts = {}
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            part = inputs @ t[f"{p}self_attn.{name}_proj.weight"].T + t.get(f"{p}self_attn.{name}_proj.bias", 0.0)
            parts[name] = part.view(len(inputs), heads, DIM)
            if name != "v":
                if self.spec.qk_norm:
                    parts[name] = rms(parts[name], t[f"{p}self_attn.{name}_norm.weight"])
                parts[name] = rotate(parts[name], positions)
        mask = torch.full((len(inputs), len(inputs)), -torch.inf).triu(1)
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = parts["q"][:, head] @ parts["k"][:, group].T / DIM**0.5 + mask
            out.append(torch.softmax(scores, dim=-1) @ parts["v"][:, group])
        return torch.cat(out, dim=-1) @ t[p + "self_attn.o_proj.weight"].T + t.get(p + "self_attn.o_proj.bias", 0.0)
