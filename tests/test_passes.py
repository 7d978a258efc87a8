from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from foredraft import passes, report
from foredraft.architecture import LayerKind, Rope
from foredraft.passes import (
    BATCH_SIZE,
    PROMPT_EVERY,
    PROMPT_TOKENS,
    Kind,
    PassOptions,
    PassTimer,
    batched,
    compute_ceiling,
    context_bytes,
    format_table,
    num_parameters,
    prompt,
    run_passes,
    verifying,
)
from foredraft.target import ModelTarget
from foredraft.types import CapacityError, ConfigError, PassOutput, Rows
from hf_weights import VOCAB_SIZE, case

Cost = Callable[["list[Rows]", int], float]


@dataclass
class FakeTarget:
    """A target that computes nothing: ``cost`` of a batch and of the number of passes so far is how far its clock moves on."""

    cost: Cost = lambda batch, index: 0.001
    vocab_size: int = 50
    max_model_len: int = 4096
    exactness: str = "bitwise"
    precision: str = "Q4_1"
    weight_bytes: int = 20_000_000
    threads: int = 2
    now: float = 0.0
    seen: list[list[Rows]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def forward(self, batch: list[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        self.now += self.cost(batch, len(self.seen))
        self.seen.append(batch)
        return PassOutput([np.zeros((rows.num_logits, self.vocab_size), np.float32) for rows in batch])


def timer_of(target: FakeTarget, num_blocks: int = 1000, block_size: int = 16) -> PassTimer:
    return PassTimer(target, num_blocks, block_size, target.clock)


def kind_of(batch: list[Rows]) -> Kind:
    return Kind(len(batch), len(batch[0].tokens), batch[0].start, batch[0].num_logits)


def linear(batch: list[Rows], index: int = 0) -> float:
    """10 ms, 1 ms for each row after the first, and 1 us for each token of the context."""
    num_rows = sum(len(rows.tokens) for rows in batch)
    return 0.009 + 0.001 * num_rows + 1e-6 * batch[0].start


# ------------------------------------------------------------------------------------------------ timing


def test_each_time_goes_to_its_own_kind_whatever_the_order_of_a_round() -> None:
    kinds = [verifying(1, 64), verifying(5, 64), verifying(5, 1024), batched(8, 64), prompt(512)]
    seconds = timer_of(FakeTarget(linear)).time(kinds, 7)
    expected = [0.010064, 0.014064, 0.015024, 0.017064, 0.521]
    for kind, value in zip(kinds, expected, strict=True):
        assert seconds[kind] == pytest.approx([value] * 7), kind


def test_a_drift_of_the_machine_changes_no_ratio() -> None:
    target = FakeTarget(lambda batch, index: linear(batch) * (1 + index / 100))
    kinds = [verifying(rows, 64) for rows in (1, 2, 3, 4, 5)]
    seconds = timer_of(target).time(kinds, 25)
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    assert medians[kinds[4]] / medians[kinds[0]] == pytest.approx(0.014064 / 0.010064, rel=0.02)


def test_every_round_has_each_kind_once_and_no_kind_is_always_first() -> None:
    target, kinds = FakeTarget(), [verifying(1, 4), verifying(2, 4), batched(3, 4)]
    timer_of(target).time(kinds, 6)
    timed = [kind_of(batch) for batch in target.seen[-18:]]
    rounds = [timed[i : i + 3] for i in range(0, 18, 3)]
    assert all(sorted(some) == sorted(kinds) for some in rounds)
    assert [some[0] for some in rounds] == kinds * 2


def test_a_slow_first_pass_of_a_kind_counts_as_timed() -> None:
    met: set[Kind] = set()

    def cost(batch: list[Rows], index: int) -> float:
        is_new = kind_of(batch) not in met
        met.add(kind_of(batch))
        return 1.0 if is_new else 0.001

    seconds = timer_of(FakeTarget(cost)).time([verifying(1, 4), batched(2, 4)], 3)
    assert all(value == pytest.approx(0.001) for values in seconds.values() for value in values)


def test_a_costly_kind_is_timed_in_some_rounds_only() -> None:
    seconds = timer_of(FakeTarget()).time([verifying(1, 4), prompt(40)], 11, {prompt(40): 5})
    assert (len(seconds[verifying(1, 4)]), len(seconds[prompt(40)])) == (11, 3)


def test_every_row_of_a_verification_has_logits_and_a_prompt_has_one() -> None:
    assert [kind.num_logits for kind in (verifying(5, 64), batched(8, 64), prompt(512))] == [5, 1, 1]


def test_passes_use_tokens_and_blocks_that_exist_and_sequences_share_none() -> None:
    target = FakeTarget(vocab_size=3)
    timer_of(target, num_blocks=40, block_size=4).time([verifying(5, 64), batched(8, 16), prompt(70)], 2)
    for batch in target.seen:
        blocks = [block for rows in batch for block in rows.block_table]
        assert len(set(blocks)) == len(blocks) and min(blocks) >= 0 and max(blocks) < 40
        for rows in batch:
            assert set(rows.tokens) <= {0, 1, 2}
            assert len(rows.block_table) * 4 >= rows.start + len(rows.tokens)


def test_the_cache_is_filled_before_anything_is_timed() -> None:
    target = FakeTarget()
    timer_of(target).time([verifying(5, 1024), prompt(512)], 1)
    filled = [(batch[0].start, len(batch[0].tokens)) for batch in target.seen[:3]]
    assert filled == [(0, 512), (512, 512), (1024, 5)]


@pytest.mark.parametrize(
    ("kind", "fits"),
    [
        (verifying(32, 96), True),
        (verifying(33, 96), False),
        (batched(4, 63), True),
        (batched(4, 64), False),
        (prompt(128), True),
        (prompt(129), False),
    ],
)
def test_what_is_beyond_the_context_or_the_cache_does_not_fit(kind: Kind, fits: bool) -> None:
    assert timer_of(FakeTarget(max_model_len=128), num_blocks=16, block_size=16).fits(kind) is fits


# ------------------------------------------------------------------------------------------------ figures

TINY = replace(case("llama").architecture, tie_embeddings=True)


def test_a_layer_with_a_window_reads_no_more_than_the_window() -> None:
    rope = Rope(10_000.0)
    layers = (LayerKind(rope, 512), LayerKind(rope, None))
    architecture = SimpleNamespace(layers=layers, num_layers=2)
    found = [context_bytes(architecture, 1000, context) for context in (64, 1024)]  # type: ignore[arg-type]
    assert found == [64_000, (512 + 1024) * 500]


def test_an_embedding_counts_as_arithmetic_only_when_it_is_the_output_head() -> None:
    shapes = {"embed": (10, 4), "norm": (4,), "lm_head": (10, 4), "layers.0.o": (4, 4)}
    untied = SimpleNamespace(tie_embeddings=False, weight_shapes=lambda: shapes)
    assert num_parameters(untied) == 56  # type: ignore[arg-type]
    tied = SimpleNamespace(tie_embeddings=True, weight_shapes=lambda: {"embed": (10, 4), "layers.0.o": (4, 4)})
    assert num_parameters(tied) == 56  # type: ignore[arg-type]


def test_the_compute_ceiling_is_the_slope_and_not_the_mean() -> None:
    found = compute_ceiling({"64": {"1": 10.0, "16": 20.0, "32": 28.0}, "1024": {"1": 11.0, "16": 21.0}}, 1_000_000)
    assert found == {"rows": [16, 32], "ms_per_row": {"64": 0.5}, "operations_per_s": pytest.approx(4e9)}
    assert compute_ceiling({"64": {"1": 10.0}}, 1) is None
    flat = compute_ceiling({"64": {"16": 10.0, "32": 10.0}}, 1)
    assert flat is not None and flat["operations_per_s"] is None


# ------------------------------------------------------------------------------------------------ the whole run

Setup = Callable[..., FakeTarget]


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    """Put a fake target into ``run_passes``; the read bandwidth is 2 GB/s at best, measured before and after."""

    def setup(max_model_len: int = 4096, cost: Cost = linear, bandwidths: tuple[float, float] = (1.9e9, 2e9)) -> FakeTarget:
        target = FakeTarget(cost, max_model_len=max_model_len)
        llm = SimpleNamespace(
            target=target,
            kv=SimpleNamespace(num_blocks=1000, block_size=16),
            checkpoint=SimpleNamespace(architecture=TINY, weights=case("llama").weights, quantization="Q4_1"),
            describe=lambda: ["a fake", "no more"],
        )

        speeds = iter(bandwidths)

        def measure(device: str, *, num_bytes: int, threads: int) -> dict[str, Any]:
            assert threads == 2
            return {"best": next(speeds), "median": 1.5e9, "buffer_bytes": num_bytes, "repeats": 3}

        monkeypatch.setattr(passes, "LLM", lambda model, **options: llm)
        monkeypatch.setattr(passes, "measure_read_bandwidth", measure)
        return target

    yield setup


def run(target: FakeTarget, **options: Any) -> dict[str, Any]:
    return run_passes(PassOptions("m", device="cpu", dtype="float32", **options), lambda line: None, target.clock)


def test_the_result_has_every_figure(faked: Setup) -> None:
    result = run(faked(), rows=(1, 5, 16, 32), repeats=6)
    assert result["passes"]["64"] == pytest.approx({"1": 10.064, "5": 14.064, "16": 25.064, "32": 41.064})
    assert result["passes"]["1024"]["5"] == pytest.approx(15.024)
    assert result["ratios"]["64"]["5"] == pytest.approx(14.064 / 10.064)
    assert result["quartiles"]["64"]["1"] == pytest.approx({"lower": 10.064, "median": 10.064, "upper": 10.064})
    bytes_of_token = TINY.kv_bytes_per_token(4)
    assert result["floor"] == pytest.approx({str(c): 1e3 * (20e6 + c * bytes_of_token) / 2e9 for c in (64, 1024)})
    assert result["compute"]["ms_per_row"] == pytest.approx({"64": 1.0, "1024": 1.0})
    assert result["prefill"]["tokens_per_s"] == pytest.approx(512 / 0.521)
    assert result["batch"]["tokens_per_s"] == pytest.approx(8 / 0.017064)
    assert result["batch"]["speedup"] == pytest.approx(8 * 10.064 / 17.064)
    assert (result["exactness"], result["precision"], result["threads"]) == ("bitwise", "Q4_1", 2)
    assert format_table(json.loads(json.dumps(result, allow_nan=False))) == format_table(result)


def test_a_prompt_is_read_in_every_fifth_round_only(faked: Setup) -> None:
    target = faked()
    run(target, rows=(1,), contexts=(64,), repeats=PROMPT_EVERY + 1)
    kinds = [kind_of(batch) for batch in target.seen]
    # The cache is filled and each kind is warmed up once before.
    assert kinds.count(prompt(PROMPT_TOKENS)) == 2 + 2
    assert kinds.count(batched(BATCH_SIZE, 64)) == 1 + PROMPT_EVERY + 1


def test_what_the_model_has_no_room_for_is_left_out(faked: Setup) -> None:
    result = run(faked(max_model_len=80), repeats=1)
    assert list(result["passes"]) == ["64"]
    assert list(result["passes"]["64"]) == ["1", "2", "3", "4", "5", "6", "8", "12", "16"]
    assert result["compute"] is None and result["prefill"] is None and result["batch"]["num_seqs"] == 8
    text = format_table(result)
    assert "compute:" not in text and "prefill:" not in text


def test_contexts_with_different_rows_keep_the_table_whole(faked: Setup) -> None:
    result = run(faked(max_model_len=1030), repeats=1)
    assert list(result["passes"]["1024"]) == ["1", "2", "3", "4", "5", "6"]
    line = next(line for line in format_table(result).splitlines() if line.startswith("32 "))
    assert line.split() == ["32", "41.06", "41.06-41.06", "4.08x", "1.28", "-"]


def test_a_model_without_room_for_any_context_is_refused(faked: Setup) -> None:
    with pytest.raises(CapacityError, match="max_model_len 64; raise it"):
        run(faked(max_model_len=64))


def test_the_table_answers_whether_drafted_rows_are_free(faked: Setup) -> None:
    result = run(faked(), rows=(1, 5), contexts=(64,), repeats=1)
    result["machine"] |= {"cpu": "A CPU", "cores": 2, "memory_bytes": 25e9, "gpu": None, "load": 0.5}
    assert format_table(result).split("\n\n")[:3] == [
        "machine:   A CPU, 2 cores, 25.0 GB; 2 threads; load 0.5\n"
        "model:     m (Q4_1), Q4_1 on cpu, exactness: bitwise\n"
        "bandwidth: 2.0 GB/s read at best, 1.5 in the median, over the 20 MB that a pass reads",
        "rows   ms at 64    quartiles  of 1 row  ms per row\n"
        "--------------------------------------------------\n"
        "1         10.06  10.06-10.06     1.00x       10.06\n"
        "5         14.06  14.06-14.06     1.40x        2.81\n"
        "floor     10.02                  1.00x",
        "free lunch: at context 64 a pass of 5 rows costs 1.40 passes of 1; so 4 drafted tokens pay from an acceptance length of "
        "1.40, drafting not counted\n"
        "prefill:    983 tok/s for 512 tokens\n"
        "batch 8:    469 tok/s in all at context 64, 4.72 times one sequence",
    ]


def test_an_undisturbed_measurement_is_called_disturbed(faked: Setup) -> None:
    assert run(faked(), rows=(1, 5), repeats=6)["disturbances"] == []


def test_a_measurement_under_other_load_passes_for_a_good_one(faked: Setup) -> None:
    slow = faked(cost=lambda batch, index: linear(batch) * (1.5 if index % 2 else 1.0), bandwidths=(2e9, 1e9))
    result = run(slow, rows=(1, 2), contexts=(64,), repeats=8)
    spread, drift = result["disturbances"]
    assert "passes of 1 row at context 64" in spread
    assert drift == "Memory was read at 2.0 GB/s before and 1.0 GB/s after the passes."
    assert result["bandwidth"]["best"] == 2e9 and drift in format_table(result)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"repeats": 0}, "repeats must be"),
        ({"rows": (1, 0)}, "rows must be"),
        ({"rows": (2, 4)}, "rows must include 1"),
        ({"contexts": ()}, "contexts must be"),
        ({"ops": "cpp"}, "unknown ops 'cpp'"),
        ({"threads": 0}, "threads must be"),
    ],
)
def test_a_bad_option_is_refused_before_a_model_is_loaded(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PassOptions("no-such-model", **options)


@pytest.mark.parametrize("ops", ["torch", "native"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.usefixtures("one_thread")
def test_a_real_network_runs_every_kind_of_pass(family: str, ops: str) -> None:
    tiny = case(family)
    target = ModelTarget(
        tiny.architecture,
        tiny.weights,
        device="cpu",
        dtype="float32",
        ops=ops,
        threads=1,
        num_blocks=64,
        block_size=4,
        max_model_len=128,
    )
    assert target.threads == 1 and target.vocab_size == VOCAB_SIZE
    kinds = [verifying(1, 8), verifying(32, 90), batched(8, 20), prompt(100)]
    timer = PassTimer(target, 64, 4)
    assert all(timer.fits(kind) for kind in kinds)
    seconds = timer.time(kinds, 2)
    assert all(len(values) == 2 and min(values) > 0 for values in seconds.values())


# ------------------------------------------------------------------------------------------------ the page


def test_the_page_holds_the_curves_and_loads_nothing(faked: Setup, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    result = run(faked(), rows=(1, 5, 8), repeats=2)
    result["model"]["name"] = "a <b> model"
    path = tmp_path / "report.html"
    report.write_passes(result, path)
    text = path.read_text(encoding="utf-8")
    assert "<title>Cost of a target pass: a &lt;b&gt; model</title>" in text and "<b> model" not in text
    assert '<script src="' not in text and "Plotly.newPlot" in text
    figure = report.passes_figure(result)
    traces = {trace.name: (list(trace.x), list(trace.y)) for trace in figure.data}
    assert traces["measured, context 64"] == ([1, 5, 8], list(result["passes"]["64"].values()))
    assert traces["memory floor, context 64"] == ([1, 8], [result["floor"]["64"]] * 2)
    assert traces["rows one by one, context 1024"] == ([1, 8], [result["passes"]["1024"]["1"] * n for n in (1, 8)])


def test_a_missing_plotly_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotly.graph_objects", None)
    with pytest.raises(ConfigError, match=r"needs plotly .*pip install 'foredraft\[report\]'"):
        report.plotting()
