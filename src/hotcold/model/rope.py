"""Rotary position tables (RoFormer, arXiv 2104.09864), with the scalings that GGUF files ask for."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotcold.kernels.backend import Floats

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rope:
    dim: int  #: values of each head that are rotated; even, at most the head's
    base: float  #: wavelengths are ``2 pi base^(2i / dim)``
    interleaved: bool  #: as in :class:`~hotcold.kernels.backend.RopeTable`
    linear_factor: float = 1.0  #: positions are divided by this (arXiv 2306.15595)


def frequencies(dim: int, base: float) -> Doubles:
    """Radians per position of each pair, ``[dim / 2]``."""
    result: Doubles = base ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    return result


def llama3_factors(steps: Doubles, factor: float, low: float, high: float, original: float) -> Doubles:
    """What Llama 3.1 divides each of the frequencies ``steps`` by: GGUF's ``rope_freqs.weight``.

    Waves that fit fewer than ``low`` times in ``original`` positions are stretched by ``factor``, those that
    fit more than ``high`` times are kept, those between interpolated."""
    kept = np.clip((original * steps / (2 * math.pi) - low) / (high - low), 0, 1)
    factors: Doubles = 1 / (kept + (1 - kept) / factor)
    return factors


def rope_table(rope: Rope, positions: int, factors: Floats | None = None) -> tuple[Floats, Floats]:
    """Cosines and sines of positions 0..``positions`` - 1, ``[positions, dim / 2]`` each.

    Computed in float64: at position 100,000 a float32 angle would be off by 0.004. ``factors`` are what the
    file divides each frequency by, ``[dim / 2]``."""
    steps = frequencies(rope.dim, rope.base) / rope.linear_factor
    if factors is not None:
        steps = steps / factors.astype(np.float64)
    angles = np.arange(positions, dtype=np.float64)[:, None] * steps
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
