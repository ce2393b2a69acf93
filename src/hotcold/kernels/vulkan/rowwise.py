"""Ops on each row by itself: norm, add, gather, softcap, router, and top_k, which runs on the host."""

from __future__ import annotations

import math

import numpy as np

from hotcold.kernels import _native, checks
from hotcold.kernels.backend import Buffer, Floats, Ints, Masks, Norm, RouterCall, Rows
from hotcold.kernels.vulkan.buffers import DeviceMemory
from hotcold.kernels.vulkan.linear import Count, cap_logits, dot_input, product
from hotcold.kernels.vulkan.matrix import DeviceMatrix
from hotcold.kernels.vulkan.memory import shape_of
from hotcold.kernels.vulkan.recording import Recording, Written

_MOST_HELD = 40  #: values that an invocation of norm.comp keeps in registers


def norm(recording: Recording, x: Buffer, norm: Norm, out: Buffer, rows: Rows) -> None:
    shape = recording.memory.own(x).shape
    width = shape[-1]
    if len(shape) < 2 or width < 1:
        raise ValueError(f"x of shape {shape}: rows of at least one value are needed")
    values = recording.memory.own(x).width
    weight: tuple[int, ...] | None = None
    if norm.weight is not None:
        weight = recording.memory.own(norm.weight).shape
        if len(weight) == 2:
            if math.prod(weight) != values:
                raise ValueError(f"norm weight of shape {weight}: groups of a row of {values} are needed")
            width = weight[1]
        elif weight != (width,):
            width = values  # of all heads
            weight = (width,)
    weight_shape = weight or (width,)
    source, target = (
        recording.range_of(name, each, values, rows=rows) for name, each in (("x", x), ("out", out))
    )
    vectors = [
        source if each is None else recording.memory.vector(f"norm {what}", each, *weight_shape)
        for what, each in (("weight", norm.weight), ("bias", norm.bias))
    ]
    held = -(-width // 256)
    kinds = [int(rows), int(norm.centre), int(norm.bias is not None), int(weight is not None)]
    recording.run(
        "norm",
        [source, *vectors, Written(target), source],
        [width, math.prod(weight_shape[:-1]), float(norm.eps)],
        (values // width, recording.rows_of(rows), 1),
        [*kinds, held if held <= _MOST_HELD else 0, 0],
    )


def add(recording: Recording, x: Buffer, y: Buffer, keep: float, scale: float) -> None:
    width = recording.memory.own(x).width
    total, addend = (recording.range_of(name, each, width) for name, each in (("x", x), ("y", y)))
    recording.run(
        "add",
        [Written(total), addend],
        [width, float(keep), float(scale)],
        (-(-width // 256), recording.rows, 1),
    )


def gather(recording: Recording, x: Buffer, out: Buffer) -> None:
    width = recording.memory.own(x).width
    source = recording.range_of("x", x, width)
    target = recording.range_of("out", out, width, rows=Rows.LOGITS)
    groups = -(-width // 256), recording.rows_of(Rows.LOGITS), 1
    recording.run("gather", [source, Written(target)], [width], groups)


def softcap(recording: Recording, logits: Buffer, cap: float) -> None:
    checks.check_softcap(cap)
    width = recording.memory.own(logits).width
    rows = recording.range_of("logits", logits, width, rows=Rows.LOGITS)
    if cap_logits(recording, rows, width, cap):
        return
    groups = -(-width // 256), recording.rows_of(Rows.LOGITS), 1
    recording.run("softcap", [Written(rows)], [width, float(cap)], groups)


def router(recording: Recording, call: RouterCall) -> None:
    w, k, by = checks.own_weights(call.weights, DeviceMatrix), call.k, call.groups
    experts, columns = w.shape
    given_vectors = call.selection_bias, call.expert_scale
    bias, scale = (None if vector is None else recording.memory.own(vector) for vector in given_vectors)
    biases, scales = (None if vector is None else shape_of(vector) for vector in (bias, scale))
    checks.check_router(call, experts, biases, scales)
    values = recording.range_of("x", call.x, columns)
    chosen = (
        recording.range_of("ids", call.ids, k, np.int32),
        recording.range_of("factors", call.factors, k),
    )
    router_input = dot_input(recording, values, columns, recording.rows, Count.TOKENS, [w])
    logits = recording.scratch(4 * recording.rows * experts)
    product(recording, w, router_input, logits)
    vectors = [logits if vector is None else vector.range for vector in (bias, scale)]
    groups = [] if by is None or by.used == by.count else [by.count, by.used, by.best]
    kinds = call.score == "softmax", bias is not None, call.normalise, scale is not None
    recording.run(
        "router",
        [logits, *vectors, *map(Written, chosen)],
        [float(call.scale)],
        (recording.rows, 1, 1),
        [experts, k, *map(int, kinds), *groups],
    )


def top_k(
    memory: DeviceMemory,
    logits: Buffer,
    row: int,
    k: int,
    bias: tuple[Ints, Floats] | None,
    allowed: Masks | None,
) -> tuple[Ints, Floats]:
    """Ranks on the host: a sampler reads few of a row's logits, and copying the row takes microseconds."""
    checks.check_top_k(shape_of(memory.own(logits)), row, k, bias)
    values = memory.read(logits, row, row + 1)[0]
    k = min(k, len(values))
    ids, largest = np.empty(k, np.int32), np.empty(k, np.float32)
    bias_ids, biases = bias or (None, None)
    n = _native.top_k(values, bias_ids, biases, allowed, ids, largest)
    return ids[:n], largest[:n]
