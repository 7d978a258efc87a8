"""The shape of answers: OpenAI's objects, whole and in chunks, and the field ``foredraft`` with what is ours.

Owns: names and places of everything in a response.  Does not know: where answers come from, or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foredraft.loader import Detokenizer, Tokenizer
from foredraft.outputs import CompletionOutput, RequestOutput
from foredraft.server.jobs import Job
from foredraft.server.tools import read_call
from foredraft.types import Logprob, SpeculationStats, TokenLogprobs

# What stands for minus infinity, which JSON cannot hold.
LEAST_LOGPROB = -9999.0


def _bounded(logprob: float) -> float:
    return max(LEAST_LOGPROB, logprob)


def _usage(outputs: Sequence[RequestOutput], num_completion: int) -> dict[str, Any]:
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


def statistics_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """What speculation did for a request, over all of its answers."""
    stats = SpeculationStats.merged([output.metrics.speculation for output in outputs])
    return {**stats.to_dict(), "speedup_estimate": stats.speedup_estimate}


class Reply:
    """Writes one response, chunk by chunk or whole.  ``outputs`` are always one per prompt, in order.

    Args:
        identity: ``id``, ``created``, ``model`` and ``system_fingerprint``.
        job: what was asked.
        tokenizer: the model's.
    """

    kind = chunk_kind = ""

    def __init__(self, identity: dict[str, Any], job: Job, tokenizer: Tokenizer) -> None:
        self._identity = identity
        self._job = job
        self._tokenizer = tokenizer
        self._ended: set[int] = set()
        self._has_begun = False
        self.num_tokens = [0] * len(job.prompts)
        skips = job.params.skip_special_tokens
        self._texts = [
            Detokenizer(tokenizer, prompt, skip_special_tokens=skips) for prompt in job.prompts for _ in range(job.params.n)
        ]

    @property
    def num_completion(self) -> int:
        """Tokens of all answers so far; ``num_tokens`` are those of each prompt's."""
        return sum(self.num_tokens)

    # -------------------------------------------------------------------------------------------- whole

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response to a request that is not streamed."""
        pairs = [(self._index(i, choice), choice) for i, output in enumerate(outputs) for choice in output.outputs]
        self.num_tokens = [sum(len(choice.token_ids) for choice in output.outputs) for output in outputs]
        own: dict[str, Any] = {"seed": outputs[0].seed}
        if self._job.statistics:
            own["statistics"] = statistics_of(outputs)
        return {
            **self._identity,
            "object": self.kind,
            "choices": [{"index": index, **self._whole_choice(index, choice)} for index, choice in pairs],
            "usage": _usage(outputs, self.num_completion),
            "foredraft": own,
        }

    # -------------------------------------------------------------------------------------------- chunks

    def opening(self) -> list[dict[str, Any]]:
        """Chunks that come before any token."""
        return []

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Chunks for what is new of the answers to one prompt."""
        chunks = []
        for choice in output.outputs:
            index = self._index(prompt_index, choice)
            has_ended = choice.finish_reason is not None and index not in self._ended
            shows_tokens = choice.token_ids and (self._job.num_top is not None or self._job.include_speculation)
            self.num_tokens[prompt_index] += len(choice.token_ids)
            if not (choice.text or shows_tokens or has_ended):
                continue
            own = {"foredraft": self._tokens(index, choice)} if self._job.include_speculation else {}
            chunks.append(self._chunk([self._delta_choice(index, choice)], own))
            if has_ended:
                self._ended.add(index)
        return chunks

    def closing(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Chunks that come after all answers; ``outputs`` are each prompt's last."""
        own: dict[str, Any] = {"seed": outputs[0].seed}
        if self._job.include_speculation or self._job.statistics:
            own["statistics"] = statistics_of(outputs)
        if not self._job.include_usage:
            return [self._chunk([], {"foredraft": own})] if "statistics" in own else []
        return [self._chunk([], {"usage": _usage(outputs, self.num_completion), "foredraft": own})]

    def _chunk(self, choices: list[dict[str, Any]], own: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._job.include_usage else {}
        if not self._has_begun:
            self._has_begun = True
            own = {**own, "foredraft": {**own.get("foredraft", {}), "seed": self._job.params.seed}}
        return {**self._identity, "object": self.chunk_kind, "choices": choices, **usage, **own}

    def _tokens(self, index: int, choice: CompletionOutput) -> dict[str, Any]:
        """The tokens of a chunk, each with the characters that it completed and its origin."""
        sink, tokens = self._texts[index], []
        for token, origin in zip(choice.token_ids, choice.origins, strict=True):
            sink.push(token, may_stop=False)
            tokens.append({"id": token, "text": sink.take_delta(final=False), "origin": origin})
        return {"tokens": tokens, "drafter": choice.drafter, "num_drafted": choice.num_drafted}

    # -------------------------------------------------------------------------------------------- parts

    def _index(self, prompt_index: int, choice: CompletionOutput) -> int:
        return prompt_index * self._job.params.n + choice.index

    def _whole_choice(self, index: int, choice: CompletionOutput) -> dict[str, Any]:
        raise NotImplementedError

    def _delta_choice(self, index: int, choice: CompletionOutput) -> dict[str, Any]:
        raise NotImplementedError

    def _top(self, entry: TokenLogprobs) -> list[tuple[int, Logprob]]:
        """The likeliest tokens, as many as were asked for."""
        ranked = sorted(entry.items(), key=lambda item: item[1].rank)
        return [(token, value) for token, value in ranked if value.rank <= (self._job.num_top or 0)]


class ChatReply(Reply):
    """``chat.completion`` and its chunks."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        """The role of each answer."""
        return [
            self._chunk(
                [{"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}], {}
            )
            for index in range(self._job.num_choices)
        ]

    def __init__(self, identity: dict[str, Any], job: Job, tokenizer: Tokenizer) -> None:
        super().__init__(identity, job, tokenizer)
        self._call_texts = [""] * job.num_choices

    def _whole_choice(self, index: int, choice: CompletionOutput) -> dict[str, Any]:
        content, reason = self._said(index, choice.text, choice.finish_reason)
        return {
            "message": {"role": "assistant", "content": None, "refusal": None, **content},
            "logprobs": self._logprobs(choice),
            "finish_reason": reason,
        }

    def _delta_choice(self, index: int, choice: CompletionOutput) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": choice.text} if choice.text else {}
        reason = choice.finish_reason
        if self._job.is_call:
            # A call is told when it is complete: only then its name and arguments can be told apart for certain.
            self._call_texts[index] += choice.text
            delta, reason = self._said(index, self._call_texts[index], reason) if reason is not None else ({}, None)
            for place, call in enumerate(delta.get("tool_calls", ())):
                call["index"] = place
        return {"index": index, "delta": delta, "logprobs": self._logprobs(choice), "finish_reason": reason}

    def _said(self, index: int, text: str, reason: str | None) -> tuple[dict[str, Any], str | None]:
        """What a whole answer says, text or a call, and its finish reason."""
        call = read_call(text, f"call_{self._identity['id'][-24:]}{index:02d}") if self._job.is_call else None
        return ({"content": text}, reason) if call is None else ({"tool_calls": [call]}, "tool_calls")

    def _logprobs(self, choice: CompletionOutput) -> dict[str, Any] | None:
        if choice.logprobs is None:
            return None
        content = [
            {**self._entry(token, entry[token]), "top_logprobs": [self._entry(*top) for top in self._top(entry)]}
            for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, value: Logprob) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": _bounded(value.logprob), "bytes": list(raw)}


class CompletionReply(Reply):
    """``text_completion``, whole and in chunks."""

    kind = chunk_kind = "text_completion"

    def __init__(self, identity: dict[str, Any], job: Job, tokenizer: Tokenizer) -> None:
        super().__init__(identity, job, tokenizer)
        self._offsets = [0] * job.num_choices

    def _whole_choice(self, index: int, choice: CompletionOutput) -> dict[str, Any]:
        return {
            "text": choice.text,
            "logprobs": self._logprobs(index, choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _delta_choice(self, index: int, choice: CompletionOutput) -> dict[str, Any]:
        return {"index": index, **self._whole_choice(index, choice)}

    def _logprobs(self, index: int, choice: CompletionOutput) -> dict[str, Any] | None:
        if choice.logprobs is None:
            return None
        text = self._tokenizer.token_bytes
        tokens = [text(token).decode("utf-8", "replace") for token in choice.token_ids]
        offsets = []
        for piece in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(piece)
        pairs = list(zip(choice.token_ids, choice.logprobs, strict=True))
        return {
            "tokens": tokens,
            "token_logprobs": [_bounded(entry[token].logprob) for token, entry in pairs],
            "top_logprobs": [
                {text(token).decode("utf-8", "replace"): _bounded(value.logprob) for token, value in self._top(entry)}
                for _, entry in pairs
            ],
            "text_offset": offsets,
        }
