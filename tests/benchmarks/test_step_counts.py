"""Barriers and submits of a token only fall: the committed counts are the most that a model may take."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
from support.vulkan.devices import DRIVERS, device_index

pytestmark = pytest.mark.usefixtures("benchmarks")


@pytest.fixture(scope="module")
def step_counts() -> ModuleType:
    return importlib.import_module("gpu.step_counts")


def test_barriers_and_submits_only_fall(step_counts: ModuleType, repository: Path) -> None:
    """The first driver alone is asked: counts do not depend on the device."""
    committed = json.loads((repository / "benchmarks/gpu/step_counts.json").read_text(encoding="utf-8"))
    current = step_counts.table(str(device_index(DRIVERS[0])))
    assert current.keys() == committed.keys()
    more = {
        f"{kind}, {part}, {name}": (counts[part][name], most)
        for kind, counts in current.items()
        for part, limits in committed[kind].items()
        for name, most in limits.items()
        if name != "dispatches" and counts[part][name] > most
    }
    assert not more, f"more than step_counts.json allows: {more}"
    on_gpu = [counts for kind, counts in current.items() if "all on the GPU" in kind]
    assert {counts["rest"]["submits"] for counts in on_gpu} == {1}
    assert {counts["two layers"]["submits"] for counts in on_gpu} == {0}
