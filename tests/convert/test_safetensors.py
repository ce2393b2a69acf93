"""Safetensors files as the converter opens them: values, and files broken in every way we know."""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import safetensors_bytes, write_safetensors

from hotcold.convert import ConvertError
from hotcold.convert.checkpoint import Checkpoint
from hotcold.convert.settings import Settings
from hotcold.convert.tensor_files import Safetensors, open_safetensors, stored_in

VALUES = [[1.0, -2.5, 0.0], [3.0, 65504.0, -0.00048828125]]


def entry(shape: list[Any], begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def opened(path: Path) -> Checkpoint:
    return Checkpoint(path.parent, Settings(path, {}), stored_in(Safetensors(path)))


def test_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    arrays = {
        "f32": np.array(VALUES, "<f4"),
        "f16": np.array(VALUES, "<f2"),
        "scalar": np.array(7, "<f4"),
        "empty": np.zeros((0, 4), "<f4"),
        "ids": np.arange(5, dtype="<i8"),
    }
    write_safetensors(path, arrays)
    file = opened(path)
    assert {name: file.shape(name) for name in file.files} == {
        "f32": (2, 3),
        "f16": (2, 3),
        "scalar": (),
        "empty": (0, 4),
        "ids": (5,),
    }
    for name in ("f32", "f16", "scalar", "empty"):
        loaded = file.load(name)
        assert loaded.dtype == arrays[name].dtype
        np.testing.assert_array_equal(loaded, arrays[name])
    with pytest.raises(ConvertError, match="'ids' is I64: only F32, F16, BF16"):
        file.load("ids")


def test_bfloat16_bits_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    # sign, 8 bits of exponent, 7 of fraction: 1.0, -2.5, the smallest denormal, infinity
    bits = np.array([0x3F80, 0xC020, 0x0001, 0x7F80], "<u2")
    write_safetensors(path, {"x": bits.view(ml_dtypes.bfloat16)})
    assert opened(path).load("x").astype(np.float32).tolist() == [1.0, -2.5, 2.0**-133, np.inf]


@pytest.mark.parametrize("package", ["safetensors", "ml_dtypes"])
def test_without_the_extra_it_says_what_to_install(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConvertError, match=rf"{package}.* needs pip install '\.\[convert\]'"):
        open_safetensors(Path("a.safetensors"))


GOOD = {"x": entry([2, 2], 0, 16)}
BAD_FILES: dict[str, bytes] = {
    "empty": b"",
    "short": bytes(9),
    "header of 2^63": (1 << 63).to_bytes(8, "little") + bytes(40),
    "header beyond the file": (41).to_bytes(8, "little") + bytes(40),
    "header of no bytes": (0).to_bytes(8, "little") + bytes(40),
    "a GGUF file": b"GGUF\x03\0\0\0" + bytes(40),
    "no JSON": safetensors_bytes(b"{]"),
    "not UTF-8": safetensors_bytes(b'{"\xff": 1}'),
    "a list": safetensors_bytes([]),
    "deep": safetensors_bytes(b'{"a":' * 100_000),
    "deep lists": safetensors_bytes(b"[" * 100_000),
    "NaN": safetensors_bytes(b'{"x": NaN}'),
    "a number of 5000 digits": safetensors_bytes(b'{"x": ' + b"9" * 5000 + b"}"),
    "a tensor twice": safetensors_bytes(
        b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":{}}', bytes(4)
    ),
    "dtype twice": safetensors_bytes(b'{"x":{"dtype":"F32","dtype":"F16"}}'),
    "metadata of numbers": safetensors_bytes({"__metadata__": {"a": 1}}),
    "metadata list": safetensors_bytes({"__metadata__": []}),
    "entry is null": safetensors_bytes({"x": None}),
    "no shape": safetensors_bytes({"x": {"dtype": "F32", "data_offsets": [0, 4]}}),
    "unknown dtype": safetensors_bytes({"x": entry([2], 0, 8, "F99")}, bytes(8)),
    "dtype is a list": safetensors_bytes({"x": entry([2], 0, 8, ["F32"])}, bytes(8)),
    "negative dimension": safetensors_bytes({"x": entry([-1, 2], 0, 8)}, bytes(8)),
    "fractional dimension": safetensors_bytes({"x": entry([2.0], 0, 8)}, bytes(8)),
    "true as a dimension": safetensors_bytes({"x": entry([True], 0, 4)}, bytes(4)),
    "a product that wraps to 16": safetensors_bytes({"x": entry([1 << 33, (1 << 31) + 1], 0, 16)}, bytes(16)),
    "a dimension of 2^64": safetensors_bytes({"x": entry([1 << 64], 0, 16)}, bytes(16)),
    "negative offset": safetensors_bytes({"x": entry([2], -8, 0)}, bytes(8)),
    "offsets reversed": safetensors_bytes({"x": entry([2], 8, 0)}, bytes(8)),
    "offsets of 2^64": safetensors_bytes({"x": entry([2], 1 << 64, (1 << 64) + 8)}, bytes(8)),
    "three offsets": safetensors_bytes({"x": entry([2], 0, 8) | {"data_offsets": [0, 8, 8]}}, bytes(8)),
    "offsets do not fit the shape": safetensors_bytes({"x": entry([2], 0, 12)}, bytes(12)),
    "past the end": safetensors_bytes({"x": entry([4], 0, 16)}, bytes(12)),
    "bytes to spare": safetensors_bytes(GOOD, bytes(17)),
    "overlap": safetensors_bytes({"x": entry([2], 0, 8), "y": entry([2], 4, 12)}, bytes(12)),
    "the same bytes twice": safetensors_bytes({"x": entry([2], 0, 8), "y": entry([2], 0, 8)}, bytes(8)),
    "a hole": safetensors_bytes({"x": entry([1], 0, 4), "y": entry([1], 8, 12)}, bytes(12)),
    "a dtype of 5000 letters": safetensors_bytes({"x": entry([2], 0, 8, "\n" * 5000)}, bytes(8)),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(BAD_FILES[case])
    with pytest.raises(ConvertError) as caught:
        open_safetensors(path)
    text = str(caught.value)
    assert text.startswith(f"{path} is not a whole safetensors file: ")
    assert text.isprintable() and len(text) < len(str(path)) + 500


def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    whole = safetensors_bytes(GOOD | {"y": entry([3], 16, 28)}, bytes(28))
    path.write_bytes(whole)
    assert len(opened(path).files) == 2
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ConvertError):
            open_safetensors(path)


@given(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 255)), min_size=1, max_size=4))
def test_mutated_files_load_or_are_refused(tmp_path_factory: Any, changes: list[tuple[int, int]]) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    data = bytearray(safetensors_bytes(GOOD | {"y": entry([3], 16, 28)}, bytes(28)))
    for position, value in changes:
        data[position % len(data)] = value
    path.write_bytes(data)
    try:
        file = opened(path)
        for name in file.files:
            assert file.load(name).shape == file.shape(name)
    except ConvertError:
        pass


def test_a_header_that_claims_much_allocates_little(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little") + b"{" * 64)
    tracemalloc.start()
    try:
        with pytest.raises(ConvertError):
            open_safetensors(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConvertError, match="is not a whole safetensors file"):
            open_safetensors(path)
