"""Tests how the ``vulkan`` backend rearranges a file's blocks before a device gets them
(kernels/vulkan/packing.py).

That shaders read it rightly, for every type, is seen on a device: test_vulkan_linear.py and the table."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.op_truth import random_tensor, rng
from support.vulkan.cases import TYPES

from hotcold.formats.blocks import BLOCK_TYPES, Tensor
from hotcold.formats.files import RegularFile
from hotcold.formats.stored import AnyTensor, StoredTensor
from hotcold.kernels import _native
from hotcold.kernels.vulkan import packing
from hotcold.kernels.vulkan.packing import RowLayout, pack, row_chunks, section_bytes

OPENED = [name for name in TYPES if not BLOCK_TYPES[name].panels]
SAME_BITS = [name for name in TYPES if name not in OPENED]
QUANTISED = [name for name in SAME_BITS if BLOCK_TYPES[name].weights > 1]


def ones(data: np.ndarray) -> int:
    return (
        int(np.bitwise_count(data).sum()) if hasattr(np, "bitwise_count") else int(np.unpackbits(data).sum())
    )


@pytest.mark.parametrize("type", SAME_BITS)
def test_no_bit_is_lost(type: str) -> None:
    """Bits change their places only, so as many are set as before, and no more bytes come out."""
    tensor = random_tensor(rng("bits", type), type, 5, 1280)
    sections = pack(tensor.type, tensor.data, 1280)
    assert [section.shape for section in sections] == [(5, size) for size in section_bytes(tensor.type, 1280)]
    assert sum(section.nbytes for section in sections) == tensor.nbytes
    assert sum(map(ones, sections)) == ones(tensor.data)


@pytest.mark.parametrize("type", QUANTISED)
def test_each_code_keeps_to_itself(type: str) -> None:
    """A bit of the file becomes one bit of a section, and no two the same one."""
    kind = BLOCK_TYPES[type]
    columns = kind.weights
    data = np.zeros((8 * kind.nbytes, kind.nbytes), np.uint8)
    bits = np.arange(len(data))
    data[bits, bits // 8] = 1 << (bits % 8)
    packed = np.hstack(pack(kind, data, columns))
    assert (np.unpackbits(packed, axis=1).sum(axis=1) == 1).all()
    assert len({row.tobytes() for row in packed}) == len(data)


@pytest.mark.parametrize("type", [name for name in OPENED if name != "Q2_K"])
def test_types_that_are_opened_keep_their_values(type: str) -> None:
    """A number of 4 bits in the type's table, times the scale of 16 weights: of one chunk, in order."""
    tensor = random_tensor(rng("opened", type), type, 5, 512)
    factors = np.array([1, 0.5, -3, 0, 2**-20], np.float32)
    table = packing.TABLES[packing.shader_type(tensor.type) - 64]
    for given in (None, factors):
        codes, scales = pack(tensor.type, tensor.data, 512, given)
        assert [codes.shape, scales.shape] == [(5, size) for size in section_bytes(tensor.type, 512)]
        pairs = codes.reshape(5, -1, 16)
        values = table[np.stack([pairs & 15, pairs >> 4], axis=-2)] * scales.view("<f4").reshape(5, -1, 2, 1)
        expected = replace(tensor, factors=given).dequantise()
        np.testing.assert_allclose(values.reshape(5, 512), expected, rtol=2e-7)


@pytest.mark.parametrize("columns", [256, 1280, 2048, 8448])
@pytest.mark.parametrize("type", packing._OPENED_NATIVELY)
def test_the_extension_opens_rows_as_numpy_does(type: str, columns: int) -> None:
    """Any bytes, so that scales are also denormal, infinite and NaN."""
    kind = BLOCK_TYPES[type]
    data = rng("native", type, columns).integers(0, 256, (7, kind.row_bytes(columns)), np.uint8)
    for own, plain in zip(
        packing.pack_rows(kind, data, columns), packing.pack_plainly(kind, data, columns), strict=True
    ):
        np.testing.assert_array_equal(own, plain)


def test_the_extension_refuses_other_rows() -> None:
    data, codes, scales = (np.zeros((2, n), np.uint8) for n in (110, 128, 64))
    for type, given, match in (
        ("Q4_0", (data, codes, scales), "choose Q2_K, Q3_K or IQ4_XS"),
        ("Q3_K", (data[:, 1:].copy(), codes, scales), "whole blocks of Q3_K"),
        ("Q3_K", (data, codes[:1], scales), "codes: expected at least 2 rows"),
        ("Q3_K", (data, codes, scales[:, 1:].copy()), "scales: expected at least 2 rows of 64"),
    ):
        with pytest.raises(ValueError, match=match):
            _native.vulkan_open_rows(type, *given)


@pytest.mark.parametrize("type", TYPES)
def test_threads_pack_parts_of_rows(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = random_tensor(rng("threads", type), type, 11, 512)
    factors = np.linspace(-1, 1, 11, dtype=np.float32) if type in OPENED and type != "Q2_K" else None
    expected = packing.pack_plainly(tensor.type, tensor.data, 512, factors)
    monkeypatch.setattr(packing, "PART_BYTES", 1)
    monkeypatch.setattr(packing.os, "cpu_count", lambda: 4)
    for own, plain in zip(pack(tensor.type, tensor.data, 512, factors), expected, strict=True):
        np.testing.assert_array_equal(own, plain)


def test_tables_are_those_of_the_shaders() -> None:
    source = (Path(__file__).parents[3] / "csrc/shaders/blocks.glsl").read_text()
    words = re.findall("0x[0-9a-f]{8}", source.partition("CODE_VALUES[32] =")[2].partition(";")[0])
    found = np.array([int(word, 16) for word in words], "<u4").view(np.int8)
    np.testing.assert_array_equal(found.reshape(-1, 16), packing.TABLES)


@pytest.mark.parametrize("columns", [1, 33])
def test_plain_rows_are_filled_up_with_zeros(columns: int) -> None:
    tensor = random_tensor(rng("plain"), "F16", 3, columns)
    (section,) = pack(tensor.type, tensor.data, columns)
    values = section.view("<f2").reshape(3, -1, 8)  # one or two interleaved blocks of 4 units
    blocks = -(-columns // 32)
    order = np.arange(4 * blocks).reshape(blocks, 4).T.reshape(-1) if blocks > 1 else np.arange(4)
    plain = np.zeros((3, 4 * blocks, 8), np.float16)
    plain.reshape(3, -1)[:, :columns] = tensor.dequantise()
    np.testing.assert_array_equal(values, plain[:, order])


@pytest.mark.parametrize("blocks", [1, 2, 31, 32, 33, 63, 64, 65, 100, 344])
def test_neighbouring_chunks_lie_side_by_side(blocks: int) -> None:
    """Block i of every chunk that has one, then block i + 1: what a group of invocations reads at a time."""
    layout = RowLayout.from_columns(32 * blocks)
    assert layout.chunk == -(-blocks // 32)
    chunks = [range(first, min(first + layout.chunk, blocks)) for first in range(0, blocks, layout.chunk)]
    assert len(chunks) == layout.chunks <= 32
    expected = [chunk[i] for i in range(layout.chunk) for chunk in chunks if i < len(chunk)]
    np.testing.assert_array_equal(layout.order(), expected)
    twice = [2 * block + unit for i in range(layout.chunk) for unit in range(2)
             for block in expected if block % layout.chunk == i]  # fmt: skip
    np.testing.assert_array_equal(layout.order(2), twice)


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Tensor, StoredTensor]:
    tensor = random_tensor(rng("stored"), "Q4_0", 50, 128)
    path = tmp_path / "weights"
    path.write_bytes(b"before" + tensor.data.tobytes() + b"after")
    file = RegularFile(path)
    return tensor, StoredTensor(
        tensor.type, tensor.shape, file, 6, 50, tensor.data.shape[1], lambda e: ValueError()
    )


def test_rows_come_in_chunks(stored: tuple[Tensor, StoredTensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors in memory and in a file come whole, or as chosen rows or columns."""
    tensor, in_file = stored
    monkeypatch.setattr(packing, "CHUNK_BYTES", 7 * tensor.data.shape[1])
    rows, columns = np.array([0, 3, 4, 30, 31, 47, 49]), np.array([0, 2])
    for expected, given in (
        (tensor, tensor),
        (tensor, in_file),
        (tensor.take_rows(slice(5, 40)), in_file.take_rows(slice(5, 40))),
        (tensor.take_rows(rows), in_file.take_rows(rows)),
        (tensor.take_columns(columns), in_file.take_columns(columns)),
    ):
        check_chunks(expected, given)


def check_chunks(expected: Tensor, given: AnyTensor) -> None:
    for first, last in ((0, len(expected.data)), (2, 6)):
        chunks = list(row_chunks(given, first, last))
        at = first
        for start, data in chunks:
            assert start == at and data.nbytes <= packing.CHUNK_BYTES
            at += len(data)
        np.testing.assert_array_equal(np.vstack([data for _, data in chunks]), expected.data[first:last])
