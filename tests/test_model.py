from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from foredraft.architecture import Architecture, LayerKind, Rope, Weight
from foredraft.model import Decoder
from foredraft.ops import KVStorage, create_ops
from foredraft.types import ModelFileError, Rows
from foredraft.weights import check_weights
from hf_weights import FAMILIES, case, prompt, vector

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def test_a_missing_tensor_is_named() -> None:
    tiny = case("qwen3")
    weights = {name: weight for name, weight in tiny.weights.items() if name != "layers.1.k_norm"}
    with pytest.raises(ModelFileError, match=r"'layers.1.k_norm' \(16,\) is missing"):
        Decoder(tiny.architecture, weights, create_ops(CPU, torch.float32))


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes() -> None:
    tiny = case("llama")
    weights = {**tiny.weights, "layers.2.o": vector(np.zeros((32, 63)))}
    with pytest.raises(ModelFileError, match=r"'layers.2.o' must have shape \(32, 64\) .* not \(32, 63\)"):
        check_weights(tiny.architecture, weights)


def test_a_tensor_the_network_would_ignore_is_refused() -> None:
    tiny = case("llama")
    with pytest.raises(ModelFileError, match=r"'layers.0.qkv_bias' has no place in a llama model"):
        check_weights(tiny.architecture, {**tiny.weights, "layers.0.qkv_bias": vector(np.zeros(128))})


def test_a_head_beside_tied_embeddings_is_ignored() -> None:
    tiny = case("llama-tied")
    check_weights(tiny.architecture, {**tiny.weights, "lm_head": vector(np.ones((67, 32)))})


def test_tied_embeddings_are_read_and_kept_once() -> None:
    reads = []
    tiny = case("llama-tied")
    embed = tiny.weights["embed"]

    def read(start: int, stop: int) -> np.ndarray:
        reads.append((start, stop))
        return embed.read(start, stop)

    Decoder(tiny.architecture, {**tiny.weights, "embed": Weight(embed.shape, "F32", read)}, create_ops(CPU, torch.float32))
    assert reads == [(0, 67)]


def test_a_tap_may_be_asked_twice_and_beyond_the_last_layer_is_refused() -> None:
    tiny = case("llama")
    decoder = Decoder(tiny.architecture, tiny.weights, create_ops(CPU, torch.float32))
    storage = KVStorage(tiny.architecture, 4, 4, CPU, torch.float32)
    layout = decoder.layout([Rows(prompt(5), 0, 1, [2, 0])], 4)
    hidden, tapped = decoder.forward(layout, storage, (3, 1, 3))
    assert tapped is not None and tapped.shape == (5, 96)
    assert torch.equal(tapped[:, :32], hidden) and torch.equal(tapped[:, 64:], hidden)
    assert decoder.forward(layout, storage)[1] is None
    with pytest.raises(AssertionError):
        decoder.forward(layout, storage, (4,))


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_batch_mates_change_nothing_but_rounding(family: str) -> None:
    # In float64 rounding is 1e-14, so nothing real can hide below the float32 tolerances of test_target.
    tiny, tokens = case(family), prompt(37)
    decoder = Decoder(tiny.architecture, tiny.weights, create_ops(CPU, torch.float64))
    storage = KVStorage(tiny.architecture, 60, 4, CPU, torch.float64)

    def run(*batch: Rows) -> torch.Tensor:
        return decoder.forward(decoder.layout(batch, 4), storage)[0]

    whole = run(Rows(tokens, 0, 0, range(10)))
    for size in (1, 5, 16):
        parts = []
        for i in range(0, 37, size):
            part = tokens[i : i + size]
            mate = Rows(prompt(len(part), seed=i), 0, 0, range(50, 60))
            parts.append(run(mate, Rows(part, i, 0, range(20, 30)), Rows([1, 2], 0, 0, [40]))[len(part) : -2])
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-12)


LOAD = """
import numpy as np, torch
from foredraft.architecture import Architecture, LayerKind, Rope, Weight
from foredraft.model import Decoder
from foredraft.ops import create_ops

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

architecture = Architecture("llama", 30_000, 512, 2048, 8, 4, 64, 128, 1e-5, (LayerKind(Rope(1e4)),) * 6, tie_embeddings=True)
full = lambda columns: lambda start, stop: np.full((stop - start, *columns), 0.5, np.float32)
weights = {name: Weight(shape, "F32", full(shape[1:])) for name, shape in architecture.weight_shapes().items()}
ops = create_ops(torch.device("cpu"), torch.float32, threads=1)
with open("/proc/self/clear_refs", "w") as clear:
    clear.write("5")
before = status("VmRSS")
decoder = Decoder(architecture, weights, ops)
print((status("VmHWM") - before) / decoder.weight_bytes, decoder.weight_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak memory counter")
def test_loading_peaks_at_little_more_than_the_weights() -> None:
    out = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=True).stdout
    peak, weight_bytes = map(float, out.split())
    assert weight_bytes > 150e6
    assert 0.9 < peak < 1.3


def test_layers_may_differ_in_rope_and_window() -> None:
    kinds = (LayerKind(Rope(1e4), window=3), LayerKind(Rope(1e6)))
    architecture = Architecture("toy", 10, 8, 8, 2, 1, 4, 64, 1e-5, kinds, tie_embeddings=True)
    weights = {name: vector(np.ones(shape)) for name, shape in architecture.weight_shapes().items()}
    layout = Decoder(architecture, weights, create_ops(CPU, torch.float32)).layout([Rows([1], 8, 1, [0, 1, 2])], 4)
    assert set(layout.rotary) == {Rope(1e4), Rope(1e6)} and set(layout.attention) == {3, None}
