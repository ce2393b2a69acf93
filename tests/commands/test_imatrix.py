"""`hotcold imatrix`: what it prints, and mistakes of one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.expert_models import expert_golden

from hotcold.commands.cli import main
from hotcold.quantize.imatrix import read_imatrix

TEXT = "The goats had come down from the mountain, and Peter called them with his pipe. "


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 20)
    return path


def test_a_file_and_a_line(capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.gguf"
    args = ["imatrix", "-f", str(text), "-o", str(path), "-c", "64", "--chunks", "2", "--process-output"]
    assert main([*args, "--json"]) == 0
    captured = capsys.readouterr()
    line, report = captured.out.splitlines()
    assert captured.err == ""
    assert f"{path}: inputs of 37 matrices over 128 tokens (2 windows of 64), " in line
    parsed = json.loads(report)
    assert (parsed["matrices"], parsed["tokens"], parsed["chunks"], parsed["notes"]) == (37, 128, 2, [])
    found = read_imatrix(path)
    assert (found.datasets, found.chunks, found.chunk_size) == (("text.txt",), 2, 64)
    assert main(args) == 2
    assert "the file exists: give another name, or --force to replace it" in capsys.readouterr().err


def test_experts_that_no_token_chose(capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path) -> None:
    model, out = expert_golden("tiny-qwen3moe", tmp_path).path, tmp_path / "out.gguf"
    text.write_text("a", encoding="utf-8")
    assert main(["imatrix", str(model), "-f", str(text), "-o", str(out)]) == 0
    error = capsys.readouterr().err
    assert "matrices have experts that no token chose (blk." in error and "use more text" in error


def test_mistakes(capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    for args, message in (
        (["a.gguf", "-m", "b.gguf", "-f", str(text)], "two models, a.gguf and -m b.gguf: give one of them"),
        (["-f", str(text), "--chunks", "0"], "'0' is not a whole number from 1"),
        (["-f", str(tmp_path / "none.txt")], "No such file"),
        (["-f", str(text), "-c", "100000"], "this model allows 2 to"),
    ):
        assert main(["imatrix", *args, "-o", str(out)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and message in lines[0]
    assert not out.exists()
