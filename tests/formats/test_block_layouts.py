"""How blocks decode: against the ``gguf`` package, and blocks put together by hand as ggml lays them out."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from support.random_blocks import random_blocks

from hotcold.formats.blocks import BLOCK_TYPES, BlockType, Tensor, ggml_type

#: Where the float16 scales and minima of a block lie.
HALVES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
    "IQ3_S": (0,), "IQ3_XXS": (0,), "IQ2_S": (0,), "IQ2_XS": (0,), "IQ2_XXS": (0,), "IQ1_S": (0,),
    "Q1_0": (0,), "Q2_0": (0,),
}  # fmt: skip
#: The package does not decode Q1_0 and Q2_0, which have tests of their own.
DECODED = [type for type in BLOCK_TYPES.values() if type.name not in ("Q1_0", "Q2_0")]
#: Zero, negative zero, denormal, smallest and largest normal, infinite, quiet and signalling NaN.
ODD_HALVES = (0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x7C01)


def packed(type: BlockType, data: bytes) -> Tensor:
    """One row of hand-written blocks."""
    return Tensor(
        type, (len(data) // type.nbytes * type.weights,), np.frombuffer(data, np.uint8).reshape(1, -1)
    )


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def same(actual: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    """Equal to the bit, except that any NaN is as good as another."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    np.testing.assert_array_equal(actual.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def check_against_package(tensor: Tensor) -> None:
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(tensor.data, gguf.GGMLQuantizationType[tensor.type.name])
    same(tensor.dequantise(), expected.reshape(tensor.shape))


@pytest.mark.parametrize("type", DECODED, ids=lambda type: type.name)
@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_decode_as_in_the_package(type: BlockType, seed: int) -> None:
    rows, columns = 64, 16 * type.weights
    data = np.random.default_rng(seed).integers(0, 256, (rows, type.row_bytes(columns)), np.uint8)
    check_against_package(Tensor(type, (rows, columns), data))


@pytest.mark.parametrize("type", DECODED, ids=lambda type: type.name)
@pytest.mark.parametrize("fill", [0x00, 0x0F, 0x77, 0x80, 0xF0, 0xFF])
def test_extreme_codes_and_odd_scales_decode_as_in_the_package(type: BlockType, fill: int) -> None:
    """IEEE arithmetic throughout, without a warning: infinity times code zero is NaN."""
    halves = HALVES.get(type.name, ())
    blocks = np.full((len(ODD_HALVES) ** len(halves), type.nbytes), fill, np.uint8)
    for at, bits in zip(halves, np.meshgrid(*[np.array(ODD_HALVES, "<u2")] * len(halves)), strict=True):
        blocks[:, at : at + 2] = bits.reshape(-1, 1).view(np.uint8)
    check_against_package(Tensor(type, (len(blocks), type.weights), blocks))


def test_every_exponent_of_mxfp4() -> None:
    """Powers of two from 2^-128, the smallest two denormal; 255 is no NaN in ggml."""
    exponents = np.arange(256, dtype=np.uint8)
    blocks = np.full((256, 17), 0x21, np.uint8)  # codes 1 and 2: a half and a whole
    blocks[:, 0] = exponents
    tensor = Tensor(BLOCK_TYPES["MXFP4"], (256, 32), blocks)
    check_against_package(tensor)
    expected = [[2.0 ** (e - 128), 2.0 ** (e - 127)] for e in range(255)] + [[2.0**127, np.inf]]
    assert tensor.dequantise()[:, [0, 16]].tolist() == expected


# --- by hand ---


def nibbles(codes: Sequence[int], width: int) -> bytes:
    """Runs of ``width`` bytes: the first codes in their low halves, the next in their high halves."""
    data = bytearray(len(codes) // 2)
    for i, code in enumerate(codes):
        run, at = divmod(i, 2 * width)
        data[run * width + at % width] |= (code & 15) << 4 * (at // width)
    return bytes(data)


def fifth_bits(codes: Sequence[int]) -> bytes:
    return sum((code >> 4 & 1) << i for i, code in enumerate(codes)).to_bytes(4, "little")


def six_bits(scales: Sequence[int], minima: Sequence[int]) -> bytes:
    """8 scales and 8 minima: the first four of each whole, the others spread over what is left."""
    data = bytearray(12)
    for j in range(4):
        data[j] = scales[j] | scales[j + 4] >> 4 << 6
        data[j + 4] = minima[j] | minima[j + 4] >> 4 << 6
        data[j + 8] = scales[j + 4] & 15 | (minima[j + 4] & 15) << 4
    return bytes(data)


CODES32 = [(7 * i + 3) % 32 for i in range(32)]  # every code of 5 bits once
RANDOM = np.random.default_rng(7)


def test_q8_0_layout() -> None:
    codes = [0, 1, -1, 127, -127, -128, *range(26)]
    tensor = packed(BLOCK_TYPES["Q8_0"], half(0.5) + struct.pack("32b", *codes))
    assert tensor.dequantise().tolist() == [code / 2 for code in codes]


@pytest.mark.parametrize(
    ("name", "bits", "minimum"), [("Q4_0", 4, None), ("Q4_1", 4, 3.0), ("Q5_0", 5, None), ("Q5_1", 5, -7.0)]
)
def test_layout_of_4_and_5_bits(name: str, bits: int, minimum: float | None) -> None:
    """Codes count from the minimum, or from minus half their range."""
    codes = [code % (1 << bits) for code in CODES32]
    data = half(-2.0) + (b"" if minimum is None else half(minimum))
    data += (fifth_bits(codes) if bits == 5 else b"") + nibbles(codes, 16)
    if minimum is None:
        expected = [-2.0 * (code - (1 << bits - 1)) for code in codes]
    else:
        expected = [-2.0 * code + minimum for code in codes]
    assert packed(BLOCK_TYPES[name], data).dequantise().tolist() == expected


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("IQ4_NL", (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)),
        ("MXFP4", (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)),
    ],
)
def test_layout_of_tables(name: str, values: Sequence[float]) -> None:
    codes = [code % 16 for code in CODES32]
    scale = half(4.0) if name == "IQ4_NL" else bytes([129])
    tensor = packed(BLOCK_TYPES[name], scale + nibbles(codes, 16))
    assert tensor.dequantise().tolist() == [4 * values[code] for code in codes]


@pytest.mark.parametrize(("name", "bits"), [("Q4_K", 4), ("Q5_K", 5)])
def test_layout_of_q4_k_and_q5_k(name: str, bits: int) -> None:
    for scales, minima in (
        (range(1, 9), range(40, 48)),
        (range(63, 55, -1), range(9)),
        ([0, 63] * 4, [63, 0] * 4),
    ):
        codes = RANDOM.integers(0, 1 << bits, 256).tolist()
        high = [sum((codes[32 * j + i] >> 4) << j for j in range(8)) for i in range(32)]
        data = half(0.5) + half(0.25) + six_bits(scales, minima)
        data += (bytes(high) if bits == 5 else b"") + nibbles(codes, 32)
        expected = [0.5 * scales[i // 32] * code - 0.25 * minima[i // 32] for i, code in enumerate(codes)]
        assert packed(BLOCK_TYPES[name], data).dequantise().tolist() == expected


def test_layout_of_q6_k() -> None:
    codes = RANDOM.integers(0, 64, 256).tolist()
    scales = [-128, 127, 0, -1, *range(1, 13)]
    high = bytearray(64)
    for i, code in enumerate(codes):
        high[i // 128 * 32 + i % 32] |= code >> 4 << 2 * (i % 128 // 32)
    data = nibbles(codes, 64) + bytes(high) + struct.pack("16b", *scales) + half(0.5)
    expected = [0.5 * scales[i // 16] * (code - 32) for i, code in enumerate(codes)]
    assert packed(BLOCK_TYPES["Q6_K"], data).dequantise().tolist() == expected


def test_f16_and_bf16_layout() -> None:
    assert packed(BLOCK_TYPES["F16"], bytes.fromhex("003c 00c0 0100 ff7b")).dequantise().tolist() == [
        1.0, -2.0, 2.0**-24, 65504.0,
    ]  # fmt: skip
    assert packed(BLOCK_TYPES["BF16"], bytes.fromhex("803f 00c0 0100")).dequantise().tolist() == [
        1.0, -2.0, 2.0**-133,
    ]  # fmt: skip


@pytest.mark.parametrize("name", HALVES)
def test_only_the_block_with_a_nan_scale_is_nan(name: str) -> None:
    type = ggml_type(name)
    data = np.full((3, type.nbytes), 0x35, np.uint8)
    at = HALVES[name][-1]
    data[1, at : at + 2] = np.frombuffer(half(float("nan")), np.uint8)
    values = packed(type, data.tobytes()).dequantise().reshape(3, -1)
    assert np.isnan(values).all(axis=1).tolist() == [False, True, False]
    assert np.isfinite(values[::2]).all()


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize("scale", [0.02, 1.0, 30.0])
def test_random_blocks_have_the_size_asked_for(name: str, scale: float) -> None:
    values = random_blocks(np.random.default_rng(3), name, 20, 1024, scale=scale).dequantise()
    assert 0.5 * scale < np.sqrt((values.astype(np.float64) ** 2).mean()) < 2 * scale
    assert abs(values.mean()) < 0.2 * scale


@pytest.mark.parametrize("type", BLOCK_TYPES.values(), ids=lambda type: type.name)
def test_what_is_finite(type: BlockType) -> None:
    """Each block alone: of random bytes, with every pair of odd scales, with extreme codes."""
    blocks = [np.random.default_rng(5).integers(0, 256, (300, type.nbytes), np.uint8)]
    for fill in (0, 0x7F, 0xFF):
        for first in ODD_HALVES:
            for second in ODD_HALVES:
                odd = np.full((1, type.nbytes), fill, np.uint8)
                for at, bits in zip(HALVES.get(type.name, ()), (first, second), strict=False):
                    odd[:, at : at + 2] = np.array([bits], "<u2").view(np.uint8)
                blocks.append(odd)
    exponents = np.full((256, type.nbytes), 0x77, np.uint8)
    exponents[:, -1] = range(256)  # of F32, F16 and BF16
    exponents[:, 0] = range(256)  # of MXFP4
    finite = set()
    for block in np.concatenate([*blocks, exponents]):
        tensor = Tensor(type, (type.weights,), block[None])
        assert tensor.is_finite() == np.isfinite(tensor.dequantise()).all()
        finite.add(tensor.is_finite())
    assert finite == ({True} if type.name == "NVFP4" else {False, True})  # its scales are always finite


def test_layout_of_q1_0() -> None:
    """A bit says whether a value is plus or minus the scale."""
    bits = RANDOM.integers(0, 2, 256)
    data = [half(d) + np.packbits(part, bitorder="little").tobytes()
            for d, part in zip((0.75, -2.0), bits.reshape(2, 128), strict=True)]  # fmt: skip
    expected = np.where(bits, 1, -1).reshape(2, 128) * np.array([[0.75], [-2.0]])
    assert packed(BLOCK_TYPES["Q1_0"], b"".join(data)).dequantise().tolist() == expected.reshape(-1).tolist()


def test_layout_of_q2_0() -> None:
    """Four neighbours share a byte, the first in its lowest bits; codes are -1, 0, 1 and 2."""
    codes = RANDOM.integers(0, 4, 128)
    packs = [sum(int(code) << 2 * i for i, code in enumerate(four)) for four in codes.reshape(-1, 4)]
    data = half(0.75) + bytes(packs[:16]) + half(-2.0) + bytes(packs[16:])
    expected = (codes.reshape(2, 64) - 1) * np.array([[0.75], [-2.0]])
    assert packed(BLOCK_TYPES["Q2_0"], data).dequantise().tolist() == expected.reshape(-1).tolist()


def test_every_scale_of_nvfp4() -> None:
    """Floats of 8 bits without sign; the one that would be a NaN counts as 0, as 0 does."""
    blocks = np.zeros((64, 36), np.uint8)
    blocks[:, :4] = np.arange(256).reshape(64, 4)
    blocks[:, 4:] = 0x72  # in each run 8 codes 2, a whole, then 8 codes 7, a six
    values = Tensor(BLOCK_TYPES["NVFP4"], (64, 64), blocks).dequantise().reshape(256, 2, 8)
    for code in range(256):
        exponent, fraction = code >> 3 & 15, code & 7
        size = (8 + fraction) * 2.0 ** (exponent - 10) if exponent else fraction * 2.0**-9
        scale = 0.0 if code in (0, 0x7F) else size
        assert values[code].tolist() == [[scale] * 8, [6 * scale] * 8]


def test_one_block_of_many_that_is_not_finite() -> None:
    tensor = random_blocks(np.random.default_rng(0), "Q8_0", 700, 4096)
    assert tensor.is_finite()
    tensor.data[690, 34 * 5 + 1] = 0x7C
    tensor.data[690, 34 * 5] = 0
    assert not tensor.is_finite()
