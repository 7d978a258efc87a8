"""A model of letters that makes up questions and answers them, in place of an LLM.

Owns: the tokenizer and the model.  Does not know: any single test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from foredraft.outputs import CompletionOutput, RequestMetrics, RequestOutput
from foredraft.types import SamplingParams, SpeculationStats

HEADER, TURN = "<user>", "<answer>"
END = 256


class Bytes:
    """Token i is byte i; a template that writes <user>question<answer>."""

    def __init__(self, has_chat_template: bool = True) -> None:
        self.has_chat_template = has_chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token != END).decode()

    def render_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        return HEADER + messages[0]["content"] + TURN * add_generation_prompt

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode(self.render_chat(messages))

    def vocabulary(self) -> dict[str, int]:
        return {f"<{number}>": number for number in range(END + 1)}


class Model:
    """Says random letters, as temperature, seed and prompt have it; ``dies_after`` calls it is killed."""

    max_model_len = 200

    def __init__(self, dies_after: int = 10_000, ends: bool = True, has_chat_template: bool = True) -> None:
        self.calls: list[list[tuple[str, SamplingParams]]] = []
        self.dies_after, self.ends = dies_after, ends
        self.tokenizer = Bytes(has_chat_template)
        self.checkpoint = SimpleNamespace(
            tokenizer=self.tokenizer, name="toy", path=Path(__file__), weight_bytes=1, quantization="Q", eos_ids={END}
        )
        self.target = SimpleNamespace(vocab_size=END + 1)
        self.config = SimpleNamespace(device="cpu", dtype="auto")

    def generate(self, prompts: Sequence[list[int]], sampling_params: Sequence[SamplingParams]) -> list[RequestOutput]:
        if len(self.calls) >= self.dies_after:
            raise KeyboardInterrupt
        self.calls.append([(bytes(p).decode(), params) for p, params in zip(prompts, sampling_params, strict=True)])
        return [self._answer(prompt, params) for prompt, params in zip(prompts, sampling_params, strict=True)]

    def _answer(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        assert params.seed is not None
        rng = np.random.default_rng([*prompt, 0 if params.temperature == 0.0 else params.seed])
        length = int(rng.integers(3, 15))
        tokens = [*rng.integers(97, 103, length).tolist(), END] if self.ends else [97] * params.max_tokens
        cut = tokens[: params.max_tokens]
        reason = "stop" if cut[-1] == END else "length"
        metrics = RequestMetrics(0.0, 0.0, SpeculationStats())
        return RequestOutput("0", None, prompt, [CompletionOutput(0, "", cut, finish_reason=reason)], True, 0, metrics)
