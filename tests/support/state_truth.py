"""Truth for the ops that keep a state: plain loops in float64 over one sequence, from its first row on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from support.op_truth import Doubles, Floats

from hotcold.kernels.backend import PAGE, Batch, BatchLimits


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softplus(x: float) -> float:
    return x if x > 40 else math.log1p(math.exp(x))


def short_conv(x: Floats, weight: Floats, bias: Floats | None, activation: str) -> tuple[Doubles, Doubles]:
    """Rows ``[T, C]``, and the state after the last one."""
    channels, taps = weight.shape
    columns = np.vstack([np.zeros((taps - 1, channels)), x.astype(np.float64)])
    out = np.zeros(x.shape)
    for t in range(len(x)):
        for c in range(channels):
            y = 0.0 if bias is None else float(bias[c])
            for j in range(taps):
                y += float(weight[c, j]) * columns[t + j, c]
            out[t, c] = y * sigmoid(y) if activation == "silu" else y
    return out, columns[len(x) :]


@dataclass(frozen=True)
class Delta:
    """Inputs of a gated delta net, by row."""

    q: Floats  # [T, Hk, dk]
    k: Floats
    v: Floats  # [T, Hv, dv]
    decay: Floats  # [T, Hv] or [T, Hv, dk]
    beta: Floats  # [T, Hv]
    tiled: bool
    eps: float

    @property
    def mixed(self) -> Floats:
        return np.hstack([each.reshape(len(each), -1) for each in (self.q, self.k, self.v)])

    def run(self) -> tuple[Doubles, Doubles]:
        """``[T, Hv, dv]``, and the states ``[Hv, dk, dv]`` after the last row."""
        (rows, keys, dk), (_, heads, dv) = self.q.shape, self.v.shape
        states, out = np.zeros((heads, dk, dv)), np.zeros((rows, heads, dv))
        for h in range(heads):
            head = h % keys if self.tiled else h // (heads // keys)
            for t in range(rows):
                q, k = (each[t, head].astype(np.float64) for each in (self.q, self.k))
                q = q / math.sqrt(sum(q * q) + self.eps) / math.sqrt(dk)
                k = k / math.sqrt(sum(k * k) + self.eps)
                state = states[h]
                for i in range(dk):
                    state[i] *= math.exp(np.broadcast_to(self.decay[t, h], (dk,))[i])
                read = sum(k[i] * state[i] for i in range(dk))
                delta = sigmoid(float(self.beta[t, h])) * (self.v[t, h] - read)
                for i in range(dk):
                    state[i] += k[i] * delta
                out[t, h] = sum(q[i] * state[i] for i in range(dk))
        return out, states


@dataclass(frozen=True)
class Scan:
    """Inputs of Mamba-2's scan, by row."""

    x: Floats  # [T, H, p]
    b: Floats  # [T, G, n]
    c: Floats
    dt: Floats  # [T, H]
    dt_bias: Floats  # [H]
    a: Floats
    d: Floats

    @property
    def mixed(self) -> Floats:
        return np.hstack([each.reshape(len(each), -1) for each in (self.x, self.b, self.c)])

    def run(self) -> tuple[Doubles, Doubles]:
        """``[T, H, p]``, and the states ``[H, p, n]`` after the last row."""
        (rows, heads, width), (_, groups, size) = self.x.shape, self.b.shape
        states, out = np.zeros((heads, width, size)), np.zeros((rows, heads, width))
        for h in range(heads):
            group = h // (heads // groups)
            for t in range(rows):
                step = softplus(float(self.dt[t, h]) + float(self.dt_bias[h]))
                keep = math.exp(step * float(self.a[h]))
                b, c = (each[t, group].astype(np.float64) for each in (self.b, self.c))
                for i in range(width):
                    x = float(self.x[t, h, i])
                    states[h, i] = keep * states[h, i] + step * x * b
                    out[t, h, i] = sum(states[h, i] * c) + float(self.d[h]) * x
        return out, states


def token_shift(x: Floats, mixes: Floats) -> tuple[Doubles, Doubles]:
    """Rows ``[T, m, C]``, and the state after the last one."""
    rows = x.astype(np.float64)
    before = np.vstack([np.zeros((1, x.shape[1])), rows[:-1]])
    out = np.stack([rows * (1 - mix) + before * mix for mix in mixes.astype(np.float64)], 1)
    return out, rows[-1]


@dataclass(frozen=True)
class Wkv:
    """Inputs of RWKV-7's recurrence, by row."""

    given: dict[str, Floats]  # r, k, v, decay, rate, and perhaps first and share: [T, H, d]
    vectors: Floats  # [5, H * d]
    eps: float

    def run(self) -> tuple[Doubles, Doubles]:
        """``[T, H, d]``, and the states ``[H, d, d]``, by keys and values, after the last row."""
        given = {name: values.astype(np.float64) for name, values in self.given.items()}
        rows, heads, dim = given["r"].shape
        kappa, alpha, bonus, weight, bias = self.vectors.astype(np.float64).reshape(5, heads, dim)
        states, out = np.zeros((heads, dim, dim)), np.zeros((rows, heads, dim))
        for h in range(heads):
            state = np.zeros((dim, dim))  # by values and keys, as in the paper
            for t in range(rows):
                r, k, v, decay, rate = (given[name][t, h] for name in ("r", "k", "v", "decay", "rate"))
                if "share" in given:
                    share = np.vectorize(sigmoid)(given["share"][t, h])
                    v = share * given["first"][t, h] + (1 - share) * v
                a = np.vectorize(sigmoid)(rate)
                w = [math.exp(-math.exp(-0.5) * sigmoid(each)) for each in decay]
                unit = k * kappa[h] / max(math.sqrt(sum((k * kappa[h]) ** 2)), 1e-12)
                key = k * (1 - alpha[h] + alpha[h] * a)
                change = np.diag(w) - np.outer(unit, unit * a)
                state = state @ change + np.outer(v, key)
                y = state @ r
                y = (y - y.mean()) / math.sqrt(y.var() + self.eps) * weight[h] + bias[h]
                out[t, h] = y + sum(r * key * bonus[h]) * v
            states[h] = state.T
        return out, states


@dataclass(frozen=True)
class Piece:
    """Rows of one sequence in a step: ``start`` is the first one's position."""

    sequence: int
    start: int
    rows: int
    state_from: int = -1
    state_to: int | tuple[int, ...] = -1  #: after its last row; several: after each of its last rows


def state_batch(decode: list[Piece], prompt: list[Piece], spare: int = 3) -> Batch:
    """A step of these pieces, with room for more rows and one more sequence."""
    pieces = [*decode, *prompt]
    rows = sum(piece.rows for piece in pieces)
    most = max(piece.start + piece.rows for piece in pieces)
    pages = list(range(most // PAGE + 1))
    sequences = max(piece.sequence for piece in pieces) + 2
    batch = Batch(BatchLimits(rows + spare, sequences, len(pages), 1))
    row = n_decode = 0
    for i, piece in enumerate(pieces):
        row = batch.put(
            row,
            piece.sequence,
            piece.start,
            [0] * piece.rows,
            pages,
            state_from=piece.state_from,
            state_to=piece.state_to,
        )
        n_decode = row if i < len(decode) else n_decode
    batch.counts[:] = (row, n_decode, 0, sequences)
    return batch


def rows_of_step(batch: Batch, pieces: list[Piece], values: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """A step's rows of what each sequence has, and NaN in the rows that no sequence has."""
    shape = values[0].shape[1:]
    out = np.full((batch.limits.tokens, *shape), np.nan, np.float32)
    row = 0
    for piece in pieces:
        out[row : row + piece.rows] = values[piece.sequence][piece.start : piece.start + piece.rows]
        row += piece.rows
    return out
