from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from foredraft import cli, plan_measure
from foredraft.config import SpeculativeConfig
from foredraft.cost import PassTimes, PassWork
from foredraft.dims import dims_of
from foredraft.draft_parts import DraftParts
from foredraft.forecast import LARGEST_BATCH
from foredraft.hardware import GIB
from foredraft.llm import LLM
from foredraft.plan import run_plan
from foredraft.plan_measure import depths, replayed_methods, seconds_of
from foredraft.plan_options import PlanOptions
from foredraft.plan_setting import Subject
from foredraft.plan_table import format_plan
from foredraft.replay import Record, replay
from foredraft.terminal import open_llm
from foredraft.types import ConfigError, SamplingParams

MODEL = "smollm2-135m"
SMALL = {"hardware": "h100", "target_params": 8e9}


def plan(**options: Any) -> dict[str, Any]:
    """A plan that must need no model."""
    return run_plan(PlanOptions(**{**SMALL, **options}), lambda line: None, no_model)


def no_model(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("a model was opened")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def write_log(folder: Path, num_requests: int = 6) -> str:
    path = folder / "log.jsonl"
    text = "the committee met on Monday and agreed that the roof must be paid for by the county"
    lines = [{"prompt": f"{index}: {text}", "completion": f" {text}"} for index in range(num_requests)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


# ------------------------------------------------------------------------------------------------ numbers only


def test_a_plan_from_numbers_alone_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--hardware", "h100", "--target-params", "70e9", "--draft-params", "1e9", "--alpha", "0.7", "--emit", "vllm"]
    code, out, err = run(capsys, *command)
    assert (code, err) == (0, "")
    assert '"num_speculative_tokens_per_batch_size": [[1, ' in out
    assert "assumed 77 layers of width 8320" in out
    # 140 GB on a GPU of 80 GiB is an answer, not a mistake.
    assert "does not fit: plain decoding lacks" in out and "2 GPUs hold it" in out


def test_a_plan_without_a_model_waits_for_torch() -> None:
    code = (
        "import sys; from foredraft.cli import main; main(sys.argv[1:]); "
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy'"
    )
    command = [sys.executable, "-c", code, "plan", "--hardware", "h100", "--target-params", "8e9", "--alpha", "0.5"]
    subprocess.run(command, timeout=60, check=True, capture_output=True)


def test_the_pieces_of_memory_do_not_add_up_or_a_draft_model_takes_none() -> None:
    tables = {table["method"]: table for table in plan(draft_params=1e9, alpha=0.7, context=4096)["memory"]}
    for table in tables.values():
        assert table["kv_bytes"] == pytest.approx(80 * GIB - sum(size for _, size in table["lines"]))
        assert table["num_tokens"] == int(table["kv_bytes"] // table["bytes_per_token"])
        assert table["num_requests"] == table["num_tokens"] // 4096
    plain, drafted = tables["none"], tables["draft_model"]
    assert dict(drafted["lines"])["draft weights"] == 2e9
    assert plain["bytes_per_token"] == 28 * 2 * 8 * 128 * 2  # layers, keys and values, heads, width, bytes
    assert drafted["bytes_per_token"] > plain["bytes_per_token"]
    assert drafted["num_requests"] < plain["num_requests"]


def test_memory_or_gpus_that_were_given_are_ignored() -> None:
    def held(**options: Any) -> int:
        return int(plan(alpha=0.7, **options)["memory"][0]["num_requests"])

    assert held(memory_gib=40.0) < held() < held(gpus=2)
    result = plan(alpha=0.7, memory_gib=10.0)
    assert result["memory"][0]["missing_bytes"] > 5 * GIB
    assert "does not fit" in format_plan(result)


def test_a_forecast_and_its_schedule_disagree() -> None:
    result = plan(draft_params=1e9, alpha=0.7, batches=(256, 1, 16, 16))
    assert [row["batch"] for row in result["forecasts"]] == [1, 16, 256]
    ranges = result["schedules"]["draft_model"]["ranges"]
    for row in result["forecasts"]:
        assert row["num_tokens"] == next(k for first, last, k in ranges if first <= row["batch"] <= last)
        assert row["low"] <= row["speedup"] <= row["high"]
    assert ranges[-1][1] <= LARGEST_BATCH
    speedups = [row["speedup"] for row in result["forecasts"]]
    assert speedups == sorted(speedups, reverse=True)


def test_drafting_is_advised_where_every_row_costs() -> None:
    # Short contexts and large batches: arithmetic is the limit, and a mostly wrong drafter makes more of it.
    result = plan(alpha=0.3, batches=(1, 512), context=16, num_speculative_tokens=4)
    first, second = result["forecasts"]
    assert (first["verdict"], second["verdict"], second["num_tokens"]) == ("pays", "leave it off", 0)
    fades = result["schedules"]["ngram"]["crossover"]
    assert 1 < fades <= 512
    assert f"leave it off (K = {second['tried']} gives 0." in format_plan(result)
    assert f"the gain fades at a batch of {fades}" in format_plan(result)


def test_vllm_is_told_a_batch_that_memory_does_not_hold() -> None:
    result = plan(draft_params=1e9, alpha=0.7, emit="vllm", batches=(1, 4096))
    held = result["memory"][1]["num_requests"]
    vllm = result["vllm"]
    assert f"--max-num-seqs {held} " in vllm["command"]
    assert vllm["speculative_config"]["num_speculative_tokens_per_batch_size"][-1][1] == held


def test_an_unknown_acceptance_is_made_up() -> None:
    result = plan(draft_params=1e9, batches=(1, 64))
    assert result["forecasts"] == [] and result["acceptance"] == {}
    cells = {(row["alpha"], row["batch"]): row for row in result["alphas"]["rows"]}
    assert cells[0.9, 1]["speedup"] > cells[0.3, 1]["speedup"] > 1
    least = result["alphas"]["break_even"]["1"]
    assert 0 < least < 0.3
    assert [table["method"] for table in result["memory"]] == ["none", "draft_model"]
    text = format_plan(result)
    assert "What is accepted is not known" in text and "pays from" in text


def test_sizes_of_a_config_are_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32}
    config = {**sizes, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    shared = [str(path), "--hardware", "a100", "--alpha", "0.6"]
    code, out, _ = run(capsys, *shared, "--context", "8192", "--json", str(tmp_path / "o"))
    assert code == 0 and "(8.03B parameters)" in out and "assumed" not in out
    assert json.loads((tmp_path / "o").read_text())["memory"][0]["bytes_per_token"] == 131072
    code, out, _ = run(capsys, *shared, "--json", "-")
    assert code == 0 and json.loads(out.splitlines()[-1])["memory"][0]["bytes_per_token"] == 131072 and not Path("-").exists()
    code, _, err = run(capsys, *shared, "--context", "8193")
    assert (code, "--context must be at most 8192" in err) == (2, True)


def test_weights_are_fetched_only_to_be_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    wanted: list[str] = []

    def snapshot(model: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        wanted.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    result = plan(model="owner/model", target_params=None, alpha=0.5, emit="vllm")
    assert "*.json" in wanted and not any("safetensors" in pattern for pattern in wanted)
    assert result["vllm"]["command"].startswith("vllm serve owner/model ")


# ------------------------------------------------------------------------------------------------ a log


def test_a_log_brings_no_acceptance_or_no_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A clock that only counts: which drafter is ahead must not depend on the machine.
    monkeypatch.setattr("foredraft.plan_measure.replay", partial(replay, clock=count(0.0, 1e-5).__next__))
    result = plan(from_log=write_log(tmp_path), batches=(1,), num_speculative_tokens=4)
    assert [row["method"] for row in result["forecasts"]] == ["ngram", "suffix", "auto"]
    ngram, suffix, auto = result["forecasts"]
    best = max(ngram, suffix, key=lambda row: row["speedup"])
    assert auto == {**best, "method": "auto"}
    for row in result["forecasts"]:
        assert row["tokens"] > 2.5  # the prompt holds the answer
        assert 1 < row["low"] <= row["speedup"] <= row["high"]
    assert all([one["num_tokens"] for one in some] == [1, 2, 3, 4] for some in result["acceptance"].values())
    assert "pseudo-tokens" in " ".join(result["notes"])
    code, out, _ = run(capsys, "--hardware", "h100", "--target-params", "8e9", "--from-log", write_log(tmp_path), "--emit", "vllm")
    assert code == 0 and '"prompt_lookup_max": 5' in out


def test_a_long_log_is_replayed_for_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.plan_setting.LOG_TOKENS", 100)
    notes = " ".join(plan(from_log=write_log(tmp_path, 50), num_speculative_tokens=1)["notes"])
    assert "Acceptance is of the first 2 of 50 requests" in notes


def test_a_large_ceiling_is_replayed_for_every_k_or_left_out() -> None:
    assert depths(3) == [1, 2, 3]
    assert depths(64)[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 10] and depths(64)[-1] == 64


def test_one_drafter_remembers_the_answers_for_another_k() -> None:
    records = [Record([1, 2, 3, 4, 5, 6, 7, 8, 9], 1)]
    options = PlanOptions(**SMALL, from_log="log", num_speculative_tokens=3)
    subject = Subject("target", dims=None)  # type: ignore[arg-type]
    for method in replayed_methods(options, records, subject, None, lambda line: None, []):
        assert [outcome.tokens for outcome in method.outcomes] == [1.0, 1.0, 1.0]


# ------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"alpha": 1.0}, "--alpha must be at least 0 and below 1, not 1"),
        ({"alpha": -0.1}, "--alpha must be"),
        ({"alpha": float("nan")}, "--alpha must be"),
        ({"alpha": 0.5, "from_log": "f"}, "--alpha and --from-log contradict each other"),
        ({"from_log": "f", "measure": "g"}, "--from-log and --measure contradict"),
        ({"model": "m"}, "both is given"),
        ({"target_params": None}, "neither is given"),
        ({"hardware": None}, "needs --hardware"),
        ({"hardware": "this"}, "measured with MODEL's weights"),
        ({"measure": "p"}, "no weights to run"),
        ({"from_log": "f", "draft_params": 1e9}, "can be replayed only where"),
        ({"batches": (0,)}, "--batch must be whole numbers from 1 to 4096, not 0"),
        ({"batches": (1, 5000)}, "--batch must be whole numbers from 1 to 4096, not 1,5000"),
        ({"batches": ()}, "--batch must be"),
        ({"context": 1}, "--context must be from 2, a token of"),
        ({"context": 10**400}, "--context must be from 2, a token of"),
        ({"num_speculative_tokens": 0}, "--num-speculative-tokens must be from 1 to 64, not 0"),
        ({"num_speculative_tokens": 65}, "--num-speculative-tokens must be"),
        ({"memory_gib": -1.0}, "--memory must be above 0 and at most 1000000000 GiB, not -1"),
        ({"gpus": 0}, "--gpus must be from 1 to 1024, not 0"),
        ({"gpus": 10**400}, "--gpus must be from 1 to 1024"),
        ({"memory_gib": 1e300}, "--memory must be above 0 and at most"),
        ({"dtype": "int3"}, "unknown --dtype 'int3'"),
        ({"emit": "sglang", "alpha": 0.5}, "unknown --emit 'sglang'"),
        ({"emit": "vllm"}, "--emit vllm needs an acceptance"),
        ({"model": MODEL, "target_params": None, "hardware": "this", "gpus": 2}, "--gpus contradicts hardware 'this'"),
        ({"model": MODEL, "target_params": None, "hardware": "this", "draft": "c.json", "alpha": 0.5}, "draft model's weights"),
    ],
)
def test_contradictory_or_impossible_options_are_planned_with(options: Mapping[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PlanOptions(**{**SMALL, **options})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--batch", "1,x"], "--batch must be whole numbers with commas"),
        (["--context", "8"], "--num-speculative-tokens 8 leaves no room for a prompt in a context of 8"),
        (["--hardware", "h1000"], "did you mean 'h100'?"),
        (["--hardware", "a100", "--dtype", "fp8"], "has no figure for fp8"),
        (["--hardware", "absent.json", "--from-log", "absent.jsonl"], "hardware file absent.json cannot be read"),
        (["--from-log", "absent.jsonl"], "cannot be read"),
        (["--json", "/absent/folder/file", "--alpha", "0.5"], "--json must name a file"),
        (["--target-params", "7"], "a number of parameters must be from"),
    ],
)
def test_a_mistake_on_the_command_line_ends_in_a_traceback(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    code, out, err = run(capsys, "--hardware", "h100", "--target-params", "8e9", *arguments)
    assert (code, out) == (2, "")
    assert says in err and err.count("\n") == 1


# ------------------------------------------------------------------------------------------------ this machine


def test_passes_between_whole_numbers_of_rows_jump() -> None:
    times = PassTimes((1, 2, 3), (1.0, 2.0, 5.0), per_read=0.01, per_score=0.001)
    seconds = seconds_of(times)
    assert seconds(1, 1, 100) == times.seconds(PassWork(1, 100))
    assert seconds(2.25, 1, 100) == pytest.approx(
        0.75 * times.seconds(PassWork(1, 100), 1) + 0.25 * times.seconds(PassWork(1, 100), 2)
    )
    assert seconds(3, 2, 50) == times.seconds(PassWork(2, 100), 1)


@pytest.mark.model
def test_this_machine_is_planned_for_without_being_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_measure, "CALIBRATION_SECONDS", 0.05)
    monkeypatch.setattr(plan_measure, "BUILT_IN_TOKENS", 12)
    # More requests than rows in a pass, of which this is no question of.
    code, out, err = run(capsys, MODEL, "--batch", "1,600", "--num-speculative-tokens", "2", "--emit", "vllm")
    assert code == 0
    # What vLLM has no word for is not said in its options.
    assert "vllm serve YOUR-MODEL" in out and "--dtype auto" in out and "the plan is of Q4_1" in out
    assert "suffix was replayed with the statistics that come with" in out
    assert "timing passes [3/3]" in err and "answering plainly [6/6]" in err
    assert "this machine" in out and "ms more for each emitted token" in out
    assert "6 built-in prompts" in out
    assert out.count(" ngram ") >= 2 and out.count(" eagle3 ") >= 2 and "statistics of drafters" in out


@pytest.mark.model
def test_what_is_shipped_is_planned_without_or_a_head_is_replayed_otherwise_than_it_drafts() -> None:
    """Of one answer: the passes of a replay are those that the engine ran."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for name in ("suffix", "eagle3"):
        config = {"method": name, "num_speculative_tokens": 2, "adaptive": False, "suffix_decoding_max_cached_requests": 0}
        llm = LLM(MODEL, device="cpu", speculative_config=config, enable_prefix_caching=False)
        output = llm.generate([llm.chat_prompt([{"role": "user", "content": "Name three rivers of Europe."}])], params)[0]
        record = Record([*output.prompt_token_ids, *output.outputs[0].token_ids], len(output.prompt_token_ids))
        options = PlanOptions(model=MODEL, num_speculative_tokens=2)
        if name == "eagle3":
            parts = DraftParts(llm.checkpoint, llm.config, SpeculativeConfig())
            long, notes = Record([1] * (llm.max_model_len + 1), 1), list[str]()
            (method,) = plan_measure._replayed_head(options, [record, long], llm, parts, print, notes)
            assert f"eagle3 was not replayed over requests of more than {llm.max_model_len} tokens: 1." in notes
            assert plan_measure._replayed_head(options, [long], llm, parts, print, notes) == []
        else:
            subject = Subject(MODEL, dims_of(llm.checkpoint.architecture, MODEL), llm.checkpoint.tokenizer, llm.checkpoint)
            method = replayed_methods(options, [record], subject, None, print, [])[1]
        assert method.name == name
        assert method.outcomes[1].tokens == output.metrics.speculation.acceptance_length > 1.05


@pytest.mark.model
def test_a_draft_model_equal_to_the_target_is_wrong_somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_measure, "CALIBRATION_SECONDS", 0.05)
    monkeypatch.setattr(plan_measure, "MEASURED_TOKENS", 16)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Name three colours.\nCount to ten.")
    result = run_plan(
        PlanOptions(MODEL, draft=MODEL, measure=str(prompts), num_speculative_tokens=3, batches=(1,)), lambda line: None, open_llm
    )
    once, twice, _ = result["acceptance"]["draft_model"]
    assert once["tokens"] == 2.0 and twice["tokens"] > 2.5
    tables = {table["method"]: table for table in result["memory"]}
    assert tables["draft_model"]["bytes_per_token"] == 2 * tables["none"]["bytes_per_token"]
    assert dict(tables["draft_model"]["lines"])["draft weights"] > 50e6
    assert result["place"]["token_seconds"] > 0
    elsewhere = run_plan(PlanOptions(MODEL, measure=str(prompts), hardware="l4", batches=(1,)), lambda line: None, open_llm)
    assert elsewhere["place"]["hardware"] == "l4"
    assert elsewhere["acceptance"]["ngram"][0]["tokens"] == result["acceptance"]["ngram"][0]["tokens"]
