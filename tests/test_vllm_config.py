from __future__ import annotations

import json
import shlex
from dataclasses import replace
from itertools import pairwise

import pytest

from foredraft.vllm_config import VllmPlan, remarks, serve_command, speculative_config

PLAN = VllmPlan(
    target="owner/model",
    method="draft_model",
    draft="owner/draft",
    ranges=[(1, 8, 5), (9, 32, 2), (33, 64, 0)],
    max_model_len=2048,
    max_num_seqs=64,
    num_gpus=2,
)


def test_the_schedule_is_not_what_vllm_takes() -> None:
    config = speculative_config(PLAN)
    assert config == {
        "method": "draft_model",
        "model": "owner/draft",
        "num_speculative_tokens": 5,
        "num_speculative_tokens_per_batch_size": [[1, 8, 5], [9, 32, 2], [33, 64, 0]],
    }
    # What vLLM checks: from 1 on, inclusive, ascending without overlap, K from 0 to the largest.
    schedule = config["num_speculative_tokens_per_batch_size"]
    assert schedule[0][0] == 1
    assert all(first <= last for first, last, _ in schedule)
    assert all(before[1] < after[0] for before, after in pairwise(schedule))
    assert all(0 <= k <= config["num_speculative_tokens"] for _, _, k in schedule)


def test_a_shell_reads_other_options_than_were_meant() -> None:
    words = shlex.split(serve_command(PLAN).replace("\\\n", " "))
    assert words[:3] == ["vllm", "serve", "owner/model"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert json.loads(options.pop("--speculative-config")) == speculative_config(PLAN)
    assert options == {
        "--max-model-len": "2048",
        "--max-num-seqs": "64",
        "--tensor-parallel-size": "2",
        "--dtype": "bfloat16",
    }


def test_a_constant_k_gets_a_schedule() -> None:
    assert "num_speculative_tokens_per_batch_size" not in (speculative_config(replace(PLAN, ranges=[(1, 64, 4)])) or {})


def test_drafting_that_never_pays_is_switched_on() -> None:
    plan = replace(PLAN, ranges=[(1, 64, 0)])
    assert speculative_config(plan) is None
    assert "--speculative-config" not in serve_command(plan)
    assert any("not expected to pay" in remark for remark in remarks(plan))


def test_suffix_gets_the_schedule_that_stops_vllm() -> None:
    plan = replace(PLAN, method="suffix", draft=None)
    assert speculative_config(plan) == {"method": "suffix", "num_speculative_tokens": 5}
    told = " ".join(remarks(plan))
    assert "arctic-inference" in told and "from 33 requests" in told


def test_ngram_is_sent_without_its_window() -> None:
    window = {"prompt_lookup_max": 5, "prompt_lookup_min": 2}
    config = speculative_config(replace(PLAN, method="ngram", draft=None, settings=window)) or {}
    assert (config["prompt_lookup_max"], config["prompt_lookup_min"]) == (5, 2)
    assert "model" not in config


def test_a_head_is_sent_without_its_folder() -> None:
    assert (speculative_config(replace(PLAN, method="eagle3", draft="/heads/a")) or {})["model"] == "/heads/a"
    assert (speculative_config(replace(PLAN, method="eagle3", draft=None)) or {})["model"] == "YOUR-DRAFT-MODEL"


@pytest.mark.parametrize(("ours", "theirs"), [("Q4_1", "auto"), ("Q8_0", "auto"), ("BF16", "bfloat16"), ("float32", "float32")])
def test_vllm_is_asked_for_a_format_that_it_does_not_know(ours: str, theirs: str) -> None:
    plan = replace(PLAN, dtype=ours)
    assert f"--dtype {theirs}" in serve_command(plan)
    assert any("vLLM computes otherwise" in remark for remark in remarks(plan)) == (theirs == "auto")


def test_a_placeholder_is_left_unexplained() -> None:
    told = " ".join(remarks(replace(PLAN, draft=None, target="YOUR-MODEL")))
    assert "YOUR-DRAFT-MODEL" in told and "in place of YOUR-MODEL" in told


def test_weights_of_8_bits_are_served_in_16() -> None:
    plan = replace(PLAN, dtype="fp8")
    assert "--quantization fp8" in serve_command(plan)
    assert (speculative_config(plan) or {})["quantization"] == "fp8"
