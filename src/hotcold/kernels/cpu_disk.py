"""Experts that stay in the model's file until a step needs them; csrc/disk describes the reads.

With :class:`ExpertSlots` a layer has slots in memory for some of its experts, in cpu_weights.py's layout. An
expert is read when the router chooses it: by Linux's io_uring, or by threads that read a piece each. Where
the file system allows it, reads bypass the system's cache.

With :class:`HotRows` all experts are in memory except for rows of up and down, and of gates where predictors
name neurons. Each expert keeps the rows of its first neurons. A step reads other rows when it needs them.

If the file stores a neuron's rows together, memory does too, and one read fetches them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hotcold.formats.files import FileError, RegularFile
from hotcold.formats.stored import AnyTensor, StoredTensor
from hotcold.kernels import _native
from hotcold.kernels.backend import DiskCounts, ExpertSlots, FFNTensors, HotRows, is_dense
from hotcold.kernels.file_reads import READERS, asked_for_rings


@dataclass(frozen=True)
class _FileRows:
    """Location of a tensor of experts in a file."""

    file: int  #: the file's number
    offsets: list[int]  #: of each expert's first row
    rows: int  #: of an expert, interleaved tensors included
    row_bytes: int
    pitch: int  #: file rows from one row of this tensor to its next

    def follows(self, other: "_FileRows") -> bool:
        """Returns whether each of these rows directly follows a row of the other tensor."""
        behind = [at + self.row_bytes for at in other.offsets]
        alike = (self.file, self.pitch, self.row_bytes) == (other.file, other.pitch, other.row_bytes)
        return self.pitch > 1 and alike and behind == self.offsets


class Disk:
    """The files of a model's experts, and the expert slots of each layer."""

    def __init__(self, *, direct: bool = True) -> None:
        self.native = _native.Disk(READERS, direct, asked_for_rings())
        self._files: dict[RegularFile, int] = {}
        self._expert_caches: list[_native.ExpertCache | _native.ColdRows] = []

    @property
    def direct(self) -> bool:
        """True if all file reads bypass the system's cache."""
        return all(self.native.direct(number) for number in self._files.values())

    def counts(self) -> DiskCounts:
        counts = [cache.counts() for cache in self._expert_caches]
        hits, misses, stalls, stall_ns = map(sum, zip(*counts, strict=True)) if counts else (0,) * 4
        nbytes, _, busy_ns = self.native.counts()
        return DiskCounts(hits, misses, nbytes, busy_ns / 1e9, stalls, stall_ns / 1e9)

    def rows(
        self, tensors: FFNTensors, residency: ExpertSlots, arena: _native.Arena
    ) -> tuple[_native.WeightRows | None, _native.WeightRows, _native.WeightRows, _native.ExpertCache]:
        """Makes rows of gate, up and down in slots, and the cache that fills them. ValueError: the experts
        are not stored in a file, or their shapes differ."""
        experts, slots = tensors.experts, residency.slots
        neurons, dim = tensors.up.shape[0] // experts, tensors.up.shape[1]
        if tensors.expert_ends is not None or tensors.down_blocks is not None:
            raise ValueError("parts of experts cannot be read one by one: whole experts are needed")
        cache = _native.ExpertCache(self.native, residency.label, experts, slots)
        by_output = tensors.down_layout == "by_output"
        dense = is_dense(tensors.down_layout, tensors.down.type, tensors.activation)
        up_size = _native.row_size(tensors.up.type.id, dim)
        count = slots * neurons

        def part(
            rows: _native.WeightRows, tensor: AnyTensor, *, by_output: bool = False
        ) -> _native.WeightRows:
            self._add(cache, rows, [tensor], experts, by_output=by_output)
            return rows

        def matrix(tensor: AnyTensor) -> _native.WeightRows:
            rows, cols, kind = tensor.shape[0] // experts * slots, tensor.shape[1], tensor.type.id
            size = _native.row_size(kind, cols)
            return part(_native.WeightRows(arena.take(rows * size), 0, size, rows, cols, kind), tensor)

        down, three = tensors.down, [tensors.gate, tensors.up, tensors.down]
        together = not dense and not by_output and self._side_by_side(three, experts)
        gate = None if tensors.gate is None or together else matrix(tensors.gate)
        if together:
            whole, (gate, up, down_rows) = _rows_side_by_side(arena, count, dim, tensors.up.type.id, 3)
            self._add(cache, whole, three, experts)
        elif dense:
            up, down_rows = matrix(tensors.up), matrix(down)
        elif by_output and down.type.weights > 1:
            sizes = dim, count, down.type.id
            panels = _native.WeightRows.panels(arena.take(_native.panels_size(*sizes)), *sizes)
            up, down_rows = matrix(tensors.up), part(panels, down, by_output=True)
        else:
            down_size = _native.row_size(down.type.id, dim)
            paired = gate is not None  # then a neuron's up row and its down row are neighbours
            stride = up_size + down_size if paired else down_size
            memory = arena.take(count * stride)
            if paired:
                kind = tensors.up.type.id
                up = part(_native.WeightRows(memory, 0, stride, count, dim, kind), tensors.up)
            else:
                up = matrix(tensors.up)
            at = up_size if paired else 0
            rows = _native.WeightRows(memory, at, stride, count, dim, down.type.id)
            down_rows = part(rows, down, by_output=by_output)
        if residency.preloaded:
            try:
                cache.fill(list(residency.preloaded), residency.pinned)
            except _native.DiskError as error:
                raise FileError(str(error)) from None
        self._expert_caches.append(cache)
        return gate, up, down_rows, cache

    def cold_rows(
        self, tensors: FFNTensors, residency: HotRows
    ) -> tuple[list[_native.WeightRows], _native.ColdRows]:
        """Makes rows of up and down, also of gate where the residency says so. Reads the hot ones, and makes
        the reader of the others. ValueError: the experts are not stored in a file, or their shapes differ."""
        experts, (count, dim) = tensors.experts, tensors.up.shape
        if tensors.expert_ends is not None or tensors.down_layout != "by_neuron":
            raise ValueError("rows can be read one by one only from whole experts with down by_neuron")
        tensors_read: list[AnyTensor | None] = [tensors.up, tensors.down]
        if residency.gates:
            tensors_read.insert(0, tensors.gate)
        facts = list(residency.neurons), residency.buffer_neurons, residency.gates
        cold = _native.ColdRows(self.native, residency.label, count // experts, *facts)
        arena = _native.Arena(huge=False)  # a page of it is a few rows
        if self._side_by_side(tensors_read, experts):
            whole, rows = _rows_side_by_side(arena, count, dim, tensors.up.type.id, len(tensors_read))
            self._add(cold, whole, tensors_read, experts)
        else:
            sizes = [_native.row_size(each.type.id, dim) for each in tensors_read if each is not None]
            memory, rows, at = arena.take(count * sum(sizes)), [], 0
            for tensor, size in zip(tensors_read, sizes, strict=True):
                assert tensor is not None
                rows.append(_native.WeightRows(memory, at, sum(sizes), count, dim, tensor.type.id))
                self._add(cold, rows[-1], [tensor], experts)
                at += size
        try:
            cold.fill()
        except _native.DiskError as error:
            raise FileError(str(error)) from None
        self._expert_caches.append(cold)
        return rows, cold

    def _side_by_side(self, tensors: Sequence[AnyTensor | None], experts: int) -> bool:
        """Returns whether the file stores the rows of each neuron together, in this order."""
        stored = [each for each in tensors if isinstance(each, StoredTensor) and each.chosen is not None]
        if len(stored) != len(tensors) or len({each.type.id for each in stored}) > 1:
            return False
        places = [self._experts(each, experts) for each in stored]
        return all(second.follows(first) for first, second in pairwise(places))

    def _add(
        self,
        to: _native.ExpertCache | _native.ColdRows,
        rows: _native.WeightRows,
        tensors: Sequence[AnyTensor | None],
        experts: int,
        *,
        by_output: bool = False,
    ) -> None:
        """Registers the file tensors that fill these rows: one, or several with interleaved rows."""
        place = self._experts(tensors[0], experts)
        part = place.file, place.offsets, place.rows, place.row_bytes, len(tensors), place.pitch
        if isinstance(to, _native.ExpertCache):
            to.add(self.native, rows, by_output, *part)
        else:
            to.add(self.native, rows, *part)

    def _experts(self, tensor: AnyTensor | None, experts: int) -> _FileRows:
        """Locates the experts of a tensor. ValueError: single experts, or this file, cannot be read."""
        if not isinstance(tensor, StoredTensor) or tensor.by_column:
            raise ValueError("experts outside memory must be stored in a file")
        if tensor.factors is not None:
            raise ValueError("experts outside memory can have no factors")
        if tensor.file not in self._files:
            self._files[tensor.file] = self._number(tensor)
        rows, pitch = tensor.shape[0] // experts, 1
        firsts = [expert * rows for expert in range(experts)]
        if tensor.chosen is not None:
            chosen = np.asarray(tensor.chosen).reshape(experts, rows)
            steps = np.diff(chosen, axis=1)
            pitch = int(steps[0, 0]) if steps.size else 1
            if (steps != pitch).any():
                raise ValueError("the rows of an expert are not stored together in the file")
            firsts = chosen[:, 0].tolist()
        offsets = [tensor.offset + first * tensor.row_bytes for first in firsts]
        return _FileRows(self._files[tensor.file], offsets, rows * pitch, tensor.row_bytes, pitch)

    def _number(self, tensor: StoredTensor) -> int:
        """Opens a tensor's file a second time; returns its number."""
        with tensor.descriptor() as number:
            try:
                return self.native.add(number)
            except _native.DiskError as error:
                raise FileError(str(error)) from None


def _rows_side_by_side(
    arena: _native.Arena, neurons: int, dim: int, kind: int, count: int
) -> tuple[_native.WeightRows, list[_native.WeightRows]]:
    """Makes interleaved rows, one of each matrix per neuron. Returns all rows, and each matrix's."""
    size = _native.row_size(kind, dim)
    memory = arena.take(neurons * count * size)
    parts = [_native.WeightRows(memory, i * size, count * size, neurons, dim, kind) for i in range(count)]
    return _native.WeightRows(memory, 0, size, count * neurons, dim, kind), parts
