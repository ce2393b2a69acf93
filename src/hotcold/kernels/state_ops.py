"""The part of ``Backend`` for layers that keep a state of each sequence.

A state is float32 in a slot of a buffer ``[slots, ...]``. In a step each sequence with rows reads its state
from the slot ``Batch.state_from`` (-1: zeros). The state after a row is written to the row's slot
``Batch.state_to`` (-1: not written). In a prompt only the last row writes its state. Every decode row may, so
that a sequence can return to it. Several sequences may read one slot, which is how a sequence is forked. A
slot that one row writes is written by no other row, and read by no other sequence. ValueError when an op
runs: a row of no sequence, or slots that break these rules.

A state changes token by token, in the order of its sequence's rows. So rows have the same bits in prompts, in
chunks, in decoding and in any batch. A decay is the exponential of a number of at most 0. All is float32."""

from collections.abc import Sequence
from typing import Protocol

from hotcold.kernels.arrays import Buffer
from hotcold.kernels.batch import Batch
from hotcold.kernels.calls import DeltaCall, ScanCall, Wkv7Call

MOST_TAPS = 8  #: columns of a short convolution, the row's own included
CONV_ACTIVATIONS = ("none", "silu")
GATE_ACTIVATIONS = ("none", "silu", "sigmoid", "relu")
PLAIN_ACTIVATIONS = ("sigmoid", "tanh")
MOST_MIXES = 8  #: outputs of a token shift


class StateOps(Protocol):
    """Ops on states. T rows, C channels, H heads; see :class:`hotcold.kernels.backend.Backend`."""

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
        """Convolves each channel causally over the last k columns of its sequence:

        ``out[t] = act(bias + sum over j of weight[:, j] * column[t - (k - 1) + j])``, j ascending. Columns
        are rows of x, preceded by the state's. The state is the last k - 1 columns, oldest first, before the
        activation.

        x, out ``[T, C]``; out may not be x. Weight ``[C, k]``, k from 2 to :data:`MOST_TAPS`; bias ``[C]`` or
        None; state ``[slots, k - 1, C]``. ``activation``: one of :data:`CONV_ACTIVATIONS`. (Mamba's
        ``conv1d``, arXiv 2312.00752; LFM2's layers without attention.)"""

    def gated_delta(self, call: DeltaCall) -> None:
        """Computes the gated delta rule (arXiv 2412.06464), or with a decay of each channel Kimi's delta
        attention (arXiv 2510.26692). For each row and v head, with its state S ``[dk, dv]``:

        ``S = exp(decay) S; delta = sigmoid(beta) (v - S^T k); S = S + k delta^T; out = S^T q``

        where ``q / sqrt(sum of q^2 + eps) / sqrt(dk)`` and ``k / sqrt(sum of k^2 + eps)`` stand for q and k.

        ``mixed`` is the output of :meth:`short_conv`. ``decay``, logarithms of at most 0 (see :meth:`decay`),
        has one value for S or one for each row of S. The state's shape determines Hv and dv."""

    def decay(self, x: Buffer, bias: Buffer, factor: Buffer, batch: Batch, out: Buffer) -> None:
        """Computes ``out = factor * softplus(x + bias)``: with a factor below 0, logarithms of decays.

        x, out ``[T, n]``, out may be x; bias ``[n]``; factor ``[H]``, H a divisor of n: channel i has the
        factor of head ``i // (n / H)``. ``softplus(y) = max(y, 0) + log(1 + exp(-|y|))``."""

    def ssm_scan(self, call: ScanCall) -> None:
        """Computes Mamba-2's scan (arXiv 2405.21060). For each row and head h of group ``h // (H / G)``, with
        its state S ``[p, n]``:

        ``s = softplus(dt + dt_bias); S = exp(s a) S + (s x) B^T; out = S C + d x``

        ``mixed`` is the output of :meth:`short_conv`. The state's shape determines H, p and n."""

    def multiply(self, x: Buffer, gate: Buffer, batch: Batch, out: Buffer, *, activation: str) -> None:
        """Computes ``out = x * act(gate)``; all ``[T, n]``, and out may be x or gate. ``activation``: one of
        :data:`GATE_ACTIVATIONS`."""

    def activate(self, x: Buffer, batch: Batch, out: Buffer, *, activation: str) -> None:
        """Computes ``out = act(x)``; both ``[T, n]``, and out may be x. ``activation``: one of
        :data:`PLAIN_ACTIVATIONS`."""

    def token_shift(
        self, x: Buffer, mixes: Buffer, batch: Batch, state: Buffer, outs: Sequence[Buffer]
    ) -> None:
        """Computes ``outs[i][t] = x[t] + mixes[i] * (before - x[t])``, where before is the sequence's
        previous row (RWKV's token shift, arXiv 2305.13048). The state is the last row.

        x, outs ``[T, C]``; no out may be x. mixes ``[m, C]``, a row for each of m outs, up to
        :data:`MOST_MIXES`; state ``[slots, C]``."""

    def wkv7(self, call: Wkv7Call) -> None:
        """Computes RWKV-7's recurrence (arXiv 2503.14456), with the per-head work before and after it.

        For each row and head, with its state S ``[d, d]``, by keys and values, and vectors ``kappa, alpha,
        bonus, weight, bias``:

            w = exp(-exp(-1/2) sigmoid(decay)); a = sigmoid(rate); v = v + sigmoid(share) (first - v)
            u = kappa k; u = u / max(root of the sum of u^2, 1e-12); k = k (1 + (a - 1) alpha)
            S = w S - (a u) (S^T u)^T + k v^T; y = S^T r
            out = (y - mean y) / sqrt(variance of y + eps) * weight + bias + (sum of r k bonus) v

        Without ``first`` and ``share`` v is unchanged. The state's shape determines H and d."""
