"""Op linear where another buffer is above 0: against float64 brute force, and bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.op_truth import buffers, dot, plain_batch, random_rows, random_tensor, rng

from hotcold.formats.blocks import BLOCK_TYPES
from hotcold.kernels.backend import Backend, FFNStats, Matrix, Rows

STEPS = ((1, 0), (3, 0), (16, 0), (0, 20), (5, 18))


def run(
    backend: Backend, matrix: Matrix, x: Any, where: Any, step: tuple[int, int], *, chosen: bool = True
) -> tuple[Any, list[int]]:
    """Returns the result and the counts; the rows after those of the step stay as they are."""
    batch = plain_batch(backend, *step)
    given = [buffers(backend, batch, each) for each in (x, where)]
    out, stats = backend.zeros(given[1].shape), FFNStats(backend.zeros((2, 5), np.int64), 1)
    out[:] = 7
    if chosen:
        backend.linear(given[0], [matrix], batch, [out], where=given[1], stats=stats)
    else:
        backend.linear(given[0], [matrix], batch, [out])
    assert (out[len(x) :] == 7).all() and not stats.counts[0].any()
    return np.array(out[: len(x)]), stats.counts[1].tolist()


def gates(random: np.random.Generator, rows: int, columns: int, share: float) -> Any:
    """Numbers with this share above 0; zeros of both signs and NaN are not above 0."""
    signs = np.where(random.random((rows, columns)) < share, 1, -1)
    values = signs * np.abs(random_rows(random, rows, columns))
    values[:, ::11], values[:, 5::17], values[:, 3::29] = 0, -0.0, np.nan
    return values.astype(np.float32)


@pytest.mark.parametrize("type", ["TQ2_0", "F32", "TQ1_0", "Q4_0", "F16", "Q6_K"])
def test_it_computes_what_is_wanted(backend: Backend, type: str) -> None:
    if not backend.chooses_rows:
        pytest.skip("this backend computes all rows")
    random = rng("where", type)
    columns = max(96, 2 * BLOCK_TYPES[type].weights)
    for rows in (1, 50, 300):
        tensor, bias = random_tensor(random, type, rows, columns), random_rows(random, rows)
        matrix = backend.matrix(tensor, bias)
        for step, share in zip(STEPS, (0.3, 0.1, 0.02, 0.3, 0.9), strict=True):
            decode = step[0]
            x = random_rows(random, sum(step), columns)
            where = gates(random, len(x), rows, share)
            out, counts = run(backend, matrix, x, where, step)
            wanted = where > 0
            wanted[decode:] = True
            answer = dot(x, tensor, bias)
            answer.check(np.where(wanted, out, answer.values).astype(np.float32), (rows, step))
            assert not out[~wanted].any()
            read = wanted[:decode]
            assert counts == ([0, read.any(axis=0).sum(), 0, read.sum(), 0] if not step[1] else [0] * 5)


@pytest.mark.parametrize("type", ["TQ2_0", "F16"])
def test_a_value_has_the_same_bits_in_any_step_and_among_all(
    open_exact: Callable[..., Backend], type: str
) -> None:
    if not (backend := open_exact()).chooses_rows:
        pytest.skip("this backend computes all rows")
    random = rng("bits of where", type)
    matrix, x = backend.matrix(random_tensor(random, type, 333, 512)), random_rows(random, 16, 512)
    where = gates(random, 16, 333, 0.3)
    truth = np.where(where > 0, run(backend, matrix, x, where, (0, 16), chosen=False)[0], np.float32(0))
    for threads in (1, 3):
        other = open_exact(threads)
        matrix = other.matrix(random_tensor(rng("bits of where", type), type, 333, 512))
        for rows in (1, 2, 3, 7, 16):
            for first in range(0, 17 - rows, rows):
                own = slice(first, first + rows)
                out, _ = run(other, matrix, x[own], where[own], (rows, 0))
                np.testing.assert_array_equal(out, truth[own])


def test_what_it_is_not_for_is_refused(backend: Backend) -> None:
    matrix, batch = backend.matrix(random_tensor(rng("refused"), "F32", 64, 32)), plain_batch(backend, 1)
    x, outs = (backend.zeros((batch.limits.tokens, n)) for n in (32, 64))
    stats = FFNStats(backend.zeros((1, 5), np.int64))
    where = outs + 0 if backend.chooses_rows else outs
    given: list[tuple[dict[str, Any], int]] = [({"where": where}, 2), ({"stats": stats}, 1)]
    given += [({"where": where, "accumulate": True}, 1), ({"where": where, "rows": Rows.LOGITS}, 1)]
    for options, count in given:
        with pytest.raises(ValueError, match="where"):
            backend.linear(x, [matrix] * count, batch, [outs] * count, **options)
