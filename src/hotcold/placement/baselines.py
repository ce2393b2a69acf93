"""Placements to compare with: whole layers, as in engines without sparsity, and PowerInfer's rule."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.placement.costs import Costs, GPUCosts, SideCosts
from hotcold.placement.hardware import Hardware
from hotcold.placement.placement import Placement
from hotcold.placement.profiles import Profile
from hotcold.placement.sizes import Sizes
from hotcold.placement.solver import Solver

_OF_A_DENSE_PART = 1e6  # value of a dense part in activations: above a whole layer's, so it is placed first


def last_layers(sizes: Sizes, *counts: int) -> Placement:
    """Places the head and the last layers, whole, on GPUs. ``counts``: layers of each GPU, in order. All
    zeros place nothing."""
    on_gpus = [gpu for gpu, n in enumerate(counts) for _ in range(n)]
    where = (*[None] * (len(sizes.neurons) - len(on_gpus)), *on_gpus)
    hot = [np.full(n, gpu is not None) for n, gpu in zip(sizes.neurons, where, strict=True)]
    return Placement(hot, where, on_gpus[-1] if on_gpus else None)


def layer_split(sizes: Sizes, *budgets: int) -> tuple[Sizes, Placement]:
    """Places as many whole layers as fit on the GPUs, the last one first: dense and without predictors, as
    engines without sparsity do."""
    dense = replace(sizes, always_read=1.0, predictor=0 * sizes.predictor)
    best, counts = last_layers(dense), [0] * len(budgets)
    for gpu in reversed(range(len(budgets))):
        while sum(counts) < len(sizes.neurons):
            counts[gpu] += 1
            placement = last_layers(dense, *counts)
            if placement.part_of(gpu).gpu_bytes(dense) > budgets[gpu]:
                counts[gpu] -= 1
                break
            best = placement
    return dense, best


def paper_placement(sizes: Sizes, profile: Profile, hardware: Hardware, budget: int) -> Placement:
    """Maximises the activations on the GPU, after all dense parts, as PowerInfer does (arXiv 2312.12456,
    section 6.3). A layer has either no hot neurons, or enough to save a handshake's time if all are read.
    Layers with too few are excluded, the smallest first."""
    handshake = Costs.expected(sizes, profile, hardware).gpus[0].handshake
    saved = sizes.neuron_bytes / 1e9 * (1 / hardware.cpu_stream_gb_s - 1 / hardware.gpu_stream_gb_s)
    least = np.minimum(sizes.neurons, handshake / np.maximum(saved, 1e-300))
    firing = list(profile.firing)
    while True:
        placement = Solver(sizes, profile, _missed_activations(firing)).solve(budget)
        hot = np.array([mask.sum() for mask in placement.hot])
        too_few = [i for i in np.argsort(hot) if 0 < hot[i] < least[i]]
        if not too_few:
            return placement
        firing[too_few[0]] = 0 * firing[too_few[0]]


def _missed_activations(firing: Sequence[npt.NDArray[Any]]) -> Costs:
    """Returns costs whose minimum has the most activations on the GPU: an activation costs 1 on the CPU, 0 on
    the GPU."""
    dense = np.full(len(firing), _OF_A_DENSE_PART)
    return Costs(
        cpu=SideCosts(neurons=firing, dense=dense, head=_OF_A_DENSE_PART),
        gpus=[GPUCosts(neurons=[0 * each for each in firing], dense=0 * dense, head=0.0, handshake=0.0)],
    )
