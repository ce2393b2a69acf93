"""Checks of weights and arguments that all backends share, so that all report the same errors."""

import math
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from hotcold.formats.stored import AnyTensor
from hotcold.formats.words import ACTIVATIONS, DOWN_LAYOUTS, MAX_EXPERTS
from hotcold.kernels.backend import (
    GATED_ACTIVATIONS,
    MAX_CHOSEN,
    MAX_EXPERT_GROUPS,
    ROUTER_SCORES,
    SPARSE_ACTIVATIONS,
    AttentionCall,
    Buffer,
    Chosen,
    ExpertGroups,
    ExpertSlots,
    FFNCall,
    FFNStats,
    FFNTensors,
    Floats,
    HotRows,
    Ints,
    PredictorTensors,
    RouterCall,
    Rows,
)
from hotcold.kernels.state_ops import (
    CONV_ACTIVATIONS,
    GATE_ACTIVATIONS,
    MOST_MIXES,
    MOST_TAPS,
    PLAIN_ACTIVATIONS,
)

_W = TypeVar("_W")


def own_weights(weights: object, kind: type[_W]) -> _W:
    """Returns the weights. TypeError: another backend made them."""
    if not isinstance(weights, kind):
        raise TypeError(f"weights of {type(weights).__name__}: weights made by this backend are needed")
    return weights


class _FFNFacts(Protocol):
    @property
    def activation(self) -> str: ...
    @property
    def experts(self) -> int: ...
    @property
    def gated(self) -> bool: ...
    @property
    def dense(self) -> bool: ...  # down is a dot over all neurons


def check_ffn_call(call: FFNCall, weights: _FFNFacts) -> None:
    """Refuses options of op ffn that its weights do not allow."""
    activation = weights.activation
    if call.skip and activation not in SPARSE_ACTIVATIONS:
        raise ValueError(f"skip with {activation!r}: only {', '.join(SPARSE_ACTIVATIONS)} give zeros")
    check_chosen(call.chosen, weights.experts)
    if call.gates is not None and (weights.gated or call.chosen is not None):
        raise ValueError("gates computed before: weights without a gate, and no experts, are needed")
    if call.strongest is not None and (not weights.dense or call.chosen is not None):
        raise ValueError("the strongest neurons: weights whose down is a dot, and no experts, are needed")


def check_where(
    where: Buffer | None, stats: FFNStats | None, weights: int, rows: Rows, *, accumulate: bool
) -> None:
    """Refuses arguments that op linear does not allow with ``where``."""
    if where is not None and (weights > 1 or accumulate or rows != Rows.TOKENS):
        raise ValueError("linear: where is for one weight and all rows, without accumulate")
    if stats is not None and where is None:
        raise ValueError("linear: rows are counted by where")


def check_write(values: npt.NDArray[Any], row: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Refuses values that do not fit the buffer from this row on."""
    if values.dtype != dtype:
        raise TypeError(f"values of {values.dtype}: this buffer holds {dtype}")
    most = shape[0] - row
    if values.shape[1:] != shape[1:] or len(values) > most or row < 0:
        got = f"values of shape {values.shape} from row {row} on"
        raise ValueError(f"{got}: this buffer has room for {most} rows of {shape[1:]}")


def check_read(start: int, stop: int | None, rows: int) -> int:
    """Returns the end of a range of rows; refuses rows that the buffer does not have."""
    end = rows if stop is None else stop
    if not 0 <= start <= end <= rows:
        raise ValueError(f"rows {start} to {stop} of a buffer that has {rows}")
    return end


def check_matrix(tensor: AnyTensor, bias: Floats | None = None) -> None:
    if len(tensor.shape) != 2:
        raise ValueError(f"matrix of shape {tensor.shape}: two dimensions (rows, columns) are needed")
    _check_vector("bias", bias, tensor.shape[0])


def check_resident(tensors: FFNTensors) -> None:
    """Refuses experts that stay in their file."""
    if tensors.residency is not None:
        raise ValueError("this backend does not read experts from the file: all must be in memory")


def check_ffn(tensors: FFNTensors) -> None:
    """Refuses shapes that do not fit, an unknown activation or layout, and a threshold without effect."""
    check_matrix(tensors.up)
    n, d = tensors.up.shape
    _check_experts("ffn", n, tensors)
    _check_residency(tensors)
    if tensors.down_layout not in DOWN_LAYOUTS:
        raise ValueError(f"down layout {tensors.down_layout!r}: choose from {', '.join(DOWN_LAYOUTS)}")
    down = (n, d) if tensors.down_layout == "by_neuron" else _by_output(tensors)
    if tensors.down.shape != down:
        raise ValueError(f"down of shape {tensors.down.shape} {tensors.down_layout}: {down} is needed")
    if tensors.gate is not None and tensors.gate.shape != (n, d):
        raise ValueError(f"gate of shape {tensors.gate.shape}: up has {(n, d)}, the two must be equal")
    check_activation(tensors.activation, tensors.threshold, gated=tensors.gate is not None)
    for name, value in (("limit", tensors.limit), ("alpha", tensors.alpha)):
        if not math.isfinite(value) or value <= 0:
            raise ValueError(f"activation {name} {value}: a finite number above 0 is needed")
    if tensors.gate is None and tensors.gate_bias is not None:
        raise ValueError("gate bias without a gate: leave it out, or give gate as well")
    _check_vector("gate bias", tensors.gate_bias, n)
    _check_vector("up bias", tensors.up_bias, n)
    _check_vector("down bias", tensors.down_bias, *((tensors.experts, d) if tensors.experts > 1 else (d,)))


def _check_residency(tensors: FFNTensors) -> None:
    match tensors.residency:
        case HotRows() if tensors.gate is None or tensors.gate_bias is not None:
            raise ValueError("cold neurons stay in the file only of experts with gates without a bias")
        case ExpertSlots(slots, preloaded, pinned):
            if not 2 <= slots < tensors.experts:
                got = f"slots for {slots} of {tensors.experts} experts"
                raise ValueError(f"{got}: at least 2, and fewer than all, are needed")
            if len(preloaded) > slots or not 0 <= pinned <= min(len(preloaded), slots - 2):
                got = f"{len(preloaded)} experts are preloaded and {pinned} pinned in {slots} slots"
                raise ValueError(f"{got}: as many as slots are allowed, and all but 2 pinned")


def _by_output(tensors: FFNTensors) -> tuple[int, int]:
    """Returns the required shape of down by output."""
    if tensors.down_blocks is not None:
        return _by_blocks(tensors, tensors.down_blocks)
    sizes = {end - first for first, end in pairwise((0, *tensors.ends))} - {0}
    if len(sizes) > 1:
        got = f"experts of {min(sizes)} to {max(sizes)} neurons"
        raise ValueError(f"{got} with down by_output: each must have as many, or none")
    size = max(sizes, default=0)
    experts = tensors.up.shape[0] // size if size else 0
    return experts * tensors.up.shape[1], size


def _by_blocks(tensors: FFNTensors, blocks: npt.NDArray[np.bool_]) -> tuple[int, int]:
    if tensors.activation not in SPARSE_ACTIVATIONS:
        got = f"blocks of down by output with activation {tensors.activation!r}"
        raise ValueError(f"{got}: an expert's down must be whole, or have an activation with zeros")
    size, expert_neurons = tensors.down.type.weights, np.diff((0, *tensors.ends))
    if blocks.shape[0] != tensors.experts or (blocks.sum(1) * size != expert_neurons).any():
        got = f"blocks of down {blocks.shape}, {int(blocks.sum()) * size} neurons in all"
        raise ValueError(f"{got}: each of {tensors.experts} experts needs those of its rows of up")
    return tensors.experts * tensors.up.shape[1], blocks.shape[1] * size


def _check_experts(label: str, rows: int, tensors: FFNTensors | PredictorTensors) -> None:
    experts, k, ends = tensors.experts, tensors.chosen, tensors.expert_ends
    _check_room(label, experts)
    if k > MAX_CHOSEN:
        raise ValueError(f"{label} k {k} of {experts} experts: 1 to {min(experts, MAX_CHOSEN)} are allowed")
    if experts < 1 or not 1 <= k <= experts:
        raise ValueError(f"{label} of {experts} experts, {k} chosen: 1 to all of them can be chosen")
    if ends is None:
        if rows % experts:
            raise ValueError(f"{label} of {rows} rows: not as many for each of {experts} experts")
    elif len(ends) != experts or ends[-1] != rows or any(a > b for a, b in pairwise((0, *ends))):
        raise ValueError(f"{label}: ends of experts {ends} must be {experts} and ascend to {rows}")


def _check_room(label: str, experts: int) -> None:
    if experts > MAX_EXPERTS:
        raise ValueError(f"{label} of {experts} experts: up to {MAX_EXPERTS} are allowed")


def check_chosen(chosen: Chosen | None, experts: int) -> None:
    if chosen is None and experts > 1:
        raise ValueError(f"ffn or predict with {experts} experts: chosen must say which each row takes")


def check_activation(activation: str, threshold: float, *, gated: bool) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: choose from {', '.join(ACTIVATIONS)}")
    if activation in GATED_ACTIVATIONS and not gated:
        instead = {"drelu": "relu", "swiglu_oai": "silu"}[activation]
        got = f"activation {activation!r} without a gate"
        raise ValueError(f"{got}: it multiplies gate and up; use {instead!r} instead")
    if not math.isfinite(threshold) or threshold < 0:
        raise ValueError(f"activation threshold {threshold}: a finite number of at least 0 is needed")
    if threshold and activation not in SPARSE_ACTIVATIONS:
        sparse = ", ".join(SPARSE_ACTIVATIONS)
        raise ValueError(f"activation threshold {threshold} with {activation!r}: use 0, or one of {sparse}")


def check_top_k(logits: Buffer, row: int, k: int, bias: tuple[Ints, Floats] | None) -> None:
    """Refuses arguments that :meth:`Backend.top_k` cannot rank; for buffers that are NumPy arrays."""
    if logits.dtype != np.float32 or logits.ndim != 2:
        got = f"{logits.dtype} of shape {logits.shape}"
        raise TypeError(f"logits are {got}: float32 [R, V] is needed")
    if not 0 <= row < len(logits):
        raise ValueError(f"row {row} of logits that have {len(logits)}")
    if k < 1:
        raise ValueError(f"k is {k}: at least 1 is needed")
    if bias is not None and not (bias[0].dtype == np.int32 and bias[1].dtype == np.float32):
        raise TypeError(f"bias is {bias[0].dtype} and {bias[1].dtype}: int32 ids and float32 are needed")
    if bias is not None and (bias[0].shape != bias[1].shape or bias[0].ndim != 1):
        raise ValueError(f"bias has ids of shape {bias[0].shape} and values of {bias[1].shape}")
    if bias is not None and len(bias[0]):
        ids = bias[0].tolist()  # few ids: faster than NumPy's minimum
        if not 0 <= min(ids) <= max(ids) < logits.shape[1]:
            got = f"bias names ids {min(ids)} to {max(ids)}"
            raise ValueError(f"{got}: 0 to {logits.shape[1] - 1} are there")


def check_softcap(cap: float, prefix: str = "") -> None:
    if not 0 < cap < math.inf:
        raise ValueError(f"{prefix}softcap {cap}: a finite number above 0 is needed")


def check_attention(call: AttentionCall, q: Buffer, sinks: Buffer | None) -> None:
    """Refuses wrong attention options; q ``[T, H, head_dim]`` and sinks have the call's shapes."""
    if call.window is not None and call.window < 1:
        raise ValueError(f"attention window {call.window}: at least 1 position is needed")
    if call.chunked and call.window is None:
        raise ValueError("attention in chunks without a window: the length of a chunk is needed")
    if call.softcap is not None:
        check_softcap(call.softcap, "attention ")
    _check_vector("attention sinks", sinks, *q.shape[1:2])


def check_router(
    call: RouterCall, experts: int, selection_bias: Buffer | None, expert_scale: Buffer | None
) -> None:
    """Refuses more experts than kernels allow, and an unknown choice; the vectors have the call's shapes."""
    k = call.k
    _check_room("router", experts)
    if not 1 <= k <= min(experts, MAX_CHOSEN):
        raise ValueError(f"router k {k} of {experts} experts: 1 to {min(experts, MAX_CHOSEN)} are allowed")
    _check_choice("router score", call.score, ROUTER_SCORES)
    _check_vector("router selection bias", selection_bias, experts)
    _check_vector("router expert scale", expert_scale, experts)
    if call.groups is not None and (wrong := wrong_groups(experts, k, call.groups)):
        raise ValueError(f"router: {wrong}")


def wrong_groups(experts: int, k: int, groups: ExpertGroups) -> str | None:
    """Describes the error in groups of experts if a token chooses k experts; None: no error."""
    count, used = groups.count, groups.used
    if not 1 <= count <= MAX_EXPERT_GROUPS or experts % count:
        return f"{experts} experts in {count} groups: a divisor of them up to {MAX_EXPERT_GROUPS} is needed"
    if not 1 <= used <= count or experts // count * used < k:
        return f"{used} of {count} groups of experts: they must hold the {k} of a token"
    return None if groups.best in (1, 2) else f"the best {groups.best} experts of a group: 1 or 2 are allowed"


def check_no_bias(op: str, bias: Buffer | None) -> None:
    if bias is not None:
        raise ValueError(f"{op}: its weights may have no bias")


def check_conv(taps: int, activation: str) -> None:
    if not 2 <= taps <= MOST_TAPS:
        raise ValueError(f"short_conv weight of {taps} columns: 2 to {MOST_TAPS} are allowed")
    _check_choice("short_conv activation", activation, CONV_ACTIVATIONS)


def check_gate(activation: str) -> None:
    _check_choice("multiply activation", activation, GATE_ACTIVATIONS)


def check_plain(activation: str) -> None:
    _check_choice("activate", activation, PLAIN_ACTIVATIONS)


def check_mixes(outs: int) -> None:
    if not 1 <= outs <= MOST_MIXES:
        raise ValueError(f"token_shift with {outs} outs: 1 to {MOST_MIXES} are allowed")


def check_blend(first: Buffer | None, share: Buffer | None) -> None:
    if (first is None) != (share is None):
        raise ValueError("wkv7: first and share are needed together, or neither")


def _check_choice(label: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{label} {value!r}: choose from {', '.join(allowed)}")


def check_parts(label: str, whole: int, parts: int) -> None:
    """Refuses a number that ``parts`` does not divide."""
    if parts < 1 or whole % parts:
        raise ValueError(f"{label}: {whole} of them cannot be shared evenly by {parts}")


def check_predictor(tensors: PredictorTensors) -> None:
    """Refuses factors whose ranks differ, and thresholds that are not one float32 per neuron."""
    check_matrix(tensors.first)
    check_matrix(tensors.second)
    if tensors.second.shape[1] != tensors.first.shape[0]:
        got = f"predictor factors {tensors.first.shape} and {tensors.second.shape}"
        raise ValueError(f"{got}: rows of the first must equal columns of the second")
    _check_vector("predictor threshold", tensors.threshold, tensors.second.shape[0])
    _check_experts("predictor", tensors.second.shape[0], tensors)


def _check_vector(label: str, values: Floats | None, *shape: int) -> None:
    if values is None:
        return
    if values.dtype != np.float32:
        raise TypeError(f"{label} is {values.dtype}: float32 is needed")
    if values.shape != shape:
        raise ValueError(f"{label} of shape {values.shape}: {shape} is needed")
    if not values.flags.c_contiguous:
        raise ValueError(f"{label} with gaps between its values: a contiguous array is needed")
