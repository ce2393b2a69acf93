"""Says what all mixers have: a shape that is known before weights are read, weights, and ops in a step."""

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
#: Shapes by name of the tensors that a layer needs, and of those that it may have.
Tensors = tuple[dict[str, Shape], dict[str, Shape]]


class MixerWeights(Protocol):
    """A mixer's weights in a layer."""

    @property
    def matrices(self) -> list[Matrix]:
        """The matrices that a step reads whole."""

    def names(self, blk: str, present: Container[str]) -> Sequence[str | None]:
        """The tensor that each of :attr:`matrices` was read from, in the same order, None where it was made
        of others; ``present`` are all of the file's."""

    def mixer(self, device: DeviceBuffers, state: Sequence[Buffer]) -> Mixer:
        """Makes the mixer on a backend, with the layer's part of :class:`SequenceState`."""


class MixerShape:
    """One layer's mixer, as the metadata give it. Whoever counts bytes asks it."""

    rope: Rope | None = None  #: None: nothing is rotated
    window: int | None = None  #: positions that a row sees; None: all up to its own
    pages_of: int | None = None  #: the layer whose pages it reads; None: it has its own
    head_columns: tuple[int, ...] = ()  #: of matrices of which each head has its rows
    ops: tuple[str, ...] = ()  #: of ``StateOps`` that not every backend has

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different ones that it has."""
        return () if self.rope is None else (self.rope,)

    @property
    def buffers(self) -> dict[str, Shape]:
        """The shapes of what a row of a step takes between ops, by the names of
        :meth:`DeviceBuffers.buffer`."""
        return {}

    @property
    def attention(self) -> Heads | None:
        """H, K and the length of a head of its attention; None: it has none."""
        return None

    def page_arrays(self, type: str) -> Arrays:
        """Shape and type of the arrays that hold the state of a page's positions; ``type`` is one of
        ``CACHE_TYPES``. ModelError: the type's blocks do not fit."""
        return []

    def slot_arrays(self) -> Arrays:
        """Shape and type of the arrays that hold a sequence's state in a slot, where that is not a list of
        positions."""
        return []

    def of_layers(self, layers: int) -> "Sequence[MixerShape]":
        """The shapes of so many layers that have such a mixer."""
        return (self,) * layers

    def page_bytes(self, type: str) -> int:
        return _nbytes(self.page_arrays(type))

    @property
    def slot_bytes(self) -> int:
        return _nbytes(self.slot_arrays())

    def made_bytes(self, blk: str, present: Mapping[str, TensorInfo]) -> int:
        """Bytes that its weights take in memory beyond those of the file's tensors, ``present``."""
        return 0

    def tensors(self, dim: int, blk: str, present: Container[str]) -> Tensors:
        """The layer's tensors in a model of ``dim`` dimensions; ``present`` are those of the file."""
        raise NotImplementedError

    def read(self, reader: TensorReader, blk: str) -> MixerWeights:
        """Reads a layer's weights; errors as in :func:`load_weights`."""
        raise NotImplementedError

    def read_shift(self, reader: TensorReader, blk: str) -> TokenShift | None:
        """Reads the shift of rows before the layer's FFN; None: the FFN reads them as they are."""
        return None


def _nbytes(arrays: Arrays) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in arrays)


@dataclass(frozen=True)
class ParallelMixers(MixerShape):
    """Mixers that read the same input, and whose outputs are added."""

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
            needed, more = part.tensors(dim, blk, present)
            required |= needed
            optional |= more
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
            own = [*state[first : first + pages[i]], *state[second : second + slots[i]]]
            mixers.append(part.mixer(device, own))

        def mix(read: Buffer, batch: Batch, out: Buffer, *, add: bool) -> None:
            for i, each in enumerate(mixers):
                each(read, batch, out, add=add or i > 0)

        return mix


#: Of a layer that is an FFN alone.
NO_MIXER = ParallelMixers(())


def state_array(*shape: int) -> tuple[Shape, np.dtype[np.generic]]:
    """A part of a slot. States are float32, whatever the type of the KV cache."""
    return shape, np.dtype(np.float32)
