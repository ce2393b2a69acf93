"""The ops that keep a state, by themselves: decoding of some sequences, and prompts, at published shapes.

    python benchmarks/cpu/states.py                      # this build
    python benchmarks/cpu/states.py old/src new/src      # two folders with built packages, in turns

Inputs are random; states are in slots, which decoding reads and writes in place. A run goes through as many
layers as the model has, each with a state of its own, so that decoding finds them in memory as a model's step
does. GB/s of decoding are bytes of states, read once and written once for each sequence; tokens/s are rows by
seconds of all layers of this op. With two builds a figure is the median of the pairs' ratios, old time / new
time.

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.builds import build, in_turns, serve

#: op -> shapes: gated_delta (Hk, Hv, dk, dv), ssm_scan (H, p, n, G), short_conv (C, k); and layers.
MODELS: dict[str, dict[str, tuple[tuple[int, ...], int]]] = {
    "Qwen3.5-9B": {"gated_delta": ((16, 32, 128, 128), 24), "short_conv": ((8192, 4), 24)},
    "Nemotron 3 Nano": {"ssm_scan": ((64, 64, 128, 8), 23), "short_conv": ((6144, 4), 23)},
    "LFM2-8B-A1B": {"short_conv": ((2048, 3), 18)},
}


def state_shape(op: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if op == "short_conv":
        return shape[1] - 1, shape[0]
    return shape[1:] if op == "gated_delta" else shape[:3]


def recorded(backend: Any, case: dict[str, Any]) -> Any:
    """A program of all layers of a case."""
    import numpy as np

    from hotcold.kernels.backend import Batch, BatchLimits, DeltaCall, ScanCall

    calls = {"gated_delta": DeltaCall, "ssm_scan": ScanCall}
    op, shape, rows, sequences = case["op"], case["shape"], case["rows"], case["sequences"]
    random, total = np.random.default_rng(1), rows * sequences
    batch = Batch(BatchLimits(total, sequences, 1, 1))
    batch.counts[:] = (total, sequences if rows == 1 else 0, 0, sequences)
    for sequence in range(sequences):
        first = sequence * rows
        batch.sequence[first : first + rows] = sequence
        batch.first_rows[sequence], batch.row_counts[sequence] = first, rows
        batch.state_from[sequence] = sequence
        by_row = len(batch.state_to) == batch.limits.tokens  # not so in older builds
        batch.state_to[first + rows - 1 if by_row else sequence] = sequence

    def some(*axes: int) -> Any:
        return random.standard_normal(axes).astype(np.float32)

    states = [backend.zeros((sequences, *state_shape(op, shape))) for _ in range(case["layers"])]
    for state in states:
        state[:] = 0.01
    args: tuple[Any, ...]
    further: dict[str, Any]
    if op == "short_conv":
        args, out = (some(total, shape[0]), some(*shape), None), backend.zeros((total, shape[0]))
        further = {"activation": "none" if shape[1] == 3 else "silu"}
    elif op == "gated_delta":
        keys, heads, dk, dv = shape
        args = some(total, 2 * keys * dk + heads * dv), -abs(some(total, heads)), some(total, heads)
        out = backend.zeros((total, heads, dv))
        further = {"keys": keys, "key_dim": dk, "tiled": True, "eps": 1e-6}
    else:
        heads, width, size, groups = shape
        mixed = some(total, heads * width + 2 * groups * size)
        args = mixed, some(total, heads), some(heads), -abs(some(heads)), some(heads)
        out, further = backend.zeros((total, heads, width)), {"groups": groups}

    def layers() -> None:
        for state in states:
            values = *args, batch, state, out
            if op == "short_conv":
                backend.short_conv(*values, **further)
            else:
                getattr(backend, op)(calls[op](*values, **further))

    return backend.record(layers)


def answer_with(threads: int) -> Callable[[dict[str, Any]], float]:
    """Times a case with the current build: the fewest seconds of several runs."""
    from hotcold.kernels.cpu import CPUBackend

    backend = CPUBackend(threads=threads)
    ready: dict[str, Any] = {}

    def answer(case: dict[str, Any]) -> float:
        repeat, key = case.pop("repeat"), json.dumps(case)
        if key not in ready:
            ready.clear()  # states are large
            ready[key] = recorded(backend, case)
            ready[key].run()
        seconds = []
        for _ in range(repeat):
            start = time.perf_counter()
            ready[key].run()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    return answer


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    case_list = []
    for model, ops in MODELS.items():
        for op, (shape, layers) in ops.items():
            one = {"model": model, "op": op, "shape": shape, "layers": layers}
            case_list += [{**one, "rows": 1, "sequences": each} for each in args.sequences]
            # Of a prompt the time grows with the layers alone.
            case_list += [{**one, "rows": each, "sequences": 1} for each in args.prompts]
    return case_list


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("builds", nargs="*", type=Path, metavar="OLD NEW", help="src folders")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3, help="runs of a turn; the fastest counts")
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 8], help="that decode")
    parser.add_argument("--prompts", type=int, nargs="*", default=[128], help="rows")
    args = parser.parse_args()
    builds = [build(child, __file__, args.threads) for child in args.builds or [None]]
    report = []
    for case in cases(args):
        pairs = [in_turns(builds, {**case, "repeat": args.repeat}, pair) for pair in range(args.pairs)]
        moved = 8 * math.prod(state_shape(case["op"], case["shape"])) * case["layers"] * case["sequences"]
        row: dict[str, Any] = dict(case)
        row["ms"] = [1e3 * statistics.median(child) for child in zip(*pairs, strict=True)]
        row["gb_s"] = [moved / ms / 1e6 for ms in row["ms"]]
        row["tokens_s"] = [1e3 * case["rows"] * case["sequences"] / ms for ms in row["ms"]]
        ratios = [times[0] / times[-1] for times in pairs]
        row["ratio"] = [statistics.median(ratios), min(ratios), max(ratios)]
        report.append(row)
        speeds = [f"{gb:5.1f} GB/s" if case["rows"] == 1 else " " * 10 for gb in row["gb_s"]]
        figures = (
            f"{ms:8.2f} ms {speed} {tokens:8.0f} tokens/s"
            for ms, speed, tokens in zip(row["ms"], speeds, row["tokens_s"], strict=True)
        )
        rows = f"prompt of {case['rows']}" if case["rows"] > 1 else f"decode {case['sequences']}"
        ratio = " {:.2f} [{:.2f}, {:.2f}]".format(*row["ratio"]) if len(builds) > 1 else ""
        print(f"{case['model']:<16}{case['op']:<12}{rows:<14}" + " | ".join(figures) + ratio, flush=True)
    for child in builds:
        child.close()
    print(json.dumps({"threads": args.threads, "figures": report}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(answer_with(int(sys.argv[2])))
    else:
        main()
