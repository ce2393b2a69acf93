"""The safetensors reader: values of every dtype, and files that are broken in every way we know."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotcold.formats.safetensors import SafetensorsError, as_float32, open_safetensors
from tests.checkpoints import safetensors_bytes, write_safetensors

VALUES = [[1.0, -2.5, 0.0], [3.0, 65504.0, -0.00048828125]]


def entry(shape: list[Any], begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


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
    file = open_safetensors(path)
    assert {name: (info.dtype, info.shape) for name, info in file.tensors.items()} == {
        "f32": ("F32", (2, 3)), "f16": ("F16", (2, 3)), "scalar": ("F32", ()), "empty": ("F32", (0, 4)),
        "ids": ("I64", (5,)),
    }  # fmt: skip
    for name in ("f32", "f16", "scalar", "empty"):
        loaded = file.load(name)
        assert loaded.dtype == arrays[name].dtype
        np.testing.assert_array_equal(loaded, arrays[name])
    with pytest.raises(SafetensorsError, match="'ids' is I64: only F32, F16, BF16"):
        file.load("ids")


def test_bfloat16_bits_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    # sign, 8 bits of exponent, 7 of fraction: 1.0, -2.5, the smallest denormal, infinity
    write_safetensors(path, {"x": np.array([0x3F80, 0xC020, 0x0001, 0x7F80], "<u2")})
    file = open_safetensors(path)
    assert file.tensors["x"].dtype == "BF16"
    assert as_float32(file.load("x")).tolist() == [1.0, -2.5, 2.0**-133, np.inf]


def test_metadata_is_kept_and_order_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    header = {"b": entry([1], 4, 8), "__metadata__": {"format": "pt"}, "a": entry([1], 0, 4)}
    path.write_bytes(safetensors_bytes(header, bytes(8)))
    file = open_safetensors(path)
    assert file.metadata == {"format": "pt"}
    assert list(file.tensors) == ["a", "b"]


def test_loading_an_unknown_name(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"x": np.zeros(2, "<f4")})
    with pytest.raises(KeyError):
        open_safetensors(path).load("y")


GOOD = {"x": entry([2, 2], 0, 16)}
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes: too short"),
    "short": (bytes(9), "9 bytes: too short"),
    "header of 2^63": ((1 << 63).to_bytes(8, "little") + bytes(40), "header length 9223372036854775808"),
    "header beyond the file": ((41).to_bytes(8, "little") + bytes(40), "header length 41: 2 to 40"),
    "header of no bytes": ((0).to_bytes(8, "little") + bytes(40), "header length 0"),
    "a GGUF file": (b"GGUF\x03\0\0\0" + bytes(40), "(a safetensors file?)"),
    "no JSON": (safetensors_bytes(b"{]"), "not valid"),
    "not UTF-8": (safetensors_bytes(b'{"\xff": 1}'), "not valid"),
    "a list": (safetensors_bytes([]), "a JSON list: an object is needed"),
    "deep": (safetensors_bytes(b'{"a":' * 100_000), "nested too deeply"),
    "deep lists": (safetensors_bytes(b"[" * 100_000), "nested too deeply"),
    "NaN": (safetensors_bytes(b'{"x": NaN}'), "NaN is not JSON"),
    "a number of 5000 digits": (safetensors_bytes(b'{"x": ' + b"9" * 5000 + b"}"), "not valid"),
    "a tensor twice": (
        safetensors_bytes(b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":{}}', bytes(4)),
        "duplicate key 'x'",
    ),
    "dtype twice": (safetensors_bytes(b'{"x":{"dtype":"F32","dtype":"F16"}}'), "duplicate key 'dtype'"),
    "metadata of numbers": (safetensors_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata list": (safetensors_bytes({"__metadata__": []}), "__metadata__"),
    "empty name": (safetensors_bytes({"": entry([1], 0, 4)}, bytes(4)), "1 to 1024 characters, not 0"),
    "long name": (safetensors_bytes({"n" * 5000: entry([1], 0, 4)}, bytes(4)), "not 5000"),
    "entry is null": (safetensors_bytes({"x": None}), "exactly dtype, shape and data_offsets"),
    "no shape": (safetensors_bytes({"x": {"dtype": "F32", "data_offsets": [0, 4]}}), "exactly dtype"),
    "an extra key": (safetensors_bytes({"x": GOOD["x"] | {"file": "/etc"}}, bytes(16)), "exactly dtype"),
    "unknown dtype": (safetensors_bytes({"x": entry([2], 0, 8, "F99")}, bytes(8)), "unknown dtype 'F99'"),
    "dtype is a list": (safetensors_bytes({"x": entry([2], 0, 8, ["F32"])}, bytes(8)), "unknown dtype"),
    "negative dimension": (safetensors_bytes({"x": entry([-1, 2], 0, 8)}, bytes(8)), "shape"),
    "fractional dimension": (safetensors_bytes({"x": entry([2.0], 0, 8)}, bytes(8)), "shape"),
    "true as a dimension": (safetensors_bytes({"x": entry([True], 0, 4)}, bytes(4)), "shape"),
    "nine dimensions": (safetensors_bytes({"x": entry([1] * 9, 0, 4)}, bytes(4)), "at most 8"),
    "a product that wraps to 16": (
        safetensors_bytes({"x": entry([1 << 33, (1 << 31) + 1], 0, 16)}, bytes(16)),
        "but data_offsets span 16",
    ),
    "a dimension of 2^64": (safetensors_bytes({"x": entry([1 << 64], 0, 16)}, bytes(16)), "shape"),
    "negative offset": (safetensors_bytes({"x": entry([2], -8, 0)}, bytes(8)), "data_offsets"),
    "offsets reversed": (safetensors_bytes({"x": entry([2], 8, 0)}, bytes(8)), "data_offsets"),
    "offsets of 2^64": (
        safetensors_bytes({"x": entry([2], 1 << 64, (1 << 64) + 8)}, bytes(8)),
        "data_offsets",
    ),
    "three offsets": (
        safetensors_bytes({"x": entry([2], 0, 8) | {"data_offsets": [0, 8, 8]}}, bytes(8)),
        "data_",
    ),
    "offsets do not fit the shape": (safetensors_bytes({"x": entry([2], 0, 12)}, bytes(12)), "has 8 bytes"),
    "past the end": (safetensors_bytes({"x": entry([4], 0, 16)}, bytes(12)), "cut short"),
    "bytes to spare": (safetensors_bytes(GOOD, bytes(17)), "bytes to spare"),
    "overlap": (safetensors_bytes({"x": entry([2], 0, 8), "y": entry([2], 4, 12)}, bytes(12)), "overlaps"),
    "the same bytes twice": (
        safetensors_bytes({"x": entry([2], 0, 8), "y": entry([2], 0, 8)}, bytes(8)),
        "overl",
    ),
    "a hole": (safetensors_bytes({"x": entry([1], 0, 4), "y": entry([1], 8, 12)}, bytes(12)), "a hole"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    data, message = BAD_FILES[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(SafetensorsError) as caught:
        open_safetensors(path)
    text = str(caught.value)
    assert message in text
    assert str(path) in text and "\n" not in text and len(text) < len(str(path)) + 500


def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    whole = safetensors_bytes(GOOD | {"y": entry([3], 16, 28)}, bytes(28))
    path.write_bytes(whole)
    assert len(open_safetensors(path).tensors) == 2
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(SafetensorsError):
            open_safetensors(path)


@given(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 255)), min_size=1, max_size=4))
def test_mutated_files_load_or_are_refused(tmp_path_factory: Any, changes: list[tuple[int, int]]) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    data = bytearray(safetensors_bytes(GOOD | {"y": entry([3], 16, 28)}, bytes(28)))
    for position, value in changes:
        data[position % len(data)] = value
    path.write_bytes(data)
    try:
        file = open_safetensors(path)
        for info in file.tensors.values():
            assert info.offset + info.nbytes <= len(data)
            assert file.load(info.name).nbytes == info.nbytes
    except SafetensorsError:
        pass


def test_a_header_that_claims_much_allocates_little(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little") + b"{" * 64)
    tracemalloc.start()
    try:
        with pytest.raises(SafetensorsError):
            open_safetensors(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("change", [-4, 4])
def test_a_file_that_changes_after_opening_is_refused(change: int, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"x": np.zeros(100, "<f4")})
    file = open_safetensors(path)
    os.truncate(path, file.size + change)
    with pytest.raises(SafetensorsError, match=f"changed from {file.size} to {file.size + change} bytes"):
        file.load("x")


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SafetensorsError, match="is a directory: a regular file is needed"):
        open_safetensors(tmp_path)
    with pytest.raises(SafetensorsError, match="none: cannot be opened: No such file"):
        open_safetensors(tmp_path / "none")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs on this system")
def test_a_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(SafetensorsError, match="is a FIFO"):
        open_safetensors(tmp_path / "fifo")
