"""The speed of one matrix times tokens, by block type and number of tokens, of one build or two in turns.

    python tools/linear_op.py old/src new/src            # folders with a built package
    HOTCOLD_ISA=avx2 python tools/linear_op.py src --types Q6_K F16 --tokens 16 128

Each build has a process of its own, which waits while the others run. A figure is the median over rounds, in
billions of products of a weight and an activation per second; with two builds also the median of the paired
ratios, old time / new time, and their range. The matrix comes from memory where it is larger than the cache.
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from lib.builds import build, serve

TYPES = ("F16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q5_0", "Q4_0", "IQ4_NL")


def serve_ops(types: list[str], tokens: list[int], rows: int, columns: int, threads: int) -> None:
    """Times one op of a type and a number of tokens with the build that runs this, in seconds."""
    import numpy as np

    from cpu.expert_layers import random_tensor
    from hotcold.formats.blocks import Tensor, block_type
    from hotcold.kernels.backend import Batch, BatchLimits
    from hotcold.kernels.cpu import CPUBackend

    random, most = np.random.default_rng(0), max(tokens)
    backend = CPUBackend(threads)
    batch = Batch(BatchLimits(most, most, 1, 1))
    x, out = backend.zeros((most, columns)), backend.zeros((most, rows))
    backend.write(x, random.standard_normal((most, columns), np.float32))
    programs = {}
    for name in types:
        type = block_type(name)
        if type.weights == 1:
            data = random.integers(0, 60, type.data_shape((rows, columns)), np.uint8)  # small numbers all
            tensor = Tensor(type, (rows, columns), data)
        else:
            tensor = random_tensor(random, type, rows, columns)
        matrix = backend.matrix(tensor)
        programs[name] = backend.record(lambda matrix=matrix: backend.linear(x, [matrix], batch, [out]))

    def answer(asked: tuple[str, int]) -> float:
        name, count = asked
        batch.counts[:] = count, 0, 0, 1
        start = time.perf_counter()
        programs[name].run()
        return time.perf_counter() - start

    serve(answer, backend.isa)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("builds", nargs="+", type=Path, metavar="SRC", help="src folders of built packages")
    parser.add_argument("--types", nargs="+", default=[*TYPES])
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 128])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    names = ("types", "tokens", "rows", "columns", "threads")
    settings = json.dumps({name: getattr(args, name) for name in names})
    builds = [build(child, __file__, settings) for child in args.builds]
    figures = []
    for type in args.types:
        for tokens in args.tokens:
            work = tokens * args.rows * args.columns / 1e9
            taken = [[child.ask((type, tokens)) for child in builds] for _ in range(args.rounds + 1)][1:]
            speeds = [round(work / statistics.median(column), 1) for column in zip(*taken, strict=True)]
            ratios = [row[0] / row[-1] for row in taken]
            figure = {"type": type, "tokens": tokens, "gmac_s": speeds, "ratio": statistics.median(ratios)}
            figures.append(figure | {"low": min(ratios), "high": max(ratios)})
            line = "{type:<7} {tokens:5} tokens: {gmac_s} GMAC/s, {ratio:.3f} ({low:.3f} to {high:.3f})"
            print(line.format(**figures[-1]), flush=True)
    isas = [child.first for child in builds]
    for child in builds:
        child.close()
    shape = {"rows": args.rows, "columns": args.columns}
    print(json.dumps({"isa": isas, "threads": args.threads, **shape, "figures": figures}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve_ops(**json.loads(sys.argv[2]))
    else:
        main()
