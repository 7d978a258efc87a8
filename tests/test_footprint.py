"""What serving costs beside the weights: modules that are imported, and resident memory against its plan."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from loader_files import write_folder, write_gguf

SERVE = """
import sys
from foredraft import LLM, SamplingParams

llm = LLM(sys.argv[1], speculative_config={"method": "ngram"}, kv_cache_memory=10_000_000, device="cpu")
assert "native ops" in llm.describe()[0], llm.describe()
assert llm.chat_prompt([{"role": "user", "content": "hello"}])
(output,) = llm.generate([[5, 6, 5, 6]], SamplingParams(max_tokens=3, ignore_eos=True))
assert len(output.outputs[0].token_ids) == 3
print(sorted(name for name in ("torch", "safetensors.torch", "scipy") if name in sys.modules))
"""


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_serving_natively_imports_torch(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("m" if kind == "folder" else "m.gguf")
    if kind == "folder":
        write_folder(path, "llama")
    else:
        case = write_folder(tmp_path / "source", "llama")
        write_gguf(path, case.architecture, case.weights)
    run = subprocess.run([sys.executable, "-c", SERVE, str(path)], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr


# As many sequences at once as the plan counts on, of random tokens, so that they share no block and no n-gram; together they
# write every block.  The suffix drafter's statistics are filled by hand: that many tokens would take minutes to generate.
MEASURE_SERVING = """
import json, random, sys
from foredraft import LLM, SamplingParams
from foredraft.memory import resident_bytes

method = sys.argv[1]
speculative = {"method": method, "num_speculative_tokens": 4, "suffix_decoding_max_bytes": 8_000_000, "adaptive": method == "auto"}
speculative |= {"model": "smollm2-135m"} if method == "draft_model" else {}
sizes = {"max_model_len": 2048, "max_num_seqs": 4, "max_num_batched_tokens": 256}
llm = LLM("smollm2-135m", speculative_config=speculative, kv_cache_memory=100_000_000, device="cpu", threads=1, **sizes)
rng = random.Random(0)
for _ in range(200 if method in ("suffix", "auto") else 0):
    llm._drafters["suffix"].shared.add("", [rng.randrange(49_000) for _ in range(1000)])
llm.chat([[{"role": "user", "content": "Hello!"}]], SamplingParams(max_tokens=8))
length = llm.memory.num_tokens // 4 - 40
prompts = [[rng.randrange(49_000) for _ in range(length)] for _ in range(4)]
llm.generate(prompts, SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.0))
assert "torch" not in sys.modules
print(json.dumps(llm.memory.to_dict() | {"resident": resident_bytes(), "weight_bytes": llm.target.weight_bytes}))
"""


@cache
def served(method: str) -> dict[str, Any]:
    """The memory plan of SmolLM2 with that method, and how many bytes were resident once every buffer had been in use."""
    run = subprocess.run([sys.executable, "-c", MEASURE_SERVING, method], capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


needs_statm = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells resident memory")


@pytest.mark.model
@needs_statm
def test_serving_takes_more_than_a_quarter_over_the_weights_and_150_mb_beside_a_full_cache() -> None:
    found = served("none")
    assert found["weight_bytes"] + found["kv"] < found["resident"] <= 1.25 * found["weight_bytes"] + 100e6 + 150e6, found


@pytest.mark.model
@needs_statm
@pytest.mark.parametrize("method", ["none", "ngram", "suffix", "draft_model"])
def test_resident_memory_is_not_what_was_planned(method: str) -> None:
    found = served(method)
    assert found["total"] == pytest.approx(found["resident"], rel=0.05), found


@pytest.mark.model
@needs_statm
def test_drafters_that_compete_take_more_than_was_planned() -> None:
    """How much each of them indexes is up to the controller, so the plan is only the most."""
    found = served("auto")
    assert found["resident"] <= 1.02 * found["total"], found
