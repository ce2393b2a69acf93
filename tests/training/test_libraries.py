"""The extra `[train]`: without its libraries, training is refused in one line that says how to get them."""

import importlib
import sys

import pytest

from hotcold.errors import UserError

NAME = "hotcold.training.libraries"
FIX = r"pip install 'hotcold\[train\]'"


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    with pytest.raises(UserError, match=f"torch.*{FIX}"):
        importlib.import_module(NAME)
    assert NAME not in sys.modules


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="training needs torch")
    libraries = importlib.import_module(NAME)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=f"transformers.*{FIX}"):
        libraries.transformers()
