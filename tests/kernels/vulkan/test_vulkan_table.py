"""Every op on a Vulkan device gives the bits that its numerics prescribe (tests/support/vulkan/model.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.mirrored_backend import MirroredBackend
from support.vulkan.devices import FULL
from support.vulkan.table import Case, cases, expected, wrong

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
    assert not wrong(case, case.run(MirroredBackend(vulkan)), exact=vulkan.exact)


def test_a_device_that_divides_less_exactly_has_a_tolerance() -> None:
    """It is for floats alone, and no more than a hundred thousandth of a row."""
    case = next(each for each in CASES if each.op == "norm")
    right = expected(case)
    near = [array * np.float32(1 + 2e-6) for array in right]
    far = [array * np.float32(1 + 1e-4) for array in right]
    assert wrong(case, near, exact=True) and not wrong(case, near, exact=False)
    assert wrong(case, far, exact=False) and not wrong(case, right, exact=True)
    ids = next(each for each in CASES if each.op == "top_k")
    assert wrong(ids, [expected(ids)[0] + 1, *expected(ids)[1:]], exact=False)
