"""Cards differ from software drivers: memory types, two queues, memory that is not zero, lost devices, and
drivers that give more memory than they have. A layer makes lavapipe behave like one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.golden import golden
from support.vulkan import cards
from support.vulkan.devices import absent, device_index, need
from support.vulkan.frozen import problem

from hotcold.kernels import vulkan
from hotcold.kernels.gpus import find_gpus


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("the loader")
    device_index("lavapipe")
    return cards.build(tmp_path_factory.mktemp("layer"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(golden("tiny-drelu", tmp_path_factory.mktemp("model"), type="Q4_0").path)


@pytest.mark.parametrize("types", [1, 2])
def test_a_model_on_a_card(layer: Path, model: str, types: int) -> None:
    """The card's own memory cannot be mapped, the family of queues is the second one, and nothing is zero."""
    found = cards.run(layer, "model", model, TYPES=types, QUEUES=1, DIRTY=1)
    assert found["tokens"] == found["expected"]


@pytest.mark.parametrize(("wanted", "family"), [("", 1), ("compute", 1), ("graphics", 0)])
def test_the_kind_of_queue_can_be_chosen(
    layer: Path, wanted: str, family: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTCOLD_VULKAN_QUEUE", wanted)
    assert cards.run(layer, "scratch", TYPES=1, QUEUES=1)["family"] == family


def test_another_kind_of_queue_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device_index("lavapipe")
    monkeypatch.setenv("HOTCOLD_VULKAN_QUEUE", "copy")
    found, why = find_gpus()
    assert found == [] and "HOTCOLD_VULKAN_QUEUE is 'copy': choose compute or graphics" in why


@pytest.fixture(scope="module")
def table(layer: Path) -> dict[str, Any]:
    return cards.run(layer, "table", TYPES=1, DIRTY=1)


def test_ops_read_no_unwritten_memory(table: dict[str, Any]) -> None:
    assert table["wrong"] == {} and table["ops"] > 15


def test_shaders_are_valid_with_the_constants_of_pipelines(table: dict[str, Any], tmp_path: Path) -> None:
    for tool in ("spirv-opt", "spirv-val"):
        if not shutil.which(tool):
            absent(f"no {tool}: install spirv-tools")
    folder = Path(vulkan.__path__[0]) / "spirv"
    made = {(shader, tuple(constants)) for shader, constants in table["made"]}
    assert len(made) > 30
    problems = [problem(folder / f"{shader}.spv", constants, tmp_path) for shader, constants in sorted(made)]
    assert [each for each in problems if each] == []
    assert "must be at least 1" in problem(folder / "gemv.spv", (2, 0), tmp_path)  # an array without elements


def test_scratch_that_is_read_before_it_was_written_shows(layer: Path) -> None:
    """A planted fault, which a software driver's zeros hide."""
    assert cards.run(layer, "scratch", TYPES=1)["sum"] == 64
    assert cards.run(layer, "scratch", TYPES=1, DIRTY=1)["sum"] != 64


@pytest.mark.parametrize("hot", ["0.5", "1.0"])
@pytest.mark.parametrize("at", [1, 30, 60])
def test_a_lost_card_is_an_error(
    layer: Path, model: str, hot: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drivers return success for it: no wrong token may follow."""
    monkeypatch.setenv("HOT", hot)
    found = cards.run(layer, "lost", model, LOST=at)
    assert found["error"] and "VK_ERROR_DEVICE_LOST" in found["error"] and "\n" not in found["error"]


def test_loading_shrinks_where_a_driver_gives_more_than_it_has(
    layer: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VRAM_BUDGET", str(12 << 20))
    right = cards.run(layer, "budget", model, TYPES=1)
    assert right["allocated"] <= 12 << 20 and not any("processor's memory" in note for note in right["notes"])
    has = right["allocated"] * 3 // 4
    found = cards.run(layer, "budget", model, TYPES=1, BUDGET=has)
    assert found["allocated"] <= has, found["notes"]
    assert any("processor's memory" in note and "vram_budget=" in note for note in found["notes"])
