"""The cache of downloaded models: where it is, what is in it, and that only what is meant is deleted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hotcold.errors import UserError
from hotcold.hub import cache as hub_cache
from hotcold.hub.names import HubError, parse

FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOTCOLD_CACHE", str(tmp_path))
    return tmp_path


def put(cache: Path, repo: str, commit: str, file: str, data: bytes = b"data", ref: str = "") -> Path:
    """As the tools of the hub leave it, with a blob named by its content."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    blob, link = folder / "blobs" / data.hex(), folder / "snapshots" / commit / file
    for path in (blob, link):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    link.symlink_to(Path(*[".."] * (2 + file.count("/")), "blobs", blob.name))
    if ref:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return link


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HOTCOLD_CACHE": "/a", "HF_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/a"),
        ({"HF_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/b"),
        ({"HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/b"),
        ({"HF_HOME": "/c", "XDG_CACHE_HOME": "/d"}, "/c/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
        ({"HOME": "/e"}, "/e/.cache/huggingface/hub"),
        ({"HOME": "/e", "HF_HOME": "~/x"}, "/e/x/hub"),
    ],
)
def test_the_folder(variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOTCOLD_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub_cache.cache_folder() == Path(folder)


def test_a_folder_that_is_not_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTCOLD_CACHE", "here")
    with pytest.raises(UserError, match="cache folder 'here': set HOTCOLD_CACHE to an absolute path"):
        hub_cache.cached()


def test_an_empty_cache(cache: Path) -> None:
    assert hub_cache.cached() == [] and hub_cache.find(parse("o/n")) is None
    with pytest.raises(
        HubError, match=r"hf:o/n is not in the cache .*: `hotcold list` lists the models there"
    ):
        hub_cache.remove(parse("o/n"))


def test_the_list(cache: Path) -> None:
    put(cache, "o/n", FIRST, "m.gguf", b"old")
    new = put(cache, "o/n", SECOND, "m.gguf", b"newer", ref="main")
    first = put(cache, "o/n", SECOND, "x/s-00001-of-00002.gguf", b"12345")
    put(cache, "o/n", SECOND, "x/s-00002-of-00002.gguf", b"678")
    put(cache, "o/n", SECOND, "m.predictor.gguf", b"....")
    put(cache, "a/text", FIRST, "config.json")
    (cache / "models--o--n" / "blobs" / "cc.incomplete").write_bytes(b"half")
    (cache / "datasets--o--n").mkdir()
    found = [(c.repo, c.file, c.files, c.nbytes, c.commit, c.refs) for c in hub_cache.cached()]
    assert found == [
        ("o/n", "m.gguf", 1, 3, FIRST, ()),
        ("o/n", "m.gguf", 2, 9, SECOND, ("main",)),
        ("o/n", "x/s-00001-of-00002.gguf", 2, 8, SECOND, ("main",)),
        ("o/n", "", 1, 4, "", ()),
    ]
    assert hub_cache.find(parse("o/n:m.gguf")) == new
    assert hub_cache.find(parse("o/n:s-00001-of-00002.gguf")) is None
    assert hub_cache.find(parse("o/n:x/s-00001-of-00002.gguf")) == first
    with pytest.raises(HubError, match="has 2 models"):
        hub_cache.find(parse("o/n"))


def test_main_comes_before_what_is_newer(cache: Path) -> None:
    for commit, other in ((FIRST, SECOND), (SECOND, FIRST)):
        meant, newer = put(cache, f"o/{commit[0]}", commit, "m.gguf", ref="main"), other
        put(cache, f"o/{commit[0]}", newer, "m.gguf")
        os.utime(meant.parent, (1, 1))
        assert hub_cache.find(parse(f"o/{commit[0]}")) == meant


def test_a_file_that_the_newest_commit_lacks_is_found(cache: Path) -> None:
    put(cache, "o/n", SECOND, "other.gguf", b"other", ref="main")
    old = put(cache, "o/n", FIRST, "m.gguf")
    assert hub_cache.find(parse("o/n:m.gguf")) == old
    assert hub_cache.find(parse("o/n:m.gguf@main")) is None


def test_links_that_lead_nowhere_are_no_files(cache: Path) -> None:
    put(cache, "o/n", FIRST, "m.gguf", ref="main").resolve().unlink()
    assert hub_cache.find(parse("o/n")) is None and hub_cache.cached() == []


def test_removing_one_model(cache: Path) -> None:
    folder = cache / "models--o--n"
    put(cache, "o/n", FIRST, "m.gguf", b"same")
    put(cache, "o/n", SECOND, "m.gguf", b"same", ref="main")
    put(cache, "o/n", SECOND, "m.predictor.gguf", b"side")
    keep = put(cache, "o/n", SECOND, "n.gguf", b"other")
    both = put(cache, "o/n", SECOND, "copy.gguf", b"same")
    gone = hub_cache.remove(parse("o/n:m.gguf"))
    assert [(each.file, each.commit) for each in gone] == [("m.gguf", FIRST), ("m.gguf", SECOND)]
    assert keep.read_bytes() == b"other" and both.read_bytes() == b"same"  # a blob of two names
    assert {path.name for path in (folder / "blobs").iterdir()} == {b"same".hex(), b"other".hex()}
    hub_cache.remove(parse("o/n:copy.gguf"))
    assert {path.name for path in (folder / "blobs").iterdir()} == {b"other".hex()}
    hub_cache.remove(parse("o/n:n.gguf"))
    assert not folder.exists()


def test_removing_one_revision(cache: Path) -> None:
    old = put(cache, "o/n", FIRST, "m.gguf", b"old")
    new = put(cache, "o/n", SECOND, "m.gguf", b"new", ref="main")
    hub_cache.remove(parse("o/n:m.gguf@main"))
    assert old.is_file() and not new.exists()
    hub_cache.remove(parse(f"o/n@{FIRST}"))
    assert not (cache / "models--o--n").exists()


def test_removing_all_of_a_repository_leaves_what_is_no_model(cache: Path) -> None:
    put(cache, "o/n", FIRST, "m-00001-of-00002.gguf", b"1", ref="main")
    put(cache, "o/n", FIRST, "m-00002-of-00002.gguf", b"2")
    keep = put(cache, "o/n", FIRST, "config.json", b"{}")
    (cache / "models--o--n" / "blobs" / "cc.incomplete").write_bytes(b"half")
    assert len(hub_cache.remove(parse("o/n"))) == 2
    assert keep.read_bytes() == b"{}" and len(list((cache / "models--o--n" / "blobs").iterdir())) == 1
    with pytest.raises(HubError, match="is not in the cache"):
        hub_cache.remove(parse("o/n"))


def test_nothing_outside_the_cache_is_deleted(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A link that leads elsewhere goes, and what it leads to stays."""
    outside = tmp_path_factory.mktemp("outside") / "mine.gguf"
    outside.write_bytes(b"mine")
    snapshot = cache / "models--o--n" / "snapshots" / FIRST
    snapshot.mkdir(parents=True)
    (snapshot / "m.gguf").symlink_to(outside)
    (snapshot / "n.gguf").write_bytes(b"a file and no link")
    hub_cache.remove(parse("o/n"))
    assert outside.read_bytes() == b"mine" and not snapshot.exists()


def test_a_reference_that_is_no_commit_leads_nowhere(cache: Path) -> None:
    good = put(cache, "o/n", FIRST, "m.gguf", ref="main")
    (cache / "models--o--n" / "refs" / "main").write_text("../../../..")
    assert hub_cache.find(parse("o/n")) == good
    assert hub_cache.find(parse("o/n@main")) is None
