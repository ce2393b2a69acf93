"""Predicted time of a token: expected seconds of a model's parts on each processor, and of a placement."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hotcold.placement.hardware import ATTENTION, HEAD, Hardware
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
        cpu_stream = 1e-9 / machines[0].cpu_stream_gb_s
        # Up and down rows are contiguous; a layer may have none.
        gather = [1e-9 / machines[0].gather_gb_s(max(n, 1) / 2) for n in sizes.neuron_bytes]
        return cls(
            cpu=SideCosts(
                neurons=[
                    _neurons(sizes, profile, i, cpu_stream, rows, rows) for i, rows in enumerate(gather)
                ],
                dense=sizes.dense * cpu_stream,
                head=sizes.head * cpu_stream,
            ),
            gpus=[_gpu_costs(sizes, profile, machine) for machine in machines],
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


def streaming_s(sizes: Sizes, placement: Placement, machines: Sequence[Hardware]) -> float:
    """Returns the seconds in which a step with prompts copies cold neurons to the GPUs; ``machines``: one for
    each GPU."""
    streamed = zip(placement.where, placement.streamed_bytes(sizes), strict=True)
    return sum(n / machines[gpu].link_pinned_gb_s / 1e9 for gpu, n in streamed if gpu is not None)


def prompt_s(sizes: Sizes, placement: Placement, machines: Sequence[Hardware], rows: int) -> float:
    """Returns the seconds in which a step computes the FFNs of ``rows`` prompt rows, in a model without
    experts. A GPU computes a layer's hot neurons while the CPU computes the cold ones. With streaming
    (``sizes.streams``) the GPU first copies the cold ones, then computes all. ``machines``: as in
    :meth:`Costs.expected`, with measured speeds of prompts."""
    total = streaming_s(sizes, placement, machines)
    gflop = 2e-9 * rows * sizes.neuron_rows * sizes.dim  # of one neuron
    for gpu, mask in zip(placement.where, placement.hot, strict=True):
        on_gpu = len(mask) if sizes.streams and gpu is not None else int(mask.sum())
        cpu_s = gflop * (len(mask) - on_gpu) / machines[0].cpu_prompt_gflops
        total += max(cpu_s, gflop * on_gpu / machines[gpu or 0].gpu_prompt_gflops)
    return total


def _neurons(sizes: Sizes, profile: Profile, layer: int, stream: float, rows: float, down: float) -> Array:
    """Returns the seconds of a layer's neurons ``[N]``. Seconds per byte: ``stream`` of all rows, ``rows`` of
    active neurons' gate and up rows, ``down`` of their down rows."""
    routed = profile.routed(sizes, layer)
    most = stream if profile.routing is None else routed * stream
    of_down = min(sizes.down_share, 1 - sizes.always_read)
    of_rows = 1 - sizes.always_read - of_down
    sometimes = np.minimum(profile.firing[layer] * rows, most) * (of_rows + of_down * down / rows)
    return np.asarray(sizes.neuron_bytes[layer] * (sometimes + sizes.always_read * routed * stream))


def _gpu_costs(sizes: Sizes, profile: Profile, hardware: Hardware) -> GPUCosts:
    def seconds(kernel: str, part: str) -> float:
        """Returns seconds per byte of a part of the model."""
        return 1e-9 * hardware.gpu_s_per_gb(kernel, sizes.floats.get(part, 0.0))

    def overhead(kind: str, part: str) -> float:
        return hardware.gpu_layer_s(kind, sizes.floats.get(part, 0.0))

    layers = range(len(sizes.neurons))
    kernels = seconds("stream", "rows"), seconds("rows", "rows"), seconds("down", "down")
    read = sizes.attention * seconds("matrix", "attention") + sizes.predictor * seconds("matrix", "predictor")
    read = read + sizes.kv * seconds(ATTENTION, "kv")
    if sizes.state is not None:
        read = read + 2 * sizes.state * seconds("stream", "rows")
    return GPUCosts(
        neurons=[_neurons(sizes, profile, i, *kernels) for i in layers],
        dense=read + np.array([overhead(sizes.kind_of(i), "attention") for i in layers]),
        head=sizes.head * seconds("matrix", "head") + overhead(HEAD, "head"),
        handshake=hardware.handshake_s + 8 * sizes.dim / (hardware.link_pinned_gb_s * 1e9),
        step=hardware.step_s,
    )
