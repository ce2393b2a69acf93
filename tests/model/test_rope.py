"""Rotary tables against their definitions, written out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hotcold.model.mixers.rope import (
    Growth,
    Rope,
    Yarn,
    chosen_factors,
    frequencies,
    llama3_factors,
    rope_table,
)


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


#: Radians per position that transformers 5.23 computes for base 1000, 16 values, factor 4, 64 original
#: positions, beta_fast 8 and beta_slow 0.5: with ``truncate``, and without.
YARN = {
    True: [1.0, 0.34262842, 0.11114246, 0.032807872, 0.0079056947, 0.0033338037, 0.0014058533, 0.00059284345],
    False: [1.0, 0.3507551, 0.10637638, 0.027343037, 0.0079056947, 0.0033338037, 0.0014058533, 0.00059284345],
}


@pytest.mark.parametrize("whole", [True, False])
def test_yarn_is_transformers(whole: bool) -> None:
    yarn = Yarn(4.0, 64, fast=8.0, slow=0.5, whole=whole)
    steps = yarn.steps(frequencies(16, 1000.0), 16, 1000.0)
    np.testing.assert_allclose(steps, YARN[whole], rtol=1e-6)
    cos, sin = rope_table(Rope(16, 1000.0, True, yarn=yarn, magnitude=1.5), 40)
    angles = np.arange(40)[:, None] * np.array(YARN[whole])
    np.testing.assert_allclose(cos, 1.5 * np.cos(angles), atol=1e-4)
    np.testing.assert_allclose(sin, 1.5 * np.sin(angles), atol=1e-4)


@pytest.mark.parametrize("base", [np.nextafter(1, 2), 1e12])
@pytest.mark.parametrize("turns", [np.nextafter(1e-6, 1), 1e6])
@pytest.mark.parametrize("whole", [True, False])
def test_yarn_at_the_ends_of_what_a_file_may_ask_for(base: float, turns: float, whole: bool) -> None:
    for original in (1, 1 << 24):
        plain = frequencies(1024, base)
        steps = Yarn(4.0, original, fast=turns, slow=turns, whole=whole).steps(plain, 1024, base)
        assert (steps <= plain).all() and (steps >= plain / 4).all()


def test_factors_are_chosen_by_the_most_positions_and_for_scaled_layers_alone() -> None:
    named = {name: np.full(3, i, np.float32) for i, name in enumerate(("rope_freqs", "short", "long"))}
    both = {"rope_factors_short": named["short"], "rope_factors_long": named["long"]}
    rope = Rope(6, 100.0, True, original=64)
    assert chosen_factors(rope, both, 64) is named["short"]
    assert chosen_factors(rope, both, 65) is named["long"]
    assert chosen_factors(rope, {"rope_freqs": named["rope_freqs"]}, 65) is named["rope_freqs"]
    assert chosen_factors(rope, {}, 65) is None
    assert chosen_factors(Rope(6, 100.0, True, factored=False), both, 65) is None


def test_growth_multiplies_what_is_rotated() -> None:
    """As in the code of Llama 4: 1 + rate ln(1 + floor(position / length))."""
    plain, grown = (rope_table(Rope(6, 100.0, True, growth=each), 50) for each in (None, Growth(0.2, 16)))
    factors = np.array([1 + 0.2 * np.log(1 + position // 16) for position in range(50)])
    for before, after in zip(plain, grown, strict=True):
        np.testing.assert_allclose(after, before * factors[:, None], rtol=1e-6)
    assert (factors[:16] == 1).all() and factors[48] > 1.2
