"""The time of a dot product by block type, beside llama.cpp's: processor nanoseconds for 256 weights.

    python benchmarks/cpu/dots.py
    python benchmarks/cpu/dots.py --types IQ2_XS IQ2_S --isa avx2

One thread multiplies rows with one token, and the rows stay in the processor's caches. llama.cpp is the
package llama-cpp-python, which also quantises the random weights; its `vec_dot` is called by itself. A call
costs a microsecond in Python. So a figure is the time of a long call less that of a short one, over the
weights between them: many rows and one row of ours, and a long and a short row of llama.cpp. The calls
alternate, and the tenth percentile of each counts, because other processes only make a call slower.
`difference` is the root mean square of our products less llama.cpp's, relative to ours: the engines round the
token differently.

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.formats.blocks import BLOCK_TYPES, BlockType, Tensor
from hotcold.kernels.backend import Batch, BatchLimits, Floats
from hotcold.kernels.cpu import CPUBackend

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.llama import open_llama_cpp, quantise_rows
from lib.machine import commit

TYPES = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS")
SUPER = 256  #: weights of a figure, and of llama.cpp's short row
ROWS, COLUMNS = 256, 2048
QUANTISED = 8  #: different rows; llama.cpp's quantiser is slow
LARGEST_DIFFERENCE = 0.05


class Ours:
    """Products of the first rows, by the kernels of a decode step."""

    def __init__(self, backend: CPUBackend, type: BlockType, data: Any, x: Floats) -> None:
        batch = Batch(BatchLimits(1, 1, 1, 1))
        batch.counts[:] = 1, 1, 0, 1
        row = backend.zeros((1, COLUMNS))
        row[0] = x
        self.out: list[Floats] = []
        self._programs: list[Any] = []
        for count in (ROWS, 1):
            matrix = backend.matrix(Tensor(type, (count, COLUMNS), data[:count]))
            out = backend.zeros((1, count))
            self._programs.append(backend.record(partial(backend.linear, row, [matrix], batch, [out])))
            self.out.append(out)
        self.calls = tuple(program.run for program in self._programs)
        self.weights = (ROWS - 1) * COLUMNS

    def products(self) -> Floats:
        self.calls[0]()
        products: Floats = self.out[0][0]
        return products


class TypeTraits(ctypes.Structure):
    """``ggml_type_traits_cpu``."""

    _fields_ = (
        ("from_float", ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, ctypes.c_int64)),
        (
            "vec_dot",
            ctypes.CFUNCTYPE(None, ctypes.c_int, *[ctypes.c_void_p, ctypes.c_size_t] * 3, ctypes.c_int),
        ),
        ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    )


class Theirs:
    """Products of llama.cpp's ``vec_dot``.

    Raises:
        SystemExit: the library has no such function.
    """

    def __init__(self, type: BlockType, data: Any, x: Floats) -> None:
        lib = open_llama_cpp()._ggml.libggml
        if not hasattr(lib, "ggml_get_type_traits_cpu"):
            raise SystemExit("llama-cpp-python loads its kernels later: build it without GGML_BACKEND_DL")
        lib.ggml_cpu_init()
        lib.ggml_get_type_traits_cpu.restype = ctypes.POINTER(TypeTraits)
        traits = lib.ggml_get_type_traits_cpu(type.id).contents
        self._dot, self._data = traits.vec_dot, data
        values = np.tile(x, ROWS).astype(np.float32)
        self._token = np.zeros(2 * values.size, np.uint8)  # more than any type takes
        quantise = lib.ggml_get_type_traits_cpu(traits.vec_dot_type).contents.from_float
        quantise(values.ctypes.data, self._token.ctypes.data, values.size)
        self._value = ctypes.c_float()
        self.calls = self._call(data.size // type.nbytes * type.weights), self._call(SUPER)
        self.weights = ROWS * COLUMNS - SUPER

    def _call(self, columns: int, row: int = 0) -> Callable[[], None]:
        at = self._data[row:].ctypes.data
        args = columns, ctypes.addressof(self._value), 0, at, 0, self._token.ctypes.data, 0, 1
        return lambda: self._dot(*args)

    def products(self) -> Floats:
        values = []
        for row in range(ROWS):
            self._call(COLUMNS, row)()
            values.append(self._value.value)
        return np.array(values, np.float32)


def figures(type: BlockType, backend: CPUBackend, rounds: int) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    weights, x = (
        draw.standard_normal((QUANTISED, COLUMNS), np.float32),
        draw.standard_normal(COLUMNS, np.float32),
    )
    packed = quantise_rows(weights, type.id, type.row_bytes(COLUMNS), np.ones(COLUMNS, np.float32), 1)
    data = np.ascontiguousarray(np.tile(packed, (ROWS // QUANTISED, 1)))
    engines: dict[str, Ours | Theirs] = {
        "hotcold": Ours(backend, type, data, x),
        "llama_cpp": Theirs(type, data, x),
    }
    ours, theirs = (engine.products() for engine in engines.values())
    difference = float(np.sqrt(((ours - theirs) ** 2).mean() / (ours**2).mean()))
    if not difference < LARGEST_DIFFERENCE:
        raise SystemExit(
            f"{type.name}: products differ by {difference:.3f} of their size: not the same weights"
        )
    times: dict[str, list[list[int]]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            times[name].append([processor_ns(call) for call in engine.calls])
    row: dict[str, Any] = {"type": type.name, "difference": difference}
    for name, engine in engines.items():
        long, short = np.quantile(times[name], 0.1, axis=0)
        row[f"{name}_ns"] = float(long - short) * SUPER / engine.weights
    return row


def processor_ns(call: Callable[[], None]) -> int:
    start = time.thread_time_ns()
    call()
    return time.thread_time_ns() - start


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument(
        "--types", nargs="+", default=list(TYPES), choices=sorted(BLOCK_TYPES), metavar="TYPE"
    )
    parser.add_argument("--isa", help="the instruction set of Hotcold's kernels; the best one without it")
    parser.add_argument("--rounds", type=int, default=400)
    args = parser.parse_args()
    backend = CPUBackend(1, args.isa)
    print(f"{'type':8} {'ns of 256':>9} {'llama.cpp':>9} {'speed':>6} {'difference':>10}")
    rows = []
    for name in args.types:
        rows.append(row := figures(BLOCK_TYPES[name], backend, args.rounds))
        ours, theirs = row["hotcold_ns"], row["llama_cpp_ns"]
        print(
            f"{name:8} {ours:9.2f} {theirs:9.2f} {theirs / ours:6.2f} {row['difference']:10.4f}", flush=True
        )
    print(json.dumps({"isa": backend.isa, "commit": commit(), "rows": rows}))


if __name__ == "__main__":
    main()
