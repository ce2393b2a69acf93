"""Sizes: what is printed for an option is read as the same number."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hotcold.errors import UserError
from hotcold.runtime.options import complete
from hotcold.values import bytes_of, exact_size, read_size, round_size


@given(st.integers(0, 1 << 48))
@example(884552704)
def test_printed_sizes_are_read_as_the_same_number(n: int) -> None:
    assert read_size(exact_size(n)) == n
    assert n - (1 << 20) < round_size(n) <= n and read_size(exact_size(round_size(n))) == round_size(n)


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("8", 8 << 30),
        ("8GiB", 8 << 30),
        ("512 MiB", 512 << 20),
        ("0.5KiB", 512),
        ("7B", 7),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, n: int) -> None:
    assert read_size(text) == bytes_of("ram_budget", text) == n
    assert complete({"ram_budget": text})["ram_budget"] == n
    assert complete({"vram_budget": [text, 3]})["vram_budget"] == (n, 3)


def test_a_size_for_people() -> None:
    assert exact_size(round_size(884552704)) == "843MiB" and exact_size(round_size(5000)) == "4KiB"
    assert exact_size(3 << 29) == "1536MiB" and exact_size(0) == "0B"


@pytest.mark.parametrize("text", ["", "8GB", "-1", "nan", "1e3", "8 GiB ", "9" * 16, "0x8", "8\n"])
def test_texts_that_are_no_sizes(text: str) -> None:
    with pytest.raises(UserError, match=r"`ram_budget`: '.*' is not a size such as 8GiB"):
        complete({"ram_budget": text})
