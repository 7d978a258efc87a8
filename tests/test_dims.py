from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foredraft.dims import dims_from_config, dims_from_params, dims_of
from foredraft.loader.folder_config import folder_architecture
from foredraft.types import ConfigError, ModelFileError, UnsupportedModelError

LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def write(folder: Path, values: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return str(path)


def test_a_known_model_has_other_sizes_than_its_config_says(tmp_path: Path) -> None:
    dims = dims_from_config(write(tmp_path, LLAMA_3_8B))
    assert dims.num_params == pytest.approx(8.03e9, rel=0.001)
    assert dims.num_params - dims.pass_params == 128256 * 4096
    assert dims.kv_per_token * 2 == 131072  # 128 KiB of bfloat16 a token
    assert dims.max_context == 8192


@pytest.mark.parametrize("tied", [False, True])
def test_config_and_loaded_model_are_read_differently(tmp_path: Path, tied: bool) -> None:
    values = {**LLAMA_3_8B, "tie_word_embeddings": tied}
    path = write(tmp_path, values)
    loaded, read = dims_of(folder_architecture(values, "here"), path), dims_from_config(path)
    # Norms are counted in the loaded model only.
    assert loaded.num_params == pytest.approx(read.num_params, rel=1e-4)
    assert loaded.pass_params == pytest.approx(read.pass_params, rel=1e-4)
    assert replace(loaded, num_params=0, pass_params=0) == replace(read, num_params=0, pass_params=0)


def test_the_text_part_of_a_larger_config_is_overlooked(tmp_path: Path) -> None:
    whole = dims_from_config(write(tmp_path, {"model_type": "both", "tie_word_embeddings": True, "text_config": LLAMA_3_8B}))
    assert whole.num_params == whole.pass_params == pytest.approx(7.5e9, rel=0.01)


@pytest.mark.parametrize("num_params", [1e7, 1.35e8, 5e8, 1e9, 8e9, 70e9, 405e9, 2e12])
def test_assumed_sizes_do_not_add_up_to_the_parameters(num_params: float) -> None:
    dims = dims_from_params(num_params, "target")
    layers = dims.num_layers * (dims.hidden_size * (2 * dims.attention_width + 3 * dims.intermediate_size))
    layers += dims.hidden_size * dims.kv_per_token
    copies = 1 if dims.num_params == dims.pass_params else 2
    assert layers + copies * dims.vocab_size * dims.hidden_size == pytest.approx(num_params, rel=0.5 if num_params < 1e8 else 0.05)
    assert dims.num_params == num_params
    assert f"{dims.num_layers} layers of width {dims.hidden_size}" in dims.assumed


@pytest.mark.parametrize("num_params", [0, -7e9, 1e6, 1e14, float("nan"), float("inf")])
def test_a_senseless_number_of_parameters_is_planned_for(num_params: float) -> None:
    with pytest.raises(ConfigError, match="number of parameters"):
        dims_from_params(num_params, "target")


def test_a_mixture_of_experts_is_planned_as_if_it_were_dense(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="mixture of experts"):
        dims_from_config(write(tmp_path, {**LLAMA_3_8B, "num_local_experts": 8}))


@pytest.mark.parametrize(
    ("values", "says"),
    [([], "JSON object"), ({}, "num_attention_heads"), ({**LLAMA_3_8B, "hidden_size": -1}, "hidden_size must be")],
)
def test_a_broken_config_is_read(tmp_path: Path, values: object, says: str) -> None:
    with pytest.raises(ModelFileError, match=says):
        dims_from_config(write(tmp_path, values))
