"""Values that ops take: one for each call of the widest ops, and records of the buffers in them.

See :class:`hotcold.kernels.backend.Backend`. T tokens, D model dim, H heads, N neurons, E experts."""

from dataclasses import KW_ONLY, dataclass

from hotcold.kernels.arrays import Buffer
from hotcold.kernels.batch import Batch
from hotcold.kernels.weights import FFNWeights, Matrix

ROUTER_SCORES = ("softmax", "sigmoid")
MAX_CHOSEN = 32  #: experts of one token
MAX_EXPERT_GROUPS = 64

#: The counts of :class:`FFNStats`, in order; csrc/ops/arguments.h has the same names.
FFN_COUNTS = ("gate_rows", "up_rows", "down_rows", "pairs", "runs")


@dataclass(frozen=True)
class Norm:
    """RMSNorm (``bias`` None, ``centre`` False) or LayerNorm (``centre`` True), over the last axis.

    A weight ``[G, n]`` normalises each group of n of a row's ``G * n`` values on its own (Mamba-2, arXiv
    2405.21060); without a weight nothing is multiplied (the values of Gemma 4)."""

    weight: Buffer | None  # [D] or [G, n] float32
    bias: Buffer | None  # of the weight's shape, float32
    eps: float
    centre: bool = False


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines by position: ``[P, rotary_dim / 2]`` float32 each. ``interleaved`` rotates pairs (2i,
    2i+1), as GGUF's ``llama`` has them; otherwise (i, i + rotary_dim / 2)."""

    cos: Buffer
    sin: Buffer
    interleaved: bool


@dataclass(frozen=True)
class FFNStats:
    """Where the FFN op counts its work, in steps that hold no prompt row: numbers in the order of
    :data:`FFN_COUNTS` are added to ``counts[row]``.

    They are the gate, up and down rows read, the (token, neuron) pairs whose down row was added, and the runs
    of :func:`scale_run` neurons with such a row, where down is in panels. A row that serves several tokens of
    a step is read once. Without a gate the up rows count as gate rows."""

    counts: Buffer  # [L, len(FFN_COUNTS)] int64, of the backend that computes
    row: int = 0


@dataclass(frozen=True)
class Chosen:
    """The experts that each row chose, as :meth:`Backend.router` writes them."""

    ids: Buffer  # [T, k] int32, ascending in each row
    factors: Buffer  # [T, k] float32


@dataclass(frozen=True)
class ExpertGroups:
    """Groups of neighbouring experts, some of which a token chooses first (DeepSeek, arXiv 2405.04434)."""

    count: int
    used: int  #: by a token
    best: int = 2  #: a group ranks by its largest rank, or by the sum of its two largest


@dataclass(frozen=True)
class FFNCall:
    """``out[t] (+)= down(act(gate x) * up x)``; x, out ``[T, D]``. See :meth:`Backend.ffn`."""

    x: Buffer
    weights: FFNWeights
    batch: Batch
    out: Buffer
    _: KW_ONLY
    skip: bool  #: decode rows read no further row of an inactive neuron
    #: ``[T, words or more]`` uint64: the candidates of decode rows, in the first words; None: all neurons
    mask: Buffer | None = None
    active: Buffer | None = None  #: ``[T, words]`` uint64, gets the neurons with a coefficient that is not 0
    stats: FFNStats | None = None
    accumulate: bool = False
    chosen: Chosen | None = None  #: needed where there are several experts, allowed where there is one
    #: ``[T, N]``: gates that were computed before, for weights without a gate and without experts
    gates: Buffer | None = None
    #: ``[T, words]`` uint64, gets the neurons of decode rows with the largest coefficients
    strongest: Buffer | None = None


@dataclass(frozen=True)
class RouterCall:
    """A choice of k of E experts for each row. See :meth:`Backend.router`."""

    x: Buffer  # [T, D]
    weights: Matrix  # (E, D)
    batch: Batch
    ids: Buffer  # [T, k] int32, gets the experts, ascending
    factors: Buffer  # [T, k] float32, gets their factors
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
    """Causal attention of q ``[T, H, head_dim]`` over a paged cache. See :meth:`Backend.attention`."""

    q: Buffer
    k_cache: Buffer
    v_cache: Buffer
    batch: Batch
    out: Buffer
    scale: float  #: of scores
    _: KW_ONLY
    window: int | None = None  #: positions that a row sees, its own included; None: all up to its own
    chunked: bool = False  #: a row sees positions from the last multiple of the window on (Llama 4)
    sinks: Buffer | None = None  # [H] float32
    softcap: float | None = None  #: bound of scores


@dataclass(frozen=True)
class DeltaCall:
    """A gated delta rule. See :meth:`StateOps.gated_delta`."""

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
    """A scan of Mamba-2. See :meth:`StateOps.ssm_scan`."""

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
    """A step of RWKV-7's recurrence. See :meth:`StateOps.wkv7`."""

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
    first: Buffer | None = None  #: with ``share``; without the two v stays as it is
    share: Buffer | None = None
    eps: float
