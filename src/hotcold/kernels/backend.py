"""The kernel interface: the ops that a backend computes for a model, and the arrays that both share.

A backend turns GGUF tensors into its own weights, allocates buffers, moves values in and out of them, and
offers the ops below. Ops write into given buffers. They read every number that changes from step to step (row
counts, positions, page tables) from a :class:`Batch`. So one recorded :class:`Program` serves every step.

``reference`` (NumPy) is the specification of every op. One table of tests holds ``cpu`` (C++) to it.
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
    """Error of a running model that could not read an expert from its file."""


class Rows(enum.IntEnum):
    """Rows of a step that an op covers."""

    TOKENS = 0  #: all ``n_tokens`` rows
    LOGITS = 1  #: the ``n_logits`` rows gathered for the head


class IndexedBy(enum.IntEnum):
    """Number of a row that selects a row of the table."""

    TOKENS = 0
    POSITIONS = 1


@dataclass(frozen=True)
class DiskCounts:
    """Counts of a backend's reads into its expert caches, over all steps."""

    hits: int = 0  #: expert cache hits, counted by step and layer
    misses: int = 0  #: expert cache misses, each read from the file
    nbytes: int = 0  #: bytes read from the file
    busy_s: float = 0.0  #: summed over all reading threads
    stalls: int = 0  #: number of times that computing waited for a read
    stall_s: float = 0.0

    def __add__(self, other: DiskCounts) -> DiskCounts:
        return DiskCounts(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: DiskCounts) -> DiskCounts:
        return DiskCounts(*map(sub, astuple(self), astuple(other)))


@dataclass(frozen=True)
class Mailbox:
    """Arrays that the two sides of a split layer exchange.

    The hot backend owns it, in host memory. Ops of a cold backend take the arrays like their own buffers."""

    link: Link  #: signals between the sides
    layer: int
    batch: Batch  #: the cold side's batch; only its counts are set
    x: Floats  #: ``[T, D]``: the FFN's input
    mask: Masks | None  #: ``[T, words]``: candidates among the cold neurons, for decode rows
    y: Floats  #: ``[T, D]``: the cold neurons' part of the output
    chosen: Chosen | None = None  #: experts that the rows of a layer of experts chose, as arrays


class Program(Protocol):
    """A recorded sequence of ops."""

    def run(self) -> None:
        """Runs the ops on the current batch and returns when all are done. Then :meth:`Backend.read`, or
        :meth:`Backend.copy` of another backend, can read the results."""


class ReadProbe(Protocol):
    """Measures the memory bandwidth of a backend's threads on more bytes than any cache holds."""

    def measure(self, seconds: float = 0.2, backend: Backend | None = None) -> float:
        """Returns GB/s (10^9 bytes) with the fastest number of streams per thread."""

    def rate(self, streams: int, seconds: float, backend: Backend | None = None) -> float:
        """Returns GB/s of all threads, or of another backend's, with this number of streams per thread."""


@runtime_checkable
class Backend(StateOps, HeadOps, Protocol):
    """Computes for a model. Ops outside :meth:`record` run at once; inside it they join the program.

    ``out`` buffers have at least as many rows as the batch's limits. Every op raises ``ValueError`` or
    ``TypeError`` when a buffer's dtype, shape or contiguity is not exactly right. Where an op takes rows
    ``[T, I]``, it takes a buffer ``[T, H, head_dim]`` as rows of ``H * head_dim`` values."""

    name: str
    decode_rows: int  #: the most decode rows of a step, :data:`DECODE_ROWS` or more
    step_rows: int  #: the most rows of a step
    #: How products of prompt rows are computed: see :data:`~hotcold.kernels.numpy_tiles.PROMPT_MATHS`.
    prompt_math: str

    chooses_rows: bool  #: whether :meth:`linear` takes ``where``

    #: Number of threads in the backend's pool; None without a pool.
    @property
    def threads(self) -> int | None: ...

    #: Row counts to record programs for besides the largest (empty where ops read the count from the batch).
    program_rows: tuple[int, ...]

    def zeros(
        self, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32, *, on_host: bool = False
    ) -> Buffer:
        """Makes a buffer. ``on_host``: in the processor's memory, where :meth:`read` copies nothing."""

    def write(self, buffer: Buffer, values: npt.NDArray[Any], row: int = 0) -> None:
        """Sets rows ``row`` to ``row + len(values)`` of a buffer. ``TypeError``: another dtype.
        ``ValueError``: rows of another shape, or past the buffer's end."""

    def read(self, buffer: Buffer, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """Returns rows ``start`` to ``stop`` of a buffer: read-only, valid until the next op runs."""

    def copy(self, source: Backend, values: Buffer, out: Buffer, rows: int) -> None:
        """Copies the first ``rows`` rows of ``values``, a buffer of ``source``, to ``out``."""

    def record(self, fn: Callable[[], None], rows: int | None = None) -> Program:
        """Records the ops that ``fn`` calls for steps of up to ``rows`` rows (None: the batch's limit)."""

    def matrix(self, tensor: AnyTensor, bias: Floats | None = None) -> Matrix:
        """Makes weights ``(O, I)`` of any supported block type, with an optional bias ``[O]``."""

    def ffn_weights(self, tensors: FFNTensors) -> FFNWeights:
        """Makes a layer's weights. ValueError: a residency, in a backend that reads files only at loading."""

    def streamed_weights(self, tensors: FFNTensors) -> FFNWeights:
        """Makes a layer's weights in the processor's memory: each :meth:`ffn` copies them before it computes.
        The results equal those with :meth:`ffn_weights`, bit for bit. A backend that computes in the
        processor's memory makes no difference between the two."""

    def predictor_weights(self, tensors: PredictorTensors) -> PredictorWeights: ...

    def disk_counts(self) -> DiskCounts | None:
        """Returns the counts of expert reads so far; None: all experts are in memory."""

    def read_probe(self, nbytes: int = 256 << 20) -> ReadProbe | None:
        """Makes a probe that reads ``nbytes``; None: the backend has no threads that stream memory."""

    # Split layers: the hot side has mailboxes, posts and collects; the cold side serves.

    def link(self, timeout_seconds: float) -> Link:
        """Makes the signals with which a cold side learns of posted layers and answers them. LinkError in a
        later step: a layer got no answer within ``timeout_seconds``."""

    def mailboxes(
        self, link: Link, limits: BatchLimits, dim: int, words: Mapping[int, int], experts: int = 0
    ) -> dict[int, Mailbox]:
        """Makes the mailbox of each split layer, by its number.

        ``words``: words of the cold neurons' mask, by layer (0: no mask). ``experts``: the most chosen
        experts of a row (0: the layers have no experts)."""

    def post(
        self, box: Mailbox, x: Buffer, mask: Buffer | None, batch: Batch, chosen: Chosen | None = None
    ) -> None:
        """Writes x ``[T, D]``, the step's counts and the rows' chosen experts to the mailbox, and the last
        words of decode rows' masks. Then signals the cold side, and does not wait.

        First waits until the cold side is idle: after an interrupted step it may still be at work."""

    def collect(self, box: Mailbox, batch: Batch, out: Buffer) -> None:
        """Waits for the cold side's answer and adds it: ``out[t] += y[t]``; ``[T, D]``.

        LinkError names the layer: the cold side failed, was stopped, is in another process, or late."""

    def serve(self, link: Link, layers: Sequence[tuple[int, Program]]) -> None:
        """Answers, as the cold side, each posted layer by running its program, until the link is stopped.
        Reports errors to the hot side. Needs a thread of its own."""

    def embed(
        self,
        table: Matrix,
        batch: Batch,
        out: Buffer,
        *,
        by: IndexedBy = IndexedBy.TOKENS,
        accumulate: bool = False,
    ) -> None:
        """Computes ``out[t] (+)= table[tokens[t]]``. By positions: learned ones (GPT-2's and OPT's, GGUF's
        ``position_embd``). Table ``(V, D)``, out ``[T, D]``."""

    def norm(self, x: Buffer, norm: Norm, batch: Batch, out: Buffer, rows: Rows = Rows.TOKENS) -> None:
        """Normalises the last axis of x (``[T, D]`` or ``[T, H, head_dim]``) into out; out may be x. A weight
        of ``H * head_dim`` values normalises the last two axes together (OLMo 2, arXiv 2501.00656). A weight
        ``[G, n]`` normalises each group of n values of a row."""

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
        """Computes ``out[t] (+)= w @ x[t] + bias`` for each (w, out). x ``[T, I]``, out ``[T, O]``.

        For block types of 8 bits or fewer x is first quantised to int8 per 32 values: d = amax / 127, codes
        rounded to nearest even. That is part of the op.

        ``where`` ``[T, O]`` needs one weight, one out (another buffer), all rows, and no ``accumulate``. Of
        decode rows only values with ``where > 0`` are computed; the rest of out is 0. A row of w is read if
        any decode row needs it. Prompt rows are computed whole. ``stats`` counts the rows of w as up rows,
        and the values as pairs. ``ValueError``: other arguments, or no :attr:`chooses_rows`."""

    def rope(self, x: Buffer, table: RopeTable, batch: Batch) -> None:
        """Rotates x ``[T, H, head_dim]`` in place by the rows' positions (arXiv 2104.09864)."""

    def store_kv(self, k: Buffer, v: Buffer, batch: Batch, k_cache: Buffer, v_cache: Buffer) -> None:
        """Writes k, v ``[T, K, head_dim]`` to the rows' slots of the caches, rounded to their type.

        Caches are float16 or float32 ``[page, K, PAGE, head_dim]``, or uint8 ``[page, K, PAGE, head_dim / 32
        * 34]``: blocks of GGML's Q8_0, with codes as in :meth:`linear` and their scale rounded to float16."""

    def attention(self, call: AttentionCall) -> None:
        """Computes causal attention by position: row t attends to positions 0..positions[t].

        With ``window`` row t attends only to positions above ``positions[t] - window`` (Mistral 7B, arXiv
        2310.06825). That is GGUF's ``attention.sliding_window``: llama.cpp masks a key ``n_swa`` or more
        positions back. (Its symmetric windows, for embedding models, differ.) ``chunked``: row t attends to
        positions from the last multiple of the window on (Llama 4). ``softcap`` bounds scores (Gemma 2, arXiv
        2408.00118).

        ``sinks`` ``[H]`` float32 is a score of each head that enters only the softmax's denominator (gpt-oss;
        the idea in arXiv 2309.17453). Neither ``scale`` nor ``softcap`` applies to it.

        Caches are those of :meth:`store_kv`; sums are float32 over their decoded values. Positions are cut
        into splits of :data:`SPLIT`; partial softmax sums are merged in split order."""

    def predict(
        self,
        x: Buffer,
        weights: PredictorWeights,
        batch: Batch,
        mask: Buffer,
        chosen: Chosen | None = None,
    ) -> None:
        """Sets ``mask`` ``[T, ceil(N / 64)]`` uint64 for decode rows: bit i of word j is neuron 64 j + i.
        Experts begin at whole words; only bits of the row's chosen experts are set."""

    def ffn(self, call: FFNCall) -> None:
        """Computes ``out[t] (+)= down(act(gate x) * up x)``.

        Decode rows: only the candidates of ``mask``, in the first ``words`` words of its rows, are computed
        (None: all neurons). With ``skip`` no up or down row of a neuron with an inactive gate is read.
        ``active`` gets the neurons with a non-zero coefficient. Prompt rows are always dense. The down sum
        keeps float32 coefficients where the activation gives zeros or down is stored by neuron. Otherwise it
        is a dot, which quantises them like ``linear``.

        Experts: ``out[t] (+)=`` the sum over the row's experts, ascending, of ``factor * (down_e + bias_e)``.
        Only the chosen experts are computed, for prompt rows too. Several experts need ``chosen``; a single
        one may have it (a shared expert with a factor). In masks each expert begins at a whole word. An
        expert that a row did not choose is not read, and its neurons are not active. ``ValueError`` when the
        op runs: ids of no expert, or ids that do not ascend in a row.

        ``gates`` are gate results computed before, so that each may depend on all of them (Gemma 3n). With
        ``skip`` up rows are read only for neurons with active gates; ``stats`` counts up rows as gate rows.

        ``strongest`` gets the neurons of decode rows with the ``ceil(N / 10)`` largest coefficients by
        magnitude, with ties, without zeros; NaN is the largest. Only for weights whose down is a dot
        (:func:`is_dense`), without experts. ``ValueError``: other weights, or no such output here."""

    def router(self, call: RouterCall) -> None:
        """Chooses k experts for each row, prompt rows too; the factors have the order of the ids. E is up to
        :data:`~hotcold.formats.words.MAX_EXPERTS`, k up to :data:`MAX_CHOSEN`.

        Scores are ``score`` (:data:`ROUTER_SCORES`) of all E logits ``weights @ x[t] + bias``, computed as in
        :meth:`linear`. The experts with the largest ``score + selection_bias`` are chosen (DeepSeek-V3, arXiv
        2412.19437). Without that bias logits rank the experts, in the same order. Ties go to the lower id,
        NaN ranks last. A factor is the expert's score, without the selection bias. ``normalise`` divides it
        by the sum of the chosen scores, at least 1e-20. Then ``scale`` and the expert's value of
        ``expert_scale`` (Gemma 4) multiply it.

        With ``groups`` only experts of the best groups are chosen. A group ranks by its experts' ``score +
        selection_bias``; ties go to the first, NaN ranks last.

        A softmax over the chosen logits alone (Mixtral, arXiv 2401.04088; gpt-oss) is ``softmax`` with
        ``normalise``. With E = k = 1, ``sigmoid`` gives the gate of a shared expert (Qwen2-MoE)."""

    def add(self, x: Buffer, y: Buffer, batch: Batch, *, keep: float = 1.0, scale: float = 1.0) -> None:
        """Computes ``x[t] = keep * x[t] + scale * y[t]``; both ``[T, D]``, and y may be x. An operand with a
        factor of 0 is not read, as in BLAS: clearing or replacing x also removes its NaN."""

    def gather(self, x: Buffer, batch: Batch, out: Buffer) -> None:
        """Computes ``out[r] = x[logits_rows[r]]``; x ``[T, D]``, out ``[R, D]``."""

    def softcap(self, logits: Buffer, batch: Batch, cap: float) -> None:
        """Sets ``logits[r] = cap tanh(logits[r] / cap)`` in place; ``[R, V]`` (Gemma 2, arXiv 2408.00118)."""

    def top_k(
        self,
        logits: Buffer,
        row: int,
        k: int,
        bias: tuple[Ints, Floats] | None = None,
        allowed: Masks | None = None,
    ) -> tuple[Ints, Floats]:
        """Returns ids and values of the k largest of a row of logits ``[R, V]``. Descending, ties by lower
        id, NaN last. Runs at once, never recorded.

        ``bias``: ids, each at most once, and the values to add to their logits before. ``allowed`` ``[ceil(V
        / 64)]``: bit mask of permitted ids; fewer than k results where fewer are permitted."""
