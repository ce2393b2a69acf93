"""Tests of the FFN op on Vulkan devices beside the op table: rows have the same bits in every batch, weights
arrive as they are, in parts too, and scratch is counted."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.bits import same_bits
from support.expert_layers import choices, make_layer
from support.op_truth import FFNKind, plain_batch, random_ffn, random_rows, random_tensor, rng, to_words
from support.ordered_ffn import ordered_ffn
from support.vulkan.cases import TYPES
from support.vulkan.ffn_cases import program_rows

from hotcold.formats.blocks import BLOCK_TYPES, quantise
from hotcold.kernels.backend import Batch, BatchLimits, Chosen, FFNCall, FFNStats, FFNTensors
from hotcold.kernels.gpu import StepShape
from hotcold.kernels.numpy_ffn import ReferenceFFN
from hotcold.kernels.vulkan.backend import VulkanBackend
from hotcold.kernels.vulkan.ffn import PASS_BYTES, ffn_scratch_bytes
from hotcold.kernels.vulkan.ffn import ffn as record_ffn
from hotcold.kernels.vulkan.ffn_weights import (
    FFNShape,
    ffn_weights,
    leaves_together,
    pack_panels,
    panel_words,
)
from hotcold.kernels.vulkan.linear import SMALL_TILE
from hotcold.kernels.vulkan.memory import aligned
from hotcold.kernels.vulkan.recording import Recording
from hotcold.kernels.vulkan.scratch import step_scratch_bytes

pytestmark = pytest.mark.one_driver  # the op table looks at the second one

Floats = np.ndarray
Types = tuple[str, str, str]


def run(
    backend: VulkanBackend,
    weights: Any,
    x: Floats,
    decode: int,
    *,
    skip: bool = False,
    mask: np.ndarray | None = None,
    chosen: tuple[np.ndarray, np.ndarray] | None = None,
) -> Floats:
    batch = plain_batch(backend, decode, len(x) - decode)
    rows, dim = batch.limits.tokens, x.shape[1]

    def buffer(values: np.ndarray) -> Any:
        made = backend.zeros((rows, values.shape[1]), values.dtype)
        backend.write(made, values)
        return made

    out = backend.zeros((rows, dim))
    options: dict[str, Any] = {"skip": skip}
    if mask is not None:
        options["mask"] = buffer(mask)
    if chosen is not None:
        options["chosen"] = Chosen(*map(buffer, chosen))
    call = FFNCall(buffer(x), weights, batch, out, **options)
    backend.record(lambda: backend.ffn(call), program_rows(len(x))).run()
    return backend.read(out, 0, len(x)).copy()


@pytest.mark.parametrize("layout", ["by_neuron", "by_output"])
@pytest.mark.parametrize("type", TYPES)
def test_down_rows_arrive_as_they_are(vulkan: VulkanBackend, type: str, layout: str) -> None:
    """Each row of input makes one neuron active, with a coefficient of 1: its output is that neuron's down
    row. Chunks of wide rows have several blocks, and the last chunk has fewer. With one row of input, an
    invocation takes more outputs than with several."""
    n, d = (256, 256) if BLOCK_TYPES[type].weights > 32 else (96, 128)
    if layout == "by_neuron":
        n, d = 32, 2816 if BLOCK_TYPES[type].weights > 32 else 1056
    random = rng("down", type)
    down = random_tensor(random, type, *((n, d) if layout == "by_neuron" else (d, n)))
    tensors = FFNTensors(None, quantise(np.eye(n, d), "F32"), down, layout, "relu")
    weights = vulkan.ffn_weights(tensors)
    neurons = np.concatenate([random.permutation(n)[:9], [0, n - 1]])
    x, rows = np.eye(d, dtype=np.float32)[neurons], down.dequantise()
    expected = rows[neurons] if layout == "by_neuron" else rows[:, neurons].T
    # A dot of types without panels, which rounds the coefficients and the sum's scale.
    near = 0 if layout == "by_neuron" or down.type.panels else 1e-6
    same = functools.partial(np.testing.assert_allclose, rtol=near, atol=near)
    for count in (1, len(x)):
        same(run(vulkan, weights, x[:count], count, skip=True), expected[:count])
    same(run(vulkan, weights, np.tile(x, (4, 1)), 0), np.tile(expected, (4, 1)))


@pytest.mark.parametrize(
    ("type", "layout"),
    [
        *((type, "by_neuron") for type in ("F32", "F16", "Q4_0", "Q5_1", "Q4_K", "MXFP4", "IQ4_XS")),
        *((type, "by_output") for type in ("Q4_0", "Q5_1", "Q4_K", "MXFP4")),  # in panels
    ],
)
def test_neurons_that_fill_up_a_group_add_nothing(vulkan: VulkanBackend, type: str, layout: str) -> None:
    """One neuron is active, and its weights are infinite. The shader reads four neurons at a time: it reads
    this one again with the coefficient 0."""
    kind, n, d = BLOCK_TYPES[type], 256, 256
    infinite = {"F32": b"\x00\x00\x80\x7f", "MXFP4": b"\xff"}.get(type, b"\x00\x7c")
    down = random_tensor(rng("infinite", type), type, n, d)
    blocks = down.data.reshape(-1, kind.nbytes).copy()
    blocks[:, : len(infinite)] = np.frombuffer(infinite, np.uint8)
    down = replace(down, data=blocks.reshape(down.data.shape))
    weights = vulkan.ffn_weights(FFNTensors(None, quantise(np.eye(n, d), "F32"), down, layout, "relu"))
    rows = down.dequantise() if layout == "by_neuron" else down.dequantise().T
    assert not np.isfinite(rows[7]).all()
    actual = run(vulkan, weights, np.eye(d, dtype=np.float32)[7:8], 1, skip=True)
    np.testing.assert_array_equal(actual[0], rows[7])


@pytest.mark.parametrize(
    "type", [name for name in TYPES if BLOCK_TYPES[name].weights > 1 and BLOCK_TYPES[name].panels]
)
def test_panels_are_as_large_as_the_blocks(type: str) -> None:
    kind = BLOCK_TYPES[type]
    blocks = rng(type).integers(0, 256, (64, 3, kind.nbytes), np.uint8)
    panels = pack_panels(kind, blocks)
    assert panels.shape == (3, 64 * kind.nbytes) and panels.nbytes == 3 * 4 * panel_words(kind, 64)
    set_bits = np.unpackbits(np.ascontiguousarray(blocks.swapaxes(0, 1)).reshape(3, -1), axis=1).sum(axis=1)
    np.testing.assert_array_equal(np.unpackbits(panels, axis=1).sum(axis=1), set_bits)


BITS: list[tuple[FFNKind, Types, str]] = [
    (FFNKind("relu", biases=True), ("Q4_0",) * 3, "by_neuron"),
    (FFNKind("silu"), ("Q4_0",) * 3, "by_output"),
    (FFNKind("drelu"), ("F16", "Q8_0", "Q5_1"), "by_output"),
    (FFNKind("relu2", gated=False), ("Q8_0", "Q8_0", "F16"), "by_output"),
    (FFNKind("gelu_erf", biases=True), ("BF16", "F32", "BF16"), "by_neuron"),
]
BITS_BY_DRIVER = [*BITS[:2], *(pytest.param(*each, marks=pytest.mark.one_driver) for each in BITS[2:])]


@pytest.mark.parametrize(("kind", "types", "layout"), BITS_BY_DRIVER, ids=str)
def test_rows_have_the_same_bits_in_every_batch(
    vulkan: VulkanBackend, kind: FFNKind, types: Types, layout: str
) -> None:
    """Alone, among others as decode rows, as prompt rows; exact is off."""
    tensors = random_ffn(rng("bits", *kind), (480, 64), types, kind, layout)
    weights, x = vulkan.ffn_weights(tensors), random_rows(rng("x"), 45, 64)
    whole = run(vulkan, weights, x, 0)
    assert np.isfinite(whole).all() and whole.std() > 0
    sparse = kind.activation in ("relu", "drelu", "relu2")
    for skip in {False, sparse}:
        for rows in (1, 2, 5, 16):
            same_bits(run(vulkan, weights, x[:rows], rows, skip=skip), whole[:rows])
        same_bits(run(vulkan, weights, x[:9], 3, skip=skip), whole[:9])
        same_bits(run(vulkan, weights, x, 16, skip=skip), whole)
    every = np.full((16, 8), 2**64 - 1, np.uint64)
    same_bits(run(vulkan, weights, x[:16], 16, mask=every), whole[:16])


@pytest.mark.parametrize("activation", ["relu", "drelu", "relu2"])
@pytest.mark.parametrize("layout", ["by_neuron", "by_output"])
def test_weights_that_are_not_finite_spoil_only_what_they_add_to(
    vulkan: VulkanBackend, activation: str, layout: str
) -> None:
    """Wherever a gate is inactive, up and down may be anything, and are not read: as in the model."""
    random = rng("not finite", activation)
    tensors = random_ffn(random, (96, 64), ("F32",) * 3, FFNKind(activation, threshold=0.3), layout)
    up, down = tensors.up.dequantise(), tensors.down.dequantise()
    up[3], up[40, 5], up[77, 9] = np.nan, np.inf, -np.inf
    down[7 if layout == "by_neuron" else np.s_[:, 7]] = np.inf
    tensors = replace(tensors, up=quantise(up, "F32"), down=quantise(down, "F32"))
    x = random_rows(random, 45, 64) * np.where(np.arange(64) < 12, np.float32(0.2), np.float32(1))
    model = ordered_ffn(tensors)
    assert isinstance(model, ReferenceFFN)
    active_gates, coefficients = model.coefficients(x)
    truth = model.down_sum(coefficients)
    spoiled = active_gates[:, [3, 7, 40, 77]].any(axis=1)
    assert np.isfinite(truth[~spoiled]).all() and 0 < spoiled.sum() < 45
    assert not np.isfinite(truth).all()
    weights = vulkan.ffn_weights(tensors)
    np.testing.assert_array_equal(run(vulkan, weights, x, 0), truth)
    for skip in (False, True):
        np.testing.assert_array_equal(run(vulkan, weights, x[:16], 16, skip=skip), truth[:16])


@pytest.mark.parametrize("dim", [256, 288])
def test_rows_of_8_chunks_and_more(vulkan: VulkanBackend, dim: int) -> None:
    """The first share a group's invocations among 32 neurons, the others among 8."""
    tensors = random_ffn(rng("lanes", dim), (100, dim), ("Q4_0",) * 3, FFNKind("relu", threshold=0.2))
    weights, x = vulkan.ffn_weights(tensors), random_rows(rng("x"), 16, dim)
    truth = ordered_ffn(tensors)
    assert isinstance(truth, ReferenceFFN)
    expected = truth.down_sum(truth.coefficients(x)[1])
    for rows in (1, 3, 16):
        for skip in (False, True):
            same_bits(run(vulkan, weights, x[:rows], rows, skip=skip), expected[:rows])


def test_masks_that_name_nothing_and_few(vulkan: VulkanBackend) -> None:
    """Neurons that a row's mask does not name add nothing to it, whatever the others' masks name."""
    tensors = random_ffn(rng("masks"), (480, 64), ("Q4_0",) * 3, FFNKind("relu", biases=True))
    weights, x = vulkan.ffn_weights(tensors), random_rows(rng("x"), 3, 64)
    few = rng("few").random((3, 480)) < np.array([[0.0], [0.01], [0.9]])
    masks = to_words(few)
    together = run(vulkan, weights, x, 3, skip=True, mask=masks)
    np.testing.assert_array_equal(together[0], tensors.down_bias)
    for row in range(3):
        alone = run(vulkan, weights, x[row : row + 1], 1, mask=masks[row : row + 1])
        same_bits(alone, together[row : row + 1])


@pytest.mark.parametrize(
    ("types", "layout", "activation", "count"),
    [
        (("Q4_0", "F16", "Q4_0"), "by_neuron", "relu", 3),
        (("F16", "F16", "Q5_1"), "by_output", "relu", 3),
        (("Q8_0", "Q8_0", "F16"), "by_output", "relu", 3),
        (("Q4_0",) * 3, "by_output", "silu", 3),
        (("F16",) * 3, "by_neuron", "relu", 7),
        (("Q4_0",) * 3, "by_output", "silu", 7),
    ],
    ids=str,
)
def test_weights_in_parts_give_the_same_bits(
    vulkan: VulkanBackend,
    monkeypatch: pytest.MonkeyPatch,
    types: Types,
    layout: str,
    activation: str,
    count: int,
) -> None:
    """A device that reads few bytes at a time: experts are then in several parts, and are cut themselves."""
    layer = make_layer(2, (512,) * 3, 64, types, FFNKind(activation, biases=True), layout)
    whole = vulkan.ffn_weights(layer.tensors)
    largest = max(t.nbytes for t in (layer.tensors.up, layer.tensors.down))
    few = SimpleNamespace(name="a device of few bytes", max_range=largest // count, max_allocation=largest)
    monkeypatch.setattr(vulkan, "info", few)
    parts = vulkan.ffn_weights(layer.tensors)
    assert len(whole.up) == 1 and len(parts.up) > 2 and len(parts.down) > 2
    assert max(part.range.nbytes for part in (*parts.gate, *parts.up, *parts.down)) <= largest // count
    x, chosen = random_rows(rng("x"), 20, 64), choices("parts", 20, 3, 2)
    for decode in (5, 16):
        same_bits(*(run(vulkan, w, x, decode, chosen=chosen) for w in (whole, parts)))
    few.max_range = 100
    with pytest.raises(ValueError, match="bytes a neuron, 1536 of them: this device reads 100 at a time"):
        vulkan.ffn_weights(layer.tensors)


@pytest.mark.parametrize("rows", [1, 4, 16, 60])
def test_scratch_is_what_its_formula_says(vulkan: VulkanBackend, rows: int) -> None:
    layers = [random_ffn(rng("s"), (480, 64), types, kind, layout) for kind, types, layout in BITS]
    experts = make_layer(2, (96,) * 8, 64, ("Q4_0",) * 3).tensors
    for tensors in (*layers, experts):
        recording = Recording(vulkan, Batch(BatchLimits(rows, 1, 1, 1)), rows)
        x, out = vulkan.zeros((rows, 64)), vulkan.zeros((rows, 64))
        chosen = Chosen(vulkan.zeros((rows, 2), np.int32), vulkan.zeros((rows, 2)))
        weights, given = ffn_weights(vulkan, tensors), chosen if tensors is experts else None
        record_ffn(recording, FFNCall(x, weights, recording.batch, out, skip=False, chosen=given))
        expected = ffn_scratch_bytes(FFNShape.from_tensors(tensors), rows, min(rows, 16))
        assert recording.scratch_bytes == aligned(expected) and len(recording.steps) > 3


def test_scratch_of_weights_in_parts_is_bounded_and_planned_for() -> None:
    """Fewer leaves together are more sums of a row: so fewer rows at a time, but not fewer than a tile."""
    type, rows = BLOCK_TYPES["F16"], 528
    ffn = FFNShape(4096, (28672,), 1, "by_neuron", "relu", True, type, type, type)
    for together in (64, 16, 1):
        row_bytes = 4 * (ffn.most + 64 // together * ffn.dim)
        assert ffn_scratch_bytes(ffn, rows, 0, together) <= max(PASS_BYTES, SMALL_TILE * row_bytes) + 2**20
    # 235 MB each of gate, up and down: two parts, where a range has 128 MiB.
    assert [leaves_together(ffn, nbytes << 20) for nbytes in (1024, 128, 16)] == [64, 32, 4]
    step = StepShape(
        limits=BatchLimits(rows, 1, 1, 1),
        dim=ffn.dim,
        heads=1,
        kv_heads=1,
        head_dim=32,
        neurons=ffn.most,
        hot=ffn.most,
        types=(type,) * 3,
        gated=True,
        down_layout=ffn.down_layout,
        activation=ffn.activation,
        rank=0,
    )
    for together in (64, 32):
        assert step_scratch_bytes(step) >= ffn_scratch_bytes(ffn, rows, 1, together)


def test_counts_carry_into_their_upper_half(vulkan: VulkanBackend) -> None:
    tensors = random_ffn(rng("carry"), (100, 64), ("F32",) * 3)
    weights, batch = vulkan.ffn_weights(tensors), plain_batch(vulkan, 1)
    x, out = (vulkan.zeros((batch.limits.tokens, 64)) for _ in range(2))
    before = np.array([[0] * 5, [2**32 - 100, 2**32 - 101, 2**40 - 1, 7, 2**62]])
    counts = vulkan.zeros((2, 5), np.int64)
    vulkan.write(counts, before)
    vulkan.ffn(FFNCall(x, weights, batch, out, skip=False, stats=FFNStats(counts, 1)))
    np.testing.assert_array_equal(vulkan.read(counts) - before, [[0] * 5, [100, 100, 100, 100, 0]])


def test_buffers_that_do_not_fit_are_refused(vulkan: VulkanBackend) -> None:
    tensors = random_ffn(rng("refused"), (100, 64), ("F32",) * 3)
    weights, batch = vulkan.ffn_weights(tensors), plain_batch(vulkan, 1)
    rows = batch.limits.tokens
    x, out = (vulkan.zeros((rows, 64)) for _ in range(2))
    for options, error, words in (
        ({"mask": vulkan.zeros((rows, 2), np.int64)}, TypeError, "mask is int64: uint64 is needed"),
        ({"mask": vulkan.zeros((rows, 1), np.uint64)}, ValueError, "rows of 2 or more, got"),
        ({"active": vulkan.zeros((rows, 3), np.uint64)}, ValueError, "active: expected"),
        ({"stats": FFNStats(vulkan.zeros((1, 5)), 0)}, TypeError, "counts are float32: int64"),
        ({"stats": FFNStats(vulkan.zeros((1, 5), np.int64), 1)}, ValueError, "row 1 of counts"),
        ({"chosen": Chosen(vulkan.zeros((rows, 1)), vulkan.zeros((rows, 1)))}, TypeError, "ids is float32"),
    ):
        with pytest.raises(error, match=words):
            vulkan.ffn(FFNCall(x, weights, batch, out, skip=False, **options))
