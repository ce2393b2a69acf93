"""Rotary tables against their definitions, written out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hotcold.model.rope import Rope, frequencies, llama3_factors, rope_table


def test_a_table_is_exact_at_far_positions() -> None:
    """Where a float32 angle would be off by 0.01."""
    cos, sin = rope_table(Rope(8, 10000.0, True), 200_001)
    assert cos.shape == sin.shape == (200_001, 4) and cos.dtype == sin.dtype == np.float32
    for i, step in enumerate((1.0, 0.1, 0.01, 0.001)):
        for position in (0, 1, 77, 200_000):
            assert cos[position, i] == pytest.approx(math.cos(position * step), abs=3e-7)
            assert sin[position, i] == pytest.approx(math.sin(position * step), abs=3e-7)


def test_linear_scaling_divides_positions() -> None:
    plain, scaled = (rope_table(Rope(6, 500.0, False, factor), 41) for factor in (1.0, 4.0))
    for a, b in zip(plain, scaled, strict=True):
        np.testing.assert_allclose(b[::4], a[:11], atol=1e-7)


def test_factors_divide_frequencies() -> None:
    factors = np.array([1.0, 2.0, 8.0], np.float32)
    cos, _ = rope_table(Rope(6, 100.0, True), 50, factors)
    for i in range(3):
        step = 100.0 ** (-i / 3) / float(factors[i])
        np.testing.assert_allclose(cos[:, i], np.cos(np.arange(50) * step), atol=1e-7)


def test_llama3_scaling_by_wavelength() -> None:
    """Meta's rule: waves below context / high are kept, those above context / low stretched by the factor."""
    factors = llama3_factors(frequencies(128, 500000.0), factor=8.0, low=1.0, high=4.0, original=8192)
    kinds = set()
    for i in range(64):
        frequency = 500000.0 ** (-i / 64)
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            expected, kind = frequency, "kept"
        elif wavelength > 8192 / 1:
            expected, kind = frequency / 8, "stretched"
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected, kind = (1 - smooth) * frequency / 8 + smooth * frequency, "blended"
        kinds.add(kind)
        assert frequency / factors[i] == pytest.approx(expected, rel=1e-12)
    assert kinds == {"kept", "stretched", "blended"}
