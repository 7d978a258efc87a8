"""Metrics for Prometheus: vLLM's names where vLLM has one, and what is ours under ``foredraft_``.

Owns: names, labels and buckets.  Does not know: how the numbers came about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from foredraft.llm import LLM
from foredraft.outputs import RequestOutput

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Metrics:
    """All metrics of one server, labelled with the name of its model.

    ``render`` takes the monitor's state and the engine's counters, both read in the engine's thread.
    """

    def __init__(self, model: str) -> None:
        self._labels = {"model_name": model}
        self.registry = CollectorRegistry()
        self._engine = _EngineCollector(self._labels)
        self.registry.register(self._engine)
        self._first_token = self._histogram("vllm:time_to_first_token_seconds", "Until the first token.", SECONDS)
        self._per_token = self._histogram("vllm:request_time_per_output_token_seconds", "Per token after the first.", TOKEN_SECONDS)
        self._latency = self._histogram("vllm:e2e_request_latency_seconds", "Until the last token.", SECONDS)
        self._prompt_tokens = self._histogram("vllm:request_prompt_tokens", "Tokens of a request's prompts.", TOKENS)
        self._answer_tokens = self._histogram("vllm:request_generation_tokens", "Tokens of a request's answers.", TOKENS)
        prompts = Counter("vllm:prompt_tokens", "Tokens of prompts.", tuple(self._labels), registry=self.registry)
        self._prompts = prompts.labels(**self._labels)
        self._responses = Counter(
            "foredraft_http_responses", "Responses by path and status.", ("model_name", "path", "status"), registry=self.registry
        )

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        family = Histogram(name, text, tuple(self._labels), buckets=tuple(buckets), registry=self.registry)
        return family.labels(**self._labels)

    def count_prompt(self, num_tokens: int) -> None:
        """A prompt was taken."""
        self._prompts.inc(num_tokens)

    def count_answer(self, output: RequestOutput, num_tokens: int) -> None:
        """A request has ended after ``num_tokens`` tokens."""
        metrics = output.metrics
        self._prompt_tokens.observe(len(output.prompt_token_ids))
        self._answer_tokens.observe(num_tokens)
        self._latency.observe(metrics.latency)
        if metrics.time_to_first_token is not None:
            self._first_token.observe(metrics.time_to_first_token)
            per_sequence = num_tokens / len(output.outputs)
            if per_sequence > 1:
                self._per_token.observe((metrics.latency - metrics.time_to_first_token) / (per_sequence - 1))

    def count_response(self, path: str, status: int) -> None:
        """A response was sent."""
        self._responses.labels(**self._labels, path=path, status=str(status)).inc()

    def render(self, state: Mapping[str, Any], counters: Mapping[str, Any]) -> bytes:
        """The text that Prometheus scrapes."""
        self._engine.state, self._engine.counters = state, counters
        return generate_latest(self.registry)


def engine_counters(llm: LLM) -> dict[str, Any]:
    """The engine's counters as plain data; read in the engine's thread."""
    return {
        **llm.engine.metrics.snapshot(),
        "prefix_queries": llm.kv.num_queried_tokens,
        "prefix_hits": llm.kv.num_hit_tokens,
        "drafts": sum(stats.target_passes for name, stats in llm.engine.metrics.per_drafter.items() if name != "none"),
    }


class _EngineCollector(Collector):
    """Shows what was read of the engine last."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._names, self._values = list(labels), list(labels.values())
        self.state: Mapping[str, Any] = {}
        self.counters: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        """All families."""
        if self.state:
            yield from self._gauges(self.state)
            yield from self._counts(self.counters)

    def describe(self) -> list[Metric]:
        """Nothing, so that registering needs no numbers."""
        return []

    def _gauges(self, state: Mapping[str, Any]) -> Iterator[Metric]:
        for name, text, key in (
            ("vllm:num_requests_running", "Answers that are being written.", "running"),
            ("vllm:num_requests_waiting", "Answers that wait for a place.", "waiting"),
            ("vllm:kv_cache_usage_perc", "Share of the KV cache in use, from 0 to 1.", "kv_usage"),
            ("foredraft_num_speculative_tokens", "Mean K of the last two seconds.", "k"),
            ("foredraft_speedup_estimate", "Tokens per second over those of plain decoding, estimated.", "speedup_estimate"),
            ("foredraft_tokens_per_second", "Emitted in the last two seconds.", "tokens_per_second"),
            ("foredraft_pass_milliseconds", "Mean of a target pass in the last two seconds.", "pass_ms"),
            ("foredraft_draft_milliseconds", "Mean of a step's drafting in the last two seconds.", "draft_ms"),
        ):
            yield self._one(GaugeMetricFamily, name, text, state[key])
        on = GaugeMetricFamily(
            "foredraft_speculation_on", "1 while drafts are verified, and why or why not.", labels=[*self._names, "reason"]
        )
        on.add_metric([*self._values, state["reason"]], float(state["state"] == "on"))
        yield on

    def _counts(self, counters: Mapping[str, Any]) -> Iterator[Metric]:
        for name, text, key in (
            ("vllm:generation_tokens", "Tokens of answers.", "emitted_tokens"),
            ("vllm:num_preemptions", "Requests that had to give up their place.", "preemptions"),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
            ("vllm:prefix_cache_hits", "Prompt tokens found there.", "prefix_hits"),
            ("vllm:spec_decode_num_drafts", "Passes that verified a draft.", "drafts"),
            ("vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified.", "drafted_tokens"),
            ("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", "accepted_tokens"),
        ):
            yield self._one(CounterMetricFamily, name, text, counters[key])
        yield self._many("vllm:request_success", "Answers by how they ended.", "finished_reason", counters["finished"])
        accepted = {str(i): num for i, num in enumerate(counters["accepted_per_position"])}
        yield self._many("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted by place in the draft.", "position", accepted)
        for key in ("drafted", "accepted"):
            counts = {name: stats[f"{key}_tokens"] for name, stats in counters["per_drafter"].items() if name != "none"}
            yield self._many(f"foredraft_{key}_tokens", f"Draft tokens {key}, by drafter.", "drafter", counts)
        seconds = {phase: 1e-3 * value for phase, value in counters["milliseconds"].items()}
        yield self._many("foredraft_phase_seconds", "Time by phase of a step.", "phase", seconds)

    def _one(self, family: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, value: float) -> Metric:
        metric = family(name, text, labels=self._names)
        metric.add_metric(self._values, float(value))
        return metric

    def _many(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        metric = CounterMetricFamily(name, text, labels=[*self._names, label])
        for key, value in values.items():
            metric.add_metric([*self._values, key], float(value))
        return metric
