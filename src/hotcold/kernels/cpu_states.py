"""The ``cpu`` backend's implementation of :class:`hotcold.kernels.state_ops.StateOps`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hotcold.kernels import checks
from hotcold.kernels.backend import Batch, Buffer, DeltaCall, ScanCall, Wkv7Call
from hotcold.kernels.state_ops import GATE_ACTIVATIONS

if TYPE_CHECKING:
    from hotcold.kernels import _native

#: The extension's activation numbers: those of gates, then ``tanh``.
_PLAIN = {"sigmoid": GATE_ACTIVATIONS.index("sigmoid"), "tanh": len(GATE_ACTIVATIONS)}


class CPUStateOps(ABC):
    """State ops in C++; the extension checks their buffers."""

    @abstractmethod
    def _op(self, batch: Batch, append: Callable[[_native.Program], None], *kept: object) -> None: ...

    def short_conv(
        self,
        x: Buffer,
        weight: Buffer,
        bias: Buffer | None,
        batch: Batch,
        state: Buffer,
        out: Buffer,
        *,
        activation: str,
    ) -> None:
        checks.check_conv(weight.shape[-1], activation)
        args = x, weight, bias, state, out
        self._op(batch, lambda p: p.short_conv(*args, activation == "silu"), *args)

    def gated_delta(self, call: DeltaCall) -> None:
        args = call.mixed, call.decay, call.beta, call.state, call.out
        options = call.keys, call.key_dim, call.tiled, call.eps
        self._op(call.batch, lambda p: p.gated_delta(*args, *options), call)

    def decay(self, x: Buffer, bias: Buffer, factor: Buffer, batch: Batch, out: Buffer) -> None:
        self._op(batch, lambda p: p.decay(x, bias, factor, out), x, bias, factor, out)

    def ssm_scan(self, call: ScanCall) -> None:
        args = call.mixed, call.dt, call.dt_bias, call.a, call.d, call.state, call.out, call.groups
        self._op(call.batch, lambda p: p.ssm_scan(*args), call)

    def multiply(self, x: Buffer, gate: Buffer, batch: Batch, out: Buffer, *, activation: str) -> None:
        checks.check_gate(activation)
        kind = GATE_ACTIVATIONS.index(activation)
        self._op(batch, lambda p: p.multiply(x, gate, out, kind), x, gate, out)

    def activate(self, x: Buffer, batch: Batch, out: Buffer, *, activation: str) -> None:
        checks.check_plain(activation)
        kind = _PLAIN[activation]
        self._op(batch, lambda p: p.activate(x, out, kind), x, out)

    def token_shift(
        self, x: Buffer, mixes: Buffer, batch: Batch, state: Buffer, outs: Sequence[Buffer]
    ) -> None:
        targets = [*outs]
        self._op(batch, lambda p: p.token_shift(x, mixes, state, targets), x, mixes, state, *targets)

    def wkv7(self, call: Wkv7Call) -> None:
        rows = call.r, call.k, call.v, call.decay, call.rate, call.first, call.share
        args = *rows, call.vectors, call.state, call.out, call.eps
        self._op(call.batch, lambda p: p.wkv7(*args), call)
