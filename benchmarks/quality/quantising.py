"""Hotcold's quantiser beside llama.cpp's: the error that each leaves, and how fast it is.

    python benchmarks/quality/quantising.py  # random weights of every kind
    python benchmarks/quality/quantising.py -m smollm2.gguf  # and those of a model

For each block type, without and with importance: the error's root mean square over llama.cpp's, of the worst
kind and of normal weights, and millions of weights a second. Each square counts the column's importance times
the size of the weight plus the root mean square of its neighbours, as Hotcold's quantiser weighs it. The two
take turns; ratios of speeds are the medians of the rounds', of times and of the processors' times, which say
more where other processes share the processors. Needs llama-cpp-python."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.formats.blocks import BlockType
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.cores import find_cores
from hotcold.kernels.quantising import quantise_rows, written_types

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.weight_kinds import KINDS, Floats, importance, sized_error_left, weights_of

from lib.llama import open_llama_cpp
from lib.llama import quantise_rows as quantise_by_llama_cpp
from lib.machine import commit

COLUMNS = 512  #: of a model's rows, so that each type has whole blocks


def weights_of_model(path: Path, tensors: int) -> dict[str, Floats]:
    """The first columns of evenly chosen matrices."""
    with open_gguf(path) as file:
        names = [
            name
            for name, info in file.tensors.items()
            if len(info.shape) == 2 and info.shape[1] >= COLUMNS and info.type.supported
        ]
        chosen = names[:: max(1, len(names) // tensors)][:tensors]
        loaded = {name: file.load(name).dequantise() for name in chosen}
    return {name: np.ascontiguousarray(values[:4096, :COLUMNS]) for name, values in loaded.items()}


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and the processors' seconds."""
    start = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def compare(type: BlockType, weights: dict[str, Floats], columns: Floats | None, args: Any) -> dict[str, Any]:
    def ours(values: Floats) -> Any:
        return quantise_rows(values, type, columns, args.threads)

    def theirs(values: Floats) -> Any:
        nbytes = type.row_bytes(values.shape[1])
        return quantise_by_llama_cpp(values, type.id, nbytes, columns, args.threads)

    ratios = {}
    for name, values in weights.items():
        errors = [sized_error_left(type, pack(values), values, columns) for pack in (ours, theirs)]
        ratios[name] = errors[0] / errors[1] if errors[1] else 1.0 if errors[0] == 0 else float("inf")
    values = np.tile(weights_of("normal"), (args.copies, 1))
    times = [(timed(lambda: ours(values)), timed(lambda: theirs(values))) for _ in range(args.rounds)]
    return {
        "type": type.name,
        "importance": columns is not None,
        "ratios": ratios,
        "worst": max(ratios, key=lambda name: ratios[name]),
        "mw_per_s": values.size / statistics.median(ours[0] for ours, _ in times) / 1e6,
        "llama_cpp_mw_per_s": values.size / statistics.median(theirs[0] for _, theirs in times) / 1e6,
        "faster": statistics.median(theirs[0] / ours[0] for ours, theirs in times),
        "faster_by_processor_time": statistics.median(theirs[1] / ours[1] for ours, theirs in times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, help="whose weights are packed, too")
    parser.add_argument("--tensors", type=int, default=12, help="of the model (12)")
    parser.add_argument("--types", nargs="*", help="block types (all that are written)")
    parser.add_argument("--threads", type=int, default=find_cores().wanted)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--copies", type=int, default=40, help="of 25,000 weights, in a timed call (40)")
    args = parser.parse_args()
    version = open_llama_cpp().__version__
    weights = {kind: weights_of(kind) for kind in KINDS}
    if args.model:
        weights |= weights_of_model(args.model, args.tensors)
    reports = []
    for type in written_types():
        if args.types and type.name not in args.types:
            continue
        for columns in (None, importance()):
            report = compare(type, weights, columns, args)
            reports.append(report)
            worst = report["worst"]
            print(
                f"{type.name:<7} {'importance' if columns is not None else '':<11}"
                f"error {report['ratios'][worst]:.4f} of llama.cpp's at most ({worst}), "
                f"{report['ratios']['normal']:.4f} of normal weights; "
                f"{report['mw_per_s']:.0f} and {report['llama_cpp_mw_per_s']:.0f} million weights/s: "
                f"{report['faster']:.1f} times as fast, "
                f"{report['faster_by_processor_time']:.1f} by processor time",
                flush=True,
            )
    print(json.dumps({"commit": commit(), "llama_cpp": version, "threads": args.threads, "types": reports}))


if __name__ == "__main__":
    main()
