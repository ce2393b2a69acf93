"""The time of one FFN layer of experts against the bytes that it must read.

    python benchmarks/cpu/expert_layers.py  # a layer as Mixtral's, and one of 128 experts
    python benchmarks/cpu/expert_layers.py --type Q4_K --seconds 3

Layers are random, Q4_0 by default, down by output as ordinary files have it: 8 experts of 14336 neurons, 4096
wide, 2 chosen (fewer neurons where memory is short), and 128 of 768, 2048 wide, 8 chosen. Each activation is
run for 1, 4 and 8 decode rows and for a prompt of 128; a step chooses its experts at random and anew. `share`
is the time that the bytes of all experts which a step chose would take at the read bandwidth measured between
the runs, divided by the step's: 1 is as fast as memory. For relu, inactive rows are skipped, and
FFNStats counts the bytes; it does not count prompts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotcold.formats.blocks import BLOCK_TYPES, BlockType, Tensor
from hotcold.kernels.backend import (
    FFN_COUNTS,
    Backend,
    Batch,
    BatchLimits,
    Chosen,
    FFNCall,
    FFNStats,
    FFNTensors,
    Program,
)
from hotcold.kernels.cpu import CPUBackend, ReadProbe

STEPS = ((1, 0), (4, 0), (8, 0), (0, 128))  #: (decode rows, prompt rows)
LEFT_BYTES = 2 << 30  #: of memory, for everything else


@dataclass(frozen=True)
class Shape:
    name: str
    experts: int
    neurons: int
    dim: int
    chosen: int


SHAPES = (Shape("8 of 14336", 8, 14336, 4096, 2), Shape("128 of 768", 128, 768, 2048, 8))


def random_tensor(random: np.random.Generator, type: BlockType, rows: int, columns: int) -> Tensor:
    """Random codes under one small scale: what they are changes no time."""
    data = random.integers(0, 256, type.data_shape((rows, columns)), np.uint8)
    blocks = data.reshape(-1, type.nbytes)
    for at in scales_of(type):
        blocks[:, at : at + 2] = np.frombuffer(np.float16(0.002).tobytes(), np.uint8)
    return Tensor(type, (rows, columns), data)


def scales_of(type: BlockType) -> tuple[int, ...]:
    """Where a block's float16 numbers begin."""
    if type.name == "Q6_K":
        return (208,)
    if type.weights == 1:
        raise SystemExit(f"type {type.name}: choose one of blocks, like Q4_0 or Q4_K")
    return (0, 2) if type.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,)


class Layer:
    """One layer on a backend, with the buffers of a step."""

    def __init__(self, backend: Backend, shape: Shape, type: BlockType, activation: str) -> None:
        random = np.random.default_rng(0)
        rows = shape.experts * shape.neurons
        tensors = FFNTensors(
            gate=random_tensor(random, type, rows, shape.dim),
            up=random_tensor(random, type, rows, shape.dim),
            down=random_tensor(random, type, shape.experts * shape.dim, shape.neurons),
            down_layout="by_output",
            activation=activation,
            experts=shape.experts,
            chosen=shape.chosen,
        )
        self.backend, self.shape, self.activation = backend, shape, activation
        self.weights = backend.ffn_weights(tensors)
        limits = BatchLimits(128, 128, 1, 1)
        self.batch = Batch(limits)
        self.x = backend.zeros((128, shape.dim))
        self.out = backend.zeros((128, shape.dim))
        backend.write(self.x, random.standard_normal((128, shape.dim), np.float32))
        self.chosen = Chosen(backend.zeros((128, shape.chosen), np.int32), backend.zeros((128, shape.chosen)))
        backend.write(self.chosen.factors, np.full((128, shape.chosen), 0.5, np.float32))
        self._no_counts = np.zeros((1, len(FFN_COUNTS)), np.int64)
        self.stats = FFNStats(backend.zeros((1, len(FFN_COUNTS)), np.int64))
        self._programs: dict[int, Program] = {}

    def _program(self, rows: int) -> Program:
        """The program for a step of this number of rows: a model would have recorded it for the smallest
        size."""
        size = min([each for each in self.backend.program_rows if each >= rows], default=128)
        if size not in self._programs:
            self._programs[size] = self.backend.record(self._ffn, size)
        return self._programs[size]

    def _ffn(self) -> None:
        skip = self.activation == "relu"
        self.backend.ffn(
            FFNCall(
                self.x,
                self.weights,
                self.batch,
                self.out,
                skip=skip,
                stats=self.stats,
                chosen=self.chosen,
            )
        )

    def run(self, decode: int, prompt: int, random: np.random.Generator) -> tuple[float, float]:
        """Seconds of one step, and the bytes that it must read."""
        experts, chosen = self.shape.experts, self.shape.chosen
        picked = [np.sort(random.permutation(experts)[:chosen]) for _ in range(decode + prompt)]
        ids = np.array(picked, np.int32)
        self.backend.write(self.chosen.ids, ids)
        self.batch.counts[:] = decode + prompt, decode, 0, 1
        self.backend.write(self.stats.counts, self._no_counts)
        program = self._program(decode + prompt)
        start = time.perf_counter()
        program.run()
        seconds = time.perf_counter() - start
        if prompt or self.activation != "relu":
            return seconds, self.weights.nbytes / experts * len(np.unique(ids))
        gate, up, down, run = self.weights.row_bytes
        gates, ups, downs, _, runs = (int(each) for each in self.backend.read(self.stats.counts)[0])
        return seconds, gates * gate + ups * up + downs * down + runs * run


def fitting(shape: Shape, type: BlockType) -> Shape:
    """With fewer neurons where memory is short: a layer is there twice while it is packed."""
    with open("/proc/meminfo", encoding="ascii") as file:
        free = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    neurons = shape.neurons
    while 6 * shape.experts * type.row_bytes(neurons) * shape.dim > free - LEFT_BYTES and neurons > 512:
        neurons = neurons // 2 // 256 * 256
    return Shape(shape.name, shape.experts, neurons, shape.dim, shape.chosen)


def measure(layer: Layer, probe: ReadProbe, decode: int, prompt: int, seconds: float) -> dict[str, Any]:
    random = np.random.default_rng(decode + prompt)
    layer.run(decode, prompt, random)
    times, shares, speeds = [], [], []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 5:
        bandwidth = probe.measure(0.02)
        taken, nbytes = layer.run(decode, prompt, random)
        times.append(taken)
        speeds.append(nbytes / taken / 1e9)
        shares.append(speeds[-1] / bandwidth)
    return {
        "layer": layer.shape.name,
        "neurons": layer.shape.neurons,
        "activation": layer.activation,
        "decode": decode,
        "prompt": prompt,
        "ms": round(statistics.median(times) * 1e3, 3),
        "gb_s": round(statistics.median(speeds), 2),
        "share": round(statistics.median(shares), 3),
        "steps": len(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--type", default="Q4_0", choices=[n for n, t in BLOCK_TYPES.items() if t.weights > 1]
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("-t", "--threads", type=int)
    args = parser.parse_args()
    backend = CPUBackend(args.threads)
    probe, rows = ReadProbe(backend), []
    for shape in SHAPES:
        for activation in ("silu", "relu"):
            type = BLOCK_TYPES[args.type]
            layer = Layer(backend, fitting(shape, type), type, activation)
            for decode, prompt in STEPS:
                row = measure(layer, probe, decode, prompt, args.seconds)
                title = f"{row['layer']}, {activation}, {decode} + {prompt} rows"
                speed = f"{row['gb_s']} GB/s, {row['share']:.0%} of the read bandwidth"
                print(f"{title}: {row['ms']} ms, {speed}", flush=True)
                rows.append(row)
            del layer
    print(json.dumps({"isa": backend.isa, "threads": backend.threads, "type": args.type, "layers": rows}))


if __name__ == "__main__":
    main()
