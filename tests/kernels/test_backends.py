"""Backends refuse wrong input, and open by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.op_truth import (
    Row,
    cache_shape,
    make_batch,
    page_count,
    plain_batch,
    random_ffn,
    random_tensor,
    rng,
)

from hotcold.formats.blocks import quantise
from hotcold.kernels import BACKENDS, open_backend
from hotcold.kernels.backend import (
    PAGE,
    AttentionCall,
    Backend,
    Batch,
    FFNCall,
    FFNTensors,
    Norm,
    PredictorTensors,
    RopeTable,
    RouterCall,
)
from hotcold.kernels.reference import ReferenceBackend
from hotcold.model.mixers.attention import CACHE_TYPES


def test_backends_open_by_name() -> None:
    assert [open_backend(name).name for name in BACKENDS] == list(BACKENDS)
    assert isinstance(open_backend("reference"), Backend) and isinstance(open_backend("cpu"), Backend)
    with pytest.raises(ValueError, match="'gpu' does not exist: choose from cpu, reference"):
        open_backend("gpu")
    with pytest.raises(ValueError, match="threads 2: backend 'reference' has no thread pool"):
        open_backend("reference", threads=2)
    for threads in (0, -1, 10**6):
        with pytest.raises(ValueError, match=f"threads {threads}: choose from 1 to "):
            open_backend("cpu", threads=threads)


def ffn(**changes: Any) -> FFNTensors:
    return replace(random_ffn(rng("refused"), (100, 64), ("Q8_0",) * 3), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "swish"}, "activation 'swish': choose from relu, drelu"),
        ({"activation": "drelu", "gate": None}, "'drelu' without a gate"),
        ({"activation": "swiglu_oai", "gate": None}, "'swiglu_oai' without a gate"),
        ({"activation": "swiglu_oai", "limit": 0.0}, "limit 0.0: a finite number above 0"),
        ({"activation": "swiglu_oai", "alpha": float("inf")}, "alpha inf: a finite number above 0"),
        ({"threshold": -0.1}, "threshold -0.1: a finite number of at least 0"),
        ({"threshold": float("nan")}, "threshold nan: a finite number"),
        ({"activation": "silu", "threshold": 0.5}, "threshold 0.5 with 'silu': use 0"),
        ({"down_layout": "sideways"}, "'sideways': choose from by_neuron, by_output"),
        ({"down_layout": "by_output"}, r"down of shape \(100, 64\) by_output: \(64, 100\) is needed"),
        ({"gate": random_tensor(rng(), "F32", 99, 64)}, r"gate of shape \(99, 64\): up has \(100, 64\)"),
        ({"down": random_tensor(rng(), "F32", 100, 32)}, r"down of shape \(100, 32\)"),
        ({"gate": None, "gate_bias": np.zeros(100, np.float32)}, "gate bias without a gate"),
        ({"up_bias": np.zeros(64, np.float32)}, r"up bias of shape \(64,\): \(100,\) is needed"),
        ({"down_bias": np.zeros(100, np.float32)}, r"down bias of shape \(100,\): \(64,\) is needed"),
    ],
)
def test_ffn_weights_that_do_not_fit_are_refused(
    backend: Backend, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        backend.ffn_weights(ffn(**changes))


def test_other_weights_that_do_not_fit_are_refused(backend: Backend) -> None:
    tensor = random_tensor(rng(), "F16", 6, 10)
    with pytest.raises(ValueError, match=r"bias of shape \(10,\): \(6,\) is needed"):
        backend.matrix(tensor, np.zeros(10, np.float32))
    with pytest.raises(TypeError, match="bias is float64: float32 is needed"):
        backend.matrix(tensor, np.zeros(6))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two dimensions"):
        backend.matrix(quantise(np.zeros((2, 3, 4)), "F32"))
    with pytest.raises(ValueError, match="rows of the first must equal columns of the second"):
        backend.predictor_weights(PredictorTensors(tensor, tensor, np.zeros(6, np.float32), True))
    with pytest.raises(ValueError, match=r"predictor threshold of shape \(6,\): \(9,\)"):
        second = random_tensor(rng(), "F16", 9, 6)
        backend.predictor_weights(PredictorTensors(tensor, second, np.zeros(6, np.float32), True))


def test_weights_of_another_backend_are_refused(backend: Backend) -> None:
    class Foreign:
        shape, nbytes = (4, 8), 64

    batch = plain_batch(backend, 1)
    with pytest.raises(TypeError, match="weights of Foreign"):
        backend.embed(Foreign(), batch, backend.zeros((batch.limits.tokens, 8)))


def test_skip_is_refused_where_nothing_is_zero(backend: Backend) -> None:
    weights = backend.ffn_weights(ffn(activation="silu"))
    batch = plain_batch(backend, 1)
    x, out = (backend.zeros((batch.limits.tokens, 64)) for _ in range(2))
    with pytest.raises(ValueError, match="skip with 'silu': only relu, drelu, relu2 give zeros"):
        backend.ffn(FFNCall(x, weights, batch, out, skip=True))


Calls = dict[str, tuple[Callable[..., None], dict[str, np.ndarray]]]


def cache_calls(backend: Backend, batch: Batch, type: str) -> Calls:
    """The ops on a KV cache with heads of 32."""
    k, v, q, out = (backend.zeros((batch.limits.tokens, heads, 32)) for heads in (2, 2, 4, 4))
    shape = cache_shape((page_count(batch), 2, PAGE, 32), type)
    caches = {name: backend.zeros(shape, CACHE_TYPES[type]) for name in ("k_cache", "v_cache")}
    return {
        f"store_kv {type}": (
            lambda k, v, k_cache, v_cache: backend.store_kv(k, v, batch, k_cache, v_cache),
            {"k": k, "v": v, **caches},
        ),
        f"attention {type}": (
            lambda q, k_cache, v_cache, out: backend.attention(
                AttentionCall(q, k_cache, v_cache, batch, out, 1.0)
            ),
            {"q": q, **caches, "out": out},
        ),
    }


def calls(backend: Backend) -> Calls:
    """Every op as a function of its buffers, with buffers that fit."""
    batch = make_batch(backend, [Row(0), Row(1)], logits=[0])
    t, r, d = batch.limits.tokens, batch.limits.logits, 64
    tensor = random_tensor(rng("calls"), "Q8_0", d, d)
    matrix, weights = backend.matrix(tensor), backend.ffn_weights(ffn())
    norm = Norm(np.ones(d, np.float32), None, 1e-5)
    rope = RopeTable(np.ones((2, 4), np.float32), np.zeros((2, 4), np.float32), True)
    predictor = backend.predictor_weights(
        PredictorTensors(random_tensor(rng(), "F16", 32, d), random_tensor(rng(), "F16", 100, 32),
                         np.zeros(100, np.float32), True)
    )  # fmt: skip

    def rows(*shape: int) -> np.ndarray:
        return backend.zeros((t, *shape))

    def words() -> np.ndarray:
        return backend.zeros((t, 2), np.uint64)

    return {
        "embed": (lambda out: backend.embed(matrix, batch, out), {"out": rows(d)}),
        "norm": (lambda x, out: backend.norm(x, norm, batch, out), {"x": rows(d), "out": rows(d)}),
        "linear": (lambda x, out: backend.linear(x, [matrix], batch, [out]), {"x": rows(d), "out": rows(d)}),
        "rope": (lambda x: backend.rope(x, rope, batch), {"x": rows(2, 8)}),
        **cache_calls(backend, batch, "f16"),
        **cache_calls(backend, batch, "q8_0"),
        "predict": (
            lambda x, mask: backend.predict(x, predictor, batch, mask),
            {"x": rows(d), "mask": words()},
        ),
        "ffn": (
            lambda x, out, mask, active: backend.ffn(
                FFNCall(x, weights, batch, out, skip=True, mask=mask, active=active)
            ),
            {"x": rows(d), "out": rows(d), "mask": words(), "active": words()},
        ),
        "router": (
            lambda x, ids, factors: backend.router(
                RouterCall(x, matrix, batch, ids, factors, k=3, score="softmax", normalise=True, scale=1.0)
            ),
            {"x": rows(d), "ids": backend.zeros((t, 3), np.int32), "factors": rows(3)},
        ),
        "add": (lambda x, y: backend.add(x, y, batch), {"x": rows(d), "y": rows(d)}),
        "gather": (
            lambda x, out: backend.gather(x, batch, out),
            {"x": rows(d), "out": backend.zeros((r, d))},
        ),
        "softcap": (
            lambda logits: backend.softcap(logits, batch, 30.0),
            {"logits": backend.zeros((r, d))},
        ),
    }


OPS = (
    "embed", "norm", "linear", "rope", "store_kv f16", "attention f16", "store_kv q8_0", "attention q8_0",
    "predict", "ffn", "router", "add", "gather", "softcap",
)  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_buffers_that_are_not_exactly_right_are_refused(backend: Backend, op: str) -> None:
    """Wrong dtype, too few rows, a wrong last axis, and gaps between rows; each buffer in turn."""
    call, buffers = calls(backend)[op]
    call(**buffers)
    for name, buffer in buffers.items():
        wrong_dtype = buffer.astype(np.int64 if buffer.dtype == np.uint64 else np.float64)
        with pytest.raises(TypeError):
            call(**{**buffers, name: wrong_dtype})
        longer = np.zeros((*buffer.shape[:-1], buffer.shape[-1] + 1), buffer.dtype)
        gaps = np.repeat(buffer, 2, axis=-1)[..., ::2]
        assert gaps.shape == buffer.shape and not gaps.flags.c_contiguous
        refused = [longer, gaps] + ([] if "cache" in name else [np.ascontiguousarray(buffer[:1])])
        for wrong in refused:
            if wrong is longer and (op in ("rope", "softcap") or (op == "ffn" and name == "mask")):
                continue  # any width of a head or of logits is right; the first words are the mask
            with pytest.raises((ValueError, TypeError)):
                call(**{**buffers, name: wrong})


def test_what_top_k_refuses(backend: Backend) -> None:
    logits, ids, values = np.zeros((2, 5), np.float32), np.array([1], np.int32), np.ones(1, np.float32)
    for k in (0, -1):
        with pytest.raises(ValueError, match=f"k is {k}: at least 1 is needed"):
            backend.top_k(logits, 0, k)
    for row in (-1, 2):
        with pytest.raises(ValueError, match=f"row {row} of logits that have 2"):
            backend.top_k(logits, row, 1)
    for id in (-1, 5):
        with pytest.raises(ValueError, match=f"bias names ids {id} to {id}: 0 to 4 are there"):
            backend.top_k(logits, 0, 1, (np.array([id], np.int32), values))
    with pytest.raises(ValueError, match=r"bias has ids of shape \(1,\) and values of \(2,\)"):
        backend.top_k(logits, 0, 1, (ids, np.ones(2, np.float32)))
    with pytest.raises(TypeError, match="bias is int64 and float32: int32 ids"):
        backend.top_k(logits, 0, 1, (ids.astype(np.int64), values))
    with pytest.raises(TypeError, match=r"logits are float64 of shape \(2, 5\): float32 \[R, V\]"):
        backend.top_k(logits.astype(np.float64), 0, 1)


def test_values_move_in_and_out_of_buffers(backend: Backend) -> None:
    """Also from another backend's; what is read is not to be written."""
    buffer, other = backend.zeros((5, 2, 3)), ReferenceBackend()
    values = rng("moved").standard_normal((2, 2, 3)).astype(np.float32)
    backend.write(buffer, values, 3)
    np.testing.assert_array_equal(backend.read(buffer, 3), values)
    assert not backend.read(buffer, 0, 3).any() and backend.read(buffer).shape == (5, 2, 3)
    assert not backend.read(buffer).flags.writeable
    source = other.zeros((4, 2, 3))
    other.write(source, values)
    backend.copy(other, source, buffer, 1)
    np.testing.assert_array_equal(backend.read(buffer, 0, 2), [values[0], np.zeros((2, 3))])
    for wrong, row, error in (
        (values.astype(np.float64), 0, TypeError),
        (values, 4, ValueError),
        (values, -1, ValueError),
        (values.reshape(2, 6), 0, ValueError),
    ):
        with pytest.raises(error):
            backend.write(buffer, wrong, row)
    for rows in ((0, 6), (-1, 2), (3, 2)):
        with pytest.raises(ValueError, match="of a buffer that has 5"):
            backend.read(buffer, *rows)


def test_heads_are_rows_of_a_product(backend: Backend) -> None:
    """[T, H, head_dim] as [T, H * head_dim], on either side."""
    matrix = backend.matrix(random_tensor(rng("heads"), "Q8_0", 64, 96))
    batch = plain_batch(backend, 3)
    t = batch.limits.tokens
    x, flat, heads = backend.zeros((t, 96)), backend.zeros((t, 64)), backend.zeros((t, 2, 32))
    x[:] = rng("heads").standard_normal(x.shape)
    backend.linear(x, [matrix], batch, [flat])
    backend.linear(x.reshape(t, 3, 32), [matrix], batch, [heads])
    assert flat[:3].any()
    np.testing.assert_array_equal(heads.reshape(t, 64), flat)


def test_the_reference_counts_small_inputs_as_zero() -> None:
    """The inverse scale of a denormal block would be infinite."""
    backend = ReferenceBackend()
    batch = plain_batch(backend, 1)
    x, out = backend.zeros((batch.limits.tokens, 32)), backend.zeros((batch.limits.tokens, 1))
    x[:] = np.float32(1e-42)
    backend.linear(x, [backend.matrix(random_tensor(rng(), "Q8_0", 1, 32))], batch, [out])
    assert out[0, 0] == 0
