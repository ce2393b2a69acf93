"""Weights of the ``cpu`` backend, packed once; csrc/simd/types.h describes the layout.

Threads of the pool read file tensors piece by piece and pack each piece right after reading it. All matrices
share one arena of huge pages. An FFN by neuron takes two pieces of it: the gate rows, one contiguous stream,
and for each neuron its up row then its down row. Where the activation gives zeros, down by output is
transposed if its type is a float, and packed into panels if it is quantised. Experts are concatenated in each
piece."""

from collections.abc import Sequence
from dataclasses import dataclass

from hotcold.formats.stored import AnyTensor, StoredTensor
from hotcold.formats.words import ACTIVATIONS
from hotcold.kernels import _native
from hotcold.kernels.backend import (
    FFNTensors,
    Floats,
    HotRows,
    PredictorTensors,
    is_dense,
    mask_words,
    panel_bytes,
    scale_run,
)
from hotcold.kernels.cpu_disk import Disk
from hotcold.kernels.memory_nodes import memory_nodes


@dataclass(frozen=True)
class PackedMatrix:
    rows: _native.WeightRows
    shape: tuple[int, int]
    nbytes: int
    bias: Floats | None


@dataclass(frozen=True)
class PackedFFN:
    native: _native.FfnWeights
    neurons: int
    words: int
    experts: int
    nbytes: int
    row_bytes: tuple[int, int, int, int]
    runs: int
    activation: str
    gated: bool
    dense: bool  #: whether down is a dot over all neurons
    cache: _native.ExpertCache | None = None  #: the layer's expert cache, if it has one


@dataclass(frozen=True)
class PackedPredictor:
    first: PackedMatrix
    second: PackedMatrix
    threshold: Floats
    relu: bool
    ends: tuple[int, ...]
    chosen: int

    @property
    def nbytes(self) -> int:
        return self.first.nbytes + self.second.nbytes + self.threshold.nbytes


class Packer:
    """Makes weights of tensors on the threads of a pool."""

    def __init__(self, pool: _native.Pool) -> None:
        self._pool = pool
        self._arena = _native.Arena(memory_nodes())
        self.disk: Disk | None = None  #: files of experts that are read when a step needs them, if any

    def matrix(self, tensor: AnyTensor, bias: Floats | None = None) -> PackedMatrix:
        rows, cols = tensor.shape
        size = _native.row_size(tensor.type.id, cols)
        packed = self._packed(self._arena.take(rows * size), 0, size, tensor)
        nbytes = rows * size + (0 if bias is None else bias.nbytes)
        return PackedMatrix(packed, (rows, cols), nbytes, bias)

    def predictor(self, tensors: PredictorTensors) -> PackedPredictor:
        first, second = self.matrix(tensors.first), self.matrix(tensors.second)
        experts = tensors.ends, tensors.chosen
        return PackedPredictor(first, second, tensors.threshold, tensors.relu, *experts)

    def ffn(self, tensors: FFNTensors) -> PackedFFN:
        neurons, dim = tensors.up.shape
        down = tensors.down
        by_output = tensors.down_layout == "by_output"
        dense = is_dense(tensors.down_layout, down.type, tensors.activation)
        panels = by_output and not dense and down.type.weights > 1
        gate_bytes = tensors.gate.nbytes if tensors.gate else 0
        whole = [gate_bytes, tensors.up.nbytes, tensors.down_nbytes]
        sizes = [n // neurons for n in whole]
        cache, cold = None, None
        gate: _native.WeightRows | None
        residency = tensors.residency
        if isinstance(residency, HotRows):
            assert tensors.gate is not None
            self.disk = self.disk or Disk()
            matrices, cold = self.disk.cold_rows(tensors, residency)
            gate, up, down_rows = matrices if residency.gates else [self.matrix(tensors.gate).rows, *matrices]
            first = 0 if residency.gates else 1
            whole[first:] = [n // neurons * sum(residency.neurons) for n in whole[first:]]
        elif residency is not None:
            self.disk = self.disk or Disk()
            gate, up, down_rows, cache = self.disk.rows(tensors, residency, self._arena)
            whole = [n // tensors.experts * residency.slots for n in whole]
        else:
            gate, up, down_rows = self._rows(tensors, sizes, dense=dense, panels=panels)
        biases = (tensors.gate_bias, tensors.up_bias, tensors.down_bias)
        gate_bias, up_bias, down_bias = (None if each is None else each.reshape(-1) for each in biases)
        kind = dense, ACTIVATIONS.index(tensors.activation)
        numbers = tensors.threshold, tensors.limit, tensors.alpha
        rows = gate, up, down_rows, gate_bias, up_bias, down_bias
        row_bytes = (sizes[0], sizes[1], *(panel_bytes(down.type, dim) if panels else (sizes[2], 0)))
        return PackedFFN(
            native=_native.FfnWeights(*rows, *kind, *numbers, tensors.ends, tensors.chosen, cache, cold),
            neurons=neurons,
            words=mask_words(tensors.ends)[-1],
            experts=tensors.experts,
            nbytes=sum(whole) + sum(each.nbytes for each in biases if each is not None),
            row_bytes=row_bytes,
            runs=neurons // scale_run(down.type) if panels else 0,
            activation=tensors.activation,
            gated=gate is not None,
            dense=dense,
            cache=cache,
        )

    def _rows(
        self, tensors: FFNTensors, sizes: Sequence[int], *, dense: bool, panels: bool
    ) -> tuple[_native.WeightRows | None, _native.WeightRows, _native.WeightRows]:
        """Makes rows of gate, up and down (perhaps in panels); ``sizes`` are bytes per row."""
        gate = None if tensors.gate is None else self.matrix(tensors.gate).rows
        if panels:
            return gate, self.matrix(tensors.up).rows, self._panels(tensors)
        if dense:
            return gate, self.matrix(tensors.up).rows, self.matrix(tensors.down).rows
        if gate is None:  # then up is the stream
            memory = self._arena.take(tensors.down_nbytes)
            return gate, self.matrix(tensors.up).rows, self._down_rows(memory, 0, sizes[2], tensors)
        # One piece of memory: a neuron's up row, then its down row.
        stride = sizes[1] + sizes[2]
        memory = self._arena.take(tensors.up.shape[0] * stride)
        up = self._packed(memory, 0, stride, tensors.up)
        return gate, up, self._down_rows(memory, sizes[1], stride, tensors)

    def _packed(
        self, memory: _native.Memory, offset: int, stride: int, tensor: AnyTensor
    ) -> _native.WeightRows:
        rows = _native.WeightRows(memory, offset, stride, tensor.shape[0], tensor.shape[1], tensor.type.id)
        self._fill(rows, tensor)
        factors = tensor.row_factors
        return rows if factors is None else rows.multiplied(factors)

    def _down_rows(
        self, memory: _native.Memory, offset: int, stride: int, tensors: FFNTensors
    ) -> _native.WeightRows:
        """Makes rows by neuron; a by-output down of a float type is transposed without changing a value."""
        if tensors.down_layout == "by_neuron":
            return self._packed(memory, offset, stride, tensors.down)
        neurons, dim = tensors.up.shape
        rows = _native.WeightRows(memory, offset, stride, neurons, dim, tensors.down.type.id)
        for first, down in tensors.expert_downs():
            self._fill(rows.part(first, down.shape[1]), down, by_output=True)
        return rows

    def _panels(self, tensors: FFNTensors) -> _native.WeightRows:
        neurons, dim = tensors.up.shape
        sizes = dim, neurons, tensors.down.type.id
        panels = _native.WeightRows.panels(self._arena.take(_native.panels_size(*sizes)), *sizes)
        for first, down in tensors.expert_downs():
            self._fill(panels.part(first, down.shape[1]), down, by_output=True)
        return panels

    def _fill(self, rows: _native.WeightRows, tensor: AnyTensor, *, by_output: bool = False) -> None:
        # The extension itself reads selected rows, or columns that become rows.
        direct = isinstance(tensor, StoredTensor) and (tensor.chosen is None or tensor.by_column == by_output)
        if not direct:
            rows.pack(tensor.load().data, self._pool, by_output)
            return
        assert isinstance(tensor, StoredTensor)
        with tensor.descriptor() as file:
            part = tensor.offset, tensor.rows, tensor.row_bytes
            rows.read(file, *part, self._pool, by_output, tensor.chosen)
