"""Layers of experts, made up, and which experts rows choose."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from support.op_truth import FFNKind, random_rows, random_tensor, rng

from hotcold.formats.blocks import Tensor
from hotcold.kernels.backend import ExpertSlots, FFNTensors, HotRows

RELU = FFNKind()
LABEL = "layer.gguf, layer 7"


@dataclass(frozen=True)
class Layer:
    """Experts as a file has them, and as FFNs by themselves; None: an expert without neurons, which may still
    have a bias."""

    tensors: FFNTensors
    experts: tuple[FFNTensors | None, ...]
    biases: np.ndarray | None  # [E, D]

    @property
    def sizes(self) -> list[int]:
        return [each.up.shape[0] if each else 0 for each in self.experts]

    @property
    def word_begins(self) -> list[int]:
        return [0, *np.cumsum([-(-n // 64) for n in self.sizes])]


@functools.cache
def make_layer(
    k: int,
    sizes: tuple[int, ...],
    dim: int,
    types: tuple[str, str, str],
    kind: FFNKind = RELU,
    layout: str = "by_neuron",
    *scales: float,
) -> Layer:
    """``scales``, one for each expert, multiply its matrices: gate, up twice as much, down half. By
    output, experts of other sizes than the largest take whole blocks of theirs, at random ones."""
    random, rows, by_output = rng("experts", sizes, types, kind), sum(sizes), layout == "by_output"
    unequal = by_output and len({*sizes} - {0}) > 1
    some = len(sizes) if unequal else sum(n > 0 for n in sizes)
    shape = (some * dim, max(sizes)) if by_output else (rows, dim)
    down = random_tensor(random, types[2], *shape, scale=max(sizes) ** -0.5)
    blocks = np.zeros((len(sizes), max(sizes) // down.type.weights), np.bool_)
    for own, n in zip(blocks, sizes, strict=True):
        if unequal:
            own[random.permutation(len(own))[: n // down.type.weights]] = True
    bias = [random_rows(random, n) * np.float32(0.3) if kind.biases else None for n in (rows, rows)]
    biases = random_rows(random, len(sizes), dim) * np.float32(0.3) if kind.biases else None
    ends = tuple(int(end) for end in np.cumsum(sizes))

    def scaled(tensor: Tensor, each: Sequence[int], by: float) -> Tensor:
        return (
            replace(tensor, factors=np.repeat(np.float32(scales) * np.float32(by), each))
            if scales
            else tensor
        )

    down = scaled(down, [dim] * len(sizes) if by_output else sizes, 0.5)
    whole = FFNTensors(
        gate=scaled(random_tensor(random, types[0], rows, dim), sizes, 1) if kind.gated else None,
        up=scaled(random_tensor(random, types[1], rows, dim), sizes, 2),
        down=down,
        down_layout=layout,
        activation=kind.activation,
        threshold=kind.threshold,
        gate_bias=bias[0] if kind.gated else None,
        up_bias=bias[1],
        down_bias=biases if biases is None or len(sizes) > 1 else biases[0],
        experts=len(sizes),
        chosen=k,
        expert_ends=ends if len(set(sizes)) > 1 else None,
        down_blocks=blocks if unequal else None,
    )
    experts: list[FFNTensors | None] = []
    outputs = 0
    for expert, (first, end) in enumerate(pairwise((0, *ends))):
        own = slice(first, end)
        if first == end:
            experts.append(None)
            outputs += dim * unequal
            continue
        own_down = down.take_rows(slice(outputs, outputs + dim) if by_output else own)
        if unequal:
            own_down = own_down.take_columns(np.flatnonzero(blocks[expert]))
        assert isinstance(whole.up, Tensor) and isinstance(whole.gate, Tensor | None)
        experts.append(
            FFNTensors(
                gate=None if whole.gate is None else whole.gate.take_rows(own),
                up=whole.up.take_rows(own),
                down=own_down,
                down_layout=layout,
                activation=kind.activation,
                threshold=kind.threshold,
                gate_bias=None if whole.gate_bias is None else whole.gate_bias[own],
                up_bias=None if whole.up_bias is None else whole.up_bias[own],
            )
        )
        outputs += dim
    return Layer(whole, tuple(experts), biases)


def choices(key: object, rows: int, experts: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Random ids, ascending in each row, and factors."""
    random = rng("chosen", key)
    ids = np.array([random.permutation(experts)[:k] for _ in range(rows)], np.int32).reshape(rows, k)
    return np.sort(ids, axis=1), random.uniform(0.1, 1, (rows, k)).astype(np.float32)


def with_slots(tensors: FFNTensors, slots: int, *preloaded: Any) -> FFNTensors:
    """The layer with slots for some experts; ``preloaded`` are those experts and how many are pinned."""
    return replace(tensors, residency=ExpertSlots(slots, *preloaded, label=LABEL))


def with_hot(tensors: FFNTensors, neurons: Sequence[int], buffer: int, *, gates: bool = False) -> FFNTensors:
    """The layer with only the rows of each expert's first neurons in memory."""
    return replace(tensors, residency=HotRows(tuple(neurons), buffer, gates, LABEL))
