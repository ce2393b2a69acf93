"""Measures what guessed tokens bring: a step's cost by its rows, and speed by the share of right guesses.

    python benchmarks/cpu/drafts.py -m FILE --threads 2 --sparsity off exact
    python benchmarks/cpu/drafts.py --made Q4_0 Q4_K_M --work FOLDER --threads 2 --sparsity off exact

First steps of 1 to 8 rows of one sequence run in turns: their times beside that of one row. Then texts of
known tokens are replayed, with a share of right guesses: the rate with guesses beside that without,
of texts in turns, the best that the cost curve allows (max over k of (1 - p^k) / (1 - p) / cost(k)), and the
share of it that was reached.

With ``--made`` models of 4096 dimensions and 14336 neurons, 10 % of them active, are written to ``--work``,
random ones with few layers; types that are no plain blocks are llama.cpp's quantiser's (llama-cpp-python).

The last line of stdout is one JSON object; ratios of one run are all that a shared machine can tell.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hotcold.engine.engine import Engine
from hotcold.engine.request import Job, Request
from hotcold.engine.speculation import Speculation
from hotcold.kernels.backend import DECODE_ROWS
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.sampling import SamplingParams
from hotcold.runtime.session import Session
from hotcold.tasks.bench import prompt_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.drafts import Replay, best_possible
from lib.llama import quantise
from lib.machine import commit
from lib.models import Recipe, Shape, write

MOST = 8  # rows
PLAIN = ("F16", "Q8_0", "Q4_0")  # types that are written as they are


class Always(Speculation):
    """A number of guesses in each step, all wrong."""

    n = 0

    def choose(self, buffers: Mapping[Request, int], rows: int, spare: int) -> dict[Request, Sequence[int]]:
        return {request: [0] * self.n for request, room in buffers.items() if 0 < self.n <= room}


def made(folder: Path, type: str, layers: int, threads: int) -> Path:
    """A model in a folder, written where it is not there yet."""
    path = folder / f"relu-4096x14336x{layers}-{type}.gguf"
    if path.exists():
        return path
    shape, part = Shape(4096, 14336, layers, 32, 8, 8192, 2048), path.with_suffix(".part")
    write(part, Recipe(shape, type if type in PLAIN else "F16", active=0.1))
    if type not in PLAIN:
        quantise(part, whole := path.with_suffix(".quantised"), type, threads)
        whole.replace(part)
    return part.rename(path)


def request_of(session: Session, tokens: int, seed: int, temperature: float) -> Request:
    params = SamplingParams(temperature=temperature, seed=seed)
    job = Job(prompt_of(session.model, 32), params, max_tokens=tokens, ignore_eos=True, cache=False)
    return Request(job)


def costs(session: Session, rounds: int, temperature: float) -> list[float]:
    """Seconds of a step by rows: medians."""
    speculation = Always([], MOST - 1, DECODE_ROWS)
    engine = Engine(session, speculation=speculation)
    request = request_of(session, rounds * MOST + MOST + 2, 0, temperature)
    engine.add(request)
    while not request.output:
        engine.step()
    times: list[list[float]] = [[] for _ in range(MOST)]
    for _ in range(rounds):
        for speculation.n in range(MOST):
            start = time.perf_counter()
            engine.step()
            times[speculation.n].append(time.perf_counter() - start)
    engine.abort(request)
    return [statistics.median(each) for each in times]


def speeds(session: Session, share: float, args: argparse.Namespace) -> float:
    """The median ratio of the times of texts without and with guesses."""
    ratios = []
    replay = Replay(share, session.model.config.vocab)
    speculation = Speculation([replay], MOST - 1, DECODE_ROWS)
    for seed in range(args.texts):
        seconds = []
        for drafts in (None, speculation):
            request = request_of(session, args.tokens, seed, args.temperature)
            engine = Engine(session, reuse=False, speculation=drafts)
            engine.add(request)
            while not request.output:
                engine.step()
            start = time.perf_counter()
            while not request.finished:
                engine.step()
            seconds.append(time.perf_counter() - start)
            if drafts is None:
                replay.add(request.seed, request.output)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios[args.texts > 2 :])  # the first one teaches what steps cost


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("-m", "--model", type=Path, help="the built-in model, where not given")
    parser.add_argument("--made", nargs="+", metavar="TYPE", help="models that are made, of block types")
    parser.add_argument("--layers", type=int, default=3, help="of these (3)")
    parser.add_argument("--work", type=Path, help="where these are kept (default: a temporary folder)")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--sparsity", nargs="+", default=["off"], choices=["off", "exact", "predicted"])
    parser.add_argument("--right", type=float, nargs="+", default=[0, 0.3, 0.5, 0.7, 0.9])
    parser.add_argument("--tokens", type=int, default=150, help="of each text (150)")
    parser.add_argument("--texts", type=int, default=5, help="for each share (5)")
    parser.add_argument("--rounds", type=int, default=15, help="of steps of 1 to 8 rows (15)")
    parser.add_argument("--temperature", type=float, default=0.8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        report = []
        for type in args.made or [""]:
            path = made(folder, type, args.layers, args.threads or 1) if type else args.model
            report += [row | {"type": type} for row in measured(path, args)]
    print(json.dumps({"figures": report, "commit": commit()}))


def measured(path: Path | None, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of a model in each mode."""
    report = []
    for sparsity in args.sparsity:
        context = 64 + max(args.tokens, args.rounds * MOST + MOST)
        options = LoadOptions(threads=args.threads, sparsity=sparsity, context=context, gpu="off")
        session = load(path, options).session()
        curve = costs(session, args.rounds, args.temperature)
        ratios = [each / curve[0] for each in curve]
        name = f"{session.model.name}, {sparsity}"
        print(f"{name}: a step of one row takes {curve[0] * 1e3:.2f} ms;", "of 2 to 8", end=" ")
        print(", ".join(f"{each:.2f}" for each in ratios[1:]), "of that", flush=True)
        for share in args.right:
            speed, best = speeds(session, share, args), best_possible(share, ratios)
            print(f"  right {share:.1f}: x{speed:.2f} of x{best:.2f} ({speed / best:.0%})", flush=True)
            report.append(
                {"sparsity": sparsity, "right": share, "speed": speed, "best": best, "costs": ratios}
            )
        session.model.close()
    return report


if __name__ == "__main__":
    main()
