"""The ops of layers that keep a state of each sequence, and what they need besides: a part of ``Backend``.

A state is float32 in a slot of a buffer ``[slots, ...]``. In a step each sequence that has rows reads its
state from the slot ``Batch.state_from`` (-1: zeros, whatever lies anywhere). The state after a row is written
to the row's slot ``Batch.state_to`` (-1: nowhere): after a sequence's last row, and where rows decode after
others, too, so that one can go back to these. Several may read one slot, which is how a sequence is forked;
nobody else reads or writes a slot that one writes, and no two rows write one. ValueError when an op runs: a
row that belongs to no sequence, or slots that break this.

A state changes token by token, in the order of its sequence's rows, whatever their number: rows have the
same bits in prompts, in chunks, in decoding and in any batch. A decay is the exponential of a number that
is 0 or less, in float32 like all that is computed here."""

from collections.abc import Sequence
from typing import Protocol

from hotcold.kernels.arrays import Buffer
from hotcold.kernels.batch import Batch
from hotcold.kernels.calls import DeltaCall, ScanCall, Wkv7Call

MOST_TAPS = 8  #: columns that a short convolution sees, the row's own among them
CONV_ACTIVATIONS = ("none", "silu")
GATE_ACTIVATIONS = ("none", "silu", "sigmoid", "relu")
PLAIN_ACTIVATIONS = ("sigmoid", "tanh")
MOST_MIXES = 8  #: outputs of a token shift


class StateOps(Protocol):
    """T rows, C channels, H heads; see :class:`hotcold.kernels.backend.Backend`."""

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
        """A causal convolution of each channel over the last k columns of its sequence:

        ``out[t] = act(bias + sum over j of weight[:, j] * column[t - (k - 1) + j])``, j ascending. Columns
        are rows of x, before them those of the state, which keeps the last k - 1, oldest first, before the
        activation.

        x, out ``[T, C]``; out may not be x. Weight ``[C, k]``, k from 2 to :data:`MOST_TAPS`; bias ``[C]``
        or None; state ``[slots, k - 1, C]``. ``activation``: one of :data:`CONV_ACTIVATIONS`. (Mamba's
        ``conv1d``, arXiv 2312.00752; LFM2's layers without attention.)"""

    def gated_delta(self, call: DeltaCall) -> None:
        """The gated delta rule (arXiv 2412.06464); with a decay of each channel, Kimi's delta attention
        (arXiv 2510.26692). For each row and v head, S being its state ``[dk, dv]``:

        ``S = exp(decay) S; delta = sigmoid(beta) (v - S^T k); S = S + k delta^T; out = S^T q``

        where ``q / sqrt(sum of q^2 + eps) / sqrt(dk)`` and ``k / sqrt(sum of k^2 + eps)`` stand for q and k.

        ``mixed`` is as :meth:`short_conv` leaves it. ``decay`` multiplies S's rows where it has one for each:
        logarithms, 0 or less (see :meth:`decay`). The state's shape tells Hv and dv."""

    def decay(self, x: Buffer, bias: Buffer, factor: Buffer, batch: Batch, out: Buffer) -> None:
        """``out = factor * softplus(x + bias)``: with a factor below 0, logarithms of decays.

        x, out ``[T, n]``, out may be x; bias ``[n]``; factor ``[H]``, H a divisor of n: channel i has the
        factor of head ``i // (n / H)``. ``softplus(y) = max(y, 0) + log(1 + exp(-|y|))``."""

    def ssm_scan(self, call: ScanCall) -> None:
        """Mamba-2's scan (arXiv 2405.21060). For each row and head h of group ``h // (H / G)``, S being its
        state ``[p, n]``:

        ``s = softplus(dt + dt_bias); S = exp(s a) S + (s x) B^T; out = S C + d x``

        ``mixed`` is as :meth:`short_conv` leaves it. The state's shape tells H, p and n."""

    def multiply(self, x: Buffer, gate: Buffer, batch: Batch, out: Buffer, *, activation: str) -> None:
        """``out = x * act(gate)``; all ``[T, n]``, and out may be x or gate. ``activation``: one of
        :data:`GATE_ACTIVATIONS`."""

    def activate(self, x: Buffer, batch: Batch, out: Buffer, *, activation: str) -> None:
        """``out = act(x)``; both ``[T, n]``, and out may be x. ``activation``: one of
        :data:`PLAIN_ACTIVATIONS`."""

    def token_shift(
        self, x: Buffer, mixes: Buffer, batch: Batch, state: Buffer, outs: Sequence[Buffer]
    ) -> None:
        """``outs[i][t] = x[t] + mixes[i] * (before - x[t])``, where before is the row before of the same
        sequence (RWKV's token shift, arXiv 2305.13048). The state is the last row.

        x, outs ``[T, C]``; no out may be x. mixes ``[m, C]``, a row for each of m outs, up to
        :data:`MOST_MIXES`; state ``[slots, C]``."""

    def wkv7(self, call: Wkv7Call) -> None:
        """RWKV-7's recurrence (arXiv 2503.14456), with its work by heads before and after. For each row and
        head, S being its state ``[d, d]``, by keys and values, and vectors ``kappa, alpha, bonus, weight,
        bias``:

        ``w = exp(-exp(-1/2) sigmoid(decay)); a = sigmoid(rate); v = v + sigmoid(share) (first - v)``
        ``u = kappa k; u = u / max(root of the sum of u^2, 1e-12); k = k (1 + (a - 1) alpha)``
        ``S = w S - (a u) (S^T u)^T + k v^T; y = S^T r``
        ``out = (y - mean y) / sqrt(variance of y + eps) * weight + bias + (sum of r k bonus) v``

        Without ``first`` and ``share`` v stays as it is. The state's shape tells H and d."""
