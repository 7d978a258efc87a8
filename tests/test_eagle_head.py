"""A draft head, on torch and on native kernels, against a reference written from the recipe; the native chain against passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foredraft.drafters.eagle_file import fitted, open_head
from foredraft.drafters.eagle_loader import load_weights
from foredraft.drafters.eagle_native import quantise_q4_1
from foredraft.drafters.eagle_pass import HeadPass, HeadRunner, chain
from foredraft.drafters.ngram_table import TargetIdentity
from foredraft.target import ModelTarget
from head_files import HeadSpec, Reference
from hf_weights import VOCAB_SIZE
from native_helpers import dequantise, quantise, tiny

SPECS = {
    "plain": HeadSpec(),
    "flags": HeadSpec(flags={"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}),
    "fc_norm": HeadSpec(flags={"fc_norm": True}, layer_ids=(1, 2), fc_bias=True),
    "layers": HeadSpec(num_layers=2, bias=True, own_embed=True, hidden=32, seed=4),
    "qk_norm": HeadSpec(qk_norm=True),
    "original": HeadSpec(style="original", flags={"norm_before_residual": True}),
    "eagle": HeadSpec(style="eagle", fc_bias=True, draft_vocab=VOCAB_SIZE),
    "eagle_layers": HeadSpec(style="eagle", num_layers=2, draft_vocab=VOCAB_SIZE),
}
TOKENS = [int(token) for token in np.random.Generator(np.random.Philox(5)).integers(0, VOCAB_SIZE, 23)]
NUM_BLOCKS = 40


class Setup:
    """A tiny Llama, a head on it, the reference, and the states of ``TOKENS``."""

    def __init__(self, spec: HeadSpec, folder: Path, ops: str, block_size: int = 4, dtype: str = "float32") -> None:
        architecture, weights = tiny("llama", "F32")
        self.target = ModelTarget(
            architecture,
            weights,
            device="cpu",
            dtype=dtype,
            ops=ops,
            threads=2,
            num_blocks=8,
            block_size=block_size,
            max_model_len=64,
        )
        head = open_head(spec.write(folder))
        self.head = fitted(head, TargetIdentity("tiny", VOCAB_SIZE, ""), architecture.hidden_size, architecture.num_layers)
        self.weights = load_weights(self.head, self.target, weights, dtype)
        self.taps = self.head.config.taps(architecture.num_layers)
        array = {name: torch.from_numpy(one.read(0, one.shape[0]).copy()) for name, one in weights.items()}
        lm_head = array["embed" if architecture.tie_embeddings else "lm_head"]
        self.reference = Reference(spec, array["embed"], lm_head, array["norm"], architecture.rms_norm_eps)
        rng = np.random.Generator(np.random.Philox(9))
        self.states = (0.7 * rng.standard_normal((len(TOKENS), 64 * len(self.taps)))).astype(np.float32)

    def runner(self, block_size: int = 4) -> HeadRunner:
        return self.weights.runner(NUM_BLOCKS, block_size)


def rows_of(parts: list[tuple[list[int], int, int, Any, list[int]]], hidden: int, first_keys: tuple[int, ...] = ()) -> HeadPass:
    """Each part: all tokens, first and last slot, the states of all tokens, block table."""
    tokens, positions, table_of, tables, states, firsts, ends = [], [], [], [], [], [], []
    for i, (text, start, stop, known, table) in enumerate(parts):
        tokens += text[start:stop]
        positions += range(start, stop)
        table_of += [len(tables)] * (stop - start)
        firsts += [first_keys[i] if first_keys else 1] * (stop - start)
        tables += table
        states.append(known[start - 1 : stop - 1])
        ends.append(len(tokens) - 1)
    ints = [np.array(one, np.int32) for one in (tokens, positions, tables, table_of, firsts)]
    features = np.full((len(tokens), hidden), np.nan, np.float32)
    return HeadPass(*ints, np.concatenate(states), np.arange(len(tokens), dtype=np.int32), features, np.array(ends, np.int32))


@pytest.mark.parametrize("ops", ["torch", "native"])
@pytest.mark.parametrize("name", SPECS)
def test_logits_are_those_of_the_recipe(name: str, ops: str, tmp_path: Path) -> None:
    setup = Setup(SPECS[name], tmp_path, ops)
    runner, table = setup.runner(), [7, 3, 9, 0, 11, 2]
    features = setup.reference.features(torch.from_numpy(setup.states))
    logits, outputs = setup.reference(TOKENS, features)
    for start, stop in ((1, 9), (9, 10), (10, 17)):
        rows = rows_of([(TOKENS, start, stop, setup.states, table)], runner.hidden_size)
        found = runner.run(rows)
        np.testing.assert_allclose(found.logits[0], logits[stop - 2], rtol=0, atol=2e-4)
        np.testing.assert_allclose(found.outputs[0], outputs[stop - 2], rtol=0, atol=2e-4)
        np.testing.assert_allclose(rows.features, features[start - 1 : stop - 1], rtol=0, atol=2e-4)
    # Two further tokens on the head's own outputs, which stand for features.
    rows = rows_of([(TOKENS, 16, 17, setup.states, table)], runner.hidden_size)
    tokens, chances = runner.draft(rows, np.array([3], np.int32))
    text, known = TOKENS[:17], features[:16]
    for token, chance in zip(tokens[0].tolist(), chances[0].tolist(), strict=True):
        logits, outputs = setup.reference(text, known)
        assert token == setup.head.target_ids[int(logits[-1].argmax())]
        assert chance == pytest.approx(float(torch.softmax(logits[-1], dim=-1).max()), rel=1e-3)
        text, known = [*text, token], torch.cat((known, outputs[-1:]))


@pytest.mark.parametrize("ops", ["torch", "native"])
def test_a_batch_gives_each_sequence_what_it_gets_alone(ops: str, tmp_path: Path) -> None:
    setup = Setup(SPECS["layers"], tmp_path, ops)
    other, states = TOKENS[::-1], setup.states[::-1].copy()
    parts = [(TOKENS, 1, 12, setup.states, [5, 6, 7]), (other, 1, 3, states, [1]), (TOKENS, 4, 9, setup.states, [20, 21, 22])]
    firsts = (1, 1, 4)
    wanted = np.array([4, 1, 2], np.int32)
    together = setup.runner().draft(rows_of(parts, 32, firsts), wanted)
    for i, (part, first) in enumerate(zip(parts, firsts, strict=True)):
        # The last block is full or not; drafts may need one more.
        text, start, stop, known, table = part
        alone = setup.runner().draft(rows_of([(text, start, stop, known, [*table, 30])], 32, (first,)), wanted[i : i + 1])
        num = int(wanted[i])
        assert together[0][i, :num].tolist() == alone[0][0].tolist() and set(together[0][i, num:].tolist()) <= {-1}
        if ops == "native":
            assert together[1][i, :num].tolist() == alone[1][0].tolist()


def test_keys_before_the_first_are_never_read(tmp_path: Path) -> None:
    for ops in ("torch", "native"):
        for block_size in (4, 16):
            setup = Setup(SPECS["plain"], tmp_path, ops, block_size)
            expected = setup.reference(TOKENS, setup.reference.features(torch.from_numpy(setup.states)), first=6)[0]
            runner, table = setup.runner(block_size), list(range(6))
            wrong = rows_of([(TOKENS, 1, 12, -3 * setup.states, table)], 64)
            runner.run(wrong)
            found = runner.run(rows_of([(TOKENS, 6, 12, setup.states, table)], 64, (6,)))
            np.testing.assert_allclose(found.logits[0], expected[5], rtol=0, atol=2e-4)


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_the_native_chain_is_pass_after_pass(dtype: str, tmp_path: Path) -> None:
    spec = replace(SPECS["flags"], hidden=64)
    setup = Setup(spec, tmp_path, "native", dtype=dtype)
    parts = [(TOKENS, 1, 12, setup.states, [5, 6, 7, 8]), (TOKENS, 1, 4, setup.states, [1, 2])]
    wanted = np.array([3, 5], np.int32)
    runner = setup.runner()
    tokens, chances = runner.draft(rows_of(parts, 64), wanted)
    expected, expected_chances = chain(setup.runner(), rows_of(parts, 64), wanted, setup.head.target_ids)
    assert tokens.tolist() == expected.tolist()
    live = expected >= 0
    np.testing.assert_allclose(chances[live], expected_chances[live], rtol=1e-5)


@pytest.mark.parametrize("ops", ["torch", "native"])
def test_logits_that_are_not_finite_end_a_draft(ops: str, tmp_path: Path) -> None:
    setup = Setup(SPECS["plain"], tmp_path, ops)
    states = setup.states.copy()
    states[3] = np.nan
    parts = [(TOKENS, 1, 6, states, [0, 1, 2]), (TOKENS, 1, 3, states, [3, 4])]
    tokens, _ = setup.runner().draft(rows_of(parts, 64), np.array([3, 3], np.int32))
    assert tokens[0].tolist() == [-1, -1, -1] and (tokens[1] >= 0).all()


def test_four_bits_are_those_of_the_file_format() -> None:
    rng = np.random.Generator(np.random.Philox(2))
    values = rng.standard_normal((5, 96)).astype(np.float32)
    values[0, :32] = 0.25
    ours = dequantise(quantise_q4_1(values), "Q4_1")
    theirs = dequantise(quantise(values, "Q4_1"), "Q4_1")
    assert np.abs(ours - values).max() <= 1.02 * np.abs(theirs - values).max()
    assert np.abs(ours[0, :32] - 0.25).max() < 1e-3
