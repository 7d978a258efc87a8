"""A conversation in the terminal.

Owns: the history, what is forgotten when the context is full, and the commands that begin with a slash.  Does not know: how an
answer is drawn.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from typing import TYPE_CHECKING, Any

from foredraft.terminal import OriginSplitter, Transcript, deferred_interrupt, error_line, explain_drafts, note, statistics_line
from foredraft.types import RequestError, SamplingParams, SpeculationStats, refuse_unknown

if TYPE_CHECKING:
    from foredraft.llm import LLM

COMMANDS = ("/exit", "/reset", "/stats", "/system")


class Conversation:
    """A chat in the terminal: its history, its commands, and what its answers cost."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, show_drafts: bool) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._show_drafts = show_drafts
        self._turns: list[dict[str, str]] = []
        self._transcripts: list[Transcript] = []

    def run(self) -> None:
        """Take lines from standard input until it ends, ``/exit``, or Ctrl-C at the prompt."""
        sign = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
        if sign:
            with contextlib.suppress(ImportError):  # where there is none, lines cannot be edited
                importlib.import_module("readline")
        if self._show_drafts:
            explain_drafts(self._llm)
        while True:
            try:
                line = input(sign).strip()
            except (EOFError, KeyboardInterrupt):
                if sign:
                    print()
                return
            try:
                if re.match(r"/[a-z]+(\s|$)", line):
                    if not self.command(line):
                        return
                elif line:
                    self.ask(line)
            except RequestError as error:
                error_line(str(error))

    def command(self, line: str) -> bool:
        """Obey a line that begins with a slash; False when the chat is over."""
        name, _, text = line.partition(" ")
        refuse_unknown("chat command", name, COMMANDS, RequestError)
        if name == "/reset":
            self._turns.clear()
            note("the conversation starts afresh")
        elif name == "/system":
            self._system = text.strip() or None
            note("the system message is set" if self._system else "the system message is removed")
        elif name == "/stats":
            note(self.statistics())
        return name != "/exit"

    def ask(self, text: str) -> None:
        """Put a question, stream the answer, and keep both; what came before a Ctrl-C is kept too.

        Raises:
            RequestError: the question cannot be served; it is not kept.
        """
        self._turns.append({"role": "user", "content": text})
        try:
            transcript = self._stream(self._fitting_prompt())
        except RequestError:
            self._turns.pop()
            raise
        self._turns.append({"role": "assistant", "content": transcript.answers[0].text})
        self._transcripts.append(transcript)

    def _stream(self, prompt: list[int]) -> Transcript:
        splitters = [OriginSplitter(self._llm.checkpoint.tokenizer, prompt)] if self._show_drafts else []
        transcript = Transcript(sys.stdout, splitters=splitters)
        answers: Any = self._llm.stream([prompt], self._params)
        try:
            with deferred_interrupt() as interrupted, contextlib.closing(answers):
                for output in answers:
                    transcript.add(output)
                    if interrupted():
                        break
        finally:
            transcript.close()
        if transcript.answers[0].finish_reason is None:
            note("stopped")
        return transcript

    def _fitting_prompt(self) -> list[int]:
        """The conversation as token ids, without its oldest turns where they would leave no room for an answer."""
        limit = self._llm.max_model_len
        room = min(self._params.max_tokens, limit // 4)
        num_dropped = 0
        while len(prompt := self._llm.chat_prompt(self._messages())) + room > limit and len(self._turns) > 1:
            del self._turns[:2]
            num_dropped += 1
        if num_dropped:
            what = "question and answer are" if num_dropped == 1 else f"{num_dropped} questions and answers are"
            note(f"the context of {limit} tokens is nearly full: the oldest {what} forgotten; /reset starts afresh")
        return prompt

    def _messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self._system}] if self._system else []), *self._turns]

    def statistics(self) -> str:
        """One line about all answers of this chat."""
        timed = [transcript for transcript in self._transcripts if transcript.tokens_per_second > 0]
        num_tokens = sum(transcript.num_tokens for transcript in timed)
        seconds = sum(transcript.num_tokens / transcript.tokens_per_second for transcript in timed)
        stats = SpeculationStats.merged(transcript.speculation for transcript in timed)
        return f"answers: {len(self._transcripts)}, {statistics_line(num_tokens, num_tokens / seconds if seconds else 0.0, stats)}"
