"""A plan as the options of ``vllm serve``.

Owns: vLLM's names, and what of a plan each version can be told (0.26 and later).  Does not know: how the plan was made.

``num_speculative_tokens_per_batch_size`` is a list of ``[first batch, last batch, K]``: inclusive, the first begins at 1, none
overlap, and K is at most ``num_speculative_tokens``; beyond the last range its K goes on (vllm/v1/spec_decode/dynamic/utils.py).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

NO_DRAFT_NAME = "YOUR-DRAFT-MODEL"
NO_TARGET_NAME = "YOUR-MODEL"
# vLLM 0.26 stops when the suffix method is given fewer tokens than its maximum, and later versions ignore the list for it.
WITHOUT_SCHEDULE = ("suffix",)
HEADS = ("eagle", "eagle3")
# What vLLM computes in, by our name of a format; of any other it takes what the model's own files say.
DTYPES = {"fp8": "fp8", **dict.fromkeys(("bfloat16", "BF16"), "bfloat16"), **dict.fromkeys(("float16", "F16"), "float16")}
DTYPES |= dict.fromkeys(("float32", "F32"), "float32")


@dataclass(frozen=True)
class VllmPlan:
    """What is to be served.

    ``ranges`` are (first batch, last batch, K) from 1 to the largest batch; ``max_num_seqs`` requests run at a time.  ``draft`` is
    the draft model or head; ``settings`` are further ones of the method, by vLLM's names.
    """

    target: str
    method: str
    draft: str | None
    ranges: Seq[tuple[int, int, int]]
    max_model_len: int
    max_num_seqs: int
    num_gpus: int = 1
    dtype: str = "bfloat16"
    settings: Mapping[str, Any] = field(default_factory=dict)


def speculative_config(plan: VllmPlan) -> dict[str, Any] | None:
    """The value of ``--speculative-config``; None where drafting pays at no batch size."""
    most = max(k for _, _, k in plan.ranges)
    if most == 0:
        return None
    config: dict[str, Any] = {"method": plan.method}
    if plan.method == "draft_model" or plan.method in HEADS:
        config["model"] = plan.draft or NO_DRAFT_NAME
    if plan.method == "draft_model" and plan.dtype == "fp8":
        config["quantization"] = "fp8"
    config["num_speculative_tokens"] = most
    config |= plan.settings
    if plan.method not in WITHOUT_SCHEDULE and any(k != most for _, _, k in plan.ranges):
        config["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in plan.ranges]
    return config


def serve_command(plan: VllmPlan) -> str:
    """``vllm serve`` with every option that the plan decides, over several lines."""
    options = [("--max-model-len", str(plan.max_model_len)), ("--max-num-seqs", str(plan.max_num_seqs))]
    if plan.num_gpus > 1:
        options.append(("--tensor-parallel-size", str(plan.num_gpus)))
    dtype = DTYPES.get(plan.dtype, "auto")
    options.append(("--quantization", "fp8") if dtype == "fp8" else ("--dtype", dtype))
    config = speculative_config(plan)
    lines = [f"vllm serve {shlex.quote(plan.target)}", *(f"{name} {value}" for name, value in options)]
    if config is not None:
        lines.append(f"--speculative-config '{json.dumps(config)}'")
    return " \\\n  ".join(lines)


def remarks(plan: VllmPlan) -> list[str]:
    """What to know before the command is run."""
    config = speculative_config(plan)
    found = ["for vLLM 0.26 and later"]
    if config is None:
        return [*found, "no --speculative-config: drafting is not expected to pay at any batch size"]
    off = next((first for first, _, k in plan.ranges if k == 0), None)
    if plan.method in WITHOUT_SCHEDULE and any(k != config["num_speculative_tokens"] for _, _, k in plan.ranges):
        advice = f"it is expected to cost time from {off} requests at once on" if off else "K should fall as the batch grows"
        found.append(f"vLLM takes no K per batch size for {plan.method}; {advice}")
    if plan.method == "suffix":
        found.append("the suffix method needs the package arctic-inference==0.1.1")
    if plan.method == "draft_model":
        found.append("the draft model must have the target's vocabulary")
    if plan.dtype not in DTYPES:
        found.append(f"the plan is of {plan.dtype}, which vLLM computes otherwise; measure there, too")
    if "num_speculative_tokens_per_batch_size" in config:
        found.append("vLLM ignores num_speculative_tokens_per_batch_size under data parallelism")
    if config.get("model") == NO_DRAFT_NAME:
        found.append(f"put your draft model's name in place of {NO_DRAFT_NAME}")
    if plan.target == NO_TARGET_NAME:
        found.append(f"put your model's name in place of {NO_TARGET_NAME}")
    return found
