"""Interface of all mixers: a shape that is known before weights are read, weights, and ops in a step."""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hotcold.formats.gguf import TensorInfo
from hotcold.kernels.backend import Batch, Buffer, Matrix
from hotcold.model.mixers.device_buffers import DeviceBuffers, Mixer
from hotcold.model.mixers.rope import Rope
from hotcold.model.mixers.token_shift import TokenShift
from hotcold.model.reading import Shape, TensorReader

#: H, K and the length of a head.
Heads = tuple[int, int, int]
#: Shapes and types of arrays.
Arrays = list[tuple[Shape, np.dtype[np.generic]]]
#: Shapes by name of a layer's required and of its optional tensors.
Tensors = tuple[dict[str, Shape], dict[str, Shape]]


class MixerWeights(Protocol):
    """Weights of a mixer in one layer."""

    @property
    def matrices(self) -> list[Matrix]:
        """The matrices that a step reads whole."""

    def names(self, blk: str, present: Container[str]) -> Sequence[str | None]:
        """Returns the file's tensor of each of :attr:`matrices`, in the same order; None for a computed
        matrix. ``present`` are all tensors of the file."""

    def mixer(self, device: DeviceBuffers, state: Sequence[Buffer]) -> Mixer:
        """Makes the mixer on a backend, with the layer's part of :class:`SequenceState`."""


class MixerShape:
    """A mixer of one layer according to the metadata; it knows the bytes of its state."""

    rope: Rope | None = None  #: None: no rotation
    window: int | None = None  #: positions that a row attends to; None: all up to its own
    pages_of: int | None = None  #: the layer whose pages it reads; None: its own
    head_columns: tuple[int, ...] = ()  #: columns of matrices with rows for each head
    ops: tuple[str, ...] = ()  #: ops that some backends lack

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The mixer's distinct rotations."""
        return () if self.rope is None else (self.rope,)

    @property
    def buffers(self) -> dict[str, Shape]:
        """Row shapes of the buffers that a step needs between ops, by their names
        (:meth:`DeviceBuffers.buffer`)."""
        return {}

    @property
    def attention(self) -> Heads | None:
        """H, K and the length of a head of its attention; None without attention."""
        return None

    def page_arrays(self, type: str) -> Arrays:
        """Returns shape and type of a page's arrays; ``type`` is one of ``CACHE_TYPES``. ModelError: the
        type's blocks do not fit."""
        return []

    def slot_arrays(self) -> Arrays:
        """Returns shape and type of a slot's arrays, for a state that is not in pages."""
        return []

    def of_layers(self, layers: int) -> "Sequence[MixerShape]":
        """Returns the shapes of ``layers`` layers with this mixer."""
        return (self,) * layers

    def page_bytes(self, type: str) -> int:
        return _nbytes(self.page_arrays(type))

    @property
    def slot_bytes(self) -> int:
        return _nbytes(self.slot_arrays())

    def made_bytes(self, blk: str, present: Mapping[str, TensorInfo]) -> int:
        """Returns bytes of its weights in memory beyond those of the file's tensors, ``present``."""
        return 0

    def tensors(self, dim: int, blk: str, present: Container[str]) -> Tensors:
        """Returns the layer's tensors in a model of ``dim`` dimensions; ``present`` are those of the file."""
        raise NotImplementedError

    def read(self, reader: TensorReader, blk: str) -> MixerWeights:
        """Reads a layer's weights; errors as in :func:`load_weights`."""
        raise NotImplementedError

    def read_shift(self, reader: TensorReader, blk: str) -> TokenShift | None:
        """Reads the token shift before the layer's FFN; None without one."""
        return None


def _nbytes(arrays: Arrays) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in arrays)


@dataclass(frozen=True)
class ParallelMixers(MixerShape):
    """Parallel mixers: they read the same input, and their outputs are added."""

    parts: tuple[MixerShape, ...]

    @property
    def ops(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(op for part in self.parts for op in part.ops)

    @property
    def rope(self) -> Rope | None:  # type: ignore[override]
        return next((part.rope for part in self.parts if part.rope is not None), None)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        return tuple(dict.fromkeys(rope for part in self.parts for rope in part.ropes))

    @property
    def buffers(self) -> dict[str, Shape]:
        return {name: shape for part in self.parts for name, shape in part.buffers.items()}

    @property
    def attention(self) -> Heads | None:
        return next((part.attention for part in self.parts if part.attention is not None), None)

    def page_arrays(self, type: str) -> Arrays:
        return [each for part in self.parts for each in part.page_arrays(type)]

    def slot_arrays(self) -> Arrays:
        return [each for part in self.parts for each in part.slot_arrays()]

    def made_bytes(self, blk: str, present: Mapping[str, TensorInfo]) -> int:
        return sum(part.made_bytes(blk, present) for part in self.parts)

    def tensors(self, dim: int, blk: str, present: Container[str]) -> Tensors:
        required: dict[str, Shape] = {}
        optional: dict[str, Shape] = {}
        for part in self.parts:
            part_required, part_optional = part.tensors(dim, blk, present)
            required |= part_required
            optional |= part_optional
        return required, optional

    def read(self, reader: TensorReader, blk: str) -> MixerWeights:
        return ParallelMixersWeights(self, tuple(part.read(reader, blk) for part in self.parts))


@dataclass(frozen=True)
class ParallelMixersWeights:
    shape: ParallelMixers
    parts: tuple[MixerWeights, ...]

    @property
    def matrices(self) -> list[Matrix]:
        return [matrix for part in self.parts for matrix in part.matrices]

    def names(self, blk: str, present: Container[str]) -> list[str | None]:
        return [name for part in self.parts for name in part.names(blk, present)]

    def mixer(self, device: DeviceBuffers, state: Sequence[Buffer]) -> Mixer:
        mixers = []
        pages = [len(part.page_arrays("f32")) for part in self.shape.parts]
        slots = [len(part.slot_arrays()) for part in self.shape.parts]
        for i, part in enumerate(self.parts):
            first, second = sum(pages[:i]), sum(pages) + sum(slots[:i])
            part_state = [*state[first : first + pages[i]], *state[second : second + slots[i]]]
            mixers.append(part.mixer(device, part_state))

        def mix(read: Buffer, batch: Batch, out: Buffer, *, add: bool) -> None:
            for i, mixer in enumerate(mixers):
                mixer(read, batch, out, add=add or i > 0)

        return mix


#: The mixer of a layer with only an FFN.
NO_MIXER = ParallelMixers(())


def state_array(*shape: int) -> tuple[Shape, np.dtype[np.generic]]:
    """Returns a part of a slot. States are float32 for every type of the KV cache."""
    return shape, np.dtype(np.float32)
