"""Reads named tensors of a GGUF file into a backend. Names and shapes were checked before."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hotcold.formats.blocks import Index
from hotcold.formats.gguf import GGUFFile
from hotcold.formats.stored import AnyTensor
from hotcold.kernels.backend import Backend, Buffer, Floats, Matrix, Norm
from hotcold.model.keys import ModelError

#: Called with the bytes read so far and in all.
Progress = Callable[[int, int], None]
Shape = tuple[int, ...]


@dataclass
class TensorReader:
    """Turns named tensors into weights of ``backend``, and reports progress."""

    file: GGUFFile
    backend: Backend
    shapes: Mapping[str, Shape]  #: of the tensors that the model may have, by name
    norm_eps: float
    norm_centre: bool  #: norms are LayerNorms
    progress: Progress = lambda done, total: None
    total: int = 0
    done: int = 0
    norm_values: int = 0  #: weights and biases of the norms that were read

    def matrix(self, name: str) -> Matrix:
        bias, tensor = self.vector(f"{name}.bias"), self.file.stored(f"{name}.weight")
        matrix = self.backend.matrix(tensor, bias)
        self.count(tensor)
        return matrix

    def cut(self, name: str, parts: Sequence[Index | slice]) -> list[Matrix]:
        """Matrices of these rows of a matrix, each of ascending numbers; a bias is cut with them."""
        whole, bias = self.file.stored(f"{name}.weight"), self.vector(f"{name}.bias")
        matrices = [
            self.backend.matrix(whole.take_rows(rows), None if bias is None else bias[rows]) for rows in parts
        ]
        self.count(whole)
        return matrices

    def own_norm(self, name: str) -> Norm | None:
        return self.norm(name) if norm_tensor(name, self.file.tensors) in self.file.tensors else None

    def norm(self, name: str, scale: float = 1.0) -> Norm:
        """``scale`` times what the file's would give."""
        values = [self.vector(each) for each in (norm_tensor(name, self.file.tensors), f"{name}.bias")]
        self.norm_values += sum(each.size for each in values if each is not None)
        weight, bias = (self._buffer(each, scale) for each in values)
        return Norm(weight, bias, self.norm_eps, self.norm_centre)

    def count(self, *tensors: AnyTensor | None) -> None:
        """Reports tensors as read."""
        self.done += sum(tensor.nbytes for tensor in tensors if tensor is not None)
        self.progress(self.done, self.total)

    def vector(self, name: str) -> Floats | None:
        """A small tensor's values, which must be finite; None where the file has none."""
        if name not in self.file.tensors:
            return None
        tensor = self.file.load(name)
        self.count(tensor)
        values = tensor.dequantise()
        if not np.isfinite(values).all():
            raise ModelError(f"tensor {name} holds values that are not finite: the file is damaged")
        return values.reshape(self.shapes.get(name, values.shape))

    def buffer(self, name: str) -> Buffer | None:
        """A buffer with such a vector; None where the file has none."""
        return self._buffer(self.vector(name))

    def needed_buffer(self, name: str) -> Buffer:
        """A buffer with such a vector, which the file has."""
        buffer = self.buffer(name)
        assert buffer is not None
        return buffer

    def _buffer(self, values: Floats | None, scale: float = 1.0) -> Buffer | None:
        return None if values is None else upload(self.backend, np.float32(scale) * values)


def norm_tensor(name: str, present: Container[str]) -> str:
    """The name of a norm's weight; in some files it has no suffix (Falcon-H1)."""
    usual = f"{name}.weight"
    return name if name in present and usual not in present else usual


def upload(backend: Backend, values: Floats) -> Buffer:
    """A buffer of the backend with these values."""
    buffer = backend.zeros(values.shape, values.dtype)
    backend.write(buffer, values)
    return buffer
