"""The widened twin of the built-in model computes what that model does."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import hotcold

pytestmark = pytest.mark.usefixtures("benchmarks")

TEXT = "Once upon a time there was a hen who lived with an ant in a tent near the train. " * 8


@pytest.mark.full
def test_without_noise_the_twin_is_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are what the model says, though all matrices were turned, and rounded once more."""
    wide = importlib.import_module("lib.wide")
    monkeypatch.setattr(wide, "NOISE", 1e-6)
    monkeypatch.setattr(wide, "FEATURES", 1e-6)
    wide.write_wide(tmp_path / "wide.gguf", TEXT, times=2)
    texts = []
    for model in (None, tmp_path / "wide.gguf"):
        with hotcold.LLM(model, threads=1) as llm:
            texts.append(llm.generate("Once upon a time", max_tokens=8, temperature=0).ids)
            assert llm.session.model.config.dim == (256 if model is None else 512)
    assert texts[0] == texts[1]
