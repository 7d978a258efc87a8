"""Named arrays in one file: checksummed, memory-mapped when read, and written whole or not at all.

Owns: the container's layout and every check of it.  Does not know: what the arrays mean.

Layout: ``MAGIC``, the sha256 of all that follows, the length of the header as 4 little-endian bytes, the header (JSON: what the
writer says, and name, dtype and length of each array), the arrays one after the other, little-endian.  The header ends in as many
spaces as it takes, and the widest numbers come first, so that each lies where its kind of number may.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foredraft.types import CapacityError, ModelFileError

Array = npt.NDArray[Any]

MAGIC = b"foredraft arrays 1\n"
DTYPES = ("<u1", "<u2", "<u4", "<i8", "<f4")
ALIGNMENT = 8
_START = len(MAGIC) + 32 + 4


class ArrayFile(NamedTuple):
    """What was read: the writer's own header, and the one-dimensional arrays, read-only."""

    header: Mapping[str, Any]
    arrays: Mapping[str, Array]


def write_arrays(path: Path, header: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Write ``header`` (plain data) and one-dimensional ``arrays`` to ``path``; what was there stays until all of it is written.

    Raises:
        CapacityError: the folder cannot be made or written, or the disk is full.
    """
    table, body = [], []
    for name, values in sorted(arrays.items(), key=lambda item: -item[1].itemsize):
        little = values.astype(values.dtype.newbyteorder("<"), copy=False)
        dtype = np.dtype(little.dtype).str.replace("|", "<")
        assert dtype in DTYPES and values.ndim == 1, (name, dtype, values.shape)
        table.append([name, dtype, len(values)])
        body.append(little.tobytes())
    text = json.dumps({**header, "arrays": table}, sort_keys=True).encode()
    text += b" " * (-(_START + len(text)) % ALIGNMENT)
    rest = b"".join([len(text).to_bytes(4, "little"), text, *body])
    write_whole(path, b"".join([MAGIC, hashlib.sha256(rest).digest(), rest]))


def write_whole(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write ``data`` to ``path``; what was there stays until all of it is written.  The folder is made.

    Raises:
        CapacityError: the folder cannot be made or written, or the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, data, mode)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CapacityError(
            f"{path} cannot be written ({reason}): it takes {len(data)} bytes; free some space or choose another place."
        ) from error


def write_text(path: Path, text: str) -> None:
    """As ``write_whole``, but who may read it is as it was; what is no plain file, as a device or a pipe, is written to as it is.

    Raises:
        CapacityError: it cannot be written.
    """
    try:
        if is_special(path):
            path.write_text(text, encoding="utf-8")
            return
        path = path.resolve()
        mode = path.stat().st_mode if path.exists() else _mode_of_new_files()
    except OSError as error:
        raise CapacityError(f"{path} cannot be written ({error.strerror or error}); choose another place.") from error
    write_whole(path, text.encode(), mode & 0o777)


def is_special(path: Path) -> bool:
    """Whether there is something that cannot be replaced by a file, as a device or a pipe."""
    return path.exists() and not path.is_file()


def _mode_of_new_files() -> int:
    mask = os.umask(0)  # there is no other way to ask
    os.umask(mask)
    return 0o666 & ~mask


def check_writable(path: Path) -> None:
    """Find out before the work is done that ``path`` could not be written; its folder is made.

    Raises:
        CapacityError: it could not.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        raise CapacityError(f"{path} cannot be written ({error.strerror or error}); choose another place.") from error


def _replace(path: Path, data: bytes, mode: int) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        # mkstemp makes files for their owner alone.
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def read_arrays(path: Path) -> ArrayFile:
    """Map ``path`` and check all of it.

    Raises:
        ModelFileError: there is no such file, or it is not one of this kind, truncated or corrupt.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped: ValueError
        reason = error.strerror if isinstance(error, OSError) else "it is empty"
        raise ModelFileError(f"{path} cannot be read ({reason}); check the path or make the file again.") from error
    if data[: len(MAGIC)] != MAGIC:
        raise ModelFileError(f"{path} is not a file of foredraft's arrays; check the path.")
    view = memoryview(data)
    if len(data) < _START or hashlib.sha256(view[_START - 4 :]).digest() != data[len(MAGIC) : _START - 4]:
        raise ModelFileError(f"{path} is truncated or corrupt, since its checksum is wrong; make the file again.")
    # The checksum holds, so what follows is what was written.
    stop = _START + int.from_bytes(data[_START - 4 : _START], "little")
    header = json.loads(data[_START:stop])
    arrays: dict[str, Array] = {}
    for name, dtype, count in header.pop("arrays"):
        arrays[name] = np.frombuffer(data, dtype, count, stop)
        stop += arrays[name].nbytes
    return ArrayFile(header, arrays)
