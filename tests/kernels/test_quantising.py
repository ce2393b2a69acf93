"""Blocks made of floats: bytes of the ``gguf`` package, errors of llama.cpp's quantiser, and odd values."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hotcold.errors import UserError
from hotcold.formats.blocks import BlockType, BlockTypeError, Tensor, quantise
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


def decoded(type: BlockType, packed: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> Floats:
    return Tensor(type, shape, packed).dequantise()


# --- bytes that follow from a rule ---


@pytest.mark.parametrize("name", RULED)
@pytest.mark.parametrize("kind", ["normal", "heavy", "outliers"])
def test_bytes_are_the_packages(name: str, kind: str) -> None:
    values = values_of(kind, 33, 1024)
    expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name]).view(np.uint8)
    np.testing.assert_array_equal(quantise_rows(values, name), expected.reshape(33, -1))


FINITE = st.floats(-(2.0**15), 2.0**15, width=32)
EVERY = st.integers(0, 2**32 - 1).map(lambda bits: np.uint32(bits).view(np.float32))


@pytest.mark.parametrize("name", [name for name in RULED if not name.startswith("TQ")])
def test_any_block_is_what_the_specification_writes(name: str) -> None:
    """Ties, denormals, zeros of either sign, values that no scale holds: also where that refuses them."""

    @given(hnp.arrays(np.float32, (1, 32), elements=st.one_of(FINITE, EVERY)))
    @settings(max_examples=60)
    def run(values: Floats) -> None:
        try:
            expected = quantise(values, name).data
        except BlockTypeError:
            with pytest.raises(BlockTypeError, match=f"does not fit in {name}"):
                quantise_rows(values, name)
            return
        np.testing.assert_array_equal(quantise_rows(values, name), expected)

    run()


# --- whatever is searched for ---


@any_type
def test_threads_do_not_matter(type: BlockType) -> None:
    values = values_of("heavy", 37, 512)
    importance = values_of("normal", 1, 512)[0] ** 2
    for weights in (None, importance):
        one, two, three = (quantise_rows(values, type, weights, threads=n) for n in (1, 2, 3))
        np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(one, three)


@any_type
def test_the_instruction_set_does_not_matter(type: BlockType, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.vstack([values_of("heavy", 9, 512), values_of("outliers", 9, 512)])
    importance = values_of("normal", 1, 512)[0] ** 2
    for weights in (None, importance):
        found = []
        for isa in ("", "scalar"):
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
    for importance in (None, np.ones(512)):
        with pytest.raises(BlockTypeError, match=rf"^block scale .* does not fit in {type.name}: less than"):
            quantise_rows(values, type, importance)


@scaled_type
def test_rows_are_whole_blocks(type: BlockType) -> None:
    with pytest.raises(BlockTypeError, match=rf"row of 48 weights: {type.name} needs a positive multiple"):
        quantise_rows(np.ones((2, 48)), type)


@pytest.mark.parametrize("name", ["Q8_K", "IQ2_XXS", "I32"])
def test_a_type_that_is_not_written_says_which_are(name: str) -> None:
    with pytest.raises(BlockTypeError, match=rf"^cannot write {name}: choose from F32, .*, TQ2_0$"):
        quantise_rows(np.ones((1, 256)), name)


@pytest.mark.parametrize("shape", [(256,), (0, 256), (2, 0), (1, 1, 256)], ids=str)
def test_rows_are_needed(shape: tuple[int, ...]) -> None:
    with pytest.raises(BlockTypeError, match="cannot quantise an array of shape"):
        quantise_rows(np.ones(shape), "Q4_K")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_importance_is_finite_and_not_negative(bad: float) -> None:
    importance = np.ones(256)
    importance[7] = bad
    with pytest.raises(UserError, match=r"importance .*: finite numbers of 0 and more are needed"):
        quantise_rows(np.ones((1, 256)), "Q4_K", importance)


def test_importance_has_a_number_for_each_column() -> None:
    with pytest.raises(UserError, match=r"importance of shape \(255,\): one number for each of 256 columns"):
        quantise_rows(np.ones((1, 256)), "Q4_K", np.ones(255))
