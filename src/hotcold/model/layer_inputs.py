"""Additional inputs of layers: a few values per token and layer (Gemma 4's per-layer embeddings).

They come from the token's embedding, and from a table of each layer. A step reads one row of it per token, so
the table may be in slow memory."""

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotcold.formats.blocks import Tensor
from hotcold.kernels.backend import Backend, Batch, Buffer, Matrix, Norm
from hotcold.model.keys import Keys, ModelError
from hotcold.model.mixers.device_buffers import DeviceBuffers, Mixer
from hotcold.model.reading import Shape, TensorReader

_ROWS = 1 << 12  # of the file's table, read at a time
#: ``gelu(g) = g sigmoid(2 u)``, where ``2 u = _LINEAR g + _CUBIC g^3``: the tanh form
_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR
_TABLE, _PROJECTION, _NORM = "per_layer_token_embd", "per_layer_model_proj", "per_layer_proj_norm"


def read_width(keys: Keys) -> int:
    """Reads P, the number of values that each layer gets; 0: none."""
    return keys.whole("embedding_length_per_layer_input", 0, 1 << 16, default=0)


def input_buffer_shapes(layers: int, width: int) -> dict[str, Shape]:
    """Returns names and row shapes of buffers (:meth:`DeviceBuffers.buffer`): each layer's values, and
    scratch."""
    names = [*(f"input {i}" for i in range(layers)), "input row", "input gate", "input cube"]
    return dict.fromkeys(names, (width,))


def input_shapes(layers: int, width: int, dim: int, vocab: int) -> dict[str, Shape]:
    """Returns shapes by name of a model's required tensors."""
    shapes: dict[str, Shape] = {
        f"{_TABLE}.weight": (vocab, layers * width),
        f"{_PROJECTION}.weight": (layers * width, dim),
        f"{_NORM}.weight": (width,),
    }
    for i in range(layers):
        blk = f"blk.{i}."
        shapes |= {f"{blk}inp_gate.weight": (width, dim), f"{blk}proj.weight": (dim, width)}
        shapes |= {f"{blk}post_norm.weight": (dim,)}
    return shapes


@dataclass(frozen=True)
class LayerInputs:
    """Weights that make the values of all layers."""

    tables: tuple[Matrix, ...]  # (V, P) each
    projections: tuple[Matrix, ...]  # (P, D) each
    norm: Norm  # over P

    @property
    def table_bytes(self) -> int:
        return sum(table.nbytes for table in self.tables)

    @property
    def read_bytes(self) -> int:
        """Bytes that every step reads whole."""
        return sum(matrix.nbytes for matrix in self.projections)

    def compute(self, device: DeviceBuffers, batch: Batch, x: Buffer) -> None:
        """Sets the values of all layers from the tokens and their scaled embeddings ``x``."""
        ops, width = device.ops, self.projections[0].shape[0]
        row, buffers = device.buffer("input row", width), input_buffers(device, len(self.tables), width)
        ops.linear(x, self.projections, batch, buffers)
        for table, out in zip(self.tables, buffers, strict=True):
            ops.norm(out, self.norm, batch, out)
            ops.embed(table, batch, row)
            ops.add(out, row, batch, scale=math.sqrt(width / 2))


def input_buffers(device: DeviceBuffers, layers: int, width: int) -> list[Buffer]:
    """Returns the buffers of all layers' values on one backend."""
    return [device.buffer(f"input {i}", width) for i in range(layers)]


def read_inputs(reader: TensorReader, layers: int, width: int, dim: int) -> LayerInputs:
    """Reads the weights of all layers; errors as in :func:`load_weights`."""
    parts = [slice(i * width, (i + 1) * width) for i in range(layers)]
    # The sum of two parts is divided by the root of 2, and the projection by that of D.
    norm = reader.norm(_NORM, math.sqrt(0.5))
    return LayerInputs(
        tables=tuple(_tables(reader, layers, width)),
        projections=tuple(reader.cut(_PROJECTION, parts)),
        norm=replace(norm, eps=norm.eps * dim),
    )


def _tables(reader: TensorReader, layers: int, width: int) -> Iterator[Matrix]:
    """Reads the table once and yields each layer's part; its rows have the values of all layers."""
    whole = reader.file.stored(f"{_TABLE}.weight")
    if width % whole.type.weights:
        got = f"tensor {_TABLE}.weight has blocks of {whole.type.weights} weights ({whole.type.name})"
        raise ModelError(f"{got}: they do not fit the {width} values of a layer")
    nbytes = whole.type.row_bytes(width)
    parts = [np.empty((whole.rows, nbytes), np.uint8) for _ in range(layers)]
    for start in range(0, whole.rows, _ROWS):
        rows = whole.take_rows(slice(start, start + _ROWS)).load().data.reshape(-1, layers, nbytes)
        for i, part in enumerate(parts):
            part[start : start + len(rows)] = rows[:, i]
    shape = whole.rows, width
    for _ in range(layers):  # each is freed before the next one is packed
        yield reader.backend.matrix(Tensor(whole.type, shape, parts.pop(0)))
    reader.count(whole)


@dataclass(frozen=True)
class LayerInput:
    """The part of a block that adds a layer's values to the stream."""

    layer: int
    gate: Matrix  # (P, D)
    out: Matrix  # (D, P)

    @property
    def matrices(self) -> list[Matrix]:
        return [self.gate, self.out]

    def names(self, blk: str, present: Container[str]) -> list[str]:
        return [f"{blk}inp_gate.weight", f"{blk}proj.weight"]

    def mixer(self, device: DeviceBuffers, state: Sequence[Buffer]) -> Mixer:
        """Makes the mixer on a backend; it keeps no ``state``. ``read`` may be ``out``."""
        ops, width = device.ops, self.gate.shape[0]
        values, gate, cube = (
            device.buffer(name, width) for name in (f"input {self.layer}", "input gate", "input cube")
        )

        def mix(read: Buffer, batch: Batch, out: Buffer, *, add: bool) -> None:
            ops.linear(read, [self.gate], batch, [gate])
            gelu(ops, gate, cube, batch)
            ops.multiply(gate, values, batch, gate, activation="none")
            ops.linear(gate, [self.out], batch, [out], accumulate=add)

        return mix


def read_input(reader: TensorReader, layer: int) -> LayerInput:
    """Reads a layer's weights; errors as in :func:`load_weights`."""
    blk = f"blk.{layer}."
    return LayerInput(layer, reader.matrix(f"{blk}inp_gate"), reader.matrix(f"{blk}proj"))


def gelu(ops: Backend, x: Buffer, buffer: Buffer, batch: Batch) -> None:
    """Sets x to ``gelu(x)``."""
    ops.multiply(x, x, batch, buffer, activation="none")
    ops.multiply(buffer, x, batch, buffer, activation="none")
    ops.add(buffer, x, batch, keep=_CUBIC, scale=_LINEAR)
    ops.multiply(x, buffer, batch, x, activation="sigmoid")
