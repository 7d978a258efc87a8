"""A bench whose every run is scripted, so that its figures are known.

Owns: the script's nouns, and what stands in for an LLM and a Contest.  Does not know: any single test.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foredraft import bench
from foredraft.bench_options import BenchOptions
from foredraft.cost import PassTimes
from foredraft.lanes import PLAIN_WAY, Way
from foredraft.outputs import CompletionOutput
from foredraft.trial import Batch, Run
from foredraft.types import PHASES, Logprob, SamplingParams, SpeculationStats

# ------------------------------------------------------------------------------------------------ an LLM with a scripted clock


@dataclass(frozen=True)
class Step:
    """One step of a scripted answer: (drafted, accepted, emitted) and milliseconds, all of them in the pass unless told."""

    emitted: int
    ms: float | Mapping[str, float] = 100.0
    drafted: int = 0
    accepted: int = 0

    @property
    def milliseconds(self) -> dict[str, float]:
        return dict.fromkeys(PHASES, 0.0) | (dict(self.ms) if isinstance(self.ms, Mapping) else {"pass": self.ms})


@dataclass(frozen=True)
class Answer:
    steps: tuple[Step, ...]
    tokens: tuple[int, ...] | None = None
    predicted: dict[str, float] | None = None

    @property
    def token_ids(self) -> list[int]:
        return list(self.tokens or range(sum(step.emitted for step in self.steps)))


Script = Callable[[str, str, int], Answer]


class ScriptedLLM:
    """Answers by ``script(prompt, method, seed)``; ``logprobs`` are those that the extra request gets."""

    max_model_len = 1000

    def __init__(self, script: Script, logprobs: Mapping[int, Logprob], is_repeatable: bool) -> None:
        self.script, self.logprobs, self.is_repeatable = script, logprobs, is_repeatable
        self.batches: list[tuple[str, tuple[str, ...], int, int]] = []
        self.warm_ups: list[tuple[str, ...]] = []
        self.recalled: list[str] = []
        self.explained: list[SamplingParams] = []
        self.options: dict[str, Any] = {}
        tokenizer = SimpleNamespace(
            has_chat_template=False,
            decode=lambda ids, skip_special_tokens: f"<{ids[0]}>",
            encode=lambda text: list(text.encode()),
        )
        self.checkpoint = SimpleNamespace(
            path=Path(__file__), tokenizer=tokenizer, quantization="Q4_1", architecture=SimpleNamespace(tie_embeddings=True)
        )
        self.target = SimpleNamespace(weight_bytes=100_000_000, exactness="numeric", precision="float32", threads=2)

        self.kv = SimpleNamespace(blocks_for=lambda num_tokens: -(-num_tokens // 16), num_available=10_000)

    def describe(self) -> list[str]:
        return ["a scripted model"]

    def calibrate(self) -> PassTimes:
        return PassTimes((1, 5), (0.1, 0.12))

    def generate(self, prompt: list[int], params: SamplingParams) -> list[Any]:
        self.explained.append(params)
        assert params.speculative is not None and params.seed is not None
        answer = self.script(text_of(prompt), params.speculative["method"], params.seed)
        tokens = answer.token_ids[: params.max_tokens]
        tokens = tokens if self.is_repeatable else [token + 1 for token in tokens]
        return [SimpleNamespace(outputs=[CompletionOutput(0, "", tokens, logprobs=[dict(self.logprobs)] * len(tokens))])]


def text_of(prompt: Sequence[int]) -> str:
    return bytes(prompt).decode().strip()


class ScriptedContest:
    """In place of Contest: what the script says of the first prompt of a batch holds for all of them."""

    def __init__(self, llm: ScriptedLLM, ways: Sequence[Way]) -> None:
        self.llm, self.ways = llm, (PLAIN_WAY, *ways)

    def warm_up(self, batch: Batch, params: SamplingParams) -> None:
        self.llm.warm_ups.append(tuple(way.label for way in self.ways))

    def recall(self, batch: Batch, plain: Run) -> None:
        self.llm.recalled.append(batch.name)

    def run(self, batch: Batch, params: SamplingParams, repeat: int, turn: int) -> list[Run]:
        self.llm.batches.append((batch.category, tuple(text_of(prompt) for prompt in batch.prompts), repeat, turn))
        assert params.seed is not None
        return [self._run(batch, way, params.seed, repeat) for way in self.ways]

    def _run(self, batch: Batch, way: Way, seed: int, repeat: int) -> Run:
        answer = self.llm.script(text_of(batch.prompts[0]), way.method, seed)
        first = next(i for i, step in enumerate(answer.steps) if step.emitted)
        decode, size = answer.steps[first + 1 :], len(batch.prompts)
        stats = SpeculationStats()
        for step in answer.steps:
            if step.emitted:
                stats.count(step.drafted, step.accepted, step.emitted)
        seconds = [sum(step.milliseconds.values()) / 1e3 for step in answer.steps]
        return Run(
            category=batch.category,
            prompt=batch.name,
            method=way.method,
            num_speculative_tokens=way.num_speculative_tokens,
            batch=size,
            repeat=repeat,
            num_prompt_tokens=3,
            token_ids=[answer.token_ids] * size,
            time_to_first_token=sum(seconds[: first + 1]),
            decode_seconds=sum(seconds[first + 1 :]),
            decode_tokens=size * sum(step.emitted for step in decode),
            decode_steps=len(decode),
            ms_per_step={phase: statistics.fmean(step.milliseconds[phase] for step in decode) for phase in PHASES if decode},
            noise=0.001,
            steps=[(step.drafted + 1, step.drafted, step.accepted, step.emitted, step.milliseconds["pass"]) for step in decode],
            speculation=stats,
            predicted=answer.predicted,
        )


Setup = Callable[..., ScriptedLLM]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    """Sets up a bench whose runs are scripted."""

    def setup(script: Script, logprobs: Mapping[int, Logprob] | None = None, is_repeatable: bool = True) -> ScriptedLLM:
        llm = ScriptedLLM(script, logprobs or {}, is_repeatable)

        def open_llm(model: str, **options: Any) -> ScriptedLLM:
            llm.options = {"model": model, **options}
            return llm

        monkeypatch.setattr(bench, "LLM", open_llm)
        monkeypatch.setattr(bench, "Contest", ScriptedContest)
        bandwidth = {"best": 2e9, "median": 1.5e9, "buffer_bytes": 4096, "repeats": 3}
        monkeypatch.setattr(bench, "measure_read_bandwidth", lambda device, **options: bandwidth)
        return llm

    yield setup


class Told:
    """A Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.parts: list[tuple[str, int, int]] = []

    def note(self, line: str) -> None:
        self.lines.append(line)

    def part(self, title: str, done: int, total: int) -> None:
        self.parts.append((title, done, total))


def options(**given: Any) -> BenchOptions:
    """A bench of model m without sweeps unless they are given."""
    return BenchOptions("m", **{"methods": ("ngram", "suffix"), "k_sweep": (), "batch_sweep": (), **given})


def dataset(tmp_path: Path, *prompts: str, categories: tuple[str, ...] = ("a",)) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [{"question_id": p, "category": categories[i % len(categories)], "turns": [p]} for i, p in enumerate(prompts)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def steady(tokens_per_s: float, num_tokens: int = 3) -> Answer:
    """A prompt step of 5 s, and then one token a step."""
    return Answer((Step(1, 5000.0), *[Step(1, 1e3 / tokens_per_s)] * (num_tokens - 1)))


def cell_of(result: Mapping[str, Any], method: str, category: str = "a") -> dict[str, Any]:
    return next(cell for cell in result["cells"] if (cell["category"], cell["method"]) == (category, method))


def prediction(speedup: float, acceptance_length: float = 1.5) -> dict[str, float]:
    """What a Run says was expected."""
    return {"seconds": 1.0, "speedup": speedup, "acceptance_length": acceptance_length, "steps": 2}
