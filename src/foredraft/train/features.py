"""A target's states over recorded texts, kept on disk.

Owns: which states, how they are come by while texts are written or afterwards, and their files.  Does not know: what is trained on
them.

A pass over a whole text gives the states that writing it gave, since a row's arithmetic does not depend on the pass it is in; so
texts that were written before somebody asked for states serve as well.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from foredraft.array_file import read_arrays, write_arrays
from foredraft.replay import Record
from foredraft.train.collect import TextFile
from foredraft.types import Draft, FloatArray, ModelFileError, PassOutput, Rows, Sequence, Verdict

Array = npt.NDArray[Any]

KIND = "states"
MAX_PASS_ROWS = 2048
Report = Callable[[str], None]


class Tapped(Protocol):
    """What computes states; ModelTarget is one."""

    max_model_len: int

    def forward(self, batch: list[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        """As ``types.Target.forward``."""
        ...


class Text(NamedTuple):
    """A record with its states, float16 [T, len(taps) * d]; that of the last token is 0, since no pass read it."""

    tokens: list[int]
    num_prompt: int
    states: Array


class StateRecorder:
    """A drafter that drafts nothing and keeps the states of each request until they are taken.

    ``hidden_layers``, as ``taps`` in ``Decoder.forward``, are to be set before the first request: only when a target is loaded is
    it known how many layers it has.
    """

    def __init__(self, hidden_layers: tuple[int, ...] = ()) -> None:
        self.hidden_layers = hidden_layers
        self._open: dict[int, list[Array]] = {}
        self._ended: dict[tuple[int, ...], Array] = {}

    def open(self, seq: Sequence) -> None:
        """Begin a request, or begin it again."""
        self._open[seq.seq_id] = []

    def propose(self, seqs: list[Sequence], num_tokens: list[int]) -> list[Draft]:
        """Nothing."""
        return [Draft()] * len(seqs)

    def observe(self, seq: Sequence, verdict: Verdict, hidden: FloatArray | None) -> None:
        """Keep the states of the rows that stand."""
        assert hidden is not None, seq.seq_id
        self._open[seq.seq_id].append(_half(hidden))

    def close(self, seq: Sequence) -> None:
        """End a request, or forget it for now."""
        states = self._open.pop(seq.seq_id)
        if seq.finish_reason is not None and states:
            self._ended[tuple(seq.tokens)] = np.concatenate(states)

    def take(self, records: Seq[Record]) -> list[Array] | None:
        """States of these texts, if all of their passes were seen; what else has ended is forgotten."""
        found = [self._ended.get(tuple(record.tokens)) for record in records]
        self._ended.clear()
        states = [one for one, record in zip(found, records, strict=True) if one is not None and len(one) == len(record.tokens) - 1]
        return states if len(states) == len(records) else None


@dataclass(frozen=True)
class StateFiles:
    """Where the states of ``taps`` are kept, one file for each file of texts."""

    folder: Path
    taps: tuple[int, ...]

    def path(self, texts: TextFile) -> Path:
        """The file of these texts' states."""
        return self.folder / texts.path.parent.name / "-".join(map(str, self.taps)) / f"{texts.path.stem}.states"

    def write(self, texts: TextFile, states: Seq[Array]) -> None:
        """Keep ``states``, of all tokens but the last of each text.

        Raises:
            CapacityError: the file cannot be written.
        """
        flat = np.concatenate([part for one in states for part in (one, np.zeros((1, one.shape[1]), "<f2"))])
        header = {"kind": KIND, "width": flat.shape[1]}
        write_arrays(self.path(texts), header, {"tokens": _tokens(texts.records), "states": flat.reshape(-1).view("<u2")})

    def read(self, texts: TextFile) -> list[Array] | None:
        """The states, mapped; None when their file is missing, broken, or of other texts."""
        try:
            file = read_arrays(self.path(texts))
        except ModelFileError:
            return None
        if not np.array_equal(file.arrays["tokens"], _tokens(texts.records)):
            return None
        states = file.arrays["states"].view("<f2").reshape(-1, file.header["width"])
        return np.split(states, np.cumsum([len(record.tokens) for record in texts.records])[:-1])


def keep_states(recorder: StateRecorder, files: StateFiles, texts: TextFile) -> None:
    """Keep what a recorder saw of texts that were just written."""
    states = recorder.take(texts.records)
    if states:
        files.write(texts, states)


def capture(
    target: Tapped,
    texts: Seq[TextFile],
    files: StateFiles,
    num_blocks: int,
    block_size: int,
    report: Report = lambda line: None,
) -> list[Text]:
    """All texts with their states; those that no file holds are computed and kept.

    All of the target's cache, ``num_blocks`` of ``block_size`` tokens, is overwritten; it must have room for the longest text.

    Raises:
        CapacityError: a file cannot be written.
    """
    out, done = list[Text](), 0
    for number, one in enumerate(texts, 1):
        if not one.records:
            continue
        states = files.read(one)
        if states is None:
            computed = _compute(target, one.records, files.taps, num_blocks, block_size)
            files.write(one, computed)
            done += sum(map(len, computed))
            report(f"states of {done:,} tokens computed, {number:,} of {len(texts):,} files")
            states = files.read(one)
            assert states is not None, files.path(one)
        out.extend(Text(record.tokens, record.num_prompt, part) for record, part in zip(one.records, states, strict=True))
    return out


def _tokens(records: Seq[Record]) -> Array:
    return np.array([token for record in records for token in record.tokens], "<u4")


def _compute(target: Tapped, records: Seq[Record], taps: tuple[int, ...], num_blocks: int, block_size: int) -> list[Array]:
    """States of all tokens but the last of each text."""
    states, batch, used, rows = list[Array](), list[Rows](), 0, 0
    for record in records:
        blocks = -(-len(record.tokens) // block_size)
        if batch and (rows + len(record.tokens) > MAX_PASS_ROWS or used + blocks > num_blocks):
            states += _forward(target, batch, taps)
            batch, used, rows = [], 0, 0
        batch.append(Rows(record.tokens[:-1], 0, 0, range(used, used + blocks)))
        used, rows = used + blocks, rows + len(record.tokens)
    return states + _forward(target, batch, taps)


def _forward(target: Tapped, batch: list[Rows], taps: tuple[int, ...]) -> list[Array]:
    hidden = target.forward(batch, taps).hidden
    assert hidden is not None
    return [_half(one) for one in hidden]


def _half(states: FloatArray) -> Array:
    """As float16, what is too large for it cut."""
    limit = float(np.finfo(np.float16).max)
    return np.clip(states, -limit, limit).astype("<f2")
