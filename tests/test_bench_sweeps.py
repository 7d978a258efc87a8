"""Sweeps, predictions and going on after an interruption: what a bench does beyond its table of categories."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench_helpers import Answer, Setup, Step, Told, dataset, options, prediction, steady
from bench_helpers import scripted as scripted
from foredraft.bench import run_bench
from foredraft.bench_figures import cell, cells_of, crossovers, passes_by_rows, plains_of, prediction_summary
from foredraft.bench_options import BenchOptions
from foredraft.bench_table import format_table
from foredraft.trial import Run
from foredraft.types import Logprob, SpeculationStats


def run_of(method: str = "none", speed: float = 10.0, **changed: Any) -> Run:
    """A run that decoded 100 tokens at ``speed``."""
    run = Run(
        category="a",
        prompt="x",
        method=method,
        num_speculative_tokens=0 if method == "none" else 4,
        batch=1,
        repeat=0,
        num_prompt_tokens=3,
        token_ids=[[1, 2]],
        time_to_first_token=0.5,
        decode_seconds=100 / speed,
        decode_tokens=100,
        decode_steps=100,
        ms_per_step={},
        noise=0.001,
        steps=[],
        speculation=SpeculationStats(),
    )
    return replace(run, **changed)


# ------------------------------------------------------------------------------------------------ stages


def test_a_k_or_a_batch_size_is_left_out_or_run_on_other_prompts(scripted: Setup, tmp_path: Path) -> None:
    llm = scripted(lambda prompt, method, seed: steady(10.0))
    path = dataset(tmp_path, "x", "y", "z", "w", "v", categories=("a", "b"))
    chosen = options(methods=("ngram", "auto"), k_sweep=(0, 2, 5), batch_sweep=(1, 4, 2), dataset=path)
    result = run_bench(chosen, Told())
    assert llm.warm_ups == [
        ("plain", "ngram K=4", "auto"),
        ("plain", "ngram K=2", "ngram K=5", "auto"),
        *[("plain", "ngram K=4", "auto")] * 3,
    ]
    assert [prompts for category, prompts, *_ in llm.batches if category != "all"] == [("x",), ("z",), ("v",), ("y",), ("w",)]
    mixed = [("x",), ("y",), ("z",), ("w",)]
    assert [prompts for category, prompts, *_ in llm.batches if category == "all"] == [
        ("x",),  # the first of each category
        ("y",),
        *mixed,
        *[("x", "y"), ("z", "w")],
        ("x", "y", "z", "w"),
    ]
    k_cells = {(c["method"], c["num_speculative_tokens"], c["num_runs"]) for c in result["k_sweep"]}
    assert k_cells == {("none", 0, 2), ("ngram", 2, 2), ("ngram", 5, 2), ("auto", 8, 2)}
    batch_cells = [(c["batch"], c["method"], c["num_runs"]) for c in result["batch_sweep"]]
    assert batch_cells == [(b, m, n) for b, n in ((1, 4), (2, 2), (4, 1)) for m in ("none", "ngram", "auto")]
    text = format_table(result)
    assert "K = 5" in text and "batch 4" in text and "no gain from" in text
    assert "auto: 1.00, which is 1.00 times the best fixed setting of all prompts, ngram with K = 2" in text


def test_too_few_prompts_make_a_smaller_batch(scripted: Setup, tmp_path: Path) -> None:
    llm = scripted(lambda prompt, method, seed: steady(10.0))
    run_bench(options(batch_sweep=(5,), dataset=dataset(tmp_path, "x", "y")), Told())
    assert llm.batches[-1][1] == ("x", "y", "x", "y", "x")


def test_a_prompt_beyond_the_context_stops_the_bench_or_goes_unsaid(scripted: Setup, tmp_path: Path) -> None:
    llm = scripted(lambda prompt, method, seed: steady(10.0))
    told = Told()
    result = run_bench(options(max_tokens=96, dataset=dataset(tmp_path, "x", "y" * 903)), told)
    assert {run["prompt"] for run in result["runs"]} == {"x"}
    assert "1 prompts are left out: with the answer they exceed 1000 tokens" in told.lines
    with pytest.raises(ValueError, match="none of 1 prompts and 999 tokens fit into a context of 1000"):
        run_bench(options(max_tokens=999, dataset=dataset(tmp_path, "x")), told)
    assert llm.batches[-1][1] == ("x",)


def test_a_batch_that_finds_no_room_ends_the_bench_after_minutes(scripted: Setup, tmp_path: Path) -> None:
    llm = scripted(lambda prompt, method, seed: steady(10.0))
    llm.kv.num_available = 90  # 7 blocks for each prompt of each lane
    told = Told()
    chosen = options(methods=("ngram",), k_sweep=(1, 2, 3, 4, 5, 6), batch_sweep=(1, 4, 8), dataset=dataset(tmp_path, "x", "y"))
    result = run_bench(chosen, told)
    assert [cell["batch"] for cell in result["batch_sweep"]] == [1, 1, 4, 4] and result["k_sweep"]
    assert [line for line in told.lines if "left out" in line] == [
        "batch sweep 8 is left out: 2 lanes at a time may need 112 cache blocks of 90; raise kv_cache_memory"
    ]
    llm.kv.num_available = 13
    with pytest.raises(ValueError, match="2 lanes at a time may need 14 cache blocks of 13; raise kv_cache_memory or lower"):
        run_bench(chosen, told)


def test_an_adaptive_method_gets_a_fixed_k_or_a_small_ceiling() -> None:
    chosen = options(methods=("ngram", "auto"), num_speculative_tokens=3, k_sweep=(0, 1))
    assert [(way.label, way.num_speculative_tokens, way.adaptive) for way in chosen.ways()] == [
        ("ngram K=3", 3, False),
        ("auto", 8, True),
    ]
    assert [way.label for way in chosen.swept_ways()] == ["ngram K=1", "auto"]
    assert options(methods=("auto",), k_sweep=(0, 1)).swept_ways() == []


def test_a_rule_that_changes_tokens_is_compared_token_for_token() -> None:
    with pytest.raises(ValueError, match="takes rejection_sample_method 'coupled', not 'block'"):
        BenchOptions("m", speculative_config={"rejection_sample_method": "block"})


# ------------------------------------------------------------------------------------------------ resuming


def test_what_is_finished_is_run_again_or_a_drafter_does_not_learn_of_it(scripted: Setup, tmp_path: Path) -> None:
    journal = tmp_path / "x.part"
    chosen = options(k_sweep=(2,), repeats=2, dataset=dataset(tmp_path, "x", "y"))

    def script(prompt: str, method: str, seed: int) -> Answer:
        if seed == 1 and prompt == "y":
            raise KeyboardInterrupt
        return replace(steady(10.0 if method == "none" else 20.0), predicted=prediction(1.9))

    scripted(script)
    with pytest.raises(KeyboardInterrupt):
        run_bench(chosen, Told(), journal)
    llm = scripted(lambda prompt, method, seed: steady(10.0 if method == "none" else 40.0))
    told = Told()
    result = run_bench(chosen, told, journal)
    assert llm.recalled == ["x", "y", "x"]
    assert [(prompts, repeat) for _, prompts, repeat, _ in llm.batches[:1]] == [(("y",), 1)]
    assert len(llm.warm_ups) == 2 and not any(line.startswith("[1/") for line in told.lines)
    assert result["resumed"] == 3 and "going on after 3 finished parts" in told.lines
    ratios = [run["tokens_per_s"] for run in result["runs"] if run["method"] == "ngram"][:4]
    assert ratios == pytest.approx([20, 20, 20, 40])
    predicted = [run["predicted"] for run in result["runs"] if run["method"] == "ngram"]
    assert predicted[0] == prediction(1.9) and predicted[3] is None
    other = scripted(lambda prompt, method, seed: steady(10.0))
    run_bench(replace(chosen, max_tokens=50), Told(), journal)
    assert other.recalled == []


def test_what_ran_with_other_prompts_or_files_of_the_same_name_is_taken_over(scripted: Setup, tmp_path: Path) -> None:
    journal, head = tmp_path / "x.part", tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text("{}")

    def resumed(*prompts: str) -> int:
        chosen = options(k_sweep=(), dataset=dataset(tmp_path, *prompts), speculative_config={"suffix_decoding_base": str(head)})
        scripted(lambda prompt, method, seed: steady(10.0))
        return int(run_bench(chosen, Told(), journal)["resumed"])

    assert [resumed("x", "y"), resumed("x", "y"), resumed("x", "z"), resumed("x", "z")] == [0, 2, 0, 2]
    (head / "config.json").write_text("{ }")
    assert resumed("x", "z") == 0


def test_a_run_is_not_the_same_after_it_was_written_and_read() -> None:
    stats = SpeculationStats()
    stats.count(3, 2, 3)
    run = run_of("ngram", steps=[(4, 3, 2, 3, 1.5)], speculation=stats, predicted=prediction(1.5), noise=None)
    assert Run.from_dict(json.loads(json.dumps(run.to_dict()))) == run


# ------------------------------------------------------------------------------------------------ predictions


@pytest.mark.parametrize(
    ("measured", "predicted", "even", "good", "right"),
    [
        (1.50, 1.40, False, True, True),
        (1.50, 1.20, False, False, True),
        (1.50, 0.99, False, False, False),
        (0.90, 0.95, False, True, True),
        (0.90, 1.01, False, False, False),
        (0.95, 1.01, False, True, False),
        (1.005, 0.99, True, True, True),
        (0.995, 1.09, True, True, True),
        (1.005, 1.20, True, False, False),
    ],
)
def test_a_prediction_is_judged_otherwise_than_the_rule_says(
    measured: float, predicted: float, even: bool, good: bool, right: bool
) -> None:
    runs = [run_of(), run_of("ngram", 10.0 * measured, predicted=prediction(predicted))]
    found = cell("a", runs[1:], plains_of(runs))["predicted"]
    assert found["error"] == pytest.approx(predicted / measured - 1)
    assert (found["is_even"], found["is_good"], found["sign_is_right"]) == (even, good, right)


def test_noise_of_the_plain_runs_does_not_widen_what_counts_as_even() -> None:
    runs = [run_of(noise=0.05), run_of("ngram", 10.5, predicted=prediction(1.0))]
    found = cell("a", runs[1:], plains_of(runs))
    assert found["noise"] == pytest.approx(1.645 * 2**0.5 * 0.05)
    assert found["predicted"]["is_even"]
    four = [replace(run, prompt=f"{i}") for i in range(4) for run in runs]
    assert cell("a", [run for run in four if run.method == "ngram"], plains_of(four))["noise"] == pytest.approx(found["noise"] / 2)


def test_the_summary_counts_cells_without_a_prediction_or_miscounts() -> None:
    runs = [run_of(), run_of("ngram", 20.0, predicted=prediction(1.9)), run_of("suffix", 20.0, predicted=prediction(0.9))]
    found = prediction_summary(cells_of(runs))
    assert found is not None
    assert (found["num_cells"], found["num_even"]) == (2, 0)
    assert (found["share_within_10_percent"], found["share_of_right_signs"]) == (0.5, 0.5)
    assert found["median_error"] == pytest.approx((0.05 + 0.55) / 2) and found["worst_error"] == pytest.approx(-0.55)
    assert prediction_summary(cells_of(runs[:1])) is None


def test_a_bench_shows_no_predictions(scripted: Setup, tmp_path: Path) -> None:
    scripted(lambda prompt, method, seed: replace(steady(10.0), predicted=None if method == "none" else prediction(1.5)))
    told = Told()
    result = run_bench(options(methods=("ngram",), k_sweep=(1,), dataset=dataset(tmp_path, "x")), told)
    assert result["prediction"]["num_cells"] == 2 and result["prediction"]["share_within_10_percent"] == 0.0
    text = format_table(result)
    assert "1.00 (1.50)" in text
    assert "0% of 2 cells within 10 %" in text and "2 were measured within noise of 1.00" in text
    assert told.lines[-1].endswith("ngram K=1 10.0 tok/s (1.00x, predicted 1.50)")


# ------------------------------------------------------------------------------------------------ figures of sweeps


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [
        ([1.5, 1.25, 0.75, 0.5], 2 * 2**0.5),
        ([1.5, 1.4, 1.3, 1.2], None),
        ([0.9, 0.8, 0.7, 0.6], 1.0),
        ([1.5, 0.9, 1.1, 0.9], 4 * 2**0.5),
        ([0.9, 0.9, 0.9, 1.1], None),
    ],
)
def test_the_crossover_is_somewhere_else(speedups: list[float], expected: float | None) -> None:
    runs = []
    for batch, speedup in zip((1, 2, 4, 8), speedups, strict=True):
        plain = run_of(prompt=f"{batch}", batch=batch)
        runs += [plain, replace(plain, method="ngram", num_speculative_tokens=4, decode_seconds=10 / speedup)]
    runs = [replace(run, predicted=prediction(2.0)) if run.method == "ngram" else run for run in runs]
    found = crossovers(cells_of(runs))["ngram"]
    assert found["measured"] == (None if expected is None else pytest.approx(expected, rel=1e-6))
    assert found["predicted"] is None


def test_passes_of_other_rows_are_mixed_or_few_are_taken_for_many() -> None:
    steps = [(1, 0, 0, 1, 2.0)] * 5 + [(5, 4, 0, 1, 9.0)] * 4
    assert passes_by_rows([run_of(steps=steps)]) == {"1": {"lower": 2.0, "median": 2.0, "upper": 2.0}}
    assert passes_by_rows([run_of(steps=steps)] * 2)["5"]["median"] == 9.0


def test_a_batch_that_differs_is_not_told(scripted: Setup, tmp_path: Path) -> None:
    def script(prompt: str, method: str, seed: int) -> Answer:
        return Answer((Step(1), Step(1)), (1, 2) if method == "none" else (1, 3))

    scripted(script, {2: Logprob(-0.5, 1), 3: Logprob(-0.625, 2)})
    result = run_bench(options(methods=("ngram",), k_sweep=(2,), batch_sweep=(2,), dataset=dataset(tmp_path, "x")), Told())
    text = format_table(result)
    assert "ngram (K = 2, batch 1) differs from plain in 1 of 1 runs" in text
    assert "ngram (K = 4, batch 2) differs from plain in 1 of 1 runs" in text


def test_the_example_is_of_a_request_that_was_not_adaptive_or_never_changed(scripted: Setup, tmp_path: Path) -> None:
    def script(prompt: str, method: str, seed: int) -> Answer:
        drafted = [0, 3, 0, 5] if prompt == "y" else [2, 2, 2, 2]
        return Answer((Step(1), *(Step(1, drafted=count) for count in drafted)))

    scripted(script)
    result = run_bench(options(methods=("ngram", "auto"), dataset=dataset(tmp_path, "x", "y")), Told())
    assert (result["example"]["prompt"], [step[0] for step in result["example"]["steps"]]) == ("y", [0, 3, 0, 5])
    assert run_bench(options(methods=("ngram",), dataset=dataset(tmp_path, "x")), Told())["example"] is None
