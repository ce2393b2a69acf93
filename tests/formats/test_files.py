"""Files read at any position, and written whole or not at all."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hotcold.errors import UserError
from hotcold.formats import files
from hotcold.formats.files import FileError, RegularFile, check_output, output_file, replacing, write_text


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


KILLED = """
import os, pathlib, sys
from hotcold.formats.files import replacing
with replacing(pathlib.Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os._exit(9)
"""


@pytest.mark.parametrize("name", ["file", "[a]*?.gguf"])
def test_the_next_run_deletes_what_a_killed_one_left(name: str, tmp_path: Path) -> None:
    """Files of other names stay, and so does the file of a process that still writes."""
    path = tmp_path / name
    others = [".other.0123abcd.partial", f".{name}.copy.0123abcd.partial", f".{name}.mine.partial"]
    for other in others:
        (tmp_path / other).touch()

    def partials() -> set[str]:
        return {each for each in os.listdir(tmp_path) if each.endswith(".partial")} - set(others)

    def leave_one() -> None:
        assert subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False).returncode == 9
        assert len(partials()) == 1

    leave_one()
    check_output(path, 1, force=False)
    assert not partials()
    leave_one()
    with replacing(path) as first:
        first.write(b"first")
        (alive,) = partials()
        with replacing(path) as second:
            second.write(b"second")
            assert len(partials()) == 2
        assert partials() == {alive}
    assert path.read_bytes() == b"first"
    assert sorted(os.listdir(tmp_path)) == sorted([*others, name])


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be deleted")
@pytest.mark.parametrize("delays", [False, True])
def test_a_writer_that_has_no_lock_yet(delays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer takes the new file for that of a killed process: it deletes the file before the first
    writer locks it, or locks it first and deletes it then."""
    path, locked, writing = tmp_path / "file", threading.Event(), threading.Event()
    others = ThreadPoolExecutor()
    lock, deletions = files._locked, []

    def delete(partial: Path) -> None:
        with lock(partial) as alone:
            locked.set()
            if delays:
                writing.wait(0.2)  # the first writer waits for the lock, so this takes the whole time
            assert alone
            partial.unlink()

    def late(partial: Path, **options: Any) -> Any:
        monkeypatch.setattr(files, "_locked", lock)
        other = others.submit(delete, partial)
        deletions.append(other)
        assert locked.wait(60)
        if not delays:
            other.result()
        return lock(partial, **options)

    monkeypatch.setattr(files, "_locked", late)
    with replacing(path) as file:
        file.write(b"whole")
        writing.set()
        others.shutdown()
    for deletion in deletions:
        deletion.result()
    assert deletions and path.read_bytes() == b"whole" and os.listdir(tmp_path) == ["file"]


def test_a_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    with replacing(tmp_path / "ours") as file:
        file.write(b"")
    (tmp_path / "usual").touch()
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_text_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "text"
    write_text(path, "Käse\n")
    assert path.read_bytes() == b"K\xc3\xa4se\n"
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half of a pair: \ud800")
    assert path.read_bytes() == b"K\xc3\xa4se\n" and os.listdir(tmp_path) == ["text"]
    with pytest.raises(UserError, match=r"no.folder: cannot be written"):
        write_text(tmp_path / "no" / "folder", "")


def test_an_output_is_no_file_that_is_read(tmp_path: Path) -> None:
    """Links to the file are found, and inputs that are no paths do not matter."""
    path, link = tmp_path / "a", tmp_path / "b"
    path.touch()
    link.symlink_to(path)
    for inputs in ([path], [None, str(path)], ["a\0b", "x" * 5000, link]):
        with pytest.raises(UserError, match=r"a: the new file would replace the one that is read"):
            output_file(path, force=True, inputs=inputs)
    assert output_file(str(path), force=True, inputs=[None, "text", tmp_path / "no"]) == path


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
