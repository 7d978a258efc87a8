from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from foredraft.array_file import DTYPES, read_arrays, write_arrays
from foredraft.types import CapacityError, ModelFileError

ARRAYS = {f"a{index}": np.arange(index + 2).astype(dtype) for index, dtype in enumerate(DTYPES)} | {"none": np.zeros(0, "<u2")}


def written(folder: Path) -> Path:
    path = folder / "made" / "file"
    write_arrays(path, {"kind": "test", "number": 7}, ARRAYS)
    return path


def test_what_is_read_differs_from_what_was_written(tmp_path: Path) -> None:
    header, arrays = read_arrays(written(tmp_path))
    assert header == {"kind": "test", "number": 7}
    assert arrays.keys() == ARRAYS.keys()
    for name, values in ARRAYS.items():
        assert arrays[name].dtype == values.dtype and np.array_equal(arrays[name], values)
        with pytest.raises(ValueError):
            arrays[name][:] = 0


@pytest.mark.parametrize("length", range(8))
def test_numbers_lie_where_their_kind_may_not(tmp_path: Path, length: int) -> None:
    write_arrays(tmp_path / "file", {"note": "x" * length}, ARRAYS)
    header, arrays = read_arrays(tmp_path / "file")
    assert header == {"note": "x" * length} and all(values.flags.aligned for values in arrays.values())


def test_a_broken_file_is_taken_for_a_whole_one(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(ModelFileError, match=str(path)):
            read_arrays(path)
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 64]) + data[place + 1 :])
        with pytest.raises(ModelFileError, match=str(path)):
            read_arrays(path)
    path.write_bytes(data + b"x")
    with pytest.raises(ModelFileError, match="checksum"):
        read_arrays(path)


@pytest.mark.parametrize("path", ["missing", "."])
def test_a_path_without_a_file_fails_with_a_traceback(tmp_path: Path, path: str) -> None:
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_arrays(tmp_path / path)


def test_a_full_disk_destroys_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError, match="No space left on device"):
        write_arrays(path, {"kind": "other"}, ARRAYS)
    assert path.read_bytes() == before and [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_a_folder_that_cannot_be_made_fails_with_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CapacityError, match="cannot be written"):
        write_arrays(tmp_path / "file" / "below", {}, ARRAYS)
