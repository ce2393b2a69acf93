"""Arguments of the widest ops as values: a class for each op, and records of the buffers in them.

See :class:`hotcold.kernels.backend.Backend`. T tokens, D model dim, H heads, N neurons, E experts."""

from dataclasses import KW_ONLY, dataclass

from hotcold.kernels.arrays import Buffer
from hotcold.kernels.batch import Batch
from hotcold.kernels.weights import FFNWeights, Matrix

ROUTER_SCORES = ("softmax", "sigmoid")
MAX_CHOSEN = 32  #: experts of one token
MAX_EXPERT_GROUPS = 64

#: Counts of :class:`FFNStats`, in order; csrc/ops/arguments.h has the same names.
FFN_COUNTS = ("gate_rows", "up_rows", "down_rows", "pairs", "runs")


@dataclass(frozen=True)
class Norm:
    """RMSNorm (``bias`` None, ``centre`` False) or LayerNorm (``centre`` True), over the last axis.

    A weight ``[G, n]`` normalises each group of n of a row's ``G * n`` values separately (Mamba-2, arXiv
    2405.21060). None: no multiplication (the values of Gemma 4)."""

    weight: Buffer | None  # [D] or [G, n] float32
    bias: Buffer | None  # of the weight's shape, float32
    eps: float
    centre: bool = False


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines by position: ``[P, rotary_dim / 2]`` float32 each. ``interleaved`` rotates pairs (2i,
    2i+1), like GGUF's ``llama``; otherwise (i, i + rotary_dim / 2)."""

    cos: Buffer
    sin: Buffer
    interleaved: bool


@dataclass(frozen=True)
class FFNStats:
    """Where the FFN op counts its work, in steps without prompt rows: it adds numbers in the order of
    :data:`FFN_COUNTS` to ``counts[row]``.

    They are the gate, up and down rows read, and the (token, neuron) pairs whose down row was added. For down
    in panels they also are the runs of :func:`scale_run` neurons with such a row. A row that serves several
    tokens of a step is read once. Without a gate the up rows count as gate rows."""

    counts: Buffer  # [L, len(FFN_COUNTS)] int64, of the backend that computes
    row: int = 0


@dataclass(frozen=True)
class Chosen:
    """Experts that each row chose, as :meth:`Backend.router` writes them."""

    ids: Buffer  # [T, k] int32, ascending in each row
    factors: Buffer  # [T, k] float32


@dataclass(frozen=True)
class ExpertGroups:
    """Groups of neighbouring experts; a token first chooses groups (DeepSeek, arXiv 2405.04434)."""

    count: int
    used: int  #: groups that a token uses
    best: int = 2  #: experts whose ranks a group's rank sums: its best one or two


@dataclass(frozen=True)
class FFNCall:
    """Arguments of :meth:`Backend.ffn`: ``out[t] (+)= down(act(gate x) * up x)``; x, out ``[T, D]``."""

    x: Buffer
    weights: FFNWeights
    batch: Batch
    out: Buffer
    _: KW_ONLY
    skip: bool  #: decode rows read no up or down row of an inactive neuron
    #: ``[T, words or more]`` uint64: candidates of decode rows, in the first words; None: all neurons
    mask: Buffer | None = None
    active: Buffer | None = None  #: ``[T, words]`` uint64, output: neurons with a non-zero coefficient
    stats: FFNStats | None = None
    accumulate: bool = False
    chosen: Chosen | None = None  #: required with several experts, allowed with one
    #: ``[T, N]``: precomputed gates, for weights without a gate and without experts
    gates: Buffer | None = None
    #: ``[T, words]`` uint64, output: neurons of decode rows with the largest coefficients
    strongest: Buffer | None = None


@dataclass(frozen=True)
class RouterCall:
    """Arguments of :meth:`Backend.router`: chooses k of E experts for each row."""

    x: Buffer  # [T, D]
    weights: Matrix  # (E, D)
    batch: Batch
    ids: Buffer  # [T, k] int32, output: experts, ascending
    factors: Buffer  # [T, k] float32, output: their factors
    _: KW_ONLY
    k: int
    score: str  #: one of :data:`ROUTER_SCORES`
    selection_bias: Buffer | None = None  # [E] float32
    normalise: bool
    scale: float
    expert_scale: Buffer | None = None  # [E] float32
    groups: ExpertGroups | None = None


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of :meth:`Backend.attention`: q ``[T, H, head_dim]`` over a paged cache."""

    q: Buffer
    k_cache: Buffer
    v_cache: Buffer
    batch: Batch
    out: Buffer
    scale: float  #: of scores
    _: KW_ONLY
    window: int | None = None  #: positions that a row attends to, its own included; None: all up to its own
    chunked: bool = False  #: a row attends to positions from the last multiple of the window on (Llama 4)
    sinks: Buffer | None = None  # [H] float32
    softcap: float | None = None  #: bound of scores


@dataclass(frozen=True)
class DeltaCall:
    """Arguments of :meth:`StateOps.gated_delta`."""

    mixed: Buffer  # [T, 2 * Hk * dk + Hv * dv]: all q, then all k, then all v
    decay: Buffer  # [T, Hv] or [T, Hv, dk]
    beta: Buffer  # [T, Hv]
    batch: Batch
    state: Buffer  # [slots, Hv, dk, dv]
    out: Buffer  # [T, Hv, dv]
    _: KW_ONLY
    keys: int  #: Hk, a divisor of Hv
    key_dim: int  #: dk
    tiled: bool  #: v head h reads the k head ``h % Hk``, else ``h // (Hv / Hk)``
    eps: float


@dataclass(frozen=True)
class ScanCall:
    """Arguments of :meth:`StateOps.ssm_scan`."""

    mixed: Buffer  # [T, H * p + 2 * G * n]: x of all heads, B of all groups, C of all groups
    dt: Buffer  # [T, H]
    dt_bias: Buffer  # [H]
    a: Buffer  # [H], below 0
    d: Buffer  # [H]
    batch: Batch
    state: Buffer  # [slots, H, p, n]
    out: Buffer  # [T, H, p]
    _: KW_ONLY
    groups: int  #: G, a divisor of H


@dataclass(frozen=True)
class Wkv7Call:
    """Arguments of :meth:`StateOps.wkv7`."""

    r: Buffer  # [T, H, d], as are k, v, decay, rate, out, first and share
    k: Buffer
    v: Buffer
    decay: Buffer
    rate: Buffer
    vectors: Buffer  # [5, H * d]: kappa, alpha, bonus, weight, bias
    batch: Batch
    state: Buffer  # [slots, H, d, d]
    out: Buffer
    _: KW_ONLY
    first: Buffer | None = None  #: with ``share``; without both v is unchanged
    share: Buffer | None = None
    eps: float
