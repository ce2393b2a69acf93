"""Experts parallel to an ordinary FFN (Gemma 4). Both have norms of their own, and the router reads the
residual stream through a third norm."""

from collections.abc import Sequence
from dataclasses import dataclass

from hotcold.kernels.backend import Batch, Buffer, Norm
from hotcold.model.ffn.feed_forward import LayerFFNs
from hotcold.model.ffn.routed import RoutedFFN
from hotcold.model.mixers.device_buffers import DeviceBuffers, Mixer


@dataclass(frozen=True, kw_only=True)
class ParallelExperts(RoutedFFN):
    router_input: Norm  #: of the residual stream, before the router
    input: Norm  #: of the residual stream, before the experts
    output: Norm  #: of the experts' output
    shared_output: Norm  #: of the ordinary FFN's output; its input norm is the block's

    def router_norm(self, norm: Norm | None) -> Norm | None:
        return self.router_input

    def mixer(self, device: DeviceBuffers, state: Sequence[Buffer], ffns: LayerFFNs) -> Mixer:
        ops, router, residual, chosen = device.ops, self.router, ffns.residual, ffns.chosen
        assert router is not None and self.shared is not None and chosen is not None
        dim = router.weights.shape[1]
        experts, first, second = (
            device.buffer(name, dim) for name in ("experts in", "experts out", "shared out")
        )
        add_shared = self.shared.adder(device, ffns.shared)

        def feed_forward(read: Buffer, batch: Batch, out: Buffer, *, add: bool) -> None:
            ops.norm(residual, self.router_input, batch, experts)
            router.choose(ops, experts, batch, chosen)
            ops.norm(residual, self.input, batch, experts)
            for buffer in (first, second):
                ops.add(buffer, residual, batch, keep=0, scale=0)
            ffns.neurons(experts, residual, batch, first, chosen)
            ops.norm(first, self.output, batch, first)
            add_shared(read, batch, second)
            ops.norm(second, self.shared_output, batch, second)
            ops.add(out, first, batch, keep=float(add))
            ops.add(out, second, batch)

        return feed_forward
