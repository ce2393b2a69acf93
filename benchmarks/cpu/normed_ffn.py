"""Measures what zeros save where neurons are normalised before down: one FFN of BitNet 2B.

    python benchmarks/cpu/normed_ffn.py -t 1 --own-time
    python benchmarks/cpu/normed_ffn.py --type IQ3_S --shares 20 --rows 4

Random weights; which gates are above 0 is drawn anew for each step, and a bias of the gate makes them so.
Some copies of the layer are used in turns, so that no cache holds a row of the last step. Ways take turns
within a round, in an order that is drawn:

    off        gate, up and down are read whole
    exact      of up the rows of gates above 0; the bits are the same
    by neuron  the gain of skipping down, too: an FFN without the norm, down by neuron, which reads rows of up
               and down where gates are above 0

Printed are medians over the rounds: milliseconds of a step, and `off` over it in the same round, with the
middle half. With ``--own-time`` times are those of the processor, for machines that others use. The last line
of stdout is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.formats.blocks import BLOCK_TYPES, BlockType, Tensor
from hotcold.kernels.backend import (
    FFN_COUNTS,
    Batch,
    BatchLimits,
    FFNCall,
    FFNStats,
    FFNTensors,
    Floats,
    Norm,
)
from hotcold.kernels.cpu import CPUBackend
from hotcold.model.ffn.feed_forward import NO_NEURONS, LayerFFNs
from hotcold.model.ffn.normed import NormedFFN, NormedShape
from hotcold.model.mixers.device_buffers import DeviceBuffers
from hotcold.sparse.ffn import FFN

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.machine import commit
from lib.random_blocks import random_block_rows

WAYS = ("off", "exact", "by neuron")
STEPS = 6  #: of a sample
SURE = 1e4  #: a gate's bias that no product outweighs


def random_tensor(draw: np.random.Generator, type: BlockType, rows: int, columns: int) -> Tensor:
    if type.name == "F16":
        values = draw.standard_normal((rows, columns), np.float32) * np.float32(0.02)
        return Tensor(type, (rows, columns), values.astype(np.float16))
    return Tensor(type, (rows, columns), random_block_rows(draw, type, rows, columns, 0.02))


class Layers:
    """Copies of a layer, whose gates' biases say which neurons are active."""

    def __init__(self, backend: CPUBackend, type: BlockType, args: argparse.Namespace) -> None:
        (dim, neurons), self.rows = args.shape, args.rows
        draw, limits = np.random.default_rng(0), BatchLimits(args.rows, 1, 1, 1)
        self._batch = Batch(limits)
        self._batch.counts[:] = args.rows, args.rows, 0, 1
        self._x, self._out = backend.zeros((args.rows, dim)), backend.zeros((args.rows, dim))
        self._x[:] = draw.standard_normal((args.rows, dim), np.float32)
        self._biases: list[Floats] = []
        self._programs: dict[str, list[Any]] = {way: [] for way in args.ways}
        weight = backend.zeros((neurons,))
        weight[:] = 1
        device, stats = (
            DeviceBuffers(backend, limits, {}),
            FFNStats(backend.zeros((1, len(FFN_COUNTS)), np.int64)),
        )
        for _ in range(args.copies):
            gate, up = (random_tensor(draw, type, neurons, dim) for _ in range(2))
            bias = np.zeros(neurons, np.float32)
            self._biases.append(bias)
            normed = NormedFFN(
                NormedShape(neurons, "relu2"),
                gate=backend.matrix(gate, bias),
                up=backend.matrix(up),
                down=backend.matrix(random_tensor(draw, type, dim, neurons)),
                norm=Norm(weight, None, 1e-5),
            )
            turned = random_tensor(draw, type, neurons, dim)
            tensors = FFNTensors(gate, up, turned, "by_neuron", "relu2", gate_bias=bias)
            for way in args.ways:
                if way == "by neuron":
                    weights = backend.ffn_weights(tensors)
                    call = FFNCall(self._x, weights, self._batch, self._out, skip=True, stats=stats)
                    ops = partial(backend.ffn, call)
                else:
                    given = LayerFFNs(FFN(backend, NO_NEURONS, way, stats=stats), self._x)
                    mixer = normed.mixer(device, (), given)
                    ops = partial(mixer, self._x, self._batch, self._out, add=False)
                self._programs[way].append(backend.record(ops))

    def run(self, way: str, step: int, active: np.ndarray, clock: Callable[[], float]) -> float:
        """Seconds of a step."""
        programs = self._programs[way]
        self._biases[step % len(programs)][:] = np.where(active, SURE, -SURE)
        start = clock()
        programs[step % len(programs)].run()
        return max(clock() - start, 1e-9)


def measure(
    layers: Layers, args: argparse.Namespace, clock: Callable[[], float]
) -> dict[tuple[float, str], list[float]]:
    draw, neurons, step = np.random.default_rng(2), args.shape[1], 0
    medians: dict[tuple[float, str], list[float]] = {}
    until = time.perf_counter() + args.seconds
    for round in range(-1, args.rounds):
        for share in random.sample(args.shares, len(args.shares)):
            count = int(neurons * share / 100 + 0.5)
            for way in random.sample(args.ways, len(args.ways)):
                times = []
                for _ in range(STEPS):
                    active = np.zeros(neurons, bool)
                    active[draw.permutation(neurons)[:count]] = True
                    step += 1
                    times.append(layers.run(way, step, active, clock))
                if round >= 0:
                    medians.setdefault((share, way), []).append(statistics.median(times[1:]))
        if time.perf_counter() > until:
            break
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--type", default="TQ2_0")
    parser.add_argument("--shape", nargs=2, type=int, default=(2560, 6912), metavar=("DIM", "NEURONS"))
    parser.add_argument("--shares", nargs="+", type=float, default=[10, 20, 30, 40, 50], metavar="PERCENT")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--rows", type=int, default=1, help="sequences of a step")
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=240, help="begin no round after this time")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--own-time", action="store_true", help="of the processor; needs -t 1")
    args = parser.parse_args()
    if args.own_time and args.threads != 1:
        parser.error("--own-time needs -t 1")
    backend = CPUBackend(args.threads)
    clock = time.thread_time if args.own_time else time.perf_counter
    medians = measure(Layers(backend, BLOCK_TYPES[args.type], args), args, clock)
    rows = []
    print("active  way              ms  off over it (middle half)  rounds")
    for (share, way), times in sorted(medians.items()):
        over = [a / b for a, b in zip(medians.get((share, "off"), times), times, strict=True)]
        low, middle, high = statistics.quantiles(over * 2 if len(over) == 1 else over, n=4)
        ms = statistics.median(times) * 1e3
        over_it = f"{middle:.3f} ({low:.3f} to {high:.3f})"
        print(f"{share:5g}%  {way:<12}{ms:8.3f}  {over_it:<28}{len(times):6}", flush=True)
        rows.append({"share": share, "way": way, "ms": round(ms, 4), "off_over": [low, middle, high]})
    facts = {"isa": backend.isa, "threads": backend.threads, "type": args.type, "shape": args.shape}
    print(json.dumps({**facts, "commit": commit(), "rows": rows}))


if __name__ == "__main__":
    main()
