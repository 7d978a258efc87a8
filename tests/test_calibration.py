from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft import calibration
from foredraft.calibration import Identity, pass_times
from foredraft.testing.toy import TableTarget
from foredraft.types import PassOutput, Rows


class TimedTarget(TableTarget):
    """Passes take 10 ms and 1 ms for each row, times ``slowness``, on a clock of its own."""

    def __init__(self, slowness: float = 1.0) -> None:
        super().__init__()
        self.now, self.slowness = 0.0, slowness

    def forward(self, batch: list[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        self.now += self.slowness * (0.01 + 0.001 * sum(len(rows.tokens) for rows in batch))
        return super().forward(batch, taps)


def measure(target: TimedTarget, identity: Identity, max_rows: int = 64) -> tuple[float, int]:
    """(time of a pass of five rows, number of passes that it took to know)."""
    before = target.num_passes
    kv = target.kv_cache()
    times = pass_times(target, kv, identity, max_rows=max_rows, clock=lambda: target.now)
    kv.check_integrity()
    assert kv.num_available == kv.num_blocks, "blocks were kept"
    assert times.rows[-1] <= max_rows
    return times.at(5), target.num_passes - before


def test_a_measurement_is_made_again_or_believed_on_another_machine(tmp_path: Path) -> None:
    identity = Identity(tmp_path / "passes", ("model", "machine"))
    seconds, num_passes = measure(TimedTarget(), identity)
    assert seconds == pytest.approx(0.015, rel=0.1) and num_passes > 30
    again, few = measure(TimedTarget(), identity)
    assert again == pytest.approx(seconds) and few == calibration.NUM_CHECKS
    somewhat_slower, few = measure(TimedTarget(1.5), identity)
    assert somewhat_slower == pytest.approx(1.5 * seconds) and few == calibration.NUM_CHECKS
    other, many = measure(TimedTarget(4.0), identity)
    assert other == pytest.approx(0.06, rel=0.1) and many > calibration.NUM_CHECKS
    assert measure(TimedTarget(), Identity(tmp_path / "passes", ("other model", "machine")))[1] > 30


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [1], "base": ["x"]}', '{"rows": [2, 1], "base": [1.0, 1.0]}', "\x00"])
def test_a_broken_file_stops_the_start(tmp_path: Path, text: str) -> None:
    identity = Identity(tmp_path, ("model",))
    assert identity.path is not None
    identity.path.write_text(text, encoding="utf-8")
    assert measure(TimedTarget(), identity)[1] > 30
    assert json.loads(identity.path.read_text(encoding="utf-8"))["rows"][0] == 1


def test_a_folder_that_cannot_be_written_to_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert measure(TimedTarget(), Identity(tmp_path / "file", ("model",)))[0] > 0
    assert measure(TimedTarget(), Identity(None, ("model",)))[0] > 0


def test_a_measurement_of_more_rows_than_a_pass_may_have_is_believed(tmp_path: Path) -> None:
    identity = Identity(tmp_path, ("model",))
    measure(TimedTarget(), identity)
    assert measure(TimedTarget(), identity, max_rows=4)[1] > calibration.NUM_CHECKS


def test_a_quick_measurement_leaves_a_file(tmp_path: Path) -> None:
    measure(TimedTarget(1e-4), Identity(tmp_path, ("model",)))
    assert not list(tmp_path.iterdir())


def test_a_measurement_in_the_blocks_that_others_leave_is_kept_as_one_of_the_whole_cache(tmp_path: Path) -> None:
    """Its times of long contexts are guesses, and the next start would believe them."""
    identity = Identity(tmp_path, ("model",))
    for num_held, num_files in ((62, 0), (32, 0), (0, 1)):
        target = TimedTarget()
        target.max_model_len = 200
        kv = target.kv_cache()
        kv.open(5, [])
        assert kv.reserve(5, num_held * kv.block_size)
        times = pass_times(target, kv, identity, max_rows=64, clock=lambda target=target: target.now)
        assert times.at(1) == pytest.approx(0.011, rel=0.1) and len(list(tmp_path.iterdir())) == num_files
