"""The FFN op tells which neurons work hardest: against float64 brute force, and without a change of a bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from support.backends import ISAS
from support.expert_layers import make_layer
from support.op_truth import FFNKind, ffn, ffn_rows, plain_batch, random_ffn, rng, to_bits, to_words

from hotcold.formats.blocks import BLOCK_TYPES
from hotcold.kernels.backend import Backend, Chosen, FFNCall, FFNTensors, is_dense

OPENED = next(name for name, type in BLOCK_TYPES.items() if type.weights > 1 and not type.panels)
SMOOTH = (
    FFNKind("silu", biases=True),
    FFNKind("gelu", gated=False),
    FFNKind("gelu_erf"),
    FFNKind("swiglu_oai", limit=0.6, alpha=2.5),
)
CASES = [
    (kind, types)
    for kind in SMOOTH
    for types in (("F32",) * 3, ("Q4_0", "Q8_0", "Q5_1"), ("Q4_K", "Q4_K", "Q6_K"))
]
CASES += [(FFNKind("relu", threshold=threshold), ("F32", "F16", OPENED)) for threshold in (0.0, 2.5)]


CLAMPED = ("swiglu_oai",)
#: Others refuse it.
TELL = pytest.mark.parametrize(
    "backend", ["reference", "ordered", *(f"cpu-{isa}" for isa in ISAS)], indirect=True
)


def marked(backend: Backend, tensors: FFNTensors, x: Any, decode: int, candidates: Any = None) -> Any:
    """The op reports the strongest neurons of decode rows; its result does not depend on the request."""
    weights, batch = backend.ffn_weights(tensors), plain_batch(backend, decode, len(x) - decode)
    rows = batch.limits.tokens
    given, outs = backend.zeros((rows, x.shape[1])), [backend.zeros((rows, x.shape[1])) for _ in range(2)]
    given[: len(x)] = x
    strongest, mask = (backend.zeros((rows, weights.words), np.uint64) for _ in range(2))
    strongest[:] = 5
    options: dict[str, Any] = {"skip": False}
    if candidates is not None:
        mask[: len(x)] = to_words(candidates)
        options["mask"] = mask
    for out, more in zip(outs, ({}, {"strongest": strongest}), strict=True):
        backend.ffn(FFNCall(given, weights, batch, out, **options, **more))
    np.testing.assert_array_equal(*(out.view(np.uint32) for out in outs))
    assert (strongest[decode:] == 5).all()
    n = tensors.up.shape[0]
    assert not to_bits(strongest[:decode], 64 * weights.words)[:, n:].any()
    return to_bits(strongest[:decode], n)


@TELL
@pytest.mark.parametrize("kind, types", CASES, ids=str)
def test_the_tenth_that_works_hardest(backend: Backend, kind: FFNKind, types: tuple[str, str, str]) -> None:
    large = max(BLOCK_TYPES[type].weights for type in types)
    for n, d in ((100, 32), (1, 32), (416, 64)) if large == 1 else ((768, 256), (256, 512)):
        random = rng("strongest", types, n)
        tensors = random_ffn(random, (n, d), types, kind, "by_output")
        if not is_dense("by_output", tensors.down.type, kind.activation):
            continue
        for masked, decode, prompt in ((False, 1, 0), (False, 16, 0), (True, 3, 5)):
            x = ffn_rows(random, decode + prompt, tensors)
            candidates = np.ones((len(x), n), np.bool_)
            if masked:
                candidates[:decode] = random.random((decode, n)) < 0.3
            found = marked(backend, tensors, x, decode, candidates if masked else None)
            sizes = np.abs(ffn(x, tensors, candidates).coefficients[:decode])
            tenth = math.ceil(n / 10)
            least = np.sort(sizes, axis=1)[:, n - tenth][:, None]
            sure = np.abs(sizes - least) > 1e-4 * sizes.max(axis=1, keepdims=True)
            if least.min() > 0:
                counts = found.sum(axis=1)
                assert counts.min() == tenth
                assert counts.max() == tenth or kind.activation in CLAMPED  # which may be equal
            np.testing.assert_array_equal(found[sure], ((sizes > least) & (sizes > 0))[sure])
            np.testing.assert_array_equal(found[sizes == 0], False)


@TELL
def test_equals_zeros_and_what_is_no_number(backend: Backend) -> None:
    """It reports all equally large neurons and no zeros; NaN is the largest."""
    tensors = random_ffn(rng("equals"), (130, 32), ("F32",) * 3, FFNKind("silu"), "by_output")
    assert tensors.gate is not None
    for part in (tensors.gate, tensors.up):
        part.data.view(np.float32)[:] = np.arange(32) % 3  # whole numbers, whose sums are exact in any order
    x = np.zeros((3, 32), np.float32)
    x[0], x[2] = 1, np.nan
    assert marked(backend, tensors, x, 3).sum(axis=1).tolist() == [130, 0, 130]


def test_what_cannot_tell_it_refuses(backend: Backend) -> None:
    x, request = np.ones((2, 32), np.float32), {"strongest": backend.zeros((8, 2), np.uint64)}
    layer = make_layer(1, (32, 32), 32, ("F32",) * 3)
    ids, factors = backend.zeros((8, 1), np.int32), backend.zeros((8, 1))
    for tensors, options in (
        (random_ffn(rng("no"), (96, 32), ("F32",) * 3, FFNKind("silu"), "by_neuron"), {}),
        (random_ffn(rng("no"), (96, 32), ("F32",) * 3, FFNKind("relu"), "by_output"), {}),
        (layer.tensors, {"chosen": Chosen(ids, factors)}),
    ):
        batch, weights = plain_batch(backend, 2), backend.ffn_weights(tensors)
        given, out = backend.zeros((batch.limits.tokens, 32)), backend.zeros((batch.limits.tokens, 32))
        given[:2] = x
        with pytest.raises(ValueError, match="the strongest neurons: "):
            backend.ffn(FFNCall(given, weights, batch, out, skip=False, **options, **request))
