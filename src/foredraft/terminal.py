"""What a command prints: answers as they grow, drafts made visible, statistics, tables and progress.

Owns: how text, drafts and numbers look in a terminal, and Ctrl-C between two steps.  Does not know: which command it prints for.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from foredraft.loader import Detokenizer, Tokenizer
from foredraft.types import SpeculationStats

if TYPE_CHECKING:
    from rich.progress import Progress as ProgressDisplay

    from foredraft.llm import LLM
    from foredraft.outputs import CompletionOutput, RequestMetrics, RequestOutput

COLOURS: Mapping[str, str] = {"accepted": "\x1b[32m", "recovered": "\x1b[33m", "bonus": "\x1b[36m"}
RESET = "\x1b[0m"
Run = tuple[str, str]
"""(origin, text): a stretch of text whose tokens came into the answer in the same way."""


# ------------------------------------------------------------------------------------------------ text and drafts


def has_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal whose user has not asked for plain text (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def printable(text: str) -> str:
    """Text that cannot steer a terminal: control characters but newline and tab read as U+FFFD."""
    return "".join("\ufffd" if unicodedata.category(char) == "Cc" and char not in "\n\t" else char for char in text)


def error_line(message: str) -> None:
    """Print one line on stderr that begins with the program's name."""
    print(f"foredraft: {' '.join(message.split())}", file=sys.stderr, flush=True)


def note(message: str) -> None:
    """Print one line on stderr."""
    print(message, file=sys.stderr, flush=True)


class OriginSplitter:
    """Cuts streamed text into runs by the origin of the token that completed each character.

    Text may come later than its tokens (a possible stop string, an incomplete character) and may be cut, so characters are
    counted token by token and matched with the text when it comes.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
        self._waiting: deque[str] = deque()
        self._last = "plain"

    def split(self, chunk: CompletionOutput) -> list[Run]:
        """The runs of ``chunk.text``, a part of an answer as ``LLM.stream`` yields it."""
        for token, origin in zip(chunk.token_ids, chunk.origins, strict=True):
            self._detokenizer.push(token, may_stop=False)
            self._waiting.extend([origin] * len(self._detokenizer.take_delta(final=False)))
            self._last = origin
        runs: list[Run] = []
        for char in chunk.text:
            # A character left incomplete at the end of an answer was completed by no token; it goes with the last one.
            origin = self._waiting.popleft() if self._waiting else self._last
            if runs and runs[-1][0] == origin:
                runs[-1] = (origin, runs[-1][1] + char)
            else:
                runs.append((origin, char))
        return runs


def mark(runs: Sequence[Run], colour: bool) -> str:
    """Runs as text, in colours, or with accepted draft tokens in brackets."""
    if colour:
        return "".join(f"{COLOURS[origin]}{text}{RESET}" if origin in COLOURS else text for origin, text in runs)
    return "".join(f"[{text}]" if origin == "accepted" else text for origin, text in runs)


def legend(colour: bool) -> str:
    """One line that explains ``mark``."""
    if not colour:
        return "drafts: [accepted draft tokens], the rest is the model's own"
    names = {"accepted": "accepted draft tokens", "recovered": "recovered at a mismatch", "bonus": "bonus after a full acceptance"}
    return "drafts: " + ", ".join(f"{COLOURS[origin]}{text}{RESET}" for origin, text in names.items()) + ", plain"


def explain_drafts(llm: LLM) -> None:
    """Print the legend on stderr, and say so when there will be nothing to mark."""
    note(legend(has_colour(sys.stdout)))
    if llm.speculative_config.method == "none":
        note("speculation is off, so there is nothing to mark; see --speculative-config")


# ------------------------------------------------------------------------------------------------ answers


@dataclass
class Answer:
    """One answer as far as it has come; ``num_first`` of its tokens came with the first chunk."""

    text: str = ""
    shown: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_first: int = 0
    finish_reason: str | None = None


class Transcript:
    """The answers to one request, collected from what ``LLM.stream`` yields.

    A single answer is written as it grows; several are written one after the other by ``close``, so that they do not mix.
    ``splitters``: one per answer to mark drafts, or none.
    """

    def __init__(self, out: TextIO, num_answers: int = 1, splitters: Sequence[OriginSplitter] = ()) -> None:
        self.answers = [Answer() for _ in range(num_answers)]
        self.seed: int | None = None
        self.metrics: RequestMetrics | None = None
        self._out = out
        self._splitters = splitters
        self._colour = has_colour(out)
        self._clean = out.isatty()

    def add(self, output: RequestOutput) -> None:
        """Take what is new."""
        self.seed, self.metrics = output.seed, output.metrics
        for chunk in output.outputs:
            answer = self.answers[chunk.index]
            if not answer.token_ids:
                answer.num_first = len(chunk.token_ids)
            answer.text += chunk.text
            answer.token_ids += chunk.token_ids
            answer.finish_reason = chunk.finish_reason
            shown = self._show(chunk)
            answer.shown += shown
            if len(self.answers) == 1:
                self._write(shown)

    def _show(self, chunk: CompletionOutput) -> str:
        clean: Callable[[str], str] = printable if self._clean else str
        if not self._splitters:
            return clean(chunk.text)
        runs = self._splitters[chunk.index].split(chunk)
        return mark([(origin, clean(text)) for origin, text in runs], self._colour)

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def close(self) -> None:
        """Write what is still to be written, and end the line; nothing if nothing came."""
        if self.metrics is None:
            return
        if len(self.answers) == 1:
            self._write("" if self.answers[0].text.endswith("\n") else "\n")
            return
        for index, answer in enumerate(self.answers):
            self._write(f"--- answer {index + 1} of {len(self.answers)}\n{answer.shown}\n")

    @property
    def num_tokens(self) -> int:
        """Tokens received, over all answers."""
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Speed of decoding: what came after the first chunk, over the time since then; all of it if nothing did.

        The time until the first chunk is that of reading the prompt, and would hide how fast an answer grows.
        """
        if self.metrics is None or not self.num_tokens:
            return 0.0
        first = self.metrics.time_to_first_token or 0.0
        num_later = self.num_tokens - sum(answer.num_first for answer in self.answers)
        num_tokens, seconds = (num_later, self.metrics.latency - first) if num_later else (self.num_tokens, self.metrics.latency)
        return num_tokens / seconds if seconds > 0 else 0.0

    @property
    def speculation(self) -> SpeculationStats:
        """What speculation did so far."""
        return self.metrics.speculation if self.metrics is not None else SpeculationStats()

    def statistics(self) -> str:
        """One line: tokens, speed, acceptance, and the seed that gives the same answer again."""
        return f"{statistics_line(self.num_tokens, self.tokens_per_second, self.speculation)}, seed {self.seed}"


def statistics_line(num_tokens: int, tokens_per_second: float, stats: SpeculationStats) -> str:
    """Tokens, speed and acceptance, for one request or many."""
    drafted = "nothing drafted"
    if stats.drafted_tokens:
        drafted = f"acceptance rate {stats.acceptance_rate:.2f} ({stats.accepted_tokens} of {stats.drafted_tokens} drafted)"
    return f"{num_tokens} tokens, {tokens_per_second:.1f} tokens/s, acceptance length {stats.acceptance_length:.2f}, {drafted}"


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows, the first of them the header, as lines of aligned columns; a column of numbers is aligned at its right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(cell.removeprefix("-")[:1].isdigit() or cell == "-" for cell in column[1:]) for column in columns]
    lines = (
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


# ------------------------------------------------------------------------------------------------ loading and interrupting


class DownloadBar:
    """Progress of a model's download on stderr: a bar in a terminal, elsewhere one line.  Nothing when nothing is fetched."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._display: ProgressDisplay | None = None
        self._announced = False

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Show that ``done_bytes`` of ``total_bytes`` are here."""
        if not self._announced:
            self._announced = True
            self._begin(total_bytes)
        if self._display is not None:
            self._display.update(self._display.task_ids[0], completed=done_bytes, total=total_bytes)

    def _begin(self, total_bytes: int) -> None:
        if not sys.stderr.isatty():
            note(f"fetching {self._name} ({total_bytes / 1e6:.0f} MB)")
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = TextColumn("fetching {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
        self._display = Progress(*columns, console=Console(stderr=True))
        self._display.add_task(self._name, total=total_bytes)
        self._display.start()

    def __enter__(self) -> DownloadBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._display is not None:
            self._display.stop()


class PartsBar:
    """Progress of a measurement that has parts, on stderr: lines that stay, and in a terminal a bar below them."""

    def __init__(self) -> None:
        self._display: ProgressDisplay | None = None

    def note(self, line: str) -> None:
        """Print a line above the bar."""
        if self._display is None:
            note(line)
        else:
            self._display.console.print(line, markup=False, highlight=False)

    def part(self, title: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` parts are finished and what is next."""
        if self._display is None:
            if not sys.stderr.isatty():
                return
            self._display = self._begin()
        self._display.update(self._display.task_ids[0], description=title, completed=done, total=total, refresh=True)

    def _begin(self) -> ProgressDisplay:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False)
        # Drawn when there is news only: a thread that draws would take time from what is measured.
        display = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
        display.add_task("", total=None)
        display.start()
        return display

    def __enter__(self) -> PartsBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._display is not None:
            self._display.stop()


def open_llm(model: str, **options: Any) -> LLM:
    """An LLM, with the progress of its download and its start lines on stderr.  ``options`` are those of LLM."""
    note(f"loading {model} ...")
    # Loading the engine's libraries takes seconds; the line above comes before.
    from foredraft.llm import LLM

    with DownloadBar(model) as progress:
        llm = LLM(model, progress=progress, **options)
    for line in llm.describe():
        note(line)
    return llm


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Within, a first Ctrl-C is only noted, for the yielded function to tell; a second one is raised.

    An engine that goes on to the next request must not be interrupted in the middle of a step.
    """
    noted = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if noted.is_set():
            raise KeyboardInterrupt
        noted.set()

    # Only the main thread may set handlers, and only it receives the signal.
    if threading.current_thread() is not threading.main_thread():
        yield noted.is_set
        return
    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield noted.is_set
    finally:
        signal.signal(signal.SIGINT, previous)
