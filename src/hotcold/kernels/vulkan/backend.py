"""The ``vulkan`` backend: compute shaders on a GPU, with any vendor's driver.

Ops become dispatches (recording.py) of shaders (csrc/shaders, compiled in spirv/). A recording is one list of
commands that a step submits. docs/design/gpu.md defines the order of every op's sums."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from hotcold.errors import UserError
from hotcold.formats.stored import AnyTensor
from hotcold.kernels import _native
from hotcold.kernels.backend import (
    DECODE_ROWS,
    AttentionCall,
    Batch,
    BatchLimits,
    Buffer,
    Chosen,
    DeltaCall,
    FFNCall,
    FFNStats,
    FFNTensors,
    FFNWeights,
    Floats,
    IndexedBy,
    Ints,
    Mailbox,
    Masks,
    Matrix,
    Norm,
    PredictorTensors,
    PredictorWeights,
    Program,
    RopeTable,
    RouterCall,
    Rows,
    ScanCall,
    Wkv7Call,
)
from hotcold.kernels.gpu import LinkSpeed
from hotcold.kernels.vulkan import attention, ffn, linear, recurrent, rowwise
from hotcold.kernels.vulkan import link as mailbox
from hotcold.kernels.vulkan.buffers import DeviceMemory
from hotcold.kernels.vulkan.ffn_weights import ffn_weights
from hotcold.kernels.vulkan.link_speed import link_speed
from hotcold.kernels.vulkan.matrix import DeviceMatrix, DevicePredictor, device_matrix, device_predictor
from hotcold.kernels.vulkan.memory import Range, aligned
from hotcold.kernels.vulkan.probe import HARDWARE_HALVES, INEXACT, errors
from hotcold.kernels.vulkan.recording import PROGRAM_ROWS, Dispatch, Recording, Status, Written, batch_bytes
from hotcold.kernels.vulkan.shaders import spirv
from hotcold.kernels.vulkan.streamed import streamed_weights

#: A shader, its specialisation constants, its number of ranges, and the bytes of its push constants.
_PipelineKey = tuple[str, tuple[int, ...], int, int]

_NO_RWKV = "GPUs do not compute the ops of RWKV yet"


class VulkanBackend(DeviceMemory):
    """Computes on one device. ``budget``: the most bytes of its memory to allocate, scratch included.
    ``spin``: shaders wait for answers (:meth:`link`), else answers submit the next commands."""

    name = "vulkan"
    decode_rows = DECODE_ROWS
    prompt_math = "same"
    chooses_rows = False
    step_rows = 1 << 14
    threads = None
    program_rows: tuple[int, ...] = PROGRAM_ROWS

    def __init__(self, device: int, budget: int | None = None, *, spin: bool = False) -> None:
        super().__init__(_native.VulkanDevice(device, budget))
        self.spin = spin
        erring = errors(self.device)
        self.exact = erring.isdisjoint(INEXACT)  #: results equal any such device's, bit for bit
        self.hardware_halves = HARDWARE_HALVES not in erring  #: shaders read float16 by hardware
        self._pipelines: dict[_PipelineKey, _native.VulkanPipeline] = {}
        self._batches: weakref.WeakKeyDictionary[Batch, Range] = weakref.WeakKeyDictionary()
        self._scratch: Range | None = None
        self._recording: Recording | None = None
        self._recorded_rows: int | None = None
        self._in_record = False

    def link_speed(self, nbytes: int, runs: int) -> LinkSpeed:
        return link_speed(self, nbytes, runs)

    # Weights

    def matrix(self, tensor: AnyTensor, bias: Floats | None = None) -> DeviceMatrix:
        return device_matrix(self, tensor, bias)

    def ffn_weights(self, tensors: FFNTensors) -> FFNWeights:
        return ffn_weights(self, tensors)

    def streamed_weights(self, tensors: FFNTensors) -> FFNWeights:
        return streamed_weights(self, tensors)

    def disk_counts(self) -> None:
        """Returns None: all experts are in memory."""

    def read_probe(self, nbytes: int = 0) -> None:
        """Returns None: no thread of this backend streams memory."""

    def predictor_weights(self, tensors: PredictorTensors) -> DevicePredictor:
        return device_predictor(self, tensors)

    # Ops

    def embed(
        self,
        table: Matrix,
        batch: Batch,
        out: Buffer,
        *,
        by: IndexedBy = IndexedBy.TOKENS,
        accumulate: bool = False,
    ) -> None:
        self.op(batch, lambda r: linear.embed(r, table, out, by, accumulate), table, out)

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
        if where is not None or stats is not None:
            raise ValueError("linear where a buffer says: this backend does not choose rows")
        args = x, weights, outs, accumulate, rows
        self.op(batch, lambda r: linear.linear(r, *args), x, *weights, *outs)

    def linear_heads(self, x: Buffer, weights: Matrix, batch: Batch, out: Buffer) -> None:
        self.op(batch, lambda r: linear.linear_heads(r, x, weights, out), x, weights, out)

    def join_heads(self, x: Buffer, y: Buffer, batch: Batch, out: Buffer) -> None:
        self.op(batch, lambda r: linear.join_heads(r, x, y, out), x, y, out)

    def predict(
        self,
        x: Buffer,
        weights: PredictorWeights,
        batch: Batch,
        mask: Buffer,
        chosen: Chosen | None = None,
    ) -> None:
        args = x, weights, mask, chosen
        self.op(batch, lambda r: linear.predict(r, *args), *args)

    def norm(self, x: Buffer, norm: Norm, batch: Batch, out: Buffer, rows: Rows = Rows.TOKENS) -> None:
        self.op(batch, lambda r: rowwise.norm(r, x, norm, out, rows), x, norm, out)

    def rope(self, x: Buffer, table: RopeTable, batch: Batch) -> None:
        self.op(batch, lambda r: attention.rope(r, x, table), x, table)

    def store_kv(self, k: Buffer, v: Buffer, batch: Batch, k_cache: Buffer, v_cache: Buffer) -> None:
        args = k, v, k_cache, v_cache
        self.op(batch, lambda r: attention.store_kv(r, *args), *args)

    def attention(self, call: AttentionCall) -> None:
        self.op(call.batch, lambda r: attention.attention(r, call), call)

    def router(self, call: RouterCall) -> None:
        self.op(call.batch, lambda r: rowwise.router(r, call), call)

    def ffn(self, call: FFNCall) -> None:
        self.op(call.batch, lambda r: ffn.ffn(r, call), call)

    def add(self, x: Buffer, y: Buffer, batch: Batch, *, keep: float = 1.0, scale: float = 1.0) -> None:
        self.op(batch, lambda r: rowwise.add(r, x, y, keep, scale), x, y)

    def gather(self, x: Buffer, batch: Batch, out: Buffer) -> None:
        self.op(batch, lambda r: rowwise.gather(r, x, out), x, out)

    def softcap(self, logits: Buffer, batch: Batch, cap: float) -> None:
        self.op(batch, lambda r: rowwise.softcap(r, logits, cap), logits)

    # Ops of layers that keep a state

    def short_conv(
        self,
        x: Buffer,
        weight: Buffer,
        bias: Buffer | None,
        batch: Batch,
        state: Buffer,
        out: Buffer,
        *,
        activation: str,
    ) -> None:
        args = x, weight, bias, state, out
        self.op(batch, lambda r: recurrent.short_conv(r, *args, activation), *args)

    def gated_delta(self, call: DeltaCall) -> None:
        self.op(call.batch, lambda r: recurrent.gated_delta(r, call), call)

    def decay(self, x: Buffer, bias: Buffer, factor: Buffer, batch: Batch, out: Buffer) -> None:
        args = x, bias, factor, out
        self.op(batch, lambda r: recurrent.decay(r, *args), *args)

    def ssm_scan(self, call: ScanCall) -> None:
        self.op(call.batch, lambda r: recurrent.ssm_scan(r, call), call)

    def multiply(self, x: Buffer, gate: Buffer, batch: Batch, out: Buffer, *, activation: str) -> None:
        args = x, gate, out
        self.op(batch, lambda r: recurrent.multiply(r, *args, activation), *args)

    def activate(self, x: Buffer, batch: Batch, out: Buffer, *, activation: str) -> None:
        raise ValueError(_NO_RWKV)

    def token_shift(
        self, x: Buffer, mixes: Buffer, batch: Batch, state: Buffer, outs: Sequence[Buffer]
    ) -> None:
        raise ValueError(_NO_RWKV)

    def wkv7(self, call: Wkv7Call) -> None:
        raise ValueError(_NO_RWKV)

    def top_k(
        self,
        logits: Buffer,
        row: int,
        k: int,
        bias: tuple[Ints, Floats] | None = None,
        allowed: Masks | None = None,
    ) -> tuple[Ints, Floats]:
        return rowwise.top_k(self, logits, row, k, bias, allowed)

    # The hot side of a hybrid model

    def link(
        self, timeout_seconds: float, spin: bool | None = None, looks: tuple[int, ...] = ()
    ) -> _native.VulkanLink:
        """Makes the link. ``spin`` overrides the backend's form of handshake. ``looks`` overrides the
        shader's limits on polls of a waiting shader, for a layer and for a step."""
        shaders = self._pipeline("post_flag", (), 3, 4), self._pipeline("await_answer", looks, 3, 4)
        return self.device.link(timeout_seconds, self.spin if spin is None else spin, *shaders)

    def mailboxes(
        self, link: _native.Link, limits: BatchLimits, dim: int, words: Mapping[int, int], experts: int = 0
    ) -> dict[int, Mailbox]:
        if not isinstance(link, _native.VulkanLink):
            raise TypeError(f"a {type(link).__name__}: a link of this device is needed")
        return mailbox.mailboxes(self, link, limits, dim, words, experts)

    def post(
        self, box: Mailbox, x: Buffer, mask: Buffer | None, batch: Batch, chosen: Chosen | None = None
    ) -> None:
        self.op(batch, lambda r: mailbox.post(r, box, x, mask, chosen), box, x, mask, chosen)

    def collect(self, box: Mailbox, batch: Batch, out: Buffer) -> None:
        self.op(batch, lambda r: mailbox.collect(r, box, out), box, out)

    def serve(self, link: _native.Link, layers: Sequence[tuple[int, Program]]) -> None:
        """Raises UserError: a GPU computes only hot neurons."""
        raise UserError("a GPU cannot compute the cold neurons of a model: choose cpu for that")

    # Programs

    def record(self, fn: Callable[[], None], rows: int | None = None) -> Program:
        if self._in_record:
            raise RuntimeError("record inside record: one program is recorded at a time")
        self._in_record, self._recording, self._recorded_rows = True, None, rows
        try:
            fn()
            recording = self._recording
        finally:
            self._in_record, self._recording = False, None
        return _Empty() if recording is None else self._finish(recording)

    def op(self, batch: Batch, append: Callable[[Recording], None], *kept: object) -> None:
        """Appends one op to the program being recorded, or runs it at once."""
        recording = self._recording_of(batch)
        recording.new_op()
        append(recording)
        recording.kept.extend(kept)
        if not self._in_record:
            self._finish(recording).run()

    def _recording_of(self, batch: Batch) -> Recording:
        if not self._in_record:
            return Recording(self, batch, batch.limits.tokens)
        if self._recording is None:
            rows = self._recorded_rows or batch.limits.tokens
            self._recording = Recording(self, batch, min(rows, batch.limits.tokens))
        if self._recording.batch is not batch:
            raise ValueError("a program reads one batch: record a second program for another")
        return self._recording

    def _finish(self, recording: Recording) -> Program:
        if self._scratch is None or self._scratch.nbytes < recording.scratch_bytes:
            self._scratch = self.allocate(recording.scratch_bytes)  # older programs keep their scratch
        batch, device_batch = recording.batch, self._batch(recording.batch)
        self._make_pipelines([_pipeline_key(each) for each in recording.steps if isinstance(each, Dispatch)])
        recorder = self.device.recorder()
        recorder.batch(device_batch.held, batch, recording.rows, recording.bounds)
        for step in recording.steps:
            if isinstance(step, Dispatch):
                self._dispatch(recorder, step, device_batch)
            else:
                step.record(recorder)  # type: ignore[attr-defined]
        kept = [recording, self._scratch, device_batch]
        for status in recording.statuses:
            recorder.clear(status.memory)
        return _Program(recorder.finish(), recording.statuses, kept)

    def _dispatch(self, recorder: _native.VulkanRecorder, step: Dispatch, batch: Range) -> None:
        ranges = [(batch.held, batch.offset, batch.nbytes, False)]
        for argument in step.ranges:
            step_range = argument.range if isinstance(argument, Written) else argument
            place = self._scratch if step_range.memory is None else step_range
            assert place is not None
            offset = step_range.offset + (place.offset if step_range.memory is None else 0)
            ranges.append((place.held, offset, aligned(step_range.nbytes, 4), isinstance(argument, Written)))
        recorder.dispatch(self._pipelines[_pipeline_key(step)], ranges, step.push, *step.groups)

    def _make_pipelines(self, keys: Iterable[_PipelineKey]) -> None:
        """Makes the missing pipelines on threads: a driver takes 10 to 500 ms to compile one."""
        missing = [key for key in dict.fromkeys(keys) if key not in self._pipelines]
        if not missing:
            return
        with ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1)) as threads:
            self._pipelines.update(zip(missing, threads.map(self._compile, missing), strict=True))

    def _compile(self, key: _PipelineKey) -> _native.VulkanPipeline:
        shader, constants, ranges, push = key
        return self.device.pipeline(spirv(shader), ranges, push, list(constants), self.hardware_halves)

    def _pipeline(
        self, shader: str, constants: tuple[int, ...], ranges: int, push: int
    ) -> _native.VulkanPipeline:
        key = shader, constants, ranges, push
        self._make_pipelines([key])
        return self._pipelines[key]

    def _batch(self, batch: Batch) -> Range:
        if batch not in self._batches:
            self._batches[batch] = self.allocate(batch_bytes(batch.limits))
        return self._batches[batch]


def _pipeline_key(step: Dispatch) -> _PipelineKey:
    """Returns the key of a dispatch's pipeline; range 0 is the batch."""
    return step.shader, step.constants, len(step.ranges) + 1, len(step.push)


class _Program:
    def __init__(self, native: _native.VulkanProgram, statuses: list[Status], kept: list[object]) -> None:
        self._native, self._statuses, self._kept = native, statuses, kept

    @property
    def counts(self) -> _native.VulkanStepCounts:
        """Dispatches, barriers and submits of a step."""
        return self._native.counts

    def run(self) -> None:
        """Copies the batch to the device, submits, and waits, in one native call."""
        self._native.run()
        for status in self._statuses:
            status.raise_if_set()


class _Empty:
    def run(self) -> None:
        """No op was recorded."""
