from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foredraft.replay import Record
from foredraft.train import features
from foredraft.train.features import TEXTS_PER_FILE, capture
from foredraft.types import PassOutput, Rows

BLOCK_SIZE, NUM_BLOCKS, TAPS = 4, 20, (1, 3)


class Target:
    """State j of token i at position p is 1000 i + 10 p + j; knows how many tokens fit."""

    max_model_len = 64

    def __init__(self) -> None:
        self.passes: list[list[Rows]] = []

    def forward(self, batch: list[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        used = [block for rows in batch for block in rows.block_table]
        assert len(set(used)) == len(used) and max(used) < NUM_BLOCKS
        assert all(len(rows.block_table) * BLOCK_SIZE >= len(rows.tokens) and rows.start == 0 for rows in batch)
        self.passes.append(batch)
        states = [
            np.array([[1000 * token + 10 * i + tap for tap in taps] for i, token in enumerate(rows.tokens)], np.float32)
            for rows in batch
        ]
        return PassOutput([], states)


def records(num: int) -> list[Record]:
    return [Record([i % 50, 3, i // 50, *range(i % 9)], 2) for i in range(num)]


def check(texts: list[features.Text], wanted: list[Record]) -> None:
    assert [(text.tokens, text.num_prompt) for text in texts] == [(record.tokens, record.num_prompt) for record in wanted]
    for text in texts:
        expected = [[1000 * token + 10 * i + tap for tap in TAPS] for i, token in enumerate(text.tokens)]
        assert text.states.tolist() == np.array(expected, np.float16).tolist()


def test_states_are_of_another_text_or_place(tmp_path: Path) -> None:
    target, wanted = Target(), records(70)
    check(capture(target, wanted, TAPS, tmp_path, NUM_BLOCKS, BLOCK_SIZE), wanted)
    assert any(len(batch) > 1 for batch in target.passes)


def test_a_second_training_computes_states_again(tmp_path: Path) -> None:
    capture(Target(), records(2 * TEXTS_PER_FILE), TAPS, tmp_path, NUM_BLOCKS, BLOCK_SIZE)
    target, wanted = Target(), records(2 * TEXTS_PER_FILE + 1)
    check(capture(target, wanted, TAPS, tmp_path, NUM_BLOCKS, BLOCK_SIZE), wanted)
    assert sum(len(batch) for batch in target.passes) == 1


@pytest.mark.parametrize("damage", ["cut", "gone", "other texts"])
def test_damaged_states_are_believed(tmp_path: Path, damage: str) -> None:
    wanted = records(TEXTS_PER_FILE)
    capture(Target(), wanted, TAPS, tmp_path, NUM_BLOCKS, BLOCK_SIZE)
    (path,) = tmp_path.rglob("*.states")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-7])
    elif damage == "gone":
        path.unlink()
    else:
        wanted = [record._replace(tokens=[*record.tokens[:-1], 7]) for record in wanted]
    check(capture(Target(), wanted, TAPS, tmp_path, NUM_BLOCKS, BLOCK_SIZE), wanted)


def test_other_layers_get_the_states_of_these(tmp_path: Path) -> None:
    wanted = records(3)
    capture(Target(), wanted, TAPS, tmp_path, NUM_BLOCKS, BLOCK_SIZE)
    texts = capture(Target(), wanted, (2,), tmp_path, NUM_BLOCKS, BLOCK_SIZE)
    assert [text.states.shape[1] for text in texts] == [1] * 3


def test_a_state_too_large_for_half_precision_becomes_infinite(tmp_path: Path) -> None:
    wanted = [Record([90, 3, 4], 1)]
    (text,) = capture(Target(), wanted, TAPS, tmp_path, NUM_BLOCKS, BLOCK_SIZE)
    assert text.states[0].tolist() == [np.finfo(np.float16).max] * 2
