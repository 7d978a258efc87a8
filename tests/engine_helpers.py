"""Engines on a small target, requests to run on them, and what must come out.

Owns: the reference (a loop that knows no engine), the drafters under test, and the comparison.  Does not know: any single test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol, cast

from foredraft.array_file import ArrayFile
from foredraft.controller import Controller
from foredraft.cost import PassTimes
from foredraft.drafters.context import draws_for
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.eagle import EagleDrafter
from foredraft.drafters.ngram import NgramDrafter
from foredraft.drafters.ngram_table import NgramTable
from foredraft.drafters.suffix import SuffixDrafter
from foredraft.engine import Emission, Engine
from foredraft.grammar import Grammars, TokenTable
from foredraft.kv_cache import KVCache
from foredraft.loader import Detokenizer
from foredraft.replay import Record
from foredraft.sampling import STREAM_TARGET, PositionNoise, distribution, token_logprobs
from foredraft.testing.toy import ScriptedDrafter, TableTarget
from foredraft.train.suffix import fit
from foredraft.types import (
    Clock,
    Drafter,
    FloatArray,
    Grammar,
    RequestError,
    SamplingParams,
    Sequence,
    Target,
    TextSink,
    TokenLogprobs,
    TokenRules,
)
from foredraft.verify import RULES, Rule
from toy_head import toy_eagle

Tokens = tuple[int, ...]
FAR_MORE_STEPS_THAN_ANY_TEST_NEEDS = 5000


def letter(token: int) -> str:
    """The text of a token: one letter each."""
    return chr(ord("a") + token) if token < 26 else chr(0x4E00 + token)


def text_of(tokens: Iterable[int]) -> str:
    return "".join(letter(token) for token in tokens)


class LetterSink:
    """A TextSink for one-letter tokens: what has been pushed, and the stop strings to watch for."""

    def __init__(self, stop: Seq[str] = ()) -> None:
        self.text = ""
        self._stop = stop

    def push(self, token: int, *, may_stop: bool) -> str | None:
        self.text += letter(token)
        return next((word for word in self._stop if may_stop and self.text.endswith(word)), None)


def letter_sink(prompt: Seq[int], params: SamplingParams) -> TextSink:
    return LetterSink(params.stop)


@cache
def _letter_grammars(vocab_size: int, eos_ids: frozenset[int]) -> Grammars:
    def encode(text: str) -> list[int]:
        return [token for char in text for token in range(vocab_size) if letter(token) == char]

    return Grammars(TokenTable(vocab_size, lambda token: letter(token).encode(), encode, eos_ids=eos_ids))


def letter_grammar(request: Request) -> Grammar | None:
    """What the request asks for, over eight letters; None also where these cannot write it."""
    if request.params.structured_outputs is None:
        return None
    try:
        return _letter_grammars(8, request.rules.eos_ids).start(request.params.structured_outputs)
    except RequestError:
        return None


@dataclass(frozen=True)
class Request:
    """What a sequence is made of, as often as needed."""

    prompt: Tokens
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 7
    sample_index: int = 0
    rules: TokenRules = field(default_factory=TokenRules)
    tenant: str = ""
    make_sink: Callable[[Seq[int], SamplingParams], TextSink] = field(default=letter_sink, repr=False)

    def sequence(self, drafter: str = "none", num_speculative_tokens: int = 0, seq_id: int = 0, adaptive: bool = False) -> Sequence:
        """``drafter`` may name several, joined by a plus sign."""
        return Sequence(
            seq_id,
            list(self.prompt),
            len(self.prompt),
            self.params,
            self.seed,
            self.sample_index,
            self.rules,
            self.make_sink(self.prompt, self.params),
            self.tenant,
            () if drafter == "none" else tuple(drafter.split("+")),
            num_speculative_tokens,
            adaptive,
            grammar=letter_grammar(self),
        )

    def but(self, **changes: object) -> Request:
        """The same request with other sampling parameters."""
        return replace(self, params=replace(self.params, **changes))


@dataclass(frozen=True)
class Outcome:
    """All that a request receives; floats are compared exactly."""

    tokens: Tokens
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...]
    text: str

    @classmethod
    def of(cls, seq: Sequence) -> Outcome:
        tokens = tuple(seq.tokens[seq.num_prompt :])
        assert all(type(token) is int for token in tokens), tokens
        return cls(tokens, seq.finish_reason, seq.stop_reason, tuple(seq.logprobs), tuple(seq.prompt_logprobs), text_in(seq))


def text_in(seq: Sequence) -> str:
    assert isinstance(seq.sink, LetterSink | Detokenizer), seq.sink
    return seq.sink.text


class LabTarget(Target, Protocol):
    """A target that says how large its cache is, and what the definition of a row is."""

    block_size: int

    def row(self, context: list[int]) -> FloatArray:
        """Logits of the token after ``context``, without a cache, float32 [vocab_size]."""
        ...

    def kv_cache(self, prefix_caching: bool = True) -> KVCache:
        """A block account that fits."""
        ...


@dataclass(frozen=True)
class OnCache:
    """A drafter that keeps something for each block of the engine's cache, and so can be made only when that is there."""

    make: Callable[[KVCache], Drafter]


class Lab:
    """An engine on such a target; every step checks the block account, and every end that all blocks came back."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter | OnCache] | None = None,
        rule: str | Rule = "coupled",
        *,
        target: LabTarget | None = None,
        prefix_caching: bool = True,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 128,
        clock: Clock = time.perf_counter,
        controller: Controller | None = None,
    ) -> None:
        self.target: LabTarget = target or TableTarget()
        self.kv = self.target.kv_cache(prefix_caching)
        given = dict(drafters or {})
        self.drafters = {name: one.make(self.kv) if isinstance(one, OnCache) else one for name, one in given.items()}
        self.controller = controller or Controller(PassTimes.unknown())
        self.emissions: list[Emission] = []
        self.streamed: dict[int, str] = {}
        self.engine = Engine(
            self.target,
            self.kv,
            self.drafters,
            RULES[rule] if isinstance(rule, str) else rule,
            self.controller,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            clock=clock,
        )

    def step(self) -> list[Emission]:
        emissions = self.engine.step()
        self.emissions += emissions
        for seq in (emission.seq for emission in emissions):
            if isinstance(seq.sink, Detokenizer):
                delta = seq.sink.take_delta(final=seq.finish_reason is not None)
                self.streamed[seq.seq_id] = self.streamed.get(seq.seq_id, "") + delta
        self.kv.check_integrity()
        for drafter in self.drafters.values():
            if isinstance(drafter, DraftModelDrafter):
                drafter._kv.check_integrity()
        return emissions

    def finish(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(FAR_MORE_STEPS_THAN_ANY_TEST_NEEDS):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "the engine does not come to an end"
        assert self.kv.num_available == self.kv.num_blocks, f"{self.kv.num_available} of {self.kv.num_blocks} blocks came back"
        for drafter in self.drafters.values():
            if isinstance(drafter, DraftModelDrafter):
                assert drafter._kv.num_available == drafter._kv.num_blocks, "the draft model keeps blocks"

    def run(self, *seqs: Sequence) -> list[Outcome]:
        for seq in seqs:
            self.streamed.pop(seq.seq_id, None)
            self.engine.add(seq)
        self.finish()
        for seq in seqs:
            streamed = [token for emission in self.emissions if emission.seq is seq for token in emission.tokens]
            assert streamed == seq.tokens[seq.num_prompt :], "streamed tokens differ from the final ones"
            assert self.streamed.get(seq.seq_id, text_in(seq)) == text_in(seq), "streamed text differs from the final one"
        return [Outcome.of(seq) for seq in seqs]


def plain(request: Request, target: LabTarget | None = None) -> Outcome:
    """The request decoded alone and plainly in a fresh engine."""
    return Lab(target=target).run(request.sequence())[0]


def reference(request: Request, target: LabTarget) -> Outcome:
    """The request decoded by the definition, without an engine, a cache or a verification rule."""
    params, seq = request.params, request.sequence()
    noise = PositionNoise(request.seed, request.sample_index)
    prompt_logprobs: list[TokenLogprobs | None] = []
    if params.prompt_logprobs is not None:
        scored = [
            token_logprobs(target.row(seq.tokens[:i]), seq.tokens[i], params.prompt_logprobs) for i in range(1, seq.num_prompt)
        ]
        prompt_logprobs = [None, *scored]
    logprobs, finish, stop = [], None, None
    while finish is None:
        logits = target.row(seq.tokens)
        token = noise.draw(distribution(logits, seq), len(seq.tokens), STREAM_TARGET)
        if params.logprobs is not None:
            logprobs.append(token_logprobs(logits, token, params.logprobs))
        seq.tokens.append(token)
        assert seq.sink is not None
        word = seq.sink.push(token, may_stop=seq.num_output >= params.min_tokens)
        may_end = seq.num_output > params.min_tokens
        if may_end and token in request.rules.eos_ids and not params.ignore_eos:
            finish = "stop"
        elif may_end and token in params.stop_token_ids:
            finish, stop = "stop", token
        elif word is not None:
            finish, stop = "stop", word
        elif seq.grammar is not None and seq.grammar.is_complete(seq):
            finish = "stop"
        elif seq.num_output == params.max_tokens or len(seq.tokens) == target.max_model_len:
            finish = "length"
    tokens = tuple(seq.tokens[seq.num_prompt :])
    return Outcome(tokens, finish, stop, tuple(logprobs), tuple(prompt_logprobs), text_in(seq))


# ------------------------------------------------------------------------------------------------ drafters


def _insert(token: int, at: int) -> Callable[[list[int], int, int], list[int]]:
    return lambda right, num, vocab: [*right[:at], token, *right[at:]][:num]


# What a script drafts, from the right continuation (more of it than asked for), the number asked for and the vocabulary size.
SCRIPTS: Mapping[str, Callable[[list[int], int, int], list[int]]] = {
    "right": lambda right, num, vocab: right[:num],
    "wrong": lambda right, num, vocab: [(token + 1) % vocab for token in right[:num]],
    "wrong_at_2": lambda right, num, vocab: [(token + (i == 2)) % vocab for i, token in enumerate(right[:num])],
    "too_many": lambda right, num, vocab: right,
    "too_large": _insert(2**40, 2),
    "negative": _insert(-1, 1),
    "eos": _insert(0, 1),
    "fewer": lambda right, num, vocab: right[: num // 2],
    "empty": lambda right, num, vocab: [],
}
REAL = ("ngram", "suffix", "suffix_warm", "draft_model", "draft_twin", "eagle")
DRAFTERS = (*SCRIPTS, *REAL)


def scripted(name: str, answers: Iterable[Seq[int]], vocab_size: int = 8, hidden_layers: Tokens = ()) -> ScriptedDrafter:
    """A drafter that knows whole token streams, prompts included, and mangles them as its name says."""
    known = [list(answer) for answer in answers]

    def script(tokens: list[int], num_tokens: int) -> list[int]:
        matching = (answer[len(tokens) :] for answer in known if answer[: len(tokens)] == tokens)
        right = [*next(matching, []), *([1] * (num_tokens + 3))][: num_tokens + 3]
        return SCRIPTS[name](right, num_tokens, vocab_size)

    return ScriptedDrafter(script, hidden_layers)


def draft_model(draft: LabTarget, target: LabTarget, rule: str = "coupled", max_num_batched_tokens: int = 128) -> DraftModelDrafter:
    stream, with_probs = draws_for(rule)
    return DraftModelDrafter(
        draft,
        draft.kv_cache(),
        vocab_size=target.vocab_size,
        stream=stream,
        with_probs=with_probs,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def suffix(min_token_prob: float = 0.0, table: NgramTable | None = None) -> SuffixDrafter:
    return SuffixDrafter(
        max_tree_depth=8, max_spec_factor=8.0, min_token_prob=min_token_prob, max_cached_requests=50, max_bytes=1 << 16, table=table
    )


@cache
def warm_table() -> NgramTable:
    """Statistics of what the table target of 8 tokens says after any two tokens."""
    target = TableTarget()
    texts = [[start % 8, start // 8] for start in range(24)]
    for text in texts:
        while len(text) < 30:
            text.append(int(target.row(text).argmax()))
    return table_of(fit([Record(text, 2) for text in texts], target.vocab_size).arrays)


def table_of(arrays: Mapping[str, Any]) -> NgramTable:
    """A table that was never in a file."""
    identity = {"model": "toy", "vocab_size": 0, "vocabulary": ""}
    return NgramTable(ArrayFile({"identity": identity, "provenance": {}}, arrays))


def make_drafter(name: str, target: LabTarget, answers: Iterable[Seq[int]], rule: str = "coupled") -> Drafter | OnCache:
    """A fresh drafter of ``DRAFTERS`` that serves ``target``; ``answers`` are the streams that scripted ones know."""
    if name == "ngram":
        return NgramDrafter(1, 3)
    if name in ("suffix", "suffix_warm"):
        return suffix(table=warm_table() if name == "suffix_warm" else None)
    if name == "eagle":
        return OnCache(lambda kv: eagle(target, kv, rule))
    if name == "draft_twin":
        return draft_model(twin(target), target, rule)
    if name == "draft_model":
        return draft_model(related(target), target, rule, max_num_batched_tokens=5)
    return scripted(name, answers, target.vocab_size)


class HasRelatives(LabTarget, Protocol):
    """A target that knows its own draft models."""

    def twin(self, num_blocks: int = ..., block_size: int = ..., **options: int) -> LabTarget: ...

    def related(self, **options: int) -> LabTarget: ...

    def eagle(self, kv: KVCache, rule: str) -> EagleDrafter: ...


def eagle(target: LabTarget, kv: KVCache, rule: str = "coupled") -> EagleDrafter:
    """A head on the target's states."""
    return toy_eagle(target, kv, rule) if isinstance(target, TableTarget) else cast(HasRelatives, target).eagle(kv, rule)


def twin(target: LabTarget, num_blocks: int = 64, block_size: int = 4, **options: int) -> LabTarget:
    """A draft model equal to the target, with a cache of its own."""
    if not isinstance(target, TableTarget):
        return cast(HasRelatives, target).twin(num_blocks, block_size, **options)
    sizes = {"vocab_size": target.vocab_size, "max_model_len": target.max_model_len} | options
    return TableTarget(num_blocks, block_size, **sizes)


def related(target: LabTarget, **options: int) -> LabTarget:
    """A draft model that is often right: the target's table by pairs, its own by checksum, few and odd-sized blocks."""
    if not isinstance(target, TableTarget):
        return cast(HasRelatives, target).related(**options)
    sizes = {"vocab_size": target.vocab_size, "max_model_len": target.max_model_len} | options
    draft = TableTarget(40, 3, seed=1, **sizes)
    num = min(draft.vocab_size, target.vocab_size)
    draft._by_pair[:num, :num, :num] = target._by_pair[:num, :num, :num]
    return draft
