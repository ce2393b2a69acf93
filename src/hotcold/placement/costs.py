"""Predicted time of a token: expected seconds of a model's parts on each processor, and of a placement."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hotcold.placement.hardware import Hardware
from hotcold.placement.placement import Placement
from hotcold.placement.profiles import Profile
from hotcold.placement.sizes import Sizes

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class SideCosts:
    """Seconds of a model's parts on one processor."""

    neurons: Sequence[Array]  #: seconds of each neuron, by layer ``[N]``
    dense: Array  #: seconds by layer: attention, keys and values, predictor
    head: float

    @property
    def layers(self) -> Array:
        """Seconds of whole layers."""
        return np.asarray(self.dense + [each.sum() for each in self.neurons])


@dataclass(frozen=True)
class GPUCosts(SideCosts):
    """Seconds of a model's parts on a GPU."""

    handshake: float  #: from the GPU to the CPU and back, with the transferred data
    step: float = 0.0  #: overhead of a step on the GPU, if it has a part


@dataclass(frozen=True)
class Costs:
    """The costs of one token. A solver needs only their ratios, so the unit need not be seconds."""

    cpu: SideCosts
    gpus: Sequence[GPUCosts]

    @classmethod
    def expected(cls, sizes: Sizes, profile: Profile, *machines: Hardware) -> Self:
        """Returns the expected costs. A neuron is read when it is active, or always if streaming is faster
        than gathering rows; with counted routing, whenever its expert is chosen. ``machines``: one for each
        GPU; the first one also describes the CPU."""
        cpu_stream = machines[0].cpu_stream_gb_s

        def neurons(layer: int, stream: float, rows: float) -> Array:
            routed = profile.routed(sizes, layer)
            most = 1 / stream if profile.routing is None else routed / stream
            sometimes = np.minimum(profile.firing[layer] / rows, most) * (1 - sizes.always_read)
            always = sizes.always_read * routed / stream
            return np.asarray(sizes.neuron_bytes[layer] / 1e9 * (sometimes + always))

        layers = range(len(sizes.neurons))
        # Up and down rows are contiguous; a layer may have none.
        gather = [machines[0].gather_gb_s(max(n, 1) / 2) for n in sizes.neuron_bytes]
        return cls(
            cpu=SideCosts(
                neurons=[neurons(i, cpu_stream, gather[i]) for i in layers],
                dense=sizes.dense / cpu_stream / 1e9,
                head=sizes.head / cpu_stream / 1e9,
            ),
            gpus=[
                GPUCosts(
                    neurons=[neurons(i, machine.gpu_stream_gb_s, machine.gpu_rows_gb_s) for i in layers],
                    dense=sizes.dense / machine.gpu_stream_gb_s / 1e9 + machine.layer_s,
                    head=sizes.head / machine.gpu_stream_gb_s / 1e9,
                    handshake=machine.handshake_s + 8 * sizes.dim / (machine.link_pinned_gb_s * 1e9),
                    step=machine.step_s,
                )
                for machine in machines
            ],
        )

    def token(self, placement: Placement) -> float:
        """Returns the seconds of a token. Each run of neighbouring parts on a GPU is a visit, with one
        handshake. Between two GPUs, the residual stream passes through the CPU's memory."""
        total = (self.cpu if placement.head is None else self.gpus[placement.head]).head
        for i, (where, hot) in enumerate(zip(placement.where, placement.hot, strict=True)):
            if where is None:
                total += self.cpu.dense[i] + self.cpu.neurons[i].sum()
                continue
            gpu = self.gpus[where]
            slower = max(self.cpu.neurons[i][~hot].sum(), gpu.neurons[i][hot].sum())
            total += gpu.dense[i] + slower + gpu.handshake * (not hot.all())
        visits = [self.gpus[gpu] for gpu, _ in groupby((*placement.where, placement.head)) if gpu is not None]
        steps = sum(self.gpus[gpu].step for gpu in placement.gpus)
        return float(total + sum(gpu.handshake for gpu in visits) + steps)
