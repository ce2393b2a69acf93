"""The op table: ops on rows, on every backend and instruction set, against float64 brute force (op_truth)."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from support.op_truth import (
    Answer,
    Row,
    attention,
    buffers,
    cache_shape,
    cache_values,
    dot,
    filled,
    make_batch,
    page_count,
    plain_batch,
    random_cache,
    random_rows,
    random_tensor,
    rng,
    to_words,
)

from hotcold.formats.blocks import BLOCK_TYPES, quantise
from hotcold.kernels.backend import (
    PAGE,
    AttentionCall,
    Backend,
    IndexedBy,
    Norm,
    RopeTable,
    Rows,
)

TYPES = tuple(BLOCK_TYPES)
#: (decode rows, prompt rows) of a step
STEPS = ((1, 0), (2, 0), (3, 0), (16, 0), (0, 1), (0, 33), (3, 5), (16, 17))
#: (O, I); the last two only fit types without blocks
MATRICES = ((1, 32), (100, 64), (172, 96), (33, 256), (64, 544), (20, 768), (40, 4128), (7, 33), (5, 172))


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("shape", MATRICES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_linear(backend: Backend, type: str, shape: tuple[int, int]) -> None:
    rows, columns = shape
    if columns % BLOCK_TYPES[type].weights:
        return  # such a matrix cannot exist
    random = rng("linear", type, shape)
    tensor = random_tensor(random, type, rows, columns)
    bias = random_rows(random, rows)
    for accumulate, b in ((False, None), (False, bias), (True, bias)):
        matrix = backend.matrix(tensor, b)
        assert matrix.shape == shape and matrix.nbytes >= tensor.nbytes
        for decode, prompt in STEPS:
            x, batch = random_rows(random, decode + prompt, columns), plain_batch(backend, decode, prompt)
            out = filled(backend, batch.limits.tokens, rows)
            backend.linear(buffers(backend, batch, x), [matrix], batch, [out], accumulate=accumulate)
            answer = dot(x, tensor, b)
            expected = replace(answer, values=answer.values + 7 * accumulate)
            expected.check(out[: len(x)], (decode, prompt, accumulate))
            assert (out[len(x) :] == 7).all()


@pytest.mark.parametrize("type", ["NVFP4", "TQ2_0"])
def test_rows_are_multiplied_by_their_factors(backend: Backend, type: str) -> None:
    """A factor multiplies a matrix, or each expert's rows of one; a row has the same bits in every batch."""
    random = rng("factors", type)
    factors = np.array([1, 0, -0.75, 2.0**-12, 3e3] * 8, np.float32)
    tensor = replace(random_tensor(random, type, 40, 768), factors=factors)
    bias, x, outs = random_rows(random, 40), random_rows(random, 33, 768), []
    matrix = backend.matrix(tensor, bias)
    for decode, prompt in ((1, 0), (3, 0), (0, 33)):
        batch = plain_batch(backend, decode, prompt)
        out = filled(backend, batch.limits.tokens, 40)
        backend.linear(buffers(backend, batch, x[: decode + prompt]), [matrix], batch, [out])
        dot(x[: decode + prompt], tensor, bias).check(out[: decode + prompt], (decode, prompt))
        outs.append(np.array(out[: decode + prompt]))
    if backend.name != "reference":
        assert all((out == outs[-1][: len(out)]).all() for out in outs)
    table, batch = backend.matrix(tensor), make_batch(backend, [Row(0, token=7)])
    out = filled(backend, batch.limits.tokens, 768)
    backend.embed(table, batch, out)
    np.testing.assert_allclose(out[0], tensor.dequantise()[7], rtol=3e-7)


def test_linear_of_several_matrices_and_of_logits_rows(backend: Backend) -> None:
    random = rng("several")
    tensors = [random_tensor(random, type, n, 96) for type, n in (("Q8_0", 50), ("F16", 3), ("Q4_0", 64))]
    matrices = [backend.matrix(tensor) for tensor in tensors]
    batch = make_batch(backend, [Row(t) for t in range(4)], logits=[3, 1])
    for rows, n in ((Rows.TOKENS, 4), (Rows.LOGITS, 2)):
        x = random_rows(random, batch.limits.tokens, 96)
        outs = [filled(backend, batch.limits.tokens, len(tensor.data)) for tensor in tensors]
        backend.linear(x, matrices, batch, outs, rows=rows)
        for tensor, out in zip(tensors, outs, strict=True):
            dot(x[:n], tensor).check(out[:n], tensor.type.name)
            assert (out[n:] == 7).all()


def test_codes_of_an_input_are_rounded_as_prescribed(backend: Backend) -> None:
    """Weights that are unit vectors read the codes off: halves go to even, and a zero block stays zero."""
    columns = 96
    x = np.zeros((1, columns), np.float32)
    x[0, :6] = (127, 0.5, 1.5, 2.5, -0.5, -3.5)  # scale 1
    x[0, 32:64] = rng("codes").standard_normal(32) * 1e-3
    identity = np.eye(columns, dtype=np.float32)
    batch = plain_batch(backend, 1)
    out = filled(backend, batch.limits.tokens, columns)
    backend.linear(
        buffers(backend, batch, x), [backend.matrix(quantise(identity * 127, "Q8_0"))], batch, [out]
    )
    np.testing.assert_array_equal(out[0, :6] / 127, (127, 0, 2, 2, 0, -4))
    largest = np.abs(x[0, 32:64]).max()
    codes = np.rint(x[0, 32:64] * (np.float32(127) / largest))
    np.testing.assert_allclose(out[0, 32:64] / 127, codes * (largest / np.float32(127)), rtol=1e-6)
    assert not out[0, 64:].any()


@pytest.mark.parametrize("scale", [1e-42, 1e-38, 1e-20, 1e30])
def test_inputs_of_any_magnitude_stay_finite(backend: Backend, scale: float) -> None:
    tensor = random_tensor(rng("magnitude"), "Q8_0", 40, 64)
    x = (random_rows(rng("rows"), 2, 64) * scale).astype(np.float32)
    batch = plain_batch(backend, 2)
    out = filled(backend, batch.limits.tokens, 40)
    backend.linear(buffers(backend, batch, x), [backend.matrix(tensor)], batch, [out])
    expected = x.astype(np.float64) @ tensor.dequantise().astype(np.float64).T
    np.testing.assert_allclose(out[:2], expected, atol=0.03 * np.abs(expected).max() + 1e-29)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("columns", [32, 96, 544, 768])
def test_embed_is_exact(backend: Backend, type: str, columns: int) -> None:
    if columns % BLOCK_TYPES[type].weights:
        return  # such a matrix cannot exist
    tensor = random_tensor(rng("embed"), type, 50, columns)
    batch = make_batch(backend, [Row(0, token=49), Row(1, token=0)], [Row(2, token=7)])
    out = filled(backend, batch.limits.tokens, columns)
    backend.embed(backend.matrix(tensor), batch, out)
    np.testing.assert_array_equal(out[:3], tensor.dequantise()[[49, 0, 7]])
    assert (out[3:] == 7).all()


@pytest.mark.parametrize("type", TYPES)
def test_embed_by_position_adds_to_what_is_there(backend: Backend, type: str) -> None:
    """Learned positions, after the tokens; a position beyond their table is refused."""
    tensor = random_tensor(rng("learned"), type, 40, 768)
    table = backend.matrix(tensor)
    batch = make_batch(backend, [Row(39, 1, token=90), Row(0, token=3)], [Row(7, 2), Row(8, 2), Row(9, 2)])
    x = random_rows(rng("x"), 5, 768)
    positions = tensor.dequantise()[[39, 0, 7, 8, 9]]
    for accumulate, start in ((True, x), (False, np.zeros_like(x))):
        out = filled(backend, batch.limits.tokens, 768)
        out[:5] = x
        backend.embed(table, batch, out, by=IndexedBy.POSITIONS, accumulate=accumulate)
        np.testing.assert_array_equal(out[:5], start + positions)
        assert (out[5:] == 7).all()
    batch.positions[0] = 40
    with pytest.raises((ValueError, IndexError), match=r"40 is out of (range; allowed: 0 to 39|bounds)"):
        backend.embed(table, batch, out, by=IndexedBy.POSITIONS, accumulate=True)


@pytest.mark.parametrize("width", [1, 7, 64, 100, 256, 4100])
@pytest.mark.parametrize("centre", [False, True])
def test_norm(backend: Backend, width: int, centre: bool) -> None:
    random = rng("norm", width)
    weight, bias = random_rows(random, 2, width)
    x = random_rows(random, 5, width) * 3 + 1
    values = x.astype(np.float64)
    if centre:
        values -= values.mean(axis=1, keepdims=True)
    values /= np.sqrt((values**2).mean(axis=1, keepdims=True) + 1e-5)
    for b in (None, bias):
        norm = Norm(weight.copy(), None if b is None else b.copy(), 1e-5, centre)
        answer = Answer(values * weight + (0 if b is None else b))
        batch = make_batch(backend, [Row(t) for t in range(5)], logits=[0, 1, 2])
        buffer, out = buffers(backend, batch, x), filled(backend, batch.limits.tokens, width)
        backend.norm(buffer, norm, batch, out)
        answer.check(out[:5])
        assert (out[5:] == 7).all()
        backend.norm(buffer, norm, batch, buffer, Rows.LOGITS)  # in place
        answer.check(np.vstack([buffer[:3], out[3:5]]))
        np.testing.assert_array_equal(buffer[3:5], x[3:])


def test_norm_of_each_head(backend: Backend) -> None:
    x = random_rows(rng("heads"), 3, 4, 24)
    weight = random_rows(rng("weight"), 24)
    batch = plain_batch(backend, 1, 2)
    buffer = buffers(backend, batch, x)
    backend.norm(buffer, Norm(weight, None, 1e-6), batch, buffer)
    values = x.astype(np.float64)
    Answer(values / np.sqrt((values**2).mean(axis=-1, keepdims=True) + 1e-6) * weight).check(buffer[:3])


@pytest.mark.parametrize("centre", [False, True])
def test_norm_of_all_heads_together(backend: Backend, centre: bool) -> None:
    x = random_rows(rng("heads"), 3, 5, 22)
    weight, bias = random_rows(rng("weight"), 2, 110)
    batch = plain_batch(backend, 1, 2)
    buffer = buffers(backend, batch, x)
    backend.norm(buffer, Norm(weight, bias, 1e-6, centre), batch, buffer)
    values = x.reshape(3, -1).astype(np.float64)
    if centre:
        values -= values.mean(axis=1, keepdims=True)
    values = values / np.sqrt((values**2).mean(axis=1, keepdims=True) + 1e-6) * weight + bias
    Answer(values).check(buffer[:3].reshape(3, -1))
    for wrong in (weight[:44].copy(), weight[:21].copy()):
        with pytest.raises(ValueError, match=r"norm|shapes"):
            backend.norm(buffer, Norm(wrong, None, 1e-6), batch, buffer)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (10, 10), (80, 32), (6, 2)])
def test_rope(backend: Backend, interleaved: bool, head_dim: int, rotary: int) -> None:
    angles = rng("angles").uniform(-4, 4, (50, rotary // 2))
    table = RopeTable(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), interleaved)
    positions = [49, 3, 0, 17]
    batch = make_batch(backend, [Row(p) for p in positions[:2]], [Row(p) for p in positions[2:]])
    x = random_rows(rng("rope"), 4, 3, head_dim)
    buffer = buffers(backend, batch, x)
    backend.rope(buffer, table, batch)
    expected = x.astype(np.float64)
    for t, position in enumerate(positions):
        for i in range(rotary // 2):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + rotary // 2)
            turned = (x[t, :, a] + 1j * x[t, :, b].astype(np.float64)) * np.exp(1j * angles[position, i])
            expected[t, :, a], expected[t, :, b] = turned.real, turned.imag
    Answer(expected).check(buffer[:4])
    np.testing.assert_array_equal(buffer[:4, :, rotary:], x[:, :, rotary:])


def test_store_kv_rounds_to_float16_and_touches_nothing_else(backend: Backend) -> None:
    batch = make_batch(backend, [Row(40, 1)], [Row(31, 0), Row(32, 0)])
    k, v = random_rows(rng("kv"), 2, batch.limits.tokens, 2, 6)
    caches = [backend.zeros((page_count(batch), 2, PAGE, 6), np.float16) for _ in range(2)]
    backend.store_kv(k, v, batch, *caches)
    for new, cache in zip((k, v), caches, strict=True):
        expected = np.zeros_like(cache)
        for t in range(3):
            page, offset = divmod(int(batch.slots[t]), PAGE)
            expected[page, :, offset] = new[t].astype(np.float16)
        np.testing.assert_array_equal(cache, expected)


def test_store_kv_rounds_to_q8_0(backend: Backend) -> None:
    """Within half a code of the input, codes to even; a block that is not finite does not become numbers."""
    batch = make_batch(backend, [Row(40, 1)], [Row(31, 0), Row(32, 0)])
    shape = (page_count(batch), 2, PAGE, 96)
    k, v = random_rows(rng("q8_0"), 2, batch.limits.tokens, 2, 96)
    k[0, 0] *= np.repeat(np.float32((1e3, 1e-3, 0)), 32)
    v[0, 1, :6], v[0, 1, 6:32] = (127, 0.5, 1.5, 2.5, -0.5, -3.5), 0  # scale 1
    v[1, 0, 40], v[1, 1, 70] = np.nan, -np.inf
    caches = [backend.zeros(cache_shape(shape, "q8_0"), np.uint8) for _ in range(2)]
    backend.store_kv(k, v, batch, *caches)
    slots = [divmod(int(slot), PAGE) for slot in batch.slots[:3]]
    for new, cache in zip((k[:3], v[:3]), caches, strict=True):
        with np.errstate(invalid="ignore"):
            stored = np.stack([cache_values(cache)[page, :, offset] for page, offset in slots])
        largest = np.abs(new).reshape(3, 2, 3, 32).max(axis=-1).repeat(32, axis=-1)
        lost = ~np.isfinite(largest)
        np.testing.assert_array_equal(np.isnan(stored), lost)
        # Half a code; and the scale has the 11 bits of a float16, or is a multiple of 2**-24.
        bound = largest * (0.5 / 127 + 2**-11) + 127 * 2.0**-25
        assert (np.abs(stored - new) <= bound)[~lost].all()
        for page, offset in slots:
            cache[page, :, offset] = 0
        assert not cache.any()
    np.testing.assert_array_equal(stored[0, 1, :6], (127, 0, 2, 2, 0, -4))


@pytest.mark.parametrize(
    ("type", "heads", "kv_heads", "head_dim"),
    [("f16", 4, 4, 64), ("f16", 8, 2, 16), ("f16", 6, 1, 24), ("f16", 3, 3, 10), ("f16", 7, 1, 80)]
    + [("q8_0", 4, 4, 64), ("q8_0", 14, 2, 32), ("q8_0", 6, 3, 96), ("f32", 6, 2, 40)],
)
def test_attention(backend: Backend, type: str, heads: int, kv_heads: int, head_dim: int) -> None:
    lengths = (1, 2, 31, 32, 33, 64, 255, 256, 257, 512, 600)
    decode = [Row(n - 1, sequence) for sequence, n in enumerate(lengths)] + [Row(20, 10), Row(300, 10)]
    prompt = [Row(position, 9) for position in range(230, 263)]
    random = rng("attention", heads)
    for rows in ((decode, prompt), (decode, []), ([], prompt), (decode[-4:-3], [])):
        batch = make_batch(backend, *rows)
        shape = (page_count(batch), kv_heads, PAGE, head_dim)
        k_cache, v_cache = (random_cache(random, backend, shape, type) for _ in range(2))
        q = random_rows(random, sum(map(len, rows)), heads, head_dim)
        out = filled(backend, batch.limits.tokens, heads, head_dim)
        scale = 1.5 * head_dim**-0.5
        backend.attention(AttentionCall(buffers(backend, batch, q), k_cache, v_cache, batch, out, scale))
        keys, values = cache_values(k_cache), cache_values(v_cache)
        for t, row in enumerate([*rows[0], *rows[1]]):
            own = batch.pages[row.sequence, : row.position // PAGE + 1]
            k, v = (np.concatenate([*each[own]], axis=1)[:, : row.position + 1] for each in (keys, values))
            Answer(attention(q[t], k, v, scale)).check(out[t], row)
        assert (out[len(q) :] == 7).all()


def test_attention_with_scores_far_apart(backend: Backend) -> None:
    """One key takes it all, in the first split or in the last; nothing overflows."""
    batch = make_batch(backend, [Row(299, 0), Row(299, 1)])
    k_cache, v_cache = (backend.zeros((page_count(batch), 1, PAGE, 8), np.float16) for _ in range(2))
    v_cache[:] = rng("values").integers(-999, 999, v_cache.shape)  # whole numbers: their sums are exact
    chosen = (5, 299)
    for sequence, position in enumerate(chosen):
        k_cache[batch.pages[sequence, position // PAGE], 0, position % PAGE] = 1000
    out = filled(backend, batch.limits.tokens, 1, 8)
    backend.attention(
        AttentionCall(
            buffers(backend, batch, np.ones((2, 1, 8), np.float32)), k_cache, v_cache, batch, out, 1.0
        )
    )
    for sequence, position in enumerate(chosen):
        value = v_cache[batch.pages[sequence, position // PAGE], 0, position % PAGE]
        np.testing.assert_array_equal(out[sequence, 0], value.astype(np.float32))


def test_add_and_gather(backend: Backend) -> None:
    x, y = random_rows(rng("add"), 2, 8, 33)
    batch = make_batch(backend, [Row(0), Row(1)], [Row(2), Row(3), Row(4)], logits=[4, 0, 1])
    total = x.copy()
    backend.add(total, y, batch)
    np.testing.assert_array_equal(total[:5], x[:5] + y[:5])
    np.testing.assert_array_equal(total[5:], x[5:])
    for keep, scale in ((1.0, 0.22), (12.0, 0.0), (0.0, 3.5), (0.5, -2.0)):
        scaled = x.copy()
        backend.add(scaled, y, batch, keep=keep, scale=scale)
        expected = np.float32(keep) * x[:5] + np.float32(scale) * y[:5]
        np.testing.assert_allclose(scaled[:5], expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(scaled[5:], x[5:])
    cleared = np.full_like(x, np.nan)
    backend.add(cleared, x, batch, keep=0, scale=1)
    np.testing.assert_array_equal(cleared[:5], x[:5])
    backend.add(cleared, np.full_like(x, np.inf), batch, keep=0, scale=0)
    assert (cleared[:5] == 0).all() and np.isnan(cleared[5:]).all()
    backend.add(total, total, batch, keep=0, scale=2)
    np.testing.assert_array_equal(total[:5], 2 * (x[:5] + y[:5]))
    out = filled(backend, batch.limits.logits, 33)
    backend.gather(x, batch, out)
    np.testing.assert_array_equal(out[:3], x[[4, 0, 1]])
    assert (out[3:] == 7).all()


@pytest.mark.parametrize("vocab", [1, 33, 5000])
def test_softcap(backend: Backend, vocab: int) -> None:
    """Only rows of logits; small values keep their digits."""
    logits = random_rows(rng("softcap", vocab), 4, vocab) * np.float32(20)
    logits[0, 0], logits[1, 0], logits[2, 0] = 1e-4, 1e30, -1e30
    batch = make_batch(backend, [Row(0), Row(1)], [Row(2), Row(3)], logits=[3, 0, 1])
    capped = logits.copy()
    backend.softcap(capped, batch, 30.0)
    expected = 30 * np.tanh(logits[:3].astype(np.float64) / 30)
    np.testing.assert_allclose(capped[:3], expected, rtol=1e-5)
    np.testing.assert_array_equal(capped[3:], logits[3:])
    for cap in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="a finite number above 0 is needed"):
            backend.softcap(capped, batch, cap)


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 4096, 32003])
def test_top_k(backend: Backend, vocab: int) -> None:
    random = rng("top_k", vocab)
    logits = np.round(random_rows(random, vocab), 2)  # with ties
    some = random.permutation(vocab)[: -(-vocab // 5)].astype(np.int32)  # in no order
    bias = (
        some,
        np.where(random.random(len(some)) < 0.5, -np.inf, np.round(random_rows(random, len(some)), 2)),
    )
    bias = some, bias[1].astype(np.float32)
    rows = np.stack([np.full(vocab, 9, np.float32), logits])
    bits = random.random((1, vocab)) < 0.5
    for b, allowed in ((None, None), (bias, None), (None, bits), (bias, bits)):
        values = logits.copy()
        if b is not None:
            values[some] += b[1]
        permitted = [i for i in range(vocab) if allowed is None or allowed[0, i]]
        order = sorted(permitted, key=lambda i: (-values[i], i))
        for k in (1, 40, vocab, vocab + 9):
            ids, top = backend.top_k(rows, 1, k, b, None if allowed is None else to_words(allowed)[0])
            assert ids.dtype == np.int32 and ids.tolist() == order[:k]
            np.testing.assert_array_equal(top, values[order[:k]])


def test_a_program_reads_its_numbers_anew(backend: Backend) -> None:
    """Recorded with one row, run with three, then with none: nothing is done at record."""
    tensor = random_tensor(rng("program"), "Q8_0", 40, 64)
    matrix = backend.matrix(tensor)
    batch = plain_batch(backend, 1, 4)
    x = buffers(backend, batch, random_rows(rng("x"), 5, 64))
    out = filled(backend, batch.limits.tokens, 40)
    program = backend.record(lambda: backend.linear(x, [matrix], batch, [out]))
    assert (out == 7).all()
    for n in (3, 0, 5):
        out[:] = 7
        batch.counts[:] = (n, min(n, 1), 0, 1)
        program.run()
        if n:
            dot(x[:n], tensor).check(out[:n])
        assert (out[n:] == 7).all()


@pytest.mark.parametrize("kind", ["few values", "ascending", "odd", "all NaN but few", "minus infinity"])
def test_top_k_of_many(backend: Backend, kind: str) -> None:
    """Logits are looked at many at a time: what they are, few biases and masks with gaps change nothing."""
    random, vocab = rng("top_k", kind), 1000
    logits = np.round(random_rows(random, vocab) * 2)
    if kind == "ascending":
        logits = np.sort(random_rows(random, vocab))
    elif kind == "odd":
        logits[random.integers(0, vocab, 60)] = random.choice([np.nan, np.inf, -np.inf, -0.0], 60)
    elif kind == "all NaN but few":
        logits = np.where(random.random(vocab) < 0.03, logits, np.nan)
    elif kind == "minus infinity":
        logits = np.where(np.arange(vocab) < 990, -np.inf, logits)
    logits = logits.astype(np.float32)
    bits = random.random((1, vocab)) < 0.5
    bits[:, 64:320] = bits[:, 900:] = False
    few = np.array([700, 3, 64, 127], np.int32)
    for b, allowed in itertools.product((None, (few, np.array([9, -9, 4, 0.5], np.float32))), (None, bits)):
        values = logits.copy()
        if b is not None:
            values[few] += b[1]
        permitted = [i for i in range(vocab) if allowed is None or allowed[0, i]]
        order = sorted(permitted, key=lambda i: (np.isnan(values[i]), -np.nan_to_num(values[i], nan=0), i))
        for k in (1, 2, 40, 300):
            ids, top = backend.top_k(logits[None], 0, k, b, None if allowed is None else to_words(allowed)[0])
            assert ids.tolist() == order[:k]
            np.testing.assert_array_equal(top, values[order[:k]])


def test_top_k_ranks_nan_last(backend: Backend) -> None:
    """So that a model gone wrong is met only where nothing else is left; ties go to the lower id."""
    logits = np.array([(np.nan, 1.0, np.nan, 3.0, 3.0, -2.0)], np.float32)
    for k in range(1, 7):
        ids, values = backend.top_k(logits, 0, k)
        assert ids.tolist() == [3, 4, 1, 5, 0, 2][:k]
        np.testing.assert_array_equal(values, logits[0, ids])
