"""Gates cut relative to all gates of a token: only the largest remain (Gemma 3n's statistical top-k)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotcold.kernels.backend import Batch, Buffer, Matrix, Norm
from hotcold.model.keys import Keys, ModelError, is_number
from hotcold.model.layer_inputs import gelu
from hotcold.model.mixers.device_buffers import DeviceBuffers
from hotcold.model.reading import Shape, TensorReader, made_matrix
from hotcold.values import shown

#: llama.cpp's defaults: 95 % of the gates of the first layers are 0.
_LAYERS, _CUT = 10, 1.6448533535003662


def read_cuts(keys: Keys, layers: int, *, any: bool) -> tuple[float | None, ...]:
    """Reads by layer the cut of gates in standard deviations above their mean; None: no cut."""
    if not any:
        return (None,) * layers
    name = "activation_sparsity_scale"
    values: Any = keys.get(name, [_CUT] * _LAYERS + [-math.inf] * (layers - _LAYERS))
    array = list(values) if isinstance(values, np.ndarray | Sequence) and not isinstance(values, str) else []
    if (len(array) != layers and name in keys) or not all(is_number(each) for each in array):
        raise ModelError(f"{keys.name(name)} is {shown(values)}: an array of {layers} numbers is needed")
    cuts = [float(each) for each in array[:layers]]
    if not all(each == -math.inf or abs(each) <= 10 for each in cuts):
        raise ModelError(f"{keys.name(name)} is {shown(values)}: numbers up to 10, or -inf, are needed")
    return tuple(None if each == -math.inf else each for each in cuts)


def cut_buffer_shapes(neurons: int) -> dict[str, Shape]:
    """Returns names and row shapes of buffers (:meth:`DeviceBuffers.buffer`)."""
    return {**dict.fromkeys(("gates", "gates above", "gates cut"), (neurons,)), "gate level": (1,)}


@dataclass(frozen=True)
class GateCut:
    """Computes ``gelu(relu(g - mean - cut * deviation))`` over all N gates g of a token.

    v is ``(g - mean) / deviation - cut``; the mean of v g is ``deviation - cut * mean``."""

    matrix: Matrix  # (N, D)
    above: Norm  # gives v
    mean: Matrix  # (1, N), all 1 / N
    cut_mean: Matrix  # (1, N), all cut / N
    ones: Matrix  # (N, 1)

    def compute(self, device: DeviceBuffers, x: Buffer, batch: Batch) -> Buffer:
        """Computes the gates of x ``[T, D]``: ``[T, N]``, 0 or more."""
        ops, neurons = device.ops, self.matrix.shape[0]
        gates, above, cut = (device.buffer(name, neurons) for name in ("gates", "gates above", "gates cut"))
        level = device.buffer("gate level", 1)
        ops.linear(x, [self.matrix], batch, [gates])
        ops.norm(gates, self.above, batch, above)
        ops.multiply(above, gates, batch, cut, activation="none")
        ops.linear(cut, [self.mean], batch, [level])
        ops.linear(gates, [self.cut_mean], batch, [level], accumulate=True)
        ops.linear(level, [self.ones], batch, [cut])
        ops.multiply(cut, above, batch, gates, activation="relu")
        gelu(ops, gates, above, batch)
        return gates


def read_cut(reader: TensorReader, name: str, neurons: int, cut: float) -> GateCut:
    """Reads a layer's gate; errors as in :func:`load_weights`."""
    ops = reader.backend
    shift = ops.zeros((neurons,))
    ops.write(shift, np.full(neurons, -cut, np.float32))
    mean = np.full((1, neurons), 1 / neurons, np.float32)
    return GateCut(
        matrix=reader.matrix(name),
        above=Norm(None, shift, 1e-20, centre=True),
        mean=made_matrix(ops, mean),
        cut_mean=made_matrix(ops, np.float32(cut) * mean),
        ones=made_matrix(ops, np.ones((neurons, 1), np.float32)),
    )
