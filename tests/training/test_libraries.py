"""The extra `[train]`: without its libraries, training is refused in one line that says how to get them."""

import importlib
import sys
from pathlib import Path

import pytest

from hotcold.commands import cli
from hotcold.errors import UserError

NAME = "hotcold.training.libraries"
FIX = r"pip install '\.\[train\]'"


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    with pytest.raises(UserError, match=f"torch.*{FIX}"):
        importlib.import_module(NAME)
    assert NAME not in sys.modules


def test_the_command_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so before the model is loaded or a folder is made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.setattr("hotcold.tasks.fitting.opened", lambda *args, **more: pytest.fail("it was loaded"))
    Path("text.txt").write_text("Once upon a time there was a hen. " * 40, encoding="utf-8")
    assert cli.main("fit-predictor --method train -f text.txt -o new.gguf".split()) == 2  # noqa: SIM905
    error = capsys.readouterr().err
    assert "torch" in error and "pip install '.[train]'" in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="training needs torch")
    libraries = importlib.import_module(NAME)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=f"transformers.*{FIX}"):
        libraries.transformers()
