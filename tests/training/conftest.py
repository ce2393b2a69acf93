"""Shared settings of the training tests: torch runs on one thread and keeps its settings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def torch_on_one_thread() -> Iterator[None]:
    torch = sys.modules.get("torch")  # a module of tests that need it has imported it
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.fixture
def module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of loaded folders go into the test's folder."""
    transformers = pytest.importorskip("transformers", reason="training needs transformers")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
