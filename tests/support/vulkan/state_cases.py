"""Cases of the op table of Vulkan devices (table.py): ops that keep a state, and those beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from support.op_truth import plain_batch, random_rows, rng
from support.state_truth import Piece, state_batch
from support.vulkan.cases import Array, Case, buffer, out_buffer

from hotcold.kernels.backend import DeltaCall, Norm, ScanCall

SLOTS = 5
#: A sequence alone, from a state and from none; then several, with rows of both kinds, in place or not, and a
#: state that is not kept. Tiles of scans have 4 rows.
STEPS = (
    ([Piece(0, 3, 1, 2, 2)], []),
    ([], [Piece(0, 0, 9, -1, 1)]),
    ([Piece(2, 7, 1, 1, 1), Piece(0, 5, 2, 0, 3)], [Piece(3, 4, 6, 4, 4), Piece(1, 0, 2, -1, -1)]),
)

#: (C, k, activation)
CONVS = ((1, 2, "none"), (300, 4, "silu"), (65, 8, "none"), (64, 3, "none"))
#: (Hk, Hv, dk, dv, tiled, decay by channel)
DELTAS = ((1, 1, 1, 1, True, False), (2, 6, 8, 70, True, False), (3, 3, 13, 24, False, True),
          (1, 2, 128, 128, False, False), (2, 4, 257, 5, False, True))  # fmt: skip
#: (H, p, n, G)
SCANS = ((1, 1, 1, 1), (6, 8, 16, 2), (4, 33, 27, 4), (2, 64, 128, 1), (2, 2, 512, 2))


def state_cases() -> Iterator[Case]:
    for conv in CONVS:
        yield Case("short_conv", "{}x{} {}".format(*conv), _over_steps(_conv, conv))
    for delta in DELTAS:
        name = f"{delta[1]} heads of {delta[2]}x{delta[3]}{' by channel' * delta[5]}"
        yield Case("gated_delta", name, _over_steps(_delta, delta), delta[2] < 200)
    for scan in SCANS:
        name = f"{scan[0]} heads of {scan[1]}x{scan[2]}"
        yield Case("ssm_scan", name, _over_steps(_scan, scan), scan[2] < 200)
    yield Case("decay", "of any size", _decay)
    yield Case("multiply", "by each activation", _multiply)
    yield Case("norm", "of groups and without a weight", _norms)


def _over_steps(run: Callable[..., Any], kind: tuple[Any, ...]) -> Callable[[Any], list[Array]]:
    def each(backend: Any) -> list[Array]:
        random, found = rng(run.__name__, kind), []
        for decode, prompt in STEPS:
            found += run(backend, random, state_batch(decode, prompt), *kind)
        return found

    return each


def _filled(random: np.random.Generator, backend: Any, *shape: int) -> Array:
    made: Array = backend.zeros(shape)
    made[:] = random_rows(random, *shape)
    return made


def _conv(
    backend: Any, random: np.random.Generator, batch: Any, channels: int, taps: int, activation: str
) -> list[Array]:
    x = buffer(backend, batch, random_rows(random, batch.n_tokens, channels))
    weight, state = (
        random_rows(random, channels, taps),
        _filled(random, backend, SLOTS, taps - 1, channels),
    )
    bias = random_rows(random, channels) if taps % 2 == 0 else None
    out = out_buffer(backend, batch.limits.tokens, channels)
    backend.short_conv(x, weight, bias, batch, state, out, activation=activation)
    return [out, state]


def _delta(
    backend: Any,
    random: np.random.Generator,
    batch: Any,
    keys: int,
    heads: int,
    dk: int,
    dv: int,
    tiled: bool,
    by_channel: bool,
) -> list[Array]:
    rows = batch.n_tokens
    mixed = random_rows(random, rows, 2 * keys * dk + heads * dv)
    decay = -np.exp(2 * random_rows(random, rows, heads, *([dk] if by_channel else [])))
    decay[rows // 2] = -316
    given = [buffer(backend, batch, each) for each in (mixed, decay, 2 * random_rows(random, rows, heads))]
    state, out = (
        _filled(random, backend, SLOTS, heads, dk, dv),
        out_buffer(backend, batch.limits.tokens, heads, dv),
    )
    backend.gated_delta(DeltaCall(*given, batch, state, out, keys=keys, key_dim=dk, tiled=tiled, eps=1e-6))
    return [out, state]


def _scan(
    backend: Any, random: np.random.Generator, batch: Any, heads: int, width: int, size: int, groups: int
) -> list[Array]:
    rows = batch.n_tokens
    mixed = random_rows(random, rows, heads * width + 2 * groups * size)
    given = [buffer(backend, batch, each) for each in (mixed, 3 * random_rows(random, rows, heads))]
    dt_bias, a, d = random_rows(random, 3, heads)
    state = _filled(random, backend, SLOTS, heads, width, size)
    out = out_buffer(backend, batch.limits.tokens, heads, width)
    backend.ssm_scan(ScanCall(*given, dt_bias.copy(), -np.exp(a), d.copy(), batch, state, out, groups=groups))
    return [out, state]


def _decay(backend: Any) -> list[Array]:
    outs = []
    for width, heads in ((1, 1), (96, 4), (300, 300)):
        random, batch = rng("decay", width), plain_batch(backend, 2, 4)
        x = 20 * random_rows(random, 6, width)
        x[:, 0] = (-80, 200, 0, -1e-20, np.nan, np.inf)
        out, bias = out_buffer(backend, batch.limits.tokens, width), random_rows(random, width)
        bias[0] = 0
        backend.decay(buffer(backend, batch, x), bias, -np.exp(random_rows(random, heads)), batch, out)
        outs.append(out)
    return outs


def _multiply(backend: Any) -> list[Array]:
    outs = []
    for activation in ("none", "silu", "sigmoid", "relu"):
        batch = plain_batch(backend, 1, 3)
        x, gate = random_rows(rng("multiply"), 2, 4, 3, 100)
        gate[:, 0, 0] = (200, -80, np.nan, 0)
        out = buffer(backend, batch, x)
        backend.multiply(out, buffer(backend, batch, gate), batch, out, activation=activation)
        outs.append(out)
    return outs


def _norms(backend: Any) -> list[Array]:
    random, batch, outs = rng("norms"), plain_batch(backend, 1, 2), []
    for shape, weighted in (((8, 64), True), ((2, 300), True), ((3, 20), False)):
        x = buffer(backend, batch, random_rows(random, 3, *shape))
        for centre in (False, True):
            weight, bias = random_rows(random, 2, *shape) if weighted else (None, None)
            out = out_buffer(backend, batch.limits.tokens, *shape)
            backend.norm(x, Norm(weight, bias if centre else None, 1e-5, centre), batch, out)
            outs.append(out)
    return outs
