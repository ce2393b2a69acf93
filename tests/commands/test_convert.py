"""``hotcold convert``: the file it names, its summary, its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.checkpoints import golden_checkpoint

from hotcold.commands import cli
from hotcold.formats.gguf import open_gguf


def test_the_summary_is_the_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.gguf"
    options = ["--type", "q4_0", "--down", "by_neuron", "--name", "Tiny", "--license", "mit", "--json"]
    assert cli.main(["convert", str(golden_checkpoint("tiny-drelu")), "-o", str(output), *options]) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out.splitlines()[-1])
    seconds = summary.pop("seconds")
    assert seconds >= 0
    assert summary == {
        "output": str(output),
        "bytes": output.stat().st_size,
        "architecture": "bamboo",
        "activation": "drelu",
        "down_layout": "by_neuron",
        "type": "q4_0",
        "tensor_types": {"Q4_0": 22, "F32": 7, "Q8_0": 1},
        "notes": ["output.weight is Q8_0, since errors in the head change every token"],
    }
    assert "note: output.weight is Q8_0" in err and str(output) in err
    assert open_gguf(output).metadata["general.license"] == "mit"


def test_without_json_stdout_stays_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", str(golden_checkpoint("tiny-llama")), "-o", str(tmp_path / "out.gguf")]) == 0
    assert capsys.readouterr().out == ""


def test_the_default_output_is_named_after_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["convert", str(golden_checkpoint("tiny-llama"))]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama-f16.gguf"]
    assert open_gguf(tmp_path / "tiny-llama-f16.gguf").metadata["general.name"] == "tiny-llama"
