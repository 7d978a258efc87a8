"""Where the exactness matrix runs: a table target, in milliseconds, or the demo model on native ops.

Owns: each world's targets, tokens, texts and expected outcomes, and how thoroughly a test may search there.  Does not know: any
single test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import pytest

from engine_helpers import (
    DRAFTERS,
    SCRIPTS,
    Lab,
    LabTarget,
    Outcome,
    Request,
    Tokens,
    make_drafter,
    plain,
    reference,
    text_of,
)
from foredraft.kv_cache import KVCache
from foredraft.loader import Checkpoint, Detokenizer, load_checkpoint
from foredraft.target import ModelTarget
from foredraft.testing.toy import TableTarget
from foredraft.types import Drafter, FloatArray, PassOutput, Rows, SamplingParams, Sequence, TokenRules
from foredraft.verify import RULES

T = TypeVar("T")
Visit = tuple[Request, int]

# Drafters under test; on the model those that differ in kind: an oracle that errs, statistics of two kinds, and a second copy.
NAMES = {"toy": DRAFTERS, "smollm2": ("wrong_at_2", "ngram", "suffix", "draft_model")}
_MARKS = {"toy": (), "smollm2": (pytest.mark.model,)}


def _tries(world: str, name: str, rule: str) -> bool:
    """Drafts without probabilities are judged by ``block`` as by ``rejection``, and by that all alike."""
    return world == "toy" or rule == "coupled" or name == "draft_model" or (name, rule) == ("wrong_at_2", "rejection")


def _combinations(rules: Iterable[str]) -> list[Any]:
    return [
        pytest.param(world, name, rule, marks=_MARKS[world])
        for world, names in NAMES.items()
        for name in names
        for rule in rules
        if _tries(world, name, rule)
    ]


every_world = pytest.mark.parametrize("world", [pytest.param(name, marks=marks) for name, marks in _MARKS.items()], indirect=True)
every_drafter = pytest.mark.parametrize(
    ("world", "name"),
    [pytest.param(world, name, marks=_MARKS[world]) for world, names in NAMES.items() for name in names],
    indirect=["world"],
)
every_rule = pytest.mark.parametrize("rule", RULES)
every_drafter_and_rule = pytest.mark.parametrize(("world", "name", "rule"), _combinations(RULES), indirect=["world"])
every_drafter_and_other_rule = pytest.mark.parametrize(
    ("world", "name", "rule"), _combinations(rule for rule in RULES if rule != "coupled"), indirect=["world"]
)


class World(Protocol):
    """What the tests need to know about where they run.

    ``ids``: eight tokens, of which the first is an EOS where a test says so.  ``length``: tokens of a usual answer.  ``batch``:
    how many visits share an engine; 1 is each alone.  ``wide``: options of a target whose vocabulary has at least 80 tokens.
    """

    ids: Tokens
    length: int
    batch: int
    wide: dict[str, int]

    def target(self, num_blocks: int = ..., block_size: int = ..., **options: int) -> LabTarget:
        """A target with an empty cache; whatever other target was made before must not be used any more."""
        ...

    def request(self, prompt: Seq[int], params: SamplingParams, **fields: Any) -> Request:
        """A request whose text this world can write."""
        ...

    def expected(self, request: Request, **options: int) -> Outcome:
        """What the request alone and plainly receives from a target with these options."""
        ...

    def scores(self, tokens: Seq[int]) -> list[FloatArray]:
        """Logits after each prefix of ``tokens``, computed without a cache, on the default target."""
        ...

    def text_of(self, tokens: Seq[int]) -> str:
        """The text of tokens, all at once."""
        ...

    def stop_words(self, tokens: Seq[int]) -> list[str]:
        """Stop strings in the text of ``tokens``, not all in the first: one character, and one across tokens."""
        ...

    def all_new(self, temperature: float) -> tuple[Request, dict[str, int], Tokens]:
        """A request whose first nine tokens are all different, a target's options, and those tokens."""
        ...

    def choose(self, everything: T, few: T) -> T:
        """The first where a run takes a millisecond, else the second."""
        ...


class ToyWorld:
    """A table language model with eight tokens, one letter each.  Expected is what the definition says."""

    ids: Tokens = tuple(range(8))
    length = 20
    batch = 1
    wide = {"vocab_size": 80}  # noqa: RUF012 - as the protocol has it

    def target(self, num_blocks: int = 64, block_size: int = 4, **options: int) -> LabTarget:
        return TableTarget(num_blocks, block_size, **options)

    def request(self, prompt: Seq[int], params: SamplingParams, **fields: Any) -> Request:
        return Request(tuple(prompt), params, **fields)

    def __init__(self) -> None:
        self._expected: dict[tuple[Any, ...], Outcome] = {}

    def expected(self, request: Request, **options: int) -> Outcome:
        key = repr(request), request.make_sink, repr(sorted(options.items()))
        if key not in self._expected:
            self._expected[key] = reference(request, TableTarget(**options))
        return self._expected[key]

    def scores(self, tokens: Seq[int]) -> list[FloatArray]:
        target = TableTarget()
        return [target.row(list(tokens[:end])) for end in range(1, len(tokens) + 1)]

    def text_of(self, tokens: Seq[int]) -> str:
        return text_of(tokens)

    def stop_words(self, tokens: Seq[int]) -> list[str]:
        text = text_of(tokens)
        return [text[6:7], text[6:9]]

    @cache  # noqa: B019 - one world lives as long as the session
    def all_new(self, temperature: float) -> tuple[Request, dict[str, int], Tokens]:
        request = Request((1, 2, 3), SamplingParams(temperature=temperature, max_tokens=9))
        for seed in range(200):
            options = {"vocab_size": 24, "seed": seed}
            tokens = plain(request, TableTarget(**options)).tokens
            if len(set(tokens)) == len(tokens):
                return request, options, tokens
        raise AssertionError("no seed")

    def choose(self, everything: T, few: T) -> T:
        return everything


# ------------------------------------------------------------------------------------------------ the demo model

REGION_TOKENS = 420
LAB, DRAFT, ALONE = range(3)


class Slice:
    """A region of a loaded model's cache as a target of its own: as good as another copy of the model, at no cost.

    What earlier tests wrote is still there, so a row that is read though it was never written, or was rolled back, shows.

    ``vocab_size`` cuts the logits, or pads them with ids that the model would always prefer.  ``errs`` turns every fourth row's
    logits by one, which is what makes a draft model that is often, but not always, right.
    """

    def __init__(
        self,
        world: ModelWorld,
        region: int,
        num_blocks: int = 100,
        block_size: int = 4,
        *,
        max_model_len: int = 128,
        vocab_size: int | None = None,
        errs: bool = False,
    ) -> None:
        most = REGION_TOKENS // block_size
        assert num_blocks <= most, (num_blocks, block_size)
        self._world, self._model, self._first = world, world.model(block_size), region * most
        self._num_blocks, self._errs = num_blocks, errs
        self.block_size, self.max_model_len = block_size, max_model_len
        self.vocab_size = vocab_size or self._model.vocab_size

    def forward(self, batch: list[Rows], taps: tuple[int, ...] = ()) -> PassOutput:
        """See types.Target."""
        assert all(len(rows.tokens) + rows.start <= self.max_model_len for rows in batch), batch
        assert all(0 <= block < self._num_blocks for rows in batch for block in rows.block_table), batch
        moved = [replace(rows, block_table=[self._first + block for block in rows.block_table]) for rows in batch]
        output = self._model.forward(moved, taps)
        return PassOutput([self._bent(*pair) for pair in zip(batch, output.logits, strict=True)], output.hidden)

    def _bent(self, rows: Rows, logits: FloatArray) -> FloatArray:
        if self._errs:
            first = rows.start + len(rows.tokens) - len(logits)
            bad = [i for i in range(len(logits)) if (first + i) % 4 == 3]
            logits[bad] = np.roll(logits[bad], 1, axis=1)
        num_more = self.vocab_size - logits.shape[1]
        if num_more <= 0:
            return logits[:, : self.vocab_size]
        return np.concatenate([logits, np.broadcast_to(logits.max(axis=1, keepdims=True) + 1, (len(logits), num_more))], axis=1)

    def row(self, context: list[int]) -> FloatArray:
        """Logits of the token after ``context``, computed in one pass and without a cache, float32 [vocab_size]."""
        return self._world.compute(context, 1)[0]

    def kv_cache(self, prefix_caching: bool = True) -> KVCache:
        """A block account that fits this slice."""
        return KVCache(self._num_blocks, self.block_size, prefix_caching)

    def twin(self, num_blocks: int = 100, block_size: int = 4, **options: int) -> Slice:
        """The same model with a cache of its own."""
        return Slice(self._world, DRAFT, num_blocks, block_size, **{"max_model_len": self.max_model_len} | options)

    def related(self, **options: int) -> Slice:
        """A draft model that is often right, and is another loaded copy with blocks of an odd size."""
        return Slice(self._world, DRAFT, 130, 3, errs=True, **{"max_model_len": self.max_model_len} | options)


class ModelWorld:
    """SmolLM2-135M in the file's own Q4_1, bit-exact.  Its texts are rows of colours, which it continues in few words.

    Expected is what plain decoding gives; that this follows the definition is a test by itself.
    """

    length = 12
    batch = 9
    wide: dict[str, int] = {}  # noqa: RUF012 - as the protocol has it
    # By block size, so that exactness across numbers of threads is part of every comparison.
    _THREADS = {3: 1}  # noqa: RUF012

    def __init__(self) -> None:
        self._models: dict[int, ModelTarget] = {}
        self._expected: dict[tuple[str, str], Outcome] = {}
        self._scores: dict[Tokens, list[FloatArray]] = {}

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return load_checkpoint("smollm2-135m")

    @cached_property
    def ids(self) -> Tokens:
        words = (" red", " green", " blue", " yellow", " black", " white", " orange")
        found = [self.checkpoint.tokenizer.encode(word) for word in words]
        assert all(len(ids) == 1 for ids in found), found
        return (*self.checkpoint.eos_ids, *(ids[0] for ids in found))

    def model(self, block_size: int) -> ModelTarget:
        """The model, loaded once for each size of blocks."""
        if block_size not in self._models:
            checkpoint, num_blocks = self.checkpoint, 3 * (REGION_TOKENS // block_size)
            model = ModelTarget(
                checkpoint.architecture, checkpoint.weights, device="cpu", ops="native", threads=self._THREADS.get(block_size, 2),
                num_blocks=num_blocks, block_size=block_size, max_model_len=128, release=checkpoint.release,
            )  # fmt: skip
            assert (model.exactness, model.precision) == ("bitwise", "Q4_1"), (model.exactness, model.precision)
            self._models[block_size] = model
        return self._models[block_size]

    def target(self, num_blocks: int = 100, block_size: int = 4, **options: int) -> LabTarget:
        return Slice(self, LAB, num_blocks, block_size, **options)

    def request(self, prompt: Seq[int], params: SamplingParams, **fields: Any) -> Request:
        return Request(tuple(prompt), params, make_sink=self._sink, **fields)

    def _sink(self, prompt: Seq[int], params: SamplingParams) -> Detokenizer:
        return Detokenizer(
            self.checkpoint.tokenizer, prompt, params.stop, params.skip_special_tokens, params.include_stop_str_in_output
        )

    def expected(self, request: Request, **options: int) -> Outcome:
        key = repr(request), repr(sorted(options.items()))
        if key not in self._expected:
            self._expected[key] = plain(request, Slice(self, ALONE, **options))
        return self._expected[key]

    def compute(self, tokens: Seq[int], num_logits: int) -> list[FloatArray]:
        """The last rows of logits after ``tokens``, in one pass that reads no cache."""
        size = 4
        first = ALONE * (REGION_TOKENS // size)
        blocks = range(first, first + -(-len(tokens) // size))
        return list(self.model(size).forward([Rows(tokens, 0, num_logits, blocks)]).logits[0])

    def scores(self, tokens: Seq[int]) -> list[FloatArray]:
        key = tuple(tokens)
        if key not in self._scores:
            while len(self._scores) > 8:
                del self._scores[next(iter(self._scores))]
            self._scores[key] = self.compute(key, len(key))
        return self._scores[key]

    def text_of(self, tokens: Seq[int]) -> str:
        return self.checkpoint.tokenizer.decode(list(tokens))

    def stop_words(self, tokens: Seq[int]) -> list[str]:
        text = self.text_of(tokens[:8])
        return [max(text, key=text.index), text[7:17]]

    @cache  # noqa: B019 - one world lives as long as the session
    def all_new(self, temperature: float) -> tuple[Request, dict[str, int], Tokens]:
        prompt = self.checkpoint.tokenizer.encode("The three largest cities")
        for seed in range(20):
            # Greedy has no seeds to try, so the prompt differs as well.
            request = self.request([*prompt, seed + 1000], SamplingParams(temperature=temperature, max_tokens=9), seed=seed)
            tokens = self.expected(request).tokens
            if len(set(tokens)) == len(tokens):
                return request, {}, tokens
        raise AssertionError("no seed")

    def choose(self, everything: T, few: T) -> T:
        return few


# ------------------------------------------------------------------------------------------------ running


def endless(world: World, request: Request, **options: int) -> Tokens:
    """Prompt and answer, going on where the request would stop: what scripted drafters know."""
    more = replace(request, rules=TokenRules(bad_words=request.rules.bad_words)).but(
        stop=(), stop_token_ids=(), ignore_eos=True, max_tokens=world.choose(40, request.params.max_tokens + 10)
    )
    return request.prompt + world.expected(more, **options).tokens


def run_drafted(
    world: World,
    visits: Seq[Visit],
    drafter: str | Callable[[LabTarget], Drafter],
    rule: str = "coupled",
    **options: int,
) -> list[tuple[Outcome, Sequence]]:
    """Run each (request, K) on a fresh engine with a fresh drafter, alone or in batches as the world likes it."""
    answers = [endless(world, request, **options) for request, _ in visits] if drafter in SCRIPTS else []
    found: list[tuple[Outcome, Sequence]] = []
    for start in range(0, len(visits), world.batch):
        target = world.target(**options)
        made = make_drafter(drafter, target, answers, rule) if isinstance(drafter, str) else drafter(target)
        lab = Lab(
            {"drafter": made}, rule, target=target, max_num_seqs=world.batch, max_num_batched_tokens=max(128, 20 * world.batch)
        )
        seqs = [request.sequence("drafter", k, i) for i, (request, k) in enumerate(visits[start : start + world.batch])]
        found += zip(lab.run(*seqs), seqs, strict=True)
    return found
