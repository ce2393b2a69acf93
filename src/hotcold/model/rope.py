"""Rotary position tables (RoFormer, arXiv 2104.09864), with the scalings that GGUF files ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotcold.kernels.backend import Floats

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's: long waves are stretched by ``factor``, short ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class Rope:
    """Attributes:
    dim: values of each head that are rotated; even, at most the head's.
    base: wavelengths are ``2 pi base^(2i / dim)``.
    interleaved: as in :class:`~hotcold.kernels.backend.RopeTable`.
    linear_factor: positions are divided by this (arXiv 2306.15595).
    """

    dim: int
    base: float
    interleaved: bool
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None


def frequencies(dim: int, base: float) -> Doubles:
    """Radians per position of each pair, ``[dim / 2]``."""
    result: Doubles = base ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    return result


def llama3_factors(dim: int, base: float, scaling: Llama3Scaling) -> Doubles:
    """What each pair's frequency is divided by, ``[dim / 2]``: as in GGUF's ``rope_freqs.weight``."""
    waves_in_context = scaling.original_context * frequencies(dim, base) / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((waves_in_context - scaling.low_freq_factor) / span, 0, 1)
    factors: Doubles = 1 / (kept + (1 - kept) / scaling.factor)
    return factors


def rope_table(rope: Rope, positions: int, factors: Floats | None = None) -> tuple[Floats, Floats]:
    """Cosines and sines of positions 0..``positions`` - 1.

    Computed in float64: at position 100,000 a float32 angle would be off by 0.004.

    Args:
        rope: the model's.
        positions: rows of the tables.
        factors: what the file divides each frequency by, ``[dim / 2]``, or None.

    Returns:
        cos, sin: ``[positions, dim / 2]`` float32 each.
    """
    steps = frequencies(rope.dim, rope.base) / rope.linear_factor
    if rope.llama3 is not None:
        steps = steps / llama3_factors(rope.dim, rope.base, rope.llama3)
    if factors is not None:
        steps = steps / factors.astype(np.float64)
    angles = np.arange(positions, dtype=np.float64)[:, None] * steps
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
