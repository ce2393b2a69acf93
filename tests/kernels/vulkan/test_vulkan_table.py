"""Every op on a Vulkan device gives the bits that its numerics prescribe (tests/support/vulkan/model.py)."""

from __future__ import annotations

from typing import Any

import pytest
from support.mirrored_backend import MirroredBackend
from support.vulkan.devices import FULL
from support.vulkan.table import Case, cases, difference

CASES = [case for i, case in enumerate(cases()) if FULL or (case.quick and (case.op != "ffn" or i % 2))]
FIRST = {case.op: i for i, case in reversed([*enumerate(CASES)])}


def _everywhere(i: int, case: Case) -> bool:
    return i == FIRST[case.op] or (i % 12 == 8 if case.op == "ffn" else i % 4 == 0)


#: Half of the FFNs. And on the second driver each op and every fourth case; of FFNs, which take it ten
#: seconds each, every twelfth. benchmarks/gpu/op_table.py and HOTCOLD_TEST_VULKAN=full take all of them.
SAMPLED = [
    pytest.param(each, marks=[] if _everywhere(i, each) else [pytest.mark.one_driver], id=str(each))
    for i, each in enumerate(CASES)
]


@pytest.mark.parametrize("case", SAMPLED)
def test_every_bit(vulkan: Any, case: Case) -> None:
    assert not difference(case, case.run(MirroredBackend(vulkan)))[0]
