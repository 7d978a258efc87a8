from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.types import ConfigError, ForedraftError

NAN, INF = float("nan"), float("inf")

BAD_SPECULATIVE = [
    ("method", ["", None, 5, ["ngram"]]),
    ("model", [5, True, ["a"]]),
    ("adaptive", [0, 1, None, "true"]),
    ("num_speculative_tokens", [-1, 65, True, False, 4.0, "4", None, NAN, 10**30]),
    ("rejection_sample_method", ["", "coupl", "Block", None, 5]),
    ("prompt_lookup_min", [0, -1, True, 2.0, "2", None]),
    ("prompt_lookup_max", [1, 65, True, 5.0, "5", None, INF]),
    ("suffix_decoding_max_tree_depth", [0, -1, True, 2.5, "24", None]),
    ("suffix_decoding_max_cached_requests", [-1, True, 1.0, "1", None]),
    ("suffix_decoding_max_bytes", [-1, True, 1e9, "1", None]),
    ("suffix_decoding_base", ["", 1, True]),
    ("shipped", [0, 1, "true", None]),
    ("suffix_decoding_max_spec_factor", [-0.1, 64.1, NAN, INF, True, "1", None]),
    ("suffix_decoding_min_token_prob", [-0.1, 1.1, NAN, INF, True, "0.1", None]),
]
BAD_ENGINE = [
    ("device", ["gpu", "", None, 0, "CPU"]),
    ("dtype", ["fp32", "float", "", None, 16]),
    ("ops", ["cpp", "", None, 0, "Native"]),
    ("seed", [-1, 2**63, True, 1.0, "1", NAN]),
    ("max_model_len", [0, 1, -1, True, 1024.0, "1024", NAN]),
    ("kv_cache_memory", [0, -1, True, 1e9, "1GB"]),
    ("threads", [0, 1025, -1, True, 1.0, "2"]),
    ("block_size", [0, -16, True, 16.0, "16", None]),
    ("max_num_seqs", [0, -1, True, 64.0, "64", None]),
    ("max_num_batched_tokens", [0, -1, True, 512.0, "512", None]),
    ("enable_prefix_caching", [0, 1, "true", None]),
]


def flat(table: list[tuple[str, list[Any]]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table for value in values]


@pytest.mark.parametrize("table", [BAD_SPECULATIVE, BAD_ENGINE])
def test_an_option_has_no_bad_values_here(table: list[tuple[str, list[Any]]]) -> None:
    config = SpeculativeConfig if table is BAD_SPECULATIVE else EngineConfig
    assert {name for name, _ in table} == {field.name for field in dataclasses.fields(config)}


@pytest.mark.parametrize(("name", "value"), flat(BAD_SPECULATIVE), ids=lambda value: repr(value)[:24])
def test_bad_speculative_value_is_accepted_or_not_named(name: str, value: Any) -> None:
    for make in (lambda o: SpeculativeConfig(**o), SpeculativeConfig.parse):
        with pytest.raises(ConfigError) as caught:
            make({name: value})
        assert name in str(caught.value)
        assert repr(value) in str(caught.value) or repr(str(value)) in str(caught.value)


@pytest.mark.parametrize(("name", "value"), flat(BAD_ENGINE), ids=lambda value: repr(value)[:24])
def test_bad_engine_value_is_accepted_or_not_named(name: str, value: Any) -> None:
    for make in (lambda o: EngineConfig(**o), EngineConfig.from_dict):
        with pytest.raises(ConfigError) as caught:
            make({name: value})
        assert name in str(caught.value)
        assert repr(value) in str(caught.value) or repr(str(value)) in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "anything"},
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": 64},
        {"rejection_sample_method": "block"},
        {"prompt_lookup_min": 1, "prompt_lookup_max": 1},
        {"prompt_lookup_max": 64},
        {"suffix_decoding_max_bytes": 0, "suffix_decoding_max_cached_requests": 0, "suffix_decoding_max_tree_depth": 1},
        {"suffix_decoding_max_spec_factor": 0, "suffix_decoding_min_token_prob": 1},
    ],
)
def test_value_at_the_edge_of_its_range_is_refused(options: dict[str, Any]) -> None:
    config = SpeculativeConfig.parse(options)
    assert config == SpeculativeConfig(**options) == SpeculativeConfig.parse(json.dumps(options)) == SpeculativeConfig.parse(config)
    for name, value in options.items():
        assert getattr(config, name) == value


def test_engine_value_at_the_edge_of_its_range_is_refused() -> None:
    EngineConfig(seed=0, max_model_len=2, kv_cache_memory=1, threads=1, block_size=1, max_num_seqs=1, max_num_batched_tokens=1)
    EngineConfig(seed=2**63 - 1, max_num_seqs=512)


def test_rows_may_not_suffice_for_one_each() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(10\) must be at least max_num_seqs \(11\)"):
        EngineConfig(max_num_seqs=11, max_num_batched_tokens=10)


def test_no_configuration_is_not_the_default() -> None:
    assert SpeculativeConfig.parse(None) == SpeculativeConfig.parse("null") == SpeculativeConfig()
    assert SpeculativeConfig().method == "auto" and SpeculativeConfig().adaptive


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("num_speculative_token", "num_speculative_tokens"),
        ("Method", "method"),
        ("lookup_max", "prompt_lookup_max"),
        ("rejection_sampling_method", "rejection_sample_method"),
    ],
)
def test_unknown_key_is_ignored_or_not_explained(key: str, nearest: str) -> None:
    for options in ({key: 4}, json.dumps({key: 4})):
        with pytest.raises(ConfigError, match=f"unknown speculative_config key '{key}'; did you mean '{nearest}'"):
            SpeculativeConfig.parse(options)


def test_unknown_key_that_is_near_nothing_is_not_explained() -> None:
    with pytest.raises(ConfigError, match=r"unknown speculative_config key 'zzz'; choose one of: .*method, model, num_spec"):
        SpeculativeConfig.parse({"zzz": 1})
    with pytest.raises(ConfigError, match=r"unknown engine option 'max_num_seq'; did you mean 'max_num_seqs'\?"):
        EngineConfig.from_dict({"max_num_seq": 1})
    with pytest.raises(ConfigError, match=r"did you mean 'float32'\?"):
        EngineConfig(dtype="float-32")


DEEP = "[" * 100_000
HUGE = '{"num_speculative_tokens": ' + "1" * 5000 + "}"


@pytest.mark.parametrize(
    "text", ["", "{", "{'method': 'ngram'}", "ngram", '{"method": "ngram",}', DEEP, HUGE], ids=lambda text: text[:30]
)
def test_text_that_is_no_json_passes_as_another_error(text: str) -> None:
    with pytest.raises(ConfigError, match="speculative_config is not valid JSON") as caught:
        SpeculativeConfig.parse(text)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("options", ["[]", '"ngram"', "4", "true", "[[1, 2]]", 4, [], [("method", "ngram")], b"{}", ("method",)])
def test_other_than_an_object_is_parsed(options: Any) -> None:
    with pytest.raises(ConfigError, match="speculative_config must be a JSON object"):
        SpeculativeConfig.parse(options)


@pytest.mark.parametrize(
    "text", ['{"suffix_decoding_min_token_prob": NaN}', '{"num_speculative_tokens": 1e400}', '{"num_speculative_tokens": null}']
)
def test_json_value_out_of_range_is_accepted(text: str) -> None:
    with pytest.raises(ConfigError, match="must be"):
        SpeculativeConfig.parse(text)


def test_key_that_is_no_string_passes_as_another_error() -> None:
    with pytest.raises(ConfigError, match="unknown speculative_config key"):
        SpeculativeConfig.parse({5: 1})  # type: ignore[dict-item]


def test_override_loses_the_other_keys_or_changes_the_original() -> None:
    config = SpeculativeConfig("ngram", num_speculative_tokens=7, prompt_lookup_max=9, rejection_sample_method="block")
    assert config.override(None) is config
    assert config.override({}) == config
    assert config.override({"num_speculative_tokens": 2}) == dataclasses.replace(config, num_speculative_tokens=2)
    assert config.override({"method": "none"}) == dataclasses.replace(config, method="none")
    assert config.num_speculative_tokens == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 65}, "num_speculative_tokens must be from 0 to 64, not 65"),
        ({"num_speculative_tokens": True}, "not True"),
        ({"method": None}, "method must be the name of a drafter, not None"),
        ({"methods": "ngram"}, "'methods'; did you mean 'method'?"),
        ({"model": "x"}, "unknown key in a request's speculative override 'model'"),
        ({"rejection_sample_method": "block"}, "override 'rejection_sample_method'"),
    ],
)
def test_bad_override_is_accepted(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ForedraftError, match=message):
        SpeculativeConfig().override(options)


@pytest.mark.parametrize("options", [5, "x", "method", [1], ["method"], [("method", "ngram")], True])
def test_override_that_is_no_object_passes_as_another_error(options: Any) -> None:
    with pytest.raises(ForedraftError):
        SpeculativeConfig().override(options)


def test_config_can_be_changed_after_it_was_checked() -> None:
    for config, name in ((SpeculativeConfig(), "num_speculative_tokens"), (EngineConfig(), "block_size")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, -1)


anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_arbitrary_value_raises_something_else(data: st.DataObject) -> None:
    for config in (SpeculativeConfig, EngineConfig):
        name = data.draw(st.sampled_from([field.name for field in dataclasses.fields(config)]))
        value = data.draw(anything)
        make = SpeculativeConfig.parse if config is SpeculativeConfig else EngineConfig.from_dict
        try:
            made = make({name: value})
        except ConfigError:
            continue
        assert getattr(made, name) == value
