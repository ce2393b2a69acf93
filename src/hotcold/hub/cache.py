"""Finds, lists and removes downloaded models. Uses no network.

The folder and its layout are those of the Hugging Face tools, so all tools share downloads:
``models--OWNER--NAME/`` with ``blobs/SHA256``, ``snapshots/COMMIT/FILE``, a link to the blob, and
``refs/REVISION``, which holds the commit."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hotcold.errors import UserError
from hotcold.hub.names import (
    HubError,
    HubName,
    SeveralModels,
    all_parts,
    choose,
    choose_first,
    is_first,
    is_safe,
    sidecars,
)

COMMIT = re.compile(r"[0-9a-f]{40}")
PARTIAL = ".incomplete"
_FOLDER = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)")


@dataclass(frozen=True)
class Cached:
    """One model in the cache, of one revision."""

    repo: str
    file: str  #: path in the repository, of the first part if split; empty for interrupted downloads
    files: int  #: number of files
    nbytes: int
    commit: str
    refs: tuple[str, ...]  #: requested branches and tags that meant this commit
    path: Path


def cache_folder() -> Path:
    """The folder in ``HOTCOLD_CACHE``, or the Hugging Face tools' cache: ``HF_HUB_CACHE``, ``HF_HOME/hub``,
    ``XDG_CACHE_HOME/huggingface/hub``, ``~/.cache/huggingface/hub``. UserError: not an absolute path."""
    for name in ("HOTCOLD_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return _absolute(name, os.environ[name])
    if os.environ.get("HF_HOME"):
        return _absolute("HF_HOME", os.environ["HF_HOME"]) / "hub"
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _absolute("XDG_CACHE_HOME", home) / "huggingface" / "hub"


def _absolute(name: str, value: str) -> Path:
    folder = os.path.expanduser(value)
    if not os.path.isabs(folder):
        raise UserError(f"cache folder {value!r}: set {name} to an absolute path")
    return Path(folder)


def repository(repo: str) -> Path:
    return cache_folder() / f"models--{repo.replace('/', '--')}"


def find(name: HubName) -> Path | None:
    """Path of the cached model (the first part, if split), or None unless all parts are there. The revision
    is the given one; else ``main`` at the last download; else any revision with the model. ``HubError``: the
    name means several models."""
    folder = repository(name.repo)
    for commit in _commits(folder, name.revision):
        snapshot = folder / "snapshots" / commit
        present = [file for file, path in _files(snapshot) if path.is_file()]
        try:
            return snapshot / choose(name, present)[0]
        except SeveralModels:
            raise
        except HubError:
            continue
    return None


def _commits(folder: Path, revision: str | None) -> list[str]:
    """Cached commits of a revision, the best first."""
    snapshots = {
        entry.name: entry for entry in _entries(folder / "snapshots") if COMMIT.fullmatch(entry.name)
    }
    meant = _refs(folder).get(revision or "main", revision)
    if revision is not None:
        return [meant] if meant in snapshots else []
    others = sorted(snapshots, key=lambda commit: (snapshots[commit].stat().st_mtime, commit), reverse=True)
    return sorted(others, key=lambda commit: commit != meant)


def _refs(folder: Path) -> dict[str, str]:
    """The recorded commits of branches and tags."""
    refs = {}
    for name, path in _files(folder / "refs"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            commit = path.read_text(encoding="ascii").strip()
            if COMMIT.fullmatch(commit):
                refs[name] = commit
    return refs


def cached() -> list[Cached]:
    """All GGUF models of the cache, by name, and interrupted downloads."""
    models: list[Cached] = []
    for folder in sorted(_entries(cache_folder())):
        if (named := _FOLDER.fullmatch(folder.name)) and folder.is_dir():
            models += _of_repository(f"{named['owner']}/{named['name']}", folder)
    return models


def _of_repository(repo: str, folder: Path) -> Iterator[Cached]:
    refs = _refs(folder)
    for commit in sorted(entry.name for entry in _entries(folder / "snapshots")):
        names = tuple(sorted(name for name, meant in refs.items() if meant == commit))
        present = {file: path for file, path in _files(folder / "snapshots" / commit) if path.is_file()}
        for file in sorted(filter(is_first, present)):
            if file.endswith(".gguf"):
                model_files = [each for each in (*all_parts(file), *sidecars(file)) if each in present]
                nbytes = sum(present[each].stat().st_size for each in model_files)
                yield Cached(repo, file, len(model_files), nbytes, commit, names, present[file])
    if partial := _partial(folder):
        nbytes = sum(path.stat().st_size for path in partial)
        yield Cached(repo, "", len(partial), nbytes, "", (), folder)


def remove(name: HubName) -> list[Cached]:
    """Deletes a model, of one revision or of all. For a name of a repository alone, deletes all its models
    and interrupted downloads. Returns the deleted models. Other files stay. ``HubError``: there is none."""
    folder = repository(name.repo)
    meant = list(_of_repository(name.repo, folder))
    if name.revision is not None:
        commits = _commits(folder, name.revision)
        meant = [model for model in meant if model.commit in commits]
    if meant and (name.file or name.quant):
        chosen = choose_first(name, sorted({model.file for model in meant if model.file}))
        meant = [model for model in meant if model.file == chosen]
    if not meant:
        raise HubError(f"{name} is not in the cache {cache_folder()}: `hotcold list` lists the models there")
    for model in meant:
        if model.file:
            snapshot = folder / "snapshots" / model.commit
            _delete(folder, [snapshot / file for file in (*all_parts(model.file), *sidecars(model.file))])
        else:
            _delete(folder, _partial(folder))
    if not any(_files(folder / "snapshots")) and not _entries(folder / "blobs"):
        shutil.rmtree(folder)
    return meant


def _delete(folder: Path, paths: list[Path]) -> None:
    """Deletes links, and their blobs unless other links lead to them."""
    blobs = folder / "blobs"
    targets = {path: _target(path) for path in paths}
    for path in paths:
        path.unlink(missing_ok=True)
    used = {_target(path) for _, path in _files(folder / "snapshots")}
    for target in {*targets.values()} - used:
        if target is not None and target.parent == blobs:
            target.unlink(missing_ok=True)


def _target(path: Path) -> Path | None:
    """The target of a link, one step; None if it is no link."""
    return Path(os.path.normpath(path.parent / os.readlink(path))) if path.is_symlink() else None


def _partial(folder: Path) -> list[Path]:
    return [path for path in _entries(folder / "blobs") if path.name.endswith(PARTIAL)]


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """All files below a folder, with their paths from there; links to files are files."""
    for top, _, names in os.walk(folder):
        for name in names:
            path = Path(top, name)
            relative = path.relative_to(folder).as_posix()
            if is_safe(relative):
                yield relative, path
