"""Tensors that are still in their file: what they give when read, and what they refuse."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from support.random_blocks import random_blocks

from hotcold.formats.gguf import GGUFError, open_gguf, write_gguf


@pytest.fixture
def path(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    tensors = {name: random_blocks(random, "Q4_0", 9, 96) for name in ("before", "w", "after")}
    write_gguf(tmp_path / "model.gguf", {}, tensors)
    return tmp_path / "model.gguf"


def test_it_is_what_load_gives(path: Path) -> None:
    with open_gguf(path) as file:
        stored, loaded = file.stored("w"), file.load("w")
        assert (stored.type, stored.shape, stored.nbytes) == (loaded.type, loaded.shape, loaded.nbytes)
        np.testing.assert_array_equal(stored.load().data, loaded.data)


def test_rows_and_columns_are_those_of_the_loaded_tensor(path: Path) -> None:
    """In the file as in memory; numbers of columns count blocks."""
    rows, columns = np.array([0, 3, 4, 8]), np.array([0, 2])
    with open_gguf(path) as file:
        stored, loaded = file.stored("w"), file.load("w")
        values = loaded.dequantise()
        wanted = [values[rows], values[2:5], values[-3:], values[:, [*range(32), *range(64, 96)]]]
        for source in (stored, loaded):
            taken = [source.take_rows(rows), source.take_rows(slice(2, 5)), source.take_rows(slice(-3, None))]
            for part, expected in zip([*taken, source.take_columns(columns)], wanted, strict=True):
                tensor = part.load()
                assert part.shape == tensor.shape and part.nbytes == tensor.nbytes
                np.testing.assert_array_equal(tensor.dequantise(), expected)


def test_columns_that_were_chosen_cannot_be_chosen_from(path: Path) -> None:
    with open_gguf(path) as file:
        part = file.stored("w").take_columns(np.array([1]))
        rows = file.stored("w").take_rows(np.array([1]))
        for again in (part.take_rows, part.take_columns, rows.take_columns):
            with pytest.raises(ValueError, match="chosen already: choose once"):
                again(np.array([0]))


@pytest.mark.parametrize("again", [slice(1, 3), np.array([1, 2])])
def test_a_part_of_chosen_rows(path: Path, again: slice) -> None:
    with open_gguf(path) as file:
        part = file.stored("w").take_rows(np.array([0, 3, 4, 8])).take_rows(again)
        expected = file.load("w").dequantise()[[3, 4]]
        assert part.shape == (2, 96)
        np.testing.assert_array_equal(part.load().dequantise(), expected)


def test_it_keeps_the_file_open(path: Path) -> None:
    """As long as it is not closed."""
    stored = open_gguf(path).stored("w")
    with open_gguf(path) as file:
        np.testing.assert_array_equal(stored.load().data, file.load("w").data)


def test_a_closed_file_says_so(path: Path) -> None:
    with open_gguf(path) as file:
        stored = file.stored("w")
    with pytest.raises(GGUFError, match=r"model.gguf: the file is closed; open it again"):
        stored.load()
    with pytest.raises(GGUFError, match=r"model.gguf: the file is closed"), stored.descriptor():
        pytest.fail("opened")


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_that_changed_before_or_while_it_is_read(path: Path, change: int) -> None:
    with open_gguf(path) as file:
        stored, size = file.stored("w"), file.size
        message = f"model.gguf: changed from {size} to {size + change} bytes"
        with pytest.raises(GGUFError, match=message), stored.descriptor():
            os.truncate(path, size + change)
        with pytest.raises(GGUFError, match=message):
            stored.load()
        with pytest.raises(GGUFError, match=message), stored.descriptor():
            pytest.fail("opened")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (EOFError("end"), "ended while being read"),
        (OSError(5, "Input/output error"), "cannot be read: Input/"),
    ],
)
def test_reads_that_fail_elsewhere(path: Path, error: Exception, message: str) -> None:
    with (
        open_gguf(path) as file,
        pytest.raises(GGUFError, match=f"model.gguf: {message}"),
        file.stored("w").descriptor(),
    ):
        raise error


def test_a_tensor_that_is_not_there(path: Path) -> None:
    with open_gguf(path) as file, pytest.raises(GGUFError, match="no tensor 'x'"):
        file.stored("x")
