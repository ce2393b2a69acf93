"""``hotcold.doctor()``: what ``hotcold doctor`` does, from Python; from tiny buffers."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import hotcold
from hotcold.errors import UserError
from hotcold.kernels.cpu import CPUBackend
from hotcold.kernels.processor import fetching, set_fetching
from hotcold.placement import measuring
from hotcold.placement.disk_speed import DEPTHS, SIZES, DiskSpeed, Reads
from hotcold.placement.hardware import find_hardware
from hotcold.runtime import machine
from hotcold.tasks import doctor

READS = [Reads(nbytes, depth, False, 1.0) for nbytes in SIZES for depth in DEPTHS]
DISK = DiskSpeed("a disk", True, (Reads(SIZES[-1], 8, True, 1.0), *READS))


@pytest.fixture(autouse=True)
def backends_share_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of several counts read the same arrays, which opaque backends refuse."""
    monkeypatch.setattr(measuring, "open_backend", lambda name, threads: CPUBackend(threads))


def test_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "_SECONDS", 0.0)
    monkeypatch.setattr(doctor, "buffer_bytes", lambda caches, available: 1 << 20)
    reports: list[tuple[str, int, int]] = []
    first = hotcold.doctor(gpu="off", output=tmp_path / "a.json", progress=lambda *each: reports.append(each))
    assert {phase for phase, _, _ in reports} == {"measuring"} and reports[-1][1] == reports[-1][2]
    assert not first.from_cache and find_hardware(str(tmp_path / "a.json")) == first.hardware
    assert "GPU         not looked for (`gpu=off`)" in str(first)
    second = hotcold.doctor(gpu="off")
    assert second.from_cache and second.hardware == first.hardware
    assert f"figures from {second.cache}; `again` measures anew" in second.notes
    assert not hotcold.doctor(gpu="off", again=True).from_cache
    with pytest.raises(UserError, match="the file exists: give another name, or `force` to replace it"):
        hotcold.doctor(output=tmp_path / "a.json")


def test_models_use_the_prefetch_setting_that_doctor_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "_SECONDS", 0.0)
    monkeypatch.setattr(doctor, "buffer_bytes", lambda caches, available: 1 << 20)

    def measure_fetching(threads: int, nbytes: int, seconds: float) -> str:
        set_fetching("16K:2")
        return fetching()

    monkeypatch.setattr(doctor, "measure_fetching", measure_fetching)
    default = fetching()
    try:
        for measured in (False, True):  # whether the default was measured on such a processor
            for module in (doctor, machine):
                monkeypatch.setattr(module, "fetching_is_measured", lambda measured=measured: measured)
            diagnosis = hotcold.doctor(gpu="off", again=True)
            assert diagnosis.hardware is not None
            assert diagnosis.hardware.fetching == ("" if measured else "16K:2")
            assert ("prefetch    16K:2; measured" in str(diagnosis)) == (not measured)
            set_fetching(default)
            machine.use_measured_fetching.cache_clear()
            hotcold.LLM(gpu="off").close()
            assert fetching() == (default if measured else "16K:2")
            set_fetching(default)
    finally:
        set_fetching(default)
        machine.use_measured_fetching.cache_clear()


@pytest.mark.parametrize("folder", ["relative", "damaged", "of another machine"])
def test_models_load_without_usable_prefetch_figures(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative" if folder == "relative" else str(tmp_path))
    monkeypatch.setattr(machine, "fetching_is_measured", lambda: False)
    (tmp_path / "hotcold").mkdir()
    other = replace(find_hardware("rtx4060"), fetching="16K:2")
    text = "{" if folder == "damaged" else json.dumps(asdict(other))
    (tmp_path / "hotcold" / "hardware.json").write_text(text)
    default = fetching()
    machine.use_measured_fetching.cache_clear()
    try:
        hotcold.LLM(gpu="off").close()
        assert fetching() == default
    finally:
        set_fetching(default)
        machine.use_measured_fetching.cache_clear()


def test_settings_that_cannot_be_measured_leave_the_other_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(threads: int, nbytes: int, seconds: float) -> str:
        raise MemoryError("no memory")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "_SECONDS", 0.0)
    monkeypatch.setattr(doctor, "buffer_bytes", lambda caches, available: 1 << 20)
    monkeypatch.setattr(doctor, "fetching_is_measured", lambda: False)
    monkeypatch.setattr(doctor, "measure_fetching", fail)
    diagnosis = hotcold.doctor(gpu="off")
    assert diagnosis.hardware is not None and diagnosis.hardware.fetching == ""
    assert "prefetch settings were not measured: no memory" in diagnosis.notes


def test_doctor_measures_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "_SECONDS", 0.0)
    monkeypatch.setattr(doctor, "buffer_bytes", lambda caches, available: 1 << 20)
    monkeypatch.setattr(doctor, "measure_disk", lambda path, advance: DISK)
    (path := tmp_path / "model").touch()
    os.truncate(path, 16 << 20)
    found = hotcold.doctor(gpu="off", disk=path)
    assert found.report()["disk"]["direct"] is True and "one after another: 1.00 GB/s" in str(found)
    assert hotcold.doctor(gpu="off").report()["disk"] is None

    def fails(*given: object) -> DiskSpeed:
        raise UserError("model: the file cannot be read")

    monkeypatch.setattr(doctor, "measure_disk", fails)
    found = hotcold.doctor(gpu="off", disk=path)
    assert found.disk is None and found.hardware is not None
    assert "the disk was not measured: model: the file cannot be read" in found.notes


def test_a_disk_that_cannot_be_measured_leaves_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "small").write_bytes(b"short")
    for name, message in (("small", "small has 5 B"), ("missing", "No such file")):
        with pytest.raises(UserError, match=message):
            hotcold.doctor(gpu="off", disk=tmp_path / name, output=tmp_path / "figures.json")
    assert not (tmp_path / "figures.json").exists() and not (tmp_path / "cache").exists()
