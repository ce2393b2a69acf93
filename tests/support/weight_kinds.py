"""Weights of every kind that a quantiser meets, the same with any version of NumPy, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import BlockType, Tensor
from hotcold.formats.gguf import open_gguf

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

ROWS, COLUMNS = 48, 512
#: Tensors of SmolLM2; only their first rows and columns are used.
OF_SMOLLM2 = ("blk.0.ffn_gate.weight", "blk.14.ffn_down.weight", "blk.29.attn_q.weight")


def _uniform(seed: int, shape: tuple[int, ...]) -> Doubles:
    raw = np.random.PCG64(seed).random_raw(int(np.prod(shape)))
    return ((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(shape)


def _normal(seed: int, shape: tuple[int, ...] = (ROWS, COLUMNS)) -> Doubles:
    first, second = _uniform(seed, (2, *shape))
    angles: Doubles = np.cos(2 * np.pi * second)
    return np.sqrt(-2 * np.log1p(-first)) * angles


def _heavy() -> Doubles:
    """Student's t with three degrees of freedom."""
    return _normal(1) / np.sqrt(sum(_normal(seed) ** 2 for seed in (2, 3, 4)) / 3)


def _outliers() -> Doubles:
    return _normal(5) * np.where(_uniform(6, (ROWS, COLUMNS)) < 0.01, 20, 1)


def _constant() -> Doubles:
    return np.repeat(_normal(7, (ROWS, 1)), COLUMNS, axis=1)


def _sparse() -> Doubles:
    return _normal(8) * (_uniform(9, (ROWS, COLUMNS)) < 0.1)


KINDS: dict[str, Callable[[], Doubles]] = {
    "normal": lambda: _normal(0),
    "heavy": _heavy,
    "outliers": _outliers,
    "uniform": lambda: 2 * _uniform(10, (ROWS, COLUMNS)) - 1,
    "positive": lambda: np.abs(_normal(11)) + 1,
    "constant": _constant,
    "nearly_constant": lambda: _constant() + 1e-3 * _normal(12),
    "zeros": lambda: np.zeros((ROWS, COLUMNS)),
    "sparse": _sparse,
    "tiny": lambda: 1e-6 * _normal(13),
    "huge": lambda: 1e4 * _normal(14),
    "denormal": lambda: 1e-40 * _normal(15),
}


def weights_of(kind: str) -> Floats:
    """``[ROWS, COLUMNS]`` weights of one of :data:`KINDS`."""
    return KINDS[kind]().astype(np.float32)


def weights_of_smollm2(path: Path) -> dict[str, Floats]:
    """The beginning of each of :data:`OF_SMOLLM2`, by name."""
    with open_gguf(path) as file:
        loaded = {name: file.load(name).dequantise() for name in OF_SMOLLM2}
    return {name: np.ascontiguousarray(values[:ROWS, :COLUMNS]) for name, values in loaded.items()}


def importance() -> Floats:
    """How much each column counts: mean squares of what is multiplied with it differ that much, and more."""
    return (_normal(16, (COLUMNS,)) ** 2 * np.exp(_normal(17, (COLUMNS,))) + 1e-3).astype(np.float32)


def error_left(
    type: BlockType, packed: npt.NDArray[np.uint8], values: Floats, importance: Floats | None
) -> float:
    """The root of the mean squared error, each weight's times its column's importance."""
    off = Tensor(type, values.shape, packed).dequantise().astype(np.float64) - values
    squares = off**2 if importance is None else off**2 * importance
    return float(np.sqrt(squares.mean()))


def sized_error_left(
    type: BlockType, packed: npt.NDArray[np.uint8], values: Floats, importance: Floats | None
) -> float:
    """The same, with each square also times the size of its weight plus the root mean square of 32
    neighbours, as quantisers weigh it."""
    sizes = np.abs(values.astype(np.float64))
    runs = np.sqrt((sizes**2).reshape(len(values), -1, 32).mean(axis=2)).repeat(32, axis=1)
    weights = sizes + runs
    return error_left(type, packed, values, weights if importance is None else weights * importance)
