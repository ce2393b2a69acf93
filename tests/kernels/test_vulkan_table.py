"""Every op on a Vulkan device gives the bits that its numerics prescribe (tests/support/vulkan_model.py)."""

from __future__ import annotations

from typing import Any

import pytest
from support.mirrored_backend import MirroredBackend
from support.vulkan_devices import FULL
from support.vulkan_table import Case, cases, difference

CASES = [case for i, case in enumerate(cases()) if FULL or (case.quick and (case.op != "ffn" or i % 2))]
#: Half of the FFNs, and every fourth case on the second driver: benchmarks/gpu/op_table.py and
#: HOTCOLD_TEST_VULKAN=full take all of them.
SAMPLED = [
    pytest.param(each, marks=[pytest.mark.one_driver] if i % 4 else [], id=str(each))
    for i, each in enumerate(CASES)
]


@pytest.mark.parametrize("case", SAMPLED)
def test_every_bit(vulkan: Any, case: Case) -> None:
    assert not difference(case, case.run(MirroredBackend(vulkan)))[0]
