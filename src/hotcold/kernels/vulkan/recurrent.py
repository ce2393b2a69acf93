"""Ops of layers that keep a state of each sequence (state_ops.py). A group of a scan keeps a part of one
sequence's state of one head in registers through all rows."""

from __future__ import annotations

import numpy as np

from hotcold.kernels import checks
from hotcold.kernels.backend import Buffer, DeltaCall, ScanCall
from hotcold.kernels.state_ops import GATE_ACTIVATIONS
from hotcold.kernels.vulkan.memory import DeviceBuffer, Range
from hotcold.kernels.vulkan.recording import Recording, Written

#: Most rows (gated_delta) or columns (ssm_scan) of a state that fit 32 KiB of shared memory.
MOST_STATE_DIM = 512
#: Ops without a shader, and the models that need them.
MISSING = dict.fromkeys(("activate", "token_shift", "wkv7"), "RWKV")
_DELTA_COLUMNS, _SCAN_ROWS = 64, 32  # of a state, per group


def _state(recording: Recording, state: Buffer, axes: int, needed_shape: str) -> DeviceBuffer:
    """Returns a state's buffer, and bounds the slots of a step by its length."""
    buffer = recording.memory.own(state)
    if buffer.dtype != np.float32:
        raise TypeError(f"state is {buffer.dtype}: float32 is needed")
    if len(buffer.shape) != axes or 0 in buffer.shape:
        raise ValueError(f"state of shape {buffer.shape}: {needed_shape}, with values, is needed")
    if buffer.range.nbytes > recording.memory.info.max_range:
        got = f"a state of {buffer.range.nbytes} bytes: {recording.memory.info.name} allows"
        raise ValueError(f"{got} {recording.memory.info.max_range} for a layer's states; use fewer slots")
    recording.bound("state_slots", buffer.shape[0])
    return buffer


def _sequences(recording: Recording) -> tuple[int, int]:
    """Returns how many groups search for a sequence, and whether they search by first row: there may be far
    more sequences than rows (csrc/shaders/recurrence.glsl)."""
    sequences = recording.batch.limits.sequences
    return min(sequences, recording.rows), int(recording.rows <= sequences)


def _check_state_dim(label: str, size: int) -> None:
    if size > MOST_STATE_DIM:
        raise ValueError(f"{label} of {size}: up to {MOST_STATE_DIM} are allowed")


def short_conv(
    recording: Recording,
    x: Buffer,
    weight: Buffer,
    bias: Buffer | None,
    state: Buffer,
    out: Buffer,
    activation: str,
) -> None:
    shape = recording.memory.own(weight).shape
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"weight of shape {shape}: [C, k] is needed")
    channels, taps = shape
    checks.check_conv(taps, activation)
    held = _state(recording, state, 3, f"[slots, {taps - 1}, {channels}]")
    if held.shape[1:] != (taps - 1, channels):
        raise ValueError(f"state of shape {held.shape}: [slots, {taps - 1}, {channels}] is needed")
    weights = recording.memory.vector("weight", weight, channels, taps)
    biases = weights if bias is None else recording.memory.vector("bias", bias, channels)
    source, target = (recording.range_of(name, each, channels) for name, each in (("x", x), ("out", out)))
    recording.run(
        "short_conv",
        [source, weights, biases, Written(held.range), Written(target)],
        [channels],
        (-(-channels // 256), recording.rows, 1),
        [taps, int(bias is not None), int(activation == "silu")],
    )


def gated_delta(recording: Recording, call: DeltaCall) -> None:
    keys, key_dim = call.keys, call.key_dim
    held = _state(recording, call.state, 4, "[slots, Hv, dk, dv]")
    _, heads, rows, value_dim = held.shape
    if rows != key_dim:
        raise ValueError(f"state of shape {held.shape}: [slots, Hv, {key_dim}, dv] is needed")
    checks.check_parts("gated_delta v heads", heads, keys)
    _check_state_dim("gated_delta with a key_dim", key_dim)
    by_channel = len(recording.memory.own(call.decay).shape) == 3
    inputs = [
        recording.range_of("mixed", call.mixed, 2 * keys * key_dim + heads * value_dim),
        recording.range_of("decay", call.decay, heads * key_dim if by_channel else heads),
        recording.range_of("beta", call.beta, heads),
    ]
    target = recording.range_of("out", call.out, heads * value_dim)
    sequences, by_row = _sequences(recording)
    scale = float(np.float32(key_dim) ** np.float32(-0.5))
    recording.work(4 * recording.rows * heads * key_dim * value_dim)
    recording.run(
        "gated_delta",
        [*inputs, Written(held.range), Written(target)],
        [heads, keys, value_dim, by_row, float(call.eps), scale],
        (-(-value_dim // _DELTA_COLUMNS), heads, sequences),
        [key_dim, int(by_channel), int(call.tiled)],
    )


def decay(recording: Recording, x: Buffer, bias: Buffer, factor: Buffer, out: Buffer) -> None:
    (width,), (heads,) = (_vector_shape(recording, *each) for each in (("bias", bias), ("factor", factor)))
    checks.check_parts("decay channels", width, heads)
    vectors = recording.memory.vector("bias", bias, width), recording.memory.vector("factor", factor, heads)
    source, target = (recording.range_of(name, each, width) for name, each in (("x", x), ("out", out)))
    groups = -(-width // 256), recording.rows, 1
    recording.run("decay", [source, *vectors, Written(target)], [width, width // heads], groups)


def _vector_shape(recording: Recording, label: str, buffer: Buffer) -> tuple[int]:
    shape = recording.memory.own(buffer).shape
    if len(shape) != 1:
        raise ValueError(f"{label} of shape {shape}: one axis is needed")
    return (shape[0],)


def ssm_scan(recording: Recording, call: ScanCall) -> None:
    groups = call.groups
    held = _state(recording, call.state, 4, "[slots, H, p, n]")
    _, heads, head_dim, size = held.shape
    checks.check_parts("ssm_scan heads", heads, groups)
    _check_state_dim("ssm_scan with n", size)
    inputs: list[Range | Written] = [
        recording.range_of("mixed", call.mixed, heads * head_dim + 2 * groups * size),
        recording.range_of("dt", call.dt, heads),
    ]
    for name, vector in (("dt_bias", call.dt_bias), ("a", call.a), ("d", call.d)):
        inputs.append(recording.memory.vector(name, vector, heads))
    target = recording.range_of("out", call.out, heads * head_dim)
    sequences, by_row = _sequences(recording)
    recording.work(3 * recording.rows * heads * head_dim * size)
    recording.run(
        "ssm_scan",
        [*inputs, Written(held.range), Written(target)],
        [heads, head_dim, groups, by_row],
        (-(-head_dim // _SCAN_ROWS), heads, sequences),
        [size],
    )


def multiply(recording: Recording, x: Buffer, gate: Buffer, out: Buffer, activation: str) -> None:
    checks.check_gate(activation)
    width = recording.memory.own(x).width
    rows = [recording.range_of(name, each, width) for name, each in (("x", x), ("gate", gate), ("out", out))]
    groups = -(-width // 256), recording.rows, 1
    recording.run(
        "multiply", [*rows[:2], Written(rows[2])], [width], groups, [GATE_ACTIVATIONS.index(activation)]
    )
