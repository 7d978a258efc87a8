"""Folders of draft heads: what is read of each format, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foredraft.drafters.eagle_config import default_layer_ids, kind_of, read_config
from foredraft.drafters.eagle_file import fitted, head_kind, open_head
from foredraft.drafters.ngram_table import TargetIdentity
from foredraft.types import ConfigError, ForedraftError, ModelFileError, UnsupportedModelError
from head_files import HeadSpec, save
from hf_weights import VOCAB_SIZE

SPEC = HeadSpec()
TARGET = TargetIdentity("tiny", VOCAB_SIZE, "abc")


def changed(
    folder: Path, spec: HeadSpec = SPEC, *, config: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None
) -> Path:
    """A head's folder with settings and tensors replaced; None removes one."""
    settings, found = spec.config() | (config or {}), spec.tensors() | (tensors or {})
    kept = {name: tensor for name, tensor in found.items() if tensor is not None}
    save(folder, settings, kept, midlayer=spec.style == "original")
    return folder


@pytest.mark.parametrize("style", ["speculators", "original", "eagle"])
def test_each_format_is_known_by_its_folder(style: str, tmp_path: Path) -> None:
    spec = HeadSpec(style=style, draft_vocab=VOCAB_SIZE if style == "eagle" else 40)
    head = open_head(spec.write(tmp_path))
    assert head_kind(tmp_path) == head.config.kind == ("eagle" if style == "eagle" else "eagle3")
    assert head.target_ids.tolist() == spec.target_ids().tolist()
    assert head.config.taps(3) == ((3,) if style == "eagle" else spec.layer_ids)


def test_the_first_heads_are_known_by_their_tensors(tmp_path: Path) -> None:
    spec = HeadSpec(style="eagle", draft_vocab=VOCAB_SIZE)
    changed(tmp_path, spec, config={"architectures": ["LlamaForCausalLM"]})
    assert kind_of(json.loads((tmp_path / "config.json").read_text())) is None
    assert head_kind(tmp_path) == "eagle" and open_head(tmp_path).config.kind == "eagle"


def test_a_language_model_is_no_head(tmp_path: Path) -> None:
    assert head_kind(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    assert head_kind(tmp_path) is None
    with pytest.raises(ModelFileError, match="holds no draft head"):
        open_head(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"speculators_model_type": "eagle4"}, "did you mean 'eagle"),
        ({"wishful_norm": True}, "sets wishful_norm = True, which is not known"),
        ({"transformer_layer_config": {**SPEC.config()["transformer_layer_config"], "logit_scale": 2.0}}, "sets logit_scale = 2.0"),
        ({"transformer_layer_config": {**SPEC.config()["transformer_layer_config"], "mlp_bias": True}}, "sets mlp_bias = True"),
        ({"transformer_layer_config": {**SPEC.config()["transformer_layer_config"], "model_type": "gemma3_text"}}, "model_type"),
        ({"transformer_layer_config": {**SPEC.config()["transformer_layer_config"], "num_hidden_layers": 99}}, "num_hidden_layers"),
        ({"transformer_layer_config": 3}, "transformer_layer_config must be an object"),
        ({"norm_before_fc": 1}, "norm_before_fc must be true or false"),
        ({"norm_before_fc": True, "fc_norm": True}, "sets both norm_before_fc and fc_norm"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, "names a layer twice"),
        ({"eagle_aux_hidden_state_layer_ids": ["a"]}, "must be layer numbers"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, "fc.weight has 192 columns, but its config asks for 2 times 64"),
        ({"draft_vocab_size": 0}, "draft_vocab_size must be a whole number"),
        ({"norm_before_fc": True}, "no tensor input_norm.weight"),
        ({"fc_norm": True}, "no tensor fc_norm.0.weight"),
        ({"target_hidden_size": 50}, "a multiple of|3 times 50"),
        ({"draft_vocab_size": 41}, r"lm_head.weight has shape \[40, 64\], but the head's config asks for \[41, 64\]"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
    ],
)  # fmt: skip
def test_a_config_that_is_not_understood_is_refused_by_name(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ForedraftError, match=message):
        open_head(changed(tmp_path, config=config))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"fc.weight": None}, "no tensor fc.weight"),
        ({"layers.0.hidden_norm.weight": None}, "no tensor layers.0.hidden_norm.weight"),
        ({"layers.0.self_attn.q_proj.weight": torch.zeros(64, 64)}, r"q_proj.weight has shape \[64, 64\], .* asks for \[64, 128\]"),
        ({"layers.1.mlp.up_proj.weight": torch.zeros(2, 2)}, "tensor layers.1.mlp.up_proj.weight, which a head .* does not have"),
        ({"lm_head.weight": None}, "no tensor lm_head.weight"),
        ({"d2t": None}, "no tensor d2t"),
        ({"d2t": torch.zeros(40)}, "d2t must be 40 whole numbers"),
        ({"d2t": torch.full((40,), 1000)}, "an id of its own below 67"),
        ({"d2t": -torch.arange(40)}, "an id of its own below 67"),
        ({"t2d": torch.zeros(VOCAB_SIZE, dtype=torch.bool)}, "d2t and t2d name different tokens"),
        ({"norm.weight": torch.zeros(64, dtype=torch.int64)}, "norm.weight holds I64"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(tensors: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message):
        open_head(changed(tmp_path, tensors=tensors))


def test_bias_that_is_promised_must_be_there(tmp_path: Path) -> None:
    spec = HeadSpec(bias=True)
    with pytest.raises(ModelFileError, match=r"no tensor layers\.0\.self_attn\.q_proj\.bias"):
        open_head(changed(tmp_path, spec, tensors={"layers.0.self_attn.q_proj.bias": None}))


def test_a_head_of_another_target_is_refused(tmp_path: Path) -> None:
    head = open_head(SPEC.write(tmp_path))
    assert fitted(head, TARGET, 64, 3).config.layer_ids == (0, 1, 3)
    for target, hidden, layers, message in (
        (TARGET, 96, 3, "a target of hidden size 64, but tiny has 96"),
        (replace(TARGET, vocab_size=80), 64, 3, "a target of vocabulary size 67, but tiny has 80"),
        (TARGET, 64, 2, "needs the states of layer 3, but tiny has layers 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            fitted(head, target, hidden, layers)


def test_a_head_knows_the_target_it_was_trained_for(tmp_path: Path) -> None:
    SPEC.write(tmp_path)
    (tmp_path / "provenance.json").write_text(json.dumps({"target": asdict(TARGET), "tokens": 5}))
    assert fitted(open_head(tmp_path), TARGET, 64, 3).identity == TARGET
    with pytest.raises(ConfigError, match="is a head for tiny, whose vocabulary is not that of other"):
        fitted(open_head(tmp_path), TargetIdentity("other", VOCAB_SIZE, "xyz"), 64, 3)
    (tmp_path / "provenance.json").write_text(json.dumps({"target": {"name": "x"}}))
    with pytest.raises(ModelFileError, match="target must name a model"):
        open_head(tmp_path)


def test_a_layer_below_the_first_is_read(tmp_path: Path) -> None:
    head = open_head(changed(tmp_path, config={"eagle_aux_hidden_state_layer_ids": None}))
    with pytest.raises(ConfigError, match="needs the states of layer -1, but tiny has layers 0 to 1"):
        fitted(head, TARGET, 64, 2)


def test_a_state_of_another_size_than_the_heads_own_is_written_over_its_ends(tmp_path: Path) -> None:
    folder = changed(tmp_path, HeadSpec(style="eagle", hidden=32), config={"target_hidden_size": 64})
    with pytest.raises(ModelFileError, match="target_hidden_size is 64 and hidden_size 32"):
        open_head(folder)


def test_a_small_head_needs_ends_of_its_own(tmp_path: Path) -> None:
    head = open_head(HeadSpec(hidden=32).write(tmp_path))
    with pytest.raises(ConfigError, match="has no embed of its own and cannot use that of tiny"):
        fitted(head, TARGET, 64, 3)


def test_layers_that_are_not_named_are_the_usual_three(tmp_path: Path) -> None:
    head = open_head(changed(tmp_path, config={"eagle_aux_hidden_state_layer_ids": None}))
    assert fitted(head, TARGET, 64, 30).config.layer_ids == default_layer_ids(30) == (2, 15, 27)
    spec = HeadSpec(layer_ids=(0, 1))
    with pytest.raises(ModelFileError, match="names no eagle_aux_hidden_state_layer_ids"):
        open_head(changed(tmp_path / "two", spec, config={"eagle_aux_hidden_state_layer_ids": None}))


def test_defaults_of_a_config_are_those_of_llama() -> None:
    config = read_config({"speculators_model_type": "eagle3", "transformer_layer_config": {"model_type": "llama"}}, "config.json")
    assert (config.hidden_size, config.num_heads, config.head_dim, config.vocab_size) == (4096, 32, 128, 32000)
    assert config.draft_vocab_size == 32000 and not config.norm_before_residual
    with pytest.raises(UnsupportedModelError, match="which an 'eagle' head does not have"):
        read_config({"architectures": ["EagleLlamaForCausalLM"], "norm_output": True}, "config.json")
    assert np.asarray(config.layer_ids).size == 0
