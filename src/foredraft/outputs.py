"""What a request gets back, in vLLM's shapes and names, plus what speculation did.

Owns: the result types.  Does not know: how they are filled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from foredraft.types import SpeculationStats, TokenLogprobs


@dataclass(frozen=True)
class CompletionOutput:
    """One of a request's ``n`` answers.

    ``token_ids`` include the EOS or stop token that ended it.  ``text`` is that of all of them, cut at a stop string: the text of
    one of ``stop_token_ids`` is part of it, and EOS, which is a special token, has text only with ``skip_special_tokens=False``.
    ``finish_reason`` is ``stop``, ``length``, ``abort``, ``error``, or None while it goes on; ``stop_reason`` is the stop string,
    the stop token id, or what went wrong; None for EOS.  ``origins`` names each token's way into the answer: plain, accepted,
    recovered or bonus.  ``drafter`` made the draft that was verified last, ``none`` for none, and ``num_drafted`` counts the draft
    tokens that were verified.  From ``LLM.stream`` text, token_ids, logprobs, origins and num_drafted hold only what is new.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    origins: list[str] = field(default_factory=list)
    drafter: str = "none"
    num_drafted: int = 0


@dataclass(frozen=True)
class RequestMetrics:
    """Seconds since submission until the first and the last token, and speculation's counters over all answers."""

    time_to_first_token: float | None
    latency: float
    speculation: SpeculationStats


@dataclass(frozen=True)
class RequestOutput:
    """One request's result.  ``seed`` is the one used, drawn by the engine when the request had none.

    ``num_cached_tokens`` are those of the prompt that the prefix cache held when the request began.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    seed: int
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0

    @property
    def usage(self) -> dict[str, int]:
        """Token counts, as an OpenAI-style server reports them."""
        num_prompt, num_completion = len(self.prompt_token_ids), sum(len(output.token_ids) for output in self.outputs)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_completion, "total_tokens": num_prompt + num_completion}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "request_id": self.request_id,
            "seed": self.seed,
            "prompt_token_ids": self.prompt_token_ids,
            "outputs": [
                {
                    "index": output.index,
                    "text": output.text,
                    "token_ids": output.token_ids,
                    "finish_reason": output.finish_reason,
                    "stop_reason": output.stop_reason,
                    "cumulative_logprob": output.cumulative_logprob,
                    "logprobs": _plain_logprobs(output.logprobs),
                    "origins": output.origins,
                }
                for output in self.outputs
            ],
            "prompt_logprobs": _plain_logprobs(self.prompt_logprobs),
            "usage": self.usage,
            "num_cached_tokens": self.num_cached_tokens,
            "metrics": {
                "time_to_first_token": self.metrics.time_to_first_token,
                "latency": self.metrics.latency,
                "speculation": self.metrics.speculation.to_dict(),
            },
        }


def _plain_logprobs(entries: list[TokenLogprobs] | list[TokenLogprobs | None] | None) -> list[Any] | None:
    if entries is None:
        return None
    return [entry and {token: [value.logprob, value.rank] for token, value in entry.items()} for entry in entries]
