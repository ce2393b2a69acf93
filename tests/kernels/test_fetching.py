"""How far ahead weights are fetched: chosen by processor."""

from __future__ import annotations

import pytest

from hotcold.kernels import _native
from hotcold.kernels.processor import fetching


def test_the_processor_says_how_far() -> None:
    ahead, level = _native.fetching()
    assert level in (1, 2) and 64 <= ahead <= 64 << 10
    try:
        _native.set_fetching(5120, 2)
        assert fetching() == "5K:2"
    finally:
        _native.set_fetching(ahead, level)


@pytest.mark.parametrize("bad", [(-1, 1), ((1 << 20) + 1, 1), (64, 0), (64, 3)])
def test_the_kernels_refuse_what_has_no_sense(bad: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="fetching: 0 to 1048576 bytes"):
        _native.set_fetching(*bad)
