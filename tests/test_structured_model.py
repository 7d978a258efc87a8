"""structured_outputs on the demo model: every schema of scripts/check_schemas.py, with drafts and without."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from foredraft import LLM, RequestError, SamplingParams, StructuredOutputs

pytestmark = pytest.mark.model
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "check_schemas.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_schemas", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    config = {"method": "draft_model", "model": "smollm2-135m", "num_speculative_tokens": 3, "adaptive": False}
    yield LLM("smollm2-135m", speculative_config=config, device="cpu", threads=2, max_model_len=1024, kv_cache_memory=60_000_000)


def test_a_json_answer_is_invalid_or_drafts_change_it(llm: LLM, script: ModuleType) -> None:
    """One answer per schema at temperature 1, all together in a batch, by every drafter."""
    tokens: dict[str, list[list[int]]] = {}
    for method in ("none", "auto", "ngram", "draft_model"):
        params, prompts = [], []
        for index, (name, schema) in enumerate(script.SCHEMAS.items()):
            speculative = {"method": method, "adaptive": method == "auto"}
            params.append(
                SamplingParams(seed=index, max_tokens=300, structured_outputs={"json": schema}, speculative=speculative)  # type: ignore[arg-type]
            )
            prompts += script.prompts(llm, name, 1)
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
        tokens[method] = [output.token_ids for output in outputs]
        if method == "none":
            whole = {
                name: output.text for name, output in zip(script.SCHEMAS, outputs, strict=True) if output.finish_reason == "stop"
            }
            assert len(whole) >= 8, [output.finish_reason for output in outputs]
            assert {name: script.problem(name, text) for name, text in whole.items()} == dict.fromkeys(whole, "")
        elif method != "auto":  # which may find that no draft pays in so large a batch
            assert "accepted" in {origin for output in outputs for origin in output.origins}
    assert tokens["none"] == tokens["auto"] == tokens["ngram"] == tokens["draft_model"]


def test_each_kind_of_shape_is_followed(llm: LLM) -> None:
    for shape, pattern in (
        (StructuredOutputs(regex=r"[A-Z][a-zé]{2,9}, \d{1,2}"), r"[A-Z][a-zé]{2,9}, \d{1,2}"),
        (StructuredOutputs(choice=["yes", "no", "no, never", "日本"]), "yes|no|no, never|日本"),
        (
            StructuredOutputs(grammar='start: "(" NUMBER ("," NUMBER){1,3} ")"\nNUMBER: /-?[0-9]{1,4}/'),
            r"\((-?\d{1,4},){1,3}-?\d{1,4}\)",
        ),
        (StructuredOutputs(grammar='root ::= ("a" | "b")+ "."'), r"[ab]*\.?"),
        (StructuredOutputs(json_object=True), r"\{.*"),
    ):
        params = SamplingParams(n=3, seed=5, max_tokens=40, structured_outputs=shape)
        plain, drafted = (
            llm.generate("An answer: ", SamplingParams(**vars(params) | {"speculative": {"method": method}}))[0].outputs
            for method in ("none", "auto")
        )
        assert [answer.token_ids for answer in plain] == [answer.token_ids for answer in drafted]
        assert all(re.fullmatch(pattern, answer.text, re.DOTALL) for answer in plain), [answer.text for answer in plain]


def test_a_shape_that_cannot_be_is_a_crash_or_leaves_a_request_behind(llm: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="(?!a)b"))
    with pytest.raises(RequestError, match=r"structured_outputs\.regex cannot be compiled"):
        llm.generate(["one", "two"], [SamplingParams(), params])
    assert not llm.engine.has_work
