"""Where weights lie on machines of several memory nodes: from made-up trees of /sys, and from the system."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotcold.kernels import _native
from hotcold.kernels.memory_nodes import memory_nodes


def machine(root: Path, has_memory: str, *cpus: str) -> Path:
    """Its node i has the i-th list of CPUs."""
    folder = root / "sys/devices/system/node"
    for node, text in enumerate(cpus):
        (folder / f"node{node}").mkdir(parents=True)
        (folder / f"node{node}/cpulist").write_text(text + "\n")
    (folder / "has_memory").write_text(has_memory + "\n")
    return root


def test_nodes_with_memory_and_cpus_of_ours_are_used(tmp_path: Path) -> None:
    two = machine(tmp_path / "two", "0-1", "0-7,16-23", "8-15,24-31")
    assert memory_nodes(two, range(32)) == (0, 1)
    assert memory_nodes(two, {7, 24}) == (0, 1)
    assert memory_nodes(two, range(8)) == ()  # bound to one node: what it had
    more = machine(tmp_path / "more", "0,2-3,11", "0-3", "4-7", "8-11", "", *[""] * 7, "12-15")
    assert memory_nodes(more, range(16)) == (0, 2, 11)  # 1 has no memory, 3 no processor
    assert memory_nodes(more, set()) == ()


def test_one_node_and_an_unknown_machine_are_left_alone(tmp_path: Path) -> None:
    assert memory_nodes(machine(tmp_path, "0", "0-3"), range(4)) == ()
    assert memory_nodes(tmp_path / "none", range(4)) == ()
    odd = machine(tmp_path / "odd", "x-1,0y, ,1", "0", "1")
    assert memory_nodes(odd, range(2)) == ()


def policy_of(address: int) -> str:
    """Returns the system's facts about the mapping of an address."""
    try:
        lines = Path("/proc/self/numa_maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        pytest.skip("this system does not tell where memory lies")
    starts = [(int(line.split()[0], 16), line.split()[1]) for line in lines]
    return max(start for start in starts if start[0] <= address)[1]


def test_memory_is_spread_over_the_nodes_given() -> None:
    """One node here is enough: the policy is there, and the memory is as good as any."""
    plain, spread = _native.Arena().take(5 << 20), _native.Arena([0]).take(5 << 20)
    if policy_of(plain.address) != "default":
        pytest.skip("this process was given a policy, which holds")
    if policy_of(spread.address) == "default":
        pytest.skip("this system does not let a process choose")
    assert policy_of(spread.address) == policy_of(spread.address + (5 << 20) - 1) == "interleave:0"
    values = np.arange(5 << 18, dtype=np.float32).reshape(1024, -1)
    rows = _native.WeightRows(spread, 0, 5 << 10, 1024, 5 << 8, 0)
    rows.pack(values.view(np.uint8).reshape(1024, -1), _native.Pool(2))
    assert bytes(rows.packed()) == values.tobytes()


def test_nodes_that_are_not_there_change_nothing() -> None:
    memory = _native.Arena([1000]).take(1 << 20)
    assert policy_of(memory.address) in ("default", policy_of(_native.Arena().take(1).address))
