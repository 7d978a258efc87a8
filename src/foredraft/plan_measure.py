"""The parts of a plan that have to run: passes and answers on this machine, and drafters over recorded tokens.

Owns: what is run, how often, and how it becomes guesses at a machine and ways to draft.  Does not know: the figures of a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from foredraft.calibration import Identity, pass_times
from foredraft.capacity import Buffers, buffers_of
from foredraft.config import SpeculativeConfig
from foredraft.cost import PassTimes, PassWork
from foredraft.dims import dims_of
from foredraft.draft_parts import DraftParts
from foredraft.drafters import registry
from foredraft.drafters.context import DrafterContext, DraftModel
from foredraft.drafters.shipped import target_of
from foredraft.forecast import Machine, Method, PassSeconds, with_replays
from foredraft.kv_cache import KVCache
from foredraft.loader import Checkpoint
from foredraft.plan_options import PlanOptions
from foredraft.plan_setting import (
    RESERVED,
    Setting,
    Subject,
    alpha_method,
    chosen_context,
    computed,
    log_records,
    open_draft,
)
from foredraft.replay import Record, Replay, replay
from foredraft.request_log import Prompt, read_prompts
from foredraft.states import states_of
from foredraft.target import free_bytes, resolve_device
from foredraft.types import PHASES, RequestError, SamplingParams, Target
from foredraft.workloads import CATEGORIES, WORKLOADS

if TYPE_CHECKING:
    from foredraft.llm import LLM
    from foredraft.target import ModelTarget

BLOCK_SIZE = 16
NUM_CALIBRATIONS, CALIBRATION_SECONDS, CALIBRATION_TOKENS = 3, 1.0, 1024
BUILT_IN_TOKENS, MEASURED_TOKENS, DRAFT_TOKENS = 64, 128, 2000
REPLAYED = ("ngram", "suffix")
# What replay.replay calls its sequence.
REPLAYED_ID = 0

Report = Callable[[str], None]
OpenLLM = Callable[..., "LLM"]


# ------------------------------------------------------------------------------------------------ drafters over records


def replayed_methods(
    options: PlanOptions, records: list[Record], target: Subject, draft: Subject | None, report: Report, notes: list[str]
) -> list[Method]:
    """n-gram and suffix drafters for each K, and the draft model if there is one, over recorded requests."""
    ceiling = options.num_speculative_tokens
    context, sources = _for_statistics(records, target, ceiling)
    if sources.suffix_base is not None:
        notes.append(f"suffix was replayed with the statistics that come with {target.name}; without them fewer drafts are right.")
    methods = []
    for name in REPLAYED:
        report(f"replaying {len(records)} requests with {name}")
        replays: dict[int, list[Replay]] = {}
        for k in depths(ceiling):
            # A new drafter for each K, which learns from one request for the next as it does in an engine.
            config = SpeculativeConfig(method=name, num_speculative_tokens=k)
            drafter = registry.create(name, sources.settings(name, config), context)
            replays[k] = [replay(drafter, record.tokens, record.num_prompt, k) for record in records]
        methods.append(with_replays(name, replays))
    if draft is not None:
        methods.append(_replayed_draft_model(options, records, target, draft, report, notes))
    return methods


def _for_statistics(records: list[Record], target: Subject, ceiling: int) -> tuple[DrafterContext, registry.Sources]:
    """What drafters without a model are made with, and the statistics that are shipped for a target that is open."""
    longest = ceiling + max(len(record.tokens) for record in records)
    if target.checkpoint is None:
        return DrafterContext(1 + max(max(record.tokens) for record in records), longest), registry.Sources()
    checkpoint = target.checkpoint
    sizes, vocabulary = checkpoint.architecture, checkpoint.tokenizer.vocabulary
    context = DrafterContext(sizes.vocab_size, longest, model=checkpoint.name, vocabulary=vocabulary)
    return context, registry.sources(SpeculativeConfig(method="suffix"), target_of(checkpoint))


def _replayed_head(
    options: PlanOptions, records: list[Record], llm: LLM, parts: DraftParts, report: Report, notes: list[str]
) -> list[Method]:
    """The head that is shipped for the target, which is run once more over some records for the states that it reads.

    None where no record fits the target's context.
    """
    name, kv = parts.sources.head_kind or "", llm.kv
    longest = min(llm.max_model_len, kv.num_blocks * kv.block_size)
    fitting = [record for record in records if len(record.tokens) <= longest]
    if len(fitting) < len(records):
        notes.append(f"{name} was not replayed over requests of more than {longest} tokens: {len(records) - len(fitting)}.")
    if not fitting:
        return []
    some = _some(fitting)
    report(f"replaying {len(some)} requests with {name}")
    context = parts.context(llm.target, kv)
    configs = {k: SpeculativeConfig(method=name, num_speculative_tokens=k) for k in depths(options.num_speculative_tokens)}
    drafters = {k: registry.create(name, parts.sources.settings(name, config), context) for k, config in configs.items()}
    replays: dict[int, list[Replay]] = {k: [] for k in drafters}
    layers = next(iter(drafters.values())).hidden_layers
    for record in some:
        states = states_of(llm.target, kv, record.tokens[:-1], layers, llm.config.max_num_batched_tokens)
        # Keys and values of the head lie beside the target's.
        kv.open(REPLAYED_ID, record.tokens, reuse=False)
        assert kv.reserve(REPLAYED_ID, len(record.tokens)), "the cache is in use"
        for k, drafter in drafters.items():
            replays[k].append(replay(drafter, record.tokens, record.num_prompt, k, states=states))
        kv.close(REPLAYED_ID)
    return [with_replays(name, replays)]


def depths(ceiling: int) -> list[int]:
    """The K that are replayed: all small ones, and of the large ones, between which little changes, some."""
    return sorted({*range(1, min(ceiling, 8) + 1), *(k for k in (10, 12, 16, 20, 24, 32, 48) if k < ceiling), ceiling})


def _replayed_draft_model(
    options: PlanOptions, records: list[Record], target: Subject, draft: Subject, report: Report, notes: list[str]
) -> Method:
    assert target.tokenizer is not None and draft.checkpoint is not None, (target.name, draft.name)
    some = _some(records)
    report(f"replaying {len(some)} requests with draft_model")
    longest = max(len(record.tokens) for record in some) + options.num_speculative_tokens
    opened, _ = open_draft_model(draft.checkpoint, longest)
    context = DrafterContext(
        vocab_size=target.dims.vocab_size,
        max_model_len=longest,
        vocabulary=target.tokenizer.vocabulary,
        load_draft_model=lambda name: opened,
    )
    drafter = registry.create("draft_model", SpeculativeConfig(method="draft_model", model=draft.name), context)
    ceiling = options.num_speculative_tokens
    whole = [replay(drafter, record.tokens, record.num_prompt, ceiling) for record in some]
    notes.append(f"The draft model was replayed greedily over {len(some)} of the requests, with K = {ceiling}.")
    replays = {k: [one.truncated(k) for one in whole] for k in range(1, ceiling + 1)}
    return with_replays("draft_model", replays, runs_model=True)


def _some(records: list[Record]) -> list[Record]:
    """The first requests that have DRAFT_TOKENS tokens of answers together; at least one."""
    kept, total = [], 0
    for record in records:
        if total >= DRAFT_TOKENS:
            break
        kept.append(record)
        total += len(record.tokens) - record.num_prompt
    return kept


def open_draft_model(checkpoint: Checkpoint, max_model_len: int) -> tuple[DraftModel, ModelTarget]:
    """A draft model with a cache for one sequence of ``max_model_len`` tokens; it, and once more what computes it."""
    # Only a draft model needs torch here, which takes seconds to load.
    from foredraft.target import ModelTarget

    length = min(max_model_len, checkpoint.architecture.max_position_embeddings)
    num_blocks = -(-length // BLOCK_SIZE) + 1
    target = ModelTarget(
        checkpoint.architecture,
        checkpoint.weights,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=length,
        release=checkpoint.release,
    )
    return DraftModel(target, KVCache(num_blocks, BLOCK_SIZE, False), checkpoint.tokenizer.vocabulary()), target


# ------------------------------------------------------------------------------------------------ this machine


def measured_setting(options: PlanOptions, report: Report, open_llm: OpenLLM) -> Setting:
    """Run what has to run on this machine; the hardware planned for may still be another.

    Raises:
        ForedraftError: see the tree in foredraft.types.
    """
    assert options.model is not None, options
    prompts = None if options.measure is None else read_prompts(options.measure)
    free = free_bytes(resolve_device("auto"))
    llm = open_llm(options.model, speculative_config={"method": "none"})
    target = Subject(options.model, dims_of(llm.checkpoint.architecture, options.model), llm.checkpoint.tokenizer, llm.checkpoint)
    context = chosen_context(options, llm.max_model_len)
    draft, notes = open_draft(options), list[str]()
    records, token_seconds = _answers(options, llm, prompts, report, notes)
    if options.alpha is not None:
        methods = [alpha_method(options, notes)]
    else:
        if options.from_log is not None:
            records = log_records(options.from_log, target, notes)
        methods = replayed_methods(options, records, target, draft, report, notes)
    if not options.is_here:
        return computed(options, target, draft, methods, notes)
    parts = DraftParts(llm.checkpoint, llm.config, SpeculativeConfig())
    if options.alpha is None and parts.head is not None:
        methods += _replayed_head(options, records, llm, parts, report, notes)
    small = None if draft is None or draft.checkpoint is None else open_draft_model(draft.checkpoint, CALIBRATION_TOKENS)
    machines, times = _machines(llm, small, token_seconds, report)
    notes.append(
        f"Seconds of passes were measured here, {NUM_CALIBRATIONS} times; intervals are over these. A batch is taken to cost what "
        "as many rows of one sequence do; K is fixed for all requests, which an engine that adapts K can better."
    )
    memory_bytes = 2**30 * options.memory_gib if options.memory_gib is not None else float(free)

    def buffers(method: Method | None) -> Buffers:
        return _buffers(options, llm, parts, draft, context, method)

    return Setting(
        target=target,
        draft=draft,
        machines=machines,
        methods=methods,
        memory_bytes=memory_bytes,
        buffers=lambda method: {"reserve (10 %)": RESERVED * memory_bytes, **_lines(buffers(method))},
        token_bytes=lambda method: _token_bytes(buffers(method)),
        place=_place(llm, parts, times, token_seconds, memory_bytes),
        context=context,
        notes=notes,
    )


def _answers(
    options: PlanOptions, llm: LLM, prompts: list[Prompt] | None, report: Report, notes: list[str]
) -> tuple[list[Record], float]:
    """Answers decoded plainly, and the seconds of a token outside of drafts and passes.

    Where acceptance comes from elsewhere one short answer is enough, for the seconds.
    """
    known = options.alpha is not None or options.from_log is not None
    if prompts is not None:
        asked, most = prompts, MEASURED_TOKENS
        notes.append(f"Acceptance is of the answers of {options.model} to {options.measure}, greedy, at most {most} tokens each.")
    else:
        first = [next(workload for workload in WORKLOADS if workload.category == category) for category in CATEGORIES]
        asked, most = (
            [[dict(message) for message in workload.messages] for workload in first[: 1 if known else None]],
            BUILT_IN_TOKENS,
        )
        if not known:
            notes.append(
                f"Acceptance is of {len(asked)} built-in prompts, one of each category of the bench, answered greedily with at "
                f"most {most} tokens; --measure or --from-log take your own."
            )
    records = []
    before = _own_milliseconds(llm)
    for index, prompt in enumerate(asked):
        report(f"answering plainly [{index + 1}/{len(asked)}]")
        output = llm.generate([_token_ids(llm, prompt)], SamplingParams(temperature=0.0, max_tokens=most))[0]
        ids = output.outputs[0].token_ids
        if ids:
            records.append(Record([*output.prompt_token_ids, *ids], len(output.prompt_token_ids)))
    if not records:
        raise RequestError(f"{options.model} answered none of the prompts with a token; give others with --measure.")
    num_emitted = sum(len(record.tokens) - record.num_prompt for record in records)
    return records, 1e-3 * (_own_milliseconds(llm) - before) / num_emitted


def _token_ids(llm: LLM, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if llm.checkpoint.tokenizer.has_chat_template:
        return llm.chat_prompt(prompt)
    return llm.checkpoint.tokenizer.encode("\n\n".join(str(message["content"]) for message in prompt) + "\n\n")


def _own_milliseconds(llm: LLM) -> float:
    """Of all steps so far, outside of drafts and passes."""
    milliseconds = llm.engine.metrics.total.milliseconds
    return sum(milliseconds[phase] for phase in PHASES if phase not in ("draft", "pass"))


def _machines(
    llm: LLM, small: tuple[DraftModel, ModelTarget] | None, token_seconds: float, report: Report
) -> tuple[list[Machine], PassTimes]:
    """A Machine for each of a few calibrations; the one whose rows cost the median comes first."""
    calibrations = []
    for index in range(NUM_CALIBRATIONS):
        report(f"timing passes [{index + 1}/{NUM_CALIBRATIONS}]")
        times = _calibrated(llm.target, llm.kv, llm.config.max_num_batched_tokens)
        calibrations.append((times, None if small is None else _calibrated(small[1], small[0].kv, CALIBRATION_TOKENS // 2)))
    calibrations.sort(key=lambda pair: pair[0].at(5) / pair[0].at(1))
    calibrations.insert(0, calibrations.pop(NUM_CALIBRATIONS // 2))
    machines = [
        Machine(seconds_of(times), None if draft is None else seconds_of(draft), token_seconds) for times, draft in calibrations
    ]
    return machines, calibrations[0][0]


def _calibrated(target: Target, kv: KVCache, max_rows: int) -> PassTimes:
    """Measured anew: how much two measurements differ is what the interval is made of."""
    return pass_times(target, kv, Identity(None, ()), max_rows=max_rows, budget=CALIBRATION_SECONDS)


def seconds_of(times: PassTimes) -> PassSeconds:
    """Measured times in a forecast's terms: all sequences continue by one row each, and the rest are draft rows.

    Between two whole numbers of rows it is the mean of both by their shares, since every pass has one or the other.
    """

    def seconds(num_rows: float, num_seqs: float, context: float) -> float:
        work = PassWork(round(num_seqs), round(num_seqs * context))
        drafts = num_rows - num_seqs
        low = math.floor(drafts)
        return (1 - (drafts - low)) * times.seconds(work, low) + (drafts - low) * times.seconds(work, low + 1)

    return seconds


def _buffers(
    options: PlanOptions, llm: LLM, parts: DraftParts, draft: Subject | None, context: int, method: Method | None
) -> Buffers:
    """Of an engine with this method that serves the largest batch; None decodes plainly."""
    name = registry.NONE if method is None else method.name
    runs_model, has_head = method is not None and method.runs_model, name == parts.sources.head_kind
    most, largest = method.outcomes[-1].num_tokens if method is not None else 0, max(options.batches)
    config = SpeculativeConfig(method=name, num_speculative_tokens=most, model=draft.name if draft and runs_model else None)
    return buffers_of(
        llm.checkpoint,
        draft.checkpoint if draft is not None and runs_model else None,
        replace(llm.config, max_num_seqs=largest, max_num_batched_tokens=max(llm.config.max_num_batched_tokens, largest)),
        config,
        head=parts.head if has_head else None,
        sources=replace(parts.sources, head=parts.sources.head if has_head else None, draft_model=config.model),
        max_model_len=context,
    )


def _lines(buffers: Buffers) -> dict[str, float]:
    """Bytes of every buffer but keys and values, and what is kept for each of their tokens."""
    plan = buffers.plan(0, BLOCK_SIZE, 1, 0)
    return {
        "target weights": plan.weights,
        "draft weights": plan.draft_weights,
        "logits rows": plan.logits,
        "scratch of passes": plan.scratch,
        "statistics of drafters": plan.statistics,
    }


def _token_bytes(buffers: Buffers) -> float:
    models = [buffers.target, *([buffers.draft] if buffers.draft is not None else [])]
    return float(sum(model.kv_per_token for model in models) + buffers.statistics.per_token)


def _place(llm: LLM, parts: DraftParts, times: PassTimes, token_seconds: float, memory_bytes: float) -> dict[str, Any]:
    from foredraft.machine import describe_machine

    return {
        "hardware": "this",
        "source": "measured here",
        "machine": describe_machine(),
        "model": llm.target.describe(),
        "memory_bytes": memory_bytes,
        "pass_times": times.to_dict(),
        "token_seconds": token_seconds,
        "num_gpus": 1,
        "dtype": llm.target.precision,
        "head": None if parts.head is None else str(parts.head.path.resolve()),
    }
