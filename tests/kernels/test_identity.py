"""No bit of the CPU's results depends on skipping, batches, chunks, threads or replay."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from support.bits import same_bits
from support.op_truth import (
    FFNKind,
    Row,
    dot,
    make_batch,
    page_count,
    plain_batch,
    random_cache,
    random_ffn,
    random_rows,
    random_tensor,
    rng,
    to_words,
)

from hotcold.formats.blocks import BLOCK_TYPES
from hotcold.kernels import _native
from hotcold.kernels.backend import (
    PAGE,
    SPARSE_ACTIVATIONS,
    AttentionCall,
    Backend,
    FFNCall,
    FFNTensors,
    FFNWeights,
    Matrix,
    Norm,
    PredictorTensors,
    RopeTable,
)
from hotcold.kernels.cpu import CPUBackend
from hotcold.kernels.instruction_sets import supported_isas

pytestmark = pytest.mark.one_driver  # of GPUs; the op table looks at the second one

OpenBackend = Callable[..., Backend]

TYPES = tuple(BLOCK_TYPES)
LAYOUTS = ("by_neuron", "by_output")


def shape_of(type: str) -> tuple[int, int]:
    """(N, D): more ranges than one thread claims at once; not a multiple of 64 neurons where blocks allow."""
    return (352, 128) if BLOCK_TYPES[type].weights <= 32 else (512, 256)


def run_ffn(
    backend: Backend,
    weights: FFNWeights,
    x: np.ndarray,
    decode: int,
    mask: np.ndarray | None = None,
    *,
    skip: bool,
) -> np.ndarray:
    batch = plain_batch(backend, decode, len(x) - decode)
    rows = batch.limits.tokens
    buffer, out = backend.zeros((rows, x.shape[1])), backend.zeros((rows, x.shape[1]))
    buffer[: len(x)] = x
    words = None
    if mask is not None:
        words = backend.zeros((rows, -(-weights.neurons // 64)), np.uint64)
        words[: len(x)] = to_words(mask)
    backend.ffn(FFNCall(buffer, weights, batch, out, skip=skip, mask=words))
    return out[: len(x)].copy()


def tensors_of(type: str, activation: str, layout: str, *, gated: bool = True) -> FFNTensors:
    random = rng("identity", type, activation)
    return random_ffn(
        random, shape_of(type), (type,) * 3, FFNKind(activation, gated=gated, biases=True), layout
    )


#: Each type with each layout.
MADE = [(type, layout) for type in TYPES for layout in LAYOUTS]


@pytest.mark.parametrize(
    ("activation", "type", "layout"),  # each pair of values of two of them comes up
    [
        (activation, type, LAYOUTS[(i + j) % 2])
        for i, activation in enumerate(SPARSE_ACTIVATIONS)
        for j, type in enumerate(TYPES)
    ],
)
def test_exact_is_off(open_exact: OpenBackend, activation: str, type: str, layout: str) -> None:
    backend, x = open_exact(), random_rows(rng("x"), 16, shape_of(type)[1])
    for gated in (True, False) if activation != "drelu" else (True,):
        weights = backend.ffn_weights(tensors_of(type, activation, layout, gated=gated))
        for rows in (1, 16):
            off = run_ffn(backend, weights, x[:rows], rows, skip=False)
            same_bits(run_ffn(backend, weights, x[:rows], rows, skip=True), off)


@pytest.mark.parametrize("type", [name for name, type in BLOCK_TYPES.items() if type.panels])
def test_exact_is_off_where_most_neurons_are_active(type: str) -> None:
    """Runs of 16 neurons with 0 to 7 inactive ones: panels add a run with few of them whole."""
    neurons, width = shape_of(type)
    inactive = np.argsort(rng("inactive").random((neurons // 16, 16))) < np.arange(neurons // 16)[:, None] % 8
    bias = np.where(inactive.reshape(-1), np.float32(-1e4), np.float32(1e4))
    x = random_rows(rng("x"), 16, width)
    for isa, activation in product(supported_isas(), SPARSE_ACTIVATIONS):
        backend = CPUBackend(2, isa)
        tensors = replace(tensors_of(type, activation, "by_output"), gate_bias=bias)
        weights = backend.ffn_weights(tensors)
        for rows in (1, 16):
            off = run_ffn(backend, weights, x[:rows], rows, skip=False)
            same_bits(run_ffn(backend, weights, x[:rows], rows, skip=True), off)


@pytest.mark.parametrize(
    ("type", "layout", "skip"),  # each pair of values of two of them comes up
    [(type, layout, bool((i // 2 + i) % 2)) for i, (type, layout) in enumerate(MADE)],
)
def test_an_ffn_row_is_the_same_in_any_batch(
    open_exact: OpenBackend, type: str, layout: str, skip: bool
) -> None:
    """Alone, among 2 to 16 decode rows, beside prompt rows; also where others' masks name other neurons."""
    backend, x = open_exact(), random_rows(rng("x"), 24, shape_of(type)[1])
    weights = backend.ffn_weights(tensors_of(type, "relu", layout))
    masks = rng("masks").random((24, shape_of(type)[0])) < 0.2
    for mask in (None, masks):
        alone = np.vstack(
            [
                run_ffn(
                    backend, weights, x[t : t + 1], 1, None if mask is None else mask[t : t + 1], skip=skip
                )
                for t in range(16)
            ]
        )
        for rows in (2, 3, 7, 16):
            together = None if mask is None else mask[:rows]
            same_bits(run_ffn(backend, weights, x[:rows], rows, together, skip=skip), alone[:rows])
        same_bits(run_ffn(backend, weights, x, 16, mask, skip=skip)[:16], alone)


@pytest.mark.parametrize(("type", "layout"), MADE)
def test_an_ffn_prompt_row_is_the_same_in_any_chunk(open_exact: OpenBackend, type: str, layout: str) -> None:
    backend, x = open_exact(), random_rows(rng("x"), 70, shape_of(type)[1])
    weights = backend.ffn_weights(tensors_of(type, "drelu", layout))
    whole = run_ffn(backend, weights, x, 0, skip=True)
    for start, stop in pairwise((0, 1, 3, 16, 33, 70)):
        same_bits(run_ffn(backend, weights, x[start:stop], 0, skip=True), whole[start:stop])


@pytest.mark.parametrize(
    ("type", "count", "columns"),
    [(type, 103, 544 if BLOCK_TYPES[type].weights <= 32 else 768) for type in TYPES]
    # Longer than what is read of plain rows at once, and no whole number of vectors.
    + [(type, 29, 8235) for type in TYPES if BLOCK_TYPES[type].weights == 1],
)
def test_a_linear_row_is_the_same_in_any_batch(
    open_exact: OpenBackend, type: str, count: int, columns: int
) -> None:
    """The numbers of rows and tokens divide neither into tiles nor into what is computed at once."""
    backend, x = open_exact(), random_rows(rng("x"), 70, columns)
    matrix = backend.matrix(random_tensor(rng("linear"), type, count, columns))

    def run(rows: np.ndarray, decode: int) -> np.ndarray:
        batch = plain_batch(backend, decode, len(rows) - decode)
        buffer = backend.zeros((batch.limits.tokens, columns))
        out = backend.zeros((batch.limits.tokens, count))
        buffer[: len(rows)] = rows
        backend.linear(buffer, [matrix], batch, [out])
        return out[: len(rows)].copy()

    alone = np.vstack([run(x[t : t + 1], 1) for t in range(len(x))])
    few = [(rows, rows) for rows in (2, 3, 4, 5, 6, 7, 16)]
    for rows, decode in (*few, (20, 4), (40, 0), (33, 1), (65, 0), (66, 16), (67, 1), (70, 0)):
        same_bits(run(x[:rows], decode), alone[:rows])


def products(backend: Backend, matrix: Matrix, rows: np.ndarray) -> np.ndarray:
    batch = plain_batch(backend, len(rows), 0)
    buffer = backend.zeros((batch.limits.tokens, matrix.shape[1]))
    out = backend.zeros((batch.limits.tokens, matrix.shape[0]))
    buffer[: len(rows)] = rows
    backend.linear(buffer, [matrix], batch, [out])
    return out[: len(rows)].copy()


@pytest.mark.parametrize("type", ["IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS"])
def test_a_row_of_a_grid_is_the_same_opened_or_not(
    open_every: list[Callable[[int], Backend]], type: str
) -> None:
    """One token's dots read entries of grids by themselves, on each instruction set; odd numbers of
    super-blocks end within a vector."""
    for open_cpu in open_every:
        backend = open_cpu(1)
        for columns in (256, 768, 1024):
            matrix = backend.matrix(random_tensor(rng("grid", columns), type, 9, columns))
            x = random_rows(rng("x", columns), 3, columns)
            outs = [products(backend, matrix, rows) for rows in (x, *x[:, None])]
            same_bits(np.vstack(outs[1:]), outs[0])


@pytest.mark.parametrize("type", [name for name, type in BLOCK_TYPES.items() if type.weights == 32])
def test_rows_whose_blocks_end_within_a_vector(open_every: list[Callable[[int], Backend]], type: str) -> None:
    """One token's dots and those of a tile may take two rows at once there, and one is left over."""
    for open_cpu in open_every:
        backend = open_cpu(1)
        for columns in (64, 128, *range(544, 768, 32), 832):
            tensor = random_tensor(rng("end", columns), type, 19, columns)
            matrix, x = backend.matrix(tensor), random_rows(rng("x", columns), 16, columns)
            alone = np.vstack([products(backend, matrix, row[None]) for row in x])
            dot(x, tensor).check(alone, columns)
            for rows in (3, 4, 8, 11, 16):
                same_bits(products(backend, matrix, x[:rows]), alone[:rows])


def run_attention(backend: Backend, rows: Iterable[tuple[Row, bool]], type: str = "f16") -> np.ndarray:
    """Rows with their queries; what one sees depends neither on the other rows nor on its pages."""
    rows = list(rows)
    batch = make_batch(backend, [r for r, decode in rows if decode], [r for r, decode in rows if not decode])
    heads, shape = 6, (2, PAGE, 64 if type == "q8_0" else 24)
    k_cache, v_cache = (random_cache(rng(), backend, (page_count(batch), *shape), type) for _ in range(2))
    for cache, name in ((k_cache, "k"), (v_cache, "v")):
        for sequence, pages in enumerate(batch.pages):
            cache[pages] = random_cache(rng(name, sequence), backend, (20, *shape), type)[: len(pages)]
    q, out = (backend.zeros((batch.limits.tokens, heads, shape[-1])) for _ in range(2))
    for t, (row, _) in enumerate(rows):
        q[t] = random_rows(rng("q", row.sequence, row.position), heads, shape[-1])
    backend.attention(AttentionCall(q, k_cache, v_cache, batch, out, 0.3))
    return out[: len(rows)].copy()


@pytest.mark.parametrize("type", ["f16", "q8_0"])
def test_an_attention_row_is_the_same_in_any_batch(open_exact: OpenBackend, type: str) -> None:
    run = functools.partial(run_attention, open_exact(), type=type)
    decode = [(Row(position, s), True) for s, position in enumerate((0, 31, 32, 255, 256, 511, 600))]
    prompt = [(Row(position, 7), False) for position in range(240, 290)]
    alone = np.vstack([run([row]) for row in decode])
    same_bits(run(decode), alone)
    same_bits(run(decode + prompt)[: len(decode)], alone)
    whole = run(prompt)
    same_bits(run(decode + prompt)[len(decode) :], whole)
    for start, stop in pairwise((0, 1, 16, 33, 50)):
        same_bits(run(prompt[start:stop]), whole[start:stop])


@pytest.mark.parametrize("type", ["f16", "q8_0"])
def test_a_prompt_row_attends_as_a_decode_row(open_exact: OpenBackend, type: str) -> None:
    rows = [Row(position, 0) for position in (0, 33, 255, 256, 300)]
    same_bits(
        run_attention(open_exact(), [(row, True) for row in rows], type),
        run_attention(open_exact(), [(row, False) for row in rows], type),
    )


def one_of_each(backend: Backend) -> list[np.ndarray]:
    """Results of a program of all ops but attention, run twice with other rows in between."""
    random = rng("each")
    d, n, rank = 128, 700, 32
    ffn = backend.ffn_weights(random_ffn(random, (n, d), ("Q4_0", "Q8_0", "F16")))
    table = backend.matrix(random_tensor(random, "BF16", 50, d))
    square = backend.matrix(random_tensor(random, "Q8_0", d, d))
    first, second = random_tensor(random, "Q8_0", rank, d), random_tensor(random, "F16", n, rank)
    threshold = random_rows(random, n) * np.float32(0.1)
    predictor = backend.predictor_weights(PredictorTensors(first, second, threshold, True))
    norm = Norm(random_rows(random, d), None, 1e-5)
    angles = random.standard_normal((64, 16))
    rope = RopeTable(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), True)
    batch = make_batch(
        backend, [Row(t, token=t) for t in range(7)], [Row(t, token=t) for t in range(7, 30)], [3, 29]
    )
    rows = batch.limits.tokens
    x, y, z = (backend.zeros((rows, d)) for _ in range(3))
    last = backend.zeros((batch.limits.logits, d))
    mask = backend.zeros((rows, -(-n // 64)), np.uint64)

    def step() -> None:
        backend.embed(table, batch, x)
        backend.norm(x, norm, batch, y)
        backend.linear(y, [square, square], batch, [z, x], accumulate=True)
        backend.rope(z.reshape(rows, 2, d // 2), rope, batch)
        backend.predict(x, predictor, batch, mask)
        backend.ffn(FFNCall(y, ffn, batch, x, skip=True, mask=mask, accumulate=True))
        backend.add(x, z, batch)
        backend.gather(x, batch, last)

    results = []
    z[:] = 0
    step()
    results.append(x.copy())
    program = backend.record(step)
    for counts in ((30, 7, 2, 1), (5, 5, 1, 1), (30, 7, 2, 1)):
        for buffer in (x, y, z, last):
            buffer[:] = 0
        batch.counts[:] = counts
        program.run()
        results += [x.copy(), last.copy()]
    same_bits(results[1], results[0])
    same_bits(results[5], results[0])
    return results


def test_replay_is_immediate_and_threads_do_not_matter(open_exact: OpenBackend) -> None:
    single = one_of_each(open_exact(1))
    for threads in (2, 5):
        for actual, expected in zip(one_of_each(open_exact(threads)), single, strict=True):
            same_bits(actual, expected)


def test_threads_do_not_matter_to_products_side_by_side(open_exact: OpenBackend) -> None:
    """Pieces may end one matrix and begin the next, of another type; one is smaller than a piece."""
    shapes = {"Q4_0": 560, "F16": 75, "Q8_0": 8, "Q4_K": 301}
    random, x = rng("side by side"), random_rows(rng("x"), 3, 512)
    tensors = [random_tensor(random, type, rows, 512) for type, rows in shapes.items()]
    biases = [random_rows(random, rows) for rows in shapes.values()]

    def run(threads: int) -> list[np.ndarray]:
        backend = open_exact(threads)
        matrices = [backend.matrix(*each) for each in zip(tensors, biases, strict=True)]
        batch = plain_batch(backend, len(x), 0)
        buffer = backend.zeros((batch.limits.tokens, 512))
        buffer[: len(x)] = x
        outs = [backend.zeros((batch.limits.tokens, rows)) for rows in shapes.values()]
        backend.linear(buffer, matrices, batch, outs)
        return [out[: len(x)].copy() for out in outs]

    single = run(1)
    for tensor, bias, out in zip(tensors, biases, single, strict=True):
        dot(x, tensor, bias).check(out)
    for threads in (2, 3, 7):
        for actual, expected in zip(run(threads), single, strict=True):
            same_bits(actual, expected)


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_do_not_matter_to_attention(open_exact: OpenBackend, threads: int) -> None:
    rows = [(Row(position, s), True) for s, position in enumerate((5, 300, 600, 255))]
    rows += [(Row(position, 4), False) for position in range(200, 270)]
    same_bits(run_attention(open_exact(threads), rows), run_attention(open_exact(1), rows))


@pytest.mark.parametrize("isa", supported_isas())
def test_how_far_weights_are_fetched_changes_nothing(isa: str) -> None:
    backend, x = CPUBackend(2, isa), random_rows(rng("x"), 5, shape_of("Q4_0")[1])
    weights = [backend.ffn_weights(tensors_of("Q4_0", "relu", layout)) for layout in LAYOUTS]
    mask = rng("masks").random((5, shape_of("Q4_0")[0])) < 0.2
    runs = [(each, some) for each in weights for some in (None, mask)]
    results, own = [], _native.fetching()
    try:
        for fetching in (own, (0, 1), (64, 2), (1000, 1), (1 << 20, 2)):
            _native.set_fetching(*fetching)
            results.append(np.vstack([run_ffn(backend, each, x, 2, some, skip=True) for each, some in runs]))
    finally:
        _native.set_fetching(*own)
    for other in results[1:]:
        same_bits(other, results[0])
