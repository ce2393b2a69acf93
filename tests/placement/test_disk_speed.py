"""Measures the disk of a file, in the ways in which experts are read; errors say what failed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hotcold.errors import UserError
from hotcold.kernels import _native
from hotcold.placement import disk_speed
from hotcold.placement.disk_speed import DEPTHS, SIZES, measure_disk


@pytest.mark.parametrize("way", ["io_uring", "threads"])
def test_a_disk_is_measured(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the way in which experts are read: by io_uring with as many small reads at once as then."""
    if way == "io_uring" and _native.why_no_rings():
        pytest.skip("needs Linux with io_uring")
    monkeypatch.setenv("HOTCOLD_READS", way)
    monkeypatch.setattr(disk_speed, "_SECONDS", 0.0)
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(16 << 20)
    reports: list[tuple[int, int]] = []
    found = measure_disk(path, lambda *each: reports.append(each))
    more = {4 << 10: 64, 64 << 10: 64, 512 << 10: 24} if way == "io_uring" else {}
    kinds = {(n, d) for n in SIZES for d in DEPTHS} | {*more.items()}
    assert {(each.nbytes, each.depth) for each in found.reads if not each.sequential} == kinds
    count = 1 + len(kinds)
    assert len(found.reads) == count and all(each.gb_s > 0 for each in found.reads)
    assert reports[0] == (0, count) and reports[-1] == (count, count)
    assert found.sequential_gb_s == found.reads[0].gb_s
    assert "8 at once" in str(found) and ("64 at once" in str(found)) == (way == "io_uring")
    assert found.way == ("by 8 threads" if way == "threads" else "by io_uring") and found.way in str(found)
    rates = iter([*[(1e9, True)] * 5, (1e9, False), *[(1e9, True)] * (count - 6)])
    monkeypatch.setattr(_native, "probe_disk", lambda *probe, rings: next(rates))
    assert not measure_disk(path).direct  # one came through the system's cache
    path.write_bytes(b"short")
    with pytest.raises(UserError, match=r"large has 5 B: a file of 16\.00 MiB at least is needed"):
        measure_disk(path)


@pytest.mark.parametrize(
    ("nbytes", "depth", "needed"),
    [
        (4097, 1, "whole blocks"),
        (0, 1, "whole blocks"),
        (1 << 30, 1, "whole blocks"),
        (4096, 0, "1 to 64"),
        (4096, 65, "1 to 64"),
        (1 << 20, 1, "shorter"),
    ],
)
def test_a_probe_that_cannot_be(nbytes: int, depth: int, needed: str, tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(bytes(8192))
    with path.open("rb") as file, pytest.raises(ValueError, match=needed):
        _native.probe_disk(file.fileno(), nbytes, depth, 0.0, False)


def test_a_disk_that_fails_is_an_error(tmp_path: Path) -> None:
    """As a folder, which cannot be read."""
    if tmp_path.stat().st_size < 4096:
        pytest.skip("folders have no size in this file system")
    number = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(_native.DiskError, match="the file cannot be read"):
            _native.probe_disk(number, 4096, 2, 0.0, False)
    finally:
        os.close(number)
