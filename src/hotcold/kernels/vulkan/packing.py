"""Weights in the layout of csrc/shaders/blocks.glsl: a file's blocks, rearranged into aligned words.

Codes, scales and the number of bytes stay the same (rows of a float type are padded with zeros to blocks of
32). Each type has up to four sections, each with all rows, in this order: codes (of 4 bits or whole bytes),
fifth and sixth bits, scales, and Q6_K's scales of 256 weights. Codes of 4 bits all have Q4_0's order: weights
0 to 15 of a block in the lower halves of its bytes, 16 to 31 in the upper halves.

Opened types take more bytes. Their codes become 4-bit indices into a table of values, and each 16 weights get
a float scale. Q2_K instead repeats all scales and minima for each 32 weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import BLOCK_TYPES, BlockType, BlockTypeError, Bytes, Floats, block_type
from hotcold.formats.fields import fields
from hotcold.formats.opened_blocks import FP4, IQ4_NL
from hotcold.formats.stored import AnyTensor, StoredTensor
from hotcold.kernels import _native

BLOCK = 32  #: weights of a block on the device, whatever the file's blocks are
CHUNKS = 32  #: most chunks of a row: the invocations that share one
UNIT = 16  #: bytes of neighbouring codes
CHUNK_BYTES = 8 << 20  #: of a tensor, packed at a time
PART_BYTES = 256 << 10  #: of a chunk: the fewest for a thread

#: Sections of rows: for each section ``[rows, ...]`` uint8.
Sections: TypeAlias = list[Bytes]


@dataclass(frozen=True)
class RowLayout:
    """Division of a row of ``columns`` weights, like ``layout_of()`` in blocks.glsl."""

    blocks: int
    chunk: int  #: blocks of a chunk
    chunks: int
    last: int  #: blocks of the last chunk

    @staticmethod
    def from_columns(columns: int) -> RowLayout:
        blocks = -(-columns // BLOCK)
        chunk = -(-blocks // CHUNKS)
        chunks = -(-blocks // chunk)
        return RowLayout(blocks, chunk, chunks, blocks - (chunks - 1) * chunk)

    def order(self, units: int = 1) -> npt.NDArray[np.intp]:
        """Returns the unit at each place of a row, in the file's numbering; a block has ``units``."""
        places = []
        for i in range(self.chunk):
            chunks = range(self.chunks if i < self.last else self.chunks - 1)
            blocks = [chunk * self.chunk + i for chunk in chunks]
            places += [block * units + unit for unit in range(units) for block in blocks]
        return np.array(places, np.intp)


@cache
def _order(columns: int, units: int) -> npt.NDArray[np.intp]:
    return RowLayout.from_columns(columns).order(units)


def holds(type: str) -> bool:
    """Returns whether the shaders read this block type."""
    return block_type(type).weights == 1 or type in _SECTIONS


def check_holds(type: BlockType) -> None:
    if not holds(type.name):
        kinds = ", ".join(name for name in BLOCK_TYPES if holds(name))
        raise BlockTypeError(f"a GPU does not compute with block type {type.name} yet, but with {kinds}")


def shader_type(type: BlockType) -> int:
    """Returns the number of a type in the shaders."""
    return _OPENED + _TABLE_OF[type.name] if type.name in _TABLE_OF else type.id


def held_bytes(type: BlockType, nbytes: int) -> int:
    """Returns bytes on a device of rows that have ``nbytes`` in a file."""
    if type.panels:
        return nbytes
    return nbytes // type.nbytes * sum(section_bytes(type, type.weights))


def section_bytes(type: BlockType, columns: int) -> tuple[int, ...]:
    """Returns bytes of a row in each section."""
    if type.weights == 1:
        return (RowLayout.from_columns(columns).blocks * BLOCK * type.nbytes,)
    data = np.zeros((1, type.row_bytes(columns)), np.uint8)
    return tuple(section.shape[1] for section in pack(type, data, columns))


def pack(type: BlockType, data: Bytes, columns: int, factors: Floats | None = None) -> Sections:
    """Packs rows of a file, ``[rows, row_bytes]``, with a factor for each as in :class:`Tensor`. Threads
    share many rows, except for types that are only moved: memory limits these types."""
    moved = type.weights == 1 or (type.panels and type.weights == BLOCK)
    count = 1 if moved else min(os.cpu_count() or 1, data.nbytes // PART_BYTES, len(data))
    if count < 2:
        return pack_rows(type, data, columns, factors)
    ends = [len(data) * (i + 1) // count for i in range(count)]
    parts = [slice(first, end) for first, end in zip((0, *ends), ends, strict=False)]

    def packed(part: slice) -> Sections:
        return pack_rows(type, data[part], columns, None if factors is None else factors[part])

    with ThreadPoolExecutor(count) as threads:
        return [np.concatenate(each) for each in zip(*threads.map(packed, parts), strict=True)]


def pack_rows(type: BlockType, data: Bytes, columns: int, factors: Floats | None = None) -> Sections:
    """Packs rows on one thread; the extension packs types that NumPy opens slowly."""
    if type.name in _OPENED_NATIVELY and factors is None and len(data):
        codes, scales = (np.empty((len(data), columns // BLOCK * n), np.uint8) for n in (UNIT, 8))
        _native.vulkan_open_rows(type.name, np.ascontiguousarray(data), codes, scales)
        return [codes, scales]
    return pack_plainly(type, data, columns, factors)


def pack_plainly(type: BlockType, data: Bytes, columns: int, factors: Floats | None = None) -> Sections:
    """Packs rows with NumPy: the specification of all types' layouts."""
    rows = len(data)
    if type.weights == 1:
        padded = np.zeros((rows, RowLayout.from_columns(columns).blocks * BLOCK * type.nbytes), np.uint8)
        padded[:, : data.shape[1]] = data
        return [_ordered(padded, columns, BLOCK * type.nbytes // UNIT, UNIT)]
    check_holds(type)
    split_blocks, size = _SECTIONS[type.name]
    parts = split_blocks(data.reshape(rows, -1, type.nbytes))
    if factors is not None:
        if type.open is None:
            raise BlockTypeError(f"a GPU does not multiply rows of block type {type.name}")
        parts[1] = (parts[1].view("<f4") * factors[:, None]).view(np.uint8)
    units = 2 if type.name == "Q8_0" else 1
    packed = [_ordered(parts[0], columns, units, UNIT)]
    packed += [_ordered(part, columns, 1, width) for part, width in zip(parts[1:], size, strict=True)]
    return packed


def _ordered(section: Bytes, columns: int, units: int, width: int) -> Bytes:
    """Permutes units of ``width`` bytes into the device's order; width 0 keeps shared bytes in order."""
    rows = np.ascontiguousarray(section).reshape(len(section), -1)
    if not width:
        return rows
    view = rows.view(f"V{width}") if width > 1 else rows
    return view.take(_order(columns, units), axis=1).view(np.uint8).reshape(rows.shape)


# --- the sections of each type; blocks [rows, blocks of the file, bytes] ---


def _split(*ends: int) -> Callable[[Bytes], Sections]:
    """Makes a function that cuts blocks at ``ends``: first the codes, then the other parts, last first."""

    def split_blocks(blocks: Bytes) -> Sections:
        parts = [blocks[:, :, ends[-1] :]]
        for first, end in sorted(zip((0, *ends), ends, strict=False), reverse=True):
            parts.append(blocks[:, :, first:end])
        return parts

    return split_blocks


def _halves(pairs: Bytes) -> Bytes:
    """Separates two blocks' codes, in the lower and upper halves of ``[..., 2, 16]``, into one each."""
    first, second = pairs[..., 0, :], pairs[..., 1, :]
    low = first & np.uint8(15) | second << np.uint8(4)
    high = first >> np.uint8(4) | second & np.uint8(240)
    return np.stack([low, high], axis=-2)


def _q4_k(blocks: Bytes) -> Sections:
    """Splits Q4_K and Q5_K blocks, with the scales of 256 weights unchanged."""
    rows, supers, _ = blocks.shape
    parts = [_halves(blocks[:, :, -128:].reshape(rows, supers, 4, 2, 16))]
    if blocks.shape[2] > 144:
        parts.append(_fifth_bits(blocks[:, :, 16:48]))
    return [*parts, blocks[:, :, :16]]


def _fifth_bits(bits: Bytes) -> Bytes:
    """Moves bit j of byte i of 32, from weight i of block j, to bit i of word j."""
    x = np.ascontiguousarray(bits).view("<u8")  # transposed 8 x 8 bits at a time, by swaps of bit blocks
    for shift, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0)):
        swapped = (x ^ x >> np.uint64(shift)) & np.uint64(mask)
        x = x ^ swapped ^ swapped << np.uint64(shift)
    return x.view(np.uint8).reshape(*bits.shape[:2], 4, 8).swapaxes(2, 3)


def _q6_k(blocks: Bytes) -> Sections:
    rows, supers, _ = blocks.shape
    # In 64 bytes, the lower halves are two blocks' codes, and the upper halves the next two blocks'.
    low = _halves(blocks[:, :, :128].reshape(rows, supers, 2, 2, 2, 16)).swapaxes(3, 4)
    # Word 4 h + s of 8 has two bits of each of four weights from 16 h + 4 s on, in four blocks.
    words = np.ascontiguousarray(blocks[:, :, 128:192]).view("<u4").reshape(-1, 8)
    columns = np.ascontiguousarray(words.T).reshape(2, 4, -1)  # NumPy is slow where the last axis is short
    high = np.empty((len(words), 4, 2), "<u4")
    for block in range(4):
        fields = columns >> np.uint32(2 * block) & np.uint32(0x03030303)
        for s in range(1, 4):
            fields[:, 0] |= fields[:, s] << np.uint32(2 * s)
        high[:, block] = fields[:, 0].T
    return [low, high.reshape(rows, -1).view(np.uint8), blocks[:, :, 192:208], blocks[:, :, 208:]]


# --- types that are opened ---

_OPENED = 64
_OPENED_NATIVELY = ("Q2_K", "Q3_K", "IQ4_XS")  # by csrc/vulkan/open_rows.cpp


def _plus_and_minus(*values: int) -> list[int]:
    padded = [*values, *[0] * (8 - len(values))]
    return [*padded, *(-value for value in padded)]


#: Values of 4-bit codes, like CODE_VALUES in blocks.glsl.
TABLES = np.array(
    [
        IQ4_NL,
        FP4,
        range(-8, 8),
        range(-15, 16, 2),
        _plus_and_minus(4, 12, 20, 28, 36, 44, 52, 62),
        _plus_and_minus(8, 25, 43),
        _plus_and_minus(1, 7, 9),
        range(16),
    ],
    np.int8,
)
_TABLE_OF = {
    "IQ4_XS": 0, "NVFP4": 1, "Q3_K": 2, "TQ1_0": 2, "TQ2_0": 2, "Q1_0": 2, "Q2_0": 2, "IQ3_S": 3,
    "IQ3_XXS": 4, "IQ2_S": 5, "IQ2_XS": 5, "IQ2_XXS": 5, "IQ1_M": 6, "IQ1_S": 6, "Q2_K": 7,
}  # fmt: skip


@cache
def _numbers(table: int) -> Bytes:
    """Returns the index of each value in a table, by the value's bits as a signed byte."""
    numbers = np.zeros(256, np.uint8)
    numbers[TABLES[table].view(np.uint8)] = np.arange(16)
    return numbers


def _opened(name: str, blocks: Bytes) -> Sections:
    """Returns indices of values, then two floats for each 32 weights."""
    type, rows = BLOCK_TYPES[name], len(blocks)
    assert type.open is not None
    with np.errstate(all="ignore"):
        scales, codes = type.open(blocks.reshape(-1, type.nbytes))
    numbers = _numbers(_TABLE_OF[name])[codes.view(np.uint8)].reshape(rows, -1, 2, BLOCK // 2)
    run = codes.shape[1] // scales.shape[1]
    floats = scales.repeat(run * 2 // BLOCK, axis=1).astype("<f4").reshape(rows, -1)
    return [numbers[:, :, 0] | numbers[:, :, 1] << np.uint8(4), floats.view(np.uint8)]


def _q2_k(blocks: Bytes) -> Sections:
    """Returns codes, then for each 32 weights two float16, two byte scales and two byte minima."""
    rows, supers, _ = blocks.shape
    codes = fields(blocks[:, :, 16:80].reshape(-1, 64), 2, 32).reshape(rows, -1, 2, BLOCK // 2)
    small = blocks[:, :, :16].reshape(rows, supers, 8, 2)
    halves = np.broadcast_to(blocks[:, :, None, 80:84], (rows, supers, 8, 4))
    scales = np.concatenate([halves, small & np.uint8(15), small >> np.uint8(4)], axis=-1)
    return [codes[:, :, 0] | codes[:, :, 1] << np.uint8(4), scales.reshape(rows, -1)]


#: Function that splits a type's blocks, and bytes per 32 weights of each section after the codes.
_SECTIONS: dict[str, tuple[Callable[[Bytes], Sections], tuple[int, ...]]] = {
    "Q8_0": (_split(2), (2,)),
    "Q4_0": (_split(2), (2,)),
    "IQ4_NL": (_split(2), (2,)),
    "Q4_1": (_split(4), (4,)),
    "Q5_0": (_split(2, 6), (4, 2)),
    "Q5_1": (_split(4, 8), (4, 4)),
    "MXFP4": (_split(1), (1,)),
    "Q4_K": (_q4_k, (0,)),
    "Q5_K": (_q4_k, (4, 0)),
    "Q6_K": (_q6_k, (8, 2, 0)),
    **{name: (partial(_opened, name), (8,)) for name in _TABLE_OF},
    "Q2_K": (_q2_k, (8,)),
}


# --- rows of a tensor, a chunk at a time ---


def row_chunks(tensor: AnyTensor, first: int, last: int) -> Iterator[tuple[int, Bytes]]:
    """Yields rows ``first`` to ``last`` of a tensor ``(O, I)`` in chunks: the number of a chunk's first row,
    and its data. Of a tensor in a file only one chunk is in memory at a time."""
    step = max(1, CHUNK_BYTES // max(1, tensor.nbytes // tensor.shape[0]))
    for start in range(first, last, step):
        yield start, _rows(tensor, start, min(start + step, last))


def _rows(tensor: AnyTensor, start: int, stop: int) -> Bytes:
    if not isinstance(tensor, StoredTensor):
        return tensor.data[start:stop]
    if tensor.chosen is None or tensor.by_column:
        offset = tensor.offset + start * tensor.row_bytes
        shape = (stop - start, *tensor.shape[1:])
        return replace(tensor, shape=shape, offset=offset, rows=stop - start).load().data
    chosen = tensor.chosen[start:stop]
    begin, end = int(chosen[0]), int(chosen[-1]) + 1
    columns = tensor.row_bytes // tensor.type.nbytes * tensor.type.weights
    offset = tensor.offset + begin * tensor.row_bytes
    span = replace(tensor, shape=(end - begin, columns), offset=offset, rows=end - begin, chosen=None)
    return span.load().take_rows(chosen - begin).data
