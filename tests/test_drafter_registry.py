from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from foredraft.config import SpeculativeConfig
from foredraft.drafters import registry, shipped
from foredraft.drafters.context import DrafterContext, DrafterFactory
from foredraft.drafters.forced import ForcedDrafter
from foredraft.drafters.ngram import NgramDrafter
from foredraft.drafters.ngram_table import TargetIdentity
from foredraft.drafters.registry import Sources, asking_models, available, create, members, together
from foredraft.drafters.suffix import SuffixDrafter
from foredraft.llm import LLM
from foredraft.types import ConfigError, Drafter
from head_files import HeadSpec
from hf_weights import VOCAB_SIZE

CONTEXT = DrafterContext(vocab_size=8, max_model_len=64)
MODEL = "smollm2-135m"


class Own(NgramDrafter):
    pass


def own_factory(config: SpeculativeConfig, context: DrafterContext) -> Drafter:
    assert config.num_speculative_tokens == 8 and context is CONTEXT
    return Own(1, 2)


not_a_factory = 7


def install(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    points = EntryPoints(EntryPoint(name.rstrip("_"), value, registry.ENTRY_POINT_GROUP) for name, value in values.items())
    monkeypatch.setattr(registry, "entry_points", lambda group: points.select(group=group))


def make(method: str, **extra: DrafterFactory) -> Drafter:
    registry.check(SpeculativeConfig(method=method), extra)
    return create(method, SpeculativeConfig(method=method), CONTEXT, extra)


def test_each_name_gives_its_drafter() -> None:
    assert isinstance(make("ngram"), NgramDrafter)
    assert isinstance(make("suffix"), SuffixDrafter)
    assert isinstance(make("forced"), ForcedDrafter)
    assert {"auto", "draft_model", "forced", "ngram", "none", "suffix"} <= set(available())


def test_a_method_asks_other_drafters_than_it_names() -> None:
    extra = {"echo": own_factory}
    assert members(SpeculativeConfig("none"), extra) == ()
    assert members(SpeculativeConfig("suffix"), extra) == ("suffix",)
    assert members(SpeculativeConfig("auto"), extra) == ("ngram", "suffix", "echo")
    assert members(SpeculativeConfig("auto"), extra, has_grammar=True) == ("forced", "ngram", "suffix", "echo")
    assert members(SpeculativeConfig("suffix"), has_grammar=True) == members(SpeculativeConfig("suffix")) == ("suffix",)
    assert members(SpeculativeConfig("none"), has_grammar=True) == ()
    assert members(SpeculativeConfig("auto", model="small")) == ("ngram", "suffix", "draft_model")


def test_an_own_factory_is_used() -> None:
    assert isinstance(make("echo", echo=own_factory), Own)
    assert "echo" in available({"echo": own_factory}) and "echo" not in available()


def test_a_misspelt_name_gets_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'suffix'"):
        make("sufix")
    with pytest.raises(ConfigError, match="did you mean 'echo'"):
        make("ecko", echo=own_factory)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "draft_model"])
def test_a_method_with_a_model_says_that_it_needs_one(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' must have a model"):
        registry.check(SpeculativeConfig(method=name, shipped=False))
    with pytest.raises(ConfigError, match="must have a"):
        create(name, SpeculativeConfig(method=name), CONTEXT)


def test_auto_tells_a_head_from_a_draft_model(tmp_path: Path) -> None:
    HeadSpec().write(tmp_path / "head")
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text('{"model_type": "llama"}')
    found = [registry.sources(SpeculativeConfig(model=str(tmp_path / name))) for name in ("head", "small")]
    assert [members(SpeculativeConfig(), found=one)[2:] for one in found] == [("eagle3",), ("draft_model",)]
    assert found[0].settings("eagle3", SpeculativeConfig()).model == str(tmp_path / "head")
    assert found[0].settings("suffix", SpeculativeConfig()).model is None


def test_what_is_shipped_is_found_by_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = TargetIdentity("tiny", VOCAB_SIZE, "abc")
    folder = tmp_path / "tiny"
    HeadSpec().write(folder / "eagle3")
    (folder / "draft_model").mkdir()
    (folder / "draft_model" / "draft.gguf").write_text("")
    (folder / "suffix.table").write_text("")
    (folder / "provenance.json").write_text(json.dumps({"target": asdict(identity)}))
    monkeypatch.setattr(registry.shipped, "find", partial(shipped.find, folder=tmp_path))
    target = shipped.Target(VOCAB_SIZE, 64, 3, lambda: identity)

    def found(target: shipped.Target = target, **options: Any) -> tuple[str | None, ...]:
        one = registry.sources(SpeculativeConfig(**options), target)
        paths = (one.suffix_base, one.head, one.draft_model)
        return tuple(path and Path(path).name for path in paths)

    # A head leaves no place for a draft model; without one, or by its own name, the draft model is there.
    assert found() == ("suffix.table", "eagle3", None)
    assert found(method="draft_model") == (None, None, "draft.gguf")
    assert found(shipped=False) == found(method="none") == found(method="ngram") == (None, None, None)
    assert found(method="suffix") == ("suffix.table", None, None)
    assert found(method="suffix", suffix_decoding_base="own") == ("own", None, None)
    assert found(method="eagle3") == (None, "eagle3", None) and found(method="eagle") == (None, None, None)
    assert found(replace(target, hidden_size=96)) == ("suffix.table", None, "draft.gguf")
    assert found(replace(target, vocab_size=80)) == (None, None, None)
    assert found(replace(target, identity=lambda: replace(identity, vocabulary="x"))) == (None, None, None)


@pytest.mark.parametrize("name", ["ngram", "none", "auto", "eagle"])
def test_a_name_of_ours_cannot_be_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="foredraft's own"):
        make(name, **{name: own_factory})
    install(monkeypatch, **{name: f"{__name__}:own_factory"})
    with pytest.raises(ConfigError, match="foredraft's own"):
        make(name)


def test_a_package_offers_a_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, plugged=f"{__name__}:own_factory", broken="no_such_module:factory")
    assert isinstance(make("plugged"), Own)
    assert {"plugged", "broken", "ngram"} <= set(available())


@pytest.mark.parametrize("value", ["no_such_module:factory", f"{__name__}:no_such_factory"])
def test_a_package_that_cannot_be_imported_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, broken=value)
    with pytest.raises(ConfigError, match=rf"'broken' cannot be imported from '{value}'"):
        make("broken")


def test_a_package_that_offers_no_factory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, broken=f"{__name__}:not_a_factory")
    with pytest.raises(ConfigError, match="must be a factory"):
        make("broken")


def test_a_name_that_two_packages_offer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, twice=f"{__name__}:own_factory", twice_="other:factory")
    with pytest.raises(ConfigError, match="offered by other:factory and"):
        make("twice")


def test_the_callers_own_drafter_comes_before_a_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, echo="no_such_module:factory")
    assert isinstance(make("echo", echo=own_factory), Own)


def test_names_are_known_without_importing_a_drafter() -> None:
    code = (
        "import sys; from foredraft.drafters.registry import available; available();"
        "assert not {'torch', 'foredraft.drafters.suffix', 'foredraft.drafters.draft_model'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_methods_side_by_side_lose_what_one_of_them_has() -> None:
    head, model = Sources(head="h", head_kind="eagle3", suffix_base="t"), Sources(draft_model="m")
    assert together([Sources(), model, head]) == Sources("m", "h", "eagle3", "t")
    assert asking_models(("ngram", "draft_model", "auto", "suffix", "eagle")) == ("draft_model", "auto", "eagle")


@pytest.mark.model
def test_a_method_beside_others_drafts_with_other_models_than_alone() -> None:
    """As a bench opens it: whatever the engine's own method is."""
    alone = {method: LLM(MODEL, speculative_config={"method": method}).new_drafters(method) for method in ("auto", "suffix")}
    methods = ("suffix", "draft_model", "auto")
    llm = LLM(MODEL, speculative_config={"method": "draft_model"}, also=methods)
    beside = {method: llm.new_drafters(method) for method in methods}
    assert (
        list(beside["auto"]) == list(alone["auto"])
        and "eagle3" in beside["auto"]
        and list(beside["draft_model"]) == ["draft_model"]
    )
    for drafters in (beside["auto"], beside["suffix"], alone["suffix"]):
        assert isinstance(drafters["suffix"], SuffixDrafter) and drafters["suffix"].table is not None
