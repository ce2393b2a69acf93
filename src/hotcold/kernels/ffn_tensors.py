"""FFNs and predictors as a backend takes them, and the order of neurons in masks and in down."""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import BlockType, Tensor
from hotcold.formats.stored import AnyTensor
from hotcold.kernels.arrays import Floats
from hotcold.kernels.residency import Residency

#: Activations of two values, gate and up: they need a gate.
GATED_ACTIVATIONS = ("drelu", "swiglu_oai")
#: Activations under which a neuron can be exactly zero, so that skipping it is lossless.
SPARSE_ACTIVATIONS = ("relu", "drelu", "relu2")


@dataclass(frozen=True)
class FFNTensors:
    """An FFN of one layer as stored in a file. Without a gate, ``gate`` is None and ``up`` plays its part.

    ``down`` is ``(N, D)`` when ``down_layout`` is ``by_neuron`` and ``(D, N)`` when it is ``by_output``.
    Where the activation gives zeros, a backend makes rows by neuron of a by-output down. It transposes float
    types and packs quantised types into panels, if the type has panels (see :func:`is_dense`).

    Experts are concatenated like GGUF's ``*_exps``: gate, up and down by neuron ``(E * N, D)``, down by
    output ``(E * D, N)``. Biases are ``[E * N]`` and ``[E, D]``. In one half of a split layer experts may
    differ in their number of neurons; ``expert_ends`` gives it. By output, each expert then has all of its
    neurons or none, and down omits experts without neurons. Where the activation gives zeros, down may
    instead be the file's whole down; ``down_blocks`` then selects the half's blocks of each expert's rows."""

    gate: AnyTensor | None
    up: AnyTensor
    down: AnyTensor
    down_layout: str
    activation: str
    threshold: float = 0.0  #: a gate is active when it is greater than this (FATReLU, arXiv 2402.13516)
    gate_bias: Floats | None = None
    up_bias: Floats | None = None
    down_bias: Floats | None = None
    _: KW_ONLY
    limit: float = 7.0  #: only for ``swiglu_oai``
    alpha: float = 1.702  #: only for ``swiglu_oai``
    experts: int = 1
    chosen: int = 1  #: experts that a token chooses, k
    expert_ends: tuple[int, ...] | None = None  #: end of each expert's rows of up; None: N rows each
    down_blocks: npt.NDArray[np.bool_] | None = None  #: ``[E, blocks of a row]``; None: all
    residency: Residency | None = None  #: None: all weights are in memory

    @property
    def ends(self) -> tuple[int, ...]:
        return self.expert_ends or equal_ends(self.up.shape[0], self.experts)

    @property
    def down_nbytes(self) -> int:
        """Bytes of the part of down that belongs to these experts."""
        if self.down_blocks is None:
            return self.down.nbytes
        return int(self.down_blocks.sum()) * self.up.shape[1] * self.down.type.nbytes

    def expert_downs(self) -> Iterator[tuple[int, AnyTensor]]:
        """Yields, by output, the first neuron of each expert that has any, and its down ``(D, neurons)``."""
        dim, at = self.up.shape[1], 0
        for expert, (first, end) in enumerate(pairwise((0, *self.ends))):
            blocks = None if self.down_blocks is None else self.down_blocks[expert]
            if end > first:
                down = self.down if self.experts == 1 else self.down.take_rows(slice(at, at + dim))
                if blocks is not None and not blocks.all():
                    down = down.take_columns(np.flatnonzero(blocks))
                yield first, down
            at += dim * (end > first or blocks is not None)


@dataclass(frozen=True)
class PredictorTensors:
    """A predictor: neuron i is a candidate when ``second @ act(first @ x)`` is at least its threshold.

    Experts of a layer share the first factor. Their rows of the second are concatenated, ``(E * N, R)``."""

    first: Tensor  # (R, D)
    second: Tensor  # (N, R)
    threshold: Floats  # [N]
    relu: bool  #: ReLU between the factors (PowerInfer's), or nothing (a truncated SVD)
    _: KW_ONLY
    experts: int = 1
    chosen: int = 1  #: experts that a token chooses, k
    expert_ends: tuple[int, ...] | None = None  #: end of each expert's rows of the second factor

    @property
    def ends(self) -> tuple[int, ...]:
        return self.expert_ends or equal_ends(self.second.shape[0], self.experts)


def equal_ends(rows: int, experts: int) -> tuple[int, ...]:
    """Returns the end of each expert's rows, for experts of equal size."""
    return tuple(rows // experts * (expert + 1) for expert in range(experts))


def mask_words(ends: Sequence[int]) -> list[int]:
    """Returns the first word of each expert in a row of a mask, then the end of the last expert."""
    begins = [0]
    for first, end in pairwise((0, *ends)):
        begins.append(begins[-1] - (first - end) // 64)
    return begins


def mask_bits(ends: Sequence[int]) -> npt.NDArray[np.int64]:
    """Returns the bit of each neuron in a row of a mask, ``[N]``."""
    padding = 64 * np.array(mask_words(ends)[:-1]) - np.array((0, *ends[:-1]))
    bits: npt.NDArray[np.int64] = np.arange(ends[-1]) + np.repeat(padding, np.diff((0, *ends)))
    return bits


def is_dense(down_layout: str, down: BlockType, activation: str) -> bool:
    """Returns whether down is a dot over all neurons, active or not. That holds for by-output types if the
    activation gives no zeros, or if the type has neither rows by neuron nor panels."""
    return down_layout == "by_output" and not (activation in SPARSE_ACTIVATIONS and down.panels)


def scale_run(type: BlockType) -> int:
    """Returns how many neurons share a scale per output, where blocks run along the neurons."""
    return 16 if type.name == "Q6_K" else 32


def panel_bytes(type: BlockType, dim: int) -> tuple[int, int]:
    """Returns bytes of a neuron's codes, and of a run's scales, where blocks run along the neurons."""
    bits = int(next(filter(str.isdigit, type.name)))  # ggml names a type after the bits of its codes
    header = type.nbytes - type.weights * bits // 8
    return dim * bits // 8, dim * header * scale_run(type) // type.weights
