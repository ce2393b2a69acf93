"""Free memory is what the kernel and cgroups leave, from made-up /proc and /sys/fs/cgroup trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotcold.errors import UserError
from hotcold.runtime import memory
from hotcold.runtime.memory import available_memory, check_budget, machine_memory

GIB = 2**30


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroup.mkdir()
    (proc / "meminfo").write_text("MemTotal:       32 kB\nMemAvailable:   8388608 kB\nSwapFree: 1 kB\n")
    return proc, cgroup


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_without_cgroups_it_is_what_the_kernel_says(trees: tuple[Path, Path]) -> None:
    assert available_memory(*trees) == 8 * GIB


def test_nothing_known(tmp_path: Path) -> None:
    assert available_memory(tmp_path / "none", tmp_path / "none") is None


def test_version_2_takes_the_tightest_group_on_the_way_up(trees: tuple[Path, Path]) -> None:
    proc, cgroup = trees
    (proc / "self" / "cgroup").write_text("0::/outer/inner\n")
    write(cgroup / "outer", memory__max=str(4 * GIB), memory__current=str(GIB))
    write(cgroup / "outer" / "inner", memory__max="max", memory__current="5")
    assert available_memory(proc, cgroup) == 3 * GIB
    write(cgroup / "outer" / "inner", memory__max=str(2 * GIB), memory__current=str(GIB // 2))
    assert available_memory(proc, cgroup) == GIB * 3 // 2


def test_file_cache_can_be_reclaimed(trees: tuple[Path, Path]) -> None:
    proc, cgroup = trees
    (proc / "self" / "cgroup").write_text("0::/\n")
    stat = f"anon 7\nactive_file 9\ninactive_file {GIB}\n"
    write(cgroup, memory__max=str(4 * GIB), memory__current=str(3 * GIB), memory__stat=stat)
    assert available_memory(proc, cgroup) == 2 * GIB


def test_version_1(trees: tuple[Path, Path]) -> None:
    proc, cgroup = trees
    (proc / "self" / "cgroup").write_text("5:cpu,cpuacct:/a\n4:memory:/a\n")
    write(cgroup / "memory", memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes="10")
    assert available_memory(proc, cgroup) == 8 * GIB
    write(cgroup / "memory" / "a", memory__limit_in_bytes=str(GIB), memory__usage_in_bytes=str(GIB // 4))
    assert available_memory(proc, cgroup) == GIB * 3 // 4


def test_a_group_over_its_limit_leaves_nothing(trees: tuple[Path, Path]) -> None:
    proc, cgroup = trees
    (proc / "self" / "cgroup").write_text("0::/\n")
    write(cgroup, memory__max=str(GIB), memory__current=str(2 * GIB))
    assert available_memory(proc, cgroup) == 0


def test_a_path_cannot_leave_the_cgroup_tree(trees: tuple[Path, Path]) -> None:
    proc, cgroup = trees
    (proc / "self" / "cgroup").write_text("0::/../../outside\n")
    write(cgroup.parent.parent / "outside", memory__max="1", memory__current="1")
    assert available_memory(proc, cgroup) == 8 * GIB


def test_memory_of_the_machine(trees: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, used or not, and what the tightest group allows; budgets up to that are allowed."""
    proc, cgroup = trees
    (proc / "meminfo").write_text(f"MemTotal: {GIB // 128} kB\nMemAvailable: 5 kB\n")
    assert machine_memory(*trees) == 8 * GIB
    (proc / "self" / "cgroup").write_text("0::/outer\n")
    write(cgroup / "outer", memory__max=str(4 * GIB), memory__current=str(3 * GIB))
    assert machine_memory(*trees) == 4 * GIB
    assert machine_memory(proc / "none", cgroup / "none") is None
    for most, budget in ((4 * GIB, 4 * GIB), (None, 1 << 60)):
        monkeypatch.setattr(memory, "machine_memory", lambda most=most: most)
        check_budget(budget)
    for budget in (0, -1):
        with pytest.raises(UserError, match=f"`ram_budget` is {budget}B: a size above 0"):
            check_budget(budget)
