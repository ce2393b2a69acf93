"""Predicts the time of a token: expected seconds of a model's parts on each processor, and of a placement."""

from collections.abc import Sequence
from dataclasses import dataclass
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
class Costs:
    """The costs of one token. A solver needs only their ratios, so other units than seconds work, too."""

    cpu: SideCosts
    gpu: SideCosts
    handshake: float  #: from the GPU to the CPU and back, with the data that is sent
    step: float = 0.0  #: overhead of a step on the GPU, if it has a part

    @classmethod
    def expected(cls, sizes: Sizes, profile: Profile, hardware: Hardware) -> Self:
        """The expected costs. A neuron is read when it fires, or always if a stream is faster than gathered
        rows; if routing was counted, whenever its expert is chosen."""
        cpu_stream, gpu_stream = hardware.cpu_stream_gb_s, hardware.gpu_stream_gb_s

        def neurons(layer: int, stream: float, rows: float) -> Array:
            routed = profile.routed(sizes, layer)
            most = 1 / stream if profile.routing is None else routed / stream
            sometimes = np.minimum(profile.firing[layer] / rows, most) * (1 - sizes.always_read)
            always = sizes.always_read * routed / stream
            return np.asarray(sizes.neuron_bytes[layer] / 1e9 * (sometimes + always))

        layers = range(len(sizes.neurons))
        gather = [hardware.gather_gb_s(n / 2) for n in sizes.neuron_bytes]  # up and down lie side by side
        return cls(
            cpu=SideCosts(
                neurons=[neurons(i, cpu_stream, gather[i]) for i in layers],
                dense=sizes.dense / cpu_stream / 1e9,
                head=sizes.head / cpu_stream / 1e9,
            ),
            gpu=SideCosts(
                neurons=[neurons(i, gpu_stream, hardware.gpu_rows_gb_s) for i in layers],
                dense=sizes.dense / gpu_stream / 1e9 + hardware.layer_s,
                head=sizes.head / gpu_stream / 1e9,
            ),
            handshake=hardware.handshake_s + 8 * sizes.dim / (hardware.link_pinned_gb_s * 1e9),
            step=hardware.step_s,
        )

    def token(self, placement: Placement) -> float:
        """Seconds of a token."""
        run = placement.layers
        on_cpu = self.cpu.layers
        total = self.ends(np.array(run.start), np.array(run.stop), placement.head) + on_cpu.sum()
        for i in run:
            hot = placement.hot[i]
            slower = max(self.cpu.neurons[i][~hot].sum(), self.gpu.neurons[i][hot].sum())
            total += self.gpu.dense[i] + slower + self.handshake * (not hot.all()) - on_cpu[i]
        return float(total)

    def ends(self, start: Array, stop: Array, head: bool) -> Array:
        """Seconds of the head, of a step on the GPU, and of visits to it: two if layers of the CPU lie
        between the run ``start`` to ``stop`` and a head on the GPU."""
        some = stop > start
        visits = 1.0 * (some | head) + (some & head & (stop < len(self.cpu.dense)))
        return np.asarray(
            (self.gpu if head else self.cpu).head + self.step * (some | head) + self.handshake * visits
        )
