"""The backend with hidden buffers: no code that runs on it looks into one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.op_truth import plain_batch
from support.opaque_backend import OpaqueBackend

from hotcold.kernels import open_backend
from hotcold.kernels.backend import Backend, Norm
from hotcold.kernels.reference import ReferenceBackend

PEEKS: list[Callable[[Any], object]] = [
    np.asarray, np.sum, len, list, bool, memoryview, lambda b: b[0], lambda b: b[:2], lambda b: b + 1,
    lambda b: np.float32(1) * b, lambda b: b.shape, lambda b: b.dtype, lambda b: b.reshape(-1),
    lambda b: b.__setitem__(0, 1), lambda b: b == b, lambda b: np.copyto(np.zeros((4, 8)), b),
    lambda b: np.zeros((4, 8)).__setitem__(slice(None), b),
]  # fmt: skip


def opaque() -> OpaqueBackend:
    return OpaqueBackend(ReferenceBackend())


@pytest.mark.parametrize("peek", PEEKS)
def test_nobody_looks_into_a_buffer(peek: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError):
        peek(opaque().zeros((4, 8)))


def test_its_ops_compute() -> None:
    """Also on buffers inside of a norm; those of another backend are refused."""
    ops, batch = opaque(), plain_batch(ReferenceBackend(), 2)
    assert isinstance(ops, Backend)
    x, out, weight = ops.zeros((5, 8)), ops.zeros((5, 8)), ops.zeros((8,))
    ops.write(x, np.full((5, 8), 2, np.float32))
    ops.write(weight, np.full(8, 3, np.float32))
    ops.norm(x, Norm(weight, None, 0.0), batch, out)
    np.testing.assert_array_equal(ops.read(out, 0, 3)[:, 0], [3, 3, 0])
    with pytest.raises(TypeError, match="a buffer of another backend"):
        ops.add(x, opaque().zeros((5, 8)), batch)
    kept = ops.read(out)
    ops.add(out, x, batch)
    assert kept[0, 0] == 3 and ops.read(out)[0, 0] == 5  # a device's values do not change under a reader


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_program_has_the_rows_that_it_was_recorded_for(name: str) -> None:
    ops, batch = OpaqueBackend(open_backend(name)), plain_batch(ReferenceBackend(), 2)
    x = ops.zeros((5, 8))
    ops.record(lambda: ops.add(x, x, batch), 2).run()
    with pytest.raises(ValueError, match="2 rows: this program was recorded for 1"):
        ops.record(lambda: ops.add(x, x, batch), 1).run()
