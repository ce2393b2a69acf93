"""How a command ends when it is interrupted, its reader is gone, the disk is full, or another writes too."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import golden_checkpoint

import hotcold
from hotcold.commands import cli, command_line
from hotcold.convert import conversion
from hotcold.demo import model_path
from hotcold.formats.gguf import open_gguf
from hotcold.quantize import quantization
from hotcold.runtime import loading
from hotcold.runtime.session import Session

CHECKPOINT = str(golden_checkpoint("tiny-drelu"))
#: A relative PYTHONPATH would not lead anywhere from another folder.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(hotcold.__file__).resolve().parents[1])}

VERBS = {
    "generate": ["-p", "Once upon a time", "-n", "6", "--seed", "1"],
    "info": [],
    "tokenize": ["-p", "Once upon a time"],
    "perplexity": ["-f", "text.txt", "-c", "40"],
    "bench": ["-p", "8", "-n", "4", "-r", "2"],
    "convert": [CHECKPOINT, "-o", "out.gguf", "--json"],
    "quantize": [str(model_path()), "out.gguf", "q4_0", "--allow-requantize"],
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text(
        "The goats had come down from the mountain, and Peter called them. " * 9
    )
    monkeypatch.chdir(tmp_path)


def left() -> list[str]:
    """Files that a command left here."""
    return sorted(set(os.listdir()) - {"text.txt"})


def interrupting(function: Callable[..., Any], call: int) -> Callable[..., Any]:
    """The same function, with a Ctrl-C in the middle of one call."""
    calls = 0

    def interrupted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            signal.raise_signal(signal.SIGINT)
        return function(*args, **options)

    return interrupted


@pytest.mark.parametrize(
    ("verb", "stage", "where"),
    [
        ("generate", "loading", (loading, "load_weights", 1)),
        ("generate", "the prompt", (Session, "run", 1)),
        ("generate", "generation", (Session, "run", 4)),
        ("perplexity", "loading", (loading, "load_weights", 1)),
        ("perplexity", "scoring", (Session, "run", 4)),
        ("bench", "loading", (loading, "load_weights", 1)),
        ("bench", "the first round", (Session, "run", 2)),
        ("bench", "a later round", (Session, "run", 8)),
        ("convert", "reading", (conversion, "open_checkpoint", 1)),
        ("convert", "the first tensor", (conversion, "quantise", 1)),
        ("convert", "a later tensor", (conversion, "quantise", 9)),
        ("quantize", "reading", (quantization, "open_gguf", 1)),
        ("quantize", "a tensor", (quantization, "quantise_rows", 20)),
        ("info", "reading", (command_line.importlib, "import_module", 1)),
        ("tokenize", "reading", (command_line.importlib, "import_module", 1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_ctrl_c_at_each_stage(
    verb: str, stage: str, where: tuple[Any, str, int],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    owner, name, call = where
    monkeypatch.setattr(owner, name, interrupting(getattr(owner, name), call))
    assert cli.main([verb, *VERBS[verb]]) == 130
    out, err = capsys.readouterr()
    if verb == "generate" and stage != "loading":
        assert out.startswith("Once upon a time") and out.endswith("\n")
        assert err.endswith(", interrupted\n") and err.count("\n") == 1
    else:
        assert (out, err) == ("", "hotcold: interrupted\n")
    assert left() == []


@pytest.fixture(params=["/dev/full", "closed pipe"])
def unwritable(request: pytest.FixtureRequest) -> Iterator[tuple[Any, int]]:
    """A stream that cannot be written to, and the exit code."""
    if request.param == "closed pipe":
        reading, target = os.pipe()
        os.close(reading)
    elif os.path.exists(request.param):
        target = request.param
    else:
        pytest.skip("needs /dev/full, which Linux has")
    with open(target, "w", encoding="utf-8") as stream:
        yield stream, 141 if request.param == "closed pipe" else 2


@pytest.mark.parametrize("verb", VERBS)
def test_output_that_nobody_takes(
    verb: str, unwritable: tuple[Any, int], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    stream, code = unwritable
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert cli.main([verb, *VERBS[verb]]) == code
    lines = capsys.readouterr().err.splitlines()
    if verb == "convert":
        lines = lines[1:]  # what it wrote: the file is there and whole, only the summary is lost
    assert lines == ([] if code == 141 else ["hotcold: error: No space left on device"])


def test_no_stream_takes_the_error(
    unwritable: tuple[Any, int], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    stream, _ = unwritable
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        assert cli.main(["info", "none.gguf"]) == 2


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed: str) -> None:
    command = f"exec '{sys.executable}' -m hotcold tokenize {closed}"
    done = subprocess.run(
        ["sh", "-c", command], input=b"ab", capture_output=True, env=ENVIRONMENT, check=False
    )
    note = b"note: standard input has no text: -p gives one\n" if closed == "<&-" else b""
    assert done.returncode == 0 and done.stderr == note
    assert done.stdout.count(b"\n") == {"<&-": 1, "2>&-": 2}.get(closed, 0), done.stdout


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files that end at 100 kB, as on a full disk: writes beyond fail."""
    resource = pytest.importorskip("resource", reason="this system has no limit on the size of files")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("exists", [False, True])
def test_a_disk_that_gets_full(
    exists: bool, small_files: None, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    if exists:
        Path("out.gguf").write_text("precious", encoding="utf-8")
    assert cli.main(["convert", CHECKPOINT, "-o", "out.gguf", "--type", "f32", "--force"]) == 2
    assert capsys.readouterr().err == "hotcold: error: out.gguf: cannot be written: File too large\n"
    assert left() == (["out.gguf"] if exists else [])
    assert not exists or Path("out.gguf").read_text(encoding="utf-8") == "precious"


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert cli.main(["convert", CHECKPOINT, "-o", "out.gguf"]) == 2
    err = capsys.readouterr().err
    assert "bytes, and 1000 are free" in err and err.count("\n") == 1 and left() == []


def test_two_writers_of_one_file() -> None:
    """The file is one of the two, complete, in any order; it is never incomplete."""
    types = ("q8_0", "f32")
    for type in types:
        assert cli.main(["convert", CHECKPOINT, "-o", f"{type}.gguf", "--type", type]) == 0
    alone = [Path(f"{type}.gguf").read_bytes() for type in types]
    line = ["convert", CHECKPOINT, "-o", "out.gguf", "--force", "--type"]
    program = f"""from hotcold.commands.cli import main
for type in TYPES * 3:
    assert main([*{line}, type]) == 0
"""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", program.replace("TYPES", repr(each))],
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
        )
        for each in (types, types[::-1])
    ]
    while any(writer.poll() is None for writer in writers):
        if os.path.exists("out.gguf"):
            with open_gguf(Path("out.gguf")) as file:  # refuses a file that is cut short
                assert file.tensors
    for writer in writers:
        _, err = writer.communicate()
        assert writer.returncode == 0, err
    assert Path("out.gguf").read_bytes() in alone
    assert left() == ["f32.gguf", "out.gguf", "q8_0.gguf"]
