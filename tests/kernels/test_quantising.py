"""Blocks made of floats: bytes of the ``gguf`` package, errors of llama.cpp's quantiser, and odd values."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from support.awkward_rows import awkward_rows
from support.weight_kinds import (
    KINDS,
    error_left,
    importance,
    sized_error_left,
    weights_of,
    weights_of_smollm2,
)

from hotcold.errors import UserError
from hotcold.formats.blocks import BlockType, BlockTypeError, Tensor, ggml_type, quantise
from hotcold.kernels.instruction_sets import supported_isas
from hotcold.kernels.quantising import quantise_rows, written_types

Floats = npt.NDArray[np.float32]
TYPES = written_types()
#: Types that the package writes, and so does the rule; MXFP4 and the others search where importance is given.
RULED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "TQ1_0", "TQ2_0")
SCALED = [type for type in TYPES if type.weights > 1]

any_type = pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
scaled_type = pytest.mark.parametrize("type", SCALED, ids=lambda type: type.name)


def values_of(kind: str, rows: int, n: int) -> Floats:
    random = np.random.default_rng(len(kind))
    values = random.standard_normal((rows, n))
    if kind == "heavy":
        values = random.standard_t(2.5, (rows, n))
    if kind == "outliers":
        values[random.random((rows, n)) < 0.01] *= 20
    return (values * 10.0 ** random.uniform(-3, 2, (rows, 1))).astype(np.float32)


# --- bytes that follow from a rule ---


@pytest.mark.parametrize("name", RULED)
@pytest.mark.parametrize("kind", ["normal", "heavy", "outliers"])
def test_bytes_are_the_packages(name: str, kind: str) -> None:
    values = values_of(kind, 33, 1024)
    expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name]).view(np.uint8)
    np.testing.assert_array_equal(quantise_rows(values, name), expected.reshape(33, -1))


@pytest.mark.parametrize("name", [name for name in RULED if not name.startswith("TQ")])
def test_any_block_is_what_the_specification_writes(name: str) -> None:
    """Ties, denormals, zeros of either sign, values that no scale holds: also where that refuses them."""
    written = 0
    for values in awkward_rows(120)[:, None]:
        try:
            expected = quantise(values, name).data
        except BlockTypeError:
            with pytest.raises(BlockTypeError, match=f"does not fit in {name}"):
                quantise_rows(values, name)
        else:
            np.testing.assert_array_equal(quantise_rows(values, name), expected)
            written += 1
    assert written > 60


# --- errors ---

GOLDENS = json.loads((Path(__file__).parents[1] / "data/quantising_goldens.json").read_text(encoding="utf-8"))
AS_MUCH = 1.001


def check_errors(type: BlockType, kind: str, values: Floats) -> None:
    for weights, theirs in zip((None, importance()), GOLDENS["errors"][type.name][kind], strict=True):
        ours = sized_error_left(type, quantise_rows(values, type, weights), values, weights)
        assert ours <= AS_MUCH * theirs, f"{kind}{'' if weights is None else ', weighted'}"


@scaled_type
def test_errors_are_not_larger_than_llama_cpps(type: BlockType) -> None:
    for kind in KINDS:
        check_errors(type, kind, weights_of(kind))


@scaled_type
def test_errors_of_a_models_weights_are_not_larger_than_llama_cpps(type: BlockType, smollm2: Path) -> None:
    for name, values in weights_of_smollm2(smollm2).items():
        check_errors(type, name, values)


@scaled_type
def test_importance_lowers_the_error_that_it_weighs(type: BlockType) -> None:
    values, weights = weights_of("heavy"), importance()
    with_it, without = (quantise_rows(values, type, each) for each in (weights, None))
    errors = [error_left(type, packed, values, weights) for packed in (with_it, without)]
    if type.name in ("Q8_0", "TQ1_0", "TQ2_0"):  # follow their rule
        np.testing.assert_array_equal(with_it, without)
    else:
        assert errors[0] < 0.99 * errors[1]


@pytest.mark.parametrize("kind", ["normal", "heavy", "uniform"])
@pytest.mark.parametrize("factor", [0.01, 1.0, 1000.0])
def test_weights_of_few_bits_keep_their_size(kind: str, factor: float) -> None:
    """The least squared error makes those of Q2_K 3 % smaller."""
    values = weights_of(kind) * np.float32(factor)
    for weights in (None, importance()):
        packed = Tensor(ggml_type("Q2_K"), values.shape, quantise_rows(values, "Q2_K", weights)).dequantise()
        counted = values.astype(np.float64) if weights is None else values * weights.astype(np.float64)
        ratios = (counted * packed).sum(axis=1) / (counted * values).sum(axis=1)
        assert np.abs(ratios - 1).max() < 0.005


# --- whatever is searched for ---


@any_type
def test_threads_do_not_matter(type: BlockType) -> None:
    values = values_of("heavy", 37, 512)
    for weights in (None, importance()):
        one, two, three = (quantise_rows(values, type, weights, threads=n) for n in (1, 2, 3))
        np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(one, three)


@any_type
def test_the_instruction_set_does_not_matter(type: BlockType, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.vstack([values_of("heavy", 9, 512), values_of("outliers", 9, 512)])
    for weights in (None, importance()):
        found = []
        for isa in ("", supported_isas()[-1]):
            monkeypatch.setenv("HOTCOLD_ISA", isa)
            found.append(quantise_rows(values, type, weights))
        np.testing.assert_array_equal(*found)


@any_type
def test_a_row_is_quantised_by_itself(type: BlockType) -> None:
    """Blocks of 32 weights go eight at a time, also where fewer are left."""
    values = values_of("normal", 5, 256)
    whole = quantise_rows(values, type, np.ones(256))
    for n in (256,) if type.weights == 256 else (32, 96, 256):
        for row in range(5):
            alone = quantise_rows(values[row : row + 1, :n], type, np.ones(n))
            np.testing.assert_array_equal(alone[0], whole[row, : alone.shape[1]])


# --- refusals ---


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@scaled_type
def test_values_without_a_scale_are_refused(type: BlockType, bad: float) -> None:
    values = np.ones((3, 512), np.float32)
    values[1, 300] = bad
    if type.name == "MXFP4" and np.isfinite(bad):
        return  # its scales are powers of two as large as float32's
    for weights in (None, np.ones(512)):
        with pytest.raises(BlockTypeError, match=rf"^block scale .* does not fit in {type.name}: less than"):
            quantise_rows(values, type, weights)


@scaled_type
def test_rows_are_whole_blocks(type: BlockType) -> None:
    with pytest.raises(BlockTypeError, match=rf"row of 48 weights: {type.name} needs a positive multiple"):
        quantise_rows(np.ones((2, 48)), type)


@pytest.mark.parametrize("name", ["Q8_K", "IQ2_XXS", "I32"])
def test_a_type_that_is_not_written_says_which_are(name: str) -> None:
    with pytest.raises(BlockTypeError, match=rf"^cannot write {name}: choose from F32, .*, TQ1_0$"):
        quantise_rows(np.ones((1, 256)), name)


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("Q4_0", 65504 * 8),
        ("Q5_1", 65504),
        ("IQ4_NL", 65504 * 127),
        ("Q4_K", 65504 * 63),
        ("Q6_K", 65504 * 32 * 128),
        ("IQ4_XS", 65504 * 127 * 32),
    ],
)
def test_values_as_large_as_any_scale_allows_are_written(name: str, largest: int) -> None:
    """A float16 scale is never rounded up to infinity, nor refused where a smaller one nearly serves."""
    type, far = ggml_type(name), 2.0**-20
    values = weights_of("uniform") * np.float32(0.9995 * largest)
    for weights in (None, importance()):
        left = error_left(type, quantise_rows(values, type, weights), values, None)
        small = values * np.float32(far)
        expected = error_left(type, quantise_rows(small, type, weights), small, None) / far
        assert left < 1.1 * expected


def test_columns_that_count_nothing_do_no_harm() -> None:
    """Their codes still make sense, and all zeros are no importance at all."""
    values, weights = weights_of("normal"), importance()
    weights[::2] = 0
    for name in ("Q4_K", "Q6_K", "Q4_1", "IQ4_NL"):
        type = ggml_type(name)
        assert error_left(type, quantise_rows(values, type, weights), values, None) < 0.5
        whole = quantise_rows(values, type, np.zeros(512))
        np.testing.assert_array_equal(whole, quantise_rows(values, type))


@pytest.mark.parametrize("shape", [(256,), (0, 256), (2, 0), (1, 1, 256)], ids=str)
def test_rows_are_needed(shape: tuple[int, ...]) -> None:
    with pytest.raises(BlockTypeError, match="cannot quantise an array of shape"):
        quantise_rows(np.ones(shape), "Q4_K")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_importance_is_finite_and_not_negative(bad: float) -> None:
    weights = np.ones(256)
    weights[7] = bad
    with pytest.raises(UserError, match=r"importance .*: finite numbers of 0 and more are needed"):
        quantise_rows(np.ones((1, 256)), "Q4_K", weights)


def test_importance_has_a_number_for_each_column() -> None:
    with pytest.raises(UserError, match=r"importance of shape \(255,\): one number for each of 256 columns"):
        quantise_rows(np.ones((1, 256)), "Q4_K", np.ones(255))
