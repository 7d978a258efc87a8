"""A stand-in for LLM that answers from a script, so that commands are tested without a model.

Owns: the script and what it turns into.  Does not know: any command.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from foredraft import cli
from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.loader import Detokenizer
from foredraft.outputs import CompletionOutput, RequestMetrics, RequestOutput
from foredraft.types import RequestError, SamplingParams, SpeculationStats

END = 256


class ByteTokenizer:
    """Token i is byte i; END is special and has no text."""

    special_ids = frozenset({END})
    strips_first_space = False

    def __init__(self, has_chat_template: bool = True) -> None:
        self.has_chat_template = has_chat_template

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < END else b"<end>"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(i) for i in ids if not (skip_special_tokens and i in self.special_ids)).decode(
            "utf-8", "replace"
        )


Passes = Sequence[tuple[bytes, bytes]]
"""One engine step each: the accepted tokens, then the target's own."""


@dataclass
class FakeLLM:
    """Answers every request with ``passes``; ``before`` is called with the index of each, and may raise or send a signal."""

    passes: Passes = ((b"", b"a"), (b"bc", b"d"), (b"", b"e"))
    max_model_len: int = 10_000
    options: Mapping[str, Any] = field(default_factory=dict)
    before: Callable[[int], None] = lambda index: None
    answers_by_method: Mapping[str, Passes] = field(default_factory=dict)
    has_chat_template: bool = True
    requests: list[tuple[Any, SamplingParams]] = field(default_factory=list)
    conversations: list[list[dict[str, str]]] = field(default_factory=list)
    cancelled: int = 0

    def open(self, model: str, **options: Any) -> FakeLLM:
        """In place of ``load_llm``; refuses the options that LLM refuses."""
        self.options = {"model": model, **options}
        config = {name: value for name, value in options.items() if name not in ("speculative_config", "progress", "trace")}
        self.config = EngineConfig.from_dict(config)
        self.speculative_config = SpeculativeConfig.parse(options.get("speculative_config"))
        self.checkpoint = SimpleNamespace(tokenizer=ByteTokenizer(self.has_chat_template))
        return self

    def chat_prompt(self, conversation: Sequence[Mapping[str, str]]) -> list[int]:
        self.conversations.append([dict(message) for message in conversation])
        return self.checkpoint.tokenizer.encode("".join(f"<{m['role']}>{m['content']}" for m in conversation))

    def generate(self, prompts: Sequence[Any], params: SamplingParams) -> list[RequestOutput]:
        outputs = list(self.stream(prompts, params))
        last = outputs[-1]
        for index, answer in enumerate(last.outputs):
            parts = [output.outputs[index] for output in outputs]
            answer.token_ids[:] = [token for part in parts for token in part.token_ids]
            answer.origins[:] = [origin for part in parts for origin in part.origins]
            object.__setattr__(answer, "text", "".join(part.text for part in parts))
        return [last]

    def stream(self, prompts: Sequence[Any], params: SamplingParams) -> Iterator[RequestOutput]:
        (prompt,) = prompts
        self.requests.append((prompt, params))
        prompt_ids = self.checkpoint.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if len(prompt_ids) >= self.max_model_len:
            raise RequestError(f"a prompt must have at most {self.max_model_len - 1} tokens, not {len(prompt_ids)}; shorten it.")
        passes = self.answers_by_method.get((params.speculative or {}).get("method", ""), self.passes)
        sinks = [Detokenizer(self.checkpoint.tokenizer, prompt_ids, stop=params.stop) for _ in range(params.n)]
        stats, done = SpeculationStats(), False
        try:
            for index, (accepted, own) in enumerate(passes):
                self.before(index)
                last = index == len(passes) - 1
                origins = ["accepted"] * len(accepted) + (["bonus"] if accepted else ["plain"]) * len(own)
                token_ids = [*accepted, *own]
                chunks = []
                for n, sink in enumerate(sinks):
                    for token in token_ids:
                        sink.push(token, may_stop=False)
                    delta = sink.take_delta(final=last)
                    chunks.append(
                        CompletionOutput(n, delta, list(token_ids), finish_reason="stop" if last else None, origins=list(origins))
                    )
                stats.count(len(accepted), len(accepted), len(token_ids))
                metrics = RequestMetrics(0.5, 0.5 + index * 0.1, stats)
                yield RequestOutput("0", None, prompt_ids, chunks, last, params.seed if params.seed is not None else 99, metrics)
            done = True
        finally:
            self.cancelled += not done


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(llm: FakeLLM | None, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of one command line."""
        if llm is not None:
            monkeypatch.setattr(cli, "load_llm", llm.open)
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = cli.main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
