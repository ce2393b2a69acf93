"""The specification of the FFN op and its predictors, with and without experts; fitting uses it, too."""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hotcold.kernels.backend import (
    FFN_COUNTS,
    FFNTensors,
    Floats,
    Ints,
    Masks,
    is_dense,
    mask_words,
    panel_bytes,
    scale_run,
)
from hotcold.kernels.numpy_matrix import ReferenceMatrix

Bools = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]


def pack_mask(active: Bools) -> Masks:
    """Packs ``[..., N]`` booleans into ``[..., ceil(N / 64)]`` words: bit i of word j is element 64 j + i."""
    padding = -active.shape[-1] % 64
    padded = np.pad(active, [(0, 0)] * (active.ndim - 1) + [(0, padding)])
    packed: Masks = np.packbits(padded, axis=-1, bitorder="little").view("<u8").astype(np.uint64)
    return packed


def unpack_mask(mask: Masks, n: int) -> Bools:
    """Returns the first ``n`` bits of each row of words, in the order of :func:`pack_mask`."""
    words = np.ascontiguousarray(mask, dtype="<u8")
    return np.unpackbits(words.view(np.uint8), axis=-1, count=n, bitorder="little").astype(np.bool_)


@dataclass(frozen=True)
class ReferenceFFN:
    """Weights of an FFN or one expert; :meth:`coefficients` and :meth:`down_sum` are the op's halves."""

    gate: ReferenceMatrix | None
    up: ReferenceMatrix
    down: ReferenceMatrix
    down_layout: str
    activation: str
    threshold: np.float32
    limit: np.float32
    alpha: np.float32
    down_bias: Floats | None

    @property
    def neurons(self) -> int:
        return self.up.shape[0]

    @property
    def words(self) -> int:
        return -(-self.neurons // 64)

    @property
    def gated(self) -> bool:
        return self.gate is not None

    @property
    def parts(self) -> tuple["ReferenceFFN", ...]:
        """The FFN itself, as its only part: see :class:`ReferenceExperts`."""
        return (self,)

    @property
    def experts(self) -> int:
        return 1

    @property
    def chosen(self) -> int:
        return 1

    @property
    def nbytes(self) -> int:
        bias = 0 if self.down_bias is None else self.down_bias.nbytes
        return (self.gate.nbytes if self.gate else 0) + self.up.nbytes + self.down.nbytes + bias

    @property
    def dense(self) -> bool:
        return is_dense(self.down_layout, self.down.tensor.type, self.activation)

    @property
    def runs(self) -> int:
        """Number of runs of neurons that share scales: down by output, quantised, and summed by neuron."""
        panels = self.down_layout == "by_output" and not self.dense and self.down.quantised
        return self.neurons // scale_run(self.down.tensor.type) if panels else 0

    @property
    def row_bytes(self) -> tuple[int, int, int, int]:
        parts = (self.gate, self.up, self.down)
        gate, up, down = (m.tensor.nbytes // self.neurons if m else 0 for m in parts)
        panels = panel_bytes(self.down.tensor.type, self.down.shape[0]) if self.runs else (down, 0)
        return gate, up, *panels

    def coefficients(
        self, x: Floats, gates: Floats | None = None, math: str = "same", decode: int = 0
    ) -> tuple[Bools, Floats]:
        """Returns the neurons with active gates, and the coefficients of their down rows; both ``[T, N]``, as
        are precomputed ``gates``. ``math``: for the rows after the first ``decode``."""
        up = self.up.dot(x, math, decode)
        if gates is not None:
            return activated(self, gates, up)
        if self.gate is None:
            return activated(self, up, None)
        return activated(self, self.gate.dot(x, math, decode), up)

    def down_sum(self, coefficients: Floats, math: str = "same", decode: int = 0) -> Floats:
        """Maps ``[T, N]`` to ``[T, D]``, with the bias, in any order.

        Other backends add rows by neuron in an order that only the shape determines: neither threads nor the
        batch change a bit. The neurons are cut into ``R = min(max(W // 2, 1), L)`` leaves. W is the number of
        64-bit words of their mask. ``L = ceil(64 / k)``, with k experts for a token, 1 without experts. Leaf
        r has words ``[W * r // R, W * (r + 1) // R)``; its sum starts at +0 and adds its neurons' rows,
        ascending. A binary tree sums the leaves: neighbours (0 and 1, 2 and 3, ...), then neighbouring pairs,
        and so on. A last leaf without a neighbour goes up unchanged, as does a sum whose neighbour is
        empty."""
        if self.dense:
            y = self.down.dot(coefficients, math, decode)
        else:
            y = coefficients @ (self.down.values if self.down_layout == "by_neuron" else self.down.values.T)
        return y if self.down_bias is None else y + self.down_bias

    def count(self, candidates: Bools, gated: Bools, added: Bools) -> Counts:
        """Counts the reads of a step, in the order of ``FFN_COUNTS``. Rows are unions over the step's tokens;
        pairs are counted per token. All ``[T, N]``."""
        if not len(candidates):
            return np.zeros(len(FFN_COUNTS), np.int64)
        rows = (candidates, gated if self.gate else candidates[:0], added)
        read = [int(which.any(axis=0).sum()) for which in rows]
        if self.dense:
            read = [self.neurons, self.neurons if self.gate else 0, self.neurons]
        runs = int(added.any(axis=0).reshape(self.runs, -1).any(axis=1).sum()) if self.runs else 0
        return np.array((*read, int(added.sum()), runs))


@dataclass(frozen=True)
class ReferenceExperts:
    """Experts of a layer: an FFN each, or None for an expert without neurons, which only adds its bias."""

    parts: tuple[ReferenceFFN | None, ...]
    down_bias: Floats | None  # [E, D]
    chosen: int

    @property
    def some(self) -> list[ReferenceFFN]:
        return [part for part in self.parts if part is not None]

    @property
    def experts(self) -> int:
        return len(self.parts)

    @property
    def dense(self) -> bool:
        """False, since experts are summed one by one: down is never a dot over all neurons of the FFN."""
        return False

    @property
    def activation(self) -> str:
        return self.some[0].activation

    @property
    def gated(self) -> bool:
        return self.some[0].gated

    @property
    def up(self) -> ReferenceMatrix:
        return self.some[0].up

    @property
    def neurons(self) -> int:
        return sum(part.neurons for part in self.some)

    @property
    def words(self) -> int:
        return sum(part.words for part in self.some)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.some)

    @property
    def runs(self) -> int:
        return sum(part.runs for part in self.some)

    @property
    def row_bytes(self) -> tuple[int, int, int, int]:
        return self.some[0].row_bytes


def ffn_weights(tensors: FFNTensors) -> ReferenceFFN | ReferenceExperts:
    gate, up = None if tensors.gate is None else tensors.gate.load(), tensors.up.load()
    bias = tensors.down_bias
    by_output = tensors.down_layout == "by_output"
    downs = dict(tensors.expert_downs()) if by_output else {0: tensors.down.load()}

    def part(rows: slice, bias: Floats | None) -> ReferenceFFN:
        down = downs[rows.start].load() if by_output else downs[0].load().take_rows(rows)
        return ReferenceFFN(
            gate=ReferenceMatrix(gate.take_rows(rows), _part(tensors.gate_bias, rows)) if gate else None,
            up=ReferenceMatrix(up.take_rows(rows), _part(tensors.up_bias, rows)),
            down=ReferenceMatrix(down),
            down_layout=tensors.down_layout,
            activation=tensors.activation,
            threshold=np.float32(tensors.threshold),
            limit=np.float32(tensors.limit),
            alpha=np.float32(tensors.alpha),
            down_bias=bias,
        )

    if tensors.experts == 1:
        return part(slice(0, None), bias)
    parts: list[ReferenceFFN | None] = []
    for expert, (first, end) in enumerate(pairwise((0, *tensors.ends))):
        if end == first:
            parts.append(None)
            continue
        expert_bias = None if bias is None else bias[expert]
        parts.append(part(slice(first, end), expert_bias))
    return ReferenceExperts(tuple(parts), bias, tensors.chosen)


def _part(values: Floats | None, rows: slice) -> Floats | None:
    return None if values is None else values[rows]


def activated(ffn: FFNTensors | ReferenceFFN, gate: Floats, up: Floats | None) -> tuple[Bools, Floats]:
    """Returns which gates are active, and the coefficients of their down rows, from the results of gate and
    up rows. All are ``[T, N]``. Without a gate, up takes its place, and the coefficient is ``act(up)``."""
    active_gates, value = gate > np.float32(ffn.threshold), np.float32(1) if up is None else up
    if ffn.activation == "relu":
        return active_gates, np.where(active_gates, gate * value, np.float32(0))
    if ffn.activation == "drelu":  # TurboSparse, arXiv 2406.05955: relu(gate) * relu(up)
        return active_gates, np.where(active_gates & (value > 0), gate * value, np.float32(0))
    if ffn.activation == "relu2":  # Primer, arXiv 2109.08668: relu(gate)^2
        return active_gates, np.where(active_gates, gate * gate * value, np.float32(0))
    if ffn.activation == "swiglu_oai":  # gpt-oss, like its published PyTorch code
        limit, alpha = np.float32(ffn.limit), np.float32(ffn.alpha)
        gate, value = np.minimum(gate, limit), np.clip(value, -limit, limit)
        return np.ones_like(active_gates), gate * sigmoid(alpha * gate) * (value + np.float32(1))
    return np.ones_like(active_gates), _smooth(ffn.activation, gate) * value


@dataclass(frozen=True)
class FFNStep:
    """Arguments of one step of the FFN op, as NumPy arrays of the step's rows."""

    x: Floats  # [T, D]
    n_decode: int
    skip: bool
    mask: Masks | None  # [n_decode, words]
    ids: Ints | None  # [T, k]
    factors: Floats | None  # [T, k]
    gates: Floats | None = None  # [T, N]
    math: str = "same"  # of prompt rows

    def run(self, w: ReferenceFFN | ReferenceExperts) -> tuple[Floats, tuple[Masks, Masks], Counts]:
        """Returns ``y`` ``[T, D]``, masks ``[n_decode, words]`` of active and strongest neurons, counts."""
        y, counts = np.zeros_like(self.x), np.zeros(len(FFN_COUNTS), np.int64)
        active, strongest = np.zeros((2, self.n_decode, w.words), np.uint64)
        if self.ids is not None:
            check_ids(self.ids, len(w.parts))
        word = 0
        for expert, part in enumerate(w.parts):
            rows, factors = self._rows_of(expert)
            if part is None:
                bias = w.down_bias
                y[rows] += factors * (np.float32(0) if bias is None else bias[expert])
                continue
            words = slice(word, word + part.words)
            word = words.stop
            decode = rows[rows < self.n_decode]
            candidates = np.ones((len(decode), part.neurons), np.bool_)
            if self.mask is not None:
                candidates = unpack_mask(self.mask[decode, words], part.neurons)
            gates = None if self.gates is None else self.gates[rows]
            active_gates, coefficients = part.coefficients(self.x[rows], gates, self.math, len(decode))
            active_gates, decoded = active_gates[: len(decode)], coefficients[: len(decode)]
            decoded[~candidates] = 0
            active[decode, words] = pack_mask(decoded != 0)
            strongest[decode, words] = pack_mask(strongest_of(decoded))
            gated, added = (
                (candidates & active_gates, decoded != 0) if self.skip else (candidates, candidates)
            )
            if gates is not None:  # up rows are read first, for active gates only
                candidates, gated = gated, candidates[:0]
            counts += part.count(candidates, gated, added)
            y[rows] += factors * part.down_sum(coefficients, self.math, len(decode))
        return y, (active, strongest), counts

    def _rows_of(self, expert: int) -> tuple[Ints, Floats]:
        """Returns the rows that chose an expert, and their factors ``[rows, 1]``."""
        if self.ids is None or self.factors is None:
            return np.arange(len(self.x), dtype=np.int32), np.ones((len(self.x), 1), np.float32)
        rows, places = np.nonzero(self.ids == expert)
        return rows.astype(np.int32), self.factors[rows, places][:, None]


def strongest_of(coefficients: Floats) -> Bools:
    """Marks the largest tenth of each row ``[T, N]`` by magnitude, with ties, but never zeros. As unsigned
    integers, bits of magnitudes have the magnitudes' order, with NaN above infinity."""
    sizes = np.ascontiguousarray(coefficients, np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)
    n = sizes.shape[1]
    first = n - -(-n // 10)
    least = np.partition(sizes, first, axis=1)[:, first : first + 1]
    strongest: Bools = (sizes >= least) & (sizes > 0)
    return strongest


def check_ids(ids: Ints, experts: int) -> None:
    for row, choice in enumerate(ids):
        for rank, expert in enumerate(choice):
            if not 0 <= expert < experts:
                got = f"expert {expert} of row {row} is out of range"
                raise ValueError(f"{got}; allowed: 0 to {experts - 1}")
            if rank and expert <= choice[rank - 1]:
                got = f"expert {expert} of row {row} follows {choice[rank - 1]}"
                raise ValueError(f"{got}: a row's experts must ascend")


def sigmoid(x: Floats) -> Floats:
    one = np.float32(1)
    with np.errstate(over="ignore"):
        y: Floats = one / (one + np.exp(-x))
    return y


def _smooth(activation: str, gate: Floats) -> Floats:
    """Returns SiLU or GELU (arXiv 1606.08415): exact, or in the tanh form that ggml's ``gelu`` computes."""
    half, root, cubic = (np.float32(c) for c in (0.5, np.sqrt(2 / np.pi), 0.044715))
    if activation == "silu":
        factor = sigmoid(gate)
    elif activation == "gelu_erf":
        factor = half * _ERFC(-gate / np.sqrt(2))
    else:
        with np.errstate(over="ignore"):
            factor = half * (1 + np.tanh(root * gate * (1 + cubic * gate * gate)))
    smooth: Floats = np.multiply(gate, factor, dtype=np.float32)
    return smooth


_ERFC = np.vectorize(math.erfc, otypes=[np.float32])


@dataclass(frozen=True)
class ReferencePredictor:
    """Factors of a predictor: a neuron is a candidate where its score is at least its threshold."""

    first: ReferenceMatrix
    second: ReferenceMatrix
    threshold: Floats
    relu: bool
    ends: tuple[int, ...]
    chosen: int

    @property
    def nbytes(self) -> int:
        return self.first.nbytes + self.second.nbytes + self.threshold.nbytes

    def scores(self, x: Floats) -> Floats:
        """Maps ``[T, D]`` to ``[T, N]``."""
        hidden = self.first.dot(x)
        return self.second.dot(np.maximum(hidden, 0) if self.relu else hidden)

    def mark(self, x: Floats, mask: Masks, ids: Ints | None) -> None:
        """Sets candidates in rows of a mask ``[T, words]``, of the experts that ``ids`` ``[T, k]`` name."""
        if ids is not None:
            check_ids(ids, len(self.ends))
        active = self.scores(x) >= self.threshold
        words = mask_words(self.ends)
        for expert, (first, end) in enumerate(pairwise((0, *self.ends))):
            rows = slice(None) if ids is None else np.flatnonzero((ids == expert).any(axis=1))
            mask[rows, words[expert] : words[expert + 1]] = pack_mask(active[rows, first:end])
