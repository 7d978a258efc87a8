"""Requests of the exactness matrix, in the tokens of any world.

Owns: which options are tried.  Does not know: how they are run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from engine_helpers import Request, Tokens
from foredraft.types import SamplingParams, TokenRules
from worlds import World


def tokens(world: World, *numbers: int) -> Tokens:
    """The world's tokens by their numbers from 0 to 7."""
    return tuple(world.ids[number] for number in numbers)


def word(world: World, number: int) -> str:
    """The text of one of them."""
    return world.text_of(tokens(world, number))


def prompt(world: World) -> Tokens:
    """Four tokens, and the first two again."""
    return tokens(world, 1, 2, 3, 4, 1, 2)


def params_for(rule: str, **options: object) -> SamplingParams:
    """Sampled where the rule promises plain decoding's very tokens, else greedy."""
    return SamplingParams(temperature=1.0 if rule == "coupled" else 0.0, **options)


def _ask(world: World, **options: object) -> Request:
    return world.request(prompt(world), SamplingParams(**{"max_tokens": world.length} | options))


_HARD: Mapping[str, Callable[[World], Request]] = {
    "greedy": lambda world: _ask(world, temperature=0.0),
    "sampled": lambda world: replace(_ask(world), seed=2**62 + 5, sample_index=3),
    "truncated": lambda world: _ask(world, temperature=0.8, top_k=5, top_p=0.9, min_p=0.02, logprobs=2),
    "penalised": lambda world: _ask(world, repetition_penalty=1.6, presence_penalty=0.7, frequency_penalty=1.1, logprobs=0),
    "biased": lambda world: _ask(
        world, logit_bias={world.ids[3]: 4.0, world.ids[5]: -6.0}, allowed_token_ids=tokens(world, 1, 3, 5, 6)
    ),
    "forbidding": lambda world: replace(
        _ask(world), rules=TokenRules(bad_words=(tokens(world, 4), tokens(world, 1, 2), tokens(world, 6, 6, 6)))
    ),
    "late": lambda world: replace(
        _ask(world, min_tokens=9, stop_token_ids=tokens(world, 3, 4), stop=(word(world, 1),)),
        rules=TokenRules(frozenset(tokens(world, 6, 7))),
    ),
    # Masking all that ends the request would leave nothing: the tokens come, but do not end it before min_tokens.
    "forced": lambda world: replace(
        _ask(world, allowed_token_ids=tokens(world, 3, 4), min_tokens=5, stop_token_ids=tokens(world, 3), stop=(word(world, 4),)),
        rules=TokenRules(frozenset(tokens(world, 4))),
    ),
    "explained": lambda world: _ask(world, max_tokens=9, logprobs=8, prompt_logprobs=3),
    "short": lambda world: world.request(tokens(world, 5), SamplingParams(max_tokens=world.length)),
}
HARD = tuple(_HARD)


def hard(world: World, name: str) -> Request:
    """A request with options that are hard to honour within a draft."""
    return _HARD[name](world)


_REPEATS: Mapping[str, Callable[[World], dict[str, object]]] = {
    "repetition_penalty": lambda world: {"repetition_penalty": 3.0},
    "presence_penalty": lambda world: {"presence_penalty": 2.0},
    "frequency_penalty": lambda world: {"frequency_penalty": 2.0},
    "logit_bias": lambda world: {"logit_bias": {world.ids[2]: 5.0}},
    # The bias makes a stop follow as soon as one may.
    "min_tokens": lambda world: {"min_tokens": 7, "stop_token_ids": tokens(world, 1, 2, 3), "logit_bias": {world.ids[2]: 30.0}},
    "bad_words": lambda world: {},
}
REPEATS = tuple(_REPEATS)


def repeating(world: World, option: str, temperature: float) -> Request:
    """A request with one option that depends on the tokens before a row, and within a draft."""
    params = SamplingParams(temperature=temperature, max_tokens=12, **_REPEATS[option](world))
    bad_words = tuple(tokens(world, *numbers) for numbers in ((2, 2), (3, 3), (2, 3, 2), (5,)))
    rules = TokenRules(bad_words=bad_words if option == "bad_words" else ())
    return world.request(world.choose(tokens(world, 1, 2), prompt(world)), params, rules=rules)
