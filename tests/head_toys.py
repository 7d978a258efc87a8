"""A small network, its weights and texts with states, for tests of head training.

Owns: sizes and random values.  Does not know: any single test.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foredraft.architecture import Architecture, LayerKind, Rope, Weight
from foredraft.train.eagle3 import Eagle3Network
from foredraft.train.features import Text
from foredraft.types import FloatArray

VOCAB, HIDDEN, NUM_TAPS = 40, 32, 3
ARCHITECTURE = Architecture(
    family="llama",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    layers=(LayerKind(Rope(1e4)),) * 7,
    tie_embeddings=True,
)


def random_weights(seed: int = 0, architecture: Architecture = ARCHITECTURE) -> dict[str, Tensor]:
    """Every canonical weight."""
    generator = torch.Generator().manual_seed(seed)
    shapes = architecture.weight_shapes()
    # Vectors are norms' weights, matrices small.
    scales = {name: (0.3, 0.0) if len(shape) == 2 else (0.1, 1.0) for name, shape in shapes.items()}
    return {name: torch.randn(shape, generator=generator) * scales[name][0] + scales[name][1] for name, shape in shapes.items()}


def as_file(weights: dict[str, Tensor]) -> dict[str, Weight]:
    """The same as a loader would give them."""

    def one(values: FloatArray) -> Weight:
        return Weight(values.shape, "F32", lambda start, stop: values[start:stop])

    return {name: one(value.numpy()) for name, value in weights.items()}


def random_texts(lengths: Sequence[tuple[int, int]], seed: int = 0, period: int = 0) -> list[Text]:
    """Texts of (tokens, of them prompt), with random states.

    With ``period`` tokens count up to it again and again, states depend on them, and the target with ``random_weights`` knows what
    comes next.
    """
    rng = np.random.default_rng(seed)
    table = rng.standard_normal((VOCAB, (NUM_TAPS + 1) * HIDDEN)).astype("<f2")
    embed = random_weights()["embed"].numpy()
    texts = []
    for length, num_prompt in lengths:
        start = int(rng.integers(period or 1))
        tokens = [(start + i) % period for i in range(length)] if period else rng.integers(0, VOCAB, length).tolist()
        states = table[tokens] if period else rng.standard_normal((length, table.shape[1])).astype("<f2")
        if period:
            states[:, NUM_TAPS * HIDDEN :] = embed[[(token + 1) % period for token in tokens]]
        texts.append(Text(tokens, num_prompt, states))
    return texts


def random_network(draft_vocab: Sequence[int], seed: int = 0) -> Eagle3Network:
    """A head with random weights and scales of states."""
    torch.manual_seed(seed)
    scale = torch.rand(NUM_TAPS * HIDDEN) + 0.5
    network = Eagle3Network(ARCHITECTURE, NUM_TAPS, torch.tensor(draft_vocab), torch.randn(VOCAB, HIDDEN), scale)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3 + (parameter.ndim == 1))
    return network
