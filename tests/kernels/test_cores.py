"""How many cores may be used, from made-up /proc and /sys trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hotcold.kernels.cores import available_cores, cache_bytes
from hotcold.kernels.cpu import CPUBackend


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def cores(root: Path, *siblings: str, cpus: range | set[int] | None = None) -> int:
    """A machine whose CPU i has the i-th list of siblings."""
    for cpu, text in enumerate(siblings):
        write(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", text)
    return available_cores(root, range(len(siblings)) if cpus is None else cpus)


def test_threads_of_a_core_count_once(tmp_path: Path) -> None:
    assert cores(tmp_path / "apart", "0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7") == 4
    assert cores(tmp_path / "beside", "0-1", "0-1", "2-3", "2-3") == 2
    assert cores(tmp_path / "hybrid", "0-1", "0-1", "2", "3") == 3
    assert cores(tmp_path / "single", "0", "1") == 2
    assert cores(tmp_path / "unknown", cpus=range(6)) == 6


def test_only_allowed_cpus_count(tmp_path: Path) -> None:
    pairs = ("0,4", "1,5", "2,6", "3,7") * 2
    assert cores(tmp_path, *pairs, cpus={0, 4}) == 1
    assert cores(tmp_path, *pairs, cpus={4, 5, 7}) == 3
    assert cores(tmp_path, *pairs, cpus=set()) == 1


@pytest.mark.parametrize("text", ["", "all", "7-9", "0-", "\0", "0;1"])
def test_a_list_that_makes_no_sense_counts_each_cpu(tmp_path: Path, text: str) -> None:
    assert cores(tmp_path, text, text, text) == 3


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        ("max 100000", "max 100000", 8), ("300000 100000", "max 100000", 3),
        ("max 100000", "150000 100000", 2), ("200000 100000", "500000 100000", 2),
        ("5000 100000", "max 100000", 1), ("900000 100000", "max", 8),
        ("400000", "400000 0", 8), ("many few", "-1 100000", 8), ("", "10000 10000", 1),
    ],
)  # fmt: skip
def test_version_2_takes_the_smallest_quota_on_the_way_up(
    tmp_path: Path, outer: str, inner: str, expected: int
) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/outer/inner")
    write(tmp_path / "sys/fs/cgroup/outer/cpu.max", outer)
    write(tmp_path / "sys/fs/cgroup/outer/inner/cpu.max", inner)
    assert available_cores(tmp_path, range(8)) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", 8), ("250000", 3), ("0", 8), ("none", 8)])
def test_version_1(tmp_path: Path, quota: str, expected: int) -> None:
    write(tmp_path / "proc/self/cgroup", "5:cpuset:/a\n4:cpu,cpuacct:/a/b\n0::/")
    for group in ("", "a", "a/b"):
        write(tmp_path / "sys/fs/cgroup/cpu" / group / "cpu.cfs_quota_us", "-1")
        write(tmp_path / "sys/fs/cgroup/cpu" / group / "cpu.cfs_period_us", "100000")
    write(tmp_path / "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", quota)
    assert available_cores(tmp_path, range(8)) == expected


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/docker/0123")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "200000 100000")
    assert available_cores(tmp_path, range(8)) == 2


def test_lines_and_paths_that_make_no_sense(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0\n\nx:y\n0::/../../outside\n:::")
    write(tmp_path / "outside/cpu.max", "100000 100000")
    (tmp_path / "sys/fs/cgroup/outside").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/outside/cpu.max").write_bytes(b"\xff\xfe 1")
    assert available_cores(tmp_path, range(8)) == 8


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinity")
def test_the_pool_follows_affinity() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert available_cores() == 1 == CPUBackend().threads
    finally:
        os.sched_setaffinity(0, before)
    assert 1 <= available_cores() <= len(before)


def test_caches_count_once_and_without_the_smaller_ones_beside_them(tmp_path: Path) -> None:
    """CPUs with caches of their own, of 64 and 512 KiB, and in pairs of 32 MiB."""
    for cpu in range(4):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cache"
        pair = f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}"
        for i, (size, users) in enumerate([("64K", cpu), ("512K", cpu), ("32768K", pair)]):
            write(folder / f"index{i}/size", size)
            write(folder / f"index{i}/shared_cpu_list", str(users))
    assert cache_bytes([0], tmp_path) == (512 << 10) + (32 << 20)
    assert cache_bytes([0, 1], tmp_path) == (2 * 512 << 10) + (32 << 20)
    assert cache_bytes(range(5), tmp_path) == (4 * 512 << 10) + (64 << 20)
    assert cache_bytes([0], tmp_path / "nothing") == 0
