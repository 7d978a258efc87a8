"""Text in, text out: builds every part once and runs requests through the engine.

Owns: composition, the life of a request, and results.  Does not know: how a step works or what a drafter does.
"""

from __future__ import annotations

import os
import platform
import random
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from foredraft import __version__
from foredraft.calibration import Identity, pass_times
from foredraft.capacity import plan_memory
from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.controller import Controller
from foredraft.cost import PassCost, PassTimes
from foredraft.draft_parts import DraftParts, build_target
from foredraft.drafters import registry
from foredraft.drafters.context import DrafterFactory
from foredraft.engine import Emission, Engine
from foredraft.grammar import Grammars, TokenTable
from foredraft.kv_cache import KVCache
from foredraft.loader import Detokenizer, Progress, cache_dir, load_checkpoint
from foredraft.outputs import CompletionOutput, RequestMetrics, RequestOutput
from foredraft.types import (
    Drafter,
    RequestError,
    SamplingParams,
    Sequence,
    SpeculationStats,
    TokenLogprobs,
    TokenRules,
)
from foredraft.verify import RULES

Prompt = str | Seq[int] | Mapping[str, Any]
Message = Mapping[str, str]


@dataclass
class Request:
    """A submitted request: its sequences, and what has been handed out of each.

    ``news`` are the requests of the same call, by id, that a step touched since the call last looked, whoever made that step.
    """

    request_id: str
    prompt: str | None
    params: SamplingParams
    seed: int
    seqs: list[Sequence]
    texts: list[Detokenizer]
    submitted: float
    first_token: float | None = None
    num_taken: list[int] = field(default_factory=list)
    num_drafted_taken: list[int] = field(default_factory=list)
    news: dict[str, Request] | None = field(default=None, repr=False, compare=False)
    prompt_logprobs: list[Any] | None = None

    @property
    def finished(self) -> bool:
        """True when every sequence has ended."""
        return all(seq.finish_reason is not None for seq in self.seqs)


class LLM:
    """One target model, ready to answer.  Not safe for use from several threads; AsyncLLM is.

    ``memory`` is the plan that it was built by: bytes of every buffer, and requests that fit at once.
    ``grammars`` compiles the shapes of answers, from any thread.

    Args:
        model: a Hugging Face folder, a .gguf file, a hub id, or an alias such as ``smollm2-135m``.
        speculative_config: a mapping or JSON as vLLM takes it, or a SpeculativeConfig; None is ``auto``.
        drafters: your own drafters by name; ``speculative_config``'s ``method`` may name one, and ``auto`` asks them too.
        trace: called with each of the controller's decisions, see ``foredraft.controller.replay_decision``.
        progress: called with (done_bytes, total_bytes) while a model is fetched.
        also: further methods whose models are loaded, each as an engine of that method has them, for ``new_drafters``.
        options: fields of EngineConfig: device, dtype, ops, seed, max_model_len, kv_cache_memory, threads, block_size,
            max_num_seqs, max_num_batched_tokens, enable_prefix_caching.

    Raises:
        ForedraftError: see the tree in foredraft.types.
    """

    def __init__(
        self,
        model: str,
        *,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        drafters: Mapping[str, DrafterFactory] | None = None,
        progress: Progress | None = None,
        trace: Callable[[Mapping[str, Any]], None] | None = None,
        also: Seq[str] = (),
        **options: Any,
    ) -> None:
        self.config = EngineConfig.from_dict(options)
        self.speculative_config = SpeculativeConfig.parse(speculative_config)
        self._factories = dict(drafters or {})
        registry.check(self.speculative_config, self._factories)
        self.checkpoint = load_checkpoint(model, progress=progress)
        self._parts = parts = DraftParts(self.checkpoint, self.config, self.speculative_config, progress, also)
        self.memory = plan_memory(
            self.checkpoint, parts.draft_model, self.config, self.speculative_config, head=parts.head, sources=parts.sources
        )
        self.max_model_len, num_blocks = self.memory.max_model_len, self.memory.num_blocks
        self.target = build_target(self.checkpoint, self.config, self.max_model_len, num_blocks)
        self.kv = KVCache(num_blocks, self.config.block_size, self.config.enable_prefix_caching)
        self._drafters: dict[str, Drafter] = {}
        self._ensure_drafters(self.speculative_config)
        self.controller = Controller(PassTimes.unknown(), trace)
        self._is_calibrated = False
        if self.speculative_config.adaptive and self._drafters:
            self.calibrate()
        self.engine = Engine(
            self.target,
            self.kv,
            self._drafters,
            RULES[self.speculative_config.rejection_sample_method],
            self.controller,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
        )
        self.grammars = Grammars(self._token_table())
        self._requests: dict[int, Request] = {}
        self._num_requests = 0
        self._num_seqs = 0
        self._draw_seed = random.Random(self.config.seed).getrandbits if self.config.seed is not None else secrets.randbits

    # -------------------------------------------------------------------------------------------- building

    def _token_table(self) -> TokenTable:
        tokenizer = self.checkpoint.tokenizer
        return TokenTable(
            vocab_size=self.target.vocab_size,
            bytes_of=tokenizer.token_bytes,
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
            special_ids=tokenizer.special_ids,
            eos_ids=self.checkpoint.eos_ids,
        )

    def _ensure_drafters(self, config: SpeculativeConfig, *, has_grammar: bool = False) -> tuple[str, ...]:
        """Names of the drafters that ``config`` may ask; those that are not there yet are made."""
        names = registry.members(config, self._factories, self._parts.sources, has_grammar=has_grammar)
        for name in names:
            if name not in self._drafters:
                self._drafters[name] = self._new_drafter(name, config, self.kv)
        return names

    def _new_drafter(self, name: str, config: SpeculativeConfig, kv: KVCache, found: registry.Sources | None = None) -> Drafter:
        context, found = self._parts.context(self.target, kv), found or self._parts.sources
        return registry.create(name, found.settings(name, config), context, self._factories)

    def new_drafters(self, method: str, kv: KVCache | None = None) -> dict[str, Drafter]:
        """Drafters of a method that share nothing with the engine's own but weights, and a draft model's cache.

        ``kv`` accounts for the blocks of the engine that they will serve; None is this one's.
        """
        config, found = replace(self.speculative_config, method=method), self._parts.sources_of(method)
        names = registry.members(config, self._factories, found)
        shared = self._ensure_drafters(replace(config, method="draft_model")) if "draft_model" in names else ()
        return {n: self._drafters[n] if n in shared else self._new_drafter(n, config, kv or self.kv, found) for n in names}

    def calibrate(self) -> PassTimes:
        """What passes take here: measured at first, and since then learned from those that ran.

        While requests hold blocks nothing is measured: they would wait for it, and the rest of the cache may be too small.
        """
        if not self._is_calibrated and self.kv.num_available == self.kv.num_blocks:
            self.controller.cost = PassCost(self._pass_times())
            self._is_calibrated = True
        return self.controller.cost.times

    def time_passes(self, max_rows: int, budget: float) -> PassTimes:
        """What passes of at most ``max_rows`` rows take at this moment, in about ``budget`` seconds; changes nothing."""
        return pass_times(self.target, self.kv, Identity(None, ()), max_rows=max_rows, budget=budget)

    def _pass_times(self) -> PassTimes:
        checkpoint, target = self.checkpoint, self.target
        stat = checkpoint.path.stat()
        machine = f"{platform.node()} {platform.processor()} {os.cpu_count()}"
        parts = (__version__, machine, str(checkpoint.path), str(stat.st_mtime_ns), target.describe(), str(target.threads))
        identity = Identity(cache_dir() / "passes", parts)
        return pass_times(target, self.kv, identity, max_rows=self.config.max_num_batched_tokens)

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods that a request may name, sorted."""
        return registry.usable(self._parts.sources, self._factories)

    def describe(self) -> list[str]:
        """Lines for a start message: model, place, memory, exactness, and whether speculation is on."""
        config, checkpoint = self.speculative_config, self.checkpoint
        names = registry.members(config, self._factories, self._parts.sources)
        speculation = "off (method none)"
        if names and config.num_speculative_tokens:
            which = config.method if names == (config.method,) else f"{config.method} ({', '.join(names)})"
            most = f"{'up to ' if config.adaptive else ''}{config.num_speculative_tokens} tokens"
            speculation = f"{which}, {most}, {config.rejection_sample_method} verification"
        return [f"{checkpoint.name} ({checkpoint.quantization}): {self.target.describe()}", f"speculation: {speculation}"]

    # -------------------------------------------------------------------------------------------- asking

    def generate(
        self, prompts: Prompt | Seq[Prompt], sampling_params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer prompts, batched; results in the order of the prompts.

        A prompt is text, a list of token ids, or a mapping with ``prompt`` or ``prompt_token_ids``.  One SamplingParams serves
        all prompts; a list must have one for each.
        """
        requests = self._submit_all(prompts, sampling_params)
        for _ in self._run(requests):
            pass
        return [self._output(request) for request in requests]

    def chat(
        self,
        conversations: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations (lists of ``{"role": ..., "content": ...}``) by the model's chat template."""
        return self.generate([self.chat_prompt(c) for c in _conversations(conversations)], sampling_params)

    def chat_prompt(self, conversation: Seq[Message]) -> list[int]:
        """A conversation as the token ids that the model continues with its answer."""
        return self.checkpoint.tokenizer.encode_chat(list(conversation))

    def stream(
        self, prompts: Prompt | Seq[Prompt], sampling_params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Like ``generate``, but yields results as they grow; each holds only what is new.  Closing the iterator cancels."""
        requests = self._submit_all(prompts, sampling_params)
        for request in self._run(requests):
            yield self._output(request, only_new=True)

    # -------------------------------------------------------------------------------------------- requests, for servers

    def submit(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, tenant: str = "") -> Request:
        """Queue one request; ``step`` moves it on.  ``tenant`` isolates the prefix cache and shared statistics."""
        if not isinstance(sampling_params, SamplingParams | None):
            raise RequestError(f"sampling_params must be SamplingParams, not {sampling_params!r:.80}; write SamplingParams(...).")
        params = sampling_params or SamplingParams()
        text, token_ids = self._tokenize(prompt)
        config = self.speculative_config.override(params.speculative)
        self._check_request(token_ids, params)
        shape = params.structured_outputs
        grammars = [None if shape is None else self.grammars.start(shape) for _ in range(params.n)]
        drafters = self._ensure_drafters(config, has_grammar=shape is not None)
        if drafters and config.adaptive and not self.engine.has_work:
            self.calibrate()
        seed = params.seed if params.seed is not None else self._draw_seed(63)
        rules = TokenRules(self.checkpoint.eos_ids, self._bad_words(params))
        texts = [self._detokenizer(token_ids, params) for _ in range(params.n)]
        seqs = [
            Sequence(
                seq_id=self._num_seqs + index,
                tokens=list(token_ids),
                num_prompt=len(token_ids),
                params=params,
                seed=seed,
                sample_index=index,
                rules=rules,
                sink=sink,
                grammar=grammars[index],
                tenant=tenant,
                drafters=drafters if config.num_speculative_tokens else (),
                num_speculative_tokens=config.num_speculative_tokens,
                adaptive=config.adaptive,
            )
            for index, sink in enumerate(texts)
        ]
        self._num_seqs += params.n
        zeros = [0] * params.n
        request = Request(
            str(self._num_requests), text, params, seed, seqs, texts, time.perf_counter(), None, list(zeros), list(zeros)
        )
        self._num_requests += 1
        for seq in seqs:
            self._requests[seq.seq_id] = request
            self.engine.add(seq)
        return request

    def step(self) -> list[Request]:
        """Run one engine step; the requests that received tokens."""
        emissions: list[Emission] = self.engine.step()
        now = time.perf_counter()
        touched = list({id(r): r for r in (self._requests[emission.seq.seq_id] for emission in emissions)}.values())
        for request in touched:
            request.first_token = request.first_token or now
            if request.news is not None:
                request.news[request.request_id] = request
        for emission in emissions:
            if emission.seq.finish_reason is not None:
                del self._requests[emission.seq.seq_id]
        return touched

    def abort(self, request: Request) -> None:
        """Cancel a request; what it received so far stays."""
        self._abort_all([request])

    def take(self, request: Request) -> RequestOutput:
        """What a request received since the last ``take``."""
        return self._output(request, only_new=True)

    # -------------------------------------------------------------------------------------------- parts

    def _submit_all(self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None) -> list[Request]:
        many = _prompts(prompts)
        each: list[Any] = list(params) if _is_many(params) else [params] * len(many)
        if len(each) != len(many):
            raise RequestError(
                f"sampling_params must be one for all or one for each of the {len(many)} prompts, not {len(each)}; match them."
            )
        requests: list[Request] = []
        try:
            for prompt, one in zip(many, each, strict=True):
                requests.append(self.submit(prompt, one))
        except BaseException:
            self._abort_all(requests)
            raise
        return requests

    def _abort_all(self, requests: Seq[Request]) -> None:
        """Cancel requests, the others too when a drafter fails at the end of one."""
        with ExitStack() as rest:
            for seq in (seq for request in reversed(requests) for seq in reversed(request.seqs)):
                rest.callback(self._requests.pop, seq.seq_id, None)
                rest.callback(self.engine.cancel, seq)

    def _run(self, requests: list[Request]) -> Iterator[Request]:
        """Step until all are finished, yielding those of ``requests`` that received something; on any exit cancel the rest.

        While the caller holds one of them, others may step, and end any of these.
        """
        news: dict[str, Request] = {}
        left = {request.request_id: request for request in requests}
        for request in requests:
            request.news = news
        try:
            while left:
                if not news:
                    self.step()
                if not news and not self.engine.has_work:  # they ended in a step of others that failed
                    news.update(left)
                while news:
                    request = news.pop(next(iter(news)))
                    if request.finished:
                        left.pop(request.request_id, None)
                    yield request
        finally:
            self._abort_all(requests)

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), _token_ids(prompt["prompt_token_ids"])
            if not isinstance(prompt.get("prompt"), str):
                raise RequestError(f"a prompt mapping must have 'prompt' or 'prompt_token_ids', not {sorted(prompt)}; add one.")
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("a prompt must have at least 1 token, not 0; write a prompt.")
            return prompt, self.checkpoint.tokenizer.encode(prompt)
        return None, _token_ids(prompt)

    def _check_request(self, token_ids: list[int], params: SamplingParams) -> None:
        vocab_size = self.target.vocab_size
        named = {
            "prompt token ids": token_ids,
            "logit_bias": list(params.logit_bias),
            "allowed_token_ids": list(params.allowed_token_ids or ()),
            "stop_token_ids": list(params.stop_token_ids),
        }
        for name, ids in named.items():
            wrong = [token for token in ids if not 0 <= token < vocab_size]
            if wrong:
                raise RequestError(f"{name} must be from 0 to {vocab_size - 1}, not {wrong[0]}; remove it.")
        self.engine.check(len(token_ids), params.max_tokens)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word as it is spelled at a start and after a space."""
        encode = self.checkpoint.tokenizer.encode
        spellings = [encode(text, add_special_tokens=False) for word in params.bad_words for text in (word, " " + word.lstrip())]
        return tuple(dict.fromkeys(tuple(ids) for ids in spellings if ids))

    def _detokenizer(self, token_ids: list[int], params: SamplingParams) -> Detokenizer:
        return Detokenizer(
            self.checkpoint.tokenizer,
            token_ids,
            stop=params.stop,
            skip_special_tokens=params.skip_special_tokens,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )

    def _output(self, request: Request, only_new: bool = False) -> RequestOutput:
        outputs = []
        for index, (seq, text) in enumerate(zip(request.seqs, request.texts, strict=True)):
            start = request.num_taken[index] if only_new else 0
            num_drafted = seq.stats.drafted_tokens
            drafted_start = request.num_drafted_taken[index] if only_new else 0
            request.num_taken[index], request.num_drafted_taken[index] = seq.num_output, num_drafted
            finished = seq.finish_reason is not None
            outputs.append(
                CompletionOutput(
                    index=index,
                    text=text.take_delta(final=finished) if only_new else text.text,
                    token_ids=seq.tokens[seq.num_prompt + start :],
                    cumulative_logprob=_cumulative(seq) if request.params.logprobs is not None else None,
                    logprobs=self._decoded(seq.logprobs[start:]) if request.params.logprobs is not None else None,
                    finish_reason=seq.finish_reason,
                    stop_reason=seq.stop_reason,
                    origins=seq.origins[start:],
                    drafter=seq.last_drafter,
                    num_drafted=num_drafted - drafted_start,
                )
            )
        first = request.seqs[0]
        since = request.submitted
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=first.tokens[: first.num_prompt],
            outputs=outputs,
            finished=request.finished,
            seed=request.seed,
            metrics=RequestMetrics(
                time_to_first_token=None if request.first_token is None else request.first_token - since,
                latency=time.perf_counter() - since,
                speculation=SpeculationStats.merged([seq.stats for seq in request.seqs]),
            ),
            prompt_logprobs=self._prompt_logprobs(request) if request.params.prompt_logprobs is not None else None,
            num_cached_tokens=first.num_prompt_cached or 0,
        )

    def _prompt_logprobs(self, request: Request) -> list[Any]:
        """Decoded once, when all are there: every piece of a stream holds them."""
        first = request.seqs[0]
        decoded = request.prompt_logprobs or self._decoded(first.prompt_logprobs)
        if len(decoded) == first.num_prompt:
            request.prompt_logprobs = decoded
        return list(decoded)

    def _decoded(self, entries: Seq[TokenLogprobs | None]) -> list[Any]:
        decode = self.checkpoint.tokenizer.decode
        return [
            entry
            and {token: replace(value, decoded_token=decode([token], skip_special_tokens=False)) for token, value in entry.items()}
            for entry in entries
        ]


def _cumulative(seq: Sequence) -> float:
    pairs = zip(seq.tokens[seq.num_prompt :], seq.logprobs, strict=True)
    return sum(entry[token].logprob for token, entry in pairs)


def _token_ids(prompt: object) -> list[int]:
    ids: list[Any] = list(prompt) if isinstance(prompt, Seq) else []
    if not isinstance(prompt, Seq) or not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise RequestError(f"a prompt must be text or a list of token ids, not {prompt!r:.80}; write it as text.")
    return ids


def _prompts(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list; a flat list of numbers is one prompt of token ids."""
    many: list[Any] = list(prompts) if _is_many(prompts) else [prompts]
    return [many] if _is_many(prompts) and many and all(isinstance(item, int) for item in many) else many


def _is_many(value: object) -> TypeGuard[Iterable[Any]]:
    return isinstance(value, Iterable) and not isinstance(value, str | Mapping)


def _conversations(conversations: Seq[Any]) -> list[Seq[Message]]:
    """One conversation or many, as a list."""
    many = list(conversations)
    return [many] if many and isinstance(many[0], Mapping) else many
