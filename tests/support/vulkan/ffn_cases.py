"""Cases of the op table of Vulkan devices (table.py): the FFN, its predictors, experts, routers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from support.expert_layers import choices, make_layer
from support.op_truth import (
    FFNKind,
    plain_batch,
    random_ffn,
    random_rows,
    random_tensor,
    rng,
    to_words,
)
from support.vulkan.cases import FEW_STEPS, LARGE_TILES, TYPES, Array, Case, buffer, out_buffer

from hotcold.formats.blocks import BLOCK_TYPES
from hotcold.kernels.backend import (
    FFN_COUNTS,
    SPARSE_ACTIVATIONS,
    Chosen,
    FFNCall,
    FFNStats,
    FFNTensors,
    PredictorTensors,
    RouterCall,
)

# --- ffn, predict ---

KINDS = (
    FFNKind("relu", threshold=0.4, biases=True),
    FFNKind("silu", biases=True),
    FFNKind("relu"),
    FFNKind("drelu", threshold=0.3, biases=True),
    FFNKind("relu2"),
    FFNKind("gelu"),
    FFNKind("relu", gated=False, biases=True),
    FFNKind("gelu", gated=False, biases=True),
    FFNKind("gelu_erf"),
    FFNKind("swiglu_oai", limit=0.6, alpha=2.5, biases=True),
)
MIXED_TYPES = (("Q4_0", "F16", "Q8_0"), ("F32", "Q8_0", "BF16"), ("Q4_K", "Q4_K", "Q6_K"))


def ffn_cases() -> Iterator[Case]:
    for types in (*((type,) * 3 for type in TYPES), *MIXED_TYPES):
        for at, kind in enumerate(KINDS):
            for layout in ("by_neuron", "by_output"):
                some = 2 if BLOCK_TYPES[types[0]].panels else int(types[0] in ("Q2_K", "IQ4_XS"))
                quick = at < some or types == ("Q4_0",) * 3 or (at < 5 and types == ("F16",) * 3)
                name = f"{' '.join(dict.fromkeys(types))} {layout} {kind.activation}"
                more = f"{', no gate' * (not kind.gated)}{', biases' * kind.biases}"
                # A coefficient whose last bit differs may get another of the codes that the second dot takes.
                dense = layout == "by_output" and kind.activation not in SPARSE_ACTIVATIONS
                tolerance = 0.02 if dense and BLOCK_TYPES[types[2]].weights > 1 else 1e-5
                # Activations are the same before any down; smooth ones by output have a dot of each type.
                telling = kind.activation == "relu" or (layout == "by_output" and types == ("Q4_0",) * 3)
                everywhere = quick and telling and kind.gated
                run = _run_ffn(types, kind, layout)
                yield Case("ffn", name + more, run, quick, everywhere, tolerance)
    yield Case("ffn", "Q5_1 by_output of odd width", _run_odd("Q5_1"))
    yield Case("ffn", "Q6_K by_output of odd width", _run_odd("Q6_K"))
    yield Case("ffn", "F16 by_neuron of many leaves", _many_leaves)
    for types in (("F16",) * 3, ("Q4_0",) * 3, ("Q4_0", "Q8_0", "Q5_1"), ("Q6_K",) * 3):
        for layout in ("by_neuron", "by_output"):
            name = f"{' '.join(dict.fromkeys(types))} {layout} gates computed before"
            yield Case("ffn", name, _run_given(types, layout), types == ("Q4_0",) * 3)
    for types in (("F32", "F32"), ("F16", "F16"), ("Q8_0", "Q8_0"), ("Q4_0", "F16")):
        for relu in (True, False):
            run = _run_predict(types, relu=relu)
            yield Case("predict", f"{' '.join(types)}{' relu' * relu}", run, relu)


def _run_ffn(types: tuple[str, str, str], kind: FFNKind, layout: str) -> Callable[[Any], list[Array]]:
    def run(backend: Any) -> list[Array]:
        large = max(BLOCK_TYPES[type].weights for type in types) > 32
        outs = []
        for shape in ((512, 256), (256, 256)) if large else ((416, 64), (96, 96)):
            random = rng("ffn", types, shape, *kind)
            outs += ffn_steps(backend, random_ffn(random, shape, types, kind, layout), random)
        return outs

    return run


def _run_given(types: tuple[str, str, str], layout: str) -> Callable[[Any], list[Array]]:
    def run(backend: Any) -> list[Array]:
        random = rng("given", types)
        tensors = random_ffn(random, (512, 256), types, FFNKind("relu", gated=False), layout)
        return ffn_steps(backend, tensors, random, given=True)

    return run


def _run_odd(type: str) -> Callable[[Any], list[Array]]:
    def run(backend: Any) -> list[Array]:
        random = rng("odd", type)
        types = ("F32", "F32", type)
        return ffn_steps(backend, random_ffn(random, (512, 50), types, FFNKind(), "by_output"), random)

    return run


def _many_leaves(backend: Any) -> list[Array]:
    random = rng("leaves")
    return ffn_steps(backend, random_ffn(random, (64 * 43 * 2 + 7, 10), ("F16",) * 3), random)


def program_rows(rows: int) -> int | None:
    """Returns the rows of a step's program, as a session chooses them: one and two have shaders of their own.
    Others leave room, so that there are decode and prompt rows apart."""
    return rows if rows <= 2 else None


def ffn_steps(
    backend: Any, tensors: FFNTensors, random: np.random.Generator, *, given: bool = False
) -> list[Array]:
    """With all that ``skip``, ``mask``, ``active`` and ``accumulate`` may be; ``given``: gates, too."""
    weights, (n, d), outs = backend.ffn_weights(tensors), tensors.up.shape, []
    sparse = tensors.activation in SPARSE_ACTIVATIONS
    for skip, masked, (decode, prompt) in (
        (sparse, True, (1, 0)), (False, False, (16, 0)), (False, False, (0, 33)), (sparse, True, (3, 5)),
        (sparse, False, (2, 0)),
    ):  # fmt: skip
        batch, x = plain_batch(backend, decode, prompt), random_rows(random, decode + prompt, d)
        rows, words = batch.limits.tokens, -(-n // 64)
        mask, active = (
            out_buffer(backend, rows, words, dtype=np.uint64),
            out_buffer(backend, rows, words, dtype=np.uint64),
        )
        mask[:decode] = to_words(random.random((decode, n)) < 0.3)
        out, stats = out_buffer(backend, rows, d), FFNStats(backend.zeros((2, len(FFN_COUNTS)), np.int64), 1)
        options: dict[str, Any] = {"skip": skip, "mask": mask if masked else None, "accumulate": masked}
        if given:
            gates = random_rows(random, decode + prompt, n) - np.float32(1)
            options["gates"] = buffer(backend, batch, gates)
        call = FFNCall(buffer(backend, batch, x), weights, batch, out, active=active, stats=stats, **options)
        backend.record(partial(backend.ffn, call), program_rows(decode + prompt)).run()
        outs += [out, active, stats.counts]
    return outs


def _run_predict(types: tuple[str, str], *, relu: bool) -> Callable[[Any], list[Array]]:
    def run(backend: Any) -> list[Array]:
        random, outs = rng("predict", types), []
        n, d, rank = 172, 96, 64
        first, second = random_tensor(random, types[0], rank, d), random_tensor(random, types[1], n, rank)
        thresholds = random_rows(random, n) * np.float32(0.2)
        weights = backend.predictor_weights(PredictorTensors(first, second, thresholds, relu))
        for decode, prompt in FEW_STEPS:
            batch, x = plain_batch(backend, decode, prompt), random_rows(random, decode + prompt, d)
            mask = out_buffer(backend, batch.limits.tokens, -(-n // 64), dtype=np.uint64)
            backend.predict(buffer(backend, batch, x), weights, batch, mask)
            outs.append(mask)
        return outs

    return run


# --- experts, router ---


def expert_cases() -> Iterator[Case]:
    for kind, types, layout in (
        (FFNKind("relu", biases=True), ("Q4_0",) * 3, "by_neuron"),
        (FFNKind("silu", biases=True), ("Q4_0",) * 3, "by_output"),
        (FFNKind("relu"), ("Q4_0", "Q4_0", "Q5_0"), "by_output"),
        (FFNKind("drelu"), ("Q8_0", "F16", "Q5_1"), "by_neuron"),
        (FFNKind("relu2", gated=False), ("F16",) * 3, "by_output"),
        (FFNKind("gelu"), ("F16", "BF16", "F16"), "by_output"),
        (FFNKind("silu", biases=True), ("Q8_0", "Q8_0", "F32"), "by_neuron"),
    ):
        name = f"{' '.join(dict.fromkeys(types))} {layout} {kind.activation}"
        for sizes, k in (((416,) * 4, 2), ((96,) * 16, 5)):
            run = _run_experts(sizes, k, types, kind, layout)
            dense = layout == "by_output" and kind.activation not in SPARSE_ACTIVATIONS
            tolerance = 0.02 if dense and BLOCK_TYPES[types[2]].weights > 1 else 1e-5
            everywhere = (kind.activation in ("relu", "silu") and layout == "by_output") or types[0] == "Q4_0"
            title = f"{name}, {k} of {len(sizes)} experts"
            yield Case("ffn", title, run, k == 2, k == 2 and everywhere, tolerance)
    yield Case("ffn", "Q8_0 experts of many sizes", _run_experts((0, 70, 1, 300, 64), 2, ("Q8_0",) * 3))
    yield Case("ffn", "F16 a shared expert", _run_experts((300,), 1, ("F16",) * 3))
    for sizes, kind, types, layout in (
        ((300,), FFNKind("relu", biases=True), ("F16",) * 3, "by_neuron"),
        ((288, 160), FFNKind("relu"), ("Q4_0", "Q4_0", "Q5_0"), "by_output"),
        ((288, 288), FFNKind("silu", biases=True), ("Q8_0", "Q4_0", "F32"), "by_output"),
    ):
        run = _run_experts(sizes, len(sizes), types, kind, layout, LARGE_TILES)
        name = f"{' '.join(dict.fromkeys(types))} {layout} {kind.activation}"
        yield Case("ffn", f"{name}, {len(sizes)} experts in large tiles", run)
    yield Case("predict", "F16 experts", _predict_experts)
    for name, (experts, k, score, normalise, biases) in {
        "mixtral": (8, 2, "softmax", True, False),
        "gpt-oss": (32, 4, "softmax", True, True),
        "qwen2-moe": (60, 4, "softmax", False, False),
        "deepseek-v3": (256, 8, "sigmoid", True, True),
        "shared": (1, 1, "sigmoid", False, False),
        "largest": (1024, 32, "softmax", True, True),
    }.items():
        yield Case("router", f"F32 {name}", _run_router("F32", experts, k, score, biases, normalise))
        run = _run_router("Q8_0", experts, k, score, biases, normalise)
        yield Case("router", f"Q8_0 {name}", run, quick=False)


def _run_experts(
    sizes: tuple[int, ...],
    k: int,
    types: tuple[str, str, str],
    kind: FFNKind | None = None,
    layout: str = "by_neuron",
    steps: tuple[tuple[int, int], ...] = FEW_STEPS,
) -> Callable[[Any], list[Array]]:
    def run(backend: Any) -> list[Array]:
        layer = make_layer(k, sizes, 64, types, kind or FFNKind(biases=True), layout)
        weights, outs = backend.ffn_weights(layer.tensors), []
        sparse = layer.tensors.activation in SPARSE_ACTIVATIONS
        for at, (decode, prompt) in enumerate(steps):
            batch, count, random = plain_batch(backend, decode, prompt), decode + prompt, rng(sizes, at)
            rows, words = batch.limits.tokens, weights.words
            ids, factors = backend.zeros((rows, k), np.int32), backend.zeros((rows, k))
            ids[:count], factors[:count] = choices((sizes, at), count, len(sizes), k)
            active = out_buffer(backend, rows, words, dtype=np.uint64)
            mask = random.integers(0, 1 << 63, (rows, words), np.uint64)
            x, out = random_rows(random, count, 64), out_buffer(backend, rows, 64)
            stats = FFNStats(backend.zeros((1, len(FFN_COUNTS)), np.int64))
            options: dict[str, Any] = {"skip": sparse, "mask": mask if at % 2 else None}
            more: dict[str, Any] = {"accumulate": at == 1, "chosen": Chosen(ids, factors), "stats": stats}
            backend.ffn(
                FFNCall(buffer(backend, batch, x), weights, batch, out, active=active, **options, **more)
            )
            outs += [out, active, stats.counts]
        return outs

    return run


def _predict_experts(backend: Any) -> list[Array]:
    sizes, k, d, rank, random = (100, 64, 0, 300, 1), 2, 64, 32, rng("predict experts")
    n, ends, outs = sum(sizes), tuple(int(end) for end in np.cumsum(sizes)), []
    first, second = random_tensor(random, "F16", rank, d), random_tensor(random, "F16", n, rank)
    tensors = PredictorTensors(first, second, random_rows(random, n) * np.float32(0.2), True)
    tensors = replace(tensors, experts=len(sizes), chosen=k, expert_ends=ends)
    weights = backend.predictor_weights(tensors)
    for decode, prompt in FEW_STEPS:
        batch, count = plain_batch(backend, decode, prompt), decode + prompt
        rows = batch.limits.tokens
        mask = out_buffer(backend, rows, sum(-(-size // 64) for size in sizes), dtype=np.uint64)
        ids, factors = backend.zeros((rows, k), np.int32), backend.zeros((rows, k))
        ids[:count] = choices((sizes, decode), count, len(sizes), k)[0]
        x = buffer(backend, batch, random_rows(random, count, d))
        backend.predict(x, weights, batch, mask, Chosen(ids, factors))
        outs.append(mask)
    return outs


def _run_router(
    type: str, experts: int, k: int, score: str, biases: bool, normalise: bool
) -> Callable[[Any], list[Array]]:
    def run(backend: Any) -> list[Array]:
        random, outs = rng("router", type, experts), []
        tensor = random_tensor(random, type, experts, 96, scale=2 * 96**-0.5)
        bias, selection = random_rows(random, 2, experts)
        weights = backend.matrix(tensor, bias if biases else None)
        for decode, prompt in FEW_STEPS:
            batch, x = plain_batch(backend, decode, prompt), random_rows(random, decode + prompt, 96)
            rows = batch.limits.tokens
            ids, factors = out_buffer(backend, rows, k, dtype=np.int32), out_buffer(backend, rows, k)
            options: dict[str, Any] = {"k": k, "score": score, "normalise": normalise, "scale": 2.5}
            if biases and experts != 32:
                options["selection_bias"] = selection
            backend.router(RouterCall(buffer(backend, batch, x), weights, batch, ids, factors, **options))
            outs += [ids, factors]
        return outs

    return run
