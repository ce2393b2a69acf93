"""The specification of the ops that keep a state of each sequence; state_ops.py has their formulas."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hotcold.kernels import checks
from hotcold.kernels.backend import Batch, Buffer, DeltaCall, Floats, ScanCall, Wkv7Call
from hotcold.kernels.numpy_ffn import sigmoid
from hotcold.kernels.reference_rows import check, flat_rows


@dataclass(frozen=True)
class SequenceRows:
    """Rows of one sequence in a step, and the slots that its state is read from and written to."""

    rows: range
    source: int
    target: int
    sequence: int

    def load(self, state: Floats) -> Floats:
        """Returns a copy of the state before the first row."""
        return state[self.source].copy() if self.source >= 0 else np.zeros_like(state[0])

    def keep(self, state: Floats, values: Floats) -> None:
        if self.target >= 0:
            state[self.target] = values


def sequences_of(batch: Batch, slots: int) -> list[SequenceRows]:
    """Cuts this step's rows into runs of one sequence, in order. A run ends with a row whose state is kept;
    the next one begins with that state. ValueError as in state_ops.py."""
    if not batch.n_tokens:
        return []
    runs = list(_sequences(batch, slots))
    missing = batch.n_tokens - sum(len(each.rows) for each in runs)
    if missing:
        raise ValueError(f"batch: {missing} rows belong to no sequence that has rows")
    written = [each.target for each in runs if each.target >= 0]
    for run in runs:
        if run.target >= 0 and written.count(run.target) > 1:
            raise ValueError(f"batch: two rows write the state in slot {run.target}")
        if run.target in {other.source for other in runs if other.sequence != run.sequence} - {-1}:
            raise ValueError(f"batch: slot {run.target} is read by one sequence and written by another")
    return runs


def _sequences(batch: Batch, slots: int) -> Iterator[SequenceRows]:
    for sequence in np.flatnonzero(batch.row_counts):
        first, count = int(batch.first_rows[sequence]), int(batch.row_counts[sequence])
        source = int(batch.state_from[sequence])
        if first < 0 or count < 0 or first + count > batch.n_tokens:
            got = f"rows {first} to {first + count} of sequence {sequence}"
            raise ValueError(f"batch: {got} are out of range; allowed: 0 to {batch.n_tokens}")
        targets = batch.state_to[first : first + count].tolist()
        for field, slot in (("state_from", source), *(("state_to", target) for target in targets)):
            if not -1 <= slot < slots:
                raise ValueError(f"batch: {field} {slot} is out of range; allowed: -1 to {slots - 1}")
        if (batch.sequence[first : first + count] != sequence).any():
            raise ValueError(f"batch: rows from {first} on are not all of sequence {sequence}")
        if first < batch.n_decode < first + count:
            raise ValueError(f"batch: sequence {sequence} has decode rows and prompt rows in one step")
        begin = first
        for row, target in enumerate(targets, first):
            last = row + 1 == first + count
            if target >= 0 and not last and row >= batch.n_decode:
                raise ValueError(f"batch: row {row} of a prompt keeps a state, which only its last one may")
            if target >= 0 or last:
                yield SequenceRows(range(begin, row + 1), source, target, int(sequence))
                begin, source = row + 1, target


class ReferenceStates:
    """The reference implementation of :class:`hotcold.kernels.state_ops.StateOps`."""

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
        """Mamba's ``conv1d``, arXiv 2312.00752."""
        channels, taps = weight.shape
        checks.check_conv(taps, activation)
        check("weight", weight, (channels, taps))
        check("state", state, (len(state), taps - 1, channels))
        if bias is not None:
            check("bias", bias, (channels,))
        values, target = (flat_rows(what, each, batch, channels) for what, each in (("x", x), ("out", out)))
        for run in sequences_of(batch, len(state)):
            columns = np.concatenate([run.load(state), values[run.rows.start : run.rows.stop]])
            for i, row in enumerate(run.rows):
                total = np.zeros(channels, np.float32) if bias is None else bias
                for tap in range(taps):
                    total = total + weight[:, tap] * columns[i + tap]
                target[row] = total * sigmoid(total) if activation == "silu" else total
            run.keep(state, columns[len(run.rows) :])

    def gated_delta(self, call: DeltaCall) -> None:
        """Gated delta nets, arXiv 2412.06464; Kimi's, arXiv 2510.26692."""
        batch, state, keys, key_dim = call.batch, call.state, call.keys, call.key_dim
        slots, heads, _, value_dim = state.shape
        check("state", state, (slots, heads, key_dim, value_dim))
        checks.check_parts("gated_delta v heads", heads, keys)
        split = keys * key_dim
        values = flat_rows("mixed", call.mixed, batch, 2 * split + heads * value_dim)
        per_channel = math.prod(call.decay.shape[1:]) != heads
        decays = flat_rows("decay", call.decay, batch, heads * key_dim if per_channel else heads)
        decay_factors = np.exp(decays.reshape(len(values), heads, -1))  # [T, Hv, dk or 1]
        betas = sigmoid(flat_rows("beta", call.beta, batch, heads))
        target = flat_rows("out", call.out, batch, heads * value_dim)
        key_heads = np.arange(heads) % keys if call.tiled else np.arange(heads) // (heads // keys)
        scale = np.float32(key_dim) ** np.float32(-0.5)
        for run in sequences_of(batch, slots):
            s = run.load(state)  # [Hv, dk, dv]
            for row in run.rows:
                q, k = (values[row, at : at + split].reshape(keys, key_dim)[key_heads] for at in (0, split))
                q, k = (v / np.sqrt((v * v).sum(-1, keepdims=True) + np.float32(call.eps)) for v in (q, k))
                v = values[row, 2 * split :].reshape(heads, value_dim)
                s = s * decay_factors[row, :, :, None]
                delta = betas[row, :, None] * (v - np.einsum("hkv,hk->hv", s, k))
                s = s + k[:, :, None] * delta[:, None, :]
                target[row] = np.einsum("hkv,hk->hv", s, q * scale).ravel()
            run.keep(state, s)

    def decay(self, x: Buffer, bias: Buffer, factor: Buffer, batch: Batch, out: Buffer) -> None:
        check("bias", bias, (bias.size,))
        check("factor", factor, (factor.size,))
        checks.check_parts("decay channels", bias.size, factor.size)
        values = flat_rows("x", x, batch, bias.size)
        target = flat_rows("out", out, batch, bias.size)
        target[:] = np.repeat(factor, bias.size // factor.size) * _softplus(values + bias)

    def ssm_scan(self, call: ScanCall) -> None:
        """Mamba-2, arXiv 2405.21060."""
        batch, state, groups, a, d = call.batch, call.state, call.groups, call.a, call.d
        slots, heads, width, size = state.shape
        check("state", state, (slots, heads, width, size))
        checks.check_parts("ssm_scan heads", heads, groups)
        for name, vector in (("dt_bias", call.dt_bias), ("a", a), ("d", d)):
            check(name, vector, (heads,))
        split = heads * width
        values = flat_rows("mixed", call.mixed, batch, split + 2 * groups * size)
        steps = _softplus(flat_rows("dt", call.dt, batch, heads) + call.dt_bias)
        target = flat_rows("out", call.out, batch, split)
        for run in sequences_of(batch, slots):
            s = run.load(state)  # [H, p, n]
            for row in run.rows:
                x = values[row, :split].reshape(heads, width)
                b, c = values[row, split:].reshape(2, groups, size).repeat(heads // groups, axis=1)
                new = (steps[row, :, None] * x)[:, :, None] * b[:, None, :]
                s = np.exp(steps[row] * a)[:, None, None] * s + new
                target[row] = (np.einsum("hpn,hn->hp", s, c) + d[:, None] * x).ravel()
            run.keep(state, s)

    def multiply(self, x: Buffer, gate: Buffer, batch: Batch, out: Buffer, *, activation: str) -> None:
        checks.check_gate(activation)
        width = math.prod(x.shape[1:])
        values, gates, target = (
            flat_rows(what, each, batch, width) for what, each in (("x", x), ("gate", gate), ("out", out))
        )
        if activation in ("silu", "sigmoid"):
            factor = sigmoid(gates)
            gates = gates * factor if activation == "silu" else factor
        elif activation == "relu":
            gates = np.maximum(gates, np.float32(0))
        target[:] = values * gates

    def activate(self, x: Buffer, batch: Batch, out: Buffer, *, activation: str) -> None:
        checks.check_plain(activation)
        width = math.prod(x.shape[1:])
        values, target = (flat_rows(what, each, batch, width) for what, each in (("x", x), ("out", out)))
        target[:] = np.tanh(values) if activation == "tanh" else sigmoid(values)

    def token_shift(
        self, x: Buffer, mixes: Buffer, batch: Batch, state: Buffer, outs: Sequence[Buffer]
    ) -> None:
        """The token shift of RWKV, arXiv 2305.13048."""
        checks.check_mixes(len(outs))
        slots, channels = state.shape
        check("state", state, (slots, channels))
        check("mixes", mixes, (len(outs), channels))
        values = flat_rows("x", x, batch, channels)
        targets = [flat_rows("out", out, batch, channels) for out in outs]
        for run in sequences_of(batch, slots):
            before = run.load(state)
            for row in run.rows:
                for mix, target in zip(mixes, targets, strict=True):
                    target[row] = values[row] + mix * (before - values[row])
                before = values[row]
            run.keep(state, before)

    def wkv7(self, call: Wkv7Call) -> None:
        """RWKV-7, arXiv 2503.14456."""
        batch, state, vectors, eps = call.batch, call.state, call.vectors, call.eps
        slots, heads, dim, _ = state.shape
        check("state", state, (slots, heads, dim, dim))
        check("vectors", vectors, (5, heads * dim))
        checks.check_blend(call.first, call.share)

        def rows(name: str, buffer: Buffer) -> Floats:
            return flat_rows(name, buffer, batch, heads * dim).reshape(-1, heads, dim)

        queries, keys, values = rows("r", call.r), rows("k", call.k), rows("v", call.v)
        decays = np.exp(-np.exp(np.float32(-0.5)) * sigmoid(rows("decay", call.decay)))
        rates, target = sigmoid(rows("rate", call.rate)), flat_rows("out", call.out, batch, heads * dim)
        kappa, alpha, bonus, weight, bias = vectors.reshape(5, heads, dim)
        if call.first is not None and call.share is not None:
            values = values + (rows("first", call.first) - values) * sigmoid(rows("share", call.share))
        units = keys * kappa
        roots = np.sqrt((units * units).sum(-1, keepdims=True))
        units = units / np.maximum(roots, np.float32(1e-12))
        keys = keys * (1 + (rates - 1) * alpha)
        for run in sequences_of(batch, slots):
            s = run.load(state)  # [H, keys, values]
            for row in run.rows:
                stored = np.einsum("hkv,hk->hv", s, units[row])
                s = s * decays[row, :, :, None] - (rates[row] * units[row])[:, :, None] * stored[:, None, :]
                s = s + keys[row, :, :, None] * values[row, :, None, :]
                y = np.einsum("hkv,hk->hv", s, queries[row])
                y = y - y.mean(-1, keepdims=True)
                y = y / np.sqrt((y * y).mean(-1, keepdims=True) + np.float32(eps)) * weight + bias
                extra = (queries[row] * keys[row] * bonus).sum(-1, keepdims=True)
                target[row] = (y + extra * values[row]).ravel()
            run.keep(state, s)


def _softplus(x: Floats) -> Floats:
    softplus: Floats = np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
    return softplus
