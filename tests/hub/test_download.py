"""Downloads from a hub on this machine: whole, resumed, checked, one at a time; and what is refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from support.fake_hub import COMMITS, FakeHub, fake_hub
from support.split_models import split_model

from hotcold import LLM, AsyncLLM
from hotcold.demo import model_path
from hotcold.formats.gguf import open_gguf
from hotcold.hub import cache as hub_cache
from hotcold.hub import download as hub
from hotcold.hub.names import HubError, parse
from hotcold.runtime import opening

DATA = bytes(range(256)) * 4000  # a file of a megabyte that is no model


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HOME", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOTCOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))  # where a token might lie
    monkeypatch.setattr(hub, "_PAUSE_S", 0.0)
    with fake_hub() as made:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        yield made


def all_files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def kept(folder: Path) -> set[str]:
    """Without locks and the like."""
    return {name for name in all_files(folder) if not name.startswith(".")}


def test_a_model_comes_whole_and_runs(remote: FakeHub, tmp_path: Path) -> None:
    remote.add("own/fable", **{"fable.gguf": model_path().read_bytes(), "README.md": b"text"})
    reports: list[tuple[int, int]] = []
    pulled = hub.pull(parse("own/fable"), lambda done, total: reports.append((done, total)))
    size = model_path().stat().st_size
    assert pulled.path.read_bytes() == model_path().read_bytes()
    assert (pulled.nbytes, pulled.downloaded, pulled.files) == (size, size, ("fable.gguf",))
    assert reports[-1] == (size, size) and reports == sorted(reports)
    folder = tmp_path / "cache" / "models--own--fable"
    digest = hashlib.sha256(model_path().read_bytes()).hexdigest()
    names = {f"blobs/{digest}", f"snapshots/{COMMITS[0]}/fable.gguf", "refs/main"}
    assert kept(folder) == names and (folder / "refs" / "main").read_text() == COMMITS[0]
    with LLM("hf:own/fable/fable.gguf") as llm:
        assert llm.model.path == pulled.path
        assert llm.generate("Once", max_tokens=2).text


def test_other_tools_of_the_hub_find_it(remote: FakeHub, tmp_path: Path) -> None:
    remote.add("own/name", **{"sub/m.gguf": DATA})
    pulled = hub.pull(parse("own/name"))
    cache = str(tmp_path / "cache")
    found = huggingface_hub.try_to_load_from_cache("own/name", "sub/m.gguf", cache_dir=cache)
    assert Path(found) == pulled.path
    (repo,) = huggingface_hub.scan_cache_dir(cache).repos
    assert (repo.repo_id, repo.size_on_disk) == ("own/name", len(DATA))


def test_what_other_tools_have_downloaded_is_found(remote: FakeHub, tmp_path: Path) -> None:
    remote.add("own/name", **{"m.gguf": DATA})
    theirs = huggingface_hub.hf_hub_download(
        "own/name", "m.gguf", cache_dir=str(tmp_path / "cache"), endpoint=remote.url
    )
    before = remote.requests
    assert hub.located("hf:own/name/m.gguf") == Path(theirs)
    assert hub.pull(parse("own/name")).downloaded == 0
    assert remote.requests > before and len(remote.bodies) == 1


def test_without_the_network_once_it_is_there(remote: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.add("own/name", **{"m-Q4_0.gguf": DATA, "m-Q8_0.gguf": DATA + b"8"})
    path = hub.located("hf:own/name:Q4_0")
    before = remote.requests
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("hf:own/name/m-Q4_0.gguf", "hf:own/name:q4_0", "hf:own/name", f"hf:own/name@{COMMITS[0]}"):
        assert hub.located(name) == hub.located(Path(name)) == path
    with pytest.raises(HubError, match="HF_HUB_OFFLINE forbids"):
        hub.located("hf:own/name/m-Q8_0.gguf")
    with pytest.raises(HubError, match="HF_HUB_OFFLINE forbids"):
        hub.located(f"hf:own/name/m-Q4_0.gguf@{COMMITS[1]}")
    assert remote.requests == before


def test_the_revision_is_pinned(remote: FakeHub) -> None:
    remote.add("own/name", **{"m.gguf": DATA})
    first = hub.pull(parse("own/name"))
    remote.commit, remote.files["own/name"]["m.gguf"] = COMMITS[1], DATA[::-1]
    assert hub.located("hf:own/name/m.gguf") == first.path  # what was pulled stays what is meant
    second = hub.pull(parse("own/name"))
    assert (first.commit, second.commit) == COMMITS
    assert hub.located("hf:own/name") == second.path
    assert hub.located(f"hf:own/name@{COMMITS[0]}") == first.path
    assert first.path.read_bytes() == DATA and second.path.read_bytes() == DATA[::-1]
    hub.pull(parse("own/name@v1"))
    assert hub.located("hf:own/name@v1") == second.path


def test_all_files_of_a_split_model(remote: FakeHub, tmp_path: Path) -> None:
    parts = split_model(model_path(), tmp_path / "fable.gguf", 3)
    remote.add("own/split", **{f"Q8_0/{part.name}": part.read_bytes() for part in parts})
    pulled = hub.pull(parse("own/split:Q8_0"))
    assert len(pulled.files) == 3 and len(remote.bodies) == 3
    with open_gguf(hub.located("hf:own/split")) as split, open_gguf(model_path()) as whole:
        assert split.fingerprint() == whole.fingerprint()
    pulled.path.with_name(parts[1].name).unlink()  # a part that is missing makes the model missing
    assert hub.located("hf:own/split") == pulled.path
    assert pulled.path.with_name(parts[1].name).is_file()
    assert len(remote.bodies) == 3  # its bytes were still there


def test_a_download_that_was_cut_goes_on(remote: FakeHub, tmp_path: Path) -> None:
    remote.add("own/name", **{"m.gguf": DATA})
    remote.cut_after = 300_000
    with pytest.raises(HubError, match=r"the hub answered 503 .*: it continues from there"):
        hub.pull(parse("own/name"))
    assert hub_cache.find(parse("own/name")) is None
    (partial,) = (tmp_path / "cache" / "models--own--name" / "blobs").iterdir()
    there = partial.stat().st_size
    assert 250_000 < there <= 300_000 and partial.read_bytes() == DATA[:there]
    remote.down = False
    done_bytes: list[int] = []
    pulled = hub.pull(parse("own/name"), lambda done, total: done_bytes.append(done))
    assert pulled.path.read_bytes() == DATA
    assert remote.bodies == [("m.gguf", 0), ("m.gguf", there)]
    assert not partial.exists() and done_bytes[-1] == len(DATA)


def test_a_file_comes_in_pieces(remote: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer need be longer than a hub gives, however long the file is."""
    remote.add("own/name", **{"m.gguf": DATA})
    monkeypatch.setattr(hub, "_PIECE", 400_000)
    reports: list[tuple[int, int]] = []
    assert hub.pull(parse("own/name"), lambda *each: reports.append(each)).path.read_bytes() == DATA
    assert remote.bodies == [("m.gguf", 0), ("m.gguf", 400_000), ("m.gguf", 800_000)]
    assert reports == sorted(reports) and reports[-1] == (len(DATA), len(DATA))


def test_a_connection_that_breaks_is_made_again(remote: FakeHub) -> None:
    remote.add("own/name", **{"m.gguf": DATA})
    remote.cut_after, remote.down_after_cut = 300_000, False
    assert hub.pull(parse("own/name")).path.read_bytes() == DATA
    (_, first), (_, second) = remote.bodies
    assert first == 0 < second <= 300_000


def test_connections_of_which_nothing_comes_are_given_up(remote: FakeHub) -> None:
    remote.add("own/name", **{"m.gguf": DATA})
    remote.cut_after, remote.cut_again = 0, True
    with pytest.raises(HubError, match=r"cannot be downloaded .*: check the connection, then run"):
        hub.pull(parse("own/name"))
    assert remote.bodies == [("m.gguf", 0)] * 6


def test_a_hub_that_sends_all_again(remote: FakeHub) -> None:
    remote.add("own/name", **{"m.gguf": DATA})
    remote.cut_after = 300_000
    with pytest.raises(HubError):
        hub.pull(parse("own/name"))
    remote.down, remote.ignore_ranges = False, True
    assert hub.pull(parse("own/name")).path.read_bytes() == DATA
    assert remote.bodies == [("m.gguf", 0), ("m.gguf", 0)]


@pytest.mark.parametrize("length", [len(DATA), len(DATA) + 5])
def test_a_partial_file_of_another_download(remote: FakeHub, tmp_path: Path, length: int) -> None:
    """A partial file as long as the whole one, or longer, with other bytes."""
    remote.add("own/name", **{"m.gguf": DATA})
    blobs = tmp_path / "cache" / "models--own--name" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(DATA).hexdigest()}.incomplete").write_bytes(bytes(length))
    if length == len(DATA):
        with pytest.raises(HubError, match="checksum"):
            hub.pull(parse("own/name"))
    assert hub.pull(parse("own/name")).path.read_bytes() == DATA


def test_a_wrong_checksum_is_refused_and_nothing_is_left(remote: FakeHub, tmp_path: Path) -> None:
    remote.add("own/name", **{"m.gguf": DATA})
    remote.damage.add("m.gguf")
    with pytest.raises(HubError, match=r"the downloaded file has the checksum .*, not .*; it was deleted"):
        hub.pull(parse("own/name"))
    assert kept(tmp_path / "cache") == set()
    remote.damage.clear()
    assert hub.pull(parse("own/name")).path.read_bytes() == DATA


def test_a_file_without_a_checksum_is_refused(remote: FakeHub, tmp_path: Path) -> None:
    remote.add("own/name", **{"m.gguf": DATA})
    remote.no_checksum = True
    with pytest.raises(HubError, match=r"checksum|cannot be downloaded"):
        hub.pull(parse("own/name"))
    assert remote.bodies == [] and not (tmp_path / "cache").exists()


def test_too_little_room_is_told_before(
    remote: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    remote.add("own/name", **{"m.gguf": DATA})
    room = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room._replace(free=(64 << 20) + len(DATA) - 1))
    with pytest.raises(HubError, match=r"the download needs .*, and .* has .* MiB free: free more, or set"):
        hub.pull(parse("own/name"))
    assert remote.bodies == [] and not (tmp_path / "cache").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room._replace(free=(64 << 20) + len(DATA)))
    assert hub.pull(parse("own/name")).downloaded == len(DATA)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room._replace(free=0))
    assert hub.pull(parse("own/name")).downloaded == 0


PULL = """
import json, sys
from hotcold.hub import download as hub
from hotcold.hub.names import parse
said = []
done = hub.pull(parse("own/name"), None, said.append)
print(json.dumps([str(done.path), said]))
"""


def test_two_processes_download_once(remote: FakeHub) -> None:
    remote.add("own/name", **{"m.gguf": DATA})
    remote.hold = threading.Event()
    command = [sys.executable, "-c", PULL]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as first:
        assert remote.started.wait(60)
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"N": "2"}) as second:
            while remote.requests < 4:  # the first has three; the second has asked for the list of files
                assert second.poll() is None
                time.sleep(0.01)
            remote.hold.set()
            texts = [process.communicate(timeout=60)[0] for process in (first, second)]
    paths = [json.loads(text)[0] for text in texts]
    assert paths[0] == paths[1] and Path(paths[0]).read_bytes() == DATA
    assert remote.bodies == [("m.gguf", 0)]


def test_one_waits_for_another_and_says_so(remote: FakeHub) -> None:
    remote.add("own/name", **{"m.gguf": DATA})
    remote.hold = threading.Event()
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        assert remote.hold is not None
        remote.hold.set()  # the first continues when the second has said that it waits

    first = threading.Thread(target=hub.pull, args=(parse("own/name"),))
    first.start()
    assert remote.started.wait(60)
    pulled = hub.pull(parse("own/name"), None, say)
    first.join()
    assert said == ["another process is downloading m.gguf: waiting for it"]
    assert pulled.path.read_bytes() == DATA and len(remote.bodies) == 1


def test_the_token_goes_to_the_hub_and_nowhere_else(remote: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.add("own/name", **{"m.gguf": DATA})
    remote.private.add("own/name")
    with pytest.raises(
        HubError,
        match=r"own/name is not on the hub, or you have no access: .* private models need a token in HF_T",
    ):
        hub.pull(parse("own/name"))
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(HubError, match="the token in HF_TOKEN gives no access to it"):
        hub.pull(parse("own/name"))
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert hub.pull(parse("own/name")).path.read_bytes() == DATA
    assert remote.tokens == [None]


def test_names_that_lead_out_are_never_offered(remote: FakeHub, tmp_path: Path) -> None:
    remote.add("own/name", **{"../../../evil.gguf": DATA, "/evil.gguf": DATA, "a\\..\\evil.gguf": DATA})
    with pytest.raises(HubError, match="has no GGUF file"):
        hub.pull(parse("own/name"))
    remote.add("own/name", **{"good.gguf": DATA})
    assert hub.pull(parse("own/name")).files == ("good.gguf",)
    assert not [name for name in all_files(tmp_path) if "evil" in name]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("own/missing", "own/missing is not on the hub, or you have no access"),
        ("own/gated", "own/gated is gated: ask for access"),
        ("own/name@nothing", "own/name has no revision 'nothing'"),
        ("own/name:x.gguf", "own/name has no file 'x.gguf': it has m-Q4_0.gguf, n-Q4_0.gguf"),
        ("own/name:Q8_0", "own/name has no file of quantisation Q8_0: it has"),
        ("own/name", "own/name has 2 models: choose one, as in own/name:m-Q4_0.gguf"),
        ("own/text", "own/text has no GGUF file"),
    ],
)
def test_what_the_hub_does_not_have(remote: FakeHub, tmp_path: Path, asked: str, message: str) -> None:
    remote.add("own/name", **{"m-Q4_0.gguf": DATA, "n-Q4_0.gguf": DATA})
    remote.add("own/text", **{"README.md": b""})
    remote.gated.add("own/gated")
    with pytest.raises(HubError, match=message) as caught:
        hub.pull(parse(asked))
    assert str(caught.value).isprintable()
    assert not (tmp_path / "cache").exists()


def test_a_hub_that_is_down_or_not_there(remote: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.add("own/name", **{"m.gguf": DATA})
    remote.down = True
    with pytest.raises(HubError, match="the hub answered 503 for own/name: try again later"):
        hub.pull(parse("own/name"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the port of discard, without a server
    with pytest.raises(HubError, match=r"hf:own/name cannot be downloaded .*: check the connection"):
        hub.pull(parse("own/name"))


@pytest.mark.parametrize("page", [b"<html>Log in</html>", b"[]", b"{}", b'{"id": 3}', b'"text"', b""])
def test_an_answer_that_describes_nothing(remote: FakeHub, page: bytes) -> None:
    remote.add("own/name", **{"m.gguf": DATA})
    remote.page = page
    with pytest.raises(HubError, match=r"the hub gave an invalid answer|which is not a commit") as caught:
        hub.pull(parse("own/name"))
    assert str(caught.value).isprintable()


def test_a_commit_that_is_none(remote: FakeHub) -> None:
    remote.add("own/name", **{"m.gguf": DATA})
    remote.commit = "../../../evil"
    with pytest.raises(HubError, match=r"is at '../../../evil', which is not a commit"):
        hub.pull(parse("own/name"))


def test_for_an_event_loop_the_engine_process_downloads(
    remote: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's own process would stand still meanwhile, and closing would wait for it."""
    remote.add("own/fable", **{"fable.gguf": model_path().read_bytes()})

    def here(*_: object) -> Path:
        raise AssertionError("the front looks for the file itself")

    monkeypatch.setattr(opening, "located", here)

    async def program() -> tuple[str, str]:
        async with AsyncLLM("hf:own/fable/fable.gguf", threads=1) as llm:
            return llm.info.path, (await llm.generate("Once upon a time", max_tokens=5, temperature=0)).text

    path, text = asyncio.run(program())
    assert Path(path).read_bytes() == model_path().read_bytes() and Path(path).is_relative_to(tmp_path)
    with LLM() as llm:
        assert llm.generate("Once upon a time", max_tokens=5, temperature=0).text == text
