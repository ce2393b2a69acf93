"""The C++ extension itself refuses sizes that its memory does not hold, and empty arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.op_truth import page_count, plain_batch, random_ffn, random_tensor, rng

from hotcold.formats.blocks import BLOCK_TYPES, quantise
from hotcold.kernels import _native, open_backend
from hotcold.kernels.backend import PAGE, AttentionCall, Batch, BatchLimits, FFNCall, FFNTensors
from hotcold.kernels.cpu import CPUBackend

LOCAL_BYTES = 2 << 20  #: scratch of one thread (kLocalBytes in csrc/pool/local_bytes.h)
WIDEST = LOCAL_BYTES // 4 // 528 * 512  #: columns of a quantised row whose sums fit: 528 floats for each 512
MOST_NEURONS = 1 << 18

ROWS = 5  #: of the batches here


def floats(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def program(tokens: int = ROWS, sequences: int = 1, pages: int = 1, logits: int = 1) -> _native.Program:
    batch = Batch(BatchLimits(tokens, sequences, pages, logits))
    return _native.Program("", _native.Pool(1), batch)


def matrix(type: str, rows: int, columns: int) -> Any:
    """A matrix as the extension takes it."""
    weights: Any = open_backend("cpu", 1).matrix(random_tensor(rng(type), type, rows, columns))
    return weights.rows


@pytest.mark.parametrize("type", [name for name in BLOCK_TYPES if BLOCK_TYPES[name].weights > 1])
def test_rows_whose_sums_exceed_a_threads_scratch_are_refused(type: str) -> None:
    """Up to there they are decoded exactly."""
    backend = CPUBackend(threads=1)
    tensor = random_tensor(rng("widest"), type, 2, WIDEST)
    batch = plain_batch(backend, 2)
    batch.tokens[:2] = 1, 0
    out = floats(batch.limits.tokens, WIDEST)
    backend.embed(backend.matrix(tensor), batch, out)
    np.testing.assert_array_equal(out[:2], tensor.dequantise()[[1, 0]])

    for columns in (WIDEST + 256, 1 << 20):
        need = -(-columns // 512) * 528 * 4
        message = (
            f"embed: rows of {columns} columns in this block type take {need} bytes of a thread's scratch"
        )
        with pytest.raises(ValueError, match=f"{message}; allowed: up to {LOCAL_BYTES}"):
            program().embed(matrix(type, 1, columns), floats(ROWS, columns), 0, False)


def test_plain_rows_may_be_wider() -> None:
    backend = CPUBackend(threads=1)
    tensor = random_tensor(rng("wide"), "F16", 2, 1 << 20)
    batch = plain_batch(backend, 1)
    out = floats(batch.limits.tokens, 1 << 20)
    backend.embed(backend.matrix(tensor), batch, out)
    np.testing.assert_array_equal(out[0], tensor.dequantise()[0])


@pytest.mark.parametrize("decode", [True, False])  # both keep scores of a group in scratch
def test_a_group_of_heads_fills_a_threads_scratch_at_most(decode: bool) -> None:
    """A head takes 256 scores and two sums of its width and two numbers."""
    width, most = 8, LOCAL_BYTES // (4 * (256 + 2 * (8 + 2)))
    backend = CPUBackend(threads=1)
    batch = plain_batch(backend, decode, not decode)
    cache = floats(page_count(batch), 1, PAGE, width)
    cache[:] = 3
    q, out = floats(batch.limits.tokens, most, width), floats(batch.limits.tokens, most, width)
    backend.attention(AttentionCall(q, cache, cache, batch, out, 1.0))
    assert (out[0] == 3).all()  # equal scores: the mean

    q = floats(ROWS, most + 1, width)
    message = f"attention: {most + 1} heads of 8 that share a kv head take [0-9]+ bytes of a thread's scratch"
    with pytest.raises(ValueError, match=f"{message}; allowed: up to {LOCAL_BYTES}"):
        program().attention(q, cache, cache, q.copy(), 1.0, None, False, None, None)


def test_rows_of_a_table_go_by_token_or_position() -> None:
    for by in (-1, 2):
        with pytest.raises(ValueError, match=rf"embed: by {by}: choose 0 \(tokens\) or 1 \(positions\)"):
            program().embed(matrix("F32", 2, 8), floats(ROWS, 8), by, False)


def test_rows_that_are_added_take_scratch_of_their_own() -> None:
    """524288 plain values fill it."""
    rows = matrix("F16", 1, LOCAL_BYTES // 4)
    program().embed(rows, floats(ROWS, LOCAL_BYTES // 4), 1, True)
    rows = matrix("F16", 1, LOCAL_BYTES // 4 + 1)
    program().embed(rows, floats(ROWS, LOCAL_BYTES // 4 + 1), 1, False)
    with pytest.raises(ValueError, match=r"embed: rows of 524289 columns .* take 2097156 bytes"):
        program().embed(rows, floats(ROWS, LOCAL_BYTES // 4 + 1), 1, True)


def integers(key: str, *shape: int) -> np.ndarray:
    return rng(key).integers(-1, 2, shape).astype(np.float32)


@pytest.mark.parametrize("prompt", [False, True])
def test_a_layer_has_at_most_so_many_neurons(prompt: bool) -> None:
    """With as many the widest step is exact: its sums are of integers, every second neuron a candidate."""
    backend = CPUBackend(threads=2)
    columns, rows = 8, 16
    gate, up, down = (integers(name, MOST_NEURONS, columns) for name in ("gate", "up", "down"))
    tensors = FFNTensors(*(quantise(w, "F32") for w in (gate, up, down)), "by_neuron", "relu")
    batch = plain_batch(backend, 0 if prompt else rows, rows if prompt else 0)
    x, out = floats(batch.limits.tokens, columns), floats(batch.limits.tokens, columns)
    x[:rows] = integers("x", rows, columns)
    mask = np.full((batch.limits.tokens, MOST_NEURONS // 64), 0x5555555555555555, np.uint64)
    backend.ffn(FFNCall(x, backend.ffn_weights(tensors), batch, out, skip=True, mask=mask))
    hidden = np.maximum(x[:rows].astype(np.int64) @ gate.T.astype(np.int64), 0) * (x[:rows] @ up.T)
    if not prompt:
        hidden[:, 1::2] = 0
    np.testing.assert_array_equal(out[:rows], hidden @ down)

    more = quantise(floats(MOST_NEURONS + 1, columns), "F32")
    with pytest.raises(ValueError, match=r"ffn: a layer of 262145 neurons; allowed: up to 262144$"):
        backend.ffn_weights(FFNTensors(None, more, more, "by_neuron", "relu"))


@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.uint8])
@pytest.mark.parametrize("axis", [0, 1, 3])
def test_caches_without_values_are_refused(dtype: type, axis: int) -> None:
    """No page, no kv head, or heads without width."""
    shape = [1, 2, PAGE, 34]
    shape[axis] = 0
    cache = np.zeros(shape, dtype)
    rows = floats(ROWS, shape[1], 32 if dtype == np.uint8 and shape[3] else shape[3])
    message = f"the KV cache has no values: its axis {axis} is 0, at least 1 is needed"
    with pytest.raises(ValueError, match=message):
        program().store_kv(rows, rows, cache, cache)
    with pytest.raises(ValueError, match=message):
        program().attention(rows, cache, cache, rows, 1.0, None, False, None, None)


def test_queries_without_heads_are_refused() -> None:
    cache = floats(1, 2, PAGE, 8)
    for heads in (0, 1, 3):
        q = floats(ROWS, heads, 8)
        with pytest.raises(ValueError, match="H a multiple of the cache's heads"):
            program().attention(q, cache, cache, q, 1.0, None, False, None, None)


@pytest.mark.parametrize("shape", [(), (0,), (0, 8), (ROWS - 1, 8)])
def test_arrays_with_too_few_rows_are_refused(shape: tuple[int, ...]) -> None:
    """Or none at all: how wide a row is does not follow from the size of the array."""
    x, full = floats(*shape), floats(ROWS, 8)
    ones = np.ones(8, np.float32)
    for call in (
        lambda p: p.add(x, full, 1.0, 1.0),
        lambda p: p.add(full, x, 1.0, 1.0),
        lambda p: p.gather(x, full),
        lambda p: p.softcap(x, 30.0),
        lambda p: p.norm(x, full, ones, None, 1e-5, False, 0),
        lambda p: p.norm(full, x, ones, None, 1e-5, False, 0),
        lambda p: p.rope(x, full, full, False),
        lambda p: p.embed(matrix("F32", 2, 8), x, 0, False),
        lambda p: p.linear(x, [matrix("F32", 8, 8)], [None], [full], False, 0, None, None),
        lambda p: p.linear(full, [matrix("F32", 8, 8)], [None], [x], False, 0, None, None),
    ):
        with pytest.raises(ValueError):
            call(program(logits=ROWS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": floats(0)}, "at least 1 is needed"),
        ({"pages": floats(3)}, r"pages must be \[sequences, pages per sequence\]"),
        ({"pages": floats()}, r"pages must be \[sequences, pages per sequence\]"),
        ({"lengths": floats(2)}, "disagree"),
        ({"positions": floats(ROWS - 1)}, "disagree"),
        ({"counts": floats(3)}, "disagree"),
    ],
)
def test_batches_that_do_not_fit_are_refused(changes: dict[str, np.ndarray], message: str) -> None:
    batch = Batch(BatchLimits(ROWS, 1, 1, 1))
    for name, array in changes.items():
        setattr(batch, name, array.astype(np.int32))
    with pytest.raises(ValueError, match=message):
        _native.Program("", _native.Pool(1), batch)


def test_arrays_of_another_type_are_refused() -> None:
    batch = Batch(BatchLimits(ROWS, 1, 1, 1))
    batch.slots = np.zeros(ROWS, np.int64)  # type: ignore[assignment]
    with pytest.raises(TypeError, match="a batch's slots must be an array of int32"):
        _native.Program("", _native.Pool(1), batch)


def test_a_batch_without_sequences_holds_no_row() -> None:
    batch = Batch(BatchLimits(ROWS, 0, 1, 1))
    p = _native.Program("", _native.Pool(1), batch)
    x = floats(ROWS, 8)
    p.add(x, x, 1.0, 1.0)
    p.run()
    batch.counts[0] = 1
    with pytest.raises(ValueError, match="sequence 0 is out of range"):
        p.run()


def test_weights_of_another_kind_are_refused() -> None:
    x, out = floats(ROWS, 32), floats(ROWS, 32)
    sizes = 32, 32, BLOCK_TYPES["Q4_0"].id
    panels = _native.WeightRows.panels(_native.Arena().take(_native.panels_size(*sizes)), *sizes)
    rows = matrix("Q4_0", 32, 32)
    scores = floats(32), np.zeros((ROWS, 1), np.uint64), [32], 1, None
    with pytest.raises(ValueError, match="linear: a weight is None"):
        program().linear(x, [None], [None], [out], False, 0, None, None)  # type: ignore[list-item]
    for call in (
        lambda p: p.linear(x, [panels], [None], [out], False, 0, None, None),
        lambda p: p.embed(panels, out, 0, False),
        lambda p: p.predict(x, panels, rows, True, *scores),
        lambda p: p.predict(x, rows, panels, True, *scores),
        lambda p: _native.FfnWeights(
            None, panels, rows, None, None, None, False, 0, 0.0, 7.0, 1.702, [32], 1
        ),
        lambda p: _native.FfnWeights(
            panels, rows, rows, None, None, None, False, 0, 0.0, 7.0, 1.702, [32], 1
        ),
    ):
        with pytest.raises(ValueError, match="these weights are packed in panels, rows are needed"):
            call(program(logits=ROWS))
    with pytest.raises(ValueError, match="do not fit each other"):
        _native.FfnWeights(None, rows, panels, None, None, None, True, 0, 0.0, 7.0, 1.702, [32], 1)
    with pytest.raises(ValueError, match="it needs a gate"):
        _native.FfnWeights(None, rows, rows, None, None, None, False, 1, 0.0, 7.0, 1.702, [32], 1)


def test_rows_are_those_of_tokens_or_of_logits() -> None:
    x = floats(ROWS, 32)
    for rows in (-1, 2):
        with pytest.raises(ValueError, match=rf"rows {rows}: choose 0 \(tokens\) or 1 \(logits\)"):
            program().norm(x, x, np.ones(32, np.float32), None, 1e-5, False, rows)
        with pytest.raises(ValueError, match=rf"rows {rows}: choose"):
            program().linear(x, [matrix("F32", 32, 32)], [None], [x], False, rows, None, None)


def test_no_op_follows_a_run() -> None:
    """Scratch is laid out by then."""
    p, x = program(), floats(ROWS, 32)
    p.add(x, x, 1.0, 1.0)
    p.run()
    with pytest.raises(ValueError, match="this program has run"):
        p.linear(x, [matrix("Q4_0", 32, 32)], [None], [floats(ROWS, 32)], False, 0, None, None)


def test_a_program_tells_what_scratch_its_ops_share() -> None:
    """The largest op's. Quantised rows take 44 bytes for each 32 columns, in groups of 512.

    Plain rows are arranged from the fourth token on, 16 columns longer than they are.
    """
    few = program(tokens=3)
    few.linear(floats(3, 32), [matrix("F32", 32, 32)], [None], [floats(3, 32)], False, 0, None, None)
    assert few.scratch_bytes == 0
    p = program()
    assert p.scratch_bytes == 0
    x = floats(ROWS, 32)
    p.linear(x, [matrix("F32", 32, 32)], [None], [floats(ROWS, 32)], False, 0, None, None)
    arranged = ROWS * (32 + 16) * 4
    assert p.scratch_bytes == arranged
    p.linear(x, [matrix("Q4_0", 32, 32)], [None], [floats(ROWS, 32)], False, 0, None, None)
    quantised = ROWS * 16 * 44
    assert p.scratch_bytes == -(-quantised // 64) * 64
    weights: Any = open_backend("cpu", 1).ffn_weights(random_ffn(rng(), (6400, 32), ("F32",) * 3))
    p.ffn(x, weights.native, floats(ROWS, 32), False, None, None, None, False, None, None, None, None)
    hidden, partial, counts = ROWS * 6400 * 4, 50 * ROWS * 528 * 4, 50 * 5 * 8
    assert p.scratch_bytes == arranged + hidden + partial + -(-counts // 64) * 64 + -(-50 * 4 // 64) * 64
