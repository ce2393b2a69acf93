"""`hotcold convert IN.gguf OUT.gguf`: what it prints, what a change of blocks costs, mistakes of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import golden_checkpoint
from support.golden import DATA, golden

from hotcold.commands.cli import main
from hotcold.demo import model_path
from hotcold.formats.gguf import open_gguf

TEXT = "The goats had come down from the mountain, and Peter called them with his pipe. "


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 12)
    return path


def converted(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[dict[str, Any], str]:
    assert main(["convert", *args, "--json"]) == 0
    captured = capsys.readouterr()
    parsed: dict[str, Any] = json.loads(captured.out.splitlines()[-1])
    return parsed, captured.out + captured.err


def test_what_a_change_of_blocks_costs(
    capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path
) -> None:
    """Fewer bits, more divergence; without blocks there is nearly none."""
    out, demo = tmp_path / "out.gguf", str(model_path())
    costs = {}
    for type in ("f32", "q8_0", "q4_0"):
        args = ("--down", "by_output", "--type", type, "--force", "-f", str(text))
        report, printed = converted(capsys, demo, str(out), *args)
        assert (report["format"], report["down_layout"]) == ("gguf", "by_output")
        assert report["requantised"] == (0 if type == "f32" else 6)
        assert report["notes"] == [] and f"{out}: gguf, " in printed
        assert f"KL divergence mean {report['cost']['kl_mean']:.3g}, " in printed
        costs[type] = report["cost"]["kl_mean"]
    # Float blocks hold the same values: what is left is other roundings of sums, which move int8 codes.
    assert max(0, costs["f32"]) < costs["q4_0"] / 5 and max(0, costs["q8_0"]) < costs["q4_0"] / 3


def test_blocks_made_anew_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report, printed = converted(
        capsys, str(model_path()), "-o", str(tmp_path / "a.gguf"), "--down", "by_output"
    )
    assert report["cost"] is None and report["requantised"] == 6
    assert "note: 6 down matrices were quantised again: -f TEXT measures" in printed


def test_predictors_in_and_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, beside = golden("tiny-drelu", tmp_path, type="F16").path, tmp_path / "b.predictor.gguf"
    text = str(DATA / "heidi.txt")
    fit = ["fit-predictor", "-m", str(model), "-f", text, "--tokens", "512", "--max-share", "1", "-o"]
    assert main([*fit, str(tmp_path / "p.gguf")]) == 0
    capsys.readouterr()
    report, _ = converted(
        capsys, str(model), str(tmp_path / "a.gguf"), "--predictors", str(tmp_path / "p.gguf")
    )
    assert report["format"] == "powerinfer"
    args = [str(tmp_path / "a.gguf"), str(tmp_path / "b.gguf"), "--take-predictors", str(beside)]
    report, printed = converted(capsys, *args)
    assert report["format"] == "gguf" and f"{beside} has the predictors" in printed
    score = ["perplexity", "-f", text, "--chunks", "1", "--sparsity", "predicted", "--json", "-m"]
    found = []
    for name in ("a", "b"):  # inside the file, and beside it
        assert main([*score, str(tmp_path / f"{name}.gguf")]) == 0
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1])["ppl"])
    assert found[0] == found[1]


def test_mistakes(capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path) -> None:
    model, folder, out = str(model_path()), str(golden_checkpoint("tiny-drelu")), str(tmp_path / "out.gguf")
    for args, message in (
        ([model], "a GGUF file needs an output: hotcold convert IN.gguf OUT.gguf"),
        ([model, out, "-o", out], "two outputs"),
        ([model, out, "--dense"], "--dense is only for a checkpoint folder"),
        ([model, out, "--name", "x"], "--name is only for a checkpoint folder"),
        ([folder, out, "--format", "gguf"], "--format is only for a GGUF file"),
        ([folder, out, "-f", str(text)], "-f is only for a GGUF file"),
        ([model, out, "--format", "powerinfer"], "give --predictors"),
        ([str(text), out], "GGUF or PWRI is needed"),
        ([model, out, "--down", "by_output", "--type", "q9"], "--type: "),
        ([model, out, "--down", "by_output", "-f", str(tmp_path / "none")], "No such file"),
    ):
        assert main(["convert", *args]) == 2, args
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and message in lines[0], (args, lines)
        assert not Path(out).exists()
    Path(out).write_text("mine", encoding="utf-8")
    assert main(["convert", model, out]) == 2
    assert "the file exists" in capsys.readouterr().err and Path(out).read_text(encoding="utf-8") == "mine"
    assert main(["convert", model, out, "--force"]) == 0
    with open_gguf(out) as file:
        assert len(file.tensors) > 50
