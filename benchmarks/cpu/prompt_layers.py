"""A prompt's rows in one layer with ReLU, beside the same layer with SiLU.

    python benchmarks/cpu/prompt_layers.py                      # this build
    python benchmarks/cpu/prompt_layers.py old/src new/src      # two folders with built packages, in turns

The layer is an expert of small experts' shape. Weights and rows are random; a bias of the gate makes a share
of the neurons active, others in each row. Ways:

    silu     down as a dot over all neurons: what a model without zeros takes
    rows     ReLU, down by neuron
    panels   ReLU, down in panels, as ordinary quantised files have it

All ways, shares and numbers of rows take turns within a round, in an order that is drawn, and with them the
builds. Times are those of the processor, of one thread, so that machines which others use can serve. Printed
are medians over the rounds: milliseconds, and those over SiLU's with as many rows, of the same build. The
last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.builds import build, in_turns, serve

WAYS = ("silu", "rows", "panels")


def gate_bias(std: float, dim: int, share: float) -> float:
    """The bias that makes this percentage of neurons active: products of weights of this deviation with rows
    of deviation 1 are normal."""
    return std * dim**0.5 * statistics.NormalDist().inv_cdf(share / 100)


class Layer:
    """A layer that computes some rows of a prompt in one way. It is made with the build that runs this."""

    def __init__(self, case: dict[str, Any]) -> None:
        import numpy as np

        from cpu.gathered import random_tensor
        from hotcold.formats.blocks import BLOCK_TYPES
        from hotcold.kernels.backend import Batch, BatchLimits, FFNCall, FFNTensors
        from hotcold.kernels.cpu import CPUBackend

        (dim, neurons), type, by_neuron = case["shape"], BLOCK_TYPES[case["type"]], case["way"] == "rows"
        draw, backend, rows = np.random.default_rng(0), CPUBackend(1), case["rows"]
        gate, up = (random_tensor(draw, type, neurons, dim) for _ in range(2))
        bias = gate_bias(float(gate.dequantise().std()), dim, case["share"])
        self.tensors = FFNTensors(
            gate=gate,
            up=up,
            down=random_tensor(draw, type, *((neurons, dim) if by_neuron else (dim, neurons))),
            down_layout="by_neuron" if by_neuron else "by_output",
            activation="silu" if case["way"] == "silu" else "relu",
            gate_bias=np.full(neurons, bias, np.float32),
        )
        weights = backend.ffn_weights(self.tensors)
        batch = Batch(BatchLimits(rows, 1, 1, 1))
        batch.counts[:] = rows, 0, 0, 1
        self.x, out = backend.zeros((rows, dim)), backend.zeros((rows, dim))
        self.x[:] = draw.standard_normal((rows, dim), np.float32)
        skip = case["way"] != "silu"
        self._program = backend.record(lambda: backend.ffn(FFNCall(self.x, weights, batch, out, skip=skip)))
        self._program.run()

    def seconds(self) -> float:
        start = time.process_time()
        self._program.run()
        return time.process_time() - start


def answer_from(layers: dict[str, Layer]) -> Callable[[dict[str, Any]], float]:
    """Times a case: the less of two runs, after one to caches that others have filled."""

    def answer(case: dict[str, Any]) -> float:
        key = json.dumps(case)
        if key not in layers:
            layers[key] = Layer(case)
        layers[key].seconds()
        return min(layers[key].seconds() for _ in range(2))

    return answer


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    """SiLU's layer takes as long whatever its gates are."""
    one = {"type": args.type, "shape": list(args.shape)}
    return [
        {**one, "way": way, "share": share, "rows": rows}
        for rows in args.rows
        for way in WAYS
        for share in (args.shares[:1] if way == "silu" else args.shares)
    ]


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("builds", nargs="*", type=Path, metavar="OLD NEW", help="src folders")
    parser.add_argument("--type", default="Q4_0")
    parser.add_argument("--shape", nargs=2, type=int, default=(2048, 768), metavar=("DIM", "NEURONS"))
    parser.add_argument("--rows", nargs="+", type=int, default=[2, 8, 64])
    parser.add_argument("--shares", nargs="+", type=float, default=[10, 50], metavar="PERCENT")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    builds = [build(child, __file__) for child in args.builds or [None]]
    asked = cases(args)
    taken: list[list[list[float]]] = [[[] for _ in builds] for _ in asked]
    for round in range(args.rounds):
        for at in random.sample(range(len(asked)), len(asked)):
            for build_times, seconds in zip(taken[at], in_turns(builds, asked[at], round), strict=True):
                build_times.append(seconds)
    for child in builds:
        child.close()
    silu: dict[int, list[float]] = {}
    for case, times in zip(asked, taken, strict=True):
        case["ms"] = [1e3 * statistics.median(build_times) for build_times in times]
        if case["way"] == "silu":
            silu[case["rows"]] = case["ms"]
        case["of_silu"] = [ms / whole for ms, whole in zip(case["ms"], silu[case["rows"]], strict=True)]
        figures = (f"{ms:9.3f} ms {of:5.2f}" for ms, of in zip(case["ms"], case["of_silu"], strict=True))
        print(f"{case['rows']:4} rows  {case['way']:<7}{case['share']:4g} %" + " |".join(figures), flush=True)
    print(json.dumps({"rounds": args.rounds, "figures": asked}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(answer_from({}))
    else:
        main()
