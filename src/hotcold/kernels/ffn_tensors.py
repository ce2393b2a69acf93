"""Describes the FFNs and predictors that a backend is given, and how neurons lie in masks and in down."""

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
    """One layer's FFN as a file has it. ``gate`` is None without gating; then ``up`` plays its part.

    ``down`` is ``(N, D)`` when ``down_layout`` is ``by_neuron`` and ``(D, N)`` when it is ``by_output``.
    Where the activation gives zeros, a backend makes rows by neuron of the latter too: it transposes float
    types and packs quantised ones into panels, but for types without (see :func:`is_dense`).

    Experts lie one after another: gate, up and down by neuron are ``(E * N, D)``, down by output ``(E * D,
    N)``, as GGUF's ``*_exps`` are, and biases ``[E * N]`` and ``[E, D]``. In a half of a layer experts may
    have different numbers of neurons, which ``expert_ends`` tells. By output each then has all of its neurons
    or none, and down has nothing of the latter; or down has all that the file has, and ``down_blocks`` says
    which blocks of each expert's rows are the half's, where the activation gives zeros."""

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
    limit: float = 7.0  #: of ``swiglu_oai``; the others do not read it
    alpha: float = 1.702  #: likewise
    experts: int = 1
    chosen: int = 1  #: how many experts a token chooses, k
    expert_ends: tuple[int, ...] | None = None  #: where each expert's rows of up end; None: N rows each
    down_blocks: npt.NDArray[np.bool_] | None = None  #: ``[E, blocks of a row]``; None: all
    residency: Residency | None = None  #: None: all weights are in memory

    @property
    def ends(self) -> tuple[int, ...]:
        return self.expert_ends or equal_ends(self.up.shape[0], self.experts)

    @property
    def down_nbytes(self) -> int:
        """Bytes of down, of what belongs to these experts."""
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
    """``score = second @ act(first @ x)``; neuron i is a candidate when ``score[i] >= threshold[i]``.

    Experts of a layer share the first factor; their rows of the second lie one after another, ``(E * N, R)``,
    as in :class:`FFNTensors`."""

    first: Tensor  # (R, D)
    second: Tensor  # (N, R)
    threshold: Floats  # [N]
    relu: bool  #: ReLU between the factors (PowerInfer's), or nothing (a truncated SVD)
    _: KW_ONLY
    experts: int = 1
    chosen: int = 1  #: how many experts a token chooses, k
    expert_ends: tuple[int, ...] | None = None  #: where each expert's rows of the second factor end

    @property
    def ends(self) -> tuple[int, ...]:
        return self.expert_ends or equal_ends(self.second.shape[0], self.experts)


def equal_ends(rows: int, experts: int) -> tuple[int, ...]:
    """Where the rows of each of so many equal experts end."""
    return tuple(rows // experts * (expert + 1) for expert in range(experts))


def mask_words(ends: Sequence[int]) -> list[int]:
    """Where the words of each expert begin in a row of a mask, and where the last one's end: each begins at a
    whole word."""
    begins = [0]
    for first, end in pairwise((0, *ends)):
        begins.append(begins[-1] - (first - end) // 64)
    return begins


def mask_bits(ends: Sequence[int]) -> npt.NDArray[np.int64]:
    """Which bit of a row of a mask is each neuron's, ``[N]``."""
    padding = 64 * np.array(mask_words(ends)[:-1]) - np.array((0, *ends[:-1]))
    bits: npt.NDArray[np.int64] = np.arange(ends[-1]) + np.repeat(padding, np.diff((0, *ends)))
    return bits


def is_dense(down_layout: str, down: BlockType, activation: str) -> bool:
    """True if down is a dot over all neurons, whichever of them fire: it lies by output, and the activation
    gives no zeros or nothing can be made of its blocks that lies by neuron."""
    return down_layout == "by_output" and not (activation in SPARSE_ACTIVATIONS and down.panels)


def scale_run(type: BlockType) -> int:
    """Neurons whose down weights of one output share a scale, where blocks lie along the neurons."""
    return 16 if type.name == "Q6_K" else 32


def panel_bytes(type: BlockType, dim: int) -> tuple[int, int]:
    """Bytes of one neuron's codes, and of the scales that a run shares, for blocks along the neurons."""
    bits = int(next(filter(str.isdigit, type.name)))  # ggml names a type after the bits of its codes
    header = type.nbytes - type.weights * bits // 8
    return dim * bits // 8, dim * header * scale_run(type) // type.weights
