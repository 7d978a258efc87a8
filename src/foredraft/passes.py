"""What a target pass costs by its number of rows: how much of a draft's verification is free on this machine.

Owns: which passes are timed, in which order, and what is computed from them.  Does not know: drafts, sampling, or the steps of an
engine.

The passes are the target's alone, straight on its cache: n rows of one sequence, with logits for every row, as verifying n - 1
drafted tokens takes; rows of several sequences, as a batch takes; and a whole prompt.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from foredraft import __version__
from foredraft.architecture import Architecture
from foredraft.bench import bytes_per_token
from foredraft.bench_figures import quartiles
from foredraft.bench_table import aligned
from foredraft.config import MeasuredEngine
from foredraft.llm import LLM
from foredraft.machine import describe_machine, measure_read_bandwidth
from foredraft.target import kv_bytes_per_token, resolve_device
from foredraft.types import CapacityError, Clock, ConfigError, Rows, Target

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
CONTEXTS = (64, 1024)
SLOPE_ROWS = (16, 32)
BATCH_SIZE, BATCH_CONTEXT = 8, 64
PROMPT_TOKENS = 512
PROMPT_EVERY = 5
MAX_SPREAD, MAX_DRIFT = 0.25, 1.2
NOTES = (
    "A pass of n rows has one sequence and n logits rows, as verifying n - 1 drafted tokens takes; times are medians.",
    "Passes of all kinds were timed in turn, in an order that rotates, so that a drift of the machine's speed cancels.",
    "The floor is the time to read weights and the context's keys and values once, at the bandwidth measured over that many bytes.",
    "Sampling, drafting and all else that an engine step does beside the pass are not in these figures.",
)


@dataclass(frozen=True)
class PassOptions(MeasuredEngine):
    """What to time: passes of each of ``rows`` at each of ``contexts`` tokens, ``repeats`` times.  For the rest see MeasuredEngine.

    Raises:
        ConfigError: a value out of its range, or an unknown name.
    """

    model: str
    rows: tuple[int, ...] = ROWS
    contexts: tuple[int, ...] = CONTEXTS
    repeats: int = 25

    def __post_init__(self) -> None:
        for name, values in (("rows", self.rows), ("contexts", self.contexts), ("repeats", (self.repeats,))):
            if not values or not all(isinstance(value, int) and value >= 1 for value in values):
                raise ConfigError(f"{name} must be whole numbers of at least 1, not {getattr(self, name)!r}; change {name}.")
        if 1 not in self.rows:
            raise ConfigError(f"rows must include 1, which the others are compared with, not {self.rows}; add it.")
        self.engine_config()


class Kind(NamedTuple):
    """A kind of pass: ``num_seqs`` sequences of ``rows`` rows each after ``context`` tokens, with ``num_logits`` logits each."""

    num_seqs: int
    rows: int
    context: int
    num_logits: int


def verifying(rows: int, context: int) -> Kind:
    """The pass that verifies ``rows - 1`` drafted tokens."""
    return Kind(1, rows, context, rows)


def batched(num_seqs: int, context: int) -> Kind:
    """The pass that continues several sequences by one token each."""
    return Kind(num_seqs, 1, context, 1)


def prompt(num_tokens: int) -> Kind:
    """The pass that reads a prompt."""
    return Kind(1, num_tokens, 0, 1)


# ------------------------------------------------------------------------------------------------ timing


class PassTimer:
    """Times passes on a target whose cache of ``num_blocks`` blocks nobody else uses meanwhile.

    Passes write over each other's keys and values: what they compute does not matter, only that it is as much as in earnest.
    """

    def __init__(self, target: Target, num_blocks: int, block_size: int, clock: Clock = time.perf_counter) -> None:
        self.target, self.clock = target, clock
        self._num_blocks, self._block_size = num_blocks, block_size
        self._draw = random.Random(0)

    def fits(self, kind: Kind) -> bool:
        """Whether the model's context and the cache have room for a pass."""
        length = kind.context + kind.rows
        blocks = -(-length // self._block_size) * kind.num_seqs
        return length <= self.target.max_model_len and blocks <= self._num_blocks

    def time(self, kinds: Seq[Kind], repeats: int, every: Mapping[Kind, int] | None = None) -> dict[Kind, list[float]]:
        """Seconds of each pass, ``repeats`` times; of a kind in ``every``, only in one of that many rounds.

        A round is every kind once, one directly after the other; each round begins with another one.
        """
        assert kinds and all(self.fits(kind) for kind in kinds), kinds
        self._fill(max(kinds, key=lambda kind: kind.context + kind.rows))
        for kind in kinds:
            self._pass(kind)
        seconds: dict[Kind, list[float]] = {kind: [] for kind in kinds}
        for index in range(repeats):
            turn = index % len(kinds)
            for kind in (*kinds[turn:], *kinds[:turn]):
                if index % (every or {}).get(kind, 1) == 0:
                    seconds[kind].append(self._pass(kind))
        return seconds

    def _fill(self, longest: Kind) -> None:
        """Put keys and values of real tokens into the cache, so that no pass reads zeros only."""
        length = longest.context + longest.rows
        table = range(-(-length // self._block_size))
        for start in range(0, length, PROMPT_TOKENS):
            self.target.forward([Rows(self._tokens(min(PROMPT_TOKENS, length - start)), start, 1, table)])

    def _tokens(self, count: int) -> list[int]:
        return self._draw.choices(range(self.target.vocab_size), k=count)

    def _pass(self, kind: Kind) -> float:
        width = -(-(kind.context + kind.rows) // self._block_size)
        batch = [
            Rows(self._tokens(kind.rows), kind.context, kind.num_logits, range(index * width, (index + 1) * width))
            for index in range(kind.num_seqs)
        ]
        start = self.clock()
        output = self.target.forward(batch)
        # A GPU is done only when a value has come back.
        output.logits[-1][-1, -1].item()
        return self.clock() - start


def run_passes(options: PassOptions, report: Callable[[str], None], clock: Clock = time.perf_counter) -> dict[str, Any]:
    """Time the passes, and tell ``report`` how far it is, line by line.

    Returns plain data for JSON; contexts and rows are text where they are keys, and what does not fit the model is left out::

        version, options      of foredraft, as text; the PassOptions as a mapping
        machine, bandwidth    as in run_bench; bandwidth over as many bytes as a pass reads, the better of one before and one after
        disturbances          sentences on what says that other work disturbed the measurement; empty when nothing does
        model                 name, quantization, device, weight_bytes, bytes_per_pass, parameters (of the matrices of a pass)
        exactness, precision, threads       of the target
        passes                {context: {rows: ms}}, medians
        quartiles             {context: {rows: {lower, median, upper}}}
        ratios                {context: {rows: passes over passes of one row}}
        floor                 {context: ms}: the time to read weights and context
        compute               None, or what a further row costs where arithmetic is the limit: rows (two numbers), ms_per_row by
                              context (the slope between them), operations_per_s (2 per parameter over it, at the first context)
        prefill               None, or num_tokens, ms (quartiles), tokens_per_s
        batch                 None, or num_seqs, context, ms (quartiles), tokens_per_s (all sequences together), speedup (over one)
        notes                 sentences on how to read this

    Raises:
        ForedraftError: see the tree in foredraft.types.
    """
    report(f"loading {options.model}")
    llm = LLM(options.model, **asdict(options.engine_config()))
    report(llm.describe()[0])
    machine, target = describe_machine(), llm.target
    timer = PassTimer(target, llm.kv.num_blocks, llm.kv.block_size, clock)
    grid = _grid(timer, options)
    model, device = _describe_model(llm, options), resolve_device(options.device)
    num_bytes = model["bytes_per_pass"]
    before = measure_read_bandwidth(device, num_bytes=num_bytes, threads=target.threads)
    report(f"timing passes, {options.repeats} times")
    seconds = timer.time(_kinds(timer, grid), options.repeats, {prompt(PROMPT_TOKENS): PROMPT_EVERY})
    after = measure_read_bandwidth(device, num_bytes=num_bytes, threads=target.threads)
    bandwidth = max(before, after, key=lambda measured: float(measured["best"]))
    milliseconds = {kind: quartiles([1e3 * value for value in values]) or {} for kind, values in seconds.items()}
    cells = {str(c): {str(rows): milliseconds[verifying(rows, c)] for rows in some} for c, some in grid.items()}
    passes = {context: {rows: cell["median"] for rows, cell in some.items()} for context, some in cells.items()}
    return {
        "version": __version__,
        "options": asdict(options),
        "machine": machine,
        "model": model,
        "exactness": target.exactness,
        "precision": target.precision,
        "threads": target.threads,
        "bandwidth": bandwidth,
        "disturbances": _disturbances(cells, before, after),
        "passes": passes,
        "quartiles": cells,
        "ratios": {context: {rows: ms / some["1"] for rows, ms in some.items()} for context, some in passes.items()},
        "floor": {str(c): 1e3 * (num_bytes + _context_bytes(llm, options, c)) / bandwidth["best"] for c in grid},
        "compute": compute_ceiling(passes, model["parameters"]),
        "prefill": _prefill(milliseconds),
        "batch": _batch(milliseconds),
        "notes": list(NOTES),
    }


def _grid(timer: PassTimer, options: PassOptions) -> dict[int, list[int]]:
    """The row counts that fit, for each context that fits."""
    grid = {c: [rows for rows in options.rows if timer.fits(verifying(rows, c))] for c in options.contexts}
    grid = {context: rows for context, rows in grid.items() if 1 in rows}
    if not grid:
        most = timer.target.max_model_len
        raise CapacityError(f"no context of {options.contexts} tokens and one row more fit into max_model_len {most}; raise it.")
    return grid


def _kinds(timer: PassTimer, grid: Mapping[int, Seq[int]]) -> list[Kind]:
    kinds = [verifying(rows, context) for context, some in grid.items() for rows in some]
    others = (batched(BATCH_SIZE, BATCH_CONTEXT), verifying(1, BATCH_CONTEXT), prompt(PROMPT_TOKENS))
    return kinds + [kind for kind in others if kind not in kinds and timer.fits(kind)]


def _describe_model(llm: LLM, options: PassOptions) -> dict[str, Any]:
    architecture, weight_bytes = llm.checkpoint.architecture, llm.target.weight_bytes
    return {
        "name": options.model,
        "quantization": llm.checkpoint.quantization,
        "device": resolve_device(options.device),
        "weight_bytes": weight_bytes,
        "bytes_per_pass": bytes_per_token(architecture, weight_bytes),
        "parameters": num_parameters(architecture),
    }


# ------------------------------------------------------------------------------------------------ figures


def num_parameters(architecture: Architecture) -> int:
    """Values of the matrices that every row is multiplied with: all but an embedding that is not the output head too."""
    matrices = {name: shape for name, shape in architecture.weight_shapes().items() if len(shape) == 2}
    names = [name for name in matrices if name != "embed" or architecture.tie_embeddings]
    return sum(matrices[name][0] * matrices[name][1] for name in names)


def context_bytes(architecture: Architecture, bytes_of_token: int, context: int) -> int:
    """Bytes of keys and values that a pass reads after ``context`` tokens: of a layer with a window, no more than the window."""
    reached = sum(min(context, kind.window or context) for kind in architecture.layers)
    return bytes_of_token * reached // architecture.num_layers


def _context_bytes(llm: LLM, options: PassOptions, context: int) -> int:
    checkpoint = llm.checkpoint
    how = {"device": options.device, "dtype": options.dtype, "ops": options.ops}
    return context_bytes(checkpoint.architecture, kv_bytes_per_token(checkpoint.architecture, checkpoint.weights, **how), context)


def compute_ceiling(passes: Mapping[str, Mapping[str, float]], parameters: int) -> dict[str, Any] | None:
    """The slope of the cost of a pass where it grows with its rows; None where the rows that it takes were not timed.

    It is a measurement of these kernels, not of the processor's limit.
    """
    low, high = SLOPE_ROWS
    slopes = {
        context: (some[str(high)] - some[str(low)]) / (high - low)
        for context, some in passes.items()
        if {str(low), str(high)} <= some.keys()
    }
    if not slopes:
        return None
    first = next(iter(slopes.values()))
    return {
        "rows": [low, high],
        "ms_per_row": slopes,
        "operations_per_s": 2 * parameters / (first / 1e3) if first > 0 else None,
    }


def _disturbances(cells: Mapping[str, Mapping[str, Any]], before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """A machine to itself repeats a pass within a few per cent, and reads as fast after a minute as before."""
    found = []
    for context, some in cells.items():
        spread = (some["1"]["upper"] - some["1"]["lower"]) / some["1"]["median"]
        if spread > MAX_SPREAD:
            found.append(
                f"The middle half of the passes of 1 row at context {context} spreads over {100 * spread:.0f} % of their median: "
                "other work disturbed them."
            )
    low, high = sorted(float(measured["best"]) for measured in (before, after))
    if high > MAX_DRIFT * low:
        found.append(
            f"Memory was read at {before['best'] / 1e9:.1f} GB/s before and {after['best'] / 1e9:.1f} GB/s after the passes."
        )
    return found


def _prefill(milliseconds: Mapping[Kind, Mapping[str, float]]) -> dict[str, Any] | None:
    ms = milliseconds.get(prompt(PROMPT_TOKENS))
    return None if ms is None else {"num_tokens": PROMPT_TOKENS, "ms": ms, "tokens_per_s": 1e3 * PROMPT_TOKENS / ms["median"]}


def _batch(milliseconds: Mapping[Kind, Mapping[str, float]]) -> dict[str, Any] | None:
    ms = milliseconds.get(batched(BATCH_SIZE, BATCH_CONTEXT))
    if ms is None:
        return None
    speedup = BATCH_SIZE * milliseconds[verifying(1, BATCH_CONTEXT)]["median"] / ms["median"]
    speed = 1e3 * BATCH_SIZE / ms["median"]
    return {"num_seqs": BATCH_SIZE, "context": BATCH_CONTEXT, "ms": ms, "tokens_per_s": speed, "speedup": speedup}


# ------------------------------------------------------------------------------------------------ the table


def format_table(result: Mapping[str, Any]) -> str:
    """A result of ``run_passes`` as aligned plain text; the ratio column answers whether drafted rows are free here."""
    contexts = list(result["passes"])
    rows: list[tuple[str, ...]] = [
        ("rows", *(title for context in contexts for title in (f"ms at {context}", "quartiles", "of 1 row", "ms per row")))
    ]
    for count in dict.fromkeys(count for context in contexts for count in result["passes"][context]):
        figures = (figure for context in contexts for figure in _figures(result, context, count))
        rows.append((count, *figures))
    rows.append(("floor", *(figure for context in contexts for figure in _floor(result, context))))
    return "\n\n".join(
        (
            _header(result),
            aligned(rows, num_left=1),
            "\n".join(_answers(result)),
            "\n".join([*result["disturbances"], *result["notes"]]),
        )
    )


def _figures(result: Mapping[str, Any], context: str, count: str) -> tuple[str, ...]:
    cell = result["quartiles"][context].get(count)
    if cell is None:
        return ("-", "", "", "")
    ratio = result["ratios"][context][count]
    spread = f"{cell['lower']:.2f}-{cell['upper']:.2f}"
    return (f"{cell['median']:.2f}", spread, f"{ratio:.2f}x", f"{cell['median'] / int(count):.2f}")


def _floor(result: Mapping[str, Any], context: str) -> tuple[str, ...]:
    floor = result["floor"][context]
    return (f"{floor:.2f}", "", f"{floor / result['passes'][context]['1']:.2f}x", "")


def _header(result: Mapping[str, Any]) -> str:
    machine, model, bandwidth = (result[name] for name in ("machine", "model", "bandwidth"))
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 1e9:.1f} GB"
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    return "\n".join(
        (
            f"machine:   {where}{gpu}; {result['threads']} threads; load {machine['load']:.1f}",
            f"model:     {model['name']} ({model['quantization']}), {result['precision']} on {model['device']}, "
            f"exactness: {result['exactness']}",
            f"bandwidth: {bandwidth['best'] / 1e9:.1f} GB/s read at best, {bandwidth['median'] / 1e9:.1f} in the median, over the "
            f"{bandwidth['buffer_bytes'] / 1e6:,.0f} MB that a pass reads",
        )
    )


def _answers(result: Mapping[str, Any]) -> list[str]:
    lines = []
    for context, ratios in result["ratios"].items():
        if "5" in ratios:
            lines.append(
                f"free lunch: at context {context} a pass of 5 rows costs {ratios['5']:.2f} passes of 1; so 4 drafted tokens pay "
                f"from an acceptance length of {ratios['5']:.2f}, drafting not counted"
            )
    if result["compute"] is not None:
        compute = result["compute"]
        low, high = compute["rows"]
        slopes = ", ".join(f"{ms:.2f} at {context}" for context, ms in compute["ms_per_row"].items())
        speed = compute["operations_per_s"]
        lines.append(
            f"compute:    ms of each further row from {low} to {high} rows: {slopes}"
            + (f" (weights at {speed / 1e9:,.0f} G operations/s)" if speed else "")
        )
    if result["prefill"] is not None:
        lines.append(f"prefill:    {result['prefill']['tokens_per_s']:,.0f} tok/s for {result['prefill']['num_tokens']} tokens")
    if result["batch"] is not None:
        batch = result["batch"]
        lines.append(
            f"batch {batch['num_seqs']}:    {batch['tokens_per_s']:,.0f} tok/s in all at context {batch['context']}, "
            f"{batch['speedup']:.2f} times one sequence"
        )
    return lines
