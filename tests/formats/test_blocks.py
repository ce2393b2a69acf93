"""Block types against the ``gguf`` package and against blocks written by hand."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from support.awkward_rows import awkward_rows

from hotcold.formats.blocks import (
    BLOCK_TYPES,
    GGML_TYPES,
    BlockType,
    BlockTypeError,
    Tensor,
    block_type,
    ggml_type,
    quantise,
)

NAMES = [type.name for type in BLOCK_TYPES.values() if type.encode]
SCALED = [name for name in NAMES if BLOCK_TYPES[name].weights > 1]


def oracle(
    values: npt.NDArray[np.float32], name: str
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """The package's bytes and what it decodes them to."""
    type = gguf.GGMLQuantizationType[name]
    data = gguf.quants.quantize(values, type)
    return data.view(np.uint8), gguf.quants.dequantize(data, type)


def check(values: npt.NDArray[np.float32], name: str) -> None:
    tensor = quantise(values, name)
    data, decoded = oracle(values, name)
    assert tensor.shape == values.shape and tensor.type.name == name
    np.testing.assert_array_equal(tensor.data, data.reshape(tensor.data.shape))
    np.testing.assert_array_equal(tensor.dequantise().view(np.uint32), decoded.view(np.uint32))


# --- against the package ---


# The package still has Q8_1's size of 2023; the type is of activations and never in files. Its releases do
# not know Q2_0 yet (llama.cpp's ggml.h has it as 42, blocks of 64 weights).
@pytest.mark.parametrize(
    "type",
    [type for type in GGML_TYPES.values() if type.name not in ("Q8_1", "Q2_0")],
    ids=lambda t: t.name,
)
def test_sizes_and_numbers_are_ggmls(type: BlockType) -> None:
    known = gguf.GGMLQuantizationType(type.id)
    assert known.name == type.name
    assert gguf.GGML_QUANT_SIZES[known] == (type.weights, type.nbytes)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(32,), (1, 64), (7, 96), (3, 5, 32), (2, 2, 3, 32), (300, 1024)], ids=str)
def test_quantise_and_dequantise_equal_the_package(name: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(shape))
    # Rows of very different size, as weights and outliers are; the last shape spans several chunks.
    scale = 10.0 ** rng.uniform(-6, 3, (*shape[:-1], 1))
    check((rng.standard_normal(shape) * scale).astype(np.float32), name)


@pytest.mark.parametrize("name", NAMES)
def test_special_blocks_equal_the_package(name: str) -> None:
    tie = np.arange(32, dtype=np.float32) - 16
    blocks = [
        np.zeros(32), -np.zeros(32), np.full(32, 1.0), np.full(32, -1.0), tie, tie / 2, tie / 127, -tie / 2,
        np.where(np.arange(32) % 2, 3.0, -3.0), np.eye(32)[5], -np.eye(32)[31], np.full(32, 1e-7),
    ]  # fmt: skip
    check(np.array(blocks, np.float32), name)


@pytest.mark.parametrize("name", NAMES)
def test_any_row_equals_the_package(name: str) -> None:
    """Except blocks with values for which the package makes a scale out of range, or none."""
    rows = awkward_rows(4000)
    sizes = np.abs(rows)
    usual = ((sizes == 0) | (sizes > 1e-30) & (sizes <= 2.0**15)).all(axis=1)
    assert usual.sum() > 1000
    check(rows[usual], name)


def test_bf16_of_every_kind_of_bits_equals_the_package() -> None:
    high = np.arange(0, 1 << 16, 7, dtype=np.uint32)
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = ((high << 16) | low).view(np.float32)
        values = values[np.abs(values) < 3.38e38]  # finite, and finite after rounding
        check(values.reshape(1, -1), "BF16")


# --- rounding ---


def test_q8_0_rounds_half_away_from_zero() -> None:
    """As C's roundf, with a scale of exactly 1; the float below 0.5 is where adding 0.5 goes wrong."""
    below = float(np.nextafter(np.float32(0.5), np.float32(0)))
    pairs = [
        (0.5, 1),
        (-0.5, -1),
        (1.5, 2),
        (2.5, 3),
        (-2.5, -3),
        (below, 0),
        (-below, 0),
        (126.5, 127),
        (0.49, 0),
    ]
    values = np.zeros((1, 32), np.float32)
    values[0, 0] = 127
    values[0, 1 : len(pairs) + 1] = [value for value, _ in pairs]
    codes = quantise(values, "Q8_0").data[0, 2:].view(np.int8)
    assert codes[: len(pairs) + 1].tolist() == [127, *(code for _, code in pairs)]


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("Q8_0", 0.5 / 127),
        ("Q4_0", 1 / 8),
        ("Q4_1", 1 / 15),
        ("Q5_0", 1 / 16),
        ("Q5_1", 1 / 31),
        ("MXFP4", 1 / 3),
    ],
)
def test_the_error_is_at_most_a_code_of_the_largest(name: str, share: float) -> None:
    values = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
    error = np.abs(quantise(values, name).dequantise() - values).reshape(64, 8, 32).max(axis=2)
    assert (error <= (share + 2**-10) * np.abs(values).reshape(64, 8, 32).max(axis=2)).all()


@pytest.mark.parametrize("name", SCALED)
def test_values_too_small_for_a_scale_become_zero(name: str) -> None:
    tiny = np.full((1, 32), 1e-44, np.float32)  # its scale has no float32 inverse
    assert (quantise(tiny, name).dequantise() == 0).all()


def test_nan_and_infinity_survive_in_float_types() -> None:
    hidden = np.array([0x7F800001], np.uint32).view(np.float32)[0]  # a NaN whose payload BF16 cuts off
    values = np.array([[np.nan, np.inf, -np.inf, hidden]], np.float32)
    for name in ("F32", "F16", "BF16"):
        np.testing.assert_array_equal(
            quantise(values, name).dequantise(), [[np.nan, np.inf, -np.inf, np.nan]]
        )


# --- refusals ---


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38])
@pytest.mark.parametrize("name", SCALED)
def test_values_without_a_scale_are_refused(name: str, bad: float) -> None:
    values = np.ones((3, 64), np.float32)
    values[1, 40] = bad
    if name == "MXFP4" and np.isfinite(bad):
        return  # its scales are powers of two as large as float32's
    with pytest.raises(BlockTypeError, match=rf"scale .* does not fit in {name}"):
        quantise(values, name)


@pytest.mark.parametrize(("name", "value"), [("F16", 65520.0), ("F16", -1e6), ("BF16", 3.4e38)])
def test_a_finite_value_never_becomes_infinite(name: str, value: float) -> None:
    with pytest.raises(BlockTypeError, match=rf"value .* does not fit in {name}"):
        quantise(np.array([[1.0, value]]), name)


@pytest.mark.parametrize("type", ["Q8_K", "I32", "Q8_1", "q8_0", "", 15, 31, 255, -1])
def test_an_unsupported_type_is_named_with_those_supported(type: str | int) -> None:
    with pytest.raises(BlockTypeError) as caught:
        block_type(type)
    name = {15: "Q8_K"}.get(type, str(type))  # type: ignore[call-overload]
    assert name in str(caught.value)
    assert all(supported in str(caught.value) for supported in BLOCK_TYPES)
    with pytest.raises(BlockTypeError):
        quantise(np.ones((1, 256)), type)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_a_type_that_is_only_read_says_which_are_written(name: str) -> None:
    with pytest.raises(BlockTypeError, match=rf"cannot write {name}: choose from F32, .*, MXFP4$"):
        quantise(np.ones((1, 256)), name)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_types_are_found_by_name_number_and_themselves(name: str) -> None:
    type = BLOCK_TYPES[name]
    assert block_type(name) is type and block_type(type.id) is type and block_type(type) is type


@pytest.mark.parametrize("type", GGML_TYPES.values(), ids=lambda type: type.name)
def test_types_that_do_not_run_are_found_too(type: BlockType) -> None:
    assert ggml_type(type.name) is type and ggml_type(type.id) is type and ggml_type(type) is type
    assert type.supported == (type.name in BLOCK_TYPES)


@pytest.mark.parametrize("type", ["q4_0", "", 31, -1])
def test_a_type_that_ggml_lacks_is_named(type: str | int) -> None:
    with pytest.raises(BlockTypeError, match=r"does not exist: choose from F32, .*, Q2_K, "):
        ggml_type(type)


def test_a_type_that_is_only_listed_is_not_decoded() -> None:
    tensor = Tensor(ggml_type("Q8_K"), (256,), np.zeros((1, 292), np.uint8))
    with pytest.raises(BlockTypeError, match=r"cannot decode Q8_K: choose from F32, .*, Q1_0$"):
        tensor.dequantise()


@pytest.mark.parametrize(("name", "n"), [("Q8_0", 48), ("Q4_0", 31), ("Q8_0", 0), ("F32", 0), ("F16", -2)])
def test_rows_are_whole_blocks(name: str, n: int) -> None:
    with pytest.raises(BlockTypeError, match=f"row of {n} weights: {name} needs a positive multiple of"):
        BLOCK_TYPES[name].row_bytes(n)


def test_row_bytes() -> None:
    names = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
    assert [BLOCK_TYPES[name].row_bytes(4096) for name in names] == [
        16384, 8192, 8192, 4352, 2304, 2304, 3360,
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (0, 32)], ids=str)
def test_nothing_cannot_be_quantised(shape: tuple[int, ...]) -> None:
    with pytest.raises(BlockTypeError, match="holds no rows"):
        quantise(np.zeros(shape), "F32")


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ((), np.zeros((1, 4), np.uint8)),
        ((2, 0), np.zeros((2, 0), np.uint8)),
        ((2, 32), np.zeros((2, 33), np.uint8)),
        ((2, 32), np.zeros((1, 68), np.uint8)),
        ((2, 32), np.zeros(68, np.uint8)),
        ((2, 32), np.zeros((2, 34), np.int8)),
        ((2, 32), np.zeros((34, 2), np.uint8).T),
        ((2, 32), np.zeros((2, 68), np.uint8)[:, ::2]),
    ],
    ids=str,
)
def test_tensor_data_must_be_exactly_right(shape: tuple[int, ...], data: npt.NDArray[np.uint8]) -> None:
    with pytest.raises(ValueError, match=r"is needed|are needed"):
        Tensor(BLOCK_TYPES["Q8_0"], shape, data)


def test_dequantise_gives_new_memory() -> None:
    tensor = quantise(np.ones((2, 32)), "F32")
    tensor.dequantise()[:] = 5
    assert (tensor.dequantise() == 1).all()
    assert tensor.nbytes == 256
