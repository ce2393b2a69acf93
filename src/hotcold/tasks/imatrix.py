"""Importance matrix of a model for a text: for each matrix, the squares of its inputs, summed over the
tokens.

Prompts are computed densely, with a backend whose programs expose the inputs of their ops."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from hotcold.api.llm import Model, source_of
from hotcold.errors import UserError
from hotcold.formats.files import output_file
from hotcold.formats.gguf import GGUFFile, open_gguf
from hotcold.kernels.backend import (
    Backend,
    Batch,
    Buffer,
    FFNCall,
    FFNTensors,
    Floats,
    Ints,
    Matrix,
    Program,
    RouterCall,
)
from hotcold.kernels.gpus import OFF
from hotcold.kernels.numpy_ffn import activated
from hotcold.model.devices import Devices
from hotcold.model.ffn.experts import ffn_names
from hotcold.model.ffn.feed_forward import NO_NEURONS
from hotcold.model.weights import ffn_tensors, shared_tensors
from hotcold.quantize.imatrix import Importance, ImportanceMatrix, write_imatrix
from hotcold.runtime.opening import opened
from hotcold.runtime.options import Progress
from hotcold.runtime.session import LoadedModel, Session
from hotcold.tasks.profiling import LONGEST_WINDOW, window_length
from hotcold.tasks.texts import text_of
from hotcold.tasks.windows import text_windows
from hotcold.values import printable, whole

_CHUNK = 512  # rows of a step: weights are unpacked once for all of them

_LARGEST = np.finfo(np.float32).max  # limit of the file's numbers

#: Names of an FFN's matrices: gate, up and down. None: no such matrix, or no importance is collected for it.
_Names = tuple[str | None, str, str | None]


def imatrix(
    model: Model,
    text: str | Path,
    *,
    context: int | None = None,
    chunks: int | None = None,
    output_head: bool = False,
    special: bool = False,
    threads: int | None = None,
    cache_type: str | None = None,
    backend: str | None = None,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> ImportanceMatrix:
    """Computes a text, and sums the squared inputs of each matrix of the layers.

    Args:
        model: a GGUF file, or a loaded model; None is the built-in model.
        text: a text, or the ``Path`` of a file in UTF-8, cut into windows of ``context`` positions (at most
            512 by default), each computed by itself.
        chunks: number of windows to take, the first ones; None takes all.
        output_head: whether to include the output matrix, as ``--process-output`` of llama.cpp does.
        special: whether names of control tokens in the text become these tokens.
        threads, cache_type, backend: as in :class:`LLM`, for a model that is not loaded yet.
        output: file to write; None writes nothing.
        force: whether to replace an existing ``output``.
        progress: called with the phases ``loading`` and ``windows``.

    Down matrices stored by neuron are left out: each row has one input, so all weights of a row count the
    same.

    UserError: a value is not allowed, the text is empty, or an input of a matrix is not finite."""
    to_write = output_file(output, force=force, inputs=[model, text])
    chunks = None if chunks is None else whole("chunks", chunks, 1)
    words, source = text_of(text), source_of(model)
    options: dict[str, Any] = {"threads": threads, "cache_type": cache_type, "backend": backend}
    if not isinstance(source, LoadedModel):
        options["context"] = context
    fixed = {"sparsity": "off", "default_context": LONGEST_WINDOW, "chunk": _CHUNK, "gpu": OFF}
    base = opened(source, options, progress, **fixed, state_copies=0, draft_max=0)
    if base.gpus:
        fix = "load it without placement and vram_budget, or give its file"
        raise UserError(f"this model is loaded on several backends, and this is computed on one: {fix}")
    length = window_length(base.context, context)
    windows = text_windows(base.tokenizer, words, length, special=special)[:chunks]
    name = text.name if isinstance(text, Path) else "a text"
    sums = input_squares(base, windows, output_head=output_head, progress=progress)
    matrix = ImportanceMatrix(sums, [name], len(windows), len(windows[0]))
    if to_write is not None:
        write_imatrix(to_write, matrix)
    return matrix


def input_squares(
    model: LoadedModel,
    windows: Sequence[Sequence[int]],
    *,
    output_head: bool = False,
    progress: Progress | None = None,
) -> dict[str, Importance]:
    """Returns the importance of each matrix, by name, for all tokens of the windows. Arguments and errors are
    those of :func:`imatrix`."""
    with open_gguf(model.path) as file:
        sums = _Sums()
        ops = _Watching(model, file, sums, output_head)
        watched = replace(model, devices=Devices.from_backend(cast(Backend, ops), model.config.layers))
        with closing(watched.session("off")) as session:
            for done, window in enumerate(windows, 1):
                _compute(session, window, model.limits.chunk)
                if progress:
                    progress("windows", done, len(windows))
    return sums.entries()


def _compute(session: Session, window: Sequence[int], chunk: int) -> None:
    """Computes a window as prompt rows."""
    batch, owner = session.transformer.batch, object()
    reservation = session.state.take(owner, len(window))
    try:
        for start in range(0, len(window), chunk):
            rows = reservation.put(batch, start, window[start : start + chunk])
            batch.counts[:] = (rows, 0, 0, 1)
            session.run()
    finally:
        session.state.release(owner)


class _Sums:
    """Sums for each matrix, by name: squares ``[E, I]``, and numbers of rows ``[E]``; float64."""

    def __init__(self) -> None:
        self._sums: dict[str, npt.NDArray[np.float64]] = {}
        self._counts: dict[str, npt.NDArray[np.float64]] = {}

    def add(self, name: str, x: Floats, expert: int = 0, experts: int = 1) -> None:
        """Adds input rows ``[T, I]`` of a matrix, or of an expert's part of it."""
        if name not in self._sums:
            self._sums[name] = np.zeros((experts, x.shape[-1]))
            self._counts[name] = np.zeros(experts)
        sums = self._sums[name][expert]
        sums += np.einsum("ti,ti->i", x, x, dtype=np.float64)
        if not (sums <= _LARGEST).all():
            raise UserError(f"inputs of {printable(name, 80)} are too large or no numbers: a damaged model")
        self._counts[name][expert] += len(x)

    def entries(self) -> dict[str, Importance]:
        return {
            name: Importance(sums.astype(np.float32), self._counts[name].astype(np.float32))
            for name, sums in self._sums.items()
        }


class _Called:
    """A program that calls its ops in each step instead of recording them, so that their inputs are
    visible."""

    def __init__(self, ops: Callable[[], None]) -> None:
        self.run = ops


class _Watching:
    """The backend of a model, which also adds the inputs of matrices to ``sums``."""

    def __init__(self, model: LoadedModel, file: GGUFFile, sums: _Sums, output_head: bool) -> None:
        self._ops, self._sums = model.backend, sums
        self._matrices, self._ffns = _places(model, file)
        self._norm = model.weights.norm if output_head else None
        self._head = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
        self._normed = self._ops.zeros((model.limits.tokens, model.config.dim))
        self._hidden = _Hidden(self._ops, Batch(model.limits))

    def __getattr__(self, name: str) -> Any:
        """Forwards all other attributes to the model's backend."""
        return getattr(self._ops, name)

    def record(self, fn: Callable[[], None], rows: int | None = None) -> Program:
        return _Called(fn)

    def linear(
        self, x: Buffer, weights: Sequence[Matrix], batch: Batch, outs: Sequence[Buffer], **options: Any
    ) -> None:
        self._see(x, batch, [self._matrices.get(id(each)) for each in weights])
        self._ops.linear(x, weights, batch, outs, **options)

    def router(self, call: RouterCall) -> None:
        self._see(call.x, call.batch, [self._matrices.get(id(call.weights))])
        self._ops.router(call)

    def gather(self, x: Buffer, batch: Batch, out: Buffer) -> None:
        """Runs before the head, which then reads few rows; counts all rows as inputs of the head."""
        if self._norm is not None:
            self._ops.norm(x, self._norm, batch, self._normed)
            self._see(self._normed, batch, [self._head])
        self._ops.gather(x, batch, out)

    def ffn(self, call: FFNCall) -> None:
        tensors, names = self._ffns[id(call.weights)]
        rows = self._read(call.x, call.batch)
        ids = None if call.chosen is None else self._read(call.chosen.ids, call.batch)
        for expert, inputs in _rows_of(ids, tensors.experts, rows):
            gate, up, down = names
            for name in filter(None, (gate, up)):
                self._sums.add(name, inputs, expert, tensors.experts)
            gates = None if call.gates is None else self._read(call.gates, call.batch)
            if down is not None:
                self._sums.add(down, self._hidden(tensors, expert, inputs, gates), expert, tensors.experts)
        self._ops.ffn(call)

    def _read(self, buffer: Buffer, batch: Batch) -> npt.NDArray[Any]:
        return np.array(self._ops.read(buffer, 0, batch.n_tokens))

    def _see(self, x: Buffer, batch: Batch, names: Sequence[str | None]) -> None:
        """Counts an input once per name: several matrices may be one tensor in the file, such as attn_qkv."""
        for name in dict.fromkeys(filter(None, names)):
            rows: Floats = self._ops.read(x, 0, batch.n_tokens)
            self._sums.add(name, rows.reshape(len(rows), -1))


def _rows_of(ids: Ints | None, experts: int, x: Floats) -> Iterator[tuple[int, Floats]]:
    """Yields each chosen expert with the rows that chose it. A shared expert has all rows, whatever factor
    ``ids`` give it."""
    if ids is None or experts == 1:
        yield 0, x
        return
    for expert in range(experts):
        if len(inputs := x[(ids == expert).any(axis=1)]):
            yield expert, inputs


class _Hidden:
    """Computes the inputs of down, which the FFN op does not expose, by the FFN's ops, with gate and up read
    from the file again."""

    def __init__(self, ops: Backend, batch: Batch) -> None:
        """``batch`` must hold the rows of a step."""
        self._ops, self._batch = ops, batch
        self._buffers: dict[int, Buffer] = {}  # input buffers by width: latent experts read fewer values

    def __call__(self, tensors: FFNTensors, expert: int, x: Floats, gates: Floats | None = None) -> Floats:
        """Returns ``[T, N]`` for inputs ``[T, D]`` of one expert; ``gates``: gate values, if already
        computed."""
        ops, batch, rows = self._ops, self._batch, len(x)
        n = tensors.up.shape[0] // tensors.experts
        ids = slice(expert * n, (expert + 1) * n)
        parts = [(tensors.up, tensors.up_bias)]
        if tensors.gate is not None:
            parts.insert(0, (tensors.gate, tensors.gate_bias))
        matrices = [
            ops.matrix(weights.take_rows(ids), None if bias is None else bias[ids]) for weights, bias in parts
        ]
        outs = [ops.zeros((batch.limits.tokens, n)) for _ in parts]
        width = x.shape[1]
        if width not in self._buffers:
            self._buffers[width] = ops.zeros((batch.limits.tokens, width))
        ops.write(self._buffers[width], np.ascontiguousarray(x))
        batch.counts[:] = (rows, 0, 0, 1)
        ops.linear(self._buffers[width], matrices, batch, outs)
        first, second = ops.read(outs[0], 0, rows), ops.read(outs[1], 0, rows) if len(outs) == 2 else None
        return activated(tensors, first, second)[1] if gates is None else activated(tensors, gates, first)[1]


def _places(
    model: LoadedModel, file: GGUFFile
) -> tuple[dict[int, str], dict[int, tuple[FFNTensors, _Names]]]:
    """Returns, by identity, the names of matrices, and the tensors and names of FFNs."""
    matrices: dict[int, str] = {}
    ffns: dict[int, tuple[FFNTensors, _Names]] = {}
    config = model.config
    for i, layer in enumerate(model.weights.layers):
        blk = f"blk.{i}."
        for block in layer.blocks:
            of_part = zip(block.part.matrices, block.part.names(blk, file.tensors), strict=True)
            matrices |= {id(each): name for each, name in of_part if name is not None}
        if layer.early_router is not None:
            matrices[id(layer.early_router.weights)] = f"{blk}ffn_gate_inp.weight"
        if layer.ffn is NO_NEURONS:
            continue
        kind = "_exps" if config.experts_of(i) else ""
        tensors = ffn_tensors(file, config, model.backend, i)
        ffns[id(layer.ffn)] = tensors, _names(tensors, blk, kind, file)
        if layer.shared is not None:
            kind = config.experts.shared_kind if config.experts else ""
            shared = shared_tensors(file, config, model.backend, i)
            ffns[id(layer.shared.ffn)] = shared, _names(shared, blk, kind, file)
    return matrices, ffns


def _names(tensors: FFNTensors, blk: str, kind: str, file: GGUFFile) -> _Names:
    """Returns the names of gate, up and down."""
    names = (f"ffn_up{kind}", f"ffn_down{kind}") if kind else ffn_names(blk, file.tensors)
    gate, up, down = (f"{blk}{name}.weight" for name in (f"ffn_gate{kind}", *names))
    if tensors.gate is None:  # no gate, or other ops compute it
        gate = ""
    by_output = tensors.down_layout == "by_output"
    return gate if gate in file.tensors else None, up, down if by_output else None
