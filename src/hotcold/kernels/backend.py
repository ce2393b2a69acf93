"""The narrow waist: what a backend does for a model, and the arrays the two share.

A backend turns GGUF tensors into its own weights, allocates buffers, moves values in and out of them, and
offers the ops below. Ops write into the buffers they are given and read every number that changes from step
to step (how many rows, their positions, page tables) from a :class:`Batch`, so that a recorded
:class:`Program` can be run for every step.

``reference`` (NumPy) is the specification of every op; ``cpu`` (C++) is held to it by one table of tests.
Activations are float32. Shapes use T tokens, D model dim, H heads, K kv heads, N neurons, V vocab, R rank."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from operator import add, sub
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from hotcold.formats.files import FileError
from hotcold.formats.stored import AnyTensor
from hotcold.kernels.arrays import Buffer as Buffer
from hotcold.kernels.arrays import Floats as Floats
from hotcold.kernels.arrays import Ints as Ints
from hotcold.kernels.arrays import Masks as Masks
from hotcold.kernels.batch import DECODE_ROWS as DECODE_ROWS
from hotcold.kernels.batch import PAGE as PAGE
from hotcold.kernels.batch import SPLIT as SPLIT
from hotcold.kernels.batch import Batch as Batch
from hotcold.kernels.batch import BatchLimits as BatchLimits
from hotcold.kernels.calls import FFN_COUNTS as FFN_COUNTS
from hotcold.kernels.calls import MAX_CHOSEN as MAX_CHOSEN
from hotcold.kernels.calls import MAX_EXPERT_GROUPS as MAX_EXPERT_GROUPS
from hotcold.kernels.calls import ROUTER_SCORES as ROUTER_SCORES
from hotcold.kernels.calls import AttentionCall as AttentionCall
from hotcold.kernels.calls import Chosen as Chosen
from hotcold.kernels.calls import DeltaCall as DeltaCall
from hotcold.kernels.calls import ExpertGroups as ExpertGroups
from hotcold.kernels.calls import FFNCall as FFNCall
from hotcold.kernels.calls import FFNStats as FFNStats
from hotcold.kernels.calls import Norm as Norm
from hotcold.kernels.calls import RopeTable as RopeTable
from hotcold.kernels.calls import RouterCall as RouterCall
from hotcold.kernels.calls import ScanCall as ScanCall
from hotcold.kernels.calls import Wkv7Call as Wkv7Call
from hotcold.kernels.ffn_tensors import GATED_ACTIVATIONS as GATED_ACTIVATIONS
from hotcold.kernels.ffn_tensors import SPARSE_ACTIVATIONS as SPARSE_ACTIVATIONS
from hotcold.kernels.ffn_tensors import FFNTensors as FFNTensors
from hotcold.kernels.ffn_tensors import PredictorTensors as PredictorTensors
from hotcold.kernels.ffn_tensors import equal_ends as equal_ends
from hotcold.kernels.ffn_tensors import is_dense as is_dense
from hotcold.kernels.ffn_tensors import mask_bits as mask_bits
from hotcold.kernels.ffn_tensors import mask_words as mask_words
from hotcold.kernels.ffn_tensors import panel_bytes as panel_bytes
from hotcold.kernels.ffn_tensors import scale_run as scale_run
from hotcold.kernels.head_ops import HeadOps
from hotcold.kernels.residency import ExpertSlots as ExpertSlots
from hotcold.kernels.residency import HotRows as HotRows
from hotcold.kernels.residency import Residency as Residency
from hotcold.kernels.state_ops import StateOps
from hotcold.kernels.weights import FFNWeights as FFNWeights
from hotcold.kernels.weights import Matrix as Matrix
from hotcold.kernels.weights import PredictorWeights as PredictorWeights

if TYPE_CHECKING:
    from hotcold.kernels._native import Link as Link


class ExpertReadError(FileError):
    """An expert of a running model could not be read of its file."""


class Rows(enum.IntEnum):
    """Which rows of a step an op covers."""

    TOKENS = 0  #: all ``n_tokens`` rows
    LOGITS = 1  #: the ``n_logits`` rows gathered for the head


class IndexedBy(enum.IntEnum):
    """Which of a row's numbers chooses its row of a table."""

    TOKENS = 0
    POSITIONS = 1


@dataclass(frozen=True)
class DiskCounts:
    """Counts what was read of experts that do not lie in memory, by all steps of a backend so far."""

    hits: int = 0  #: experts that a layer of a step named and that were at hand
    misses: int = 0  #: those that were read
    nbytes: int = 0  #: read of the file
    busy_s: float = 0.0  #: of all reading threads together
    stalls: int = 0  #: how often computing waited for a read
    stall_s: float = 0.0

    def __add__(self, other: DiskCounts) -> DiskCounts:
        return DiskCounts(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: DiskCounts) -> DiskCounts:
        return DiskCounts(*map(sub, astuple(self), astuple(other)))


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


class ReadProbe(Protocol):
    """Measures how fast a backend's threads stream through memory, far more than any cache holds."""

    def measure(self, seconds: float = 0.2, backend: Backend | None = None) -> float:
        """Returns GB/s (10^9 bytes) of the fastest number of streams a thread."""

    def rate(self, streams: int, seconds: float, backend: Backend | None = None) -> float:
        """Returns GB/s of all threads, or of another backend's, with this number of streams a thread."""


@runtime_checkable
class Backend(StateOps, HeadOps, Protocol):
    """Ops outside :meth:`record` run at once; inside it they are appended to the program.

    ``out`` buffers have room for at least as many rows as the batch's limits. Every op raises ``ValueError``
    or ``TypeError`` when a buffer's dtype, shape or contiguity is not exactly right. Where an op speaks of
    rows ``[T, I]``, a buffer ``[T, H, head_dim]`` serves as rows of ``H * head_dim`` values."""

    name: str
    decode_rows: int  #: the most decode rows of a step, :data:`DECODE_ROWS` or more
    step_rows: int  #: the most rows of a step
    #: How products of prompt rows are computed: see :data:`~hotcold.kernels.numpy_tiles.PROMPT_MATHS`.
    prompt_math: str

    chooses_rows: bool  #: whether :meth:`linear` takes ``where``

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
        """Makes a layer's weights. ValueError: a residency, in a backend that never reads the file again."""

    def predictor_weights(self, tensors: PredictorTensors) -> PredictorWeights: ...

    def disk_counts(self) -> DiskCounts | None:
        """Counts the reads of experts so far; None: all experts are in memory."""

    def read_probe(self, nbytes: int = 256 << 20) -> ReadProbe | None:
        """Makes a probe that reads ``nbytes``; None: the backend's threads stream no memory."""

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
        where: Buffer | None = None,
        stats: FFNStats | None = None,
    ) -> None:
        """``out[t] (+)= w @ x[t] + bias`` for each (w, out). x ``[T, I]``, out ``[T, O]``.

        For block types of 8 bits or fewer x is quantised to int8 per 32 values first (d = amax / 127, codes
        rounded to nearest even); that is part of the op.

        ``where`` ``[T, O]``, for one weight and out, another buffer than it, and all rows without
        ``accumulate``: of decode rows only what lies where it is above 0 is computed, by rows of w that some
        decode row wants; the rest of out is 0. Prompt rows are computed whole. ``stats`` counts these rows of
        w as up rows, and the values as pairs. ``ValueError``: other arguments, or a backend that does not
        choose rows (:attr:`chooses_rows`)."""

    def rope(self, x: Buffer, table: RopeTable, batch: Batch) -> None:
        """Rotates x ``[T, H, head_dim]`` in place by the rows' positions (arXiv 2104.09864)."""

    def store_kv(self, k: Buffer, v: Buffer, batch: Batch, k_cache: Buffer, v_cache: Buffer) -> None:
        """Writes k, v ``[T, K, head_dim]`` to the rows' slots of the caches, rounded to their type.

        Caches are float16 or float32 ``[page, K, PAGE, head_dim]``, or uint8 ``[page, K, PAGE, head_dim / 32
        * 34]``: blocks of GGML's Q8_0, with codes as in :meth:`linear` and their scale rounded to float16."""

    def attention(self, call: AttentionCall) -> None:
        """Causal attention by position: row t sees positions 0..positions[t].

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

    def ffn(self, call: FFNCall) -> None:
        """``out[t] (+)= down(act(gate x) * up x)``.

        Decode rows: only the candidates of ``mask`` are computed (all when None), the first ``words`` words
        of its rows; with ``skip`` a neuron whose gate is not active reads no further row. ``active`` gets the
        neurons with a non-zero coefficient. Prompt rows are always dense. The down sum keeps float32
        coefficients where the activation gives zeros or down lies by neuron; else it is a dot, which
        quantises them like ``linear``.

        Experts: ``out[t] (+)=`` the sum over the row's experts, ascending, of ``factor * (down_e + bias_e)``;
        only these are computed, for prompt rows too. ``chosen`` is needed where there are several, and
        allowed where there is one (a shared expert with a factor). In masks each expert begins at a whole
        word; an expert that a row did not choose is not read, and its neurons are not active. ``ValueError``
        when the op runs: ids that no expert has, or that do not ascend in a row.

        ``gates`` are the results of a gate's rows, computed before, so that each may depend on all of them
        (Gemma 3n). Where ``skip``, rows of up are read only of neurons whose gates are active; rows of up are
        counted as those of gates.

        ``strongest`` gets the neurons of decode rows whose coefficients are not zero and in size at least the
        k-th largest of the row, ``k = ceil(N / 10)``; NaN is the largest. For weights whose down is a dot
        (:func:`is_dense`), without experts. ``ValueError``: other weights, or a backend that does not tell
        it."""

    def router(self, call: RouterCall) -> None:
        """Chooses k experts for each row, prompt rows too; the factors have the order of the ids. E is up to
        :data:`~hotcold.formats.words.MAX_EXPERTS`, k up to :data:`MAX_CHOSEN`.

        Scores are ``score`` (:data:`ROUTER_SCORES`) of all E logits ``weights @ x[t] + bias``, these as
        in :meth:`linear`. Chosen are the experts with the largest ``score + selection_bias`` (DeepSeek-V3,
        arXiv 2412.19437), or without that with the largest logits, which rank alike: ties go to the lower id,
        NaN ranks last. A factor is the expert's score, without the selection bias, divided by the sum of the
        chosen scores where ``normalise`` (a sum below 1e-20 counts as that), times ``scale``, times the
        expert's number of ``expert_scale`` (Gemma 4).

        With ``groups`` only experts of the best ones are chosen: a group ranks by its experts' ``score +
        selection_bias``, ties go to the first, NaN ranks last.

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
