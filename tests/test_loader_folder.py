from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import hf_weights
from foredraft.architecture import LayerKind, Rope
from foredraft.loader import load_checkpoint
from foredraft.loader.folder_config import folder_architecture
from foredraft.types import ModelFileError, UnsupportedModelError
from loader_files import write_folder, write_gguf

LLAMA = {
    "model_type": "llama",
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write_folder(tmp_path / "m", "llama")
    return tmp_path / "m"


@pytest.mark.parametrize("family", hf_weights.FAMILIES)
def test_every_family_reads_as_transformers_saved_it_and_as_its_gguf(family: str, tmp_path: Path) -> None:
    case = write_folder(tmp_path / "m", family)
    loaded = load_checkpoint(str(tmp_path / "m"))
    assert loaded.architecture == case.architecture
    assert loaded.quantization == "F32" and loaded.weight_bytes == (tmp_path / "m" / "model.safetensors").stat().st_size
    twin = load_checkpoint(str(write_gguf(tmp_path / "m.gguf", case.architecture, case.weights)))
    assert list(loaded.weights) == list(twin.weights) == list(case.weights)
    for name, weight in case.weights.items():
        rows = weight.shape[0]
        values = loaded.weights[name].read(0, rows)
        np.testing.assert_allclose(values, weight.read(0, rows), atol=1e-6)
        np.testing.assert_allclose(values, twin.weights[name].read(0, rows), atol=1e-6)
        np.testing.assert_array_equal(loaded.weights[name].read(1, rows - 1), values[1:-1])
        assert values.dtype == np.float32 and loaded.weights[name].read(rows, rows).shape == (0, *weight.shape[1:])


@pytest.mark.parametrize(("dtype", "format"), [(torch.bfloat16, "BF16"), (torch.float16, "F16")])
def test_half_precision_is_widened_exactly(dtype: torch.dtype, format: str, tmp_path: Path) -> None:
    case = write_folder(tmp_path / "m", "qwen2", dtype=dtype)
    loaded = load_checkpoint(str(tmp_path / "m"))
    assert loaded.quantization == format
    for name, weight in case.weights.items():
        expected = torch.from_numpy(weight.read(0, weight.shape[0])).to(dtype).float().numpy()
        np.testing.assert_array_equal(loaded.weights[name].read(0, weight.shape[0]), expected)


def test_shards_read_as_one_file(tmp_path: Path) -> None:
    case = write_folder(tmp_path / "m", "llama", shard_size="20KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    loaded = load_checkpoint(str(tmp_path / "m"))
    for name, weight in case.weights.items():
        np.testing.assert_allclose(loaded.weights[name].read(0, weight.shape[0]), weight.read(0, weight.shape[0]), atol=1e-6)
    next((tmp_path / "m").glob("model-00002*")).unlink()
    with pytest.raises(ModelFileError, match="lacks the shard model-00002"):
        load_checkpoint(str(tmp_path / "m"))


def test_a_shard_outside_the_folder_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama.parent / "other.safetensors")
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": "../other.safetensors"}}))
    with pytest.raises(ModelFileError, match="inside the folder"):
        load_checkpoint(str(llama))


def test_truncated_safetensors_are_model_file_errors(llama: Path) -> None:
    path = llama / "model.safetensors"
    data = path.read_bytes()
    for length in [0, 1, 7, 8, 9, 100, 1000, *range(3000, len(data), 7001), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(ModelFileError, match=r"model\.safetensors"):
            load_checkpoint(str(llama))


def _edit_weights(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), ModelFileError, "layers.1.mlp.up_proj"),
        (lambda t: t.pop("lm_head.weight"), ModelFileError, "lm_head.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(31)}), ModelFileError, "shape"),
        (lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(32)}), UnsupportedModelError, "o_proj.bias"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}), UnsupportedModelError, "I8"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: Any, error: type[Exception], text: str, llama: Path) -> None:
    _edit_weights(llama, change)
    with pytest.raises(error, match=text):
        load_checkpoint(str(llama))


def test_pickled_weights_are_never_opened(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"neither model\.safetensors"):
        load_checkpoint(str(llama))
    (llama / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelFileError, match="pickled"):
        load_checkpoint(str(llama))


def test_a_folder_with_vision_parts_loads_its_text_model(tmp_path: Path) -> None:
    case = write_folder(tmp_path, "gemma3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config, "eos_token_id": [1, 2]}))
    tensors = {"language_model." + name: value for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file({**tensors, "vision_tower.patch.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    loaded = load_checkpoint(str(tmp_path))
    assert loaded.architecture == case.architecture and {1, 2} <= loaded.eos_ids
    np.testing.assert_allclose(loaded.weights["norm"].read(0, 32), case.weights["norm"].read(0, 32), atol=1e-6)


def test_end_ids_are_gathered_from_every_file(llama: Path) -> None:
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "eos_token_id": 11}))
    assert load_checkpoint(str(llama)).eos_ids == {1, 3, 7, 9, 11}


def test_the_folders_tokenizer_is_transformers_own(llama: Path) -> None:
    ours = load_checkpoint(str(llama)).tokenizer
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(llama))
    text = "hello  w 12 <|end|> é"
    assert ours.encode(text) == theirs.encode(text) and ours.encode(text)[0] == ours.bos_id == 0
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert ours.vocabulary() == theirs.get_vocab() and ours.vocab_size == len(theirs)
    assert ours.special_ids == set(theirs.all_special_ids) | {2, 3}
    chat = [{"role": "user", "content": "hello"}]
    assert ours.encode_chat(chat) == theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"model": 1}'])
def test_a_broken_json_file_is_a_model_file_error(name: str, content: bytes, llama: Path) -> None:
    if name == "generation_config.json" and content == b'{"model": 1}':
        pytest.skip("a settings file may hold other keys")
    (llama / name).write_bytes(content)
    with pytest.raises(ModelFileError, match="fetch it again"):
        load_checkpoint(str(llama))


def test_a_folder_without_tokenizer_json_says_how_to_make_one(llama: Path) -> None:
    (llama / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModelError, match="save_pretrained"):
        load_checkpoint(str(llama))


def test_older_settings_files_mean_the_same() -> None:
    scaling = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling}
    kind = LayerKind(Rope(5e5, llama3=(8.0, 1.0, 4.0, 8192)))
    assert folder_architecture(old, "config.json").layers == (kind, kind)
    linear = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert folder_architecture(linear, "config.json").layers[0] == LayerKind(Rope(1e4, 2.0))
    gemma = {
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "intermediate_size": 64,
        "num_hidden_layers": 7,
        "sliding_window": 512,
    }
    gemma |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    found = folder_architecture(gemma, "config.json")
    near, far = LayerKind(Rope(1e4), 512), LayerKind(Rope(1e6, 8.0))
    assert found.layers == (near,) * 5 + (far, near)
    assert found.tie_embeddings and found.head_dim == 256 and found.attention_scale == 0.0


def test_sliding_windows_follow_each_family() -> None:
    def windows(**config: Any) -> list[int | None]:
        return [kind.window for kind in folder_architecture({**LLAMA, "num_hidden_layers": 4, **config}, "c").layers]

    assert windows(model_type="mistral") == [4096] * 4
    assert windows(model_type="mistral", sliding_window=None) == [None] * 4
    assert windows(model_type="qwen2", sliding_window=9) == [None] * 4
    qwen = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9}
    assert windows(**qwen, max_window_layers=3) == [None, None, None, 9]
    assert windows(**qwen, layer_types=["sliding_attention", "full_attention"] * 2) == [9, None, 9, None]
    assert windows(sliding_window=9) == [None] * 4


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "relu"}, "relu"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["linear_attention"] * 2}, "layer_types"),
    ],
)
def test_options_that_change_the_result_are_refused_by_name(option: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedModelError, match=text):
        folder_architecture({**LLAMA, **option}, "config.json")


@pytest.mark.parametrize(
    "option",
    [
        {"hidden_size": None},
        {"hidden_size": "32"},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"num_hidden_layers": 10**9},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": 10**309},
        {"rope_theta": 10**4000},
        *({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": value} for value in ("x", [1], -1, 1.5)),
        {"rope_parameters": 3},
        {"model_type": 5},
    ],
)
def test_senseless_settings_are_file_errors(option: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json"):
        folder_architecture({**LLAMA, **option}, "config.json")
