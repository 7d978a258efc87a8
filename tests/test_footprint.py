"""What serving costs beside the weights: modules that are imported, and resident memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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


MEASURE_SERVING = """
import json, sys
from pathlib import Path
from foredraft import LLM, SamplingParams

llm = LLM("smollm2-135m", kv_cache_memory=100_000_000, max_model_len=1024, device="cpu", threads=1)
num_blocks, size = llm.kv.num_blocks, llm.kv.block_size
# As many sequences of 480 prompt tokens as fill every block; none is alike, so that none shares blocks.
prompts = [[i + 1] * 480 for i in range(num_blocks * size // 512)]
llm.chat([[{"role": "user", "content": "Hello!"}]], SamplingParams(max_tokens=8))
llm.generate(prompts, SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.0))
lines = Path("/proc/self/status").read_text().splitlines()
figures = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.startswith(("VmRSS", "VmHWM"))}
print(json.dumps({"weights": llm.target.weight_bytes, "kv": llm.target.kv_bytes, "torch": "torch" in sys.modules, **figures}))
"""


@pytest.mark.model
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells resident memory")
def test_serving_takes_more_than_a_quarter_over_the_weights_and_150_mb_beside_a_full_cache() -> None:
    run = subprocess.run([sys.executable, "-c", MEASURE_SERVING], capture_output=True, text=True, timeout=250, check=True)
    found = json.loads(run.stdout)
    assert not found["torch"]
    assert found["weights"] + found["kv"] < found["VmRSS"] <= 1.25 * found["weights"] + 100e6 + 150e6, found
