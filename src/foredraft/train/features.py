"""A target's states over recorded texts, kept on disk.

Owns: which states, their files, and reading them text by text.  Does not know: what is trained on them.

A pass over a whole text gives the states that writing it gave, since a row's arithmetic does not depend on the pass it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from foredraft.array_file import read_arrays, write_arrays
from foredraft.replay import Record
from foredraft.types import ModelFileError, PassOutput, Rows

Array = npt.NDArray[Any]

KIND = "states"
TEXTS_PER_FILE = 32
MAX_PASS_ROWS = 2048
Report = Callable[[str], None]


class Tapped(Protocol):
    """What computes states; ModelTarget is one."""

    max_model_len: int

    def forward(self, batch: list[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        """As ``types.Target.forward``."""
        ...


class Text(NamedTuple):
    """A record with its states, float16 [T, len(taps) * d]."""

    tokens: list[int]
    num_prompt: int
    states: Array


def capture(
    target: Tapped,
    records: Sequence[Record],
    taps: tuple[int, ...],
    folder: Path,
    num_blocks: int,
    block_size: int,
    report: Report = lambda line: None,
) -> list[Text]:
    """The records with their states; files in ``folder`` that hold them already are read, others are written.

    ``taps`` as in ``Decoder.forward``.  All of the target's cache, ``num_blocks`` of ``block_size`` tokens, is overwritten; it must
    have room for the longest record.

    Raises:
        CapacityError: a file cannot be written.
    """
    texts, done = list[Text](), 0
    for first in range(0, len(records), TEXTS_PER_FILE):
        part = records[first : first + TEXTS_PER_FILE]
        path = folder / "-".join(map(str, taps)) / f"{first:08d}.states"
        states = _read(path, part)
        if states is None:
            states = _compute(target, part, taps, num_blocks, block_size)
            flat = np.concatenate(states)
            tokens = np.array([token for record in part for token in record.tokens], "<u4")
            header = {"kind": KIND, "width": flat.shape[1]}
            write_arrays(path, header, {"tokens": tokens, "states": flat.reshape(-1).view("<u2")})
            done += len(flat)
            report(f"states of {done:,} tokens computed, {first + len(part):,} of {len(records):,} texts")
            states = _read(path, part)
            assert states is not None, path
        texts.extend(Text(record.tokens, record.num_prompt, one) for record, one in zip(part, states, strict=True))
    return texts


def _read(path: Path, records: Sequence[Record]) -> list[Array] | None:
    """The states of a file, mapped; None when it is missing, broken, or of other texts."""
    try:
        file = read_arrays(path)
    except ModelFileError:
        return None
    tokens = np.array([token for record in records for token in record.tokens], "<u4")
    if not np.array_equal(file.arrays["tokens"], tokens):
        return None
    states = file.arrays["states"].view("<f2").reshape(-1, file.header["width"])
    return np.split(states, np.cumsum([len(record.tokens) for record in records])[:-1])


def _compute(target: Tapped, records: Sequence[Record], taps: tuple[int, ...], num_blocks: int, block_size: int) -> list[Array]:
    states, batch, used, rows = list[Array](), list[Rows](), 0, 0
    for record in records:
        blocks = -(-len(record.tokens) // block_size)
        if batch and (rows + len(record.tokens) > MAX_PASS_ROWS or used + blocks > num_blocks):
            states += _forward(target, batch, taps)
            batch, used, rows = [], 0, 0
        batch.append(Rows(record.tokens, 0, 0, range(used, used + blocks)))
        used, rows = used + blocks, rows + len(record.tokens)
    return states + _forward(target, batch, taps)


def _forward(target: Tapped, batch: list[Rows], taps: tuple[int, ...]) -> list[Array]:
    hidden = target.forward(batch, taps).hidden
    assert hidden is not None
    limit = float(np.finfo(np.float16).max)
    return [np.clip(one, -limit, limit).astype("<f2") for one in hidden]
