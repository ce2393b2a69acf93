"""Cases of the op table of Vulkan devices (table.py): latent attention, and groups of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from support.op_truth import Row, make_batch, page_count, plain_batch, random_rows, random_tensor, rng
from support.vulkan.cases import FEW_STEPS, Array, Case, buffer, out_buffer

from hotcold.kernels.backend import PAGE, AttentionCall, ExpertGroups, RouterCall

#: (block type, heads, rows of each, columns, values of a head of x)
HEADS = (
    ("Q8_0", 3, 40, 64, 96), ("F32", 2, 70, 12, 12), ("F16", 4, 10, 16, 26), ("Q4_K", 2, 70, 256, 256),
    ("Q8_0", 20, 64, 96, 96),
)  # fmt: skip
GROUPS = (ExpertGroups(4, 2), ExpertGroups(8, 3, 1), ExpertGroups(16, 4))


def head_cases() -> Iterator[Case]:
    for at, kind in enumerate(HEADS):
        yield Case("linear_heads", "{} {}x{}x{} of {}".format(*kind), _run_heads(*kind), at == 0)
    yield Case("join_heads", "of two widths", _join)
    for at, groups in enumerate(GROUPS):
        for biased in (True, False):
            name = f"F32 {groups.used} of {groups.count} groups{' biased' * biased}"
            yield Case("router", name, _run_router(groups, biased), at == 0 and biased)
    yield Case("attention", "f16 1 kv head of 576", _wide_attention, quick=False)


def _run_heads(type: str, heads: int, each: int, columns: int, width: int) -> Callable[[Any], list[Array]]:
    def run(backend: Any) -> list[Array]:
        random, outs = rng("linear_heads", type, heads), []
        matrix = backend.matrix(random_tensor(random, type, heads * each, columns))
        for decode, prompt in FEW_STEPS:
            batch = plain_batch(backend, decode, prompt)
            x = buffer(backend, batch, random_rows(random, decode + prompt, heads, width))
            out = out_buffer(backend, batch.limits.tokens, heads, each)
            backend.linear_heads(x, matrix, batch, out)
            outs.append(out)
        return outs

    return run


def _join(backend: Any) -> list[Array]:
    outs = []
    for decode, prompt in FEW_STEPS:
        batch, random = plain_batch(backend, decode, prompt), rng("join", decode)
        x, y = (buffer(backend, batch, random_rows(random, decode + prompt, 5, n)) for n in (64, 35))
        out = out_buffer(backend, batch.limits.tokens, 5, 99)
        backend.join_heads(x, y, batch, out)
        outs.append(out)
    return outs


def _run_router(groups: ExpertGroups, biased: bool) -> Callable[[Any], list[Array]]:
    def run(backend: Any) -> list[Array]:
        experts, k, random, outs = 64, 6, rng("groups", groups.count), []
        weights = backend.matrix(random_tensor(random, "F32", experts, 96, scale=2 * 96**-0.5))
        selection = random_rows(random, experts)
        for decode, prompt in FEW_STEPS:
            batch, x = plain_batch(backend, decode, prompt), random_rows(random, decode + prompt, 96)
            x[-1] = np.nan  # which ranks nothing
            rows = batch.limits.tokens
            ids, factors = out_buffer(backend, rows, k, dtype=np.int32), out_buffer(backend, rows, k)
            options: dict[str, Any] = {"selection_bias": selection} if biased else {}
            options |= {"k": k, "score": "sigmoid" if biased else "softmax", "normalise": biased}
            backend.router(
                RouterCall(
                    buffer(backend, batch, x),
                    weights,
                    batch,
                    ids,
                    factors,
                    scale=2.5,
                    groups=groups,
                    **options,
                )
            )
            outs += [ids, factors]
        return outs

    return run


def _wide_attention(backend: Any) -> list[Array]:
    """More heads than one group works on, in keys that are values, too."""
    random, outs, heads, length = rng("wide"), [], 18, 576
    decode, prompt = ([Row(n - 1, s) for s, n in enumerate((33, 256, 300))], [Row(n, 5) for n in (254, 256)])
    for rows in ((decode, []), (decode[:1], prompt), ([], prompt * 9)):
        batch = make_batch(backend, *rows)
        cache = backend.zeros((page_count(batch), 1, PAGE, length), np.float16)
        cache[:] = random_rows(random, *cache.shape)
        count = sum(map(len, rows))
        q = buffer(backend, batch, 2 * random_rows(random, count, heads, length))
        out = out_buffer(backend, batch.limits.tokens, heads, length)
        backend.attention(AttentionCall(q, cache, cache, batch, out, 1.5 * length**-0.5))
        outs.append(out)
    return outs
