"""A layer of a usual model with a small FFN, from which a GPU's overhead of a layer is measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotcold.formats.blocks import BlockType, Tensor
from hotcold.kernels.backend import (
    FFN_COUNTS,
    PAGE,
    AttentionCall,
    Backend,
    Batch,
    Chosen,
    FFNCall,
    FFNStats,
    FFNTensors,
    FFNWeights,
    Norm,
    PredictorTensors,
    RopeTable,
    RouterCall,
    Rows,
)
from hotcold.placement.hardware import HEAD

_HEAD_DIM = 128
_NEURONS = 64  #: of the FFN, or of each expert
_EXPERTS, _CHOSEN = 8, 2
_RANK = 64  # of the predictor


@dataclass(frozen=True)
class LayerShape:
    """The dimensions of attention."""

    dim: int
    heads: int
    kv_heads: int

    @property
    def rows(self) -> dict[str, int]:
        """Rows of the matrices."""
        q, kv = self.heads * _HEAD_DIM, self.kv_heads * _HEAD_DIM
        return {"q": q, "k": kv, "v": kv, "o": self.dim}

    def matrix_bytes(self, type: BlockType) -> int:
        """Returns the bytes of the matrices, which all have ``dim`` columns."""
        return sum(self.rows.values()) * type.row_bytes(self.dim)

    def kv_bytes(self, positions: int) -> int:
        """Returns the bytes of float16 keys and values."""
        return 2 * 2 * positions * self.kv_heads * _HEAD_DIM


class Layer:
    """One layer's weights, for each of ``LAYER_KINDS`` in hardware.py and a head, and its caches. The weights
    are zeros; biases and thresholds make all neurons active, so kernels run as those of a model do."""

    def __init__(
        self, backend: Backend, shape: LayerShape, type: BlockType, positions: Sequence[int]
    ) -> None:
        """``positions``: the sizes of the caches."""
        self.backend, self.shape, self.type = backend, shape, type
        dim, heads = shape.dim, {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
        self._matrices = {name: backend.matrix(self._zeros(rows, dim)) for name, rows in shape.rows.items()}
        self._caches = {
            n: [backend.zeros((-(-n // PAGE), shape.kv_heads, PAGE, _HEAD_DIM), np.float16) for _ in range(2)]
            for n in positions
        }
        self._norm = Norm(backend.zeros((dim,)), None, 1e-5)
        cos, sin = (backend.zeros((max(positions), _HEAD_DIM // 2)) for _ in range(2))
        self._rope = RopeTable(cos, sin, interleaved=False)
        self._rows = {name: backend.zeros((1, n, _HEAD_DIM)) for name, n in heads.items()}
        self._x, self._normed = (backend.zeros((1, dim)) for _ in range(2))
        self._mixed = backend.zeros((1, shape.heads, _HEAD_DIM))
        self._stats = FFNStats(backend.zeros((1, len(FFN_COUNTS)), np.int64))
        self._ffns = {kind: self._ffn_weights(kind) for kind in ("dense", "exact", "experts")}
        self._ffns["predicted"] = self._ffns["exact"]
        first, second = self._zeros(_RANK, dim), self._zeros(_NEURONS, _RANK)
        always = np.full(_NEURONS, -np.inf, np.float32)
        self._predictor = backend.predictor_weights(PredictorTensors(first, second, always, relu=True))
        self._mask = backend.zeros((1, 1), np.uint64)
        self._router, self._head = (backend.matrix(self._zeros(rows, dim)) for rows in (_EXPERTS, _NEURONS))
        self._logits = backend.zeros((1, _NEURONS))
        self._chosen = Chosen(backend.zeros((1, _CHOSEN), np.int32), backend.zeros((1, _CHOSEN)))

    def _zeros(self, rows: int, columns: int) -> Tensor:
        return Tensor(self.type, (rows, columns), np.zeros((rows, self.type.row_bytes(columns)), np.uint8))

    def _ffn_weights(self, kind: str) -> FFNWeights:
        experts, chosen = (_EXPERTS, _CHOSEN) if kind == "experts" else (1, 1)
        up = self._zeros(experts * _NEURONS, self.shape.dim)
        down = up if kind == "exact" else self._zeros(experts * self.shape.dim, _NEURONS)
        layout, activation = ("by_neuron", "relu") if kind == "exact" else ("by_output", "silu")
        bias = np.ones(_NEURONS, np.float32) if kind == "exact" else None
        tensors = FFNTensors(
            up, up, down, layout, activation, gate_bias=bias, up_bias=bias, experts=experts, chosen=chosen
        )
        return self.backend.ffn_weights(tensors)

    def read(self, kind: str) -> Mapping[str, int]:
        """Returns the bytes that a kind of layer reads, by kernel, without keys and values."""
        row_bytes = self.type.row_bytes(self.shape.dim)
        if kind == HEAD:
            return {"matrix": _NEURONS * row_bytes}
        matrices = {"predicted": _RANK, "experts": _EXPERTS}.get(kind, 0)
        rows = {
            "dense": {"stream": 3},
            "exact": {"stream": 1, "rows": 1, "down": 1},
            "predicted": {"rows": 2, "down": 1},
            "experts": {"stream": 3 * _CHOSEN},
        }[kind]
        ffn = {kernel: n * _NEURONS * row_bytes for kernel, n in rows.items()}
        return {"matrix": self.shape.matrix_bytes(self.type) + matrices * row_bytes, **ffn}

    def run(self, kind: str, batch: Batch, positions: int) -> None:
        """Computes a token's ops in the order of models, with the cache of this size."""
        if kind == HEAD:
            return self._compute_head(batch)
        ops, (q, k, v), x, normed = self.backend, self._rows.values(), self._x, self._normed
        k_cache, v_cache = self._caches[positions]
        ops.norm(x, self._norm, batch, normed)
        ops.linear(normed, [self._matrices[name] for name in "qkv"], batch, [q, k, v])
        for rows in (q, k):
            ops.rope(rows, self._rope, batch)
        ops.store_kv(k, v, batch, k_cache, v_cache)
        ops.attention(AttentionCall(q, k_cache, v_cache, batch, self._mixed, _HEAD_DIM**-0.5))
        ops.linear(self._mixed, [self._matrices["o"]], batch, [x], accumulate=True)
        ops.norm(x, self._norm, batch, normed)
        call = FFNCall(
            normed, self._ffns[kind], batch, x, skip=kind in ("exact", "predicted"), accumulate=True
        )
        if kind != "dense":
            call = replace(call, stats=self._stats)
        if kind == "predicted":
            ops.predict(x, self._predictor, batch, self._mask)
            call = replace(call, mask=self._mask)
        if kind == "experts":
            self._choose(batch)
            call = replace(call, chosen=self._chosen)
        ops.ffn(call)

    def _compute_head(self, batch: Batch) -> None:
        self.backend.gather(self._x, batch, self._normed)
        self.backend.norm(self._normed, self._norm, batch, self._normed, Rows.LOGITS)
        self.backend.linear(self._normed, [self._head], batch, [self._logits], rows=Rows.LOGITS)

    def _choose(self, batch: Batch) -> None:
        ids, factors = self._chosen.ids, self._chosen.factors
        router = RouterCall(
            self._normed,
            self._router,
            batch,
            ids,
            factors,
            k=_CHOSEN,
            score="softmax",
            normalise=True,
            scale=1.0,
        )
        self.backend.router(router)
