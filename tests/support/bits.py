"""Compares floats bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def same_bits(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))
