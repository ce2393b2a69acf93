"""The op table of a Vulkan device: inputs of every op and block type, whose results must be those of
:class:`support.vulkan.model.OrderedReference`, bit for bit. Cases are computed by a backend whose buffers are
arrays (:class:`support.mirrored_backend.MirroredBackend`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from support.op_truth import (
    Row,
    cache_shape,
    make_batch,
    page_count,
    plain_batch,
    random_rows,
    random_tensor,
    rng,
    to_words,
)
from support.vulkan.cases import ALIKE, STEPS, TYPES, Array, Case, buffer, out_buffer
from support.vulkan.ffn_cases import expert_cases, ffn_cases
from support.vulkan.head_cases import head_cases
from support.vulkan.model import OrderedReference
from support.vulkan.state_cases import state_cases

from hotcold.formats.blocks import BLOCK_TYPES, quantise
from hotcold.kernels.backend import (
    PAGE,
    AttentionCall,
    IndexedBy,
    Norm,
    RopeTable,
    Rows,
)
from hotcold.model.mixers.attention import CACHE_TYPES


def cases() -> list[Case]:
    """The most telling first: each op with one type, then the other types, then the rest."""
    found = [
        *_linear(),
        *ffn_cases(),
        *expert_cases(),
        *_attention(),
        *state_cases(),
        *head_cases(),
        *_others(),
    ]
    return sorted(found, key=lambda case: (not case.quick, not _plain(case)))


def _plain(case: Case) -> bool:
    named = [type for type in BLOCK_TYPES if type in case.name.split()]
    return not named or bool({"Q4_0", "F16"} & {*named})


@cache
def expected(case: Case) -> list[Array]:
    return case.run(OrderedReference())


def difference(case: Case, actual: list[Array], wanted: list[Array] | None = None) -> tuple[str, float]:
    """Says where the results are not those of the model, "" if nowhere; and the largest difference of floats
    as a share of their row's largest value (of other numbers, infinity). ``wanted``: the model's results, if
    they have been computed before."""
    said, worst = "", 0.0
    for at, (a, b) in enumerate(zip(actual, expected(case) if wanted is None else wanted, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {at}: {a.dtype} {a.shape} and not {b.dtype} {b.shape}", np.inf
        bytes_a, bytes_b = (np.ascontiguousarray(each).view(np.uint8) for each in (a, b))
        differ = (bytes_a != bytes_b).reshape(a.size, -1).any(axis=1).reshape(a.shape)
        if a.dtype.kind == "f":
            differ &= ~(np.isnan(a) & np.isnan(b))
        if not differ.any():
            continue
        where = tuple(int(i) for i in np.argwhere(differ)[0])
        if not said:
            values = f"{a[where]!r} and not {b[where]!r}"
            said = f"result {at}: {int(differ.sum())} of {a.size} differ; first at {where}: {values}"
        if a.dtype.kind != "f":
            return said, np.inf
        with np.errstate(all="ignore"):
            wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
            size = np.nanmax(np.abs(wide_b), axis=-1, keepdims=True, initial=1e-30)
            share = float((np.abs(wide_a - wide_b) / size)[differ].max())
        worst = max(worst, np.inf if np.isnan(share) else share)
    return said, worst


def wrong(case: Case, actual: list[Array], *, exact: bool) -> str:
    """Says how results differ from the model's, "" if they do not. A device that is not ``exact`` divides
    less exactly: its results may differ by what the case tolerates."""
    said, share = difference(case, actual)
    return said if exact or share > case.tolerance else ""


# --- linear, embed ---

MATRICES = ((100, 64), (33, 256), (40, 4352), (172, 96), (20, 768), (7, 33), (5, 172), (300, 1056))
QUICK_MATRICES = ((100, 64), (33, 256), (40, 4352), (7, 33), (300, 1056))


def _linear() -> Iterator[Case]:
    for type in TYPES:
        for shape in MATRICES:
            if shape[1] % BLOCK_TYPES[type].weights == 0:
                quick = shape in QUICK_MATRICES and type not in ALIKE
                yield Case("linear", f"{type} {shape[0]}x{shape[1]}", _run_linear(type, shape), quick)
        yield Case("embed", type, _run_embed(type), type not in ALIKE)
    yield Case("linear", "several matrices", _several_matrices)
    yield Case("linear", "inputs of any magnitude", _magnitudes)


def _run_linear(type: str, shape: tuple[int, int]) -> Callable[[Any], list[Array]]:
    def run(backend: Any) -> list[Array]:
        random, outs = rng("linear", type, shape), []
        tensor, bias = random_tensor(random, type, *shape), random_rows(random, shape[0])
        matrices = (backend.matrix(tensor), backend.matrix(tensor, bias))
        for at, (decode, prompt) in enumerate(STEPS):
            batch, x = plain_batch(backend, decode, prompt), random_rows(random, decode + prompt, shape[1])
            out = out_buffer(backend, batch.limits.tokens, shape[0])
            x_buffer = buffer(backend, batch, x)
            backend.linear(x_buffer, [matrices[at % 2]], batch, [out], accumulate=at % 3 == 1)
            outs.append(out)
        return outs

    return run


def _several_matrices(backend: Any) -> list[Array]:
    random, outs = rng("several"), []
    sizes = (("Q8_0", 50), ("F16", 3), ("Q4_0", 64))
    matrices = [backend.matrix(random_tensor(random, type, n, 96)) for type, n in sizes]
    batch = make_batch(backend, [Row(t) for t in range(4)], logits=[3, 1])
    for rows in (Rows.TOKENS, Rows.LOGITS):
        x = random_rows(random, batch.limits.tokens, 96)
        own = [out_buffer(backend, batch.limits.tokens, n) for _, n in sizes]
        backend.linear(x, matrices, batch, own, rows=rows)
        outs += own
    return outs


def _magnitudes(backend: Any) -> list[Array]:
    """Zeros, what counts as zero, very small and very large blocks, NaN and infinity."""
    x = random_rows(rng("magnitudes"), 8, 96)
    x *= np.array([0, 1e-42, 1e-31, 1e-29, 1e-20, 1e30, 1, 1], np.float32)[:, None]
    x[6, 40], x[7, 70] = np.nan, np.inf
    x[2, :32] = (127, 0.5, 1.5, 2.5, -0.5, -3.5, *[0] * 26)
    batch, outs = plain_batch(backend, 8), []
    for type in ("Q8_0", "Q4_1"):
        out = out_buffer(backend, batch.limits.tokens, 40)
        tensor = random_tensor(rng("magnitudes", type), type, 40, 96)
        backend.linear(buffer(backend, batch, x), [backend.matrix(tensor)], batch, [out])
        outs.append(out)
    return outs


def _run_embed(type: str) -> Callable[[Any], list[Array]]:
    def run(backend: Any) -> list[Array]:
        outs = []
        for columns in (32, 544, 768):
            if columns % BLOCK_TYPES[type].weights:
                continue
            table = backend.matrix(random_tensor(rng("embed", type), type, 50, columns))
            batch = make_batch(backend, [Row(0, token=49), Row(1, token=0)], [Row(2, token=7)])
            out = out_buffer(backend, batch.limits.tokens, columns)
            backend.embed(table, batch, out)
            outs.append(out.copy())
            backend.embed(table, batch, out, by=IndexedBy.POSITIONS, accumulate=True)
            outs.append(out)
        return outs

    return run


# --- attention, norms, positions ---


#: One takes nearly all of a row, but not so much that what is left is denormal, which devices may flush.
SINKS = np.array([20, 60, -30, -1e4, 0.5, -np.inf], np.float32)


def _attention() -> Iterator[Case]:
    for name, options in {
        "": {},
        "window 100": {"window": 100},
        "window 1": {"window": 1},
        "sinks and softcap": {"sinks": SINKS, "softcap": 5.0},
    }.items():
        for type, kv_heads, head_dim in (
            ("f16", 2, 64), ("f16", 6, 10), ("q8_0", 2, 64), ("f32", 3, 40), ("f16", 1, 128), ("f16", 2, 256),
        ):  # fmt: skip
            quick = head_dim == 64 or (not options and head_dim < 128)
            run = _run_attention(type, kv_heads, head_dim, options)
            yield Case("attention", f"{type} {kv_heads} kv heads of {head_dim} {name}".rstrip(), run, quick)


DECODE = [Row(n - 1, s) for s, n in enumerate((1, 2, 31, 32, 33, 255, 256, 257, 512, 600))]
PROMPT = [Row(position, 10) for position in (*range(230, 262), 511, 512)]


def _run_attention(
    type: str, kv_heads: int, head_dim: int, options: dict[str, Any]
) -> Callable[[Any], list[Array]]:
    def run(backend: Any) -> list[Array]:
        random, outs = rng("attention", type, head_dim), []
        for decode, prompt in ((DECODE[-1:], []), (DECODE, PROMPT), ([], PROMPT)):
            batch = make_batch(backend, decode, prompt)
            shape = (page_count(batch), kv_heads, PAGE, head_dim)
            k, v = (_cache(random, backend, shape, type) for _ in range(2))
            q = buffer(backend, batch, 2 * random_rows(random, len(decode) + len(prompt), 6, head_dim))
            out = out_buffer(backend, batch.limits.tokens, 6, head_dim)
            backend.attention(AttentionCall(q, k, v, batch, out, 1.5 * head_dim**-0.5, **options))
            outs.append(out)
        return outs

    return run


def _cache(random: np.random.Generator, backend: Any, shape: tuple[int, ...], type: str) -> Array:
    cache: Array = backend.zeros(cache_shape(shape, type), CACHE_TYPES[type])
    values = random_rows(random, *shape)
    cache[:] = quantise(values, "Q8_0").data.reshape(cache.shape) if type == "q8_0" else values
    return cache


def _others() -> Iterator[Case]:
    for type in CACHE_TYPES:
        yield Case("store_kv", type, _run_store(type))
    for width in (1, 7, 100, 256, 4100):
        yield Case("norm", f"of {width}", _run_norm(width))
    yield Case("rope", "of all shapes", _rope)
    yield Case("add", "and gather", _add_and_gather)
    yield Case("softcap", "of logits", _softcap)
    yield Case("top_k", "with ties", _top_k)


def _run_store(type: str) -> Callable[[Any], list[Array]]:
    def run(backend: Any) -> list[Array]:
        batch = make_batch(backend, [Row(40, 1)], [Row(31, 0), Row(32, 0)])
        k, v = random_rows(rng("kv"), 2, batch.limits.tokens, 2, 96)
        k *= np.exp2(np.arange(96) // 32 * 12 - 18).astype(np.float32)
        k[0, 0, :6] = (65504, 65519, 65520, 1e-8, 6e-8, -1e-7)  # the ends of float16
        k[1, 0, :32] = np.float32(1) + np.arange(32) * np.float32(2.0**-12)  # and halves of its last bit
        v[1, 0, 40], v[1, 1, 70] = np.nan, -np.inf
        shape = cache_shape((page_count(batch), 2, PAGE, 96), type)
        caches = [backend.zeros(shape, CACHE_TYPES[type]) for _ in range(2)]
        backend.store_kv(k, v, batch, *caches)
        return caches

    return run


def _run_norm(width: int) -> Callable[[Any], list[Array]]:
    def run(backend: Any) -> list[Array]:
        random, outs = rng("norm", width), []
        weight, bias = random_rows(random, 2, width)
        x = random_rows(random, 5, width) * 3 + 1
        batch = make_batch(backend, [Row(t) for t in range(5)], logits=[0, 1, 2])
        for centre in (False, True):
            for b in (None, bias):
                norm, x_buffer = Norm(weight, b, 1e-5, centre), buffer(backend, batch, x)
                out = out_buffer(backend, batch.limits.tokens, width)
                backend.norm(x_buffer, norm, batch, out)
                backend.norm(x_buffer, norm, batch, x_buffer, Rows.LOGITS)  # in place
                outs += [out, x_buffer]
        heads = buffer(backend, batch, random_rows(random, 5, 4, 24))
        backend.norm(heads, Norm(random_rows(random, 24), None, 1e-6), batch, heads)
        whole = buffer(backend, batch, random_rows(random, 5, 4, 24))
        backend.norm(whole, Norm(random_rows(random, 96), None, 1e-6), batch, whole)
        return [*outs, heads, whole]

    return run


def _rope(backend: Any) -> list[Array]:
    outs = []
    batch = make_batch(backend, [Row(49), Row(3)], [Row(0), Row(17)])
    for head_dim, rotary in ((64, 64), (10, 10), (80, 32), (6, 2)):
        angles = rng("angles", rotary).uniform(-4, 4, (50, rotary // 2))
        for interleaved in (False, True):
            table = RopeTable(
                np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), interleaved
            )
            x = buffer(backend, batch, random_rows(rng("rope"), 4, 3, head_dim))
            backend.rope(x, table, batch)
            outs.append(x)
    return outs


def _add_and_gather(backend: Any) -> list[Array]:
    x, y = random_rows(rng("add"), 2, 8, 33)
    batch = make_batch(backend, [Row(0), Row(1)], [Row(2), Row(3), Row(4)], logits=[4, 0, 1])
    total, out = x.copy(), out_buffer(backend, batch.limits.logits, 33)
    backend.add(total, y, batch)
    backend.gather(x, batch, out)
    scaled = [x.copy() for _ in range(3)]
    for each, keep, factor in zip(scaled, (1, 0.5, 0), (0.22, -3, 12), strict=True):
        backend.add(each, y, batch, keep=keep, scale=factor)
    cleared, own = np.full_like(x, np.nan), x.copy()
    backend.add(cleared, np.full_like(x, np.inf), batch, keep=0, scale=0)
    backend.add(own, own, batch, keep=0, scale=12)
    return [total, out, *scaled, cleared, own]


def _softcap(backend: Any) -> list[Array]:
    batch = make_batch(backend, [Row(0), Row(1)], [Row(2)], logits=[2, 0])
    logits = out_buffer(backend, batch.limits.logits, 700)
    logits[:2] = random_rows(rng("softcap"), 2, 700)
    backend.softcap(logits, batch, 0.7)
    return [logits]


def _top_k(backend: Any) -> list[Array]:
    logits = np.round(random_rows(rng("top_k"), 2, 4099), 2)
    bias = np.arange(0, 4099, 5, dtype=np.int32), np.round(random_rows(rng("bias"), 820), 2)
    allowed = to_words(rng("allowed").random((1, 4099)) < 0.5)[0]
    found = (backend.top_k(logits, 1, 40), backend.top_k(logits, 0, 5000, bias, allowed))
    return [array for pair in found for array in pair]
