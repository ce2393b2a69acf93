"""Tables of rotary positions (RoFormer, arXiv 2104.09864), with the scalings of GGUF files."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotcold.kernels.backend import Floats

Doubles = npt.NDArray[np.float64]

#: Tensors of divisors of frequencies, ``[rotary_dim / 2]``: Llama 3's, and LongRoPE's (arXiv 2402.13753) for
#: sequences up to the original context, and for longer ones.
FACTORS = ("rope_freqs", "rope_factors_short", "rope_factors_long")


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071): keeps high frequencies, divides low ones, interpolates others."""

    factor: float
    original: int  #: positions of the first training
    fast: float = 32.0  #: a frequency with this many turns in ``original`` positions is kept
    slow: float = 1.0  #: a frequency with this many turns is divided
    whole: bool = True  #: rounds the pairs at these limits outwards

    def steps(self, steps: Doubles, dim: int, base: float) -> Doubles:
        """Scales ``steps``, the radians per position of each pair, ``[dim / 2]``."""
        low, high = (
            dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (self.fast, self.slow)
        )
        if self.whole:
            low, high = math.floor(low), math.ceil(high)
        low, high = min(max(low, 0), dim - 1), min(high, dim - 1)
        divided = np.clip((np.arange(len(steps)) - low) / max(high - low, 0.001), 0, 1)
        result: Doubles = steps * (1 - divided) + steps / self.factor * divided
        return result


@dataclass(frozen=True)
class Growth:
    """Growth of scores with the query's position, by ``1 + rate ln(1 + floor((position + before) /
    length))``: the temperature of Ministral 3 and Llama 4."""

    rate: float
    length: int
    before: int = 0

    def of(self, positions: Doubles) -> Doubles:
        result: Doubles = 1 + self.rate * np.log1p(np.floor((positions + self.before) / self.length))
        return result


@dataclass(frozen=True)
class Rope:
    dim: int  #: rotated values of each head; even, at most the head's length
    base: float  #: wavelengths are ``2 pi base^(2i / dim)``
    interleaved: bool  #: as in :class:`~hotcold.kernels.backend.RopeTable`
    linear_factor: float = 1.0  #: positions are divided by this (arXiv 2306.15595)
    yarn: Yarn | None = None
    magnitude: float = 1.0  #: factor of rotated values
    factored: bool = True  #: whether a file's factors (:data:`FACTORS`) apply
    original: int = 0  #: positions of the first training; beyond them LongRoPE's second factors apply
    growth: Growth | None = None  #: of rotated values, besides ``magnitude``; only for queries
    still: bool = False  #: no rotation: only ``magnitude`` and ``growth`` apply


def frequencies(dim: int, base: float) -> Doubles:
    """Returns radians per position of each pair, ``[dim / 2]``."""
    result: Doubles = base ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    return result


def llama3_factors(steps: Doubles, factor: float, low: float, high: float, original: float) -> Doubles:
    """Returns Llama 3.1's divisors of the frequencies ``steps``: GGUF's ``rope_freqs.weight``.

    Waves that fit fewer than ``low`` times in ``original`` positions are stretched by ``factor``; waves that
    fit more than ``high`` times are kept; waves between are interpolated."""
    kept = np.clip((original * steps / (2 * math.pi) - low) / (high - low), 0, 1)
    factors: Doubles = 1 / (kept + (1 - kept) / factor)
    return factors


def chosen_factors(rope: Rope, factors: Mapping[str, Floats], positions: int) -> Floats | None:
    """Returns a file's factors, given by name, for sequences of up to ``positions``.

    LongRoPE's choice is made once, by the longest possible sequence, so that a growing sequence keeps its
    rotation and its keys stay valid."""
    if not rope.factored:
        return None
    long = "rope_factors_long" if positions > rope.original else "rope_factors_short"
    return factors.get("rope_freqs", factors.get(long))


def rope_table(rope: Rope, positions: int, factors: Floats | None = None) -> tuple[Floats, Floats]:
    """Returns cosines and sines of positions 0..``positions`` - 1, ``[positions, dim / 2]`` each.

    They are computed in float64: at position 100,000 a float32 angle would be off by 0.004. ``factors`` are
    the file's divisors of frequencies, ``[dim / 2]``."""
    steps = frequencies(rope.dim, rope.base) / rope.linear_factor
    if factors is not None:
        steps = steps / factors.astype(np.float64)
    if rope.yarn is not None:
        steps = rope.yarn.steps(steps, rope.dim, rope.base)
    places = np.arange(positions, dtype=np.float64)[:, None]
    angles = places * (np.zeros_like(steps) if rope.still else steps)
    grown = rope.magnitude * (rope.growth.of(places) if rope.growth else 1)
    cos, sin = (grown * turn(angles) for turn in (np.cos, np.sin))
    return cos.astype(np.float32), sin.astype(np.float32)
