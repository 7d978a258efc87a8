"""Prompts for the demo model, and transformers as an independent reference for its logits."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from foredraft import LLM

PROMPTS = [
    "Write a short explanation of how photosynthesis works.",
    "What is the capital of Portugal?",
    "Repeat after me, word for word: the early bird catches the worm, but the second mouse gets the cheese.",
    "Write a Python function that adds two numbers.",
    "List three fruits that are red.",
    "Translate into French: good morning, my friend.",
    "How many legs do five spiders have together?",
    "Tell me a story about a lighthouse keeper in four sentences.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "Write a haiku about winter.",
    "What is 17 plus 25?",
    "Explain the word 'ambiguous' to a child.",
    "Name the planets of the solar system.",
    "Write a polite email that declines an invitation.",
    "Which is heavier, a kilogram of iron or a kilogram of feathers?",
    "Summarise: The meeting was moved from Monday to Tuesday because the room was flooded.",
    "Write the numbers from one to twelve as words.",
    "What does HTML stand for?",
    "Suggest a name for a small bakery by the sea.",
]


@cache
def _reference_model(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    folder, _, name = path.rpartition("/")
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()


@torch.inference_mode()
def reference_logits(llm: LLM, token_ids: list[int]) -> torch.Tensor:
    """Logits of every row by transformers from the same file, float32 [T, V]."""
    logits: torch.Tensor = _reference_model(str(llm.checkpoint.path))(torch.tensor([token_ids])).logits[0]
    return logits
