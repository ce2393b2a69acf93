"""How fast a model in the page cache is loaded, beside a plain copy of the file and llama.cpp; and packing.

    python benchmarks/cpu/loading.py  # three synthetic models of 1.2 GB, made in a temporary folder
    python benchmarks/cpu/loading.py -m model.gguf  # a file of yours; can be given several times

Each round copies the file, loads it with Hotcold, and loads it with llama.cpp with and without mmap (left out
where llama-cpp-python is not installed), one after another. The plain copy reads the file into fresh memory
in huge pages, by as many threads, and does nothing else. Freeing the memory is not timed. `ratio` is the
median of the rounds' copy time / load time: 1 is as fast as the copy. Where other processes share the
processors, the ratio of processor times says more than that of times.

Packing is timed from memory into memory that was written before, for each block type and layout: rows; pairs,
as up and down share an arena; and by neuron, what becomes of down by output (panels, and floats transposed).
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.formats.blocks import BLOCK_TYPES, BlockType
from hotcold.formats.gguf import open_gguf
from hotcold.kernels import _native
from hotcold.kernels.cores import available_cores
from hotcold.kernels.cpu import CPUBackend
from hotcold.model.config import Config
from hotcold.model.weights import load_weights

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.llama import open_llama_cpp
from lib.models import Recipe, Shape, write

COPY_BYTES = 4 << 20  #: of one read of the plain copy

Loader = Callable[[Path], object]


class PlainCopy:
    """Reads a file into fresh memory, on several threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def __call__(self, path: Path) -> object:
        size = path.stat().st_size
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has small pages
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        with open(path, "rb") as file, memoryview(memory) as view:

            def part(i: int) -> None:
                at, end = (size * each // self._threads for each in (i, i + 1))
                while at < end:
                    with view[at : min(at + COPY_BYTES, end)] as piece:
                        at += os.preadv(file.fileno(), [piece], at)

            with ThreadPoolExecutor(self._threads) as pool:
                list(pool.map(part, range(self._threads)))
        return memory


class Hotcold:
    """The weights alone: no KV cache, no tokenizer."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def __call__(self, path: Path) -> object:
        with open_gguf(path) as file:
            config = Config.from_metadata(file.metadata, file.magic, file.tensors)
            return load_weights(file, config, CPUBackend(self._threads))


class LlamaCpp:
    """llama.cpp's model without a context. ImportError: llama-cpp-python is not installed."""

    def __init__(self, *, use_mmap: bool) -> None:
        self._lib = open_llama_cpp()
        self._params = self._lib.llama_model_default_params()
        self._params.use_mmap = use_mmap
        self._params.n_gpu_layers = 0

    def __call__(self, path: Path) -> object:
        return _LlamaModel(self._lib, self._lib.llama_model_load_from_file(str(path).encode(), self._params))


class _LlamaModel:
    def __init__(self, lib: Any, model: Any) -> None:
        self._lib = lib
        self._model = model
        if not model:
            raise ValueError("llama.cpp cannot load the file")

    def __del__(self) -> None:
        if self._model:
            self._lib.llama_model_free(self._model)


def time_loads(path: Path, loaders: dict[str, Loader], rounds: int) -> dict[str, Any]:
    """Seconds of each loader that knows the file, of the clock and of processors, in turns."""
    loaders = {name: load for name, load in loaders.items() if loads(load, path)}
    size = path.stat().st_size
    wall: dict[str, list[float]] = {name: [] for name in loaders}
    processor: dict[str, list[float]] = {name: [] for name in loaders}
    for number in range(rounds + 1):
        for name, load in loaders.items():
            start, used = time.perf_counter(), time.process_time()
            loaded = load(path)
            taken = time.perf_counter() - start, time.process_time() - used
            del loaded
            gc.collect()
            if number > 0:  # the first round brings the file into the page cache
                wall[name].append(taken[0])
                processor[name].append(taken[1])
    figures: dict[str, Any] = {"file": path.name, "gb": round(size / 1e9, 3)}
    for name in loaders:
        figures[name] = {
            "median_s": round(statistics.median(wall[name]), 3),
            "best_s": round(min(wall[name]), 3),
            "best_gb_s": round(size / min(wall[name]) / 1e9, 2),
            "median_cpu_s": round(statistics.median(processor[name]), 3),
        }
    for name, times in (("ratio", wall), ("cpu_ratio", processor)):
        pairs = zip(times["copy"], times["hotcold"], strict=True)
        figures[name] = round(statistics.median(copy / load for copy, load in pairs), 3)
    figures["best_ratio"] = round(min(wall["copy"]) / min(wall["hotcold"]), 3)
    return figures


def loads(load: Loader, path: Path) -> bool:
    try:
        load(path)
    except ValueError as error:  # llama.cpp knows no down by neuron
        print(f"{path.name}: {error}")
        return False
    return True


def packers(type: BlockType, rows: int, columns: int) -> Iterator[tuple[str, list[_native.WeightRows], bool]]:
    """Layout, where tensors ``(rows, columns)`` go, and whether their columns become rows."""
    size, arena = type.row_bytes(columns), _native.Arena()
    of_rows = rows, columns, type.id
    yield "rows", [_native.WeightRows(arena.take(rows * size), 0, size, *of_rows)], False
    memory = arena.take(2 * rows * size)
    yield "pairs", [_native.WeightRows(memory, at, 2 * size, *of_rows) for at in (0, size)], False
    if type.weights > 1:
        yield (
            "by_neuron",
            [_native.WeightRows.panels(arena.take(_native.panels_size(*of_rows)), *of_rows)],
            True,
        )
    else:
        turned = rows * type.nbytes
        memory = arena.take(columns * turned)
        yield "by_neuron", [_native.WeightRows(memory, 0, turned, columns, rows, type.id)], True


def time_packing(type: BlockType, threads: int, megabytes: int, rounds: int) -> dict[str, float]:
    """GB/s of file bytes by layout, the best of several rounds; memory has been written before."""
    pool, columns = _native.Pool(threads), 11008 // 256 * 256
    rows = max(512, (megabytes << 20) // type.row_bytes(columns) // 512 * 512)
    data = np.random.default_rng(0).integers(0, 256, (rows, type.row_bytes(columns)), np.uint8)
    rates = {}
    for layout, targets, by_output in packers(type, rows, columns):
        best = float("inf")
        for _ in range(rounds + 1):
            start = time.perf_counter()
            for target in targets:
                target.pack(data, pool, by_output)
            best = min(best, time.perf_counter() - start)
        rates[layout] = round(len(targets) * data.nbytes / best / 1e9, 2)
    return rates


@contextmanager
def models(given: list[Path], layers: int) -> Iterator[list[Path]]:
    """The files given, or synthetic ones for as long as they are needed."""
    if given:
        yield given
        return
    shape = Shape(4096, 11008, layers, 32, 32, 32000, 2048)
    recipes = {
        "dense": Recipe(shape),
        "by_neuron": Recipe(shape, active=0.1, layout="by_neuron"),
        "panels": Recipe(shape, active=0.1, layout="by_output"),
    }
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{name}.gguf" for name in recipes]
        for path, recipe in zip(paths, recipes.values(), strict=True):
            write(path, recipe)
        yield paths


def loaders(threads: int) -> dict[str, Loader]:
    made: dict[str, Loader] = {"copy": PlainCopy(threads), "hotcold": Hotcold(threads)}
    try:
        made |= {"llama_mmap": LlamaCpp(use_mmap=True), "llama_read": LlamaCpp(use_mmap=False)}
    except ImportError:
        print("llama.cpp is left out: llama-cpp-python is not installed")
    return made


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("-m", "--model", type=Path, action="append", default=[])
    parser.add_argument("--layers", type=int, default=9, help="of the synthetic models (9: 1.2 GB)")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--types", nargs="*", default=list(BLOCK_TYPES), help="whose packing is timed (all)")
    parser.add_argument("--megabytes", type=int, default=128, help="of a tensor whose packing is timed (128)")
    args = parser.parse_args()
    packing = {}
    for name in args.types:
        packing[name] = time_packing(BLOCK_TYPES[name], args.threads, args.megabytes, args.rounds)
        print(f"packing {name:<6}", *(f"{layout} {rate:6.2f} GB/s" for layout, rate in packing[name].items()))
    results = []
    with models(args.model, args.layers) as paths:
        for path in paths:
            figures = time_loads(path, loaders(args.threads), args.rounds)
            results.append(figures)
            for name in ("copy", "hotcold", "llama_mmap", "llama_read"):
                if name in figures:
                    print(f"{path.name} {name:<10}", figures[name])
            print(f"{path.name} ratio {figures['ratio']}, of processor times {figures['cpu_ratio']}")
    print(json.dumps({"threads": args.threads, "packing_gb_s": packing, "loading": results}))


if __name__ == "__main__":
    main()
