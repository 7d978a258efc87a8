"""What a plan is computed from: models by their sizes, guesses at a machine, ways to draft, and the buffers that all this takes.

Owns: how these come from the options when nothing has to run.  Does not know: how they are measured, or the figures of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foredraft.dims import ModelDims, dims_from_config, dims_from_params, dims_of
from foredraft.forecast import Machine, Method, with_alpha
from foredraft.hardware import (
    BYTES_PER_VALUE,
    GIB,
    Efficiency,
    Hardware,
    Roofline,
    efficiencies,
    find_hardware,
    kv_bytes_per_value,
)
from foredraft.loader import Checkpoint, Tokenizer, load_checkpoint
from foredraft.loader.folder import folder_tokenizer
from foredraft.loader.resolve import resolve_model
from foredraft.plan_options import PlanOptions
from foredraft.replay import Record
from foredraft.request_log import ModelTokens, PseudoTokens, read_log
from foredraft.types import ConfigError

DEFAULT_CONTEXT = 2048
DEFAULT_DTYPE = "bfloat16"
# vLLM leaves a tenth of the memory free unless told otherwise (gpu_memory_utilization), and computes prompts in such chunks.
RESERVED, PROMPT_ROWS = 0.1, 8192
LOG_TOKENS = 50_000


@dataclass
class Subject:
    """A model of the plan: its sizes, and where they were opened its tokenizer and its weights."""

    name: str
    dims: ModelDims
    tokenizer: Tokenizer | None = None
    checkpoint: Checkpoint | None = None


@dataclass
class Setting:
    """All that the figures are computed from.

    ``buffers(method)`` are bytes by name, and ``token_bytes(method)`` those of a cached token, None being plain decoding.
    """

    target: Subject
    draft: Subject | None
    machines: Seq[Machine]
    methods: Seq[Method]
    memory_bytes: float
    buffers: Callable[[Method | None], Mapping[str, float]]
    token_bytes: Callable[[Method | None], float]
    place: Mapping[str, Any]
    context: int
    notes: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------ what is planned with


def open_subject(model: str | None, num_params: float | None, kind: str, *, weights: bool = False) -> Subject:
    """A model by its name, its ``config.json`` or its size; ``weights`` are fetched and opened only where they are needed."""
    if num_params is not None:
        return Subject(model or kind, dims_from_params(num_params, model or kind))
    assert model is not None, kind
    if model.endswith(".json"):
        return Subject(model, dims_from_config(model), _tokenizer_of(Path(model).expanduser().parent))
    path = None if weights else resolve_model(model, settings_only=True)
    if path is not None and path.is_dir():
        return Subject(model, dims_from_config(str(path / "config.json"), model), _tokenizer_of(path))
    checkpoint = load_checkpoint(model)
    return Subject(model, dims_of(checkpoint.architecture, model), checkpoint.tokenizer, checkpoint)


def _tokenizer_of(folder: Path) -> Tokenizer | None:
    return folder_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None


def open_draft(options: PlanOptions) -> Subject | None:
    """The draft model, if there is one."""
    if not options.has_draft:
        return None
    return open_subject(options.draft, options.draft_params, "draft", weights=options.is_here or options.replays_draft)


def chosen_context(options: PlanOptions, limit: int | None) -> int:
    """Tokens of one request.

    Raises:
        ConfigError: the model's context does not reach so far, or K is not below it.
    """
    context = options.context or min(DEFAULT_CONTEXT, limit or DEFAULT_CONTEXT)
    if limit is not None and context > limit:
        raise ConfigError(f"--context must be at most {limit}, the model's own, not {context}; lower it.")
    if options.num_speculative_tokens > context - 2:
        raise ConfigError(
            f"--num-speculative-tokens {options.num_speculative_tokens} leaves no room for a prompt in a context of {context} "
            "tokens; lower it or raise --context."
        )
    return context


def chosen_hardware(options: PlanOptions) -> tuple[Hardware, str]:
    """What is planned for, and the format of its weights.

    Raises:
        ConfigError: no such hardware, a wrong file, or hardware without this format.
    """
    assert options.hardware is not None and not options.is_here, options
    hardware, dtype = find_hardware(options.hardware), options.dtype or DEFAULT_DTYPE
    if dtype not in hardware.flops:
        raise ConfigError(f"hardware {hardware.name} has no figure for {dtype}; choose one of: {', '.join(hardware.flops)}.")
    return hardware, dtype


def computed(options: PlanOptions, target: Subject, draft: Subject | None, methods: Seq[Method], notes: list[str]) -> Setting:
    """A Setting on hardware of the table or of a file."""
    hardware, dtype = chosen_hardware(options)
    small = draft.dims if draft is not None else None
    memory_bytes = GIB * options.memory_gib if options.memory_gib is not None else hardware.memory_bytes * options.gpus
    links = ", and 10-60 us a layer between GPUs" if options.gpus > 1 else ""
    notes.append(
        "Seconds of passes are a roofline of the data sheet; intervals are over 60-90 % of its bandwidth, 40-80 % of its dense "
        f"FLOP/s and 4-30 us a layer{links}. Engines fade earlier: they also sample and judge draft rows."
    )
    assumed = [subject.dims.assumed for subject in (target, draft) if subject is not None and subject.dims.assumed]
    return Setting(
        target=target,
        draft=draft,
        machines=roofline_machines(hardware, target.dims, small, dtype, options.gpus),
        methods=methods,
        memory_bytes=memory_bytes,
        buffers=lambda method: gpu_buffers(options, target.dims, small, dtype, memory_bytes, method),
        token_bytes=lambda method: _token_bytes([target.dims, *([small] if small and _runs_model(method) else [])], dtype),
        place={
            "hardware": hardware.name,
            "source": hardware.source,
            "bandwidth": hardware.bandwidth,
            "flops": hardware.flops[dtype],
            "memory_bytes": hardware.memory_bytes,
            "num_gpus": options.gpus,
            "dtype": dtype,
        },
        context=chosen_context(options, target.dims.max_context),
        notes=[*assumed, *notes],
    )


def roofline_machines(hardware: Hardware, target: ModelDims, draft: ModelDims | None, dtype: str, num_gpus: int) -> list[Machine]:
    """A Machine for each efficiency, the middle one first.

    A small model may well reach another share of the hardware than a large one, but both have the same launches and links.
    """
    machines = []
    for one in efficiencies():
        line = Roofline(hardware, target, dtype, one, num_gpus)
        if draft is None:
            machines.append(Machine(line.seconds))
            continue
        others = [other for other in efficiencies() if _same_launches(one, other)]
        machines += [Machine(line.seconds, Roofline(hardware, draft, dtype, other, num_gpus).seconds) for other in others]
    return machines


def _same_launches(one: Efficiency, other: Efficiency) -> bool:
    return (one.layer_seconds, one.link_seconds) == (other.layer_seconds, other.link_seconds)


def alpha_method(options: PlanOptions, notes: list[str]) -> Method:
    """The method that ``--alpha`` speaks of."""
    assert options.alpha is not None, options
    name = "draft_model" if options.has_draft else "ngram"
    what = "" if options.has_draft else ", and that drafting takes no time"
    notes.append(f"Acceptance was not measured: --alpha says {options.alpha:g} at every position of a draft{what}.")
    return with_alpha(name, options.alpha, options.num_speculative_tokens, runs_model=options.has_draft)


def log_records(path: str, target: Subject, notes: list[str]) -> list[Record]:
    """The recorded requests, cut to what is replayed in reasonable time."""
    tokenizer = target.tokenizer
    if tokenizer is not None:
        records = read_log(path, ModelTokens(tokenizer), target.dims.vocab_size)
    else:
        records = read_log(path, PseudoTokens())
    kept, total = 0, 0
    for record in records:
        if kept and total + len(record.tokens) > LOG_TOKENS:
            break
        kept, total = kept + 1, total + len(record.tokens)
    num_emitted = sum(len(record.tokens) - record.num_prompt for record in records[:kept])
    how = (
        f"the tokenizer of {target.name}"
        if tokenizer is not None
        else "pseudo-tokens for want of a tokenizer (words cut every 7 letters, numbers every 3 digits, other signs alone), which "
        "makes it an estimate"
    )
    some = "all" if kept == len(records) else f"the first {kept} of"
    notes.append(f"Acceptance is of {some} {len(records)} requests of {Path(path).name} ({num_emitted:,} tokens), read with {how}.")
    return records[:kept]


# ------------------------------------------------------------------------------------------------ memory


def _token_bytes(models: Seq[ModelDims], dtype: str) -> float:
    return sum(dims.kv_per_token for dims in models) * kv_bytes_per_value(dtype)


def _runs_model(method: Method | None) -> bool:
    return method is not None and method.runs_model


def gpu_buffers(
    options: PlanOptions, target: ModelDims, draft: ModelDims | None, dtype: str, memory_bytes: float, method: Method | None
) -> dict[str, float]:
    """Bytes of every buffer but keys and values, of all GPUs together; None decodes plainly.

    n-gram and suffix drafters keep their texts in the host's memory.
    """
    size = BYTES_PER_VALUE[dtype]
    return {
        "reserve (10 %)": RESERVED * memory_bytes,
        "target weights": target.num_params * size,
        "draft weights": draft.num_params * size if draft is not None and _runs_model(method) else 0.0,
        "logits rows": logits_bytes(options, target.vocab_size, method),
        "scratch of a prompt's rows": 2.0 * PROMPT_ROWS * (4 * target.hidden_size + 3 * target.intermediate_size),
    }


def logits_bytes(options: PlanOptions, vocab_size: int, method: Method | None) -> float:
    """Logits in float32 of the largest batch, with a row for each draft token and one more."""
    rows = 1 + (method.outcomes[-1].num_tokens if method is not None else 0)
    return 4.0 * max(options.batches) * rows * vocab_size
