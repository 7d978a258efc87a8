"""A model that says what it is told to, and a browser to look at the page of its server.

Owns: the scripted model, and how Chromium is found and started.  Does not know: any single test.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from cli_helpers import END, ByteTokenizer
from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.controller import Controller
from foredraft.cost import PassTimes
from foredraft.drafters.context import DrafterContext
from foredraft.drafters.registry import Sources
from foredraft.engine import Engine
from foredraft.kv_cache import KVCache
from foredraft.llm import LLM
from foredraft.testing.toy import TableTarget
from foredraft.types import FloatArray, PassOutput
from foredraft.verify import RULES

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
ASKED, ANSWERED = b"\x01", b"\x02"
MAX_MODEL_LEN = 4096


class ScriptTokenizer(ByteTokenizer):
    """One token per byte; a conversation is its messages between control characters."""

    vocab_size = END + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        marks = {"user": ASKED, "assistant": ANSWERED}
        text = b"".join(marks.get(message["role"], b"\x03") + message["content"].encode() for message in messages)
        return list(text + ANSWERED)

    def vocabulary(self) -> dict[str, int]:
        return {f"<{token}>": token for token in range(self.vocab_size)}


class ScriptTarget(TableTarget):
    """Answers the last message as ``answers`` says, byte by byte; other messages with themselves.  A pass takes ``pause`` s."""

    weight_bytes, threads, exactness = 10**6, 1, "bitwise"

    def __init__(self, num_blocks: int, answers: Mapping[str, str], pause: float) -> None:
        super().__init__(num_blocks, block_size=16, max_model_len=MAX_MODEL_LEN)
        self.vocab_size = END + 1
        self.answers, self.pause = answers, pause

    def row(self, context: list[int]) -> FloatArray:
        text = bytes(context)
        question, _, so_far = text.rpartition(ANSWERED)
        asked = question.rpartition(ASKED)[2].decode()
        answer = self.answers.get(asked, asked).encode()
        logits = np.zeros(self.vocab_size, dtype=np.float32)
        logits[answer[len(so_far)] if len(so_far) < len(answer) else END] = 100.0
        return logits

    def forward(self, batch: Any, taps: tuple[int, ...] = ()) -> PassOutput:
        time.sleep(self.pause)
        return super().forward(batch, taps)

    def describe(self) -> str:
        return "a script"


class ScriptLLM(LLM):
    """An LLM around a ScriptTarget."""

    def __init__(self, answers: Mapping[str, str], pause: float = 0.002) -> None:
        self.config = EngineConfig(max_num_seqs=4)
        self.speculative_config = SpeculativeConfig(
            method="ngram", num_speculative_tokens=4, adaptive=False, suffix_decoding_max_bytes=2**16
        )
        self._factories = {}
        self.checkpoint = SimpleNamespace(  # type: ignore[assignment]
            name="script", tokenizer=ScriptTokenizer(), eos_ids=frozenset({END}), quantization="F32"
        )
        self.max_model_len, num_blocks = MAX_MODEL_LEN, 1024
        self.target = ScriptTarget(num_blocks, answers, pause)  # type: ignore[assignment]
        self.kv = KVCache(num_blocks, 16, True)
        self._drafters = {}
        context = DrafterContext(self.target.vocab_size, self.max_model_len)
        self._parts = SimpleNamespace(sources=Sources(), context=lambda target, kv: context)  # type: ignore[assignment]
        self._ensure_drafters(self.speculative_config)
        self.controller = Controller(PassTimes((1, 9), (0.010, 0.012), 1e-6, 1e-7))
        self._is_calibrated = True
        self.engine = Engine(
            self.target, self.kv, self._drafters, RULES["coupled"], self.controller, max_num_seqs=4, max_num_batched_tokens=512
        )
        self._requests = {}
        self._num_requests = self._num_seqs = 0
        self._draw_seed = lambda bits: 7
        self.grammars = SimpleNamespace()  # type: ignore[assignment]
