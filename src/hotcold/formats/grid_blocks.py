"""Opens blocks of IQ1, IQ2 and IQ3: each has indices into a grid of four or eight values, and signs."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.formats.fields import Bytes, Floats, Opened, fields, half_at
from hotcold.formats.grids import grid

#: Eight signs from seven bits: the eighth makes the number of minus signs even.
_SIGNS = np.array([i | i.bit_count() % 2 << 7 for i in range(128)], np.uint8)


def _sevens(words: npt.NDArray[np.uint32]) -> Bytes:
    """The signs from four fields of seven bits in each word, eight signs in a byte."""
    signs: Bytes = _SIGNS[words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & np.uint32(127)]
    return signs.reshape(len(words), -1)


def _signed(name: str, entries: npt.NDArray[np.uint16], signs: Bytes, scales: Floats) -> Opened:
    """Opens a block: entries of this grid, a sign for each value, and scales for runs of values."""
    plus = np.int8(1) - np.int8(2) * np.unpackbits(signs, axis=1, bitorder="little").view(np.int8)
    return scales, grid(name)[entries].reshape(len(entries), -1) * plus


def _words(blocks: Bytes, start: int, end: int, size: int) -> npt.NDArray[np.uint32]:
    return blocks[:, start:end].copy().view(f"<u{size}").astype(np.uint32)


def _half_and(codes: npt.NDArray[Any], unit: float) -> Floats:
    factors: Floats = (np.float32(0.5) + codes.astype(np.float32)) * np.float32(unit)
    return factors


def _high_bits(entries: Bytes, high: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    indices: npt.NDArray[np.uint16] = entries.astype(np.uint16) | high.astype(np.uint16) << np.uint16(8)
    return indices


def open_iq3_xxs(blocks: Bytes) -> Opened:
    scale_words = _words(blocks, 66, 98, 4)
    entries = blocks[:, 2:66].astype(np.uint16)
    scales: Floats = half_at(blocks, 0) * _half_and(scale_words >> 28, 0.5)
    return _signed("IQ3_XXS", entries, _sevens(scale_words), scales)


def open_iq3_s(blocks: Bytes) -> Opened:
    entries = _high_bits(blocks[:, 2:66], fields(blocks[:, 66:74], 1, 1))
    scales: Floats = half_at(blocks, 0) * (1 + 2 * fields(blocks[:, 106:], 4, 1))
    return _signed("IQ3_S", entries, blocks[:, 74:106], scales)


def open_iq2_xxs(blocks: Bytes) -> Opened:
    words = _words(blocks, 2, 66, 4)
    entries, scale_words = blocks[:, 2:66].reshape(-1, 8, 8)[:, :, :4], words[:, 1::2]
    scales: Floats = half_at(blocks, 0) * _half_and(scale_words >> 28, 0.25)
    return _signed(
        "IQ2_XXS", entries.reshape(len(blocks), -1).astype(np.uint16), _sevens(scale_words), scales
    )


def open_iq2_xs(blocks: Bytes) -> Opened:
    codes = _words(blocks, 2, 66, 2)
    scales: Floats = half_at(blocks, 0) * _half_and(fields(blocks[:, 66:], 4, 1), 0.25)
    return _signed("IQ2_XS", (codes & 511).astype(np.uint16), _SIGNS[codes >> 9], scales)


def open_iq2_s(blocks: Bytes) -> Opened:
    entries = _high_bits(blocks[:, 2:34], fields(blocks[:, 66:74], 2, 1))
    scales: Floats = half_at(blocks, 0) * _half_and(fields(blocks[:, 74:], 4, 1), 0.25)
    return _signed("IQ2_S", entries, blocks[:, 34:66], scales)


def _shifted(entries: npt.NDArray[np.uint16], minus: npt.NDArray[np.bool_], scales: Floats) -> Opened:
    """Opens a block of IQ1: the grid's values plus or minus an eighth. Codes are these values times eight."""
    codes = np.int8(8) * grid("IQ1")[entries] + np.where(minus, np.int8(-1), np.int8(1))[:, :, None]
    return scales * np.float32(0.125), codes.reshape(len(entries), -1)


def open_iq1_s(blocks: Bytes) -> Opened:
    high = _words(blocks, 34, 50, 2)
    fourth = (high[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint32) & 7).reshape(len(blocks), -1)
    entries = _high_bits(blocks[:, 2:34], fourth.astype(np.uint8))
    scales: Floats = half_at(blocks, 0) * (2 * (high >> 12 & 7) + 1).astype(np.float32)
    return _shifted(entries, (high >> 15).astype(np.bool_).repeat(4, axis=1), scales)


def open_iq1_m(blocks: Bytes) -> Opened:
    """Opens a block. The highest bits of four words of small scales form the float16 scale."""
    words = _words(blocks, 48, 56, 2)
    half = (words >> 12 << np.arange(0, 16, 4, dtype=np.uint32)).sum(axis=1, dtype=np.uint32)
    small = (words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint32) & 7).reshape(len(blocks), -1)
    d = half.astype("<u2").view("<f2").astype(np.float32)[:, None]
    scales: Floats = d * (2 * small + 1).astype(np.float32)
    high = fields(blocks[:, 32:48], 4, 1)
    return _shifted(_high_bits(blocks[:, :32], high & 7), (high >> 3).astype(np.bool_), scales)
