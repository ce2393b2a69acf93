"""Files on disk: a regular file read at any position, and one written completely or not at all."""

import contextlib
import difflib
import glob
import os
import secrets
import shutil
import stat
import sys
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from hotcold.errors import UserError
from hotcold.values import printable
from hotcold.windows import DENIED, IN_USE, code, kernel32, read_at

CLOSE_IT = "close what has it open"  #: for systems that cannot replace an open file

_READ_BYTES = 64 << 20  # bytes per system call, so that Ctrl-C is noticed


class FileError(UserError):
    """Raised for a path that is no regular file, and for a file that changed. The text lacks the path."""


@contextlib.contextmanager
def naming(path: Path, kind: type[ValueError]) -> Iterator[None]:
    """Prefixes errors of this kind with the path, and turns each ``FileError`` into one of this kind."""
    try:
        yield
    except (kind, FileError) as error:
        raise kind(f"{printable(str(path), 4096)}: {error}") from None


class RegularFile:
    """An open regular file whose size must not change; also closed when it is collected.

    Reads are positional and use the checked descriptor. Replacing the file under its name has no effect.
    Truncating it gives an error, where a memory map would give a fault."""

    def __init__(self, path: Path) -> None:
        self._fd = _open_regular(path)
        self.close = weakref.finalize(self, os.close, self._fd)
        self.size = os.fstat(self._fd).st_size

    def read(self, offset: int, n: int) -> bytes:
        """Returns exactly ``n`` bytes from ``offset``; ``FileError`` as for :meth:`read_into`."""
        data = bytearray(n)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fills ``view`` (bytes) from ``offset``; ``FileError`` if closed, changed in size or unreadable."""
        self._check()
        done = 0
        while done < len(view):
            try:
                n = _read_at(self._fd, view[done : done + _READ_BYTES], offset + done)
            except OSError as error:
                raise FileError(f"cannot be read at byte {offset + done}: {error.strerror}") from None
            if n == 0:
                raise FileError(f"ended at byte {offset + done} while being read; open it again")
            done += n

    @contextlib.contextmanager
    def descriptor(self) -> Iterator[int]:
        """Yields the descriptor for code with its own positional reads. Their ``OSError`` and ``EOFError``
        become ``FileError``, which is also raised if the file is closed or changes in size."""
        self._check()
        try:
            yield self._fd
        except EOFError:
            self._check()
            raise FileError("ended while being read; open it again") from None
        except OSError as error:
            raise FileError(f"cannot be read: {error.strerror}") from None
        self._check()

    def _check(self) -> None:
        if not self.close.alive:
            raise FileError("the file is closed; open it again")
        if (size := os.fstat(self._fd).st_size) != self.size:
            raise FileError(f"changed from {self.size} to {size} bytes while in use; open it again")


def _open_regular(path: Path) -> int:
    try:
        # Check before opening, because opening can block (a FIFO) or act (a device).
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
            mode = os.fstat(fd).st_mode
            if stat.S_ISREG(mode):
                return fd
            os.close(fd)
    except (OSError, ValueError) as error:  # ValueError: a NUL or half a surrogate pair in the path
        hint = _nearest(path) if isinstance(error, FileNotFoundError) else ""
        raise FileError(f"cannot be opened: {getattr(error, 'strerror', error)}{hint}") from None
    raise _special(mode)


def _nearest(path: Path) -> str:
    """A hint at a file with a similar name in the same folder; may be empty."""
    try:
        names = {name.lower(): name for name in os.listdir(path.parent)}
    except OSError:
        return ""
    matches = difflib.get_close_matches(path.name.lower(), names, n=1, cutoff=0.8)
    return f"; did you mean {printable(names[matches[0]])}?" if matches else ""


def _special(mode: int) -> FileError:
    got = "a directory" if stat.S_ISDIR(mode) else "a FIFO" if stat.S_ISFIFO(mode) else "a device or socket"
    return FileError(f"is {got}: a regular file is needed")


if sys.platform == "win32":
    import msvcrt

    def _read_at(fd: int, view: memoryview, offset: int) -> int:
        return read_at(kernel32(), msvcrt.get_osfhandle(fd), view, offset)

    def _locked(path: Path, *, wait: bool = False) -> contextlib.AbstractContextManager[bool]:
        """Needs no lock: a file that is open cannot be deleted."""
        return contextlib.nullcontext(True)

else:
    import fcntl

    def _read_at(fd: int, view: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(fd, [view], offset)
        data = os.pread(fd, len(view), offset)  # macOS before 11
        view[: len(data)] = data
        return len(data)

    @contextlib.contextmanager
    def _locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
        """Locks a file. False: another process has the lock and ``wait`` is False, or the disk has no
        locks."""
        with path.open("r+b") as file:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                locked = True
            except OSError:
                locked = False
            yield locked


def output_file(
    path: str | os.PathLike[str] | None, *, force: bool, inputs: Iterable[object] = ()
) -> Path | None:
    """Returns the path of a file to write, which the user named; None writes nothing. UserError, with the
    path: as in :func:`check_output`, or the file is one of ``inputs``; inputs that are no paths are
    ignored."""
    if path is None:
        return None
    file = Path(path)
    with naming(file, UserError):
        check_output(file, 0, force=force)
        if any(_is_same_file(file, each) for each in inputs):
            raise FileError("the new file would replace the one that is read: give another name")
    return file


def _is_same_file(file: Path, other: object) -> bool:
    try:
        return isinstance(other, str | os.PathLike) and os.path.samefile(file, other)
    except (OSError, ValueError):  # one of them is missing, or is no path
        return False


def check_output(path: Path, nbytes: int, *, force: bool) -> None:
    """Checks before hours of work that ``path`` can be written. ``FileError``: it exists and ``force`` is
    False, it is no regular file, its folder does not exist, or the disk has less than ``nbytes`` free
    bytes."""
    folder = path.parent
    if path.exists() and not force:
        raise FileError("the file exists: give another name, or `force` to replace it")
    if path.exists() and not path.is_file():
        raise _special(path.stat().st_mode)
    if not folder.is_dir():
        raise FileError(f"{printable(str(folder), 4096)} is not a folder: create it first")
    _delete_abandoned(path)
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise FileError(f"it needs {nbytes} bytes, and {free} are free in {printable(str(folder), 4096)}")


def _delete_abandoned(path: Path) -> None:
    """Deletes partial files of ``path`` from killed processes. A process that still writes locks its file; on
    a disk without locks, all files stay."""
    begin = glob.escape(f".{path.name[:200]}.")
    for partial in path.parent.glob(f"{begin}{'[0-9a-f]' * 8}.partial"):
        with contextlib.suppress(OSError), _locked(partial) as alone:
            if alone:
                partial.unlink()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yields a new file in ``path``'s folder, which replaces ``path`` at the end. On an error or interrupt it
    is deleted. The next call for ``path`` deletes the file of a killed process. ``FileError``: ``path`` is
    not a regular file, or cannot be written."""
    try:
        if path.exists() and not path.is_file():
            raise _special(path.stat().st_mode)
        _delete_abandoned(path)
        with contextlib.ExitStack() as cleanup:
            partial, file = _create_partial(path, cleanup)
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            _replace(partial, path)
    except OSError as error:
        raise FileError(f"cannot be written: {error.strerror or error}") from None


def _create_partial(path: Path, cleanup: contextlib.ExitStack) -> tuple[Path, BinaryIO]:
    """Creates and locks a partial file of ``path``; ``cleanup`` closes, unlocks and deletes it.

    Before the lock, another process may delete the file as that of a killed process: then the next one is
    created."""
    while True:
        partial = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.partial")
        file = cleanup.enter_context(partial.open("xb"))
        cleanup.callback(_delete, partial)
        with contextlib.suppress(FileNotFoundError):
            cleanup.enter_context(_locked(partial, wait=True))
            if partial.exists():
                return partial, file


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def write_text(path: Path, text: str) -> None:
    """Writes a text file in UTF-8, completely or not at all. UserError, with the path: as in
    :func:`replacing`."""
    with naming(path, UserError), replacing(path) as file:
        file.write(text.encode())


def _replace(partial: Path, path: Path) -> None:
    try:
        os.replace(partial, path)
    except PermissionError as error:
        if code(error) not in (DENIED, IN_USE):
            raise
        raise FileError(f"cannot be replaced ({error.strerror}): {CLOSE_IT}, or give another name") from None
