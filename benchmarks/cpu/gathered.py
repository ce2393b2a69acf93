"""The time of an FFN layer by the share of its neurons that are active, beside the same layer computed whole.

    python benchmarks/cpu/gathered.py --type Q4_0 --llama-cpp --picture docs/active.svg
    python benchmarks/cpu/gathered.py --shares 10 --ways exact "exact p" --settings 3K:1 8K:2  # in turns
    python benchmarks/cpu/gathered.py --shape 4096 64 -t 1 --copies 1  # in a core's L2: what the sums take
    python benchmarks/cpu/gathered.py --shares 50 75 90 95 100 --ways off exact "off p" "exact p"

One decode row, or ``--tokens`` rows with the same active neurons; random weights. Which neurons are active is
drawn anew for each step, and a bias of the gate makes them so: their rows lie all over. Some copies of the
layer are used in turns, so that no cache holds a row of the last step. Ways:

    dense        SiLU, down as a dot over all neurons: what a model without zeros takes
    off          ReLU, down by neuron, all neurons added
    exact        the same; of neurons that are not active the gate alone is read
    predicted    the same with a mask that names the active ones: nothing else is read
    off p, ...   these three with down in panels, as ordinary quantised files have it
    llama.cpp    the dense layer there, with ``--llama-cpp``: two layers of this shape, less two with 256
                 neurons, a layer's share of the difference

All ways and settings take turns on the same share within a round, in an order that is drawn. Printed are
medians over the rounds: milliseconds of a step, the speed over dense's and over that of ``off`` with the same
down in the same round, GB/s of what must be read, and that by the read bandwidth probed just before.
``--settings`` are bytes ahead and the level of the cache, as in fetching.py. With ``--own-time`` times are
those of the processor, shared out to the threads, for machines that others use; nothing is probed then. The
last line of stdout is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hotcold.formats.blocks import BLOCK_TYPES, BlockType, Tensor
from hotcold.kernels.backend import (
    DECODE_ROWS,
    FFN_COUNTS,
    Batch,
    BatchLimits,
    FFNCall,
    FFNStats,
    FFNTensors,
    Floats,
)
from hotcold.kernels.cpu import CPUBackend, ReadProbe
from hotcold.kernels.cpu_weights import PackedFFN
from hotcold.kernels.processor import fetching, set_fetching

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.contestants import DECODE, Plan
from lib.curves import Curve, Panel, svg
from lib.llama import LlamaCpp
from lib.machine import commit
from lib.models import Recipe, Shape, write

SHARES = (5.0, 10.0, 20.0, 30.0, 50.0, 75.0, 100.0)
WAYS = ("dense", "off", "exact", "predicted", "off p", "exact p", "predicted p")
LLAMA_CPP = "llama.cpp"
LAYERS, FEW = 2, 256  #: of llama.cpp's models, and the neurons of the one that is taken off
STEPS = 6  #: of a sample
COLOURS = {
    LLAMA_CPP: "#d64550",
    "dense": "#3b82f6",
    "off": "#8f96a3",
    "exact": "#10a37f",
    "predicted": "#e08a1e",
}
SURE = 1e4  #: a gate's bias that no product outweighs
SCALES = {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}  #: where they begin


def random_tensor(draw: np.random.Generator, type: BlockType, rows: int, columns: int) -> Tensor:
    """Random codes under one small scale: what they are changes no time."""
    if type.weights == 1:
        values = draw.standard_normal((rows, columns), np.float32).astype(np.float16)
        return Tensor(type, (rows, columns), values.view(np.uint8))
    data = draw.integers(0, 256, type.data_shape((rows, columns)), np.uint8)
    blocks = data.reshape(-1, type.nbytes)
    for at in SCALES.get(type.name, (0,)):
        blocks[:, at : at + 2] = np.frombuffer(np.float16(0.002).tobytes(), np.uint8)
    return Tensor(type, (rows, columns), data)


@dataclass(frozen=True)
class Layout:
    """Copies of a layer, and the gate's biases that they read."""

    copies: list[PackedFFN]
    biases: list[Floats]
    dim: int


def layout_of(backend: CPUBackend, type: BlockType, shape: tuple[int, int], copies: int, kind: str) -> Layout:
    """``kind`` is ``dense``, ``rows`` or ``panels``."""
    dim, neurons = shape
    draw = np.random.default_rng(0)
    down = (neurons, dim) if kind == "rows" else (dim, neurons)
    biases = [np.zeros(neurons, np.float32) for _ in range(copies)]
    tensors = [
        FFNTensors(
            gate=random_tensor(draw, type, neurons, dim),
            up=random_tensor(draw, type, neurons, dim),
            down=random_tensor(draw, type, *down),
            down_layout="by_neuron" if kind == "rows" else "by_output",
            activation="silu" if kind == "dense" else "relu",
            gate_bias=bias,
        )
        for bias in biases
    ]
    return Layout([backend.ffn_weights(each) for each in tensors], biases, dim)


class Way(Protocol):
    def run(self, step: int, active: np.ndarray, clock: Callable[[], float]) -> tuple[float, int]:
        """Returns the seconds of a step with these neurons active, and the bytes that it must read."""
        ...


class OurWay:
    """One way to compute a row, with its buffers and a program for each copy of the layer."""

    def __init__(self, backend: CPUBackend, layout: Layout, tokens: int, *, skip: bool, masked: bool) -> None:
        self._layout, self._backend, self._skip = layout, backend, skip
        self._batch = Batch(BatchLimits(tokens, tokens, tokens, 1))
        self._batch.counts[:] = tokens, tokens, 0, tokens
        self._x, self._out = backend.zeros((tokens, layout.dim)), backend.zeros((tokens, layout.dim))
        self._x[:] = np.random.default_rng(1).standard_normal((tokens, layout.dim), np.float32)
        self._words = layout.copies[0].words
        self._mask = backend.zeros((tokens, self._words), np.uint64) if masked else None
        self._stats = FFNStats(backend.zeros((1, len(FFN_COUNTS)), np.int64))
        self._programs = [backend.record(lambda each=each: self._op(each)) for each in layout.copies]

    def _op(self, weights: PackedFFN) -> None:
        self._backend.ffn(
            FFNCall(
                self._x, weights, self._batch, self._out, skip=self._skip, mask=self._mask, stats=self._stats
            )
        )

    def run(self, step: int, active: np.ndarray, clock: Callable[[], float]) -> tuple[float, int]:
        which = step % len(self._programs)
        self._layout.biases[which][:] = np.where(active, SURE, -SURE)
        if self._mask is not None:
            bits = np.zeros(self._words * 64, bool)
            bits[: len(active)] = active
            self._mask[:] = np.packbits(bits, bitorder="little").view(np.uint64)
        self._stats.counts[:] = 0
        start = clock()
        self._programs[which].run()
        seconds = max(clock() - start, 1e-9)  # some clocks tick rarely
        gate, up, down, run = self._layout.copies[0].row_bytes
        gates, ups, downs, _, runs = (int(each) for each in self._stats.counts[0])
        return seconds, gates * gate + ups * up + downs * down + runs * run


class LlamaCppLayer:
    """The dense layer of llama.cpp, which has no call for one: what it adds to a token's time."""

    def __init__(self, type: BlockType, shape: tuple[int, int], threads: int) -> None:
        dim, self._neurons = shape
        self._bytes = 3 * type.row_bytes(dim) * self._neurons
        plan = Plan(prompts=(), depths=(0,), sequences=1, generate=2, parallel_prompt=1, layers=LAYERS)
        self._engines = []
        for neurons in (self._neurons, FEW):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "layers.gguf"
                write(path, Recipe(Shape(dim, neurons, LAYERS, dim // 128, dim // 512, 1024, 256), type.name))
                self._engines.append(LlamaCpp(path, threads, plan))
                self._engines[-1].warm(DECODE)

    def run(self, step: int, active: np.ndarray, clock: Callable[[], float]) -> tuple[float, int]:
        whole, rest = (1 / engine.prepare(DECODE, step)().tok_s for engine in self._engines)
        seconds = (whole - rest) / LAYERS * self._neurons / (self._neurons - FEW)
        return max(seconds, 1e-9), self._bytes


def ways_of(
    backend: CPUBackend, type: BlockType, shape: tuple[int, int], copies: int, names: list[str], tokens: int
) -> dict[str, Way]:
    layouts: dict[str, Layout] = {}
    ways: dict[str, Way] = {}
    for name in names:
        kind = "dense" if name == "dense" else "panels" if name.endswith(" p") else "rows"
        if kind not in layouts:
            layouts[kind] = layout_of(backend, type, shape, copies, kind)
        way_name = name.removesuffix(" p")
        skip, masked = way_name in ("exact", "predicted"), way_name == "predicted"
        ways[name] = OurWay(backend, layouts[kind], tokens, skip=skip, masked=masked)
    return ways


@dataclass(frozen=True)
class Sample:
    share: float
    way: str
    setting: str
    round: int
    seconds: float
    nbytes: int
    read_gb_s: float  #: 0 where it was not probed, since times are not those of a clock


def measure(
    ways: Mapping[str, Way], args: argparse.Namespace, probe: ReadProbe, clock: Callable[[], float]
) -> Iterator[Sample]:
    draw, neurons, step = np.random.default_rng(2), args.shape[1], 0
    until = time.perf_counter() + args.seconds
    for round in range(-1, args.rounds):
        for share in random.sample(args.shares, len(args.shares)):
            count = int(neurons * share / 100 + 0.5)
            arms = list(product(ways, args.settings))
            read = 0.0 if args.own_time else probe.measure(0.01)
            for name, setting in random.sample(arms, len(arms)):
                if setting != "-":
                    set_fetching(setting)
                runs = []
                for _ in range(STEPS + 1):  # the first one comes to caches that others have filled
                    active = np.zeros(neurons, bool)
                    active[draw.permutation(neurons)[:count]] = True
                    step += 1
                    runs.append(ways[name].run(step, active, clock))
                seconds, nbytes = (statistics.median(values) for values in zip(*runs[1:], strict=True))
                if round >= 0:
                    yield Sample(share, name, setting, round, seconds, int(nbytes), read)
        if time.perf_counter() > until:
            return


def summary(samples: list[Sample]) -> list[dict[str, Any]]:
    """A row for each share, way and setting."""
    dense: dict[int, list[float]] = {}  # of all shares, since none matters to it
    for sample in samples:
        if sample.way == "dense":
            dense.setdefault(sample.round, []).append(sample.seconds)
    whole = {round: statistics.median(times) for round, times in dense.items()}
    off = {
        (each.share, each.way.removeprefix("off"), each.setting, each.round): each.seconds
        for each in samples
        if each.way in ("off", "off p")
    }
    by_key: dict[tuple[float, str, str], list[Sample]] = {}
    for each in samples:
        by_key.setdefault((each.share, each.way, each.setting), []).append(each)
    rows = []
    for share, way, setting in sorted(
        by_key, key=lambda key: (key[0], (*WAYS, LLAMA_CPP).index(key[1]), key[2])
    ):
        of_key = by_key[share, way, setting]
        over = [whole[sample.round] / sample.seconds for sample in of_key if sample.round in whole]
        middle = statistics.quantiles(over * 2 if len(over) == 1 else over, n=4) if over else None
        layout = " p" if way.endswith(" p") else ""
        pairs = [(off.get((share, layout, setting, each.round)), each.seconds) for each in of_key]
        over_off = [base / seconds for base, seconds in pairs if base]
        speeds = [each.nbytes / each.seconds / 1e9 for each in of_key]
        shares = [each.nbytes / each.seconds / 1e9 / each.read_gb_s for each in of_key if each.read_gb_s]
        rows.append(
            {
                "share": share,
                "way": way,
                "setting": setting,
                "ms": round(statistics.median(each.seconds for each in of_key) * 1e3, 4),
                "over_dense": middle and [float(f"{each:.4g}") for each in middle],  # never 0
                "over_off": round(statistics.median(over_off), 3) if over_off else None,
                "bytes": round(statistics.median(each.nbytes for each in of_key)),
                "gb_s": round(statistics.median(speeds), 2),
                "of_probe": round(statistics.median(shares), 3) if shares else None,
                "rounds": len(of_key),
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(
        "active  way          setting       ms  over dense (middle half)  over off   GB/s  of probe  rounds"
    )
    for row in rows:
        low, middle, high = row["over_dense"] or (float("nan"),) * 3
        over = f"{middle:6.2f} ({low:.2f} to {high:.2f})"
        start = f"{row['share']:5g}%  {row['way']:<12} {row['setting']:<8}{row['ms']:8.3f}"
        probe = f"{row['of_probe'] or float('nan'):.2f}"
        over += f"{row['over_off'] or float('nan'):10.3f}"
        print(f"{start}  {over:<34}{row['gb_s']:7.1f}{probe:>10}{row['rounds']:8}", flush=True)


def picture(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """Times over the dense layer's, by the share of active neurons; a panel for each layout of down."""

    def points(way: str) -> list[tuple[float, float]]:
        of_way = [row for row in rows if row["way"] == way and row["over_dense"]]
        return [(row["share"], 1 / row["over_dense"][1] if way != "dense" else 1.0) for row in of_way]

    def level(way: str) -> list[tuple[float, float]]:
        """The same at every share, since none matters to it."""
        of_way = points(way)
        middle = statistics.median(y for _, y in of_way) if of_way else 0.0
        return [(x, middle) for x, _ in of_way]

    layouts = []
    for title, mark in (("down by neuron", ""), ("down in panels, as quantised files have it", " p")):
        curves = [
            Curve(name, colour, curve_points)
            for name, colour in COLOURS.items()
            if (curve_points := level(name) if name in ("dense", LLAMA_CPP) else points(name + mark))
        ]
        if curves:
            layouts.append(Panel(title, curves, 2.0))
    shape = " x ".join(str(each) for each in facts["shape"])
    settings = [facts["type"], shape, f"{facts['threads']} threads", facts["isa"], f"times {facts['times']}"]
    title = "Time of an FFN layer by the share of its neurons that are active; dense = 1"
    return svg(title, "% active", layouts, f"{', '.join(settings)}; commit {facts['commit']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    types = [name for name, type in BLOCK_TYPES.items() if type.panels or type.name == "F16"]
    parser.add_argument("--type", default="Q4_0", choices=types)
    parser.add_argument("--shape", nargs=2, type=int, default=(4096, 11008), metavar=("DIM", "NEURONS"))
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, metavar="PERCENT")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--settings", nargs="+", default=["-"], metavar="BYTES:LEVEL")
    parser.add_argument("--copies", type=int, default=2, help="of the layer, in turns")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0, help="no round begins later")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--tokens", type=int, default=1, choices=range(1, DECODE_ROWS + 1))
    parser.add_argument("--own-time", action="store_true", help="of the processor, by threads")
    parser.add_argument("--llama-cpp", action="store_true", help="llama.cpp's dense layer besides")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write the sweep as SVG")
    args = parser.parse_args()
    if args.llama_cpp and args.own_time:
        parser.error("--llama-cpp is timed by a clock: leave --own-time out")
    backend = CPUBackend(args.threads)

    def own_time() -> float:
        return time.process_time() / backend.threads

    clock = own_time if args.own_time else time.perf_counter
    ways = ways_of(
        backend, BLOCK_TYPES[args.type], tuple(args.shape), args.copies, list(args.ways), args.tokens
    )
    if args.llama_cpp:
        ways[LLAMA_CPP] = LlamaCppLayer(BLOCK_TYPES[args.type], tuple(args.shape), backend.threads)
    rows = summary(list(measure(ways, args, ReadProbe(backend), clock)))
    show(rows)
    facts = {
        "isa": backend.isa,
        "threads": backend.threads,
        "type": args.type,
        "shape": list(args.shape),
        "fetching": fetching(),
        "times": "of the processor" if args.own_time else "of a clock",
        "commit": commit(),
    }
    if args.picture:
        args.picture.write_text(picture(rows, facts), encoding="utf-8")
    print(json.dumps({"facts": facts, "rows": rows}))


if __name__ == "__main__":
    main()
