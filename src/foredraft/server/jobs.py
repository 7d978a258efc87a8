"""From a body to what the engine is asked.

Owns: which field becomes which sampling parameter, default lengths, and the server's own limits.  Does not know: HTTP, or how an
answer is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foredraft.errors import shown
from foredraft.llm import LLM
from foredraft.params import SamplingParams
from foredraft.server.problems import STRUCTURED, bad_request, problem_of
from foredraft.server.protocol import ChatRequest, CompletionRequest, SamplingFields
from foredraft.server.settings import ServerConfig
from foredraft.server.structured import form_of
from foredraft.server.tools import call_schema, chosen_tools, plain_messages, with_tools
from foredraft.types import RequestError

# Fields that carry over under their own name; None keeps the engine's default.
CARRIED = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "speculative",
)
PARAMETER_NAMES = (*CARRIED, "max_tokens", "seed", "logprobs", "top_logprobs", "messages", "prompt", STRUCTURED)


@dataclass(frozen=True)
class Job:
    """What one request asks of the engine: the prompts as token ids, and how each is continued.

    ``num_top``: alternatives to show at each token, None for no log-probabilities at all.  ``form``: the field that gives the
    answer a form, "" for none.  ``is_call``: the answer is the call of a function.
    """

    prompts: list[list[int]]
    params: SamplingParams
    num_top: int | None
    stream: bool
    include_usage: bool
    include_speculation: bool
    statistics: bool
    form: str = ""
    is_call: bool = False

    @property
    def num_choices(self) -> int:
        """Answers in all."""
        return len(self.prompts) * self.params.n


class JobMaker:
    """Turns bodies into jobs.  ``draw_seed`` gives the seed of a request that has none.

    It encodes prompts and compiles grammars, which may take a while: call it in a thread of its own.
    """

    def __init__(self, llm: LLM, config: ServerConfig, draw_seed: Callable[[], int]) -> None:
        self._tokenizer = llm.checkpoint.tokenizer
        self._grammars = llm.grammars
        self._vocab_size = llm.target.vocab_size
        self._check_length = llm.engine.check
        self._max_model_len = llm.max_model_len
        self._max_cached = llm.kv.num_blocks * llm.kv.block_size
        self._config = config
        self._draw_seed = draw_seed

    def chat(self, body: ChatRequest) -> Job:
        """The job of a chat request.

        Raises:
            Problem, RequestError: a field is wrong.
        """
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true; set it or leave top_logprobs out.", "top_logprobs")
        num_top = self._num_top(body.top_logprobs or 0, "top_logprobs") if body.logprobs else None
        tools = chosen_tools(body)
        prompt = self._tokenizer.encode_chat(with_tools(plain_messages(body.messages), tools))
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        if body.max_completion_tokens is not None and body.max_tokens not in (None, body.max_completion_tokens):
            raise bad_request("max_tokens and max_completion_tokens differ; leave max_tokens out.", "max_tokens")
        schema = call_schema(tools) if tools else None
        return self._job(body, [prompt], num_top, self._room(prompt) if limit is None else limit, schema)

    def completion(self, body: CompletionRequest) -> Job:
        """The job of a completion request.

        Raises:
            Problem, RequestError: a field is wrong.
        """
        num_top = None if body.logprobs is None else self._num_top(body.logprobs, "logprobs")
        prompts = self._prompts(body.prompt)
        return self._job(body, prompts, num_top, 16 if body.max_tokens is None else body.max_tokens)

    def _job(
        self,
        body: SamplingFields,
        prompts: list[list[int]],
        num_top: int | None,
        max_tokens: int,
        schema: dict[str, Any] | None = None,
    ) -> Job:
        self._check(body, len(prompts))
        carried = {name: value for name in CARRIED if (value := getattr(body, name)) is not None}
        name, form = form_of(body, schema)
        if name:
            carried[STRUCTURED] = form
        seed = self._draw_seed() if body.seed is None else body.seed
        try:
            params = SamplingParams(**carried, max_tokens=max_tokens, seed=seed, logprobs=num_top)
            self._check_prompts(prompts, params.max_tokens)
            if params.structured_outputs is not None:
                self._grammars.start(params.structured_outputs)  # the engine finds it compiled, and no answer waits for it
        except RequestError as error:
            raise problem_of(error, PARAMETER_NAMES, name) from error
        options = body.stream_options
        if options is not None and not body.stream:
            raise bad_request("stream_options needs stream to be true; set it or leave stream_options out.", "stream_options")
        return Job(
            prompts=prompts,
            params=params,
            num_top=num_top,
            stream=bool(body.stream),
            include_usage=options is not None and options.include_usage,
            include_speculation=options is not None and options.include_speculation,
            statistics=body.speculation_statistics,
            form=name,
            is_call=schema is not None,
        )

    def _check(self, body: SamplingFields, num_prompts: int) -> None:
        config = self._config
        num_choices = num_prompts * max(1, 1 if body.n is None else body.n)
        if num_choices > config.max_choices:
            name = "n" if num_prompts == 1 else "prompt"
            raise bad_request(
                f"{name} asks for {shown(num_choices)} answers, and one request may have {config.max_choices}; "
                "send several requests.",
                name,
            )
        if isinstance(body.stop, list) and len(body.stop) > config.max_stop_strings:
            raise bad_request(f"stop may hold at most {config.max_stop_strings} strings, not {len(body.stop)}.", "stop")

    def _check_prompts(self, prompts: list[list[int]], max_tokens: int) -> None:
        """What the engine will check, done here, since a reply reads the prompts before it asks the engine."""
        for prompt in prompts:
            wrong = next((token for token in prompt if not 0 <= token < self._vocab_size), None)
            if wrong is not None:
                raise RequestError(f"prompt token ids must be from 0 to {self._vocab_size - 1}, not {shown(wrong)}; remove it.")
            self._check_length(len(prompt), max_tokens)

    def _num_top(self, num: int, name: str) -> int:
        most = self._config.max_logprobs
        if not 0 <= num <= most:
            raise bad_request(f"{name} must be from 0 to {most}, not {num}; change {name}.", name)
        return num

    def _room(self, prompt: list[int]) -> int:
        """Tokens that can follow a prompt; at least 1, so that a prompt that is too long is refused as such."""
        return max(1, min(self._max_model_len, self._max_cached + 1) - len(prompt))

    def _prompts(self, prompt: str | list[int] | list[str] | list[list[int]]) -> list[list[int]]:
        many: list[Any] = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else list(prompt)
        if not many:
            raise bad_request("prompt must hold at least one prompt; write one.", "prompt")
        if len(many) > self._config.max_choices:
            raise bad_request(f"prompt may hold at most {self._config.max_choices} prompts, not {len(many)}.", "prompt")
        encoded = [self._tokenizer.encode(one) if isinstance(one, str) else list(one) for one in many]
        if not all(encoded):
            raise bad_request("a prompt must have at least 1 token, not 0; write a prompt.", "prompt")
        return encoded
