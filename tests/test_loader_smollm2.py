"""The demo model itself, fetched once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foredraft.loader import Checkpoint, Detokenizer, load_checkpoint

pytestmark = pytest.mark.model

CODE = "def f(x):\n    if x > 1_000:\n\treturn {'a': [1, 2.5e-3]}  # é\r\n\n\n"
SAMPLES = [
    CODE,
    "naïve café — 日本語 😀👩‍👩‍👧 العربية",
    "   leading\ttabs  ",
    "",
    "\u0000\u200b\ufeff",
    "don't WE'LL 123456",
    "<|im_start|>x<|im_end|>",
]

# The model has no token for these bytes, nor for those that begin a character beyond U+3FFFF.
UNKNOWN = "\x04\x06\x13\x14\x16\x1d"


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_checkpoint("smollm2-135m")


def test_the_architecture_is_smollm2s(checkpoint: Checkpoint) -> None:
    a = checkpoint.architecture
    assert (a.family, a.num_layers, a.hidden_size, a.num_heads, a.num_kv_heads, a.head_dim) == ("llama", 30, 576, 9, 3, 64)
    assert (a.vocab_size, a.max_position_embeddings, a.intermediate_size) == (49152, 8192, 1536)
    assert a.layers[0].rope.theta == 100_000 and a.layers[0].window is None and a.tie_embeddings and not a.qkv_bias
    assert checkpoint.quantization == "Q4_1" and checkpoint.weight_bytes == 98_362_432 and checkpoint.eos_ids == {2}
    assert {name: weight.shape for name, weight in checkpoint.weights.items()} == a.weight_shapes()


def test_weights_are_finite_and_of_trained_size(checkpoint: Checkpoint) -> None:
    for name in ("embed", "norm", "layers.0.qkv", "layers.29.down"):
        values = checkpoint.weights[name].read(0, 64)
        assert np.isfinite(values).all() and 1e-3 < np.abs(values).mean() < 20, name


def test_special_tokens_and_digits_are_single_ids(checkpoint: Checkpoint) -> None:
    tokenizer = checkpoint.tokenizer
    assert tokenizer.encode("<|im_start|>") == [1] and tokenizer.encode("<|im_end|>") == [2]
    assert [tokenizer.decode([token]) for token in tokenizer.encode("2024")] == list("2024")
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert tokenizer.vocab_size == 49152 and tokenizer.bos_id == 1
    text = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode_chat([{"role": "user", "content": "Hi"}])[0] == 1


@pytest.mark.parametrize("text", SAMPLES)
def test_samples_survive_and_stream(checkpoint: Checkpoint, text: str) -> None:
    tokenizer = checkpoint.tokenizer
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    detokenizer = Detokenizer(tokenizer, [1], skip_special_tokens=False)
    deltas = []
    for token in ids:
        detokenizer.push(token, may_stop=True)
        deltas.append(detokenizer.take_delta(False))
    assert "".join(deltas) + detokenizer.take_delta(True) == text


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"], max_codepoint=0x3FFFF, exclude_characters=UNKNOWN), max_size=60))
def test_any_text_of_known_bytes_survives(checkpoint: Checkpoint, text: str) -> None:
    tokenizer = checkpoint.tokenizer
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


MEASURE_LOADING = """
import sys
from pathlib import Path
from foredraft.loader import load_checkpoint
from foredraft.target import ModelTarget

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

checkpoint = load_checkpoint("smollm2-135m")
checkpoint.release()
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
before = status("VmRSS")
target = ModelTarget(
    checkpoint.architecture, checkpoint.weights, device="cpu", ops="native", dtype=sys.argv[1], threads=1,
    num_blocks=1, block_size=16, max_model_len=16, release=checkpoint.release,
)
print((status("VmHWM") - before) / target.weight_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak")
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_loading_takes_much_more_memory_than_running(dtype: str) -> None:
    """Resident memory, pages of the mapped file included."""
    run = subprocess.run([sys.executable, "-c", MEASURE_LOADING, dtype], capture_output=True, text=True, timeout=120, check=True)
    assert 0.9 < float(run.stdout) <= 1.3, run.stdout
