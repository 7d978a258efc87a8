"""Drafters by name: those that come with the engine, those given by the caller, and those of installed packages.

A method is a name of one, or ``none``, or ``auto`` for all that fit.

Owns: the table of names and the order in which sources are asked.  Does not know: what a drafter does; its module is imported when
its name is asked for.

A package offers a drafter through an entry point of group ``foredraft.drafters`` that names a ``factory(config, context)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from foredraft.config import SpeculativeConfig
from foredraft.drafters import shipped
from foredraft.drafters.context import DrafterContext, DrafterFactory
from foredraft.memory import DrafterBytes
from foredraft.types import ConfigError, Drafter, refuse_unknown

ENTRY_POINT_GROUP = "foredraft.drafters"
NONE, AUTO, DRAFT_MODEL = "none", "auto", "draft_model"
MODEL_FREE = ("ngram", "suffix")
HEADS = ("eagle", "eagle3")
WITH_MODEL = (DRAFT_MODEL, *HEADS)
_MODULES = {
    "forced": "foredraft.drafters.forced",
    "draft_model": "foredraft.drafters.draft_model",
    "eagle": "foredraft.drafters.eagle",
    "eagle3": "foredraft.drafters.eagle",
    "ngram": "foredraft.drafters.ngram",
    "suffix": "foredraft.drafters.suffix_native",
}


@dataclass(frozen=True)
class Sources:
    """What the drafters of one engine are loaded from: names or paths, None for none.

    ``draft_model`` is a language model, ``head`` a draft head for method ``head_kind``, ``suffix_base`` a file of statistics.
    """

    draft_model: str | None = None
    head: str | None = None
    head_kind: str | None = None
    suffix_base: str | None = None

    def settings(self, name: str, config: SpeculativeConfig) -> SpeculativeConfig:
        """``config`` as the drafter of that name is to read it; one that is not ours reads what the user wrote."""
        if name not in _MODULES:
            return config
        model = self.head if name == self.head_kind else self.draft_model if name == DRAFT_MODEL else None
        base = config.suffix_decoding_base or self.suffix_base
        return replace(config, method=name, model=model, suffix_decoding_base=base)


def available(extra: Mapping[str, DrafterFactory] = {}) -> tuple[str, ...]:
    """Methods, sorted; nothing is imported."""
    return tuple(sorted({NONE, AUTO, *_MODULES, *extra, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))}))


def usable(found: Sources, extra: Mapping[str, DrafterFactory] = {}) -> tuple[str, ...]:
    """Methods that a request may name: those whose model is there; ``forced`` is asked by itself where a request has a grammar."""
    with_model = {DRAFT_MODEL if found.draft_model else None, found.head_kind if found.head else None}
    return tuple(name for name in available(extra) if name != "forced" and (name not in WITH_MODEL or name in with_model))


def sources(config: SpeculativeConfig, target: shipped.Target | None = None) -> Sources:
    """What ``config`` names, and, for what it leaves open, what is shipped for ``target``.

    ``auto`` takes ``model`` for a head if its folder holds one, else for a draft model; a hub's model is fetched to tell.

    Raises:
        ModelNotFoundError, ModelFileError: ``model`` cannot be read.
    """
    named = _named(config)
    if target is None or not config.shipped or config.method == NONE:
        return named
    found, method = shipped.find(target), config.method
    draft, head, kind = named.draft_model, named.head, named.head_kind
    if config.model is None:
        if method == AUTO or method == found.head_kind:
            head, kind = found.head, found.head_kind
        # A head costs less than a small model and is right more often, so `auto` takes no second one.
        if method == DRAFT_MODEL or (method == AUTO and head is None):
            draft = found.draft_model
    base = found.suffix_base if method in (AUTO, "suffix") else None
    return Sources(draft, head, kind, named.suffix_base or base)


def asking_models(methods: Iterable[str]) -> tuple[str, ...]:
    """Those of these methods that may ask a model."""
    return tuple(method for method in methods if method == AUTO or method in WITH_MODEL)


def together(some: Seq[Sources]) -> Sources:
    """For each part the first that there is."""
    with_head = next((one for one in some if one.head is not None), Sources())
    return Sources(
        next((one.draft_model for one in some if one.draft_model is not None), None),
        with_head.head,
        with_head.head_kind,
        next((one.suffix_base for one in some if one.suffix_base is not None), None),
    )


def _named(config: SpeculativeConfig) -> Sources:
    model, base = config.model, config.suffix_decoding_base
    if model is None:
        return Sources(suffix_base=base)
    if config.method in HEADS:
        return Sources(head=model, head_kind=config.method, suffix_base=base)
    kind = _head_kind(model) if config.method == AUTO else None
    return Sources(head=model, head_kind=kind, suffix_base=base) if kind else Sources(model, suffix_base=base)


def _head_kind(model: str) -> str | None:
    from foredraft.drafters.eagle_file import head_kind
    from foredraft.loader.resolve import resolve_model

    path = Path(resolve_model(model))
    return head_kind(path) if path.is_dir() else None


def members(
    config: SpeculativeConfig,
    extra: Mapping[str, DrafterFactory] = {},
    found: Sources | None = None,
    *,
    has_grammar: bool = False,
) -> tuple[str, ...]:
    """Names of the drafters that a method may ask.

    ``auto`` asks those without a model, those that ``found`` has a model for, and the caller's own; for a request whose
    answer must follow a grammar also the one that drafts what must come.
    """
    if config.method == NONE:
        return ()
    if config.method == AUTO:
        found = found or Sources(draft_model=config.model)
        models = [name for name, model in ((DRAFT_MODEL, found.draft_model), (found.head_kind, found.head)) if name and model]
        return (*(("forced",) if has_grammar else ()), *MODEL_FREE, *models, *extra)
    return (config.method,)


def create(name: str, config: SpeculativeConfig, context: DrafterContext, extra: Mapping[str, DrafterFactory] = {}) -> Drafter:
    """The drafter of that name.

    ``extra`` are the caller's own factories by name; they come before those of installed packages.

    Raises:
        ConfigError: an unknown name, one that is given twice, or a package's drafter that cannot be imported.
    """
    return _factory(name, extra)(config, context)


def memory(config: SpeculativeConfig, found: Sources | None = None) -> DrafterBytes:
    """What the statistics of the drafters of ``config`` take; models have none, the caller's own are not known."""
    found = found or Sources(suffix_base=config.suffix_decoding_base)
    names = [name for name in members(config, found=found) if name in MODEL_FREE]
    parts: list[DrafterBytes] = [import_module(_MODULES[name]).memory(found.settings(name, config)) for name in names]
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
    if config.model is None and config.method in WITH_MODEL and not (config.shipped and shipped.shipped_folders()):
        raise ConfigError(f'method {config.method!r} must have a model; add "model" to speculative_config.')


def _factory(name: str, extra: Mapping[str, DrafterFactory]) -> DrafterFactory:
    points = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == name]
    if name in (NONE, AUTO, *_MODULES):
        if name in extra or points:
            raise ConfigError(f"drafter name {name!r} is foredraft's own; give yours another name.")
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
