"""The folder of a long run: it belongs to one run, and what a kill left half-written is cleared away."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hotcold.errors import UserError
from hotcold.training.work_folder import check_space, open_work_folder

FACTS = {"text": "abc", "recall": 0.99, "relu": False}


def test_the_same_run_goes_on(tmp_path: Path) -> None:
    work = open_work_folder(tmp_path / "work", FACTS)
    (work / "state").write_bytes(b"one")
    (work / ".state.1234.partial").write_bytes(b"half")
    again = open_work_folder(tmp_path / "work", FACTS)
    assert {path.name: path.read_bytes() for path in again.iterdir() if path.name != "run.json"} == {
        "state": b"one"
    }


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"text": "abd"}, "holds a run with text 'abc', not 'abd': give the same value, or another"),
        ({"recall": 0.95}, "holds a run with recall 0.99, not 0.95"),
        ({"threads": 2}, "holds a run with threads None, not 2"),
    ],
)
def test_another_run_is_refused(other: dict[str, str | float], message: str, tmp_path: Path) -> None:
    open_work_folder(tmp_path / "work", FACTS)
    with pytest.raises(UserError, match=message):
        open_work_folder(tmp_path / "work", FACTS | other)
    open_work_folder(tmp_path / "work", FACTS)


def test_what_cannot_be_a_work_folder(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.txt").write_text("dear")
    for path, message in (
        (tmp_path / "letters", "has other files: give a folder that is new, empty"),
        (tmp_path / "letters" / "a.txt", "cannot be used: File exists; give another folder"),
        (tmp_path / "no" / "such", "cannot be used: No such file or directory"),
    ):
        with pytest.raises(UserError, match=message):
            open_work_folder(path, FACTS)
    assert [path.name for path in tmp_path.rglob("*")] == ["letters", "a.txt"]
    for damaged in (b"", b"[]", b'{"text"', b"\xff{}", b"[" * 100_000):
        (tmp_path / "letters" / "run.json").write_bytes(damaged)
        with pytest.raises(UserError, match="give another folder"):
            open_work_folder(tmp_path / "letters", FACTS)


def test_room_counts_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = open_work_folder(tmp_path, FACTS)
    room = shutil.disk_usage(tmp_path)
    (tmp_path / "inputs").write_bytes(bytes(1000))
    held = 1000 + (tmp_path / "run.json").stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room._replace(free=500))
    check_space(work, held + 500)
    with pytest.raises(UserError, match=r"GiB are needed, and 0\.00 GiB are free: use fewer `tokens`"):
        check_space(work, held + 501)
