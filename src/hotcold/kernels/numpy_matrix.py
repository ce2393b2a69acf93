"""The parts of a dot in NumPy, for the reference backend and fitting: weight blocks, and input codes."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hotcold.formats.blocks import Tensor
from hotcold.kernels import checks
from hotcold.kernels.backend import Floats
from hotcold.kernels.numpy_tiles import tile_dot

INPUT_BLOCK = 32  #: number of input values that share a scale
#: A block with a largest magnitude below this counts as zero: its inverse scale would overflow.
SMALLEST_AMAX = np.float32(2.0**-100)


def quantise_input(x: Floats) -> tuple[Floats, Floats]:
    """Quantises a dot's input ``[..., I]`` to int8 codes and scales, like ggml's ``quantize_row_q8_0``.

    Per 32 values: ``scale = amax / 127``, ``code = round(value * (127 / amax))``, to nearest even, every step
    in float32. The scale stays float32 (ggml rounds it to float16). Codes ``[..., I / 32, 32]`` are float32
    too, and scales ``[..., I / 32, 1]``. In a block with a NaN or an infinity, codes times scale is NaN."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // INPUT_BLOCK, INPUT_BLOCK)
    amax: Floats = np.abs(blocks).max(axis=-1, keepdims=True)
    amax[amax < SMALLEST_AMAX] = 0
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse: Floats = np.float32(127) / amax
        inverse[amax == 0] = 0
        codes: Floats = np.rint(blocks * inverse)
        scales: Floats = amax / np.float32(127)
    return codes, scales


@dataclass(frozen=True)
class ReferenceMatrix:
    """Weights as the file's blocks, dequantised at first use."""

    tensor: Tensor
    bias: Floats | None = None

    def __post_init__(self) -> None:
        checks.check_matrix(self.tensor, self.bias)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.tensor.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def quantised(self) -> bool:
        return self.tensor.type.weights > 1  # float types are blocks of one value

    @cached_property
    def values(self) -> Floats:
        return self.tensor.dequantise()

    def dot(self, x: Floats, math: str = "same", decode: int = 0) -> Floats:
        """Maps ``[..., columns]`` to ``[..., rows]``, with the bias; quantised weights quantise ``x``
        first. ``math`` (:mod:`~hotcold.kernels.numpy_tiles`): for the rows of ``x`` after ``decode``."""
        if math == "fast" or (math == "split" and not self.quantised):
            tiled = tile_dot(x[decode:], self.values, self.tensor.type.name, math)
            return np.concatenate([self.dot(x[:decode]), tiled if self.bias is None else tiled + self.bias])
        if self.quantised:
            codes, scales = quantise_input(x)
            x = (codes * scales).reshape(x.shape)
        y: Floats = x @ self.values.T
        return y if self.bias is None else y + self.bias
