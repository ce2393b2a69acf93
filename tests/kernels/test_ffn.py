"""The FFN op and predictors, on every backend and instruction set, against float64 brute force (op_truth)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.op_truth import (
    FFNKind,
    buffers,
    ffn,
    ffn_rows,
    filled,
    plain_batch,
    random_ffn,
    random_rows,
    random_tensor,
    rng,
    scores,
    to_bits,
    to_words,
)

from hotcold.formats.blocks import BLOCK_TYPES
from hotcold.kernels.backend import (
    Backend,
    FFNCall,
    FFNStats,
    FFNTensors,
    PredictorTensors,
    is_dense,
)

FFNS = (
    FFNKind("relu"),
    FFNKind("relu", threshold=0.4, biases=True),
    FFNKind("drelu"),
    FFNKind("drelu", threshold=0.3, biases=True),
    FFNKind("relu2"),
    FFNKind("silu", biases=True),
    FFNKind("gelu"),
    FFNKind("relu", gated=False, biases=True),
    FFNKind("relu2", threshold=0.2, gated=False),
    FFNKind("gelu", gated=False, biases=True),
    FFNKind("gelu_erf"),
    FFNKind("gelu_erf", gated=False, biases=True),
    FFNKind("swiglu_oai", biases=True),
    FFNKind("swiglu_oai", limit=0.6, alpha=2.5),  # half of the gates and ups are clamped
)
#: types of gate, up and down
FFN_TYPES = tuple((type, type, type) for type in BLOCK_TYPES) + (
    ("Q4_0", "F16", "Q8_0"),
    ("F32", "Q8_0", "BF16"),
    ("Q4_K", "Q4_K", "Q6_K"),
)
#: every kind with some types, every type with some kinds
FFN_CASES = [
    (kind, types)
    for kind in FFNS
    for types in FFN_TYPES
    if types[0] in ("F32", "Q4_0", "Q5_K") or kind in (FFNS[1], FFNS[5])
]
#: (N, D) where no block has more than 32 weights, and where one has
SMALL = ((100, 32), (172, 96), (1000, 64), (256, 544), (96, 256))
LARGE = ((100, 256), (512, 768), (256, 256))


def existing_shapes(types: tuple[str, str, str], layout: str) -> list[tuple[int, int]]:
    shapes = SMALL if max(BLOCK_TYPES[type].weights for type in types) <= 32 else LARGE
    whole = BLOCK_TYPES[types[2]].weights if layout == "by_output" else 1
    return [(n, d) for n, d in shapes if n % whole == 0]


def some_shapes(kind: FFNKind, types: tuple[str, str, str], layout: str) -> list[tuple[int, int]]:
    """About half of all."""
    shapes, kinds = existing_shapes(types, layout), [each for each, others in FFN_CASES if others == types]
    count = -(-len(shapes) // 2) if len(kinds) == 2 else len(shapes) // 2
    first = kinds.index(kind) * count + FFN_TYPES.index(types)
    return [shapes[(first + i) % len(shapes)] for i in range(count)]


@pytest.mark.parametrize("layout", ["by_neuron", "by_output"])
def test_each_type_has_each_shape(layout: str) -> None:
    """With one kind or another."""
    for types in FFN_TYPES:
        found = {shape for kind, own in FFN_CASES if own == types for shape in some_shapes(kind, own, layout)}
        assert found == {*existing_shapes(types, layout)}


@pytest.mark.parametrize("layout", ["by_neuron", "by_output"])
@pytest.mark.parametrize("kind, types", FFN_CASES, ids=str)
def test_ffn(backend: Backend, layout: str, types: tuple[str, str, str], kind: FFNKind) -> None:
    for n, d in some_shapes(kind, types, layout):
        random = rng("ffn", types, n, *kind)
        check_ffn(backend, random_ffn(random, (n, d), types, kind, layout), random)


@pytest.mark.parametrize("down", ["Q5_1", "Q6_K"])
def test_ffn_in_panels_of_odd_width(backend: Backend, down: str) -> None:
    """A float gate allows any width; a panel's lanes are then not all in use."""
    random = rng("odd", down)
    for n, d in ((512, 50), (256, 1030)):
        check_ffn(
            backend, random_ffn(random, (n, d), ("F32", "F32", down), FFNKind("relu"), "by_output"), random
        )


def check_ffn(backend: Backend, tensors: FFNTensors, random: np.random.Generator) -> None:
    weights = backend.ffn_weights(tensors)
    n, d = tensors.up.shape
    assert weights.neurons == n
    read = [count * size for count, size in zip((n, n, n, weights.runs), weights.row_bytes, strict=True)]
    unread = sum(t.nbytes for t in (tensors.gate, tensors.up, tensors.down) if t) - sum(read)
    assert unread == 0 if d % 8 == 0 else 0 <= unread < 2 * n  # bytes are whole numbers
    sparse = tensors.activation in ("relu", "drelu", "relu2")
    for skip, masked, (decode, prompt) in (
        (False, False, (1, 0)), (sparse, False, (16, 0)), (False, False, (0, 33)), (sparse, True, (3, 5)),
        (False, True, (2, 0)), (sparse, True, (1, 0)),
    ):  # fmt: skip
        batch = plain_batch(backend, decode, prompt)
        x = ffn_rows(random, decode + prompt, tensors)
        candidates = np.ones((decode + prompt, n), np.bool_)
        if masked:
            candidates[:decode] = random.random((decode, n)) < 0.3
        truth = ffn(x, tensors, candidates)
        mask, active = (backend.zeros((batch.limits.tokens, -(-n // 64)), np.uint64) for _ in range(2))
        mask[:decode] = to_words(candidates[:decode])
        active[:] = 5
        out, stats = filled(backend, batch.limits.tokens, d), FFNStats(backend.zeros((3, 5), np.int64), 1)
        options: dict[str, Any] = {"skip": skip, "mask": mask if masked else None, "accumulate": masked}
        backend.ffn(
            FFNCall(buffers(backend, batch, x), weights, batch, out, active=active, stats=stats, **options)
        )
        expected = replace(truth.out, values=truth.out.values + 7 * masked)
        expected.check(out[: len(x)], (n, d, skip, masked, decode, prompt))
        assert (out[len(x) :] == 7).all()
        active_gates, nonzero = (candidates & truth.active_gates)[:decode], truth.coefficients[:decode] != 0
        # A smooth activation of a far negative gate is zero in float32 alone.
        sure = ~nonzero | (np.abs(truth.coefficients[:decode]) > 1e-6)
        np.testing.assert_array_equal(to_bits(active[:decode], n)[sure], nonzero[sure])
        counted, added = (active_gates, nonzero) if skip else (candidates[:decode], candidates[:decode])
        gated = tensors.gate is not None
        read = [
            int(rows.any(axis=0).sum())
            for rows in (candidates[:decode], counted if gated else counted[:0], added)
        ]
        runs = 0
        dense = is_dense(tensors.down_layout, tensors.down.type, tensors.activation)
        if dense and decode:  # all is read, whatever is active
            read = [n, n * gated, n]
        elif tensors.down_layout == "by_output" and not dense and tensors.down.type.weights > 1:
            per_run = 16 if tensors.down.type.name == "Q6_K" else 32
            runs = len({int(i) // per_run for i in np.flatnonzero(added.any(axis=0))})
        counts = [0] * 5 if prompt else [*read, added.sum(), runs]  # of steps without a prompt row
        assert stats.counts.tolist() == [[0] * 5, counts, [0] * 5]


def test_ffn_whose_mask_names_nothing_is_its_bias(backend: Backend) -> None:
    random = rng("nothing")
    weights = backend.ffn_weights(
        tensors := random_ffn(random, (100, 64), ("Q8_0",) * 3, FFNKind(biases=True))
    )
    batch = plain_batch(backend, 3)
    mask = backend.zeros((batch.limits.tokens, 2), np.uint64)
    out, stats = filled(backend, batch.limits.tokens, 64), FFNStats(backend.zeros((1, 5), np.int64))
    x = buffers(backend, batch, random_rows(random, 3, 64))
    backend.ffn(FFNCall(x, weights, batch, out, skip=True, mask=mask, stats=stats))
    np.testing.assert_array_equal(out[:3], np.broadcast_to(tensors.down_bias, (3, 64)))
    assert not stats.counts.any()


@pytest.mark.parametrize("types", [("F32", "F32"), ("F16", "F16"), ("Q8_0", "Q8_0"), ("Q4_0", "F16")])
@pytest.mark.parametrize("relu", [True, False])
def test_predict(backend: Backend, types: tuple[str, str], relu: bool) -> None:
    for n, d, rank in ((100, 64, 32), (172, 96, 64), (1000, 256, 32)):
        random = rng("predict", types, n)
        tensors = PredictorTensors(
            random_tensor(random, types[0], rank, d), random_tensor(random, types[1], n, rank),
            random_rows(random, n) * 0.2, relu,
        )  # fmt: skip
        weights = backend.predictor_weights(tensors)
        for decode, prompt in ((1, 0), (3, 0), (16, 0), (2, 3), (0, 4)):
            batch = plain_batch(backend, decode, prompt)
            x = random_rows(random, decode + prompt, d)
            mask = backend.zeros((batch.limits.tokens, -(-n // 64)), np.uint64)
            mask[:] = 9
            backend.predict(buffers(backend, batch, x), weights, batch, mask)
            truth = scores(x[:decode], tensors)
            margin = truth.values - tensors.threshold
            sure = np.abs(margin) > truth.bounds
            assert decode == 0 or sure.mean() > 0.5
            np.testing.assert_array_equal(to_bits(mask[:decode], n)[sure], (margin >= 0)[sure])
            beyond = -n % 64
            assert decode == 0 or not beyond or not (mask[:decode, -1] >> np.uint64(64 - beyond)).any()
            assert (mask[decode:] == 9).all()
