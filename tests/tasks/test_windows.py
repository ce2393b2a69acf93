"""Windows of a text: begun as the file says, and chosen from the whole of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.tasks.windows import evenly, text_windows

TEXT = "The goats had come down from the mountain, and Peter called them with his pipe. " * 8


@given(st.integers(1, 400), st.integers(1, 500))
def test_evenly(length: int, n: int) -> None:
    """From the first to near the last, at distances that differ by one at most."""
    chosen = evenly(range(length), n)
    assert len(chosen) == min(n, length) and chosen[0] == 0
    gaps = np.diff([*chosen, length])
    assert gaps.min() >= 1 and gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize("add_bos", [True, False])
def test_windows_begin_as_the_file_says(add_bos: bool) -> None:
    tokenizer = load(None, LoadOptions(backend="reference")).tokenizer
    assert tokenizer.add_bos
    tokenizer.add_bos = add_bos
    ids = tokenizer.encode(TEXT, add_bos=False)
    first = [tokenizer.bos_id] if add_bos else []
    step = 16 - len(first)
    expected = [first + ids[at : at + step] for at in range(0, len(ids) - step + 1, step)]
    assert text_windows(tokenizer, TEXT, 16) == expected
