from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft import errors
from foredraft.types import (
    CapacityError,
    ConfigError,
    Distribution,
    ForedraftError,
    ModelError,
    ModelFileError,
    ModelNotFoundError,
    RequestError,
    SamplingParams,
    Sequence,
    UnsupportedModelError,
    refuse_unknown,
)

NAN, INF = float("nan"), float("inf")

OUT_OF_RANGE = [
    ("n", [0, -1, 65]),
    ("temperature", [-0.1, NAN, INF, -INF]),
    ("top_k", [-2, -100]),
    ("top_p", [0.0, -0.1, 1.1, NAN]),
    ("min_p", [-0.1, 1.1, NAN]),
    ("repetition_penalty", [0.0, -1.0, 0.009, 101.0, NAN, INF]),
    ("presence_penalty", [-2.1, 2.1, NAN]),
    ("frequency_penalty", [-2.1, 2.1, NAN]),
    ("seed", [-1, 2**63]),
    ("max_tokens", [0, -1]),
    ("min_tokens", [-1, 17]),
    ("stop", ["", ["a", ""]]),
    ("bad_words", ["", [""]]),
    ("logprobs", [-1, 65]),
    ("prompt_logprobs", [-1, 65]),
    ("allowed_token_ids", [[], [-1], [3, -7]]),
    ("stop_token_ids", [[-1], [3, -7]]),
    ("logit_bias", [{-1: 1.0}, {1: NAN}, {1: INF}, {1: 1e7}, {"-1": 1.0}]),
]
WRONG_TYPE = [
    ("n", ["1", 1.0, 1.5, True, None, []]),
    ("temperature", ["hot", "0.5", None, [], True, 10**400]),
    ("top_k", ["5", 2.5, None, True, NAN]),
    ("top_p", ["0.5", None, True, []]),
    ("min_p", ["0.5", None, []]),
    ("repetition_penalty", ["1", None, {}]),
    ("presence_penalty", ["1", None, []]),
    ("frequency_penalty", ["1", None, []]),
    ("seed", ["7", 1.5, True, []]),
    ("max_tokens", ["5", 5.5, 5.0, None, True, INF]),
    ("min_tokens", ["5", 1.5, None, True]),
    ("stop", [5, [5], [None], 1.5, [["a"]]]),
    ("stop_token_ids", [5, ["a"], [1.5], "12", [None], [True]]),
    ("include_stop_str_in_output", ["no", 1, None]),
    ("ignore_eos", ["no", 0, None]),
    ("logit_bias", [{"a": 1}, {"1": "x"}, {1: None}, {1.7: 1.0}, {"1.5": 1}, {INF: 1}, {1: 10**400}, [1], "x", 5, {None: 1}]),
    ("allowed_token_ids", [5, ["a"], [1.5], "12", [None], [True]]),
    ("bad_words", [5, [5], [["a"]]]),
    ("logprobs", ["5", 2.5, True, []]),
    ("prompt_logprobs", ["5", 2.5, True, []]),
    ("skip_special_tokens", ["false", 0, None]),
    ("speculative", [5, "ngram", ["method"], True]),
    ("structured_outputs", [5, "json", ["json"], True, {"regex": 5}]),
]


def test_a_number_too_long_to_be_written_raises_something_else() -> None:
    with pytest.raises(RequestError, match="n must be a whole number from 1 to 64, not int beyond all measure"):
        SamplingParams(n=10**5000)


def flat(table: list[tuple[str, list[Any]]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table for value in values]


def test_a_sampling_parameter_has_no_bad_values_here() -> None:
    assert {name for name, _ in WRONG_TYPE} == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(("name", "value"), flat(OUT_OF_RANGE), ids=lambda value: repr(value)[:24])
def test_value_out_of_range_is_accepted_or_not_named(name: str, value: Any) -> None:
    for make in (SamplingParams.from_dict, lambda options: SamplingParams(**options)):
        with pytest.raises(RequestError, match=name) as caught:
            make({name: value})
        entries = [value] if not isinstance(value, (list, dict)) else list(value)
        assert all(str(entry) in str(caught.value) for entry in entries)


@pytest.mark.parametrize(("name", "value"), flat(WRONG_TYPE), ids=lambda value: repr(value)[:24])
def test_value_of_a_wrong_type_is_accepted_or_raises_something_else(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams.from_dict({name: value})


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1},
        {"temperature": 5e-324},
        {"temperature": 1e308},
        {"n": 64, "top_k": -1},
        {"top_p": 5e-324, "min_p": 1},
        {"seed": 2**63 - 1, "max_tokens": 1, "min_tokens": 1},
        {"seed": None, "stop": None, "bad_words": None, "stop_token_ids": None, "logit_bias": None, "allowed_token_ids": None},
        {"logprobs": 64, "prompt_logprobs": 0},
        {"stop": ["x"] * 64, "bad_words": ["y"] * 64},
        {"speculative": {"method": "none"}},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 0.01},
    ],
)
def test_value_at_the_edge_of_its_range_is_refused(options: dict[str, Any]) -> None:
    SamplingParams.from_dict(options)


def test_outside_data_is_not_brought_into_one_form() -> None:
    params = SamplingParams.from_dict(
        {"stop": "END", "bad_words": ["a", "b"], "stop_token_ids": [3], "logit_bias": {"7": 1}, "top_k": -1}
    )
    assert params.stop == ("END",) and params.bad_words == ("a", "b") and params.stop_token_ids == (3,)
    assert params.logit_bias == {7: 1.0} and params.top_k == 0
    assert SamplingParams(stop=["a"], allowed_token_ids=[1]) == SamplingParams(stop=("a",), allowed_token_ids=(1,))  # type: ignore[arg-type]


def test_params_keep_a_hold_of_the_callers_objects() -> None:
    bias, stop = {1: 1.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)  # type: ignore[arg-type]
    bias[2], stop[0] = 2.0, "b"
    assert params.logit_bias == {1: 1.0} and params.stop == ("a",)
    assert SamplingParams().logit_bias is not SamplingParams().logit_bias


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_long_stop_list_is_accepted_or_printed_in_full(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} may hold at most 64 strings, not 65"):
        SamplingParams.from_dict({name: ["x" * 1000] * 65})


@pytest.mark.parametrize(
    ("name", "nearest"), [("temprature", "temperature"), ("max_token", "max_tokens"), ("topk", "top_k"), ("stops", "stop")]
)
def test_unknown_parameter_is_ignored_or_not_explained(name: str, nearest: str) -> None:
    with pytest.raises(RequestError, match=f"unknown sampling parameter '{name}'; did you mean '{nearest}'"):
        SamplingParams.from_dict({name: 1})


def test_unknown_parameter_near_nothing_or_no_string_raises_something_else() -> None:
    with pytest.raises(RequestError, match=r"unknown sampling parameter 'qqq'; choose one of: allowed_token_ids, bad_words"):
        SamplingParams.from_dict({"qqq": 1})
    with pytest.raises(RequestError, match="unknown sampling parameter"):
        SamplingParams.from_dict({5: 1})  # type: ignore[dict-item]


def test_known_name_is_refused_or_the_error_class_is_lost() -> None:
    refuse_unknown("thing", "a", iter(["b", "a"]))
    with pytest.raises(ConfigError, match=r"unknown thing 'c'; choose one of: a, b\."):
        refuse_unknown("thing", "c", ["b", "a"])
    with pytest.raises(ModelNotFoundError):
        refuse_unknown("thing", "c", ["a"], ModelNotFoundError)


anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from([field.name for field in dataclasses.fields(SamplingParams)]), anything, max_size=3))
@settings(max_examples=200, deadline=None)
def test_arbitrary_json_raises_something_else(options: dict[str, Any]) -> None:
    try:
        params = SamplingParams.from_dict(options)
    except RequestError:
        return
    assert isinstance(params.max_tokens, int) and isinstance(params.top_k, int)
    assert math.isfinite(params.temperature)
    assert all(isinstance(token, int) and token >= 0 for token in (*params.stop_token_ids, *(params.allowed_token_ids or ())))


# ------------------------------------------------------------------------------------------------ the other nouns


def test_exception_tree_differs_from_the_one_drawn() -> None:
    assert issubclass(ForedraftError, ValueError)
    parents = {
        ConfigError: ForedraftError,
        RequestError: ForedraftError,
        ModelError: ForedraftError,
        CapacityError: ForedraftError,
        ModelNotFoundError: ModelError,
        ModelFileError: ModelError,
        UnsupportedModelError: ModelError,
    }
    for error, parent in parents.items():
        assert error.__bases__ == (parent,)
    defined = {item for _, item in inspect.getmembers(errors, inspect.isclass) if issubclass(item, Exception)}
    assert defined == {*parents, ForedraftError}
    assert all(error.__name__ in (errors.__doc__ or "") for error in defined)


def test_dense_row_puts_mass_on_wrong_tokens() -> None:
    dist = Distribution(np.array([1, 4]), np.log([0.25, 0.75]))
    np.testing.assert_allclose(dist.dense(6), [0, 0.25, 0, 0, 0.75, 0], rtol=1e-15)
    with pytest.raises(IndexError):
        dist.dense(4)


def test_sequences_are_compared_by_content_or_share_lists() -> None:
    one, other = (Sequence(0, [1, 2], 2, SamplingParams(), seed=0) for _ in range(2))
    assert one != other and one in [one] and one not in [other]
    one.origins.append("plain")
    one.logprobs.append({})
    one.stats.count(2, 1, 2)
    assert not other.origins and not other.logprobs and other.stats.target_passes == 0
    one.stats.milliseconds["draft"] = 1.0
    assert other.stats.milliseconds["draft"] == 0.0


def test_output_or_pending_tokens_are_miscounted() -> None:
    seq = Sequence(0, [1, 2, 3, 4, 5], 3, SamplingParams(), seed=0, num_computed=4)
    assert (seq.num_output, seq.num_pending) == (2, 1)
