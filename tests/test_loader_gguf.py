from __future__ import annotations

import contextlib
import dataclasses
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_weights
from foredraft.architecture import Rope
from foredraft.loader import load_checkpoint
from foredraft.loader.assemble import release_pages, stack_rows
from foredraft.loader.gguf_file import open_gguf
from foredraft.loader.gguf_model import llama3_rule
from foredraft.types import ModelError, ModelFileError, UnsupportedModelError
from loader_files import byte_level_metadata, sentence_piece_metadata, write_gguf

K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = hf_weights.case("llama")
    return write_gguf(tmp_path_factory.mktemp("gguf") / "llama.gguf", case.architecture, case.weights)


@pytest.mark.parametrize("family", hf_weights.FAMILIES)
def test_every_family_reads_as_the_network_that_was_written(family: str, tmp_path: Path) -> None:
    case = hf_weights.case(family)
    loaded = load_checkpoint(str(write_gguf(tmp_path / "m.gguf", case.architecture, case.weights)))
    expected = dataclasses.replace(case.architecture, family=case.architecture.family.replace("mistral", "llama"))
    close = {"rms_norm_eps": expected.rms_norm_eps, "attention_scale": expected.attention_scale}
    for name, value in close.items():  # float32 in the file
        assert getattr(loaded.architecture, name) == pytest.approx(value, rel=1e-6)
    assert dataclasses.replace(loaded.architecture, **close) == expected
    assert list(loaded.weights) == list(case.weights)
    for name, weight in case.weights.items():
        assert loaded.weights[name].shape == weight.shape
        np.testing.assert_array_equal(loaded.weights[name].read(0, weight.shape[0]), weight.read(0, weight.shape[0]), err_msg=name)


@pytest.mark.parametrize("format", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_matrices_equal_the_reference_dequantisation(format: str, tmp_path: Path) -> None:
    case = hf_weights.case("qwen3")
    # Blocks of 32 do not divide 48 columns.
    architecture = dataclasses.replace(case.architecture, intermediate_size=64)
    weights = hf_weights.random_weights(architecture)
    loaded = load_checkpoint(str(write_gguf(tmp_path / "m.gguf", architecture, weights, format=format)))
    assert loaded.quantization == format
    kind = GGMLQuantizationType[format]
    for name, weight in weights.items():
        values = weight.read(0, weight.shape[0])
        if values.ndim > 1:
            assert loaded.weights[name].format == format
            values = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        np.testing.assert_array_equal(loaded.weights[name].read(0, weight.shape[0]), values)


@pytest.mark.parametrize("format", K_QUANTS)
def test_k_quants_equal_the_reference_and_row_slices_equal_the_whole(format: str, tmp_path: Path) -> None:
    kind = GGMLQuantizationType[format]
    raw = np.random.default_rng(0).integers(0, 60, (6, 2 * GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weight = open_gguf(tmp_path / "k.gguf").weight("x")
    whole = gguf.quants.dequantize(raw, kind)
    assert weight.shape == (6, 512) and weight.format == format
    for start in range(7):
        for stop in range(start, 7):
            np.testing.assert_array_equal(weight.read(start, stop), whole[start:stop])


def test_row_slices_of_stacked_and_permuted_weights_equal_the_whole(llama: Path) -> None:
    weights = load_checkpoint(str(llama)).weights
    for name in ("layers.1.qkv", "layers.0.gate_up", "embed", "norm", "layers.2.down"):
        rows = weights[name].shape[0]
        whole = weights[name].read(0, rows)
        for start in range(0, rows + 1, 5):
            for stop in (start, min(start + 1, rows), min(start + 37, rows), rows):
                part = weights[name].read(start, stop)
                assert part.dtype == np.float32 and part.shape == (stop - start, *weights[name].shape[1:])
                np.testing.assert_array_equal(part, whole[start:stop])


def test_a_stack_of_two_formats_is_called_by_the_more_precise() -> None:
    plain = hf_weights.vector(np.ones((2, 4)))
    parts = [dataclasses.replace(plain, format="Q4_1"), dataclasses.replace(plain, format="Q8_0")]
    assert stack_rows(parts).format == "Q8_0" and stack_rows(parts[::-1]).format == "Q8_0"


def test_end_ids_template_and_bytes_come_from_the_file(llama: Path) -> None:
    loaded = load_checkpoint(str(llama))
    assert loaded.eos_ids == {1, 3}  # </s>, and <|end|> that the template ends a turn with
    assert loaded.name == str(llama) and loaded.path == llama and loaded.weight_bytes == llama.stat().st_size
    assert loaded.tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<s><|start|>user\nx<|end|>\n<|start|>assistant\n"


def test_truncation_at_any_offset_is_a_model_file_error(llama: Path, tmp_path: Path) -> None:
    data = llama.read_bytes()
    broken = tmp_path / "broken.gguf"
    rng = np.random.default_rng(0)
    header = data.find(b"blk.0") + 2000
    for length in {0, 1, 3, 4, 8, 23, 24, 25, len(data) - 1, *rng.integers(0, header, 60), *rng.integers(0, len(data), 30)}:
        broken.write_bytes(data[: int(length)])
        with pytest.raises(ModelFileError, match=r"broken\.gguf"):
            load_checkpoint(str(broken))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_changed_byte_in_the_header_never_escapes_the_model_errors(llama: Path, data: Any) -> None:
    content = bytearray(llama.read_bytes()[:60_000])
    full = llama.read_bytes()
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(bytes(content) + full[len(content) :])
        with contextlib.suppress(ModelError):
            load_checkpoint(str(path))


def test_huge_counts_in_the_header_do_not_allocate(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    key = struct.pack("<Q1sI", 1, b"k", 9)
    for body in (
        struct.pack("<IQ", 4, 2**60),
        struct.pack("<IQ", 8, 2**63),
        struct.pack("<IQ", 9, 5) + struct.pack("<IQ", 9, 9) * 9,
    ):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + body)
        with pytest.raises(ModelFileError):
            open_gguf(path)


def test_other_files_versions_and_formats_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        load_checkpoint(str(path))
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(100))
    with pytest.raises(UnsupportedModelError, match="big-endian"):
        load_checkpoint(str(path))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", np.zeros((2, 256), np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="format I8"):
        open_gguf(path).weight("x")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"rename": {"blk.1.ffn_up.weight": ""}}, ModelFileError, "blk.1.ffn_up.weight"),
        ({"rename": {"token_embd.weight": ""}}, ModelFileError, "token_embd.weight"),
        (
            {"extra": lambda w: w.add_tensor("blk.0.attn_output.bias", np.ones(32, np.float32))},
            UnsupportedModelError,
            "attn_output.bias",
        ),
        ({"extra": lambda w: w.add_final_logit_softcapping(30.0)}, UnsupportedModelError, "softcapping"),
        ({"extra": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)}, UnsupportedModelError, "yarn"),
        ({"extra": lambda w: w.add_expert_count(8)}, UnsupportedModelError, "expert_count"),
        ({"extra": lambda w: w.add_uint16("split.count", 3)}, UnsupportedModelError, "gguf-split"),
        ({"extra": lambda w: w.add_rope_dimension_count(8)}, UnsupportedModelError, "rope.dimension_count"),
    ],
)
def test_what_would_change_the_result_is_refused(
    options: dict[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    case = hf_weights.case("llama")
    path = write_gguf(tmp_path / "m.gguf", case.architecture, case.weights, **options)
    with pytest.raises(error, match=text):
        load_checkpoint(str(path))


def test_an_unknown_architecture_and_pre_tokenizer_are_named(tmp_path: Path) -> None:
    case = hf_weights.case("llama")
    other = dataclasses.replace(case.architecture, family="phi9")
    with pytest.raises(UnsupportedModelError, match="phi9"):
        load_checkpoint(str(write_gguf(tmp_path / "m.gguf", other, case.weights)))

    def tokenizer(writer: gguf.GGUFWriter) -> None:
        byte_level_metadata(writer)
        writer.kv_data[0]["tokenizer.ggml.pre"].value = "martian"

    with pytest.raises(UnsupportedModelError, match="martian"):
        load_checkpoint(str(write_gguf(tmp_path / "n.gguf", case.architecture, case.weights, tokenizer=tokenizer)))


def test_a_wrong_shape_is_a_file_error(tmp_path: Path) -> None:
    case = hf_weights.case("llama")
    path = write_gguf(tmp_path / "m.gguf", dataclasses.replace(case.architecture, intermediate_size=47), case.weights)
    with pytest.raises(ModelFileError, match="shape"):
        load_checkpoint(str(path))


@pytest.mark.parametrize(
    ("rule", "theta", "head_dim"),
    [((32.0, 1.0, 4.0, 8192), 5e5, 64), ((8.0, 1.0, 4.0, 8192), 5e5, 128), ((4.0, 2.0, 6.0, 128), 1e4, 32)],
)
def test_the_frequency_table_gives_back_llama3s_rule(rule: tuple[float, float, float, int], theta: float, head_dim: int) -> None:
    expected = Rope(theta, llama3=rule).inverse_frequencies(head_dim)
    divisors = (Rope(theta).inverse_frequencies(head_dim) / expected).astype(np.float32)
    found = llama3_rule(divisors, theta, head_dim, "m.gguf")
    np.testing.assert_allclose(Rope(theta, llama3=found).inverse_frequencies(head_dim), expected, rtol=2e-3)


def test_a_frequency_table_of_another_form_is_refused() -> None:
    assert llama3_rule(np.ones(8, np.float32), 1e4, 16, "m.gguf") is None
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        llama3_rule(np.linspace(1, 9, 8, dtype=np.float32), 1e4, 16, "m.gguf")
    with pytest.raises(ModelFileError, match="finite"):
        llama3_rule(np.array([1, np.nan], np.float32), 1e4, 4, "m.gguf")


def test_gemma_has_one_global_layer_in_six_when_the_file_is_silent(tmp_path: Path) -> None:
    case = hf_weights.case("gemma3")
    near, far = case.architecture.layers[:2]
    architecture = dataclasses.replace(case.architecture, layers=(near, near, near, near, near, far, near, near))

    def tokenizer(writer: gguf.GGUFWriter) -> None:
        sentence_piece_metadata(writer)
        del writer.kv_data[0]["gemma3.attention.sliding_window_pattern"]

    weights = hf_weights.random_weights(architecture)
    loaded = load_checkpoint(str(write_gguf(tmp_path / "m.gguf", architecture, weights, tokenizer=tokenizer)))
    assert loaded.architecture.layers == architecture.layers


def test_importing_the_loader_stays_light() -> None:
    code = (
        "import sys, foredraft.loader as l; l.known_models(); "
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'gguf') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_releasing_a_file_keeps_its_pages_or_loses_its_values(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = np.random.default_rng(0).standard_normal((4096, 1024)).astype(np.float32)
    writer.add_tensor("big", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    def mapped_megabytes() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("RssFile"))

    file = open_gguf(path)
    np.testing.assert_array_equal(file.weight("big").read(0, 4096), values)
    before = mapped_megabytes()
    release_pages(file.data)
    assert before - mapped_megabytes() > 12
    np.testing.assert_array_equal(file.weight("big").read(4090, 4096), values[4090:])
