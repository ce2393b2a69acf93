"""Products by AMX's tiles: the specification against a processor's outputs; the kernels against the
specification and against the kernels without tiles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.bits import same_bits
from support.expert_layers import choices, make_layer
from support.op_truth import (
    FFNKind,
    buffers,
    filled,
    plain_batch,
    random_ffn,
    random_rows,
    random_tensor,
    rng,
)

from hotcold.errors import UserError
from hotcold.formats.blocks import BLOCK_TYPES, Tensor
from hotcold.kernels.backend import Backend, Chosen, FFNCall, FFNTensors
from hotcold.kernels.cpu import CPUBackend
from hotcold.kernels.instruction_sets import LOOPS, supported_isas
from hotcold.kernels.numpy_tiles import add_tile, from_bf16, split_bf16, tile_dot, to_bf16
from hotcold.kernels.reference import ReferenceBackend


def test_the_specification_has_the_bits_of_a_processor(test_data: Path) -> None:
    """TDPBF16PS on an Intel Xeon: sums that cancel, 60 binades, and values near denormals."""
    with np.load(test_data / "bf16" / "hardware.npz") as file:
        tiles = [file[f"tile_{name}"] for name in ["a", "b", "c", "out"]]
    for x, pairs, sums, out in zip(*tiles, strict=True):
        w = pairs.reshape(16, 16, 2).transpose(1, 0, 2).reshape(16, 32)  # from pairs of columns to rows
        np.testing.assert_array_equal(add_tile(x, w, sums).view(np.uint32), out.view(np.uint32))


def test_values_are_rounded_and_split() -> None:
    """Against ml_dtypes. Two halves have 16 of a float32's 24 bits; an infinity has no second half."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="pip install ml_dtypes")
    random = rng("bf16")
    x = (random.standard_normal(5000) * 2.0 ** random.integers(-100, 100, 5000)).astype(np.float32)
    x[:6] = (0, -0.0, np.inf, -np.inf, np.nan, 3.4e38)
    x[6:70] = np.arange(64, dtype=np.uint32).astype(np.float32) * 2.0**-6 + 1  # ties
    expected = x.astype(ml_dtypes.bfloat16)
    assert np.array_equal(from_bf16(to_bf16(x)), expected.astype(np.float32), equal_nan=True)
    high, low = (from_bf16(each) for each in split_bf16(x))
    assert not low[2:6].any()
    normal = np.isfinite(high)
    assert (np.abs(high[normal] + low[normal] - x[normal]) <= np.abs(x[normal]) * 2.0**-16).all()


@pytest.mark.parametrize(("type", "math", "error"), [
    ("F32", "split", 2e-5), ("F16", "split", 1e-5), ("BF16", "split", 1e-5), ("F16", "fast", 6e-3),
])  # fmt: skip
def test_how_close_products_are(type: str, math: str, error: float) -> None:
    """Relative to the size of the terms; the last chunk is not full."""
    random = rng("close", type, math)
    x, w = random.standard_normal((5, 300)).astype(np.float32), random.standard_normal((7, 300))
    w = w.astype("f2" if type == "F16" else "f4").astype(np.float32)
    if type == "BF16":
        w = from_bf16(to_bf16(w))
    expected = x.astype(np.float64) @ w.astype(np.float64).T
    size = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T
    assert (np.abs(tile_dot(x, w, type, math) - expected) <= error * size).all()
    if math == "split":
        assert (np.abs(tile_dot(x, w, type, "fast") - expected) > error * size).any()


LEAST = supported_isas()[-1]
#: Instruction sets with tiles, each with a set whose vectors give the same bits. tests/kernels/
#: test_emulated_tiles.py runs AMX on processors without it.
TILED = {LEAST + LOOPS: LEAST} | ({"amx": "avx512"} if "amx" in supported_isas() else {})
QUANTISED = tuple(name for name, type in BLOCK_TYPES.items() if type.weights > 1)


@pytest.fixture(params=TILED)
def tiled(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def plain(tiled: str) -> str:
    return TILED[tiled]


def run_linear(backend: Backend, tensor: Tensor, x: np.ndarray, decode: int, bias: np.ndarray) -> np.ndarray:
    batch = plain_batch(backend, decode, len(x) - decode)
    out = filled(backend, batch.limits.tokens, len(bias))
    backend.linear(buffers(backend, batch, x), [backend.matrix(tensor, bias)], batch, [out])
    assert (out[len(x) :] == 7).all()
    return out[: len(x)].copy()


def layers(type: str, layout: str, activation: str) -> tuple[FFNTensors, FFNTensors]:
    """Makes an FFN and a layer of experts."""
    random, types = rng("layers", type, layout), (type,) * 3
    ffn = random_ffn(random, (512, 256), types, FFNKind(activation, biases=True), layout)
    return ffn, make_layer(2, (256, 256, 256), 256, types, FFNKind(activation), layout).tensors


def run_layer(backend: Backend, tensors: FFNTensors, x: np.ndarray, decode: int) -> np.ndarray:
    batch = plain_batch(backend, decode, len(x) - decode)
    out, chosen = filled(backend, batch.limits.tokens, x.shape[1]), None
    if tensors.experts > 1:
        ids, factors = choices("tiles", len(x), tensors.experts, tensors.chosen)
        shape = len(out), tensors.chosen
        chosen = Chosen(backend.zeros(shape, np.int32), backend.zeros(shape))
        chosen.ids[: len(x)], chosen.factors[: len(x)] = ids, factors
    inputs, weights = buffers(backend, batch, x), backend.ffn_weights(tensors)
    backend.ffn(FFNCall(inputs, weights, batch, out, skip=False, chosen=chosen))
    return out[: len(x)].copy()


@pytest.mark.parametrize("type", QUANTISED)
def test_products_of_bytes_have_the_bits_of_decoding(type: str, tiled: str, plain: str) -> None:
    """With full and partial tiles of tokens and of rows."""
    rows, columns = (45, 544) if BLOCK_TYPES[type].weights <= 32 else (37, 768)
    random = rng("bytes", type)
    tensor, bias = random_tensor(random, type, rows, columns), random_rows(random, rows)
    x = random_rows(random, 50, columns)
    x[7, 40], x[20] = np.inf, 0
    single = CPUBackend(1, plain)
    with np.errstate(invalid="ignore"):
        alone = np.vstack([run_linear(single, tensor, x[t : t + 1], 1, bias) for t in range(len(x))])
        for count, decode in ((16, 0), (17, 3), (50, 16)):
            together = run_linear(CPUBackend(2, tiled), tensor, x[:count], decode, bias)
            same_bits(together, alone[:count])


@pytest.mark.parametrize("layout", ["by_neuron", "by_output"])
@pytest.mark.parametrize("type", ["Q8_0", "Q4_K", "Q3_K"])
def test_layers_by_tiles_have_the_bits_of_decoding(type: str, layout: str, tiled: str, plain: str) -> None:
    """An FFN, and experts with more and fewer than 16 tokens."""
    for tensors in layers(type, layout, "silu"):
        x = random_rows(rng("rows"), 270, tensors.up.shape[1])
        vectors, tiles = (run_layer(CPUBackend(2, isa), tensors, x, 5) for isa in (plain, tiled))
        same_bits(tiles, vectors)


@pytest.mark.parametrize("math", ["split", "fast"])
@pytest.mark.parametrize("type", BLOCK_TYPES)
def test_prompt_rows_are_the_specification_bit_by_bit(type: str, math: str, tiled: str, plain: str) -> None:
    """In any chunk, with any neighbours. Decode rows keep their bits, and so do types without BF16 tiles."""
    rows, columns = (37, 1055) if BLOCK_TYPES[type].weights == 1 else (37, 1280)
    random = rng("prompt math", type)
    tensor, bias = random_tensor(random, type, rows, columns), random_rows(random, rows)
    x = random_rows(random, 38, columns)
    backend = CPUBackend(2, tiled, math)
    same = run_linear(CPUBackend(2, tiled if type == "BF16" else plain), tensor, x, 3, bias)
    actual = run_linear(backend, tensor, x, 3, bias)
    same_bits(actual[:3], same[:3])
    if math == "split" and BLOCK_TYPES[type].weights > 1:
        same_bits(actual, same)
        return
    same_bits(actual[3:], tile_dot(x[3:], tensor.dequantise(), type, math) + bias)
    assert (actual[3:] != same[3:]).any() or (type, math) == ("BF16", "split")
    for start, stop in ((3, 4), (4, 20)):
        same_bits(run_linear(backend, tensor, x[start:stop], 0, bias), actual[start:stop])


@pytest.mark.parametrize("columns", [1055, 2080])
def test_all_rows_by_bf16_weights_are_the_specification(columns: int, tiled: str) -> None:
    """Decode rows and prompt rows, with any neighbours, and outputs that ``where`` names."""
    random = rng("bf16 weights", columns)
    tensor, bias = random_tensor(random, "BF16", 75, columns), random_rows(random, 75)
    x = random_rows(random, 35, columns)
    expected = tile_dot(x, tensor.dequantise(), "BF16", "split") + bias
    backend = CPUBackend(2, tiled)
    for rows, decode in ((slice(0, 35), 0), (slice(0, 35), 5), (slice(2, 18), 16), (slice(4, 5), 1)):
        same_bits(run_linear(backend, tensor, x[rows], decode, bias), expected[rows])
    batch = plain_batch(backend, 5)
    out, where = filled(backend, batch.limits.tokens, 75), filled(backend, batch.limits.tokens, 75)
    where[:5] = random.standard_normal((5, 75)) - 1
    inputs, matrix = buffers(backend, batch, x[:5]), backend.matrix(tensor, bias)
    backend.linear(inputs, [matrix], batch, [out], where=where)
    same_bits(out[:5], np.where(where[:5] > 0, expected[:5], np.float32(0)))


@pytest.mark.parametrize("decode", [0, 3, 16])
@pytest.mark.parametrize("math", ["same", "split", "fast"])
def test_weights_of_several_types_share_an_input(math: str, decode: int, tiled: str) -> None:
    """Each result is that of its matrix alone."""
    random, backend = rng("types", math, decode), CPUBackend(2, tiled, math)
    tensors = [random_tensor(random, type, 48, 1056) for type in ("BF16", "Q8_0", "F16")]
    x, bias = random_rows(random, decode + 21, 1056), np.zeros(48, np.float32)
    batch = plain_batch(backend, decode, 21)
    outs = [filled(backend, batch.limits.tokens, 48) for _ in tensors]
    matrices = [backend.matrix(tensor, bias) for tensor in tensors]
    backend.linear(buffers(backend, batch, x), matrices, batch, outs)
    for tensor, out in zip(tensors, outs, strict=True):
        same_bits(out[: len(x)], run_linear(backend, tensor, x, decode, bias))


@pytest.mark.parametrize(("layout", "activation"), [("by_output", "silu"), ("by_neuron", "relu")])
def test_layers_of_bf16_weights(layout: str, activation: str, tiled: str, plain: str) -> None:
    """Tiles compute a dense FFN. Experts, and an FFN that is summed by neuron, have the bits of vectors."""
    for tensors in layers("BF16", layout, activation):
        x = random_rows(rng("rows"), 20, tensors.up.shape[1])
        backend = CPUBackend(2, tiled)
        prompt, vectors = (run_layer(each, tensors, x, 0) for each in (backend, CPUBackend(2, plain)))
        for decode in (3, 16):
            same_bits(run_layer(backend, tensors, x, decode), prompt)
        if layout == "by_neuron" or tensors.experts > 1:
            same_bits(prompt, vectors)
            continue
        expected = run_layer(ReferenceBackend(), tensors, x, 0)
        assert (np.abs(prompt - expected) <= 1e-5 * np.abs(expected).max(axis=1, keepdims=True)).all()
        assert (prompt != vectors).any()


def test_sums_of_more_tokens_than_are_multiplied_at_once(tiled: str) -> None:
    random = rng("many tokens")
    tensor, x, bias = (
        random_tensor(random, "F16", 40, 64),
        random_rows(random, 530, 64),
        random_rows(random, 40),
    )
    actual = run_linear(CPUBackend(2, tiled, "fast"), tensor, x, 0, bias)
    same_bits(actual, tile_dot(x, tensor.dequantise(), "F16", "fast") + bias)


@pytest.mark.parametrize("layout", ["by_neuron", "by_output"])
@pytest.mark.parametrize("type", ["F16", "Q4_0", "Q2_K"])
@pytest.mark.parametrize("math", ["split", "fast"])
def test_layers_of_prompt_rows_are_the_specification(
    type: str, layout: str, math: str, tiled: str, plain: str
) -> None:
    """ReLU rounds nothing, so down has the same input."""
    for tensors in layers(type, layout, "relu"):
        x = random_rows(rng("rows"), 30, tensors.up.shape[1])
        actual = run_layer(CPUBackend(2, tiled, math), tensors, x, 5)
        expected = run_layer(ReferenceBackend(math), tensors, x, 5)
        size = np.abs(expected).max(axis=1, keepdims=True)
        assert (np.abs(actual - expected) <= 1e-5 * size)[5:].all()
        same_bits(actual[:5], run_layer(CPUBackend(2, plain), tensors, x, 5)[:5])


def test_a_processor_without_tiles_is_refused() -> None:
    message = f"^`prompt_math=fast` needs a processor with AMX, and {LEAST} runs here: choose same$"
    with pytest.raises(UserError, match=message):
        CPUBackend(1, LEAST, "fast")
    for make in (ReferenceBackend, lambda math: CPUBackend(1, None, math)):
        with pytest.raises(UserError, match=r"^`prompt_math=quick`: choose from same, split, fast$"):
            make("quick")
