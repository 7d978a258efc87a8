"""Experiments: that each verdict follows from what was measured, and what is measured is what is meant."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from bench_helpers import Told
from foredraft import claims, experiments
from foredraft.claims import EXPERIMENTS, Bench, Finding, Setting
from foredraft.experiments import ExperimentOptions, format_experiments, run_experiments
from foredraft.lanes import Race
from toy_llm import ToyLLM, toy_llm

PROMPTS = {name: [[index, index + 1, 3], [index, 7]] for index, name in enumerate(("chat", "summary", "extraction"))}


def bench_of(max_tokens: int = 64, **options: Any) -> Bench:
    return Bench(toy_llm(num_blocks=4096, **options), PROMPTS, max_tokens)


def scripted_speedups(monkeypatch: pytest.MonkeyPatch, speedups: Sequence[Sequence[float]]) -> None:
    """Each comparison runs in earnest, but is told the next of ``speedups`` (plain not among them)."""
    queue, compare = list(speedups), Bench.compare

    def scripted(bench: Bench, race: Race, batches: Any, each: Any = None) -> list[float]:
        compare(bench, race, batches[:1], each)
        return [1.0, *queue.pop(0)]

    monkeypatch.setattr(Bench, "compare", scripted)


# ------------------------------------------------------------------------------------------------ verdicts


def test_acceptance_of_the_synthetic_drafter_does_not_follow_the_formula() -> None:
    found = claims.acceptance_formula(bench_of(max_tokens=110))
    rows = found.numbers["by_acceptance"]
    assert [round(row["expected"], 2) for row in rows] == [1.94, 2.77, 4.10]
    assert found.holds
    assert all(row["measured"] == pytest.approx(row["expected"], abs=4 * row["standard_error"]) for row in rows)
    assert all(row["num_passes"] > 6 * 110 / 6 for row in rows)


def test_the_formula_holds_whatever_the_acceptance_is(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_passes = claims.whole_passes
    monkeypatch.setattr(claims, "whole_passes", lambda lane, k: [count + 1 for count in whole_passes(lane, k)])
    assert not claims.acceptance_formula(bench_of()).holds


@pytest.mark.parametrize(
    ("speedups", "holds", "best"), [([1.2, 1.5, 1.8, 1.1, 0.7], True, 4), ([1.2, 1.3, 1.4, 1.5, 1.6], False, 16)]
)
def test_saturation_is_claimed_where_the_largest_k_is_fastest(
    monkeypatch: pytest.MonkeyPatch, speedups: list[float], holds: bool, best: int
) -> None:
    scripted_speedups(monkeypatch, [speedups])
    monkeypatch.setattr(claims, "SATURATED", 1.0)  # one batch is too little to tell 3.2 from 3.3 tokens
    found = claims.large_k(bench_of(max_tokens=100))
    assert (found.holds, found.numbers["best_K"]) == (holds, best)
    tokens = found.numbers["tokens_per_pass"]
    assert 1.0 < tokens["1"] < tokens["4"] < 5.0


@pytest.mark.parametrize(
    ("speedups", "best", "holds"),
    [([1.5, 1.9, 1.6, 1.5, 1.4], "acceptance", True), ([1.5, 1.6, 1.9, 1.5, 1.4], "draft_cost", False)],
)
def test_the_lever_is_always_acceptance(monkeypatch: pytest.MonkeyPatch, speedups: list[float], best: str, holds: bool) -> None:
    scripted_speedups(monkeypatch, [speedups])
    found = claims.biggest_lever(bench_of())
    assert found.holds is holds
    assert max(found.numbers["gain"], key=found.numbers["gain"].get) == best
    assert found.numbers["gain"]["acceptance"] == pytest.approx(speedups[1] / 1.5 - 1)


@pytest.mark.parametrize(("speedups", "holds"), [([1.7, 1.5, 0.9], True), ([1.2, 1.5, 1.3], False)])
def test_a_gain_that_grows_with_the_batch_is_said_to_fade(
    monkeypatch: pytest.MonkeyPatch, speedups: list[float], holds: bool
) -> None:
    scripted_speedups(monkeypatch, [[value] for value in speedups])
    found = claims.batch_fades(bench_of(max_tokens=32))
    assert found.holds is holds and found.numbers["speedup"] == dict(zip(("1", "4", "16"), speedups, strict=True))


@pytest.mark.parametrize(("echo", "own", "holds"), [((1.5, 1.4), 1.0, True), ((1.5, 0.9), 0.8, False), ((1.5, 1.2), 1.3, False)])
def test_a_gain_without_an_echo_is_taken_for_one(
    monkeypatch: pytest.MonkeyPatch, echo: tuple[float, float], own: float, holds: bool
) -> None:
    scripted_speedups(monkeypatch, [[value] for value in (*echo, own)])
    found = claims.ngram_echo(bench_of(max_tokens=32))
    assert found.holds is holds
    # A token takes at least its place for each length of an n-gram, however compact the index is.
    assert 4 * 5 * found.numbers["indexed_tokens"] < found.numbers["index_bytes"] < 1000 * found.numbers["indexed_tokens"]


def test_different_tokens_are_called_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found = claims.same_output(bench_of())
    assert found.holds and found.numbers["greedy"]["same"] == found.numbers["greedy"]["answers"] == 9
    assert found.numbers["sampled"]["accepted_tokens"] > 0
    run = Race.run

    def spoiled(race: Race, *arguments: Any, **options: Any) -> None:
        run(race, *arguments, **options)
        race.lanes[1].seqs[0].tokens[-1] += 1

    monkeypatch.setattr(Race, "run", spoiled)
    spoilt = claims.same_output(bench_of())
    assert not spoilt.holds and spoilt.numbers["greedy"]["same"] == 6


@pytest.mark.parametrize(("five", "holds"), [(0.012, True), (0.02, False)])
def test_rows_that_cost_as_much_as_passes_are_called_free(monkeypatch: pytest.MonkeyPatch, five: float, holds: bool) -> None:
    def time(timer: Any, kinds: Sequence[Any], repeats: int) -> Mapping[Any, list[float]]:
        return {kind: [five if kind.rows == 5 else 0.01] * repeats for kind in kinds}

    monkeypatch.setattr("foredraft.passes.PassTimer.time", time)
    found = claims.verification(bench_of())
    assert found.holds is holds and found.numbers["ratio"] == pytest.approx(100 * five)


# ------------------------------------------------------------------------------------------------ measuring


def test_a_draft_that_costs_time_is_free() -> None:
    bench = bench_of(max_tokens=32)
    prompts = [[prompt] for prompt in bench.firsts]
    race = bench.race([Setting(1.0, 4, cost=0.5)], bench.answers(prompts))
    bench.compare(race, prompts)
    lane = race.lanes[1]
    assert lane.speculation.acceptance_rate == 1.0
    # TIMES says that a pass takes 10 ms, and half of that goes into each drafted token.
    assert all(step.milliseconds["draft"] >= 5.0 * step.num_drafted for step in lane.steps)
    assert sum(step.num_drafted for step in lane.steps) > 20


def test_lanes_of_a_race_err_alike_or_the_seed_does_nothing() -> None:
    accepted = []
    for seed in (0, 0, 1):
        bench = Bench(toy_llm(num_blocks=4096), PROMPTS, 64, seed=seed)
        prompts = [bench.firsts]
        race = bench.race([Setting(0.5, 4), Setting(0.5, 4)], bench.answers(prompts))
        bench.compare(race, prompts)
        accepted.append([lane.speculation.accepted_tokens for lane in race.lanes[1:]])
    assert accepted[0] == accepted[1] != accepted[2]
    assert accepted[0][0] != accepted[0][1]


# ------------------------------------------------------------------------------------------------ running them


def finding(holds: bool) -> Finding:
    return Finding("Drafts are free", "Nobody, 1999", "They take nothing.", holds, "They take 2 ms.", {"ms": 2.0})


def test_findings_are_run_in_another_order_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ToyLLM(max_model_len=4000, vocab_size=256, num_blocks=6000)
    monkeypatch.setattr(experiments, "LLM", llm.open)
    monkeypatch.setattr(experiments, "resolve_device", lambda device: "cpu")
    seen = []

    def experiment(name: str) -> Any:
        def run(bench: Bench) -> Finding:
            seen.append((name, len(bench.firsts), bench.max_tokens, bench.repeats, bench.seed))
            return finding(name == "lever")

        return run

    monkeypatch.setattr(experiments, "EXPERIMENTS", {name: experiment(name) for name in EXPERIMENTS})
    told = Told()
    chosen = ExperimentOptions("m", only=("lever", "batch"), max_tokens=40, repeats=2, seed=9)
    result = json.loads(json.dumps(run_experiments(chosen, told)))
    assert seen == [("batch", 6, 40, 2, 9), ("lever", 6, 40, 2, 9)]
    assert [(one["name"], one["verdict"]) for one in result["findings"]] == [("batch", "does not hold here"), ("lever", "holds")]
    assert told.parts == [("batch", 0, 2), ("lever", 1, 2), ("done", 2, 2)]
    assert told.lines[-1] == "lever: holds: They take 2 ms."
    assert llm.options["speculative_config"].method == "none" and llm.options["enable_prefix_caching"] is False
    text = format_experiments(result)
    assert ["Drafts", "are", "free", "does", "not", "hold", "here"] in [line.split() for line in text.splitlines()]
    assert "lever: holds\n  They take 2 ms.\n  Rule: They take nothing.  Source: Nobody, 1999." in text


def test_prompts_that_do_not_fit_are_left_out_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "LLM", ToyLLM(max_model_len=600, vocab_size=256).open)
    with pytest.raises(ValueError, match="do not fit into 600; raise max_model_len"):
        run_experiments(ExperimentOptions("m"), Told())


def test_a_batch_without_room_is_found_after_minutes_of_experiments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "LLM", ToyLLM(max_model_len=4000, vocab_size=256, num_blocks=1000).open)
    monkeypatch.setattr(experiments, "EXPERIMENTS", {"batch": lambda bench: pytest.fail("was begun")})
    with pytest.raises(ValueError, match=r"may need \d+ cache blocks, but 1000 are free; raise kv_cache_memory"):
        run_experiments(ExperimentOptions("m"), Told())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"only": ("levr",)}, "did you mean 'lever'"),
        ({"max_tokens": 31}, "at least 32"),
        ({"repeats": 0}, "at least 1"),
        ({"seed": -1}, "0"),
    ],
)
def test_a_mistake_is_found_after_the_model_is_loaded(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ExperimentOptions("m", **options)
