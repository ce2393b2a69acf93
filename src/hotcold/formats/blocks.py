"""Block-quantised tensors: packs float32 values into ggml's blocks, and unpacks them.

A row is a sequence of blocks; a block holds ``weights`` values in ``nbytes`` bytes, little-endian. Every type
is one entry of one table with a decode and an encode function, both over ``(blocks, ...)`` arrays. Layouts
are those of ggml's ``ggml-common.h``; encoding gives the same bytes as ggml and its ``gguf`` package. Types
that need a search for their scales are only read here: :mod:`hotcold.kernels.quantising` writes them."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hotcold.errors import UserError
from hotcold.formats import grid_blocks, opened_blocks
from hotcold.formats.fields import Bytes as Bytes
from hotcold.formats.fields import Floats as Floats
from hotcold.formats.fields import Opened
from hotcold.formats.fields import fields as _fields
from hotcold.formats.fields import half_at as _half

Index: TypeAlias = npt.NDArray[np.int64]
Decode: TypeAlias = Callable[[Bytes], Floats]
Encode: TypeAlias = Callable[[Floats], Bytes]
Open: TypeAlias = Callable[[Bytes], Opened]

_CHUNK = 1 << 18  # weights per pass, so that temporaries stay in the cache


class BlockTypeError(UserError):
    """Raised for an unsupported block type, or for values that a type cannot hold."""


@dataclass(frozen=True)
class BlockType:
    """A way of packing ``weights`` consecutive values of a row into ``nbytes`` bytes.

    ``decode`` turns ``(blocks, nbytes)`` uint8 into ``(blocks, weights)`` float32, ``encode`` the reverse;
    without ``decode`` the type can only be listed. ``name`` and ``id`` are ggml's. ``panels``: down by output
    can be stored in panels and summed by neuron; other types always need a dot over all neurons. ``open``
    returns the codes and scales of a type whose values are their products."""

    name: str
    id: int
    weights: int
    nbytes: int
    decode: Decode | None = field(default=None, repr=False, compare=False)
    encode: Encode | None = field(default=None, repr=False, compare=False)
    panels: bool = field(default=True, repr=False, compare=False)
    open: Open | None = field(default=None, repr=False, compare=False)

    @property
    def supported(self) -> bool:
        """True if Hotcold computes with this type; other types can only be listed."""
        return self.name in BLOCK_TYPES

    def data_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return math.prod(shape[:-1]), self.row_bytes(shape[-1])

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of ``n`` weights; ``ValueError`` unless ``n`` is a multiple of the block."""
        if n <= 0 or n % self.weights:
            needed = f"{self.name} needs a positive multiple of {self.weights}"
            raise BlockTypeError(f"row of {n} weights: {needed}")
        return n // self.weights * self.nbytes


@dataclass(frozen=True, eq=False)
class Tensor:
    """Weights as a file stores them. ``shape`` is in NumPy order, outermost dimension first; the last one is
    a row. ``data`` is C-contiguous uint8, ``(rows, row_bytes)`` with ``rows = prod(shape[:-1])``. ``factors``
    ``[rows]`` float32 scale each row's values."""

    type: BlockType
    shape: tuple[int, ...]
    data: Bytes
    factors: Floats | None = None

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"tensor shape {self.shape}: one or more dimensions, all positive, are needed")
        expected = self.type.data_shape(self.shape)
        if self.data.dtype != np.uint8 or self.data.shape != expected or not self.data.flags.c_contiguous:
            got = f"data of {self.type.name} tensor {self.shape} is {self.data.dtype} {self.data.shape}"
            raise ValueError(f"{got}: C-contiguous uint8 {expected} is needed")

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)

    @property
    def row_factors(self) -> Floats | None:
        """The factors of all rows (:class:`~hotcold.formats.stored.StoredTensor` may have fewer rows)."""
        return self.factors

    def pieces(self) -> Iterable[Bytes]:
        """Its bytes, in one piece."""
        return (self.data,)

    def load(self) -> "Tensor":
        """Returns this tensor, which is in memory (:class:`~hotcold.formats.stored.StoredTensor` is not)."""
        return self

    def take_rows(self, chosen: Index | slice) -> "Tensor":
        """A tensor of these rows; ``chosen`` has their indices."""
        data = self.data[chosen]
        factors = None if self.factors is None else self.factors[chosen]
        return Tensor(self.type, (len(data), *self.shape[1:]), data, factors)

    def take_columns(self, chosen: Index) -> "Tensor":
        """A tensor of these columns; ``chosen`` has their indices, counted in blocks of a row."""
        data = self.data.reshape(len(self.data), -1, self.type.nbytes)[:, chosen]
        shape = (*self.shape[:-1], len(chosen) * self.type.weights)
        return Tensor(self.type, shape, data.reshape(len(data), -1), self.factors)

    def is_finite(self) -> bool:
        """True if no value is NaN or infinite; checks only the scales of types that have scales."""
        step = max(1, _CHUNK // self.data.shape[1])
        return all(
            _is_finite(self.type, self.data[start : start + step]) for start in range(0, len(self.data), step)
        )

    def dequantise(self) -> Floats:
        """The values as a new float32 array of ``shape``. Non-finite scales give non-finite values.
        ``BlockTypeError``: the type can only be listed."""
        decode = self.type.decode
        if decode is None:
            raise BlockTypeError(f"cannot decode {self.type.name}: choose from {_names(decoded=True)}")
        blocks = self.data.reshape(-1, self.type.nbytes)
        values = np.empty((len(blocks), self.type.weights), np.float32)
        _code(decode, blocks, values, self.type)
        if self.factors is not None:
            values = values.reshape(len(self.data), -1) * self.factors[:, None]
        return values.reshape(self.shape)


def quantise(values: npt.ArrayLike, type: BlockType | str) -> Tensor:
    """Packs float32 values of any shape into blocks along the last axis, byte for byte as ggml does.

    ``BlockTypeError``: the type cannot be written, the last axis is not a multiple of its block, or a value
    does not fit: not finite in a type with scales, or finite but infinite after rounding."""
    kind = block_type(type)
    if kind.encode is None:
        choices = ", ".join(type.name for type in BLOCK_TYPES.values() if type.encode)
        raise BlockTypeError(f"cannot write {kind.name}: choose from {choices}")
    array = np.asarray(values, dtype=np.float32, order="C")
    if array.ndim == 0 or array.size == 0:
        raise BlockTypeError(f"cannot quantise an array of shape {array.shape}: it holds no rows")
    data = np.empty(kind.data_shape(array.shape), np.uint8)
    _code(kind.encode, array.reshape(-1, kind.weights), data.reshape(-1, kind.nbytes), kind)
    return Tensor(kind, array.shape, data)


def _code(code: Callable[[Any], Any], given: Any, out: Any, type: BlockType) -> None:
    step = max(1, _CHUNK // type.weights)
    with np.errstate(all="ignore"):
        for start in range(0, len(given), step):
            out[start : start + step] = code(given[start : start + step])


#: The exponent bits of each float type: a value is finite unless all of them are set.
_EXPONENTS = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}
#: Offsets of a block's float16 scales and minima. Their products with codes and small scales are finite.
_HALVES = {
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "Q1_0", "Q2_0", "IQ1_S"), (0,)),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "IQ4_XS": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}


def _is_finite(type: BlockType, rows: Bytes) -> bool:
    if type.name in _EXPONENTS:
        bits = rows.view(f"<u{type.nbytes}")
        mask = bits.dtype.type(_EXPONENTS[type.name])
        return not ((bits & mask) == mask).any()
    blocks = rows.reshape(-1, type.nbytes)
    if type.name in _HALVES:
        return all(bool(np.isfinite(_half(blocks, at)).all()) for at in _HALVES[type.name])
    decode = block_type(type).decode
    assert decode is not None  # block_type() refuses types without
    with np.errstate(all="ignore"):
        return bool(np.isfinite(decode(blocks)).all())


# --- float types: a block is one value ---


def _encode_f16(values: Floats) -> Bytes:
    halves = values.astype("<f2")
    _refuse_overflow(values, np.isinf(halves), "F16")
    return halves.view(np.uint8)


def _decode_bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _encode_bf16(values: Floats) -> Bytes:
    bits = values.view(np.uint32)
    # Round to nearest even; the sum cannot wrap, since only a NaN has larger bits than infinity.
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    quiet = (bits >> 16) | np.uint32(0x40)  # a NaN with its payload in the lost half must stay a NaN
    halves = np.where(np.isnan(values), quiet, rounded).astype("<u2")
    _refuse_overflow(values, (halves & 0x7FFF) == 0x7F80, "BF16")
    return halves.view(np.uint8)


def _refuse_overflow(values: Floats, infinite: npt.NDArray[np.bool_], name: str) -> None:
    for value in values[infinite & np.isfinite(values)]:
        raise BlockTypeError(f"value {value:g} does not fit in {name}; keep this tensor in F32")


# --- types of 32 weights: a float16 scale, for some a float16 minimum, then codes ---


def _encode_q8_0(values: Floats) -> Bytes:
    scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    codes = _round_half_away(values * _inverse(scales, "Q8_0"))
    return np.hstack([_to_half(scales), codes.astype(np.int8).view(np.uint8)])


def _codes(blocks: Bytes, bits: int) -> Bytes:
    """Codes of 4 bits; with 5 bits, the fifth bits of 32 codes are stored together."""
    codes = _fields(blocks[:, -16:], 4, 16)
    if bits == 5:
        codes |= np.unpackbits(blocks[:, -20:-16], axis=1, bitorder="little") << 4
    return codes


def _by_bits(bits: int, *, minimum: bool) -> tuple[Decode, Encode]:
    """Q4_0 and Q5_0, whose codes count from the middle of their range; or Q4_1 and Q5_1, with a minimum."""
    name, last, middle = f"Q{bits}_{int(minimum)}", np.float32((1 << bits) - 1), 1 << bits - 1

    def decode(blocks: Bytes) -> Floats:
        codes = _codes(blocks, bits)
        if minimum:
            return _half(blocks, 0) * codes + _half(blocks, 2)
        return _half(blocks, 0) * (codes.view(np.int8) - np.int8(middle))

    def encode(values: Floats) -> Bytes:
        if not minimum:
            farthest = np.take_along_axis(values, np.abs(values).argmax(axis=1, keepdims=True), axis=1)
            scales = farthest / np.float32(-middle)  # the farthest value gets code 0, whatever its sign
            codes = values * _inverse(scales, name) + np.float32(middle + 0.5)
            return np.hstack([_to_half(scales), _pack(np.minimum(codes, last), bits)])
        least = values.min(axis=1, keepdims=True)
        _check_scales(least, name)
        scales = (values.max(axis=1, keepdims=True) - least) / last
        codes = (values - least) * _inverse(scales, name) + np.float32(0.5)
        return np.hstack([_to_half(scales), _to_half(least), _pack(np.minimum(codes, last), bits)])

    return decode, encode


def _pack(numbers: npt.NDArray[Any], bits: int) -> Bytes:
    codes = numbers.astype(np.uint8)
    low: Bytes = codes[:, :16] & np.uint8(15) | codes[:, 16:] << np.uint8(4)
    if bits == 4:
        return low
    return np.hstack([np.packbits(codes >> 4, axis=1, bitorder="little"), low])


def _to_half(column: Floats) -> Bytes:
    return column.astype("<f2").view(np.uint8)


def _inverse(scales: Floats, name: str) -> Floats:
    """1 / scale, and 0 where the scale is too small to have a float32 inverse (its float16 is 0 as well)."""
    _check_scales(scales, name)
    inverse = np.float32(1) / scales
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _check_scales(scales: Floats, name: str, bound: float = 65520.0) -> None:  # float16 rounds it to infinity
    worst = float(np.abs(scales).max())
    if not worst < bound:  # true for NaN, too
        raise BlockTypeError(f"block scale {worst:g} does not fit in {name}: less than {bound:g} is needed")


def _round_half_away(values: Floats) -> Floats:
    """C's ``roundf`` (NumPy rounds to even). Adding the float below 0.5 cannot carry 0.49999997 to 1."""
    return np.trunc(values + np.copysign(np.nextafter(np.float32(0.5), np.float32(0)), values))


# --- types of 32 weights whose codes are indices into a table ---

_IQ4_NL, _MXFP4 = (table.astype(np.float32) for table in (opened_blocks.IQ4_NL, opened_blocks.FP4))


def _encode_mxfp4(values: Floats) -> Bytes:
    largest = np.abs(values).max(axis=1, keepdims=True)
    _check_scales(largest, "MXFP4", math.inf)
    exponents = np.maximum(np.floor(np.log2(largest)) + 125, 0).astype(np.uint8)
    errors = np.abs(_half_power(exponents)[:, :, None] * _MXFP4 - values[:, :, None])
    return np.hstack([exponents, _pack(errors.argmin(axis=2), 4)])


def _half_power(blocks: Bytes) -> Floats:
    """Half of 2^(first byte - 127), since the table has doubled values; the two smallest are denormal."""
    wide = blocks[:, :1].astype(np.uint32)
    return np.where(wide < 2, np.uint32(1 << 21) << wide, wide - 1 << 23).view(np.float32)


# --- types of 256 weights: float16 scales of 8 or 16 small integer scales ---


def _decode_q4_k(blocks: Bytes) -> Floats:
    """Q4_K, and Q5_K with 32 more bytes of fifth bits: 8 groups, each with scale and minimum of 6 bits."""
    low, high, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.hstack([low & 63, mixed & 15 | low >> 2 & 48]) * _half(blocks, 0)
    minima = np.hstack([high & 63, mixed >> 4 | high >> 2 & 48]) * _half(blocks, 2)
    codes = _fields(blocks[:, -128:], 4, 32)
    if blocks.shape[1] > 144:
        codes |= _fields(blocks[:, 16:48], 1, 32) << 4
    values = scales[:, :, None] * codes.reshape(-1, 8, 32) - minima[:, :, None]
    return values.reshape(-1, 256)


def _decode_q6_k(blocks: Bytes) -> Floats:
    codes = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    values = scales[:, :, None] * (codes.view(np.int8) - np.int8(32)).reshape(-1, 16, 16)
    return values.reshape(-1, 256)


def _decode_q2_k(blocks: Bytes) -> Floats:
    """16 groups, each with a scale and a minimum of 4 bits in one byte."""
    scales: Floats = _half(blocks, 80) * (blocks[:, :16] & 15)
    minima: Floats = _half(blocks, 82) * (blocks[:, :16] >> 4)
    codes = _fields(blocks[:, 16:80], 2, 32).reshape(-1, 16, 16)
    values: Floats = scales[:, :, None] * codes - minima[:, :, None]
    return values.reshape(-1, 256)


def _times(open: Open) -> Decode:
    """Decodes blocks that ``open`` opens."""

    def decode(blocks: Bytes) -> Floats:
        scales, codes = open(blocks)
        values: Floats = scales[:, :, None] * codes.reshape(*scales.shape, -1)
        return values.reshape(codes.shape)

    return decode


# --- the tables ---

#: Types that Hotcold computes with, by name.
BLOCK_TYPES: dict[str, BlockType] = {
    type.name: type
    for type in (
        BlockType("F32", 0, 1, 4, lambda b: b.view("<f4"), lambda x: x.astype("<f4").view(np.uint8)),
        BlockType("F16", 1, 1, 2, lambda b: b.view("<f2").astype(np.float32), _encode_f16),
        BlockType("BF16", 30, 1, 2, _decode_bf16, _encode_bf16),
        BlockType("Q8_0", 8, 32, 34, lambda b: _half(b, 0) * b[:, 2:].view(np.int8), _encode_q8_0),
        BlockType("Q4_0", 2, 32, 18, *_by_bits(4, minimum=False)),
        BlockType("Q4_1", 3, 32, 20, *_by_bits(4, minimum=True)),
        BlockType("Q5_0", 6, 32, 22, *_by_bits(5, minimum=False)),
        BlockType("Q5_1", 7, 32, 24, *_by_bits(5, minimum=True)),
        BlockType("Q4_K", 12, 256, 144, _decode_q4_k),
        BlockType("Q5_K", 13, 256, 176, _decode_q4_k),
        BlockType("Q6_K", 14, 256, 210, _decode_q6_k),
        BlockType("IQ4_NL", 20, 32, 18, lambda b: _half(b, 0) * _IQ4_NL[_codes(b, 4)]),
        BlockType("MXFP4", 39, 32, 17, lambda b: _half_power(b) * _MXFP4[_codes(b, 4)], _encode_mxfp4),
        BlockType("Q2_K", 10, 256, 84, _decode_q2_k, panels=False),
        *(
            BlockType(*row[:-1], _times(row[-1]), panels=False, open=row[-1])
            for row in (
                ("Q3_K", 11, 256, 110, opened_blocks.open_q3_k),
                ("IQ4_XS", 23, 256, 136, opened_blocks.open_iq4_xs),
                ("IQ3_S", 21, 256, 110, grid_blocks.open_iq3_s),
                ("IQ3_XXS", 18, 256, 98, grid_blocks.open_iq3_xxs),
                ("IQ2_S", 22, 256, 82, grid_blocks.open_iq2_s),
                ("IQ2_XS", 17, 256, 74, grid_blocks.open_iq2_xs),
                ("IQ2_XXS", 16, 256, 66, grid_blocks.open_iq2_xxs),
                ("IQ1_M", 29, 256, 56, grid_blocks.open_iq1_m),
                ("IQ1_S", 19, 256, 50, grid_blocks.open_iq1_s),
                ("TQ2_0", 35, 256, 66, opened_blocks.open_tq2_0),
                ("TQ1_0", 34, 256, 54, opened_blocks.open_tq1_0),
                ("NVFP4", 40, 64, 36, opened_blocks.open_nvfp4),
                ("Q2_0", 42, 64, 18, opened_blocks.open_q2_0),
                ("Q1_0", 41, 128, 18, opened_blocks.open_q1_0),
            )
        ),
    )
}

#: All types of ggml by id. Rows (name, id, weights, bytes of a block) are types that can only be listed.
GGML_TYPES: dict[int, BlockType] = {type.id: type for type in BLOCK_TYPES.values()} | {
    id: BlockType(name, id, weights, nbytes)
    for name, id, weights, nbytes in (
        ("Q8_1", 9, 32, 36), ("Q8_K", 15, 256, 292), ("I8", 24, 1, 1), ("I16", 25, 1, 2), ("I32", 26, 1, 4),
        ("I64", 27, 1, 8), ("F64", 28, 1, 8),
    )
}  # fmt: skip


def _names(*, decoded: bool) -> str:
    return ", ".join(type.name for type in GGML_TYPES.values() if type.supported or (decoded and type.decode))


def ggml_type(name_or_id: BlockType | str | int) -> BlockType:
    """The ggml type with this name or id, supported or not. ``BlockTypeError``: there is none."""
    for type in GGML_TYPES.values():
        if name_or_id in (type, type.name, type.id):
            return type
    raise BlockTypeError(f"block type {name_or_id!r} does not exist: choose from {_names(decoded=True)}")


def block_type(name_or_id: BlockType | str | int) -> BlockType:
    """The supported type with this name or ggml id. ``BlockTypeError``: it is not supported."""
    if isinstance(name_or_id, BlockType):
        name_or_id = name_or_id.id
    known = BLOCK_TYPES.get(name_or_id) if isinstance(name_or_id, str) else GGML_TYPES.get(name_or_id)
    if known is None or not known.supported:
        got = known.name if known else repr(name_or_id)
        raise BlockTypeError(f"block type {got} is not supported: choose from {', '.join(BLOCK_TYPES)}")
    return known
