"""Measures for benchmarks/gpu/compare.py what needs no large model: matrices, experts, the built-in model.

The time of an op is the slope between a program of a few such ops and one of many, which leaves the submit
out; each op waits for the one before it, as in a model. Enough matrices alternate that caches hold none.
Their share is of the bandwidth of adding one buffer to another, which reads twice and writes once.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cpu.expert_layers import Layer, Shape, random_tensor
from gpu.placed import Placed, gpu_options, hottest, sizes_of
from hotcold.demo import model_path
from hotcold.engine.request import Job, Request
from hotcold.formats.blocks import Tensor, block_type
from hotcold.kernels import BACKENDS, open_backend
from hotcold.kernels.backend import (
    PAGE,
    AttentionCall,
    Backend,
    Batch,
    BatchLimits,
    FFNCall,
    FFNTensors,
    Norm,
    Program,
)
from hotcold.kernels.numpy_ffn import pack_mask
from hotcold.kernels.vulkan.backend import VulkanBackend
from hotcold.placement.measuring import one_row
from hotcold.placement.placement import write_placement
from hotcold.placement.profiles import read_profile
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import LoadedModel
from lib.models import random_rows

Row = dict[str, Any]
Emit = Callable[[Row], None]

CACHES = 256 << 20  #: bytes that matrices are cycled through
MOST_MATRICES = 64
#: Type, rows and columns of the matrix; (decode rows, prompt rows).
MATRICES = (
    ("Q4_0", 8192, 28672), ("F16", 8192, 28672), ("Q8_0", 8192, 28672), ("Q4_K", 8192, 28672),
    ("Q6_K", 8192, 28672), ("Q4_0", 4096, 4096), ("F16", 4096, 4096), ("Q4_0", 11008, 4096),
)  # fmt: skip
STEPS = ((1, 0), (4, 0), (16, 0), (0, 128), (0, 512))
SMALL_MATRICES = (("Q4_0", 512, 1408), ("F16", 512, 1408))
SMALL_STEPS = ((1, 0), (0, 32))
FEW, MANY, MANY_PROMPTS = 2, 34, 8
PROMPTS = (
    "Once upon a time", "The king and the fox", "One day a little boy", "In the forest there was",
    "The old woman said",
)  # fmt: skip
EXPERTS = Shape("Mixtral", 8, 14336, 4096, 2)
SMALL_EXPERTS = Shape("small", 4, 256, 256, 2)
MIXTRAL_LAYERS = 32


@dataclass(frozen=True)
class OpsTask:
    """JSON. ``small`` is for processors that play a GPU."""

    gpu: str
    seconds: float
    small: bool = False
    threads: int | None = None


def open_device(gpu: str, threads: int | None) -> Backend:
    if gpu in BACKENDS:
        return open_backend(gpu, threads)
    from hotcold.kernels import gpus

    device, _ = gpus.choose_gpu(gpu, needed=True)
    assert device is not None
    return gpus.open_gpu(device, None)


def matrices(task: OpsTask, emit: Emit) -> None:
    """Matrix by rows: GB/s of the matrix, and its share of the device's own; prompts: integer Tops."""
    backend, until = open_device(task.gpu, task.threads), time.monotonic() + task.seconds
    emit({"part": "matrices", "case": "submit", "us": submit_us(backend)})
    own_gb_s = sum_gb_s(backend, (1 << 14 if task.small else 1 << 18))
    emit({"part": "matrices", "case": "sum of two buffers", "gb_s": own_gb_s})
    shapes, steps = (SMALL_MATRICES, SMALL_STEPS) if task.small else (MATRICES, STEPS)
    for type, rows, columns in shapes:
        key = {"part": "matrices", "case": f"{type} {rows} x {columns}"}
        if time.monotonic() > until:
            emit(key | {"failed": "left out: time ran out"})
            continue
        try:
            probe = MatrixProbe(backend, type, rows, columns, max(map(sum, steps)))
            for decode, prompt in steps:
                emit(key | {"decode": decode, "prompt": prompt} | probe.measure(own_gb_s, decode, prompt))
        except Exception as error:
            emit(key | {"failed": f"{type_name(error)}: {error}"[:400]})


def type_name(error: Exception) -> str:
    return type(error).__name__


class MatrixProbe:
    """Copies of one random matrix, too many for a cache, and programs that go through them."""

    def __init__(self, backend: Backend, type: str, rows: int, columns: int, tokens: int) -> None:
        kind = block_type(type)
        random = np.random.default_rng(0)
        if kind.weights == 1:
            pool = random_rows(random, kind, min(rows, 256), columns, 0.02)
            data = np.resize(pool, (rows, pool.shape[1]))
            tensor = Tensor(kind, (rows, columns), data)
        else:
            tensor = random_tensor(random, kind, rows, columns)
        self.nbytes, self.rows, self.columns = tensor.nbytes, rows, columns
        self.backend = backend
        copies = min(MOST_MATRICES, max(1, -(-CACHES // tensor.nbytes)))
        self.matrices = [backend.matrix(tensor) for _ in range(copies)]
        self.batch = Batch(BatchLimits(tokens, 1, 1, 1))
        self.x, self.out = backend.zeros((tokens, columns)), backend.zeros((tokens, rows))
        backend.write(self.x, random.standard_normal((tokens, columns), np.float32))

    def measure(self, own_gb_s: float, decode: int, prompt: int) -> Row:
        many = MANY if decode == 1 else MANY_PROMPTS
        programs = [self._program(count, decode + prompt) for count in (FEW, many)]
        self.batch.counts[:] = decode + prompt, decode, 0, 1
        seconds = slope(programs, many)
        gb_s = self.nbytes / seconds / 1e9
        row = {"us": seconds * 1e6, "gb_s": gb_s, "bandwidth_share": gb_s / own_gb_s}
        if prompt:
            row["tops"] = 2 * self.rows * self.columns * prompt / seconds / 1e12
        return row

    def _program(self, count: int, rows: int) -> Program:
        def ops() -> None:
            for i in range(count):
                matrix = self.matrices[i % len(self.matrices)]
                self.backend.linear(self.x, [matrix], self.batch, [self.out])

        return self.backend.record(ops, rows)


#: Of the kernels beside matrices: block types, width, neurons, heads, KV heads, positions.
KERNELS = (("F16", "Q4_0"), 8192, 28672, 64, 8, 4096)
SMALL_KERNELS = (("F16", "Q4_0"), 512, 1408, 8, 4, 256)
HEAD_DIM = 128
#: Shaders of a sparse FFN, in order, with how often each reads a listed row: half of the gates are positive.
FFN_SHADERS = {"ffn_candidates": 0, "ffn_rows": 1.5, "ffn_down": 0.5, "ffn_sum": 0}
LISTED_SHARE = 0.1


def kernels(task: OpsTask, emit: Emit) -> None:
    """A decode row of a sparse FFN, shader by shader; attention; a norm."""
    backend = open_device(task.gpu, task.threads)
    types, dim, neurons, heads, kv_heads, positions = SMALL_KERNELS if task.small else KERNELS
    measures: list[tuple[str, Callable[[], list[Row]]]] = [
        (f"ffn {type} {neurons} x {dim}", partial(ffn_rows_of, backend, type, dim, neurons)) for type in types
    ]
    attended = partial(attention_row, backend, heads, kv_heads, positions)
    measures += [(f"attention {positions} positions", attended)]
    measures += [(f"norm {dim}", partial(norm_row, backend, dim))]
    until = time.monotonic() + task.seconds
    for name, measure in measures:
        key = {"part": "kernels", "case": name}
        try:
            if time.monotonic() > until:
                raise TimeoutError("left out: time ran out")
            for row in measure():
                emit(key | row)
        except Exception as error:
            emit(key | {"failed": f"{type_name(error)}: {error}"[:400]})


def ffn_rows_of(backend: Backend, type: str, dim: int, neurons: int) -> list[Row]:
    """A tenth of the neurons is listed, and half of these are active. ``listed``: the whole op; then each of
    its shaders alone, on the lists that the whole op left."""
    kind, random = block_type(type), np.random.default_rng(0)
    pool = random_rows(random, kind, 256, dim, 0.02)
    data = np.resize(pool, (neurons, pool.shape[1]))
    matrix = Tensor(kind, (neurons, dim), data)
    weights = backend.ffn_weights(FFNTensors(matrix, matrix, matrix, "by_neuron", "relu"))
    x, out, batch = backend.zeros((1, dim)), backend.zeros((1, dim)), one_row()
    backend.write(x, random.standard_normal((1, dim), np.float32))
    listed = random.permutation(neurons) < LISTED_SHARE * neurons
    words = pack_mask(listed[None])
    mask = backend.zeros(words.shape, words.dtype)
    backend.write(mask, words)
    read = matrix.nbytes * LISTED_SHARE

    def ffn() -> None:
        backend.ffn(FFNCall(x, weights, batch, out, skip=True, mask=mask))

    rows = []
    for shader, share in {"listed": 2, **FFN_SHADERS}.items():
        if shader != "listed" and not isinstance(backend, VulkanBackend):
            break
        seconds = slope([repeated(backend, ffn, count, shader) for count in (FEW, MANY)], MANY)
        row: Row = {"shader": shader, "us": seconds * 1e6}
        rows.append(row | ({"gb_s": share * read / seconds / 1e9} if share else {}))
    return rows


def repeated(backend: Backend, op: Callable[[], None], count: int, shader: str = "listed") -> Program:
    """A program that repeats an op, or runs it once and repeats one of its shaders."""
    if not isinstance(backend, VulkanBackend) or shader == "listed":
        return backend.record(lambda: [op() for _ in range(count)][-1], 1)

    def record() -> None:
        op()
        recording = backend._recording
        assert recording is not None
        steps = [each for each in recording.steps if getattr(each, "shader", "").startswith(shader)]
        recording.steps += steps * count

    return backend.record(record, 1)


def attention_row(backend: Backend, heads: int, kv_heads: int, positions: int) -> list[Row]:
    shape = (-(-positions // PAGE), kv_heads, PAGE, HEAD_DIM)
    k, v = (backend.zeros(shape, np.float16) for _ in range(2))
    q, out = (backend.zeros((1, heads, HEAD_DIM)) for _ in range(2))
    batch = one_row(positions)

    def attend() -> None:
        backend.attention(AttentionCall(q, k, v, batch, out, HEAD_DIM**-0.5))

    seconds = slope([repeated(backend, attend, count) for count in (FEW, MANY)], MANY)
    return [{"us": seconds * 1e6, "gb_s": 4 * positions * kv_heads * HEAD_DIM / seconds / 1e9}]


def norm_row(backend: Backend, dim: int) -> list[Row]:
    weight, x, batch = backend.zeros((dim,)), backend.zeros((1, dim)), one_row()

    def normalise() -> None:
        backend.norm(x, Norm(weight, None, 1e-5), batch, x)

    seconds = slope([repeated(backend, normalise, count) for count in (FEW, MANY)], MANY)
    return [{"us": seconds * 1e6}]


def slope(programs: Sequence[Program], many: int) -> float:
    """Seconds of an op, of programs with FEW and ``many`` of them."""
    shorter, longer = (run_seconds(program) for program in programs)
    return max(1e-9, (longer - shorter) / (many - FEW))


def sum_gb_s(backend: Backend, columns: int) -> float:
    """Measures the device's reads and writes without other work: 128 rows of this number of columns."""
    rows = 128
    batch = Batch(BatchLimits(rows, 1, 1, 1))
    batch.counts[:] = rows, 0, 0, 1
    x, y = backend.zeros((rows, columns)), backend.zeros((rows, columns))

    def program(count: int) -> Program:
        return backend.record(lambda: [backend.add(x, y, batch) for _ in range(count)][-1], rows)

    seconds = slope([program(FEW), program(MANY_PROMPTS)], MANY_PROMPTS)
    return 3 * 4 * rows * columns / seconds / 1e9


def run_seconds(program: Program, least: int = 5, seconds: float = 0.2) -> float:
    """The median of some runs, after one that warms."""
    program.run()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < least or (time.perf_counter() < until and len(times) < 200):
        start = time.perf_counter()
        program.run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def submit_us(backend: Backend) -> float:
    """A program of one trivial op, from the call until it returns."""
    batch = Batch(BatchLimits(1, 1, 1, 1))
    batch.counts[:] = 1, 1, 0, 1
    x, y = backend.zeros((1, 64)), backend.zeros((1, 64))
    return run_seconds(backend.record(lambda: backend.add(x, y, batch), 1), least=50) * 1e6


def expert_layers(task: OpsTask, emit: Emit) -> None:
    """One FFN layer of Mixtral on either side: no family with experts is read from files yet."""
    shape = SMALL_EXPERTS if task.small else EXPERTS
    for side in ("CPU", "GPU"):
        for activation in ("silu", "relu"):
            key = {"part": "experts", "case": f"{shape.name} Q4_0 {activation}", "side": side}
            try:
                backend = open_backend("cpu", task.threads) if side == "CPU" else open_device(task.gpu, None)
                layer = Layer(backend, shape, block_type("Q4_0"), activation)
                for decode, prompt in ((1, 0), (4, 0), (0, 128)):
                    emit(key | {"decode": decode, "prompt": prompt} | time_layer(layer, decode, prompt))
            except Exception as error:
                emit(key | {"failed": f"{type_name(error)}: {error}"[:400]})


def time_layer(layer: Layer, decode: int, prompt: int) -> Row:
    """Medians; of a token, the FFNs of all layers."""
    random = np.random.default_rng(0)
    layer.run(decode, prompt, random)
    runs = [layer.run(decode, prompt, random) for _ in range(12)]
    seconds, nbytes = (statistics.median(each) for each in zip(*runs, strict=True))
    return {"ms": seconds * 1e3, "gb_s": nbytes / seconds / 1e9, "layers_ms": MIXTRAL_LAYERS * seconds * 1e3}


def built_in_model(task: OpsTask, emit: Emit) -> None:
    """Greedy continuations of the built-in model: on the CPU, on the GPU, with half of each layer there."""
    tokens, prompts = (16, PROMPTS[:2]) if task.small else (200, PROMPTS)
    with tempfile.TemporaryDirectory() as folder:
        expected: list[list[int]] | None = None
        for name in ("CPU", "GPU", "half"):
            row: Row = {"part": "built-in model", "case": name, "tokens": tokens}
            try:
                model = load(None, _options(name, task, Path(folder)))
                start = time.perf_counter()
                texts = continuations(model, prompts, tokens)
                row["tok_s"] = tokens * len(texts) / (time.perf_counter() - start)
                expected = expected or texts
                row["equal"] = sum(a == b for a, b in zip(expected, texts, strict=True))
                row["of"] = len(texts)
                model.close()
                emit(row)
            except Exception as error:
                emit(row | {"failed": f"{type_name(error)}: {error}"[:400]})


def continuations(model: LoadedModel, prompts: Sequence[str], tokens: int) -> list[list[int]]:
    contestant = Placed("", "exact", model, None, 0.0)
    outputs = []
    for prompt in prompts:
        params = SamplingParams(temperature=0.0)
        request = Request(Job(model.tokenizer.encode(prompt), params, max_tokens=tokens, ignore_eos=True))
        contestant.engine.run([request])
        outputs.append([*request.output])
    return outputs


def continued(task: OpsTask, path: Path, prompt: int, tokens: int) -> Row:
    """Greedy decoding of a dense file, all of it on the device, from the prompt of day/llama_bench.py."""
    options = {"context": 512, "sparsity": "off", "chunk": max(prompt, 32)}
    model = load(path, LoadOptions(**options, **gpu_options(task.gpu)))
    vocab = model.config.vocab
    asked = [3 + 37 * i % (vocab - 3) for i in range(prompt)]
    contestant = Placed("", "off", model, None, 0.0)
    seconds, outputs = [], []
    for count in (1, 1, tokens + 1):  # the first one warms
        params = SamplingParams(temperature=0.0)
        request = Request(Job(asked, params, max_tokens=count, ignore_eos=True))
        start = time.perf_counter()
        contestant.engine.run([request])
        seconds.append(time.perf_counter() - start)
        outputs = [*request.output]
    model.close()
    speeds = {"prompt_tok_s": prompt / seconds[1], "tok_s": tokens / max(1e-9, seconds[2] - seconds[1])}
    return speeds | {"first_tokens": outputs[:8]}


def _options(name: str, task: OpsTask, folder: Path) -> LoadOptions:
    options: dict[str, Any] = {"threads": task.threads, "context": 256, "sparsity": "exact"}
    if name == "CPU":
        return LoadOptions(**options, **gpu_options("off"))
    sizes = sizes_of(model_path(), None, task.gpu)
    profile = read_profile(model_path().with_suffix(".profile.gguf"), sizes)
    placement = hottest(profile.firing, 1.0 if name == "GPU" else 0.5)
    path = folder / f"{name}.gpuidx"
    write_placement(path, sizes, placement)
    return LoadOptions(**options, placement=path, **gpu_options(task.gpu))
