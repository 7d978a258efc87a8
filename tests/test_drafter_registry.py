from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from foredraft.config import SpeculativeConfig
from foredraft.drafters import registry
from foredraft.drafters.context import DrafterContext, DrafterFactory
from foredraft.drafters.forced import ForcedDrafter
from foredraft.drafters.ngram import NgramDrafter
from foredraft.drafters.registry import available, create, members
from foredraft.drafters.suffix import SuffixDrafter
from foredraft.types import ConfigError, Drafter

CONTEXT = DrafterContext(vocab_size=8, max_model_len=64)


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


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_method_of_a_later_version_says_so(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' is not in this version yet; choose one of: .*ngram, none, suffix"):
        make(name)


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
