"""Files read at any position, and written whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hotcold.formats.files import FileError, RegularFile, replacing


def test_reads_are_positional(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    file = RegularFile(path)
    assert file.size == 200
    assert file.read(150, 50) == bytes(range(150, 200))
    assert file.read(0, 3) == b"\0\1\2"
    assert file.read(200, 0) == b""
    with pytest.raises(FileError, match="ended at byte 200"):
        file.read(190, 11)


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="no preadv")
def test_pieces_make_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read larger than one system call gives, and one that gives less than asked."""
    data = os.urandom(1000)
    (tmp_path / "file").write_bytes(data)
    monkeypatch.setattr("hotcold.formats.files._READ_BYTES", 64)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, [view[:7] for view in views], at))
    assert RegularFile(tmp_path / "file").read(1, 998) == data[1:999]


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="no preadv")
def test_a_failing_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"data")
    file = RegularFile(tmp_path / "file")

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(FileError, match="cannot be read at byte 2: Input/output error"):
        file.read(2, 2)


def test_replacing_leaves_the_new_content_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), ValueError("x"), OSError(errno.ENOSPC, "No space left")]
)
def test_an_error_leaves_the_old_content_alone(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    expected = FileError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected), replacing(path) as file:
        file.write(b"half")
        file.flush()
        raise error
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    with replacing(tmp_path / "ours") as file:
        file.write(b"")
    (tmp_path / "usual").touch()
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("name", ["no/such/folder", "folder", "n" * 300])
def test_where_no_file_can_be(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileError, match=r"cannot be written|is a directory"), replacing(tmp_path / name):
        pass
    assert os.listdir(tmp_path) == ["folder"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("QWEN2.gguf", "Qwen2.gguf"),
        ("qwen_2.gguf", "Qwen2.gguf"),
        ("llama.gguf", None),
        ("no/Qwen2.gguf", None),
    ],
)
def test_a_missing_file_has_the_name_of_a_similar_one(tmp_path: Path, name: str, hint: str | None) -> None:
    for present in ("Qwen2.gguf", "other.txt"):
        (tmp_path / present).write_bytes(b"x")
    with pytest.raises(FileError) as caught:
        RegularFile(tmp_path / name)
    ending = f"; did you mean {hint}?" if hint else ""
    assert str(caught.value) == f"cannot be opened: No such file or directory{ending}"
