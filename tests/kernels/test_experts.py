"""The FFN op and predictors for experts, against float64 brute force of each expert by itself (op_truth)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support.bits import same_bits
from support.expert_layers import Layer, choices, make_layer
from support.op_truth import (
    FFNKind,
    ffn,
    gate_and_up,
    plain_batch,
    random_rows,
    random_tensor,
    rng,
    scores,
    to_bits,
    to_words,
)

from hotcold.formats.blocks import quantise
from hotcold.kernels.backend import (
    FFN_COUNTS,
    Backend,
    Chosen,
    FFNCall,
    FFNStats,
    FFNTensors,
    FFNWeights,
    PredictorTensors,
)
from hotcold.kernels.cpu import CPUBackend

pytestmark = pytest.mark.one_driver  # of GPUs; the op table looks at the second one

OpenBackend = Callable[..., Backend]

#: (decode rows, prompt rows) of a step
STEPS = ((1, 0), (2, 0), (16, 0), (0, 1), (0, 70), (3, 9), (16, 17))


@functools.cache
def _pool(make: tuple[Any, ...]) -> np.ndarray:
    layer, random = make_layer(*make), rng("rows", make)
    rows = random_rows(random, 100, layer.tensors.up.shape[1])
    while True:
        edge = np.zeros(len(rows), np.bool_)
        for tensors in filter(None, layer.experts):
            gate, up = gate_and_up(rows, tensors)
            edge |= np.minimum(np.abs(gate - tensors.threshold), np.abs(up)).min(axis=1) < 1e-6
        if not edge.any():
            return rows
        rows[edge] = random_rows(random, int(edge.sum()), rows.shape[1])


def rows_for(make: tuple[Any, ...], count: int, start: int = 0) -> np.ndarray:
    """Inputs that put no gate of any expert on the edge of firing."""
    return _pool(make)[start : start + count].copy()


@dataclass
class Truth:
    out: np.ndarray
    bounds: np.ndarray
    active: list[np.ndarray]  # of each expert [rows, N]; False where it was not chosen
    gated: list[np.ndarray]  # active gates, likewise
    sure: list[np.ndarray]


def truth_of(
    layer: Layer, x: np.ndarray, ids: np.ndarray, factors: np.ndarray, candidates: list[np.ndarray]
) -> Truth:
    """Row by row, expert by expert, in float64."""
    out, bounds = np.zeros(x.shape), np.full((len(x), 1), 1e-30)
    active = [np.zeros(c.shape, np.bool_) for c in candidates]
    gated, sure = [f.copy() for f in active], [np.ones(f.shape, np.bool_) for f in active]
    for e, tensors in enumerate(layer.experts):
        rows, places = np.nonzero(ids == e)
        if not len(rows):
            continue
        factor = factors[rows, places].astype(np.float64)[:, None]
        bias = 0 if layer.biases is None else layer.biases[e].astype(np.float64)
        out[rows] += factor * bias
        bounds[rows] += 1e-5 * factor * np.abs(bias).max()
        if tensors is None:
            continue
        answer = ffn(x[rows], tensors, candidates[e][rows])
        out[rows] += factor * answer.out.values
        bounds[rows] += factor * np.max(answer.out.bounds, axis=1, keepdims=True)
        active[e][rows] = answer.coefficients != 0
        gated[e][rows] = answer.active_gates & candidates[e][rows]
        sure[e][rows] = (answer.coefficients == 0) | (np.abs(answer.coefficients) > 1e-6)
    return Truth(out, bounds, active, gated, sure)


def words_of(bits: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([to_words(each) for each in bits if each.shape[1]], axis=1)


def run(
    backend: Backend,
    weights: FFNWeights,
    x: np.ndarray,
    decode: int,
    chosen: tuple[np.ndarray, np.ndarray],
    *,
    skip: bool,
    mask: np.ndarray | None = None,
    accumulate: bool = False,
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """The result, the active neurons and the counts; buffers have more rows than the step, which stay as they
    are."""
    batch = plain_batch(backend, decode, len(x) - decode)
    rows, dim, k = batch.limits.tokens, x.shape[1], chosen[0].shape[1]
    buffer, out = backend.zeros((rows, dim)), backend.zeros((rows, dim))
    buffer[:], buffer[: len(x)], out[:] = np.nan, x, 7
    ids, factors = backend.zeros((rows, k), np.int32), backend.zeros((rows, k))
    ids[:], ids[: len(x)], factors[: len(x)] = -5, chosen[0], chosen[1]
    active = backend.zeros((rows, weights.words), np.uint64)
    active[:] = 5
    words = None
    if mask is not None:
        words = backend.zeros((rows, weights.words + 1), np.uint64)  # the last is another's
        words[:] = ~np.uint64(0)
        words[: len(mask), : weights.words] = mask
    stats = FFNStats(backend.zeros((2, len(FFN_COUNTS)), np.int64), 1)
    options: dict[str, Any] = {"skip": skip, "mask": words, "accumulate": accumulate}
    backend.ffn(
        FFNCall(
            buffer, weights, batch, out, active=active, stats=stats, chosen=Chosen(ids, factors), **options
        )
    )
    assert (out[len(x) :] == 7).all() and (active[decode:] == 5).all() and not stats.counts[0].any()
    return out[: len(x)].copy(), active[:decode].copy(), stats.counts[1].tolist()


@functools.cache
def expectation(make: tuple[Any, ...], decode: int, prompt: int, *, masked: bool) -> tuple[Any, ...]:
    """Inputs of a step, its choice, its candidates and the truth: the same for every backend."""
    layer, key = make_layer(*make), (make, decode, prompt)
    x = rows_for(make, decode + prompt, decode)
    chosen = choices(key, len(x), len(layer.sizes), layer.tensors.chosen)
    candidates = [np.ones((len(x), n), np.bool_) for n in layer.sizes]
    random = rng("masks", key)
    if masked:
        for each in candidates:
            each[:decode] = random.random((decode, each.shape[1])) < 0.3
    return x, chosen, candidates, truth_of(layer, x, *chosen, candidates)


def check(backend: Backend, *make: Any, steps: Sequence[tuple[int, int]] = STEPS) -> None:
    layer = make_layer(*make)
    weights = backend.ffn_weights(layer.tensors)
    assert weights.neurons == sum(layer.sizes) and weights.words == layer.word_begins[-1]
    sparse = layer.tensors.activation in ("relu", "drelu", "relu2")
    for at, (decode, prompt) in enumerate(steps):
        masked, skip = at % 2 == 1, sparse and at % 3 != 1
        x, chosen, candidates, truth = expectation(make, decode, prompt, masked=masked)
        mask = words_of([each[:decode] for each in candidates]) if masked else None
        out, active, counts = run(
            backend, weights, x, decode, chosen, skip=skip, mask=mask, accumulate=masked
        )
        excess = np.abs(out - (truth.out + 7 * masked)) / (truth.bounds + 7e-6 * masked)
        assert np.isfinite(out).all() and excess.max(initial=0) <= 1, (decode, prompt, excess.max())
        for e, (first, end) in enumerate(pairwise(layer.word_begins)):
            if end > first and decode:
                got = to_bits(active[:, first:end], layer.sizes[e])
                sure = truth.sure[e][:decode]
                np.testing.assert_array_equal(got[sure], truth.active[e][:decode][sure])
        expected = [0] * 5 if prompt else counted(layer, truth, candidates, chosen[0], skip=skip)
        assert counts == expected, (decode, prompt, skip, masked)


def counted(
    layer: Layer, truth: Truth, candidates: list[np.ndarray], ids: np.ndarray, *, skip: bool
) -> list[int]:
    """Counts what a step without prompt rows reads, by expert: unions over the rows that chose it."""
    total = np.zeros(5, np.int64)
    for e, tensors in enumerate(layer.experts):
        rows = np.nonzero(ids == e)[0]
        if tensors is None or not len(rows):
            continue
        named = candidates[e][rows]
        gated, added = (truth.gated[e][rows], truth.active[e][rows]) if skip else (named, named)
        ups = gated if tensors.gate is not None else gated[:0]
        read = [int(which.any(axis=0).sum()) for which in (named, ups, added)]
        runs, by_output = 0, tensors.down_layout == "by_output"
        if by_output and tensors.activation in ("silu", "gelu"):
            n = layer.sizes[e]
            read = [n, n * (tensors.gate is not None), n]
        elif by_output and tensors.down.type.weights > 1:
            per_run = 16 if tensors.down.type.name == "Q6_K" else 32
            runs = len({int(i) // per_run for i in np.flatnonzero(added.any(axis=0))})
        total += (*read, int(added.sum()), runs)
    return [int(each) for each in total]


CASES = [
    (FFNKind("relu", biases=True), ("Q4_0",) * 3, "by_neuron"),
    (FFNKind("drelu"), ("Q8_0", "F16", "Q5_1"), "by_neuron"),
    (FFNKind("relu2", gated=False), ("F16",) * 3, "by_output"),
    (FFNKind("relu"), ("Q4_0", "Q4_0", "Q5_0"), "by_output"),  # panels
    (FFNKind("silu", biases=True), ("Q4_0",) * 3, "by_output"),
    (FFNKind("gelu"), ("F16", "BF16", "F16"), "by_output"),
    (FFNKind("silu", biases=True), ("Q8_0", "Q8_0", "F32"), "by_neuron"),
]


@pytest.mark.parametrize(("kind", "types", "layout"), CASES, ids=str)
def test_few_large_experts(backend: Backend, kind: FFNKind, types: tuple[str, str, str], layout: str) -> None:
    """As Mixtral has: two of eight."""
    check(backend, 2, (416,) * 8, 64, types, kind, layout)


@pytest.mark.parametrize(("kind", "types", "layout"), CASES, ids=str)
def test_many_small_experts(
    backend: Backend, kind: FFNKind, types: tuple[str, str, str], layout: str
) -> None:
    """As Qwen3-MoE has: eight of 128."""
    steps = ((1, 0), (5, 6)) if kind.gated else ((3, 0), (0, 20))
    check(backend, 8, (96,) * 128, 64, types, kind, layout, steps=steps)


@pytest.mark.parametrize("types", [("Q4_K", "Q4_K", "Q6_K"), ("Q6_K", "Q5_K", "Q4_K")], ids=str)
@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("layout", ["by_neuron", "by_output"])
def test_blocks_of_256(backend: Backend, types: tuple[str, str, str], activation: str, layout: str) -> None:
    steps = ((1, 0), (5, 0), (2, 9))
    check(backend, 2, (512,) * 3, 256, types, FFNKind(activation), layout, steps=steps)


@pytest.mark.parametrize("layout", ["by_neuron", "by_output"])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_a_shared_expert_has_a_factor(backend: Backend, activation: str, layout: str) -> None:
    kind = FFNKind(activation, biases=True)
    check(backend, 1, (300,), 64, ("F16",) * 3, kind, layout)


@pytest.mark.parametrize("case", [(0, 70, 1, 300, 64), (130, 64, 0, 65, 0)], ids=str)
def test_experts_of_a_half_differ_in_size(backend: Backend, case: tuple[int, ...]) -> None:
    """Also none at all, where a bias may still be: the hot half adds it."""
    for kind in (FFNKind("relu", biases=True), FFNKind("silu")):
        check(backend, 2, case, 64, ("Q8_0",) * 3, kind)


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("type", ["F16", "Q4_0"])
def test_whole_experts_of_a_half_by_output(backend: Backend, activation: str, type: str) -> None:
    kind = FFNKind(activation, biases=True)
    check(backend, 3, (96, 0, 0, 96), 64, (type,) * 3, kind, "by_output")


@pytest.mark.parametrize("type", ["F16", "Q5_0", "MXFP4"])
@pytest.mark.parametrize("kind", [FFNKind("relu", biases=True), FFNKind("relu2", gated=False)], ids=str)
def test_parts_of_experts_of_a_half_by_output(backend: Backend, kind: FFNKind, type: str) -> None:
    """Blocks of neurons, other ones of each expert."""
    steps = ((1, 0), (5, 6), (0, 20))
    check(backend, 3, (64, 0, 160, 96, 32), 64, (type,) * 3, kind, "by_output", steps=steps)


@pytest.mark.parametrize("type", ["Q4_0", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_panels_of_ungated_experts(backend: Backend, type: str) -> None:
    """The block types of Nemotron's files, in experts that end within a word of a mask; D / 32 is odd."""
    kind, steps = FFNKind("relu2", gated=False), ((1, 0), (5, 6))
    check(backend, 3, (224,) * 5, 96, (type,) * 3, kind, "by_output", steps=steps)


def test_blocks_that_do_not_fit_are_refused(backend: Backend) -> None:
    layer = make_layer(2, (64, 96, 32), 64, ("Q8_0",) * 3, layout="by_output")
    blocks = layer.tensors.down_blocks
    assert blocks is not None
    with pytest.raises(ValueError, match="each of 3 experts needs those of its rows of up"):
        backend.ffn_weights(replace(layer.tensors, down_blocks=~blocks))
    with pytest.raises(ValueError, match="down must be whole, or have an activation with zeros"):
        backend.ffn_weights(replace(layer.tensors, activation="silu"))


@pytest.mark.parametrize(("activation", "layout"), [("silu", "by_output"), ("relu", "by_neuron")])
def test_each_experts_matrices_are_multiplied(backend: Backend, activation: str, layout: str) -> None:
    """As the ``.scale`` of NVFP4's matrices does."""
    scales = 0.3, 1.5, 1.0, 2.0
    check(backend, 2, (64,) * 4, 64, ("NVFP4",) * 3, FFNKind(activation, biases=True), layout, *scales)


@pytest.mark.parametrize("layout", ["by_neuron", "by_output"])
@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("which", ["the same", "each another", "all"])
def test_every_kind_of_choice(backend: Backend, which: str, activation: str, layout: str) -> None:
    experts, rows = 16, 16
    k = experts if which == "all" else 1
    make = k, (96,) * experts, 64, ("Q4_0",) * 3, FFNKind(activation), layout
    layer = make_layer(*make)
    weights = backend.ffn_weights(layer.tensors)
    ids = {
        "the same": np.full((rows, 1), 15),
        "each another": np.arange(rows)[::-1, None],
        "all": np.tile(np.arange(experts), (rows, 1)),
    }[which].astype(np.int32)
    factors = rng("factors").uniform(-1, 1, ids.shape).astype(np.float32)
    x = rows_for(make, rows)
    candidates = [np.ones((rows, n), np.bool_) for n in layer.sizes]
    truth = truth_of(layer, x, ids, np.abs(factors), candidates)
    exact = truth_of(layer, x, ids, factors, candidates)
    for decode in (rows, 0, 5):
        out, _, _ = run(backend, weights, x, decode, (ids, factors), skip=False)
        assert (np.abs(out - exact.out) <= truth.bounds).all()


def test_ids_that_no_expert_has_are_refused(backend: Backend) -> None:
    layer = make_layer(2, (96,) * 4, 64, ("F16",) * 3)
    weights = backend.ffn_weights(layer.tensors)
    x, factors = random_rows(rng("x"), 3, 64), np.ones((3, 2), np.float32)
    for decode in (3, 0):
        for bad, words in (
            ((1, 4), r"expert 4 of row 2 is out of range; allowed: 0 to 3"),
            ((-1, 2), r"expert -1 of row 2 is out of range; allowed: 0 to 3"),
            ((2, 2), r"expert 2 of row 2 follows 2: a row's experts must ascend"),
            ((3, 0), r"expert 0 of row 2 follows 3: a row's experts must ascend"),
            ((2**31 - 1, 0), r"expert 2147483647 of row 2 is out of range; allowed: 0 to 3"),
        ):
            ids = np.array([(0, 1), (2, 3), bad], np.int32)
            with pytest.raises(ValueError, match=words):
                run(backend, weights, x, decode, (ids, factors), skip=True)
    run(backend, weights, x, 3, (np.array([(0, 1)] * 3, np.int32), factors), skip=True)


def test_experts_need_a_choice(backend: Backend) -> None:
    layer = make_layer(2, (96,) * 4, 64, ("F16",) * 3)
    weights, batch = backend.ffn_weights(layer.tensors), plain_batch(backend, 2)
    x, out = (backend.zeros((batch.limits.tokens, 64)) for _ in range(2))
    with pytest.raises(ValueError, match="4 experts: chosen must say which each row takes"):
        backend.ffn(FFNCall(x, weights, batch, out, skip=True))


@pytest.mark.parametrize(
    ("experts", "k", "words"),
    [
        (1025, 2, r"of 1025 experts: up to 1024 are allowed"),
        (40, 33, r"k 33 of 40 experts: 1 to 32 are allowed"),
    ],
)
def test_more_experts_than_kernels_have_room_for(backend: Backend, experts: int, k: int, words: str) -> None:
    rows = quantise(np.zeros((experts, 32), np.float32), "F32")
    ffn = FFNTensors(None, rows, rows, "by_neuron", "relu", experts=experts, chosen=k)
    with pytest.raises(ValueError, match=f"ffn {words}"):
        backend.ffn_weights(ffn)
    first, threshold = quantise(np.zeros((32, 32), np.float32), "F32"), np.zeros(experts, np.float32)
    predictor = PredictorTensors(first, rows, threshold, True, experts=experts, chosen=k)
    with pytest.raises(ValueError, match=f"predictor {words}"):
        backend.predictor_weights(predictor)


@pytest.mark.parametrize("types", [("F32", "F16"), ("Q8_0", "Q4_0")], ids=str)
@pytest.mark.parametrize("relu", [True, False])
def test_predictors_share_their_first_factor(backend: Backend, types: tuple[str, str], relu: bool) -> None:
    sizes, k, d, rank = (100, 64, 0, 300, 1), 2, 64, 32
    random = rng("predict", types, relu)
    first, n = random_tensor(random, types[0], rank, d), sum(sizes)
    second = random_tensor(random, types[1], n, rank)
    threshold = random_rows(random, n) * np.float32(0.2)
    ends = tuple(int(end) for end in np.cumsum(sizes))
    tensors = PredictorTensors(first, second, threshold, relu, experts=len(sizes), chosen=k, expert_ends=ends)
    weights = backend.predictor_weights(tensors)
    truth_tensors = PredictorTensors(first, second, threshold, relu)
    begins = [0, *np.cumsum([-(-size // 64) for size in sizes])]
    for decode, prompt in ((1, 0), (7, 0), (16, 3), (0, 4)):
        batch = plain_batch(backend, decode, prompt)
        rows = batch.limits.tokens
        x, mask = backend.zeros((rows, d)), backend.zeros((rows, begins[-1]), np.uint64)
        ids, factors = backend.zeros((rows, k), np.int32), backend.zeros((rows, k))
        x[: decode + prompt] = random_rows(random, decode + prompt, d)
        ids[:decode], mask[:] = choices((types, decode), decode, len(sizes), k)[0], 9
        backend.predict(x, weights, batch, mask, Chosen(ids, factors))
        answer = scores(x[:decode], truth_tensors)
        margin = answer.values - threshold
        for e, (a, b) in enumerate(pairwise((0, *ends))):
            words = mask[:, begins[e] : begins[e + 1]]
            chose = (ids[:decode] == e).any(axis=1)
            assert (words[:decode][~chose] == 9).all() and (words[decode:] == 9).all()
            sure = (np.abs(margin) > answer.bounds)[:, a:b][chose]
            bits = to_bits(words[:decode][chose], b - a) if b > a else sure
            np.testing.assert_array_equal(bits[sure], (margin >= 0)[:, a:b][chose][sure])


BITS = [
    ("relu", "Q4_0", "by_neuron"),
    ("relu", "Q5_1", "by_output"),
    ("relu", "F16", "by_output"),
    ("silu", "Q4_0", "by_output"),
    ("silu", "F16", "by_output"),
    ("drelu", "BF16", "by_neuron"),
]


@pytest.mark.parametrize(("activation", "type", "layout"), BITS, ids=str)
def test_rows_are_the_same_in_any_batch_and_on_any_threads(
    open_exact: OpenBackend, activation: str, type: str, layout: str
) -> None:
    """Alone, among others as decode rows, in prompts of any length; exact is off."""
    layer = make_layer(3, (992,) * 6, 64, (type,) * 3, FFNKind(activation), layout)
    x, chosen = random_rows(rng("x"), 80, 64), choices("bits", 80, 6, 3)
    backend = open_exact()
    weights = backend.ffn_weights(layer.tensors)

    def part(rows: slice, decode: int, with_threads: int = 2, *, skip: bool = False) -> np.ndarray:
        b = open_exact(with_threads)
        w = weights if with_threads == 2 else b.ffn_weights(layer.tensors)
        return run(b, w, x[rows], decode, (chosen[0][rows], chosen[1][rows]), skip=skip)[0]

    alone = np.vstack([part(slice(t, t + 1), 1) for t in range(20)])
    sparse = activation != "silu"
    for decode in (2, 7, 16):
        same_bits(part(slice(0, decode), decode, skip=sparse), alone[:decode])
    whole = part(slice(0, 80), 0)
    same_bits(whole[:20], alone)
    for start, stop in pairwise((0, 1, 3, 16, 33, 80)):
        same_bits(part(slice(start, stop), 0), whole[start:stop])
    same_bits(part(slice(0, 80), 16, skip=sparse), whole)
    for threads in (1, 3, 8, 40) if isinstance(backend, CPUBackend) else ():
        same_bits(part(slice(0, 80), 16, threads), whole)


def test_a_program_of_experts_reads_its_choice_anew(backend: Backend) -> None:
    make = 2, (96,) * 8, 64, ("Q4_0",) * 3
    layer = make_layer(*make)
    weights, batch = backend.ffn_weights(layer.tensors), plain_batch(backend, 4, 3)
    rows = batch.limits.tokens
    x, out = backend.zeros((rows, 64)), backend.zeros((rows, 64))
    x[:7] = rows_for(make, 7)
    chosen = Chosen(backend.zeros((rows, 2), np.int32), backend.zeros((rows, 2)))
    program = backend.record(lambda: backend.ffn(FFNCall(x, weights, batch, out, skip=True, chosen=chosen)))
    for at, (tokens, decode) in enumerate(((7, 4), (0, 0), (3, 3), (7, 0))):
        batch.counts[:2] = tokens, decode
        ids, factors = choices(("anew", at), 7, 8, 2)
        chosen.ids[:7], chosen.factors[:7] = ids, factors
        out[:] = 7
        program.run()
        candidates = [np.ones((tokens, n), np.bool_) for n in layer.sizes]
        truth = truth_of(layer, x[:tokens], ids[:tokens], factors[:tokens], candidates)
        assert (np.abs(out[:tokens] - truth.out) <= truth.bounds).all()
        assert (out[tokens:] == 7).all()
