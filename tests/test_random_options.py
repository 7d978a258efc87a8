"""Random requests on random engines: each must receive what it receives alone and plainly."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import count

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_helpers import DRAFTERS, Lab, Outcome, Request, draft_model, make_drafter, plain, related
from foredraft.drafters.forced import ForcedDrafter
from foredraft.testing.toy import ScriptedDrafter, TableTarget
from foredraft.types import Drafter, SamplingParams, StructuredOutputs, TokenRules

VOCAB = 8
tokens = st.integers(0, VOCAB - 1)
SHAPES = (
    StructuredOutputs(regex="(ab|c[d-h]*|g)+"),
    StructuredOutputs(regex="[a-h]{2}bcd[ae]bcdh?"),
    StructuredOutputs(choice=["abc", "abd", "hhhhh", "cde"]),
    StructuredOutputs(grammar='start: "a" start "b" | "c" | "d" start "d"'),
)
NAMES = (*DRAFTERS, "forced", "garbage", "odd_draft_model")


@dataclass(frozen=True)
class Visit:
    """A request, when it comes, when it is cancelled (in steps after that, if at all), and how it is drafted for."""

    request: Request
    arrival: int
    patience: int | None
    drafter: str
    ks: tuple[int, ...]
    adaptive: bool


@dataclass(frozen=True)
class House:
    """Sizes of an engine; ``num_spare_blocks`` come on top of what the largest request needs alone."""

    rule: str
    block_size: int
    num_spare_blocks: int
    max_model_len: int
    max_num_seqs: int
    num_spare_rows: int
    prefix_caching: bool
    target_seed: int

    def target(self, num_blocks: int) -> TableTarget:
        return TableTarget(num_blocks, self.block_size, vocab_size=VOCAB, max_model_len=self.max_model_len, seed=self.target_seed)


houses = st.builds(
    House,
    rule=st.sampled_from(["coupled", "coupled", "coupled", "rejection", "block"]),
    block_size=st.integers(1, 5),
    num_spare_blocks=st.integers(0, 8),
    max_model_len=st.integers(13, 40),
    max_num_seqs=st.integers(1, 6),
    num_spare_rows=st.sampled_from([0, 1, 2, 3, 5, 9, 60]),
    prefix_caching=st.booleans(),
    target_seed=st.integers(0, 2),
)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    """Each option is off in about half of all requests, so that few are on at once, but any few."""

    def maybe(off: object, on: st.SearchStrategy[object]) -> object:
        return draw(on) if draw(st.booleans()) else off

    max_tokens = draw(st.integers(1, 14))
    shape = draw(st.sampled_from([None, None, None, *SHAPES]))
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0])),
        top_k=maybe(0, st.integers(1, VOCAB + 1)),
        top_p=maybe(1.0, st.sampled_from([0.3, 0.8, 0.99])),
        min_p=maybe(0.0, st.sampled_from([0.05, 0.4, 1.0])),
        repetition_penalty=maybe(1.0, st.sampled_from([0.7, 1.5, 4.0])),
        presence_penalty=maybe(0.0, st.sampled_from([-1.0, 0.5, 2.0])),
        frequency_penalty=maybe(0.0, st.sampled_from([-0.5, 0.3, 2.0])),
        max_tokens=max_tokens,
        min_tokens=maybe(0, st.integers(0, max_tokens)),
        stop=maybe((), st.lists(st.text("abcdefgh", min_size=1, max_size=3), max_size=3)),
        stop_token_ids=maybe((), st.lists(st.integers(0, VOCAB + 1), max_size=2)),
        ignore_eos=draw(st.booleans()) and shape is None,
        logit_bias=maybe({}, st.dictionaries(tokens, st.sampled_from([-100.0, -2.0, 3.0, 100.0]), max_size=3)),
        allowed_token_ids=maybe(None, st.lists(tokens, min_size=1, max_size=5)),
        logprobs=maybe(None, st.integers(0, VOCAB + 1)),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0, 2])),
        structured_outputs=shape,
    )


rules = st.builds(
    TokenRules,
    eos_ids=st.frozensets(tokens, max_size=2),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)
requests = st.builds(
    Request,
    # Few distinct prompts, so that prefixes are shared.
    prompt=st.builds(
        lambda start, rest: (*start, *rest),
        st.sampled_from([(), (1, 2, 3, 4, 5, 6), (1, 2, 1, 2, 1, 2)]),
        st.lists(tokens, min_size=1, max_size=6),
    ),
    params=sampling_params(),
    seed=st.sampled_from([0, 1, 2**63 - 1]),
    sample_index=st.integers(0, 2),
    rules=rules,
    tenant=st.sampled_from(["", "", "b"]),
)
visits = st.builds(
    Visit,
    request=requests,
    arrival=st.integers(0, 8),
    patience=st.one_of(st.none(), st.none(), st.integers(0, 6)),
    drafter=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True).map("+".join),
    ks=st.lists(st.integers(0, 8), min_size=1, max_size=3).map(tuple),
    adaptive=st.booleans(),
)


def garbage(known: list[int], num_tokens: int) -> list[int]:
    chance = random.Random(str(known))
    return [chance.choice([*range(VOCAB), *range(VOCAB), -1, VOCAB]) for _ in range(chance.randint(0, num_tokens + 1))]


def drafter_named(name: str, target: TableTarget, answers: list[tuple[int, ...]], rule: str) -> Drafter:
    if name == "forced":
        return ForcedDrafter()
    if name == "garbage":
        return ScriptedDrafter(garbage)
    if name == "odd_draft_model":
        return draft_model(related(target, vocab_size=VOCAB + 3, max_model_len=11), target, rule, max_num_batched_tokens=3)
    return make_drafter(name, target, answers, rule)


@settings(max_examples=1000, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(house=houses, guests=st.lists(visits, min_size=1, max_size=6))
def test_everyone_receives_what_he_receives_alone(house: House, guests: list[Visit]) -> None:
    if house.rule != "coupled":
        guests = [replace(guest, request=guest.request.but(temperature=0.0)) for guest in guests]
    lengths = [min(len(guest.request.prompt) + guest.request.params.max_tokens, house.max_model_len) for guest in guests]
    num_blocks = -(-(max(lengths) - 1) // house.block_size)
    alone = [plain(guest.request, house.target(num_blocks)) for guest in guests]
    answers = [guest.request.prompt + outcome.tokens for guest, outcome in zip(guests, alone, strict=True)]

    target = house.target(num_blocks + house.num_spare_blocks)
    names = dict.fromkeys(name for guest in guests for name in guest.drafter.split("+") if name != "none")
    drafters = {name: drafter_named(name, target, answers, house.rule) for name in names}
    lab = Lab(
        drafters,
        house.rule,
        target=target,
        prefix_caching=house.prefix_caching,
        max_num_seqs=house.max_num_seqs,
        max_num_batched_tokens=house.max_num_seqs + house.num_spare_rows,
        # A clock that only counts: what an adaptive request drafts depends on time, and a failure must come again.
        clock=count(0.0, 1e-4).__next__,
    )
    seqs = [guest.request.sequence(guest.drafter, guest.ks[0], i, guest.adaptive) for i, guest in enumerate(guests)]
    cancelled = set()
    for step in range(16):
        for i, (guest, seq) in enumerate(zip(guests, seqs, strict=True)):
            seq.num_speculative_tokens = guest.ks[step % len(guest.ks)]
            if step == guest.arrival:
                lab.engine.add(seq)
            if guest.patience is not None and step == guest.arrival + guest.patience and seq.finish_reason is None:
                lab.engine.cancel(seq)
                cancelled.add(i)
        lab.step()
    lab.finish()

    for i, (seq, expected) in enumerate(zip(seqs, alone, strict=True)):
        outcome = Outcome.of(seq)
        if i in cancelled:
            num = len(outcome.tokens)
            assert (outcome.finish_reason, outcome.tokens, outcome.text) == ("abort", expected.tokens[:num], expected.text[:num])
            assert outcome.logprobs == expected.logprobs[:num]
        else:
            assert outcome == expected, guests[i]
        assert seq.stats.emitted_tokens == len(outcome.tokens) == len(seq.origins)
        assert seq.stats.accepted_tokens == seq.origins.count("accepted") <= seq.stats.drafted_tokens
