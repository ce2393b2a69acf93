"""Measured speeds of a GPU: the bandwidth of each kernel, and the overhead of a layer.

A bandwidth is a slope: two programs with the same kernels differ only in the bytes that the kernels read. So
the start of kernels, and the waits between them, are no part of it. They are the overhead of a layer, which
is a layer's time minus the time of its bytes."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hotcold.formats.blocks import BlockType, Tensor, block_type
from hotcold.kernels.backend import Backend, Buffer, FFNCall, FFNTensors, FFNWeights, Masks
from hotcold.kernels.gpu import GPU, LinkSpeed
from hotcold.kernels.gpus import open_gpu
from hotcold.placement.gpu_layer import Layer, LayerShape
from hotcold.placement.hardware import ATTENTION, HEAD, KERNEL_TYPES, KERNELS, LAYER_KINDS
from hotcold.placement.measuring import RUNS, mean_time, one_row, prompt_gflops, tenth_masks

_LINK_BYTES = 64 << 20  # bytes per copy
_ROWS = 3.5  # of a large matrix, and neurons of a large FFN, as a multiple of the columns
_FEW = 64  # rows of a small matrix, neurons of a small FFN: one word of a mask
_MOST_COPIES = 16  # of weights in a program, so that caches hold few of them
_POSITIONS = 512, 4096  # in the cache of a layer
_LEAST_S = 1e-9  # a difference of two measurements may be 0
_SHAPE, _SMALL_SHAPE = LayerShape(4096, 32, 8), LayerShape(512, 4, 1)
_PROMPT_PART = 8  # part of the memory for weights of prompts: a software driver takes long for each
_SMALL_BYTES = 16 << 20  # with less memory, as of software drivers, the small shape is measured in one type
_PROGRAMS = len(KERNEL_TYPES) * (2 * len(KERNELS) + 2 + 2 * len(LAYER_KINDS) + 4)


@dataclass(frozen=True)
class GPUSpeed:
    """Figures of a GPU: medians of :data:`RUNS` runs; GB/s are 10^9 bytes."""

    stream_gb_s: float  #: products with a matrix in Q4_0
    rows_gb_s: float  #: a tenth of the neurons of an FFN in Q4_0
    layer_s: float  #: overhead of a layer in Q4_0 that computes all neurons
    kernels_gb_s: dict[str, float]  #: as ``Hardware.kernels_gb_s``
    layers_s: dict[str, float]  #: as ``Hardware.layers_s``
    link: LinkSpeed
    prompt_gflops: float  #: as ``Hardware.gpu_prompt_gflops``


def measure_gpu(gpu: GPU, nbytes: int, seconds: float, advance: Callable[[int, int], None]) -> GPUSpeed:
    """Measures a GPU with about ``nbytes`` of its memory: decoding for ``seconds``, and prompts as long.
    GPUError: it is not usable."""
    backend = open_gpu(gpu, None)
    large = nbytes >= _SMALL_BYTES
    types = KERNEL_TYPES if large else KERNEL_TYPES[:1]
    probe = _Probe(backend, _SHAPE if large else _SMALL_SHAPE, nbytes, seconds / _PROGRAMS)
    parts = 2 * len(types) + 2
    kernels: dict[str, float] = {}
    layers: dict[str, float] = {}
    for number, name in enumerate(types):
        type = block_type(name)
        kernels |= probe.bandwidths(type)
        advance(2 * number + 1, parts)
        overheads, kernels[ATTENTION] = probe.layers(type, kernels)
        layers |= overheads
        advance(2 * number + 2, parts)
    link = backend.link_speed(min(nbytes, _LINK_BYTES), RUNS)
    advance(parts - 1, parts)
    prompts = prompt_gflops(backend, probe.shape.dim, nbytes // _PROMPT_PART, seconds)
    advance(parts, parts)
    rows = 3 / (2 / kernels["rows Q4_0"] + 1 / kernels["down Q4_0"])
    return GPUSpeed(kernels["matrix Q4_0"], rows, layers["dense Q4_0"], kernels, layers, link, prompts)


def _separated(gated_s: float, plain_s: float) -> tuple[float, float]:
    """Returns the seconds of gate or up rows, and of down rows, from FFNs with a gate and without one. Noise
    cannot make their rates differ more than four times."""
    rows_s = min(max(gated_s - plain_s, gated_s / 6), 5 * gated_s / 12)
    return rows_s, gated_s - 2 * rows_s


class _Probe:
    """Programs of one decode row on a backend, each measured for some seconds."""

    def __init__(self, backend: Backend, shape: LayerShape, nbytes: int, seconds: float) -> None:
        self.backend, self.shape, self.nbytes, self.seconds = backend, shape, nbytes, seconds
        self._x, self._out = (backend.zeros((1, shape.dim)) for _ in range(2))
        self._batch, self._random = one_row(), np.random.default_rng(0)

    def _time(self, ops: Callable[[], None]) -> float:
        program = self.backend.record(ops, 1)
        program.run()  # the first time takes longer
        return statistics.median(mean_time(program.run, self.seconds / RUNS) for _ in range(RUNS))

    def _slope(self, more: Callable[[], None], less: Callable[[], None]) -> float:
        """Returns the seconds that a program takes longer than another. Noise cannot make them less than a
        tenth of the first program's."""
        seconds = self._time(more)
        return max(seconds - self._time(less), seconds / 10, _LEAST_S)

    def bandwidths(self, type: BlockType) -> dict[str, float]:
        """Measures the kernels of one type, with keys as in ``Hardware.kernels_gb_s``."""
        kernels = {"matrix": self._matrix_gb_s(type)} | self._ffn_gb_s(type)
        return {f"{kernel} {type.name}": gb_s for kernel, gb_s in kernels.items()}

    def _copies(self, nbytes: int) -> int:
        """Returns how many weights of this size a program reads."""
        return min(max(1, self.nbytes // nbytes), _MOST_COPIES)

    def _sizes(self, type: BlockType) -> tuple[Tensor, Tensor]:
        """Returns a large and a small matrix of zeros."""
        columns, row_bytes = self.shape.dim, type.row_bytes(self.shape.dim)
        rows = int(_ROWS * columns), _FEW
        more, less = (Tensor(type, (n, columns), np.zeros((n, row_bytes), np.uint8)) for n in rows)
        return more, less

    def _matrix_gb_s(self, type: BlockType) -> float:
        more, less = self._sizes(type)
        copies = self._copies(more.nbytes)

        def products(tensor: Tensor) -> Callable[[], None]:
            matrices = [self.backend.matrix(tensor) for _ in range(copies)]
            out = self.backend.zeros((1, tensor.shape[0]))

            def record() -> None:
                for matrix in matrices:
                    self.backend.linear(self._x, [matrix], self._batch, [out])

            return record

        return copies * (more.nbytes - less.nbytes) / self._slope(products(more), products(less)) / 1e9

    def _ffn_gb_s(self, type: BlockType) -> dict[str, float]:
        """Measures FFNs with a gate and without one, which lack a third of the rows: so gate and up rows are
        separated from down rows."""
        sizes = more, less = self._sizes(type)
        copies = self._copies(3 * more.nbytes)
        gb = copies * (more.nbytes - less.nbytes) / 1e9

        def seconds(*, gated: bool) -> list[float]:
            """Returns the seconds of a tenth of the neurons at a time, and of all of them."""
            programs = (self._ffns(each, copies, gated) for each in sizes)
            return [self._slope(*pair) for pair in zip(*programs, strict=True)]

        tenths, whole = zip(seconds(gated=True), seconds(gated=False), strict=True)
        (rows_s, down_s), (stream_s, _) = _separated(*tenths), _separated(*whole)
        return {"stream": gb / stream_s, "rows": gb / rows_s, "down": gb / down_s}

    def _ffns(self, tensor: Tensor, copies: int, gated: bool) -> list[Callable[[], None]]:
        """Returns ops that read each neuron once: a tenth at a time, after all others, or all at a time."""
        weights = [self._ffn_weights(tensor, gated) for _ in range(copies)]
        tenths = [self._uploaded(mask[None]) for mask in tenth_masks(tensor.shape[0], self._random)]

        def ffns(masks: Sequence[Buffer | None]) -> None:
            for mask in masks:
                for each in weights:
                    self.backend.ffn(FFNCall(self._x, each, self._batch, self._out, skip=True, mask=mask))

        return [partial(ffns, tenths), partial(ffns, [None])]

    def _ffn_weights(self, rows: Tensor, gated: bool) -> FFNWeights:
        """Makes an FFN of zeros whose biases make all neurons active, so that down rows are added."""
        ones = np.ones(rows.shape[0], np.float32)
        gate, gate_bias = (rows, ones) if gated else (None, None)
        return self.backend.ffn_weights(
            FFNTensors(gate, rows, rows, "by_neuron", "relu", gate_bias=gate_bias, up_bias=ones)
        )

    def _uploaded(self, mask: Masks) -> Buffer:
        buffer = self.backend.zeros(mask.shape, mask.dtype)
        self.backend.write(buffer, mask)
        return buffer

    def layers(self, type: BlockType, kernels: Mapping[str, float]) -> tuple[dict[str, float], float]:
        """Measures layers of one type. Returns overheads, with keys as in ``Hardware.layers_s``, and the
        bandwidth of keys and values."""
        few, many = _POSITIONS
        nbytes = self.shape.matrix_bytes(type) + self.shape.kv_bytes(few + many)
        layers = [Layer(self.backend, self.shape, type, _POSITIONS) for _ in range(self._copies(nbytes))]

        def seconds(kind: str, positions: int = few) -> float:
            """Returns the seconds of a layer, from one and two passes over all layers."""
            batch = one_row(positions)

            def passes(count: int) -> Callable[[], None]:
                def record() -> None:
                    for layer in count * layers:
                        layer.run(kind, batch, positions)

                return record

            return self._slope(passes(2), passes(1)) / len(layers)

        taken = {kind: seconds(kind) for kind in (*LAYER_KINDS, HEAD)}
        longer_s = max(seconds("dense", many) - taken["dense"], taken["dense"] / 100)
        kv_gb_s = self.shape.kv_bytes(many - few) / longer_s / 1e9
        overheads = {}
        for kind, total_s in taken.items():
            read = {f"{kernel} {type.name}": nbytes for kernel, nbytes in layers[0].read(kind).items()}
            read_s = sum(nbytes / kernels[key] for key, nbytes in read.items())
            read_s += self.shape.kv_bytes(few) / kv_gb_s * (kind != HEAD)
            overheads[f"{kind} {type.name}"] = max(total_s - read_s / 1e9, _LEAST_S)
        return overheads, kv_gb_s
