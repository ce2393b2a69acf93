"""An FFN of experts; a router chooses some for each row."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from hotcold.kernels.backend import Backend, Batch, Buffer, Chosen, FFNCall, FFNWeights, Matrix, RouterCall
from hotcold.model.ffn.experts import Experts
from hotcold.model.ffn.feed_forward import Adder, FeedForward, LayerFFNs
from hotcold.model.ffn.given_ffn import AnyFFN
from hotcold.model.mixers.device_buffers import DeviceBuffers


@dataclass(frozen=True)
class Router:
    """A layer's router."""

    experts: Experts
    weights: Matrix  # (E, D)
    selection_bias: Buffer | None  # [E]
    expert_scale: Buffer | None = None  # [E]

    def choose(self, ops: Backend, x: Buffer, batch: Batch, chosen: Chosen) -> None:
        """Chooses experts for each row of x ``[T, D]``."""
        ops.router(
            RouterCall(
                x,
                self.weights,
                batch,
                chosen.ids,
                chosen.factors,
                k=self.experts.chosen,
                score=self.experts.score,
                selection_bias=self.selection_bias,
                normalise=self.experts.normalise,
                scale=self.experts.scale,
                expert_scale=self.expert_scale,
                groups=self.experts.groups,
            )
        )


@dataclass(frozen=True)
class SharedExpert:
    """A layer's shared expert, on the layer's backend."""

    gate: Matrix | None  # (1, D), for its factor's logit; None: the factor is 1
    ffn: FFNWeights

    def adder(self, device: DeviceBuffers, ffn: AnyFFN | None) -> Adder:
        """Makes the function that adds its output. ``ffn`` has its weights; None: all neurons."""
        ops, buffer = device.ops, device.choices("shared expert", 1)
        factor = None if self.gate is None else buffer

        def add(x: Buffer, batch: Batch, out: Buffer) -> None:
            if self.gate is not None:
                arrays = x, self.gate, batch, buffer.ids, buffer.factors
                ops.router(RouterCall(*arrays, k=1, score="sigmoid", normalise=False, scale=1.0))
            if ffn is None:
                ops.ffn(FFNCall(x, self.ffn, batch, out, skip=False, accumulate=True, chosen=factor))
            else:
                ffn(x, x, batch, out, factor)

        return add


@dataclass(frozen=True, kw_only=True)
class RoutedFFN(FeedForward):
    neurons: FFNWeights
    router: Router | None  #: None: the layer routes before its blocks
    shared: SharedExpert | None = None

    @property
    def matrices(self) -> list[Matrix]:
        return [*self._tensors("").values()]

    def names(self, blk: str, present: Container[str]) -> list[str]:
        return [*self._tensors(blk)]

    def _tensors(self, blk: str) -> dict[str, Matrix]:
        """Returns the matrices that a step reads whole, by the tensor's name."""
        matrices = {f"{blk}ffn_gate_inp.weight": self.router.weights} if self.router else {}
        if self.shared is not None and self.shared.gate is not None:
            matrices[f"{blk}ffn_gate_inp_shexp.weight"] = self.shared.gate
        return matrices

    def adder(self, device: DeviceBuffers, state: Sequence[Buffer], ffns: LayerFFNs) -> Adder:
        assert ffns.chosen is not None
        ops, router, chosen = device.ops, self.router, ffns.chosen
        add_experts = self.experts_adder(device, ffns, chosen)
        add_shared = self.shared.adder(device, ffns.shared) if self.shared else None

        def add(read: Buffer, batch: Batch, out: Buffer) -> None:
            if router is not None:
                router.choose(ops, read, batch, chosen)
            add_experts(read, batch, out)
            if add_shared is not None:
                add_shared(read, batch, out)

        return add

    def experts_adder(self, device: DeviceBuffers, ffns: LayerFFNs, chosen: Chosen) -> Adder:
        """Makes the function that adds the output of the chosen experts."""
        return lambda read, batch, out: ffns.neurons(read, ffns.residual, batch, out, chosen)
