"""Tensors whose rows take turns in one tensor of the file: as if each lay by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotcold.formats.blocks import Tensor, block_type, quantise
from hotcold.formats.gguf import GGUFError, open_gguf, write_gguf
from hotcold.formats.words import SIDE_BY_SIDE, SIDE_BY_SIDE_KEY

NAMES = ["a", "b", "c"]


def test_each_is_read_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "file.gguf"
    parts = [
        quantise(np.random.default_rng(i).standard_normal((2, 5, 64), np.float32), "Q8_0") for i in range(3)
    ]
    rows = np.stack([each.data for each in parts], axis=1).reshape(30, -1)
    whole = Tensor(block_type("Q8_0"), (2, 15, 64), rows)
    other = quantise(np.ones((3, 4), np.float32), "F32")
    write_gguf(path, {SIDE_BY_SIDE_KEY: NAMES}, {"x": other, f"l.{SIDE_BY_SIDE}.w": whole})
    with open_gguf(path) as file:
        assert list(file.tensors) == ["x", "l.a.w", "l.b.w", "l.c.w"] and file.count == 2
        assert file.side_by_side == {f"l.{name}.w": f"l.{SIDE_BY_SIDE}.w" for name in NAMES}
        for name, part in zip(NAMES, parts, strict=True):
            info = file.tensors[f"l.{name}.w"]
            assert (info.shape, info.nbytes) == (part.shape, part.nbytes)
            assert info.offset == file.tensors["l.a.w"].offset + NAMES.index(name) * rows.shape[1]
            np.testing.assert_array_equal(file.load(info.name).data, part.data)
            np.testing.assert_array_equal(np.concatenate([*file.pieces(info.name, 200)]), part.data)
            np.testing.assert_array_equal(file.read_rows(info.name, 3, 7), part.data[3:7])
            stored = file.stored(info.name)
            assert stored.shape == part.shape
            np.testing.assert_array_equal(stored.load().data, part.data)
            some = stored.flat().take_rows(slice(2, 6)).load()
            np.testing.assert_array_equal(some.data, part.data[2:6])
        np.testing.assert_array_equal(file.load("x").data, other.data)


@pytest.mark.parametrize(
    ("names", "tensors", "needed"),
    [
        (["a"], {}, "names of two tensors or more are needed"),
        (["a", "a"], {}, "names of two tensors or more are needed"),
        (["a", "b /"], {}, r"tensor name 'b /'"),
        (np.array([1, 2], np.int32), {}, "names of two tensors or more are needed"),
        (["a", "b"], {}, r"has shape \(3, 4\): rows of 2 tensors are needed"),
        (
            ["a", "b", "c"],
            {"l.b.w": quantise(np.ones(4, np.float32), "F32")},
            "tensor l.b.w is in .* as well",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    names: object, tensors: dict[str, Tensor], needed: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.gguf"
    whole = quantise(np.ones((3, 4), np.float32), "F32")
    write_gguf(path, {SIDE_BY_SIDE_KEY: names}, {f"l.{SIDE_BY_SIDE}.w": whole, **tensors})
    with pytest.raises(GGUFError, match=needed):
        open_gguf(path)
