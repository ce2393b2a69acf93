"""Collects a model's importance matrix for a text: of each matrix, the squares of its inputs, summed over the
tokens. Prompts are computed, dense, with a backend whose programs show what their ops read."""

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
from hotcold.tasks.texts import new_file, text_of
from hotcold.tasks.windows import text_windows
from hotcold.values import printable, whole

_CHUNK = 512  # rows of a step: weights are unpacked once for all of them

_LARGEST = np.finfo(np.float32).max  # that the file can hold

#: Names of an FFN's matrices: gate, up and down. None: there is no such matrix, or nothing is said of it.
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
    progress: Progress | None = None,
) -> ImportanceMatrix:
    """Computes a text, and sums the squares of what each matrix of the layers is multiplied with.

    Args:
        model: a GGUF file, or what was loaded from one; None is the built-in model.
        text: a text, or the ``Path`` of a file in UTF-8, cut into windows of ``context`` positions (at most
            512 by default), each computed by itself.
        chunks: how many windows to take, the first ones; None takes all.
        output_head: whether to take the inputs of the output matrix, too, as ``--process-output`` of
            llama.cpp does.
        special: whether names of control tokens in the text become these tokens.
        threads, cache_type, backend: as in :class:`LLM`, for a model that is not loaded yet.
        output: file to write; None writes nothing.
        progress: gets the phases ``loading`` and ``windows``.

    Down matrices whose rows lie by neuron are left out: each row has one input, so all of its weights count
    alike.

    UserError: a value is not allowed, the text is empty, or an input of a matrix is not finite."""
    to_write = None if output is None else new_file(output)
    chunks = None if chunks is None else whole("chunks", chunks, 1)
    words, source = text_of(text), source_of(model)
    options: dict[str, Any] = {"threads": threads, "cache_type": cache_type, "backend": backend}
    if not isinstance(source, LoadedModel):
        options["context"] = context
    more = {"sparsity": "off", "default_context": LONGEST_WINDOW, "chunk": _CHUNK, "gpu": OFF}
    base = opened(source, options, progress, **more, state_copies=0, draft_max=0)
    if base.gpus:
        fix = "load it without placement and vram_budget, or give its file"
        raise UserError(f"this model is loaded on several backends, and this is computed on one: {fix}")
    length = window_length(base.context, context)
    windows = text_windows(base.tokenizer, words, length, special=special)[:chunks]
    name = text.name if isinstance(text, Path) else "a text"
    sums = input_squares(base, windows, output_head=output_head, progress=progress)
    found = ImportanceMatrix(sums, [name], len(windows), len(windows[0]))
    if to_write is not None:
        write_imatrix(to_write, found)
    return found


def input_squares(
    model: LoadedModel,
    windows: Sequence[Sequence[int]],
    *,
    output_head: bool = False,
    progress: Progress | None = None,
) -> dict[str, Importance]:
    """Returns the importance of each matrix, by name, for all tokens of the windows.

    Arguments and errors are those of :func:`imatrix`."""
    with open_gguf(model.path) as file:
        sums = _Sums()
        ops = _Watching(model, file, sums, output_head)
        watched = replace(model, devices=Devices.of(cast(Backend, ops), model.config.layers))
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
    """Sums of each matrix, by name: squares ``[E, I]``, and the numbers of rows ``[E]``; float64."""

    def __init__(self) -> None:
        self._sums: dict[str, npt.NDArray[np.float64]] = {}
        self._counts: dict[str, npt.NDArray[np.float64]] = {}

    def add(self, name: str, x: Floats, expert: int = 0, experts: int = 1) -> None:
        """Rows ``[T, I]`` that a matrix is multiplied with, or that of an expert."""
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
    """A program that calls its ops anew in each step, so that what they read can be seen between them."""

    def __init__(self, ops: Callable[[], None]) -> None:
        self.run = ops


class _Watching:
    """The backend of a model, which also adds to ``sums`` what its ops multiply matrices with."""

    def __init__(self, model: LoadedModel, file: GGUFFile, sums: _Sums, output_head: bool) -> None:
        self._ops, self._sums = model.backend, sums
        self._matrices, self._ffns = _places(model, file)
        self._norm = model.weights.norm if output_head else None
        self._head = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
        self._normed = self._ops.zeros((model.limits.tokens, model.config.dim))
        self._hidden = _Hidden(self._ops, Batch(model.limits))

    def __getattr__(self, name: str) -> Any:
        """Gives whatever else a backend has."""
        return getattr(self._ops, name)

    def record(self, fn: Callable[[], None], rows: int | None = None) -> Program:
        return _Called(fn)

    def linear(
        self, x: Buffer, weights: Sequence[Matrix], batch: Batch, outs: Sequence[Buffer], **more: Any
    ) -> None:
        self._see(x, batch, [self._matrices.get(id(each)) for each in weights])
        self._ops.linear(x, weights, batch, outs, **more)

    def router(self, call: RouterCall) -> None:
        self._see(call.x, call.batch, [self._matrices.get(id(call.weights))])
        self._ops.router(call)

    def gather(self, x: Buffer, batch: Batch, out: Buffer) -> None:
        """Comes before the head, which then reads few rows: here all rows count."""
        if self._norm is not None:
            self._ops.norm(x, self._norm, batch, self._normed)
            self._see(self._normed, batch, [self._head])
        self._ops.gather(x, batch, out)

    def ffn(self, call: FFNCall) -> None:
        tensors, names = self._ffns[id(call.weights)]
        rows = self._read(call.x, call.batch)
        ids = None if call.chosen is None else self._read(call.chosen.ids, call.batch)
        for expert, own in _rows_of(ids, tensors.experts, rows):
            gate, up, down = names
            for name in filter(None, (gate, up)):
                self._sums.add(name, own, expert, tensors.experts)
            gates = None if call.gates is None else self._read(call.gates, call.batch)
            if down is not None:
                self._sums.add(down, self._hidden(tensors, expert, own, gates), expert, tensors.experts)
        self._ops.ffn(call)

    def _read(self, buffer: Buffer, batch: Batch) -> npt.NDArray[Any]:
        return np.array(self._ops.read(buffer, 0, batch.n_tokens))

    def _see(self, x: Buffer, batch: Batch, names: Sequence[str | None]) -> None:
        """Counts the input of matrices that a file has as one, such as attn_qkv, once."""
        for name in dict.fromkeys(filter(None, names)):
            rows: Floats = self._ops.read(x, 0, batch.n_tokens)
            self._sums.add(name, rows.reshape(len(rows), -1))


def _rows_of(ids: Ints | None, experts: int, x: Floats) -> Iterator[tuple[int, Floats]]:
    """Each expert that any row chose, with the rows that chose it. A shared expert has all rows, whatever
    ``ids`` say of its factor."""
    if ids is None or experts == 1:
        yield 0, x
        return
    for expert in range(experts):
        if len(own := x[(ids == expert).any(axis=1)]):
            yield expert, own


class _Hidden:
    """Computes the coefficients of down rows, which the FFN op keeps to itself: with gate and up read from
    the file again, by the ops that the FFN is made of."""

    def __init__(self, ops: Backend, batch: Batch) -> None:
        """``batch`` has room for the rows of a step."""
        self._ops, self._batch = ops, batch
        self._buffers: dict[int, Buffer] = {}  # by the width of rows: latent experts read fewer values

    def __call__(self, tensors: FFNTensors, expert: int, x: Floats, gates: Floats | None = None) -> Floats:
        """``[T, D]`` -> ``[T, N]``, of one expert; ``gates`` where these were computed before."""
        ops, batch, rows = self._ops, self._batch, len(x)
        n = tensors.up.shape[0] // tensors.experts
        own = slice(expert * n, (expert + 1) * n)
        parts = [(tensors.up, tensors.up_bias)]
        if tensors.gate is not None:
            parts.insert(0, (tensors.gate, tensors.gate_bias))
        matrices = [
            ops.matrix(weights.take_rows(own), None if bias is None else bias[own]) for weights, bias in parts
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
    """By identity: the names of matrices, and of FFNs what the file has of them."""
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
            own = shared_tensors(file, config, model.backend, i)
            ffns[id(layer.shared.ffn)] = own, _names(own, blk, kind, file)
    return matrices, ffns


def _names(tensors: FFNTensors, blk: str, kind: str, file: GGUFFile) -> _Names:
    """Names of gate, up and down."""
    names = (f"ffn_up{kind}", f"ffn_down{kind}") if kind else ffn_names(blk, file.tensors)
    gate, up, down = (f"{blk}{name}.weight" for name in (f"ffn_gate{kind}", *names))
    if tensors.gate is None:  # or others compute it
        gate = ""
    by_output = tensors.down_layout == "by_output"
    return gate if gate in file.tensors else None, up, down if by_output else None
