"""Every fuzz target on its seeds and a few mutants of them; fuzz/run.py runs for a given time."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TARGETS = sorted(path.stem for path in (ROOT / "fuzz").glob("*.py") if "\ndef one_input(" in path.read_text())


@pytest.mark.parametrize("name", TARGETS)
def test_a_target(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises what is wrong; some of the inputs must have been accepted, or nothing was tested."""
    monkeypatch.syspath_prepend(ROOT / "fuzz")
    target = importlib.import_module(name)
    seeds = [path.read_bytes() for path in sorted((ROOT / "tests" / "corpus" / target.CORPUS).iterdir())]
    mutants = importlib.import_module("mutation").mutants(seeds)
    accepted = [target.one_input(data) for data in (*seeds, *itertools.islice(mutants, 500))]
    assert sum(accepted) > 20


def test_there_are_targets() -> None:
    assert "gguf_reader" in TARGETS
