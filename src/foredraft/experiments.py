"""What is said of speculative decoding, tried on the machine at hand.

Owns: the list of experiments, the run of all of them, and the verdicts' words.  Does not know: how each is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from foredraft import __version__
from foredraft.bench import Progress, prompt_tokens
from foredraft.bench_table import aligned
from foredraft.claims import BATCHES, EXPERIMENTS, Bench, Finding
from foredraft.config import MeasuredEngine, SpeculativeConfig
from foredraft.lanes import PLAIN, blocks_needed
from foredraft.llm import LLM
from foredraft.machine import describe_machine
from foredraft.target import resolve_device
from foredraft.types import ConfigError, RequestError, refuse_unknown
from foredraft.workloads import CATEGORIES, WORKLOADS

HOLDS, DOES_NOT = "holds", "does not hold here"


@dataclass(frozen=True)
class ExperimentOptions(MeasuredEngine):
    """What to try.

    ``only``: names of experiments, None for all.  ``seed``: of sampled answers and of drafters that err on purpose.
    ``repeats``: how often each measurement is made.  For the rest see MeasuredEngine.

    Raises:
        ConfigError: an unknown name, or a value out of its range.
    """

    model: str
    only: tuple[str, ...] | None = None
    max_tokens: int = 96
    repeats: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        # With fewer tokens there are no passes that a draft of 16 fits into.
        for name, low in (("max_tokens", 32), ("repeats", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < low:
                raise ConfigError(f"{name} must be a whole number of at least {low}, not {value!r}; change {name}.")
        if self.only is not None and not self.only:
            raise ConfigError("only must name at least one experiment, not none; leave it out for all.")
        for only in self.only or ():
            refuse_unknown("experiment", only, EXPERIMENTS)
        self.engine_config()


def run_experiments(options: ExperimentOptions, progress: Progress) -> dict[str, Any]:
    """Make the experiments.

    Returns plain data for JSON::

        version, options, machine    as in run_bench
        model                        name, quantization, device, exactness
        findings                     one per experiment:
            name, claim, source      what is claimed, and where
            verdict                  "holds" or "does not hold here"
            rule                     when it holds
            said                     a sentence with the main numbers
            numbers                  all numbers, by name

    Raises:
        ForedraftError: see the tree in foredraft.types.
    """
    progress.note(f"loading {options.model}")
    llm = LLM(options.model, speculative_config=SpeculativeConfig(PLAIN), **asdict(options.engine_config()))
    for line in llm.describe():
        progress.note(line)
    machine = describe_machine()
    bench = Bench(llm, _prompts(llm, options.max_tokens), options.max_tokens, options.repeats, options.seed)
    names = [name for name in EXPERIMENTS if options.only is None or name in options.only]
    if "batch" in names:
        _check_room(bench)
    findings = []
    for index, name in enumerate(names):
        progress.part(name.replace("_", " "), index, len(names))
        found = EXPERIMENTS[name](bench)
        findings.append(_plain(name, found))
        progress.note(f"{name}: {findings[-1]['verdict']}: {found.said}")
    progress.part("done", len(names), len(names))
    return {
        "version": __version__,
        "options": asdict(options),
        "machine": machine,
        "model": {
            "name": options.model,
            "quantization": llm.checkpoint.quantization,
            "device": resolve_device(options.device),
            "exactness": llm.target.exactness,
        },
        "findings": findings,
    }


def _prompts(llm: LLM, max_tokens: int) -> dict[str, list[list[int]]]:
    """Token ids of the built-in prompts by category; those that do not fit are left out."""
    found: dict[str, list[list[int]]] = {}
    for category in CATEGORIES:
        some = [prompt_tokens(llm, workload) for workload in WORKLOADS if workload.category == category]
        fitting = [ids for ids in some if len(ids) + max_tokens <= llm.max_model_len]
        if fitting:
            found[category] = fitting
    if len(found) < len(CATEGORIES):
        raise RequestError(
            f"the experiments' prompts with {max_tokens} tokens do not fit into {llm.max_model_len}; raise max_model_len."
        )
    return found


def _check_room(bench: Bench) -> None:
    """Find out before the first experiment that the largest batch, which needs most, finds no room."""
    size, free = max(BATCHES), bench.llm.kv.num_available
    needed = blocks_needed(bench.llm, 2, (bench.firsts * size)[:size], bench.max_tokens)
    if needed > free:
        raise ConfigError(f"the experiments may need {needed} cache blocks, but {free} are free; raise kv_cache_memory.")


def _plain(name: str, found: Finding) -> dict[str, Any]:
    verdict = HOLDS if found.holds else DOES_NOT
    return {"name": name, **{key: value for key, value in asdict(found).items() if key != "holds"}, "verdict": verdict}


def format_experiments(result: Mapping[str, Any]) -> str:
    """A result of ``run_experiments`` as plain text."""
    machine, model = result["machine"], result["model"]
    rows: list[tuple[str, ...]] = [("claim", "verdict")]
    rows += [(finding["claim"], finding["verdict"]) for finding in result["findings"]]
    head = (
        f"{model['name']} ({model['quantization']}) on {model['device']}: {machine['gpu'] or machine['cpu']}, "
        f"{machine['cores']} cores, load {machine['load']:.1f}"
    )
    details = [
        f"{finding['name']}: {finding['verdict']}\n  {finding['said']}\n  Rule: {finding['rule']}  Source: {finding['source']}."
        for finding in result["findings"]
    ]
    return "\n\n".join([head, aligned(rows, num_left=2), *details])
