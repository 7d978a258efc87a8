from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft.dims import dims_from_params
from foredraft.hardware import BYTES_PER_VALUE, GIB, HARDWARE, MIDDLE, Roofline, efficiencies, find_hardware, load_hardware
from foredraft.types import ConfigError

H100 = {"bandwidth_gb_per_s": 3350, "tflops": {"bfloat16": 989.5}, "memory_gib": 80}


def write(folder: Path, values: object) -> str:
    path = folder / "mine.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return str(path)


def pass_seconds(name: str, params: float, dtype: str, num_gpus: int) -> tuple[float, float, float]:
    """(middle, least, most) of a pass of one row after five tokens."""
    dims = dims_from_params(params, "target")
    times = [Roofline(HARDWARE[name], dims, dtype, how, num_gpus).seconds(1, 1, 5) for how in efficiencies()]
    return times[0], min(times), max(times)


# gpt-fast's README: tokens per second of one sequence with a short prompt, on A100-80GB limited to 330 W.
@pytest.mark.parametrize(
    ("params", "num_gpus", "tokens_per_s"),
    [
        (6.74e9, 1, 104.9),
        (6.74e9, 2, 168.84),
        (6.74e9, 4, 254.02),
        (6.74e9, 8, 328.43),
        (69e9, 2, 21.32),
        (69e9, 4, 38.01),
        (69e9, 8, 62.50),
    ],
)
def test_published_speeds_lie_outside_what_the_roofline_gives(params: float, num_gpus: int, tokens_per_s: float) -> None:
    middle, least, most = pass_seconds("a100", params, "bfloat16", num_gpus)
    assert least < 1 / tokens_per_s < most
    assert 0.7 < middle * tokens_per_s < 1.3


def test_further_rows_cost_time_while_memory_is_the_limit_or_none_beyond() -> None:
    line = Roofline(HARDWARE["h100"], dims_from_params(8e9, "target"), "bfloat16", MIDDLE)
    assert line.seconds(5, 1, 0) == line.seconds(1, 1, 0)
    # 989.5 TFLOP/s x 0.6 over 3350 GB/s x 0.75: 236 rows of 2 bytes a value keep both busy.
    assert line.seconds(236, 236, 0) == pytest.approx(line.seconds(1, 1, 0), rel=0.01)
    assert line.seconds(944, 944, 0) == pytest.approx(4 * line.seconds(1, 1, 0), rel=0.1)


def test_rows_of_one_sequence_read_its_cache_more_than_once() -> None:
    line = Roofline(HARDWARE["h100"], dims_from_params(8e9, "target"), "bfloat16", MIDDLE)
    assert line.seconds(5, 1, 8000) == line.seconds(1, 1, 8000) > line.seconds(1, 1, 0)
    assert line.seconds(4, 4, 8000) > line.seconds(4, 1, 8000)


def test_a_data_sheet_has_an_impossible_entry() -> None:
    for name, hardware in HARDWARE.items():
        assert name == hardware.name and hardware.source
        assert set(hardware.flops) <= set(BYTES_PER_VALUE)
        # Between 50 and 700 operations per byte: nothing sold lies outside, and sparse or mistyped figures do.
        assert 50 < hardware.flops["bfloat16"] / hardware.bandwidth < 500
        assert hardware.memory_bytes > 20 * GIB


def test_a_hardware_file_reads_as_other_than_the_table(tmp_path: Path) -> None:
    loaded = find_hardware(write(tmp_path, H100))
    known = HARDWARE["h100"]
    assert (loaded.bandwidth, loaded.flops["bfloat16"], loaded.memory_bytes) == pytest.approx(
        (known.bandwidth, known.flops["bfloat16"], known.memory_bytes)
    )
    assert loaded.name == "mine"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "must hold a JSON object"),
        ({**H100, "bandwidth_gb_per_s": -1}, "bandwidth must be a finite number above 0, not -1"),
        ({**H100, "memory_gib": 0}, "memory_bytes must be"),
        ({**H100, "memory_gib": "80"}, "memory_bytes must be a finite number above 0, not '80'"),
        ({**H100, "bandwidth_gb_per_s": True}, "bandwidth must be"),
        ({**H100, "tflops": {"bfloat16": float("inf")}}, "flops of bfloat16 must be"),
        ({**H100, "bandwidth_gb_per_s": 10**400}, "bandwidth must be a finite number above 0, not inf"),
        ({**H100, "tflops": {}}, "at least one of"),
        ({**H100, "tflops": 989}, "tflops must be an object"),
        ({**H100, "tflops": {"bf16": 989}}, "bf16"),
        ({name: value for name, value in H100.items() if name != "memory_gib"}, "has no memory_gib"),
        ({**H100, "bandwith": 3}, "bandwith"),
    ],
)
def test_an_impossible_hardware_file_is_taken(tmp_path: Path, values: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_hardware(write(tmp_path, values))


@pytest.mark.parametrize("path", ["~nobody-at-all/h.json", "/root\0/h", "/no/such/hardware", "x" * 300 + ".json"])
def test_a_path_that_cannot_be_opened_ends_in_a_traceback(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        find_hardware(path)


def test_a_mistyped_name_is_not_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        find_hardware("h10")
    with pytest.raises(ConfigError, match="cannot be read"):
        find_hardware("nowhere.json")
