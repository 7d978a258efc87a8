"""Texts that a target writes itself: questions that it makes up, or is given, and its answers.

Owns: how questions are come by, which seed and temperature each text has, and the folder of finished texts.  Does not know: what is
fitted to them.

A chat model that is shown only the header of a user's turn continues it with a question (Xu et al., 2406.08464); no data set is
needed. Left alone it asks much the same kind of question, so every other one is begun for it, by ``OPENINGS``. Texts are numbered,
and each depends on its number, the recipe and the model alone. They are written in files of ``TEXTS_PER_FILE``, each whole or not
at all: a run that was killed goes on at the first file that is missing, and a later one that wants more goes on behind the last.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from foredraft.array_file import ArrayFile, read_arrays, write_arrays
from foredraft.replay import Record
from foredraft.request_log import Prompt
from foredraft.types import ConfigError, ModelFileError, SamplingParams

if TYPE_CHECKING:
    from foredraft.loader import Tokenizer
    from foredraft.outputs import RequestOutput

KIND = "texts"
TEXTS_PER_FILE = 32
# After so many files without a single text no further ones are tried.
MOST_EMPTY_FILES = 8
MOST_SEED = 2**32
_MARK = "foredraft-question"
# A prompt that was given runs out: from then on it is answered once more, which takes a temperature to be another answer.
REPEAT_TEMPERATURE = 0.7
# How people begin what they ask: to explain, write, act, translate, sum up, extract, calculate, program, advise.
OPENINGS = tuple(
    """\
Explain|What is the difference between|How does|Why do|What are the main causes of|Describe how|Tell me about
What happens when|Who was|When did|Where is|What is the name of|Which country|How many|What does the word
Is it true that|Write a short story about|Write an email to|Write a poem about|Write a blog post about|Compose a letter
Come up with|Rewrite this sentence|Write a speech|Imagine you are|Act as a|Pretend to be|You are a|Suppose|If you could
Help me|Give me advice on|Translate into English:|Translate this German sentence into English:|Translate the following
How do you say|Correct the grammar of|What is a synonym for|Summarize the following text:|Summarize
Read this article and|What are the key points of|Extract the names|Given the following|Classify|List all
Find the value of|Calculate|Solve|What is the probability that|A store sells|If a train|Tom has|Maria buys
The sum of two|How much|Write a Python function that|Write a program|Implement|How do I fix|Given an array
Write a SQL query|What does this code do?|Design an algorithm|Compare|Discuss|Analyze|What are the advantages of
Recommend|Plan a|What should I|Give an example of|Name three|Answer the question:\
""".replace("\n", "|").split("|")
)
Report = Callable[[str], None]


class TextFile(NamedTuple):
    """Texts that were written together, and where they are kept."""

    path: Path
    records: list[Record]


class Writer(Protocol):
    """What answers; LLM does."""

    max_model_len: int

    def generate(self, prompts: Sequence[list[int]], sampling_params: Sequence[SamplingParams]) -> Sequence[RequestOutput]:
        """One output per prompt."""
        ...


@dataclass(frozen=True)
class Recipe:
    """What texts depend on besides the model.

    ``temperatures`` take turns from one answer to the next; questions are made up at temperature 1 within ``question_top_p``.
    Every other question begins with one of ``openings``, in turn; without any, none does.  ``max_question`` and ``max_answer`` in
    tokens; a question that has not ended by then is dropped.

    Raises:
        ConfigError: a value out of its range.
    """

    seed: int = 0
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.7)
    question_top_p: float = 0.95
    openings: tuple[str, ...] = OPENINGS
    max_question: int = 128
    max_answer: int = 256

    def __post_init__(self) -> None:
        if not 0 <= self.seed < MOST_SEED:
            raise ConfigError(f"seed must be from 0 to {MOST_SEED - 1}, not {self.seed}; change seed.")
        if not self.temperatures or not all(0.0 <= value <= 2.0 for value in self.temperatures):
            raise ConfigError(f"temperatures must be one or more numbers from 0 to 2, not {list(self.temperatures)}; change them.")

    def seed_of(self, number: int, step: int) -> int:
        """The seed of a text's question (step 0) or answer (1)."""
        digest = hashlib.sha256(f"{self.seed} {number} {step}".encode()).digest()
        return int.from_bytes(digest[:7], "little")


class Collector:
    """Makes texts, or finds them in ``folder``.

    Args:
        writer: the model; asked for a file of texts at a time.
        tokenizer: its tokenizer.
        folder: of all texts of this model; those of one recipe and list of prompts have a folder of their own in it.
        model: what else tells the model from others.
        prompts: answered in turn with questions that are made up, or alone where the model has no chat template.
        on_texts: called with each file's texts when they are written, before the file is.

    Raises:
        ConfigError: neither prompts nor a chat template, or no prompt that fits the context.
    """

    def __init__(
        self,
        writer: Writer,
        tokenizer: Tokenizer,
        folder: Path,
        *,
        model: str,
        recipe: Recipe,
        prompts: Sequence[Prompt] = (),
        report: Report = lambda line: None,
        on_texts: Callable[[TextFile], None] = lambda file: None,
    ) -> None:
        self._writer, self._tokenizer, self._recipe, self._report = writer, tokenizer, recipe, report
        self._on_texts = on_texts
        self._header = _question_header(tokenizer)
        room = writer.max_model_len - recipe.max_answer
        encoded = [_encode(tokenizer, prompt) for prompt in prompts]
        self._prompts = [tokens for tokens in encoded if 0 < len(tokens) <= room]
        if len(self._prompts) < len(encoded):
            report(f"left out, being empty or longer than {room} tokens: {len(encoded) - len(self._prompts)} of the prompts")
        self.num_prompts = len(encoded)
        if prompts and not self._prompts:
            raise ConfigError(f"none of the {len(encoded)} prompts fits into {room} tokens; give shorter ones.")
        if not self._header and not prompts:
            raise ConfigError("this model has no chat template and cannot make up questions; give some with --prompts.")
        if self._header and room < len(self._header) + 2 * recipe.max_question:
            raise ConfigError(f"a context of {writer.max_model_len} tokens is too short for texts; raise max_model_len.")
        parts = json.dumps([1, model, asdict(recipe), self._header, self._prompts])
        self.folder = folder / hashlib.sha256(parts.encode()).hexdigest()[:32]

    def collect(self, num_tokens: int) -> list[Record]:
        """The first texts whose answers have ``num_tokens`` tokens together, or a little more; see ``files``."""
        records, total = list[Record](), 0
        for record in (record for file in self.files(num_tokens) for record in file.records):
            if total < num_tokens:
                records.append(record)
                total += len(record.tokens) - record.num_prompt
        return records

    def files(self, num_tokens: int) -> list[TextFile]:
        """The first files of texts whose answers have at least ``num_tokens`` tokens together.

        Raises:
            CapacityError: a file cannot be written.
            ConfigError: the model makes up no question that ends.
        """
        files, total, num_empty = list[TextFile](), 0, 0
        while num_empty < MOST_EMPTY_FILES:
            first = len(files) * TEXTS_PER_FILE
            path = self.folder / f"{first:08d}.texts"
            records = read_texts(path)
            if records is None:
                records = self._write(range(first, first + TEXTS_PER_FILE))
                self._on_texts(TextFile(path, records))
                write_texts(path, records)
            files.append(TextFile(path, records))
            total += sum(len(record.tokens) - record.num_prompt for record in records)
            num_empty = 0 if records else num_empty + 1
            self._report(f"{total:,} tokens of answers after {first + TEXTS_PER_FILE:,} questions")
            if total >= num_tokens:
                return files
        most = self._recipe.max_question
        raise ConfigError(f"this model makes up no question that ends within {most} tokens; give some with --prompts.")

    def _write(self, numbers: Sequence[int]) -> list[Record]:
        """The texts of these numbers; some may have come to nothing."""
        recipe = self._recipe
        questions = self._questions(numbers)
        prompts = [prompt for _, prompt in questions]
        params = [
            SamplingParams(temperature=self._temperature(number), max_tokens=recipe.max_answer, seed=recipe.seed_of(number, 1))
            for number, _ in questions
        ]
        answers = self._writer.generate(prompts, params) if prompts else []
        texts = [
            Record([*prompt, *answer.outputs[0].token_ids], len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return [text for text in texts if len(text.tokens) > text.num_prompt]

    def _questions(self, numbers: Sequence[int]) -> list[tuple[int, list[int]]]:
        """(number, prompt) in the order of the numbers."""
        recipe, found = self._recipe, dict[int, list[int]]()
        own = [number for number in numbers if self._given(number) is None]
        params = [
            SamplingParams(
                temperature=1.0, top_p=recipe.question_top_p, max_tokens=recipe.max_question, seed=recipe.seed_of(number, 0)
            )
            for number in own
        ]
        openings = [self._opening(number) for number in own]
        begun = [[*self._header, *self._tokenizer.encode(opening, add_special_tokens=False)] for opening in openings]
        outputs = self._writer.generate(begun, params) if own else []
        for number, opening, output in zip(own, openings, outputs, strict=True):
            text = (opening + self._tokenizer.decode(output.outputs[0].token_ids)).strip()
            if output.outputs[0].finish_reason == "stop" and text:
                found[number] = self._tokenizer.encode_chat([{"role": "user", "content": text}])
        for number in numbers:
            given = self._given(number)
            if given is not None:
                found[number] = self._prompts[given % len(self._prompts)]
        return sorted(found.items())

    def _given(self, number: int) -> int | None:
        """Which of the given prompts, counted on and on, a text answers; None for a question of the model's own."""
        if not self._prompts:
            return None
        if not self._header:
            return number
        return None if number % 2 else number // 2

    def _opening(self, number: int) -> str:
        """What the model's own question of this number begins with; may be empty."""
        turn, openings = number // 2 if self._prompts else number, self._recipe.openings
        return openings[turn // 2 % len(openings)] if openings and turn % 2 else ""

    def _temperature(self, number: int) -> float:
        temperatures, given = self._recipe.temperatures, self._given(number)
        turn = number if given is None or not self._header else given
        chosen = temperatures[turn % len(temperatures)]
        return max(chosen, REPEAT_TEMPERATURE) if given is not None and given >= len(self._prompts) else chosen


def _question_header(tokenizer: Tokenizer) -> list[int]:
    """What comes before a user's words in the chat template; empty without a template."""
    if not tokenizer.has_chat_template:
        return []
    text = tokenizer.render_chat([{"role": "user", "content": _MARK}], add_generation_prompt=False)
    header, found, _ = text.partition(_MARK)
    return tokenizer.encode(header, add_special_tokens=False) if found else []


def _encode(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    if not tokenizer.has_chat_template:
        text = prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)
        return tokenizer.encode(text)
    return tokenizer.encode_chat([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)


def write_texts(path: Path, records: Sequence[Record]) -> None:
    """Write texts; the folder is made."""
    lengths = [len(record.tokens) for record in records]
    arrays = {
        "starts": np.cumsum([0, *lengths]).astype("<u4"),
        "num_prompt": np.array([record.num_prompt for record in records], "<u4"),
        "tokens": np.array([token for record in records for token in record.tokens], "<u4"),
    }
    write_arrays(path, {"kind": KIND}, arrays)


def read_texts(path: Path) -> list[Record] | None:
    """The texts of a file; None when it is missing, or broken and therefore to be made again."""
    try:
        file: ArrayFile = read_arrays(path)
    except ModelFileError:
        return None
    starts, tokens = file.arrays["starts"].tolist(), file.arrays["tokens"]
    num_prompt = file.arrays["num_prompt"].tolist()
    pairs = zip(starts[:-1], starts[1:], num_prompt, strict=True)
    return [Record(tokens[start:stop].tolist(), num) for start, stop, num in pairs]
