"""Every command that writes: an existing file is kept without --force, and replaced as a whole with it."""

import os
from pathlib import Path

import pytest
from support.checkpoints import golden_checkpoint

from hotcold.commands import cli
from hotcold.commands.command_line import parser_of
from hotcold.demo import model_path
from hotcold.tasks import doctor

OLD = "precious"
TEXT = "The goats had come down from the mountain, and Peter called them. " * 5
QUANTIZE = ["quantize", "model.gguf", "out", "f16", "--allow-requantize"]
FIT = ["fit-predictor", "-f", "text", "-o", "out", "-c", "16"]

#: Short runs that write the file ``out``, and the first bytes of this file.
RUNS = {
    "doctor": (["doctor", "--gpu", "off", "-o", "out"], b"{"),
    "plan": (["plan", "--shape", "mistral-7b", "--vram-budget", "6", "-o", "out"], b"PWRI"),
    "profile": (["profile", "-f", "text", "-o", "out", "-c", "16"], b"GGUF"),
    "picture": (["profile", "-f", "text", "-o", "other", "-c", "16", "--picture", "out"], b"<svg"),
    "imatrix": (["imatrix", "-f", "text", "-o", "out", "-c", "16"], b"GGUF"),
    "fit-predictor": (FIT, b"GGUF"),
    "convert": (["convert", str(golden_checkpoint("tiny-drelu")), "-o", "out"], b"GGUF"),
    "quantize": (QUANTIZE, b"GGUF"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model and a text; doctor has its own cache and measures little."""
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    (tmp_path / "model.gguf").write_bytes(model_path().read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "_SECONDS", 0.0)
    monkeypatch.setattr(doctor, "buffer_bytes", lambda caches, available: 1 << 20)
    return tmp_path


def refused(line: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that a command ends with this line, before any work, and leaves no file."""
    before = {path: path.read_bytes() for path in Path.cwd().iterdir() if path.is_file()}
    assert cli.main(line) == 2, line
    assert capsys.readouterr() == ("", f"hotcold: error: {message}\n")
    assert {path: path.read_bytes() for path in Path.cwd().iterdir() if path.is_file()} == before


@pytest.mark.parametrize("name", RUNS)
def test_an_existing_file_is_replaced_only_with_force(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    line, begin = RUNS[name]
    out = Path("out")
    out.write_text(OLD, encoding="utf-8")
    refused(line, "out: the file exists: give another name, or --force to replace it", capsys)
    assert cli.main([*line, "--force"]) == 0
    assert out.read_bytes().startswith(begin)
    assert not list(Path.cwd().glob(".*.partial"))


@pytest.mark.parametrize("name", [*RUNS, "timeline"])
def test_force_replaces_files_only(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["bench", "--timeline", "out", "--force"] if name == "timeline" else [*RUNS[name][0], "--force"]
    Path("out").mkdir()
    refused(line, "out: is a directory: a regular file is needed", capsys)
    Path("out").rmdir()
    os.mkfifo("out")
    refused(line, "out: is a FIFO: a regular file is needed", capsys)


@pytest.mark.parametrize(
    "line",
    [
        "profile -f text -o text", "profile -m model.gguf -f text -o model.gguf",
        "profile -f text -o other --picture text", "imatrix model.gguf -f text -o model.gguf",
        "fit-predictor -f text -o text", "fit-predictor -f text --held-out model.gguf -o model.gguf",
        "fit-predictor --measure model.gguf -f text -o model.gguf", "plan -m model.gguf -o ./model.gguf",
        "bench model.gguf --timeline model.gguf", "quantize model.gguf ./model.gguf copy",
        "doctor --disk model.gguf -o model.gguf", "plan --vram-budget 1 --hardware text -o text",
    ],
)  # fmt: skip
def test_a_file_that_is_read_is_never_replaced(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = next(name for name in reversed(line.split()) if Path(name).exists())
    why = "the new file would replace the one that is read: give another name"
    refused([*line.split(), "--force"], f"{Path(name)}: {why}", capsys)


def test_two_outputs_of_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["profile", "-f", "text", "-o", "out", "--picture", "./out"]
    refused(line, "out: two outputs have this name: give two names", capsys)
    line = ["convert", "model.gguf", "first", "-o", "second", "--take-predictors", "second"]
    refused(line, "second: two outputs have this name: give two names", capsys)


def test_a_timeline_is_kept_without_force(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").write_text(OLD, encoding="utf-8")
    line = ["bench", "--timeline", "out"]
    refused(line, "out: the file exists: give another name, or --force to replace it", capsys)
    needed = "--timeline shows a GPU and the CPU: it needs --gpu, --placement or --vram-budget"
    assert cli.main([*line, "--gpu", "off", "--force"]) == 2
    assert needed in capsys.readouterr().err and Path("out").read_text(encoding="utf-8") == OLD


def test_every_command_that_names_outputs_has_force() -> None:
    parsers = {verb: parser_of(verb) for verb, _ in cli.VERBS}
    writing = {verb for verb, parser in parsers.items() if parser.get_default("outputs")}
    assert writing == {line[0] for line, _ in RUNS.values()} | {"bench"}
    assert {verb for verb, parser in parsers.items() if "--force" in parser.names} == writing | {"sparsify"}
