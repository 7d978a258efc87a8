from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft.journal import Journal
from foredraft.types import CapacityError

KEY = {"options": {"ks": (1, 2)}, "version": "1"}


def test_a_finished_part_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "x.part"
    journal = Journal(path, KEY)
    journal.add("a/1", {"seconds": 0.1 + 0.2, "ids": [1, 2]})
    journal.add("b", [None])
    assert journal.get("a/1") == {"seconds": 0.1 + 0.2, "ids": [1, 2]}
    again = Journal(path, KEY)
    assert (len(again), again.get("a/1"), again.get("b"), again.get("c")) == (
        2,
        {"seconds": 0.1 + 0.2, "ids": [1, 2]},
        [None],
        None,
    )


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_line_that_was_cut_off_spoils_the_others_or_what_follows(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.part"
    journal = Journal(path, KEY)
    journal.add("a", 1)
    journal.add("b", "y" * 100)
    path.write_text(path.read_text()[:-cut])
    again = Journal(path, KEY)
    assert again.get("a") == 1 and again.get("b") in (None, "y" * 100)
    again.add("c", 3)
    assert Journal(path, KEY).get("c") == 3


@pytest.mark.parametrize("content", ["", "\n", "{", "[]\n", '{"key": 1}\n', "no json\n"])
def test_a_file_that_is_no_journal_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.part"
    path.write_text(content)
    assert len(Journal(path, KEY)) == 0
    assert json.loads(path.read_text().splitlines()[0])["key"]["version"] == "1"


def test_parts_of_another_measurement_are_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "x.part"
    Journal(path, KEY).add("a", 1)
    other = Journal(path, {**KEY, "version": "2"})
    assert other.get("a") is None
    assert len(Journal(path, KEY)) == 0


def test_a_full_disk_ends_in_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "x.part"
    journal = Journal(path, KEY)
    path.unlink()
    path.mkdir()
    with pytest.raises(CapacityError, match=r"x\.part cannot be written .* run the same command again"):
        journal.add("a", 1)
    with pytest.raises(CapacityError, match=r"x\.part cannot be written"):
        Journal(path, KEY)


def test_a_journal_without_a_file_writes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    journal = Journal(None, KEY)
    journal.add("a", 1)
    assert journal.get("a") == 1
    assert list(tmp_path.iterdir()) == []
