"""Several residual streams (AltUp, arXiv 2301.13310) and a learned residual of low rank (LAuReL, arXiv
2411.07501), as in Gemma 3n.

A layer computes only the first stream, which is the residual stream of all other code. Before the layer, each
stream is predicted from all streams; after it, each is corrected by the layer's change. Factors are numbers
of each token: a matrix with equal rows gives such a number for every dimension."""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotcold.kernels.backend import Backend, Batch, Buffer, Chosen, Floats, Matrix, Norm, RouterCall
from hotcold.model.keys import Keys, ModelError
from hotcold.model.layer_inputs import LayerInput
from hotcold.model.mixers.device_buffers import DeviceBuffers, Mixer
from hotcold.model.reading import Shape, TensorReader, made_matrix

#: A norm that only divides by the root mean square; its epsilon matters only for zeros.
_PLAIN = Norm(None, None, 1e-20)
_MOST = 8


def read_streams(keys: Keys, *, any: bool) -> int:
    """Reads the number of streams, the first included."""
    if not any:
        return 1
    if keys.whole("altup.active_idx", 0, _MOST, default=0):
        raise ModelError(f"{keys.name('altup.active_idx')} is not 0: the first stream must be computed")
    return keys.whole("altup.num_inputs", 2, _MOST, default=4)


def stream_buffer_shapes(streams: int, dim: int, rank: int) -> dict[str, Shape]:
    """Returns names and row shapes of buffers (:meth:`DeviceBuffers.buffer`)."""
    names = [f"{kind} {i}" for kind in ("stream", "predicted", "factor") for i in range(streams)]
    buffers = dict.fromkeys([*names, "stream change", "stream room"], (dim,))
    return {**buffers, "stream level": (1,), "laurel": (rank,)}


def stream_shapes(streams: int, layers: int, dim: int, rank: int) -> dict[str, Shape]:
    """Returns shapes by name of a model's required tensors; ``rank`` is LAuReL's."""
    others = streams - 1, dim, dim
    shapes: dict[str, Shape] = {"altup_proj.weight": others, "altup_unembd_proj.weight": others}
    for i in range(layers):
        blk = f"blk.{i}."
        shapes |= {
            f"{blk}altup_router.weight": (streams, dim),
            f"{blk}altup_router_norm.weight": (dim,),
            f"{blk}altup_predict_coef.weight": (streams * streams, streams),
            f"{blk}altup_correct_coef.weight": (streams, streams),
            f"{blk}altup_correct_scale.weight": (dim,),
            f"{blk}laurel_l.weight": (rank, dim),
            f"{blk}laurel_r.weight": (dim, rank),
            f"{blk}laurel_post_norm.weight": (dim,),
        }
    return shapes


def other_streams(device: DeviceBuffers, streams: int, dim: int) -> list[Buffer]:
    """Returns the streams except the first, on one backend."""
    return [device.buffer(f"stream {i}", dim) for i in range(1, streams)]


@dataclass(frozen=True)
class Streams:
    """Weights that make the other streams of the first one, and one of all streams at the end."""

    begins: tuple[Matrix, ...]  # (D, D) each
    ends: tuple[Matrix, ...]  # (D, D) each
    mean: Matrix  # (1, D), all 1 / D
    ones: Matrix  # (D, 1)
    mean_at_end: Matrix  # on the head's backend, like ``ones_at_end``
    ones_at_end: Matrix

    def matrices(self, *, end: bool) -> list[Matrix]:
        """Returns the matrices that a step reads whole, at its beginning or at its end."""
        return (
            [*self.ends, self.mean_at_end, self.ones_at_end] if end else [*self.begins, self.mean, self.ones]
        )

    def begin(self, device: DeviceBuffers, batch: Batch, x: Buffer) -> None:
        """Sets the other streams from the scaled embeddings x ``[T, D]``, with the same mean square."""
        ops, dim = device.ops, self.ones.shape[0]
        others = other_streams(device, 1 + len(self.begins), dim)
        level = self._level(device, batch, x, self.mean, self.ones)
        for matrix, out in zip(self.begins, others, strict=True):
            ops.linear(x, [matrix], batch, [out])
            self._set_level(ops, out, level, batch)

    def end(self, device: DeviceBuffers, batch: Batch, x: Buffer) -> None:
        """Sets x to the mean of all streams, each projected back and with the mean square of the first."""
        ops, dim = device.ops, self.ones.shape[0]
        others = other_streams(device, 1 + len(self.ends), dim)
        level = self._level(device, batch, x, self.mean_at_end, self.ones_at_end)
        turned = device.buffer("stream change", dim)
        for matrix, stream in zip(self.ends, others, strict=True):
            ops.linear(stream, [matrix], batch, [turned])
            self._set_level(ops, turned, level, batch)
            ops.add(x, turned, batch)
        ops.add(x, x, batch, keep=0, scale=1 / (1 + len(self.ends)))

    def _level(self, device: DeviceBuffers, batch: Batch, x: Buffer, mean: Matrix, ones: Matrix) -> Buffer:
        """Returns the root mean square of x, for every dimension: the mean of x times normalised x."""
        ops, dim = device.ops, ones.shape[0]
        buffer, number = device.buffer("stream room", dim), device.buffer("stream level", 1)
        ops.norm(x, _PLAIN, batch, buffer)
        ops.multiply(buffer, x, batch, buffer, activation="none")
        ops.linear(buffer, [mean], batch, [number])
        ops.linear(number, [ones], batch, [buffer])
        return buffer

    @staticmethod
    def _set_level(ops: Backend, x: Buffer, level: Buffer, batch: Batch) -> None:
        ops.norm(x, _PLAIN, batch, x)
        ops.multiply(x, level, batch, x, activation="none")


def read_all_streams(reader: TensorReader, streams: int, dim: int, head: Backend) -> Streams:
    """Reads the weights of no layer: the beginning on the reader's backend, the end on the head's."""
    first = reader.backend
    begins = _stack(reader, "altup_proj", streams, dim)
    reader.backend = head
    ends = _stack(reader, "altup_unembd_proj", streams, dim)
    reader.backend = first
    mean, ones = np.full((1, dim), 1 / dim, np.float32), np.ones((dim, 1), np.float32)
    matrices = [made_matrix(each, values) for each in (first, head) for values in (mean, ones)]
    return Streams(begins, ends, *matrices)


def _stack(reader: TensorReader, name: str, streams: int, dim: int) -> tuple[Matrix, ...]:
    whole = reader.file.stored(f"{name}.weight").flat()
    parts = [slice(i * dim, (i + 1) * dim) for i in range(streams - 1)]
    matrices = tuple(reader.backend.matrix(whole.take_rows(part)) for part in parts)
    reader.count(whole)
    return matrices


@dataclass(frozen=True)
class Factors:
    """Numbers of each token from a router: ``linear(tanh(router(norm(x))))``.

    ``tanh(y) = 2 sigmoid(2 y) - 1``: the norm has the inner 2, ``rows`` the outer one, and a bias the -1."""

    norm: Norm
    router: Matrix  # (S, D)
    rows: tuple[Matrix, ...]  # (D, S) each, with equal rows

    def sigmoids(self, ops: Backend, x: Buffer, batch: Batch, buffer: Buffer, chosen: Chosen) -> Buffer:
        """Computes sigmoids ``[T, S]`` of x ``[T, D]``: the factors of a router that chooses all experts."""
        count = self.router.shape[0]
        ops.norm(x, self.norm, batch, buffer)
        arrays = buffer, self.router, batch, chosen.ids, chosen.factors
        ops.router(RouterCall(*arrays, k=count, score="sigmoid", normalise=False, scale=1.0))
        return chosen.factors


def _rows(reader: TensorReader, name: str, dim: int, offset: float) -> tuple[Matrix, ...]:
    """Reads the matrices of a layer's numbers, and adds ``offset`` to each."""
    weights = reader.vector(f"{name}.weight")
    assert weights is not None
    return tuple(alike_rows(reader.backend, 2 * row, dim, offset - float(row.sum())) for row in weights)


def alike_rows(ops: Backend, row: Floats, dim: int, bias: float) -> Matrix:
    """Makes a matrix that gives ``row . x + bias`` for every dimension."""
    values = np.ascontiguousarray(np.broadcast_to(row, (dim, len(row))), np.float32)
    return made_matrix(ops, values, np.full(dim, bias, np.float32))


@dataclass(frozen=True)
class Predict:
    """The part of a block that predicts all streams: ``X_i + sum over j of c_ij X_j``."""

    streams: int
    factors: Factors

    @property
    def matrices(self) -> list[Matrix]:
        return [self.factors.router, *self.factors.rows]

    def names(self, blk: str, present: Container[str]) -> list[str | None]:
        return [f"{blk}altup_router.weight", *[None] * len(self.factors.rows)]

    def mixer(self, device: DeviceBuffers, state: Sequence[Buffer]) -> Mixer:
        """Makes the mixer on a backend; it keeps no ``state``."""
        ops, dim, count = device.ops, self.factors.router.shape[1], self.streams
        others, buffer = other_streams(device, count, dim), device.buffer("stream room", dim)
        predicted = [device.buffer(f"predicted {i}", dim) for i in range(count)]
        wide = [device.buffer(f"factor {i}", dim) for i in range(count)]
        chosen = device.choices("streams", count)

        def mix(read: Buffer, batch: Batch, out: Buffer, *, add: bool) -> None:
            sigmoids = self.factors.sigmoids(ops, read, batch, buffer, chosen)
            for i, target in enumerate(predicted):
                rows = self.factors.rows[i * count : (i + 1) * count]
                ops.linear(sigmoids, rows, batch, wide)
                for j, (stream, factor) in enumerate(zip([read, *others], wide, strict=True)):
                    ops.multiply(factor, stream, batch, factor, activation="none")
                    ops.add(target, factor, batch, keep=float(j > 0))
                if i:
                    ops.add(target, others[i - 1], batch)
            ops.add(out, predicted[0], batch, keep=float(add))
            ops.add(predicted[0], out, batch, keep=0)

        return mix


@dataclass(frozen=True)
class Laurel:
    """The block part parallel to attention that adds its input and, normalised, a product of low rank. It
    ends the group: the sum with attention's output is divided by the root of 2."""

    left: Matrix  # (R, D)
    right: Matrix  # (D, R)
    norm: Norm

    @property
    def matrices(self) -> list[Matrix]:
        return [self.left, self.right]

    def names(self, blk: str, present: Container[str]) -> list[str | None]:
        return [f"{blk}laurel_l.weight", f"{blk}laurel_r.weight"]

    def mixer(self, device: DeviceBuffers, state: Sequence[Buffer]) -> Mixer:
        """Makes the mixer on a backend; it keeps no ``state``."""
        ops, (rank, dim) = device.ops, self.left.shape
        small, wide = device.buffer("laurel", rank), device.buffer("stream room", dim)

        def mix(read: Buffer, batch: Batch, out: Buffer, *, add: bool) -> None:
            ops.linear(read, [self.left], batch, [small])
            ops.linear(small, [self.right], batch, [wide])
            ops.norm(wide, self.norm, batch, wide)
            ops.add(wide, read, batch)
            ops.add(out, wide, batch, keep=math.sqrt(0.5) * add, scale=math.sqrt(0.5))

        return mix


@dataclass(frozen=True)
class Correct:
    """The part of a block that corrects all streams by the layer's change, ``P_i + d_i (x - P_0)``. It also
    adds the layer's values of each token to all streams except the first."""

    streams: int
    factors: Factors  # their last row scales the input of the values
    given: LayerInput
    norm: Norm  # of the added values

    @property
    def matrices(self) -> list[Matrix]:
        return [self.factors.router, *self.factors.rows, *self.given.matrices]

    def names(self, blk: str, present: Container[str]) -> list[str | None]:
        factor_names = [None] * len(self.factors.rows)
        return [f"{blk}altup_router.weight", *factor_names, *self.given.names(blk, present)]

    def mixer(self, device: DeviceBuffers, state: Sequence[Buffer]) -> Mixer:
        """Makes the mixer on a backend; it keeps no ``state``."""
        ops, dim, count = device.ops, self.factors.router.shape[1], self.streams
        others, buffer = other_streams(device, count, dim), device.buffer("stream room", dim)
        predicted = [device.buffer(f"predicted {i}", dim) for i in range(count)]
        wide = [device.buffer(f"factor {i}", dim) for i in range(count)]
        change, chosen = device.buffer("stream change", dim), device.choices("streams", count)
        values = self.given.mixer(device, state)

        def mix(read: Buffer, batch: Batch, out: Buffer, *, add: bool) -> None:
            sigmoids = self.factors.sigmoids(ops, read, batch, buffer, chosen)
            ops.add(change, read, batch, keep=0)
            ops.add(change, predicted[0], batch, scale=-1)
            ops.linear(sigmoids, self.factors.rows, batch, [*wide, buffer])
            for i, factor in enumerate(wide):
                ops.multiply(factor, change, batch, factor, activation="none")
                if i:
                    ops.add(others[i - 1], predicted[i], batch, keep=0)
                    ops.add(others[i - 1], factor, batch)
            ops.add(wide[0], change, batch, scale=-1)
            ops.add(out, wide[0], batch, keep=float(add))
            ops.multiply(buffer, out, batch, buffer, activation="none")
            values(buffer, batch, buffer, add=False)
            ops.norm(buffer, self.norm, batch, buffer)
            for stream in others:
                ops.add(stream, buffer, batch)

        return mix


def read_predict(reader: TensorReader, blk: str, streams: int, dim: int) -> Predict:
    """Reads a layer's prediction of streams; errors as in :func:`load_weights`."""
    norm, router = reader.norm(f"{blk}altup_router_norm", 2 / dim), reader.matrix(f"{blk}altup_router")
    rows = _rows(reader, f"{blk}altup_predict_coef", dim, 0.0)
    return Predict(streams, Factors(norm, router, rows))


def read_laurel(reader: TensorReader, blk: str) -> Laurel:
    """Reads a layer's learned residual; errors as in :func:`load_weights`."""
    left, right = (reader.matrix(f"{blk}laurel_{part}") for part in ("l", "r"))
    return Laurel(left, right, reader.norm(f"{blk}laurel_post_norm"))


def read_correct(reader: TensorReader, blk: str, predict: Predict, given: LayerInput) -> Correct:
    """Reads a layer's correction of streams, with the router of ``predict``; see :func:`load_weights`."""
    streams, dim = predict.factors.router.shape
    rows = _rows(reader, f"{blk}altup_correct_coef", dim, 1.0)
    scale = reader.vector(f"{blk}altup_correct_scale.weight")
    assert scale is not None
    alone = made_matrix(reader.backend, np.zeros((dim, streams), np.float32), scale)
    factors = replace(predict.factors, rows=(*rows, alone))
    return Correct(streams, factors, given, reader.norm(f"{blk}post_norm"))
