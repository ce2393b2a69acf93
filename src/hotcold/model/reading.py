"""Reading of named tensors of a GGUF file into a backend. Names and shapes are already checked."""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotcold.formats.blocks import BLOCK_TYPES, Index, quantise
from hotcold.formats.gguf import GGUFFile
from hotcold.formats.stored import AnyTensor, StoredTensor
from hotcold.kernels.backend import Backend, Buffer, Floats, Matrix, Norm
from hotcold.model.keys import ModelError

#: Matrices that may have a factor in another tensor.
_SCALED = re.compile(
    r"output|blk\.\d+\.(attn_(q|k|v|qkv|gate|output)|ffn_(gate|up|down|gate_up)(_exps|_shexp)?|ssm_(in|out))"
)

#: Called with the bytes read so far and the total bytes.
Progress = Callable[[int, int], None]
Shape = tuple[int, ...]


@dataclass
class TensorReader:
    """Turns named tensors into weights of ``backend``, and reports progress."""

    file: GGUFFile
    backend: Backend
    shapes: Mapping[str, Shape]  #: of all possible tensors of the model, by name
    norm_eps: float
    norm_centre: bool  #: norms are LayerNorms
    progress: Progress = lambda done, total: None
    total: int = 0
    done: int = 0
    norm_values: int = 0  #: weights and biases of the norms that were read

    def stored(self, name: str) -> StoredTensor:
        """Returns a matrix, still in the file, with its factors."""
        return stored_matrix(self.file, name, self.vector)

    def matrix(self, name: str) -> Matrix:
        bias, tensor = self.vector(f"{name}.bias"), self.stored(name)
        matrix = self.backend.matrix(tensor, bias)
        self.count(tensor)
        return matrix

    def cut(self, name: str, parts: Sequence[Index | slice]) -> list[Matrix]:
        """Reads row ranges of a matrix, ascending in each, as separate matrices with their biases."""
        whole, bias = self.stored(name), self.vector(f"{name}.bias")
        matrices = [
            self.backend.matrix(whole.take_rows(rows), None if bias is None else bias[rows]) for rows in parts
        ]
        self.count(whole)
        return matrices

    def own_norm(self, name: str) -> Norm | None:
        return self.norm(name) if norm_tensor(name, self.file.tensors) in self.file.tensors else None

    def norm(self, name: str, scale: float = 1.0) -> Norm:
        """Reads a norm, multiplied by ``scale``."""
        values = [self.vector(each) for each in (norm_tensor(name, self.file.tensors), f"{name}.bias")]
        self.norm_values += sum(each.size for each in values if each is not None)
        weight, bias = (self._buffer(each, scale) for each in values)
        return Norm(weight, bias, self.norm_eps, self.norm_centre)

    def count(self, *tensors: AnyTensor | None) -> None:
        """Reports tensors as read."""
        self.done += sum(tensor.nbytes for tensor in tensors if tensor is not None)
        self.progress(self.done, self.total)

    def vector(self, name: str) -> Floats | None:
        """Reads a small tensor's values, which must be finite; None without the tensor."""
        if name not in self.file.tensors:
            return None
        tensor = self.file.load(name)
        self.count(tensor)
        values = tensor.dequantise()
        if not np.isfinite(values).all():
            raise ModelError(f"tensor {name} holds values that are not finite: the file is damaged")
        return values.reshape(self.shapes.get(name, values.shape))

    def buffer(self, name: str) -> Buffer | None:
        """Reads a vector into a buffer; None without the tensor."""
        return self._buffer(self.vector(name))

    def needed_buffer(self, name: str) -> Buffer:
        """Reads a vector that the file has into a buffer."""
        buffer = self.buffer(name)
        assert buffer is not None
        return buffer

    def _buffer(self, values: Floats | None, scale: float = 1.0) -> Buffer | None:
        return None if values is None else upload(self.backend, np.float32(scale) * values)


def takes_factors(name: str) -> bool:
    """Returns whether a matrix may have a factor in another tensor (``X.scale`` of ``X.weight``)."""
    return name.endswith(".weight") and _SCALED.fullmatch(name.removesuffix(".weight")) is not None


def scale_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Returns shapes by name of the possible factors of these matrices, as in files of NVFP4. They are a
    factor of the matrix, or one of each expert's, and the same number of factors of its input. Only hardware
    that also rounds the input to four bits needs input factors; no code here reads them."""
    scales: dict[str, Shape] = {}
    for name, shape in shapes.items():
        if takes_factors(name):
            kinds = [name.removesuffix("weight") + kind for kind in ("scale", "input_scale")]
            scales |= {kind: shape[:-2] or (1,) for kind in kinds if kind not in shapes}
    return scales


def check_scaled(file: GGUFFile, name: str) -> None:
    """Checks a tensor. ModelError: it is a factor of a missing matrix, or of a block type without factors."""
    if not name.endswith(".scale"):
        return
    matrix = name.removesuffix(".scale") + ".weight"
    if (info := file.tensors.get(matrix)) is None:
        raise ModelError(f"tensor {name} multiplies {matrix}, which the file lacks")
    if not info.type.supported or info.type.panels:
        kinds = ", ".join(type.name for type in BLOCK_TYPES.values() if not type.panels)
        got = f"tensor {name} multiplies a matrix of block type {info.type.name}"
        raise ModelError(f"{got}: this is supported for {kinds}")


def stored_matrix(file: GGUFFile, name: str, vector: Callable[[str], Floats | None]) -> StoredTensor:
    """Returns a matrix, still in the file, with its factors, which ``vector`` reads (None: absent)."""
    tensor = file.stored(f"{name}.weight")
    scale = vector(f"{name}.scale") if _SCALED.fullmatch(name) else None
    if scale is None:
        return tensor
    return replace(tensor, factors=np.repeat(scale.reshape(-1), tensor.rows // scale.size))


def made_matrix(ops: Backend, values: Floats, bias: Floats | None = None) -> Matrix:
    """Makes a float32 matrix of computed values."""
    return ops.matrix(quantise(values, "F32"), bias)


def norm_tensor(name: str, present: Container[str]) -> str:
    """Returns the name of a norm's weight, which in some files has no suffix (Falcon-H1)."""
    usual = f"{name}.weight"
    return name if name in present and usual not in present else usual


def upload(backend: Backend, values: Floats) -> Buffer:
    """Makes a buffer of the backend with these values."""
    buffer = backend.zeros(values.shape, values.dtype)
    backend.write(buffer, values)
    return buffer
