"""Times small models' steps beside reading weights: choosing a token, and products of matrices in cache.

    python benchmarks/cpu/small_models.py                      # this build
    python benchmarks/cpu/small_models.py old/src new/src      # two folders with built packages, in turns

Logits are random, normal, of deviation 3. ``top_k`` ranks them; ``draw`` draws from all of them, without a
top-k. Products are those of one matrix, which stays in cache, with the rows of a step. Times are those of one
thread's own, the least of some runs, so that machines which others use can serve. With two builds a figure is
the median of the pairs' ratios, old time / new time.

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.builds import build, in_turns, serve

#: (min-p, top-p) of draws
DRAWS = ((0.05, 1.0), (0.05, 0.95), (0.0, 1.0))
#: type, rows and columns: parts of SmolLM2 135M's and of Gemma 3 270M's, and rows that fill whole vectors
MATRICES = (("Q4_1", 600, 576), ("Q8_0", 200, 640), ("Q4_0", 100, 4096))


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for vocab in args.vocab:
        found += [{"op": "top_k", "vocab": vocab, "k": k} for k in (40, 1)]
        found += [{"op": "draw", "vocab": vocab, "min_p": min_p, "top_p": top_p} for min_p, top_p in DRAWS]
    for type, rows, columns in MATRICES:
        found += [{"op": "linear", "matrix": (type, rows, columns), "rows": each} for each in args.rows]
    return found


def made(case: dict[str, Any]) -> Callable[[], Any]:
    """Makes what a case runs, with the build that runs this."""
    import numpy as np

    from cpu.gathered import random_tensor
    from hotcold.engine.sampler import draw_by_id
    from hotcold.formats.blocks import BLOCK_TYPES
    from hotcold.kernels.backend import Batch, BatchLimits
    from hotcold.kernels.cpu import CPUBackend
    from hotcold.runtime.sampling import SamplingParams

    draw, backend = np.random.default_rng(0), CPUBackend(1)
    if case["op"] == "linear":
        (name, count, columns), rows = case["matrix"], case["rows"]
        matrix = backend.matrix(random_tensor(draw, BLOCK_TYPES[name], count, columns))
        batch = Batch(BatchLimits(rows, rows, 1, 1))
        batch.counts[:] = rows, rows, 0, rows
        x, out = backend.zeros((rows, columns)), backend.zeros((rows, count))
        x[:] = draw.standard_normal((rows, columns), np.float32)
        return backend.record(lambda: backend.linear(x, [matrix], batch, [out])).run
    logits = draw.normal(0, 3, (1, case["vocab"])).astype(np.float32)
    if case["op"] == "top_k":
        return lambda: backend.top_k(logits, 0, case["k"])
    params = SamplingParams(top_k=0, min_p=case["min_p"], top_p=case["top_p"], seed=1)
    return lambda: draw_by_id(logits[0], params, 0.3)


def answer_from(programs: dict[str, Callable[[], Any]]) -> Callable[[dict[str, Any]], float]:
    """Times a case: the least seconds of so many runs, after one that fills caches."""

    def answer(case: dict[str, Any]) -> float:
        repeat, key = case.pop("repeat"), json.dumps(case)
        if key not in programs:
            programs[key] = made(case)
        programs[key]()
        seconds = []
        for _ in range(repeat):
            start = time.thread_time()
            programs[key]()
            seconds.append(time.thread_time() - start)
        return min(seconds)

    return answer


def name_of(case: dict[str, Any]) -> str:
    if case["op"] == "linear":
        type, rows, columns = case["matrix"]
        return f"{type} {rows} x {columns}, rows of a step: {case['rows']}"
    if case["op"] == "top_k":
        return f"top-k {case['k']}, of {case['vocab']} logits"
    return f"min-p {case['min_p']:g}, top-p {case['top_p']:g}, of {case['vocab']} logits"


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("builds", nargs="*", type=Path, metavar="OLD NEW", help="src folders")
    parser.add_argument("--vocab", nargs="*", type=int, default=[49152, 262144])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 2, 4, 8], help="of a step, for products")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=30, help="runs of a turn, of which the fastest counts")
    args = parser.parse_args()
    builds = [build(each, __file__) for each in args.builds or [None]]
    report = []
    for case in cases(args):
        rounds = [in_turns(builds, {**case, "repeat": args.repeat}, pair) for pair in range(args.pairs)]
        case["us"] = [1e6 * statistics.median(own) for own in zip(*rounds, strict=True)]
        case["ratio"] = statistics.median(times[0] / times[-1] for times in rounds)
        report.append(case)
        ratio = f" {case['ratio']:.2f}" if len(builds) > 1 else ""
        print(f"{name_of(case):<40}" + " |".join(f"{us:10.1f} us" for us in case["us"]) + ratio, flush=True)
    for each in builds:
        each.close()
    print(json.dumps({"figures": report}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(answer_from({}))
    else:
        main()
