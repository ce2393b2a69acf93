"""Descriptions of machines: presets, files, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hotcold.placement.hardware import find_hardware

PRESETS = ("rtx4090-i9", "rtx2080ti-i7", "rtx4090-laptop-i9", "rtx3090", "rtx3060", "rtx4060")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_say_what_they_are_and_are_files_of_the_same_kind(name: str, tmp_path: Path) -> None:
    hardware = find_hardware(name)
    assert hardware.name == name and "nothing was measured" in hardware.source
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(asdict(hardware)))
    assert find_hardware(str(path)) == hardware


def test_gathering_between_measured_lengths(tmp_path: Path) -> None:
    data = asdict(find_hardware("rtx3060")) | {"cpu_gather_gb_s": [[16384, 20], [1024, 10]]}
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(data))
    found = find_hardware(str(path))
    speeds = [found.gather_gb_s(n) for n in (100, 1024, 4096, 16384, 1 << 20)]
    assert speeds == pytest.approx([10, 10, 15, 20, 20])


def test_a_file_from_before_the_speed_of_prompts_was_measured(tmp_path: Path) -> None:
    data = asdict(find_hardware("rtx3060"))
    assert not find_hardware("rtx3060").knows_prompts
    for cpu, gpu in ((0, 0), (1.5, 0), (0, 1.5), (1.5, 1.5)):
        figures = {"cpu_prompt_gflops": cpu, "gpu_prompt_gflops": gpu}
        path = tmp_path / "machine.json"
        path.write_text(json.dumps({**data, **figures}))
        assert find_hardware(str(path)).knows_prompts == (cpu > 0 and gpu > 0)
    path.write_text(json.dumps({name: data[name] for name in data if "prompt" not in name}))
    assert find_hardware(str(path)) == find_hardware("rtx3060")


def test_without_a_gpu_its_figures_are_0(tmp_path: Path) -> None:
    data = asdict(find_hardware("rtx3060"))
    none = {name: 0 for name in data if name.startswith(("gpu", "link", "vram", "handshake"))}
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(data | none | {"machine": {"any": ["facts"]}}))
    found = find_hardware(str(path))
    assert found.vram_bytes == found.handshake_s == 0 and found.machine == {"any": ["facts"]}
    path.write_text(json.dumps(data | none | {"cpu_stream_gb_s": 0}))
    with pytest.raises(ValueError, match="cpu_stream_gb_s is 0: a number above 0"):
        find_hardware(str(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"handshake_s": 0}, "handshake_s is 0: a number above 0"), ({"vram_bytes": -1}, "vram_bytes is -1"),
        ({"gpu_rows_gb_s": "9"}, "gpu_rows_gb_s is '9'"), ({"gpu_rows_gb_s": True}, "gpu_rows_gb_s is True"),
        ({"gpu_rows_gb_s": [9]}, "gpu_rows_gb_s is"), ({"gpu_rows_gb_s": None}, "gpu_rows_gb_s is None"),
        ({"link_pinned_gb_s": float("nan")}, "link_pinned_gb_s is nan"), ({"name": 3}, "name is 3: text"),
        ({"cpu_gather_gb_s": 5}, "gather_gb_s is 5: a list of"), ({"speed": 1}, "with exactly name,"),
        ({"cpu_gather_gb_s": []}, "gather_gb_s is"), ({"cpu_gather_gb_s": [[1, 2], [3]]}, "list of pairs"),
        ({"machine": 3}, "machine is 3: an object"), ({"vram_bytes": 0}, "gpu_stream_gb_s is 270: 0,"),
        ({"vram_bytes": False}, "vram_bytes is False"), ({"vram_bytes": None}, "vram_bytes is None"),
        ({"spins": 1}, "spins is 1: true or false"), ({"step_s": -1}, "step_s is -1: a number of 0 or more"),
        ({"cpu_gather_gb_s": [[1, 0]]}, "list of pairs"), ({"cpu_gather_gb_s": [[1, [2]]]}, "list of pairs"),
        ({"kernels_gb_s": {"rows": 1}}, "numbers above 0 of matrix Q4_0, matrix F16"),
        ({"kernels_gb_s": {"rows F16": 0}}, "kernels_gb_s is"), ({"layers_s": []}, "layers_s is"),
        ({"layers_s": {"dense": 1}}, "of dense Q4_0, dense F16"),
        ({"cpu_prompt_gflops": -1}, "cpu_prompt_gflops is -1"), ({"gpu_prompt_gflops": "9"}, "of 0 or more"),
    ],
)  # fmt: skip
def test_a_description_that_makes_no_sense(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(asdict(find_hardware("rtx3060")) | change))
    with pytest.raises(ValueError, match=message):
        find_hardware(str(path))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100000, "3", "\xff"])
def test_what_is_no_description(text: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="presets: rtx4090-i9") as caught:
        find_hardware(str(path))
    assert "\n" not in str(caught.value)
