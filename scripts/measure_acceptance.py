"""Acceptance length of each drafter with a fixed K on a data set of prompts, greedy and sampled.

Usage: ``python scripts/measure_acceptance.py PROMPTS.jsonl [--json FILE]``.  Acceptance does not depend on the machine's speed, so
this may run beside other work.  Prompts are Spec-Bench's or plain lines as ``foredraft.request_log.read_prompts`` takes them; of a
conversation the first turn is asked.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foredraft import LLM, SamplingParams, __version__
from foredraft.request_log import read_prompts

METHODS = ("ngram", "suffix", "eagle3", "draft_model")
TEMPERATURES = (0.0, 0.8)
NUM_DRAFTED = 3


def acceptance(llm: LLM, prompts: Sequence[list[int]], temperature: float, max_tokens: int) -> dict[str, Any]:
    """Emitted tokens per target pass over all prompts, and the share that came of those drafted at each position."""
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens) for seed in range(len(prompts))]
    stats = [output.metrics.speculation for output in llm.generate(list(prompts), params)]
    drafted, accepted = ([sum(values) for values in zip(*rows, strict=True)] for rows in _by_position(stats))
    emitted, passes = sum(one.emitted_tokens for one in stats), sum(one.target_passes for one in stats)
    shares = [came / max(1, guessed) for came, guessed in zip(accepted, drafted, strict=True)]
    return {"acceptance_length": emitted / passes, "accepted_by_position": shares, "emitted_tokens": emitted}


def _by_position(stats: Sequence[Any]) -> tuple[list[list[int]], list[list[int]]]:
    def padded(counts: list[int]) -> list[int]:
        return [*counts, *[0] * NUM_DRAFTED][:NUM_DRAFTED]

    return [padded(one.drafted_per_position) for one in stats], [padded(one.accepted_per_position) for one in stats]


def measure(model: str, prompts: Path, num_prompts: int, max_tokens: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """All methods at all temperatures, as plain data."""
    found: dict[str, dict[str, Any]] = {}
    given = read_prompts(str(prompts))[:num_prompts]
    for method in METHODS:
        config = {"method": method, "num_speculative_tokens": NUM_DRAFTED, "adaptive": False}
        llm = LLM(model, speculative_config=config, max_num_seqs=16, **options)
        asked = [llm.chat_prompt([{"role": "user", "content": one}] if isinstance(one, str) else one[:1]) for one in given]
        found[method] = {str(t): acceptance(llm, asked, t, max_tokens) for t in TEMPERATURES}
        print(method, {t: round(cell["acceptance_length"], 3) for t, cell in found[method].items()}, flush=True)
    return {
        "foredraft": __version__,
        "model": model,
        "prompts": prompts.name,
        "num_prompts": len(given),
        "max_tokens": max_tokens,
        "num_speculative_tokens": NUM_DRAFTED,
        "methods": found,
    }


def main() -> None:
    """Measure, and print or write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options = {} if arguments.threads is None else {"threads": arguments.threads}
    result = measure(arguments.model, arguments.prompts, arguments.num_prompts, arguments.max_tokens, options)
    text = json.dumps(result, indent=1) + "\n"
    if arguments.json is None:
        print(text)
    else:
        arguments.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
