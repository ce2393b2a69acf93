"""Downloads from the Hugging Face hub into the cache: resumed, checked against its checksums, one at a time.

This module uses the network only for a requested model that is not in the cache. A token comes from
``HF_TOKEN``, or from the file that ``hf auth login`` writes; ``HF_ENDPOINT`` names another hub."""

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from hotcold.errors import UserError
from hotcold.hub import cache as hub_cache
from hotcold.hub.cache import COMMIT, PARTIAL, repository
from hotcold.hub.names import HubError, HubName, choose, is_hub_name, parse
from hotcold.values import printable, shown, size

#: A callback: advance(bytes done, total).
Advance: TypeAlias = Callable[[int, int], None]
#: A callback with a line for the user.
Say: TypeAlias = Callable[[str], None]

_BLOCK = 1 << 20
_SPARE = 64 << 20  # bytes of the disk that stay free
_PIECE = 1 << 30  # bytes per request: the hub's servers answer no request for 50 GB
_TIMEOUT_S = 30
_MOST_FAILURES, _PAUSE_S = 5, 1.0  # failed connections in a row without any new bytes
_HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore")
_AGAIN = "run the command again: it continues from there"


@dataclass(frozen=True)
class Pulled:
    """A model that is completely in the cache."""

    name: HubName
    path: Path  #: the first file of a split model
    commit: str
    files: tuple[str, ...]
    nbytes: int
    downloaded: int  #: bytes that this call downloaded


@dataclass(frozen=True)
class _Remote:
    """A file as the hub describes it."""

    file: str
    url: str
    checksum: str  #: SHA-256 of a large file, git's SHA-1 of a small one
    nbytes: int


def located(model: str | os.PathLike[str], advance: Advance | None = None, say: Say | None = None) -> Path:
    """The path of a model file; ``hf:OWNER/NAME/FILE`` is downloaded to the cache if it is not there.
    ``HubError``: there is no such model, or the download fails."""
    if not is_hub_name(model):
        return Path(model)
    name = parse(model)
    return hub_cache.find(name) or pull(name, advance, say).path


def pull(name: HubName, advance: Advance | None = None, say: Say | None = None) -> Pulled:
    """Downloads the missing files of a model, from the revision's current commit.

    An interrupted download continues where it ended. ``HubError``: the hub lacks the file or refuses it; a
    checksum is wrong, and the file was deleted; or the disk is too full, before anything is downloaded.
    OSError: the disk."""
    advance, say = advance or (lambda done, total: None), say or (lambda line: None)
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise HubError(f"HF_HUB_OFFLINE forbids downloads: unset it to download {name}")
    with _errors(name):
        hub = _Hub()
        commit, files = hub.files(name)
        remotes = [hub.describe(name, commit, files[file]) for file in choose(name, files)]
    folder = repository(name.repo)
    missing = [remote for remote in remotes if not (folder / "snapshots" / commit / remote.file).is_file()]
    _check_room(folder, missing)
    total, done = sum(remote.nbytes for remote in missing), 0
    for remote in missing:
        with _errors(name):
            _fetch(hub, folder, commit, remote, _Progress(advance, done, total), say)
        done += remote.nbytes
    _record(folder, name.revision or "main", commit)
    path = folder / "snapshots" / commit / remotes[0].file
    file_names = tuple(remote.file for remote in remotes)
    return Pulled(name, path, commit, file_names, sum(remote.nbytes for remote in remotes), total)


@dataclass(frozen=True)
class _Progress:
    """Progress of one file of several."""

    advance: Advance
    before: int
    total: int

    def __call__(self, done: int) -> None:
        self.advance(self.before + done, self.total)


class _Hub:
    """The library's public functions with checked answers: no path or number of a hub is trusted."""

    def __init__(self) -> None:
        import filelock  # here, so that other commands start without them
        import huggingface_hub
        from huggingface_hub import utils

        self.endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
        self.library: Any = huggingface_hub
        self.parts: Any = utils
        self.parts.logging.set_verbosity_error()  # this module reports errors itself, in one line
        self.lock: Any = filelock.FileLock
        self.headers: dict[str, str] = self.parts.build_hf_headers(library_name="hotcold")
        self.headers["Accept-Encoding"] = "identity"  # offsets must count bytes of the file itself

    def files(self, name: HubName) -> tuple[str, dict[str, Any]]:
        """The revision's commit, and all its files by path."""
        api = self.library.HfApi(endpoint=self.endpoint, library_name="hotcold")
        try:
            info = api.model_info(name.repo, revision=name.revision, timeout=_TIMEOUT_S, files_metadata=True)
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # a network's login page, say
            got = f"an invalid answer ({type(error).__name__})"
            raise HubError(f"the hub gave {got} for {name.repo}: check the connection") from error
        if not isinstance(info.sha, str) or not COMMIT.fullmatch(info.sha):
            raise HubError(
                f"the hub says that {name.repo} is at {shown(info.sha)}, which is not a commit: "
                "try again later"
            )
        return info.sha, {str(each.rfilename): each for each in info.siblings or ()}

    def describe(self, name: HubName, commit: str, sibling: Any) -> _Remote:
        file = str(sibling.rfilename)
        checksum = str(sibling.lfs.sha256 if sibling.lfs else sibling.blob_id)
        if not re.fullmatch(r"[0-9a-f]{64}|[0-9a-f]{40}", checksum):
            raise HubError(
                f"the hub gives {shown(checksum)} for {shown(file, 120)}, which is not a "
                "checksum: try again later"
            )
        if not isinstance(sibling.size, int) or sibling.size <= 0:
            raise HubError(
                f"the hub says that {shown(file, 120)} has {shown(sibling.size)} bytes, not 1 or more"
            )
        url = self.library.hf_hub_url(name.repo, file, revision=commit, endpoint=self.endpoint)
        return _Remote(file, url, checksum, sibling.size)

    def read(self, url: str, first: int, end: int) -> Iterator[bytes]:
        """Yields the bytes from ``first`` up to ``end`` as they arrive; there may be more or fewer."""
        wanted = self.headers | {"Range": f"bytes={first}-{end - 1}"}
        answer = self.parts.http_stream_backoff(
            "GET", url, headers=wanted, timeout=_TIMEOUT_S, retry_on_exceptions=(), retry_on_status_codes=429
        )
        with answer as response:
            self.parts.hf_raise_for_status(response)
            passed_over = first if response.status_code == 200 else 0  # the server ignored the range
            for block in response.iter_bytes():
                yield block[passed_over:]
                passed_over = max(0, passed_over - len(block))


def _check_room(folder: Path, missing: list[_Remote]) -> None:
    """Raises HubError if the missing files do not fit on the disk."""
    needed = sum(each.nbytes - _size(_partial(folder, each)) for each in missing)
    above = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(above).free
    if missing and needed + _SPARE > free:
        fix = "free more, or set HOTCOLD_CACHE to a folder on another disk"
        raise HubError(f"the download needs {size(needed)}, and {above} has {size(free)} free: {fix}")


def _fetch(
    hub: _Hub, folder: Path, commit: str, remote: _Remote, advance: Callable[[int], None], say: Say
) -> None:
    """Downloads one file into the cache; of several processes only the first does."""
    blob, link = folder / "blobs" / remote.checksum, folder / "snapshots" / commit / remote.file
    locks = folder.parent / ".locks" / folder.name
    for directory in (blob.parent, link.parent, locks):
        directory.mkdir(parents=True, exist_ok=True)
    with _locked(hub, locks / f"{remote.checksum}.lock", remote, say):
        if not blob.exists():
            _download(hub, _partial(folder, remote), remote, advance)
            os.replace(_partial(folder, remote), blob)
        if not link.is_file():
            _link(blob, link)


@contextlib.contextmanager
def _locked(hub: _Hub, path: Path, remote: _Remote, say: Say) -> Iterator[None]:
    """Holds the lock that other tools of the hub use, too."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hub.lock(str(path), timeout=0.1))
        except TimeoutError:
            say(f"another process is downloading {printable(remote.file)}: waiting for it")
            stack.enter_context(hub.lock(str(path)))
        yield


def _download(hub: _Hub, path: Path, remote: _Remote, advance: Callable[[int], None]) -> None:
    """Completes the partial file, in pieces; after an error the correct part stays."""
    if _size(path) > remote.nbytes:
        path.unlink()
    large = len(remote.checksum) == 64
    checksum = hashlib.sha256() if large else hashlib.sha1(b"blob %d\0" % remote.nbytes)
    done = 0
    with path.open("a+b") as file:
        file.seek(0)
        while block := file.read(_BLOCK):
            checksum.update(block)
            done += len(block)
            advance(done)
        for block in _rest(hub, remote, done):
            file.write(block)
            checksum.update(block)
            done += len(block)
            advance(done)
        file.flush()
        os.fsync(file.fileno())
    if (got := checksum.hexdigest()) != remote.checksum:
        path.unlink()
        differs = f"has the checksum {got[:16]}..., not {remote.checksum[:16]}..."
        raise HubError(
            f"{shown(remote.file, 120)}: the downloaded file {differs}; it was deleted: download it again"
        )


def _rest(hub: _Hub, remote: _Remote, done: int) -> Iterator[bytes]:
    """A file's bytes from ``done`` on. Reconnects after a failure as long as connections bring new bytes."""
    failures = 0
    while done < remote.nbytes:
        before = done
        try:
            for block in hub.read(remote.url, done, min(done + _PIECE, remote.nbytes)):
                yield block[: remote.nbytes - done]
                done = min(done + len(block), remote.nbytes)
        except Exception as error:
            failures = 1 if done > before else failures + 1
            if _library(error) not in _HTTP_LIBRARIES or failures > _MOST_FAILURES:
                raise
            time.sleep(_PAUSE_S)
        else:
            failures = 0
            if done == before:
                ended = f"{shown(remote.file, 120)} ended after {done} of {remote.nbytes} bytes"
                raise HubError(f"{ended}: {_AGAIN}")


def _partial(folder: Path, remote: _Remote) -> Path:
    return folder / "blobs" / f"{remote.checksum}{PARTIAL}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _link(blob: Path, link: Path) -> None:
    link.unlink(missing_ok=True)  # a broken link
    try:
        link.symlink_to(os.path.relpath(blob, link.parent))
    except OSError:  # Windows, without the right to create links
        os.replace(blob, link)


def _record(folder: Path, revision: str, commit: str) -> None:
    """Records the revision's current commit, so that it is found without the network."""
    if COMMIT.fullmatch(revision):
        return
    path = folder / "refs" / revision
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}")
    partial.write_text(commit, encoding="ascii")
    os.replace(partial, path)


@contextlib.contextmanager
def _errors(name: HubName) -> Iterator[None]:
    """Turns the errors of the library and of its HTTP client into HubError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        message = _error_text(name, error)
        if message is None:
            raise
        raise HubError(message) from error


def _error_text(name: HubName, error: Exception) -> str | None:
    """The fix for an error; None if the error is not the hub's."""
    kind, status = type(error).__name__, getattr(getattr(error, "response", None), "status_code", None)
    if kind == "GatedRepoError":
        return f"{name.repo} is gated: ask for access on its page, and set HF_TOKEN to your token"
    if kind == "RevisionNotFoundError":
        return (
            f"{name.repo} has no revision {shown(name.revision or 'main', 80)}: name a branch, tag or commit"
        )
    if status in (401, 403) or kind == "RepositoryNotFoundError":
        token = (
            "the token in HF_TOKEN gives no access to it"
            if os.environ.get("HF_TOKEN")
            else "private models need a token in HF_TOKEN"
        )
        return f"{name.repo} is not on the hub, or you have no access: check the name; {token}"
    if kind.endswith("EntryNotFoundError"):
        return f"{name} is not on the hub: it was listed before and is gone now"
    if status is not None:
        return f"the hub answered {status} for {name.repo}: try again later, {_AGAIN}"
    if _library(error) in ("huggingface_hub", *_HTTP_LIBRARIES):
        return f"{name} cannot be downloaded ({kind}): check the connection, then {_AGAIN}"
    return None


def _library(error: Exception) -> str:
    """The package that defines an error's class."""
    return type(error).__module__.partition(".")[0]
