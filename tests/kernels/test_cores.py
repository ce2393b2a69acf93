"""How many cores may be used, from made-up /proc and /sys trees."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import hotcold.kernels.cores
from hotcold.kernels.cores import Cores, available_cores, cache_bytes, find_cores
from hotcold.kernels.cpu import CPUBackend


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


@pytest.fixture(autouse=True)
def linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up files are Linux's; elsewhere the real system would be asked beside them."""
    monkeypatch.setattr("platform.system", lambda: "Linux")


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
    for size in ("", "unknown\n", "-1K", "0K"):
        write(tmp_path / "sys/devices/system/cpu/cpu0/cache/index2/size", size)
        assert cache_bytes([0], tmp_path) == 512 << 10


def speeds(root: Path, name: str, *values: int | str) -> Path:
    """A machine whose CPU i has the i-th value in its file ``name``, each a core of its own."""
    for cpu, value in enumerate(values):
        write(root / f"sys/devices/system/cpu/cpu{cpu}" / name, str(value))
        write(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", str(cpu))
    return root


def test_intels_efficient_cores_get_no_thread(tmp_path: Path) -> None:
    """Two fast cores of two threads, and four slow ones; by their clocks they would all count."""
    siblings = ("0-1", "0-1", "2-3", "2-3", "4", "5", "6", "7")
    speeds(tmp_path, "cpufreq/cpuinfo_max_freq", *[5_000_000] * 4, *[3_900_000] * 4)
    write(tmp_path / "sys/devices/cpu_core/cpus", "0-3")
    write(tmp_path / "sys/devices/cpu_atom/cpus", "4-7")
    assert cores(tmp_path, *siblings) == 2
    assert find_cores(tmp_path, range(8)) == (range(8), 6, [0, 1, 2, 3], 2, None)
    assert available_cores(tmp_path, {1, 4, 5}) == 1  # of the allowed ones
    assert available_cores(tmp_path, {4, 5, 7}) == 3
    write(tmp_path / "sys/devices/cpu_atom/cpus", "")
    assert available_cores(tmp_path, range(8)) == 6


@pytest.mark.parametrize(
    ("values", "fast"),
    [
        ((1024, 1024, 1024, 1024), 4), ((446, 446, 1024, 1024), 2), ((530, 530, 530, 530, 1024, 1024), 2),
        ((325, 325, 325, 325, 820, 820, 820, 1024), 4), ((1024, 446, "", 1024), 4), ((0, 0), 2),
    ],
)  # fmt: skip
def test_arms_little_cores_get_no_thread(tmp_path: Path, values: tuple[int | str, ...], fast: int) -> None:
    assert available_cores(speeds(tmp_path, "cpu_capacity", *values), range(len(values))) == fast


def test_clocks_tell_where_nothing_else_does(tmp_path: Path) -> None:
    name = "cpufreq/cpuinfo_max_freq"
    assert available_cores(speeds(tmp_path / "slow", name, 4_000_000, 4_000_000, 1_800_000), range(3)) == 2
    assert available_cores(speeds(tmp_path / "zen5c", name, 5_100_000, 3_300_000, 3_300_000), range(3)) == 3
    both = speeds(tmp_path / "both", name, 2_000_000, 2_000_000, 2_000_000)
    assert available_cores(speeds(both, "cpu_capacity", 1024, 1024, 400), range(3)) == 2


def test_a_quota_counts_beside_fast_cores(tmp_path: Path) -> None:
    speeds(tmp_path, "cpu_capacity", 1024, 1024, 1024, 300)
    write(tmp_path / "proc/self/cgroup", "0::/")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "200000 100000")
    assert available_cores(tmp_path, range(4)) == 2


@pytest.mark.parametrize(("performance", "expected"), [(4, 4), (0, 10)])
def test_macos_names_its_performance_cores(
    performance: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr(hotcold.kernels.cores, "_sysctl", {"hw.perflevel0.physicalcpu": performance}.get)
    assert available_cores(tmp_path, range(10)) == expected


def affinities() -> dict[str, set[int]]:
    """The affinity of every thread of this process."""
    return {task: os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's list of threads")
@pytest.mark.parametrize(("threads", "bound"), [(None, True), (1, True), (3, False)])
def test_threads_stay_on_fast_cores_if_they_fit(
    threads: int | None, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The made-up machine has two fast cores and a slow one; all of them are this machine's first core."""
    before, own = affinities(), os.sched_getaffinity(0)
    first = {min(own)}
    made_up = Cores([*own, 1000], 3, first, 2, None)
    monkeypatch.setattr("hotcold.kernels.cpu.find_cores", lambda: made_up)
    backend = CPUBackend(threads)
    started = {task: cpus for task, cpus in affinities().items() if task not in before}
    assert len(started) == backend.threads - 1 == (threads or 2) - 1
    assert all(cpus == (first if bound else own) for cpus in started.values())
    assert os.sched_getaffinity(0) == own


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinity")
def test_where_affinity_is_refused_threads_start_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, cpus: set[int]) -> None:
        raise PermissionError

    own = os.sched_getaffinity(0)
    made_up = Cores([*own, 1000], 3, {min(own)}, 2, None)
    monkeypatch.setattr("hotcold.kernels.cpu.find_cores", lambda: made_up)
    monkeypatch.setattr("os.sched_setaffinity", refuse)
    assert CPUBackend(2).threads == 2
