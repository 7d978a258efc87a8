from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foredraft.llm import LLM
from foredraft.replay import Record
from foredraft.train import features
from foredraft.train.collect import Collector, Recipe, TextFile
from foredraft.train.features import StateFiles, StateRecorder, capture, keep_states
from foredraft.types import PassOutput, Rows, SamplingParams, Sequence, Verdict

BLOCK_SIZE, NUM_BLOCKS, TAPS = 4, 20, (1, 3)
TEXTS_PER_FILE = 32


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


def files_of(folder: Path, wanted: list[Record]) -> list[TextFile]:
    return [
        TextFile(folder / "recipe" / f"{i:08d}.texts", wanted[i : i + TEXTS_PER_FILE])
        for i in range(0, len(wanted), TEXTS_PER_FILE)
    ]


def captured(target: Target, wanted: list[Record], folder: Path, taps: tuple[int, ...] = TAPS) -> list[features.Text]:
    return capture(target, files_of(folder, wanted), StateFiles(folder, taps), NUM_BLOCKS, BLOCK_SIZE)


def check(texts: list[features.Text], wanted: list[Record]) -> None:
    assert [(text.tokens, text.num_prompt) for text in texts] == [(record.tokens, record.num_prompt) for record in wanted]
    for text in texts:
        expected = [[1000 * token + 10 * i + tap for tap in TAPS] for i, token in enumerate(text.tokens)]
        assert text.states[:-1].tolist() == np.array(expected, np.float16)[:-1].tolist()
        assert len(text.states) == len(text.tokens) and not text.states[-1].any()


def test_states_are_of_another_text_or_place(tmp_path: Path) -> None:
    target, wanted = Target(), records(70)
    check(captured(target, wanted, tmp_path), wanted)
    assert any(len(batch) > 1 for batch in target.passes)


def test_a_second_training_computes_states_again(tmp_path: Path) -> None:
    captured(Target(), records(2 * TEXTS_PER_FILE), tmp_path)
    target, wanted = Target(), records(2 * TEXTS_PER_FILE + 1)
    check(captured(target, wanted, tmp_path), wanted)
    assert sum(len(batch) for batch in target.passes) == 1


@pytest.mark.parametrize("damage", ["cut", "gone", "other texts"])
def test_damaged_states_are_believed(tmp_path: Path, damage: str) -> None:
    wanted = records(TEXTS_PER_FILE)
    captured(Target(), wanted, tmp_path)
    (path,) = tmp_path.rglob("*.states")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-7])
    elif damage == "gone":
        path.unlink()
    else:
        wanted = [record._replace(tokens=[*record.tokens[:-1], 7]) for record in wanted]
    check(captured(Target(), wanted, tmp_path), wanted)


def test_other_layers_get_the_states_of_these(tmp_path: Path) -> None:
    wanted = records(3)
    captured(Target(), wanted, tmp_path)
    texts = captured(Target(), wanted, tmp_path, (2,))
    assert [text.states.shape[1] for text in texts] == [1] * 3


def test_a_state_too_large_for_half_precision_becomes_infinite(tmp_path: Path) -> None:
    wanted = [Record([90, 3, 4], 1)]
    (text,) = captured(Target(), wanted, tmp_path)
    assert text.states[0].tolist() == [np.finfo(np.float16).max] * 2


def test_an_empty_file_of_texts_ends_the_training(tmp_path: Path) -> None:
    empty, full = TextFile(tmp_path / "a" / "00000000.texts", []), files_of(tmp_path, records(3))[0]
    check(capture(Target(), [empty, full], StateFiles(tmp_path, TAPS), NUM_BLOCKS, BLOCK_SIZE), records(3))


# ------------------------------------------------------------------------------------------------ while texts are written


def sequence(number: int, record: Record, reason: str | None = "stop") -> Sequence:
    seq = Sequence(number, list(record.tokens), record.num_prompt, SamplingParams(), seed=0)
    seq.finish_reason = reason
    return seq


def recorded(recorder: StateRecorder, seq: Sequence, rows: list[int]) -> None:
    """Passes of so many rows; state j of row i is 10 i + j."""
    recorder.open(seq)
    at = 0
    for num in rows:
        values = [[10 * i + j for j in range(2)] for i in range(at, at + num)]
        recorder.observe(seq, Verdict((), 0), np.array(values, np.float32))
        at += num
    recorder.close(seq)


def test_a_text_gets_the_states_of_a_part_or_of_a_run_that_was_put_off(tmp_path: Path) -> None:
    one, other = Record([5, 6, 7, 8], 2), Record([9, 6, 7, 8, 4], 2)
    recorder = StateRecorder(TAPS)
    recorded(recorder, sequence(0, one, None), [2])  # preempted
    recorded(recorder, sequence(0, one), [2, 1])
    recorded(recorder, sequence(1, other), [3, 1])
    states = recorder.take([other, one])
    assert states is not None and [len(part) for part in states] == [4, 3]
    assert states[1].tolist() == [[0, 1], [10, 11], [20, 21]]
    assert recorder.take([one]) is None, "what was taken once is there for ever"
    recorded(recorder, sequence(2, one), [2])  # its first token came from the prefix cache
    assert recorder.take([one]) is None
    texts = files_of(tmp_path, [one])[0]
    keep_states(recorder, StateFiles(tmp_path, TAPS), texts)
    assert StateFiles(tmp_path, TAPS).read(texts) is None


@pytest.mark.model
def test_states_of_writing_differ_from_those_of_a_pass_over_the_text(tmp_path: Path) -> None:
    recorder = StateRecorder((2, 15, 30))
    config = {"method": "states", "num_speculative_tokens": 1, "adaptive": False}
    llm = LLM(
        "smollm2-135m",
        speculative_config=config,
        drafters={"states": lambda config, context: recorder},
        max_num_seqs=TEXTS_PER_FILE,
        enable_prefix_caching=False,
        max_num_batched_tokens=64,
    )
    files = StateFiles(tmp_path / "written", recorder.hidden_layers)
    collector = Collector(
        llm,
        llm.checkpoint.tokenizer,
        tmp_path,
        model="m",
        recipe=Recipe(max_answer=12, max_question=48),
        on_texts=lambda texts: keep_states(recorder, files, texts),
    )
    texts = collector.files(100)
    assert [files.read(one) is not None for one in texts] == [True]
    cache = llm.kv.num_blocks, llm.kv.block_size
    while_writing = capture(llm.target, texts, files, *cache)
    afterwards = capture(llm.target, texts, StateFiles(tmp_path / "afterwards", recorder.hidden_layers), *cache)
    assert len(while_writing) == len(afterwards) > 10
    for one, other in zip(while_writing, afterwards, strict=True):
        assert one.tokens == other.tokens and one.states.tobytes() == other.states.tobytes()
