"""The parts of cases in the op table of Vulkan devices (table.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import BLOCK_TYPES
from hotcold.kernels.backend import (
    Batch,
)
from hotcold.kernels.vulkan.packing import holds

Array = npt.NDArray[Any]


TYPES = ("Q4_0", "F16", *(name for name in BLOCK_TYPES if name not in ("Q4_0", "F16") and holds(name)))
#: Of these, types whose blocks come to the shaders in the form of another type: packing alone differs.
ALIKE = ("TQ1_0", "TQ2_0", "Q1_0", "Q2_0", "IQ2_XS", "IQ2_XXS", "IQ1_S")
#: (decode rows, prompt rows) of a step
STEPS = ((1, 0), (2, 0), (5, 0), (16, 0), (0, 1), (0, 70), (3, 5), (16, 17))
FEW_STEPS = ((1, 0), (16, 0), (0, 33), (3, 5))
LARGE_TILES = ((0, 97), (3, 70))  #: prompts whose rows fill more than a tile of 64


@dataclass(frozen=True)
class Case:
    """``run`` gives the arrays that the op writes; ``quick`` ones are enough for CI, those for
    ``everywhere`` on a driver that takes long to make a pipeline (SwiftShader: 0.3 s). ``tolerance``: how far
    results may be from the model's, as a share of a row's largest value, on a device that does not divide
    exactly."""

    op: str
    name: str
    run: Callable[[Any], list[Array]]
    quick: bool = True
    everywhere: bool = True
    tolerance: float = 1e-5

    def __str__(self) -> str:
        return f"{self.op} {self.name}"


def buffer(backend: Any, batch: Batch, x: Array) -> Array:
    """x in a buffer with room for the largest step, whose other rows are NaN."""
    made: Array = backend.zeros((batch.limits.tokens, *x.shape[1:]))
    made[:] = np.nan
    made[: len(x)] = x
    return made


def out_buffer(backend: Any, rows: int, *shape: int, dtype: npt.DTypeLike = np.float32) -> Array:
    made: Array = backend.zeros((rows, *shape), dtype)
    made[:] = 7
    return made
