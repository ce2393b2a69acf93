"""The narrow waist: what a backend does for a model, and the arrays the two share.

A backend turns GGUF tensors into its own weights, allocates buffers, moves values in and out of them, and
offers the ops below. Ops write into the buffers they are given and read every number that changes from step
to step (how many rows, their positions, page tables) from a :class:`Batch`, so that a recorded
:class:`Program` can be run for every step.

``reference`` (NumPy) is the specification of every op; ``cpu`` (C++) is held to it by one table of tests.
Activations are float32. Shapes use T tokens, D model dim, H heads, K kv heads, N neurons, V vocab, R rank."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import BlockType, Tensor
from hotcold.formats.files import FileError
from hotcold.formats.stored import AnyTensor
from hotcold.kernels.head_ops import HeadOps
from hotcold.kernels.state_ops import StateOps

if TYPE_CHECKING:
    from hotcold.kernels._native import Link

#: A buffer of :meth:`Backend.zeros`: values ``[rows, ...]`` that only the backend's own methods see. Others
#: neither index it nor ask for its shape.
Buffer: TypeAlias = Any
Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int32]
Masks: TypeAlias = npt.NDArray[np.uint64]


class ExpertReadError(FileError):
    """An expert of a running model could not be read of its file."""


PAGE = 32  #: positions in one page of the KV cache
SPLIT = 256  #: positions that one partial of attention covers; fixed, so results do not depend on threads
DECODE_ROWS = 16  #: rows of one step that follow the decode rule, which every backend takes; some take more

#: Activations of two values, gate and up: they need a gate.
GATED_ACTIVATIONS = ("drelu", "swiglu_oai")
#: Activations under which a neuron can be exactly zero, so that skipping it is lossless.
SPARSE_ACTIVATIONS = ("relu", "drelu", "relu2")

ROUTER_SCORES = ("softmax", "sigmoid")
MAX_CHOSEN = 32  #: experts of one token
MAX_EXPERT_GROUPS = 64


class Rows(enum.IntEnum):
    """Which rows of a step an op covers."""

    TOKENS = 0  #: all ``n_tokens`` rows
    LOGITS = 1  #: the ``n_logits`` rows gathered for the head


class IndexedBy(enum.IntEnum):
    """Which of a row's numbers chooses its row of a table."""

    TOKENS = 0
    POSITIONS = 1


@dataclass(frozen=True)
class BatchLimits:
    """The most that one step may hold."""

    tokens: int  #: rows of one step
    sequences: int
    pages_per_sequence: int
    logits: int  #: rows whose logits are computed
    decode: int = DECODE_ROWS  #: rows that follow the decode rule, if ``tokens`` are as many


class Batch:
    """One step's inputs, int32, filled in place. Decode rows come first, then prompt rows.

    All of it is host memory, and one batch serves all backends of a model: :meth:`Program.run` takes what it
    needs to its device."""

    def __init__(self, limits: BatchLimits) -> None:
        def zeros(*shape: int) -> Ints:
            return np.zeros(shape, np.int32)

        self.limits = limits
        self.counts = zeros(4)  #: n_tokens, n_decode, n_logits, n_sequences
        self.tokens = zeros(limits.tokens)
        self.positions = zeros(limits.tokens)  #: of each token in its sequence
        self.sequence = zeros(limits.tokens)  #: a row of ``pages``
        self.slots = zeros(limits.tokens)  #: ``page * PAGE + offset``, where K and V go
        self.pages = zeros(limits.sequences, limits.pages_per_sequence)  #: of each sequence, in order
        self.lengths = zeros(limits.sequences)  #: positions of each sequence after this step
        self.logits_rows = zeros(limits.logits)  #: rows of the step whose logits are wanted
        # By sequence, but for the last; only ops that keep a state read them (StateOps).
        self.first_rows = zeros(limits.sequences)  #: the first row of each
        self.row_counts = zeros(limits.sequences)  #: 0 where a sequence has no row in this step
        self.state_from = zeros(limits.sequences)  #: the slot that its state is read from; -1: it is zeros
        #: by row: the slot that the state after it is written to; -1: it is not kept
        self.state_to = np.full(limits.tokens, -1, np.int32)

    def put(
        self,
        row: int,
        sequence: int,
        start: int,
        tokens: Sequence[int] | Ints,
        pages: Sequence[int],
        *,
        state_from: int = -1,
        state_to: int | Sequence[int] = -1,
    ) -> int:
        """Fills rows from ``row`` on with a sequence's tokens from its position ``start`` on, and returns the
        row after them. ``pages`` are all that the sequence has. ``state_to`` is the slot for the state after
        its last row, or those for so many of its last rows. The caller fills the rest of the batch.

        A sequence is put once a step, all of its rows at a time. Row 0 begins a step: what was there before
        has no row in it."""
        if row == 0:
            self.row_counts[:] = 0
        self.first_rows[sequence], self.row_counts[sequence] = row, len(tokens)
        self.state_from[sequence] = state_from
        self.state_to[row : row + len(tokens)] = -1
        for position, token in enumerate(tokens, start):  # for a row or two faster than arrays
            at, offset = divmod(position, PAGE)
            page = self.pages[sequence, at] = pages[at]
            self.tokens[row] = token
            self.positions[row] = position
            self.sequence[row] = sequence
            self.slots[row] = page * PAGE + offset
            row += 1
        self.lengths[sequence] = start + len(tokens)
        if isinstance(state_to, int):
            self.state_to[row - 1] = state_to
        else:
            self.state_to[row - len(state_to) : row] = state_to
        return row

    @property
    def n_tokens(self) -> int:
        return int(self.counts[0])

    @property
    def n_decode(self) -> int:
        return int(self.counts[1])

    @property
    def n_logits(self) -> int:
        return int(self.counts[2])


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
class FFNTensors:
    """One layer's FFN as a file has it. ``gate`` is None without gating; then ``up`` plays its part.

    ``down`` is ``(N, D)`` when ``down_layout`` is ``by_neuron`` and ``(D, N)`` when it is ``by_output``.
    Where the activation gives zeros, a backend makes rows by neuron of the latter too: it transposes float
    types and packs quantised ones into panels, but for types without (see :func:`is_dense`).

    Experts lie one after another: gate, up and down by neuron are ``(E * N, D)``, down by output ``(E * D,
    N)``, as GGUF's ``*_exps`` are, and biases ``[E * N]`` and ``[E, D]``. In a half of a layer experts may
    have different numbers of neurons, which ``expert_ends`` tells. By output each then has all of its neurons
    or none, and down has nothing of the latter; or down has all that the file has, and ``down_blocks`` says
    which blocks of each expert's rows are the half's, where the activation gives zeros."""

    gate: AnyTensor | None
    up: AnyTensor
    down: AnyTensor
    down_layout: str
    activation: str
    threshold: float = 0.0  #: a gate fires when it is greater than this (FATReLU, arXiv 2402.13516)
    gate_bias: Floats | None = None
    up_bias: Floats | None = None
    down_bias: Floats | None = None
    _: KW_ONLY
    limit: float = 7.0  #: of ``swiglu_oai``; the others do not read it
    alpha: float = 1.702  #: likewise
    experts: int = 1
    chosen: int = 1  #: how many experts a token chooses, k
    expert_ends: tuple[int, ...] | None = None  #: where each expert's rows of up end; None: N rows each
    down_blocks: npt.NDArray[np.bool_] | None = None  #: ``[E, blocks of a row]``; None: all
    #: how many experts lie in memory at a time; the others are read from their file when a step names them.
    #: 0: all lie in memory
    places: int = 0
    #: those of them that are read at loading, the one that is wanted most first, and how many of these keep
    #: their place
    hot_experts: tuple[int, ...] = ()
    kept: int = 0
    label: str = ""  #: says in errors of such reads which layer of which file it is

    @property
    def ends(self) -> tuple[int, ...]:
        return self.expert_ends or equal_ends(self.up.shape[0], self.experts)

    @property
    def down_nbytes(self) -> int:
        """Bytes of down, of what belongs to these experts."""
        if self.down_blocks is None:
            return self.down.nbytes
        return int(self.down_blocks.sum()) * self.up.shape[1] * self.down.type.nbytes

    def expert_downs(self) -> Iterator[tuple[int, AnyTensor]]:
        """Yields, by output, the first neuron of each expert that has any, and its down ``(D, neurons)``."""
        dim, at = self.up.shape[1], 0
        for expert, (first, end) in enumerate(pairwise((0, *self.ends))):
            blocks = None if self.down_blocks is None else self.down_blocks[expert]
            if end > first:
                down = self.down if self.experts == 1 else self.down.take_rows(slice(at, at + dim))
                if blocks is not None and not blocks.all():
                    down = down.take_columns(np.flatnonzero(blocks))
                yield first, down
            at += dim * (end > first or blocks is not None)


@dataclass(frozen=True)
class PredictorTensors:
    """``score = second @ act(first @ x)``; neuron i is a candidate when ``score[i] >= threshold[i]``.

    Experts of a layer share the first factor; their rows of the second lie one after another, ``(E * N, R)``,
    as in :class:`FFNTensors`."""

    first: Tensor  # (R, D)
    second: Tensor  # (N, R)
    threshold: Floats  # [N]
    relu: bool  #: ReLU between the factors (PowerInfer's), or nothing (a truncated SVD)
    _: KW_ONLY
    experts: int = 1
    chosen: int = 1  #: how many experts a token chooses, k
    expert_ends: tuple[int, ...] | None = None  #: where each expert's rows of the second factor end

    @property
    def ends(self) -> tuple[int, ...]:
        return self.expert_ends or equal_ends(self.second.shape[0], self.experts)


def equal_ends(rows: int, experts: int) -> tuple[int, ...]:
    """Where the rows of each of so many equal experts end."""
    return tuple(rows // experts * (expert + 1) for expert in range(experts))


def mask_words(ends: Sequence[int]) -> list[int]:
    """Where the words of each expert begin in a row of a mask, and where the last one's end: each begins at a
    whole word."""
    begins = [0]
    for first, end in pairwise((0, *ends)):
        begins.append(begins[-1] - (first - end) // 64)
    return begins


def mask_bits(ends: Sequence[int]) -> npt.NDArray[np.int64]:
    """Which bit of a row of a mask is each neuron's, ``[N]``."""
    padding = 64 * np.array(mask_words(ends)[:-1]) - np.array((0, *ends[:-1]))
    bits: npt.NDArray[np.int64] = np.arange(ends[-1]) + np.repeat(padding, np.diff((0, *ends)))
    return bits


def is_dense(down_layout: str, down: BlockType, activation: str) -> bool:
    """Whether down is a dot over all neurons, whichever of them fire: it lies by output, and the activation
    gives no zeros or nothing can be made of its blocks that lies by neuron."""
    return down_layout == "by_output" and not (activation in SPARSE_ACTIVATIONS and down.panels)


def scale_run(type: BlockType) -> int:
    """Neurons whose down weights of one output share a scale, where blocks lie along the neurons."""
    return 16 if type.name == "Q6_K" else 32


def panel_bytes(type: BlockType, dim: int) -> tuple[int, int]:
    """Bytes of one neuron's codes, and of the scales that a run shares, for blocks along the neurons."""
    bits = int(next(filter(str.isdigit, type.name)))  # ggml names a type after the bits of its codes
    header = type.nbytes - type.weights * bits // 8
    return dim * bits // 8, dim * header * scale_run(type) // type.weights


class Matrix(Protocol):
    """A weight matrix that a backend holds in its own layout."""

    @property
    def shape(self) -> tuple[int, int]: ...  # (rows, columns)
    @property
    def nbytes(self) -> int: ...


class FFNWeights(Protocol):
    """One layer's FFN in a backend's own layout."""

    @property
    def neurons(self) -> int: ...  # of all experts
    @property
    def words(self) -> int: ...  # 64-bit ones, of a row of its masks
    @property
    def nbytes(self) -> int: ...
    #: Bytes of one gate, up and down row, and of the scales that one run of down rows shares; 0 without.
    @property
    def row_bytes(self) -> tuple[int, int, int, int]: ...
    @property
    def runs(self) -> int: ...  # of down rows that share scales; 0 where each has its own


class PredictorWeights(Protocol):
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class DiskCounts:
    """Counts what was read of experts that do not lie in memory, by all steps of a backend so far."""

    hits: int = 0  #: experts that a layer of a step named and that were at hand
    misses: int = 0  #: those that were read
    nbytes: int = 0  #: read of the file
    busy_s: float = 0.0  #: of all reading threads together
    stalls: int = 0  #: how often computing waited for a read
    stall_s: float = 0.0

    def since(self, before: DiskCounts) -> DiskCounts:
        own, other = asdict(self), asdict(before)
        return DiskCounts(**{name: own[name] - other[name] for name in own})


#: The counts of :class:`FFNStats`, in order; csrc/simd/kernels.h has the same names.
FFN_COUNTS = ("gate_rows", "up_rows", "down_rows", "pairs", "runs")


@dataclass(frozen=True)
class FFNStats:
    """Where the FFN op counts what it did, in steps that hold no prompt row: numbers in the order of
    :data:`FFN_COUNTS` are added to ``counts[row]``.

    Those are gate, up and down rows read (a row that serves several tokens of a step is read once), (token,
    neuron) pairs whose down row was added, and runs of :func:`scale_run` neurons that any of those down rows
    lies in, where down lies in panels. Without a gate the up rows count as gate rows."""

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
class Mailbox:
    """The arrays that the two sides of a split layer exchange. It belongs to the hot backend and lies in host
    memory: ops of a cold backend take the arrays as they take their own buffers."""

    link: Link  #: tells each side what the other has done
    layer: int
    batch: Batch  #: of the cold side: which rows there are, and nothing else
    x: Floats  #: ``[T, D]``: the FFN's input
    mask: Masks | None  #: ``[T, words]``: candidates among the cold neurons, for decode rows
    y: Floats  #: ``[T, D]``: the cold neurons' part of the output
    chosen: Chosen | None = None  #: by the rows of a layer of experts, as arrays


class Program(Protocol):
    """A recorded sequence of ops."""

    def run(self) -> None:
        """Runs the ops on the batch as it is now; returns when all are done and their results can be read, by
        :meth:`Backend.read` or another backend's :meth:`Backend.copy`."""


@runtime_checkable
class Backend(StateOps, HeadOps, Protocol):
    """Ops outside :meth:`record` run at once; inside it they are appended to the program.

    ``out`` buffers have room for at least as many rows as the batch's limits. Every op raises ``ValueError``
    or ``TypeError`` when a buffer's dtype, shape or contiguity is not exactly right. Where an op speaks of
    rows ``[T, I]``, a buffer ``[T, H, head_dim]`` serves as rows of ``H * head_dim`` values."""

    name: str
    decode_rows: int  #: the most decode rows of a step, :data:`DECODE_ROWS` or more
    step_rows: int  #: the most rows of a step

    #: Threads of the backend's pool; None where it has none.
    @property
    def threads(self) -> int | None: ...

    #: Row counts that deserve a program of their own besides the largest one (none where ops read the count).
    program_rows: tuple[int, ...]

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Buffer: ...

    def write(self, buffer: Buffer, values: npt.NDArray[Any], row: int = 0) -> None:
        """Sets rows ``row`` to ``row + len(values)`` of a buffer. ``TypeError``: another dtype;
        ``ValueError``: rows of another shape, or more than the buffer has."""

    def read(self, buffer: Buffer, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """Rows ``start`` to ``stop`` of a buffer, which are not to be written, and valid until the next op or
        program runs."""

    def copy(self, source: Backend, values: Buffer, out: Buffer, rows: int) -> None:
        """Sets the first ``rows`` rows of ``out`` to those of ``values``, a buffer of ``source``."""

    def record(self, fn: Callable[[], None], rows: int | None = None) -> Program:
        """The ops that ``fn`` calls, as a program for steps of up to ``rows`` rows (None: as many as their
        batch's limits allow)."""

    def matrix(self, tensor: AnyTensor, bias: Floats | None = None) -> Matrix:
        """Weights ``(O, I)`` of any supported block type, with an optional bias ``[O]``."""

    def ffn_weights(self, tensors: FFNTensors) -> FFNWeights:
        """ValueError: ``tensors.places`` are asked for, and this backend has none."""

    def predictor_weights(self, tensors: PredictorTensors) -> PredictorWeights: ...

    # The two sides of a hybrid model: the hot one has mailboxes, and posts and collects; the cold one serves

    def link(self, timeout_seconds: float) -> Link:
        """How a cold side learns what this backend has posted, and answers it. A layer that is not answered
        in so many seconds is a LinkError."""

    def mailboxes(
        self, link: Link, limits: BatchLimits, dim: int, words: Mapping[int, int], experts: int = 0
    ) -> dict[int, Mailbox]:
        """Makes the mailbox of each split layer, by its number. ``words`` says how many words of cold
        neurons' mask a layer has (0: no mask), ``experts`` how many chosen experts of each row fit (0: the
        layers have none)."""

    def post(
        self, box: Mailbox, x: Buffer, mask: Buffer | None, batch: Batch, chosen: Chosen | None = None
    ) -> None:
        """Puts x ``[T, D]``, the counts of the step, what the rows chose of experts and, for decode rows, the
        last words of each row of the mask into the mailbox, and tells the cold side. Ops that follow do not
        wait for it.

        It waits first until the cold side is idle, which an interrupted step may have left at work."""

    def collect(self, box: Mailbox, batch: Batch, out: Buffer) -> None:
        """Waits for the answer, and adds it: ``out[t] += y[t]``; ``[T, D]``.

        LinkError, which names the layer: the cold side has failed or was stopped, it is in another process,
        or it gives no answer in time."""

    def serve(self, link: Link, layers: Sequence[tuple[int, Program]]) -> None:
        """Cold side: answers each layer that is posted by running its program, until the link is stopped;
        what goes wrong is told to the hot side. To be called on a thread of its own."""

    def embed(
        self,
        table: Matrix,
        batch: Batch,
        out: Buffer,
        *,
        by: IndexedBy = IndexedBy.TOKENS,
        accumulate: bool = False,
    ) -> None:
        """``out[t] (+)= table[tokens[t]]``, or by positions, as learned ones are (GPT-2's and OPT's, GGUF's
        ``position_embd``). Table ``(V, D)``, out ``[T, D]``."""

    def norm(self, x: Buffer, norm: Norm, batch: Batch, out: Buffer, rows: Rows = Rows.TOKENS) -> None:
        """Normalises the last axis of x (``[T, D]`` or ``[T, H, head_dim]``) into out; out may be x. A weight
        of ``H * head_dim`` values normalises the last two together (OLMo 2, arXiv 2501.00656); one of ``[G,
        n]`` each group of n values of a row."""

    def linear(
        self,
        x: Buffer,
        weights: Sequence[Matrix],
        batch: Batch,
        outs: Sequence[Buffer],
        *,
        accumulate: bool = False,
        rows: Rows = Rows.TOKENS,
    ) -> None:
        """``out[t] (+)= w @ x[t] + bias`` for each (w, out). x ``[T, I]``, out ``[T, O]``.

        For block types of 8 bits or fewer x is quantised to int8 per 32 values first (d = amax / 127, codes
        rounded to nearest even); that is part of the op."""

    def rope(self, x: Buffer, table: RopeTable, batch: Batch) -> None:
        """Rotates x ``[T, H, head_dim]`` in place by the rows' positions (arXiv 2104.09864)."""

    def store_kv(self, k: Buffer, v: Buffer, batch: Batch, k_cache: Buffer, v_cache: Buffer) -> None:
        """Writes k, v ``[T, K, head_dim]`` to the rows' slots of the caches, rounded to their type.

        Caches are float16 or float32 ``[page, K, PAGE, head_dim]``, or uint8 ``[page, K, PAGE, head_dim / 32
        * 34]``: blocks of GGML's Q8_0, with codes as in :meth:`linear` and their scale rounded to float16."""

    def attention(
        self,
        q: Buffer,
        k_cache: Buffer,
        v_cache: Buffer,
        batch: Batch,
        out: Buffer,
        scale: float,
        *,
        window: int | None = None,
        chunked: bool = False,
        sinks: Buffer | None = None,
        softcap: float | None = None,
    ) -> None:
        """Causal attention by position: row t sees positions 0..positions[t]. q, out ``[T, H, head_dim]``.

        With ``window`` it sees the last so many of them, its own among them (Mistral 7B, arXiv 2310.06825):
        those above ``positions[t] - window``. That is GGUF's ``attention.sliding_window`` as it stands:
        llama.cpp masks a key ``n_swa`` or more positions back. (Its symmetric windows, as embedding models
        have, are others.) ``chunked``: it sees those from the last multiple of the window on (Llama 4).
        ``softcap`` bounds scores (Gemma 2, arXiv 2408.00118).
        ``sinks`` ``[H]`` float32 is a score of each head that enters the softmax's denominator alone
        (gpt-oss; the idea in arXiv 2309.17453); neither ``scale`` nor ``softcap`` applies to it.

        Caches are those of :meth:`store_kv`; sums are float32 over the values that they stand for.
        Positions are cut into splits of :data:`SPLIT`; partial softmax sums are merged in split order."""

    def predict(
        self,
        x: Buffer,
        weights: PredictorWeights,
        batch: Batch,
        mask: Buffer,
        chosen: Chosen | None = None,
    ) -> None:
        """Sets ``mask`` ``[T, ceil(N / 64)]`` uint64 for decode rows: bit i of word j is neuron 64 j + i.
        Experts begin at whole words; only bits of those that a row chose are set."""

    def ffn(
        self,
        x: Buffer,
        weights: FFNWeights,
        batch: Batch,
        out: Buffer,
        *,
        skip: bool,
        mask: Buffer | None = None,
        fired: Buffer | None = None,
        stats: FFNStats | None = None,
        accumulate: bool = False,
        chosen: Chosen | None = None,
        gates: Buffer | None = None,
    ) -> None:
        """``out[t] (+)= down(act(gate x) * up x)``; x, out ``[T, D]``.

        Decode rows: only the candidates of ``mask`` are computed (all when None), the first ``words`` words
        of its rows; with ``skip`` a neuron whose gate does not fire reads no further row. ``fired`` ``[T,
        words]`` uint64 gets the neurons with a non-zero coefficient. Prompt rows are always dense. The down
        sum keeps float32 coefficients where the activation gives zeros or down lies by neuron; else it is a
        dot, which quantises them like ``linear``.

        Experts: ``out[t] (+)=`` the sum over the row's experts, ascending, of ``factor * (down_e + bias_e)``;
        only these are computed, for prompt rows too. ``chosen`` is needed where there are several, and
        allowed where there is one (a shared expert with a factor). In masks each expert begins at a whole
        word; what a row did not choose is not read, and has not fired. ``ValueError`` when the op runs: ids
        that no expert has, or that do not ascend in a row.

        ``gates`` ``[T, N]``, for weights without a gate and without experts: what a gate's rows gave, which
        others computed before, so that each may depend on all of them (Gemma 3n). Where ``skip``, rows of up
        are read only of neurons whose gates fire; rows of up are counted as those of gates."""

    def router(
        self,
        x: Buffer,
        weights: Matrix,
        batch: Batch,
        ids: Buffer,
        factors: Buffer,
        *,
        k: int,
        score: str,
        selection_bias: Buffer | None = None,
        normalise: bool,
        scale: float,
        expert_scale: Buffer | None = None,
        groups: ExpertGroups | None = None,
    ) -> None:
        """Chooses k experts for each row, prompt rows too: ``ids`` ``[T, k]`` int32, ascending in each row,
        and ``factors`` ``[T, k]`` float32 in the same order. x ``[T, D]``; weights ``(E, D)``, E up to
        :data:`~hotcold.formats.words.MAX_EXPERTS`, k up to :data:`MAX_CHOSEN`.

        Scores are ``score`` (:data:`ROUTER_SCORES`) of all E logits ``weights @ x[t] + bias``, these as
        in :meth:`linear`. Chosen are the experts with the largest ``score + selection_bias`` (``[E]``
        float32; DeepSeek-V3, arXiv 2412.19437), or without that with the largest logits, which rank alike:
        ties go to the lower id, NaN ranks last. A factor is the expert's score, without the selection bias,
        divided by the sum of the chosen scores where ``normalise`` (a sum below 1e-20 counts as that), times
        ``scale``, times the expert's number of ``expert_scale`` (``[E]`` float32; Gemma 4).

        With ``groups`` only experts of the best ones are chosen: a group ranks by what its experts' ``score +
        selection_bias`` are, ties go to the first, NaN ranks last.

        A softmax over the chosen logits alone (Mixtral, arXiv 2401.04088; gpt-oss) is ``softmax`` with
        ``normalise``. With E = k = 1, ``sigmoid`` gives the gate of a shared expert (Qwen2-MoE)."""

    def add(self, x: Buffer, y: Buffer, batch: Batch, *, keep: float = 1.0, scale: float = 1.0) -> None:
        """``x[t] = keep * x[t] + scale * y[t]``; both ``[T, D]``, and y may be x. What has a factor of 0 is
        not read, as in BLAS: NaN does not stay where something is cleared or replaced."""

    def gather(self, x: Buffer, batch: Batch, out: Buffer) -> None:
        """``out[r] = x[logits_rows[r]]``; x ``[T, D]``, out ``[R, D]``."""

    def softcap(self, logits: Buffer, batch: Batch, cap: float) -> None:
        """``logits[r] = cap tanh(logits[r] / cap)``, in place; ``[R, V]`` (Gemma 2, arXiv 2408.00118)."""

    def top_k(
        self,
        logits: Buffer,
        row: int,
        k: int,
        bias: tuple[Ints, Floats] | None = None,
        allowed: Masks | None = None,
    ) -> tuple[Ints, Floats]:
        """The k largest of a row of logits ``[R, V]``, descending, ties by lower id, NaN last: ids and
        values. ``bias`` is added before: ids, each named once, and what is added to their logits. ``allowed``
        ``[ceil(V / 64)]`` is a bit mask of permitted ids. Fewer than k come back where fewer are permitted.
        Runs at once, never recorded."""
