"""The functions that make model files do what the commands do, and so does the perplexity of a text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.checkpoints import golden_checkpoint
from support.golden import DATA

import hotcold
from hotcold import LLM
from hotcold.commands import cli
from hotcold.demo import model_path

TEXT = "The goats had come down from the mountain, and Peter called them. " * 40


def test_a_checkpoint_is_converted_as_by_the_command(tmp_path: Path) -> None:
    checkpoint, files = golden_checkpoint("tiny-drelu"), [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    done = hotcold.convert_checkpoint(str(checkpoint), files[0], type="Q8_0", name="tiny")
    assert cli.main(["convert", str(checkpoint), str(files[1]), "--type", "Q8_0", "--name", "tiny"]) == 0
    assert files[0].read_bytes() == files[1].read_bytes() and done.nbytes == files[0].stat().st_size
    with pytest.raises(hotcold.UserError, match="Q9"):
        hotcold.convert_checkpoint(checkpoint, tmp_path / "c.gguf", type="Q9")


def test_a_file_is_quantised_as_by_the_command(tmp_path: Path) -> None:
    files, reports = [tmp_path / "a.gguf", tmp_path / "b.gguf"], []
    done = hotcold.quantize_file(
        str(model_path()),
        files[0],
        "q4_0",
        allow_requantize=True,
        progress=lambda done, total: reports.append((done, total)),
    )
    assert cli.main(["quantize", str(model_path()), str(files[1]), "q4_0", "--allow-requantize"]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    assert done.after < done.before and reports[-1][0] == reports[-1][1] > 0


def test_the_perplexity_of_a_text_is_that_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    options = ["-f", str(tmp_path / "text.txt"), "-c", "64", "--chunks", "2", "--json"]
    assert cli.main(["perplexity", *options]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    reports = []
    found = hotcold.perplexity(TEXT, context=64, chunks=2, progress=lambda *news: reports.append(news))
    assert (found.value, found.error) == (report["ppl"], report["ppl_se"])
    assert (found.tokens, found.windows) == (report["tokens"], report["chunks"])
    assert reports[-1] == ("windows", 2, 2)
    assert str(found).startswith(f"perplexity {report['ppl']:.4f} +- ")
    with LLM(context=64) as llm:
        assert hotcold.perplexity(tmp_path / "text.txt", llm, chunks=2) == found


def test_training_without_torch_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.startswith("hotcold.training")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(hotcold.UserError, match=r"torch.* needs pip install '\.\[train\]'"):
        hotcold.sparsify_checkpoint(DATA / "tiny-drelu", ["a"], tmp_path / "out", tokens=1)
