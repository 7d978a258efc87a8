"""Drafters by name: those that come with the engine, those given by the caller, and those of installed packages.

A method is a name of one, or ``none``, or ``auto`` for all that fit.

Owns: the table of names and the order in which sources are asked.  Does not know: what a drafter does; its module is imported when
its name is asked for.

A package offers a drafter through an entry point of group ``foredraft.drafters`` that names a ``factory(config, context)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from foredraft.config import SpeculativeConfig
from foredraft.drafters.context import DrafterContext, DrafterFactory
from foredraft.memory import DrafterBytes
from foredraft.types import ConfigError, Drafter, refuse_unknown

ENTRY_POINT_GROUP = "foredraft.drafters"
NONE, AUTO = "none", "auto"
MODEL_FREE = ("ngram", "suffix")
NOT_YET = ("eagle", "eagle3")
_MODULES = {
    "forced": "foredraft.drafters.forced",
    "draft_model": "foredraft.drafters.draft_model",
    "ngram": "foredraft.drafters.ngram",
    "suffix": "foredraft.drafters.suffix",
}


def available(extra: Mapping[str, DrafterFactory] = {}) -> tuple[str, ...]:
    """Methods, sorted; nothing is imported."""
    return tuple(sorted({NONE, AUTO, *_MODULES, *extra, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))}))


def members(config: SpeculativeConfig, extra: Mapping[str, DrafterFactory] = {}, *, has_grammar: bool = False) -> tuple[str, ...]:
    """Names of the drafters that a method may ask.

    ``auto`` asks those without a model, the draft model that ``config.model`` names, and the caller's own; for a request whose
    answer must follow a grammar also the one that drafts what must come.
    """
    if config.method == NONE:
        return ()
    if config.method == AUTO:
        return (*(("forced",) if has_grammar else ()), *MODEL_FREE, *(("draft_model",) if config.model is not None else ()), *extra)
    return (config.method,)


def create(name: str, config: SpeculativeConfig, context: DrafterContext, extra: Mapping[str, DrafterFactory] = {}) -> Drafter:
    """The drafter of that name.

    ``extra`` are the caller's own factories by name; they come before those of installed packages.

    Raises:
        ConfigError: an unknown name, one that is given twice, or a package's drafter that cannot be imported.
    """
    return _factory(name, extra)(config, context)


def memory(config: SpeculativeConfig) -> DrafterBytes:
    """What the statistics of the drafters of ``config`` take; draft models have none, and of the caller's own nothing is known."""
    parts: list[DrafterBytes] = [import_module(_MODULES[name]).memory(config) for name in members(config) if name in MODEL_FREE]
    return DrafterBytes(fixed=sum(part.fixed for part in parts), per_token=sum(part.per_token for part in parts))


def check(config: SpeculativeConfig, extra: Mapping[str, DrafterFactory] = {}) -> None:
    """Refuse what cannot be drafted with, before any model is loaded.

    Raises:
        ConfigError: as ``create`` does, or ``model`` is missing or given to a method that has none.
    """
    for name in members(config, extra):
        _factory(name, extra)
    if config.model is not None and config.method in (NONE, "forced", *MODEL_FREE):
        raise ConfigError(
            f"method {config.method!r} takes no model, but model is {config.model!r}; remove it or use 'draft_model'."
        )
    if config.model is None and config.method == "draft_model":
        raise ConfigError("method 'draft_model' must have a model; add \"model\" to speculative_config.")


def _factory(name: str, extra: Mapping[str, DrafterFactory]) -> DrafterFactory:
    points = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == name]
    if name in (NONE, AUTO, *_MODULES, *NOT_YET):
        if name in extra or points:
            raise ConfigError(f"drafter name {name!r} is foredraft's own; give yours another name.")
        if name in NOT_YET:
            raise ConfigError(f"method {name!r} is not in this version yet; choose one of: {', '.join(available(extra))}.")
        return _own(name)
    if name in extra:
        return extra[name]
    if not points:
        refuse_unknown("speculative method", name, available(extra))
    if len({point.value for point in points}) > 1:
        values = " and ".join(sorted(point.value for point in points))
        raise ConfigError(f"drafter name {name!r} is offered by {values}; uninstall one of them.")
    return _load(points[0])


def _own(name: str) -> DrafterFactory:
    assert name in _MODULES, f"{name!r} is a method, not a drafter"
    factory: DrafterFactory = import_module(_MODULES[name]).create
    return factory


def _load(point: EntryPoint) -> DrafterFactory:
    try:
        factory: DrafterFactory = point.load()
    except Exception as error:
        # Whatever a foreign module raises at import, the user has to know which one it was.
        where = f"{point.name!r} cannot be imported from {point.value!r}"
        raise ConfigError(f"drafter {where} ({error!r}); mend or uninstall it.") from error
    if not callable(factory):
        raise ConfigError(f"drafter {point.name!r} must be a factory, but {point.value!r} is {factory!r}; mend or uninstall it.")
    return factory
