"""hotcold pull, list and remove, and -m hf:..., against a hub on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_hub import COMMITS, FakeHub, fake_hub

from hotcold.commands import cli
from hotcold.demo import model_path

MODEL = "hf:own/fable/fable.gguf"


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOTCOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with fake_hub() as made:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        made.add("own/fable", **{"fable.gguf": model_path().read_bytes()})
        yield made


def report(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    assert cli.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_pull_list_remove(remote: FakeHub, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    size = model_path().stat().st_size
    pulled = report(["pull", "own/fable"], capsys)
    path = Path(pulled["path"])
    assert path.read_bytes() == model_path().read_bytes() and path.is_relative_to(tmp_path / "cache")
    assert pulled == {
        "model": MODEL,
        "path": str(path),
        "commit": COMMITS[0],
        "files": ["fable.gguf"],
        "bytes": size,
        "downloaded_bytes": size,
    }
    assert cli.main(["pull", "own/fable:fable.gguf"]) == 0
    assert capsys.readouterr().out == f"{MODEL} at {COMMITS[0][:12]}: 7.54 MiB\n{path}\n"
    assert cli.main(["list"]) == 0
    assert capsys.readouterr().out.split() == ["7.54", "MiB", COMMITS[0][:12], MODEL, "(main)"]
    (listed,) = report(["list"], capsys)["models"]
    assert (listed["model"], listed["bytes"], listed["refs"]) == (MODEL, size, ["main"])
    assert report(["list", "own/fable"], capsys)["models"] == [listed]
    assert cli.main(["list", "own/other"]) == 0
    assert capsys.readouterr().out == f"no models of own/other in {tmp_path / 'cache'}\n"
    assert cli.main(["remove", MODEL]) == 0
    assert capsys.readouterr().out == f"removed {MODEL} at {COMMITS[0][:12]}, 7.54 MiB\n"
    assert not path.exists() and cli.main(["list"]) == 0
    assert capsys.readouterr().out == f"no models in {tmp_path / 'cache'}\n"


def test_what_is_left_of_a_download_is_listed_and_removed(
    remote: FakeHub, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    blobs = tmp_path / "cache" / "models--own--fable" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "aa.incomplete").write_bytes(bytes(2048))
    assert cli.main(["list"]) == 0
    assert "2.00 KiB" in (out := capsys.readouterr().out) and "own/fable: unfinished" in out
    assert report(["remove", "own/fable"], capsys) == {"removed": [""], "bytes": 2048}
    assert not blobs.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "-n", "2", "--temp", "0", "-p", "Once", "-m"],
        ["tokenize", "-p", "Once upon", "-m"],
        ["info"],
        ["plan", "-m"],
        ["bench", "-p", "4", "-n", "2", "-r", "1", "-m"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_wherever_a_model_is_given(
    arguments: list[str], remote: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    """Downloaded the first time, and then without the network the same as the file itself."""
    first = report([*arguments, MODEL], capsys)
    remote.down = True
    before = remote.requests
    again = report([*arguments, MODEL], capsys)
    assert remote.requests == before
    assert first.keys() == again.keys() == report([*arguments, str(model_path())], capsys).keys()
    for name in ("text", "ids", "fingerprint", "gpu_bytes"):
        assert first.get(name) == again.get(name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pull own/missing", "own/missing is not on the hub"),
        ("pull own/fable:Q4_0", "own/fable has no file of quantisation Q4_0: it has fable.gguf"),
        ("pull own", "argument REPO[:FILE]: 'own' is not the name of a model on the hub"),
        ("pull own/fable:../x.gguf", "argument REPO[:FILE]: file '../x.gguf'"),
        ("remove own/fable", "hf:own/fable is not in the cache"),
        ("generate -m hf:own", "argument -m/--model: 'hf:own' is not the name of a model on the hub"),
        ("generate -m hf:own/fable/x.gguf", "own/fable has no file 'x.gguf'"),
        ("info hf:own/other", "own/other is not on the hub"),
        ("tokenize -p a -m hf:own/fable@nothing", "own/fable has no revision 'nothing'"),
    ],
)
def test_mistakes_are_one_line(
    line: str, message: str, remote: FakeHub, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(line.split(" ")) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("hotcold: error: ") and err.count("\n") == 1 and message in err, err
    assert not (tmp_path / "cache").exists()
