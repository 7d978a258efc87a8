from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench_helpers import Answer, Setup, Step, Told, dataset, options, prediction, steady
from bench_helpers import cell_of as cell_of
from bench_helpers import scripted as scripted
from foredraft import machine
from foredraft.bench import bytes_per_token, run_bench
from foredraft.bench_figures import quartiles
from foredraft.bench_options import BenchOptions
from foredraft.bench_table import format_table
from foredraft.types import ConfigError, ForedraftError, Logprob
from foredraft.workloads import WORKLOADS

# ------------------------------------------------------------------------------------------------ figures


def test_the_speed_up_is_the_median_of_paired_ratios_and_not_the_ratio_of_medians(scripted: Setup, tmp_path: Path) -> None:
    speeds = {"x": {"none": 10.0, "ngram": 30.0}, "y": {"none": 20.0, "ngram": 10.0}, "z": {"none": 40.0, "ngram": 44.0}}
    scripted(lambda prompt, method, seed: steady(speeds[prompt][method]))
    result = run_bench(options(methods=("ngram",), dataset=dataset(tmp_path, "x", "y", "z")), Told())
    ngram = cell_of(result, "ngram")
    assert ngram["speedup"] == pytest.approx({"lower": 0.8, "median": 1.1, "upper": 2.05})
    assert ngram["tokens_per_s"]["median"] == pytest.approx(30)
    assert cell_of(result, "none")["speedup"] == {"lower": 1.0, "median": 1.0, "upper": 1.0}
    assert result["ceiling"] == pytest.approx({"tokens_per_s": 20, "plain_tokens_per_s": 20, "plain_percent": 100})


def test_tokens_that_came_with_the_prompt_do_not_count_as_decoded(scripted: Setup, tmp_path: Path) -> None:
    plain = Answer((Step(0, 700.0), Step(1, 900.0), *[Step(1, 100.0)] * 5))
    drafting = Answer((Step(0, 700.0), Step(3, 900.0, drafted=4, accepted=2), *[Step(1, 100.0)] * 3))
    scripted(lambda prompt, method, seed: plain if method == "none" else drafting)
    result = run_bench(options(methods=("ngram",), dataset=dataset(tmp_path, "x")), Told())
    run = result["runs"][1]
    assert (run["decode_tokens"], run["decode_steps"]) == (3, 3)
    assert run["decode_seconds"] == pytest.approx(0.3) and run["time_to_first_token"] == pytest.approx(1.6)
    assert cell_of(result, "ngram")["speedup"]["median"] == pytest.approx(1.0)


def test_acceptance_is_summed_over_passes_before_it_is_divided(scripted: Setup, tmp_path: Path) -> None:
    answers = {
        "x": Answer((Step(1), Step(4, drafted=3, accepted=3), Step(1, drafted=2, accepted=0))),
        "y": Answer((Step(1), Step(2, drafted=1, accepted=1), Step(3, drafted=4, accepted=2))),
    }
    scripted(lambda prompt, method, seed: answers[prompt])
    result = run_bench(options(methods=("suffix",), dataset=dataset(tmp_path, "x", "y")), Told())
    cell = cell_of(result, "suffix")
    assert cell["acceptance_length"] == pytest.approx(12 / 6)
    assert cell["acceptance_rate"] == pytest.approx(6 / 10)
    assert cell["acceptance_per_position"] == pytest.approx([3 / 4, 2 / 3, 1 / 2, 0 / 1])


def test_milliseconds_leave_out_the_prompt_and_overhead_leaves_out_draft_and_pass(scripted: Setup, tmp_path: Path) -> None:
    def script(prompt: str, method: str, seed: int) -> Answer:
        scale = {"x": 1.0, "y": 2.0, "z": 9.0}[prompt]
        steps = [{"schedule": 1, "draft": 2, "pass": 50, "verify": 4, "rest": 8}, {"schedule": 3, "pass": 70, "rest": 2}]
        return Answer((Step(1, 5000.0), *(Step(1, {name: scale * ms for name, ms in step.items()}) for step in steps)))

    scripted(script)
    result = run_bench(options(methods=("ngram",), dataset=dataset(tmp_path, "x", "y", "z")), Told())
    cell = cell_of(result, "ngram")
    assert cell["ms_per_step"] == {"schedule": 4, "draft": 2, "pass": 120, "verify": 4, "rest": 10}
    assert cell["overhead_ms_per_step"] == 18


def test_quartiles_of_few_values() -> None:
    assert quartiles([]) is None
    assert quartiles([3.0]) == {"lower": 3.0, "median": 3.0, "upper": 3.0}
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == {"lower": 2.0, "median": 3.0, "upper": 4.0}


def test_an_answer_in_one_step_gives_no_speed_instead_of_a_division_by_zero(scripted: Setup, tmp_path: Path) -> None:
    scripted(lambda prompt, method, seed: Answer((Step(2, 900.0, drafted=1, accepted=1),)))
    told = Told()
    result = run_bench(options(methods=("ngram",), dataset=dataset(tmp_path, "x")), told)
    cell = cell_of(result, "ngram")
    assert (cell["tokens_per_s"], cell["speedup"], cell["ms_per_step"], cell["overhead_ms_per_step"]) == (None, None, {}, None)
    assert result["ceiling"]["plain_percent"] is None
    assert told.lines[-1] == "[1/1] a/x: plain all at once, ngram K=4 all at once"
    assert ["a", "ngram", "-", "2.00", "1.00", "1.00", "yes"] in [line.split() for line in format_table(result).splitlines()]


def test_the_overall_row_pools_the_categories(scripted: Setup, tmp_path: Path) -> None:
    speeds = {"x": 10.0, "y": 20.0, "z": 40.0}
    scripted(lambda prompt, method, seed: steady(speeds[prompt] if method == "none" else 20.0))
    path = dataset(tmp_path, "x", "y", "z", categories=("a", "b", "b"))
    result = run_bench(options(methods=("ngram",), dataset=path), Told())
    plain, ngram = result["overall"]
    assert (plain["category"], plain["method"], plain["num_runs"]) == ("all", "none", 3)
    assert ngram["speedup"]["median"] == pytest.approx(1.0)
    assert cell_of(result, "ngram", "b")["speedup"]["median"] == pytest.approx(0.75)


def test_the_embedding_of_an_untied_model_is_not_read_for_every_token() -> None:
    shapes = {"embed": (50, 4), "norm": (4,), "lm_head": (50, 4), "layers.0.o": (4, 149)}
    untied = SimpleNamespace(tie_embeddings=False, weight_shapes=lambda: shapes)
    assert bytes_per_token(untied, 4000) == 3200  # type: ignore[arg-type]
    assert bytes_per_token(SimpleNamespace(tie_embeddings=True), 4000) == 4000  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ order


def test_each_batch_is_begun_by_the_same_way_or_lanes_are_not_kept(scripted: Setup, tmp_path: Path) -> None:
    llm = scripted(lambda prompt, method, seed: steady(10.0))
    told = Told()
    run_bench(options(repeats=2, dataset=dataset(tmp_path, "x", "y")), told)
    assert llm.warm_ups == [("plain", "ngram K=4", "suffix K=4")]
    assert llm.batches == [("a", ("x",), 0, 0), ("a", ("y",), 0, 1), ("a", ("x",), 1, 1), ("a", ("y",), 1, 2)]
    assert told.parts[0] == ("categories: a/x", 0, 4) and told.parts[-1] == ("done", 4, 4)


def test_pairs_share_a_seed_and_repeats_do_not(scripted: Setup, tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def script(prompt: str, method: str, seed: int) -> Answer:
        seen.append((method, seed))
        return steady(10.0)

    scripted(script)
    run_bench(options(methods=("ngram",), repeats=2, temperature=0.7, seed=5, dataset=dataset(tmp_path, "x")), Told())
    assert seen == [("none", 5), ("ngram", 5), ("none", 6), ("ngram", 6)]


def test_the_engine_runs_without_a_prefix_cache_and_with_the_given_options(scripted: Setup, tmp_path: Path) -> None:
    llm = scripted(lambda prompt, method, seed: steady(10.0))
    chosen = options(device="cpu", threads=1, num_speculative_tokens=7, dataset=dataset(tmp_path, "x"))
    run_bench(chosen, Told())
    assert llm.options["enable_prefix_caching"] is False
    assert (llm.options["device"], llm.options["threads"]) == ("cpu", 1)
    assert (llm.options["speculative_config"].method, llm.options["speculative_config"].num_speculative_tokens) == ("none", 7)


def test_a_draft_model_is_loaded_with_the_engine() -> None:
    config = options(methods=("ngram", "draft_model"), speculative_config={"model": "small"}).engine_speculation()
    assert (config.method, config.model) == ("draft_model", "small")


def test_limit_and_categories_choose_among_the_prompts(scripted: Setup) -> None:
    llm = scripted(lambda prompt, method, seed: steady(10.0))
    result = run_bench(options(methods=(), categories=("maths", "chat"), limit=2), Told())
    expected = [w.name for w in WORKLOADS if w.category == "chat"][:2] + [w.name for w in WORKLOADS if w.category == "maths"][:2]
    assert [run["prompt"] for run in result["runs"]] == expected
    assert len(llm.batches) == 4
    assert [cell["category"] for cell in result["cells"]] == ["chat", "maths"]


# ------------------------------------------------------------------------------------------------ divergence


def diverging(prompt: str, method: str, seed: int) -> Answer:
    tokens = (5, 6, 8) if method == "ngram" and prompt == "y" else (5, 6, 7)
    return Answer((Step(1), Step(1), Step(1)), tokens)


LOGPROBS = {7: Logprob(-0.5, 1), 8: Logprob(-0.625, 2)}


def test_a_divergence_is_reported_with_its_place_tokens_and_margin(scripted: Setup, tmp_path: Path) -> None:
    llm = scripted(diverging, LOGPROBS)
    result = run_bench(options(dataset=dataset(tmp_path, "x", "y", "z")), Told())
    cell = cell_of(result, "ngram")
    assert (cell["identical"], cell["num_different"]) == (False, 1)
    assert cell["first_divergence"] == {
        "category": "a",
        "prompt": "y",
        "repeat": 0,
        "position": 2,
        "plain_token": 7,
        "token": 8,
        "plain_token_text": "<7>",
        "token_text": "<8>",
        "margin": 0.125,
    }
    assert result["overall"][1]["first_divergence"] == cell["first_divergence"]
    assert cell_of(result, "suffix")["identical"] and cell_of(result, "suffix")["first_divergence"] is None
    assert [(params.max_tokens, params.logprobs, params.speculative) for params in llm.explained] == [(3, 2, {"method": "none"})]
    line = "ngram differs from plain in a/y at token 2: '<8>' instead of '<7>' (top-2 logit margin 0.125)"
    assert line in format_table(result).splitlines()


def test_no_extra_request_is_made_when_all_answers_agree(scripted: Setup, tmp_path: Path) -> None:
    llm = scripted(lambda prompt, method, seed: steady(10.0))
    result = run_bench(options(dataset=dataset(tmp_path, "x")), Told())
    assert llm.explained == [] and all(cell["identical"] for cell in result["cells"])
    assert "differs" not in format_table(result)


def test_a_margin_is_not_claimed_when_plain_decoding_does_not_repeat_itself(scripted: Setup, tmp_path: Path) -> None:
    scripted(diverging, LOGPROBS, is_repeatable=False)
    result = run_bench(options(methods=("ngram",), dataset=dataset(tmp_path, "y")), Told())
    assert cell_of(result, "ngram")["first_divergence"]["margin"] is None
    assert "margin not known" in format_table(result)


def test_an_answer_that_ends_early_diverges_at_its_end(scripted: Setup, tmp_path: Path) -> None:
    scripted(lambda prompt, method, seed: Answer((Step(1),) * (2 if method == "ngram" else 3)), LOGPROBS)
    result = run_bench(options(methods=("ngram",), dataset=dataset(tmp_path, "x")), Told())
    found = cell_of(result, "ngram")["first_divergence"]
    assert (found["position"], found["plain_token"], found["token"], found["token_text"]) == (2, 2, None, None)
    format_table(result)


# ------------------------------------------------------------------------------------------------ output


def test_the_table_is_aligned_and_says_what_was_measured(scripted: Setup, tmp_path: Path) -> None:
    def script(prompt: str, method: str, seed: int) -> Answer:
        if method == "none":
            return Answer((Step(1, 5000.0), *[Step(1, 100.0)] * 4))
        steps = [Step(2, {"pass": 119.0, "rest": 1.0}, drafted=2, accepted=1)] * 2
        return Answer((Step(1, 5000.0), *steps), predicted=prediction(1.75))

    scripted(script)
    path = dataset(tmp_path, "x", "y", categories=("short", "a longer name"))
    result = run_bench(options(methods=("ngram",), device="cpu", dataset=path), Told())
    result["machine"] |= {"cpu": "A CPU", "cores": 2, "memory_bytes": 25e9, "gpu": None, "torch": "9", "threads": 2, "load": 0.5}
    assert format_table(result).split("\n\n")[:3] == [
        "machine:   A CPU, 2 cores, 25.0 GB; torch 9, 2 threads; load 0.5\n"
        "model:     m (Q4_1), float32 on cpu, exactness: numeric\n"
        "bandwidth: 2.0 GB/s read at best, 1.5 in the median\n"
        "ceiling:   100 MB of weights a token allow 20.0 plain tok/s; plain reaches 50 %",
        "category       method  tok/s  speed-up  quartiles  predicted  length  rate  per position  same output\n"
        "-----------------------------------------------------------------------------------------------------\n"
        "short          plain    10.0                                    1.00\n"
        "short          ngram    16.7     1.67x  1.67-1.67      1.75x    1.67  0.50     1.00 0.00          yes\n"
        "a longer name  plain    10.0                                    1.00\n"
        "a longer name  ngram    16.7     1.67x  1.67-1.67      1.75x    1.67  0.50     1.00 0.00          yes\n"
        "all            plain    10.0                                    1.00\n"
        "all            ngram    16.7     1.67x  1.67-1.67      1.75x    1.67  0.50     1.00 0.00          yes",
        "ms per step  schedule  draft     pass  verify   rest  overhead\n"
        "--------------------------------------------------------------\n"
        "plain           0.000  0.000  100.000   0.000  0.000     0.000\n"
        "ngram           0.000  0.000  119.000   0.000  1.000     1.000",
    ]


def test_the_result_is_plain_json_and_progress_is_reported(scripted: Setup, tmp_path: Path) -> None:
    scripted(lambda prompt, method, seed: steady(10.0 if method == "none" else 15.0))
    told = Told()
    chosen = options(methods=("ngram",), speculative_config={"prompt_lookup_max": 3}, dataset=dataset(tmp_path, "x"))
    result = run_bench(chosen, told)
    assert format_table(json.loads(json.dumps(result, allow_nan=False))) == format_table(result)
    assert result["options"]["speculative_config"] == {"prompt_lookup_max": 3}
    assert told.lines[0] == "loading m" and told.lines[-1] == "[1/1] a/x: plain 10.0 tok/s, ngram K=4 15.0 tok/s (1.50x)"


# ------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"methods": ("ngrm",)}, "unknown speculative method 'ngrm'; did you mean 'ngram'"),
        ({"methods": ("eagle",), "speculative_config": {"shipped": False}}, "must have a model"),
        ({"methods": ("draft_model",), "speculative_config": {"shipped": False}}, "must have a model"),
        ({"methods": ("ngram",), "speculative_config": {"model": "small"}}, "takes no model"),
        ({"methods": (), "speculative_config": {"model": "small"}}, "takes no model"),
        ({"speculative_config": {"method": "ngram"}}, "must not hold 'method'; use the bench's own option methods"),
        ({"speculative_config": {"num_speculative_tokens": 2}}, "must not hold 'num_speculative_tokens'"),
        ({"speculative_config": {"prompt_lokup_max": 2}}, "did you mean 'prompt_lookup_max'"),
        ({"categories": ("math",)}, "unknown category 'math'; did you mean 'maths'"),
        ({"categories": ()}, "at least one category"),
        ({"repeats": 0}, "repeats must be a whole number of at least 1, not 0"),
        ({"max_tokens": 1}, "max_tokens must be a whole number of at least 2"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be a whole number of at least 1"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens must be from 0 to 64"),
        ({"limit": 0}, "limit must be"),
        ({"seed": None}, "seed must be"),
        ({"seed": -1}, "seed must be"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"threads": 0}, "threads must be"),
    ],
)
def test_a_bad_option_is_refused_before_a_model_is_loaded(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BenchOptions("no-such-model", **options)


def test_a_category_that_the_data_set_lacks_is_refused(scripted: Setup, tmp_path: Path) -> None:
    scripted(lambda prompt, method, seed: steady(10.0))
    chosen = options(categories=("writting",), dataset=dataset(tmp_path, "x", categories=("writing",)))
    with pytest.raises(ForedraftError, match="did you mean 'writing'"):
        run_bench(chosen, Told())


# ------------------------------------------------------------------------------------------------ the machine


def test_bandwidth_leaves_out_the_first_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_buffer_bytes", lambda: 4000)
    times = iter([0.0, 0.001, 1.0, 1.5, 2.0, 2.25, 3.0, 4.0])
    found = machine.measure_read_bandwidth("cpu", repeats=3, clock=lambda: next(times))
    assert found == {"best": 16_000, "median": 8000, "buffer_bytes": 4000, "repeats": 3}


def test_the_bandwidth_buffer_is_never_small_enough_for_a_cache() -> None:
    assert 2**28 <= machine._buffer_bytes() <= 2**30


def test_the_machine_is_described_in_plain_data() -> None:
    found = json.loads(json.dumps(machine.describe_machine()))
    assert found["cpu"] and found["cores"] >= 1 and found["memory_bytes"] > 0 and found["threads"] >= 1
    assert found["planning"] in ("source", "compiled")


@pytest.mark.model
def test_a_real_model_gives_a_whole_result() -> None:
    chosen = BenchOptions(
        "smollm2-135m",
        k_sweep=(2,),
        batch_sweep=(2,),
        methods=("ngram",),
        categories=("translation",),
        limit=1,
        max_tokens=8,
        device="cpu",
        max_model_len=512,
    )
    result = run_bench(chosen, Told())
    plain, ngram = result["cells"]
    assert plain["acceptance_length"] == 1.0 and ngram["acceptance_length"] >= 1.0
    assert all(0 < cell["tokens_per_s"]["median"] < 10_000 for cell in (plain, ngram))
    assert ngram["identical"] or ngram["first_divergence"]["margin"] < 1e-2
    assert result["model"]["prompts"] == "chat" and result["ceiling"]["plain_percent"] > 0
    run = result["runs"][0]
    in_steps = sum(run["ms_per_step"].values()) * run["decode_steps"] / 1e3
    assert 0.5 * run["decode_seconds"] < in_steps < run["decode_seconds"]
    json.dumps(result, allow_nan=False)
    assert "translation  ngram" in format_table(result)
