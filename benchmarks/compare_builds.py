"""Two builds of Hotcold against each other, in turns: what a change costs or gains.

    python benchmarks/compare_builds.py old/.venv/bin/python new/.venv/bin/python --pairs 20
    python benchmarks/compare_builds.py old/src new/src --rows 1 2 3 4 8   # folders with a built package

Each build runs in processes of its own, one for each model, which wait while the other's turn is. A figure is
the median of the pairs' ratios, old time / new time, so more than 1 is a gain, with a 95 % interval
(bootstrap of the median). The figures are generation of one sequence (dense, `exact`, `predicted`, and
`exact` on a stock file), a prompt of 128, and 8 sequences; ``--rows`` adds steps with other numbers of
sequences. The models are synthetic (benchmarks/synthetic.py), 4096/11008. ``--gaps 0 50 200`` adds steps of
the built-in model, each that many microseconds of Python after the one before it (and after what the engine
itself takes between two), which are not part of the figure: what it costs to have the threads at work again.

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: of each file: arguments of synthetic.Recipe
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "by_neuron": {"active": 0.1, "layout": "by_neuron"},
    "stock": {"active": 0.1, "layout": "by_output"},
    "pwri": {"active": 0.1, "layout": "pwri"},
}
BUILT_IN = "built-in"  #: the model of that name, which needs no file
_PROMPT = 16  #: tokens before those that are generated
_BOOTSTRAP_ROUNDS = 2000


@dataclass(frozen=True)
class Figure:
    name: str
    model: str
    sparsity: str
    sequences: int  #: 0: a prompt
    tokens: int  #: of the prompt, or of each sequence
    gap_us: int = 0  #: of Python before each step, besides the engine's


FIGURES = (
    Figure("generation, dense", "dense", "off", 1, 16),
    Figure("generation, exact", "by_neuron", "exact", 1, 16),
    Figure("generation, exact, stock file", "stock", "exact", 1, 16),
    Figure("generation, predicted", "pwri", "predicted", 1, 16),
    Figure("prompt of 128, dense", "dense", "off", 0, 128),
    Figure("8 sequences, dense", "dense", "off", 8, 6),
    Figure("8 sequences, exact", "by_neuron", "exact", 8, 6),
)


def serve(path: str, sparsity: str, threads: int) -> None:
    """Of the build that runs this: answers lines ``sequences tokens gap_us seed`` with seconds per token."""
    from hotcold.demo import model_path
    from hotcold.engine.engine import Engine
    from hotcold.engine.request import Job, Request
    from hotcold.runtime.loading import load
    from hotcold.runtime.options import LoadOptions
    from hotcold.runtime.sampling import SamplingParams

    file, context = (model_path(), 256) if path == BUILT_IN else (Path(path), 512)
    model = load(file, LoadOptions(sparsity=sparsity, threads=threads, context=context, sequences=16))
    # Builds before sessions have it all in the model.
    session = model.session() if hasattr(model, "session") else model
    engine = Engine(session)
    vocab = 1000 if path == BUILT_IN else 20000
    prompt = [1] + [300 + i * 7919 % vocab for i in range(127)]
    print(session.sparsity, flush=True)
    for line in sys.stdin:
        sequences, tokens, gap_us, seed = map(int, line.split())
        if sequences == 0:
            request = Request(
                Job(prompt[:tokens], SamplingParams(temperature=0), max_tokens=1, ignore_eos=True)
            )
            start = time.perf_counter()
            engine.run([request])
            print((time.perf_counter() - start) / tokens, flush=True)
            continue
        requests = []
        for i in range(sequences):
            params = SamplingParams(seed=seed + i)
            requests.append(Request(Job(prompt[:_PROMPT], params, max_tokens=tokens + 20, ignore_eos=True)))
            engine.add(requests[-1])
        while len(requests[-1].output) < 2:
            engine.step()
        seconds = 0.0
        for _ in range(tokens):
            start = time.perf_counter()
            while gap_us and time.perf_counter() - start < gap_us * 1e-6:
                pass
            start = time.perf_counter()
            engine.step()
            seconds += time.perf_counter() - start
        for request in requests:
            engine.abort(request)
        print(seconds / tokens / sequences, flush=True)


class Build:
    """Processes of one build, one for each model and mode."""

    def __init__(self, where: Path, folder: Path, threads: int) -> None:
        self._python, self._environment = sys.executable, {**os.environ, "HOTCOLD_GPU": "off"}
        if where.is_dir():
            self._environment["PYTHONPATH"] = str(where.resolve())
        else:
            self._python = str(where)
        self._folder, self._threads = folder, threads
        self._processes: dict[tuple[str, str], subprocess.Popen[str]] = {}

    def seconds(self, figure: Figure, seed: int) -> float:
        """Per token."""
        key = figure.model, figure.sparsity
        if key not in self._processes:
            path = BUILT_IN if figure.model == BUILT_IN else self._folder / f"{figure.model}.gguf"
            command = [self._python, __file__, "--serve", str(path), figure.sparsity, str(self._threads)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._processes[key] = subprocess.Popen(command, env=self._environment, **pipes)
            self._ask(key, None)
        return float(self._ask(key, f"{figure.sequences} {figure.tokens} {figure.gap_us} {seed}\n"))

    def _ask(self, key: tuple[str, str], line: str | None) -> str:
        process = self._processes[key]
        assert process.stdin is not None and process.stdout is not None
        if line is not None:
            process.stdin.write(line)
            process.stdin.flush()
        answer = process.stdout.readline()  # an end of file where the process has ended
        if not answer:
            raise RuntimeError(f"a process of {self._python} has ended: {key}")
        return answer

    def close(self) -> None:
        for process in self._processes.values():
            process.communicate()  # the end of its input ends it


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % of resampled medians."""
    chosen = random.Random(0)
    medians = sorted(
        statistics.median(chosen.choices(ratios, k=len(ratios))) for _ in range(_BOOTSTRAP_ROUNDS)
    )
    return medians[_BOOTSTRAP_ROUNDS // 40], medians[-_BOOTSTRAP_ROUNDS // 40 - 1]


def compare(builds: list[Build], figures: list[Figure], pairs: int) -> list[dict[str, Any]]:
    samples: dict[str, list[list[float]]] = {figure.name: [] for figure in figures}
    for round in range(-1, pairs):  # the first warms memory and threads
        for figure in figures:
            order = [0, 1] if round % 2 else [1, 0]
            taken = {at: builds[at].seconds(figure, max(round, 0)) for at in order}
            if round >= 0:
                samples[figure.name].append([taken[0], taken[1]])
    report = []
    for figure in figures:
        ratios = [old / new for old, new in samples[figure.name]]
        old, new = (statistics.median(column) for column in zip(*samples[figure.name], strict=True))
        low, high = interval(ratios)
        report.append(
            {
                "figure": figure.name,
                "sequences": figure.sequences,
                "old_tok_s": 1 / old,
                "new_tok_s": 1 / new,
                "ratio": statistics.median(ratios),
                "ratio_low": low,
                "ratio_high": high,
                "pairs": pairs,
            }
        )
    return report


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("builds", nargs=2, type=Path, metavar="OLD NEW", help="interpreters, or src folders")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, nargs="*", default=[], help="sequences of more figures")
    parser.add_argument("--gaps", type=int, nargs="*", default=[], help="microseconds between two steps")
    parser.add_argument("--only-rows", action="store_true", help="only those of --rows and --gaps")
    parser.add_argument("--type", default="Q4_0", help="block type of the models (Q4_0)")
    args = parser.parse_args()
    from synthetic import Recipe, Shape, write

    figures = [] if args.only_rows else [*FIGURES]
    for n in args.rows:
        figures.append(Figure(f"{n} rows, dense", "dense", "off", n, 6))
        figures.append(Figure(f"{n} rows, exact", "by_neuron", "exact", n, 6))
    for gap_us in args.gaps:
        figures.append(Figure(f"built-in model, {gap_us} us apart", BUILT_IN, "exact", 1, 100, gap_us))
    shape = Shape(4096, 11008, args.layers, 32, 32, 32000, 2048)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in dict.fromkeys(figure.model for figure in figures):
            if model == BUILT_IN:
                continue
            write(folder / f"{model}.gguf", Recipe(shape, args.type, **MODELS[model]))
        builds = [Build(each, folder, args.threads) for each in args.builds]
        report = compare(builds, figures, args.pairs)
        for build in builds:
            build.close()
    for line in report:
        print(
            "{figure:<30} old {old_tok_s:7.1f}, new {new_tok_s:7.1f} tok/s: {ratio:.3f} "
            "[{ratio_low:.3f}, {ratio_high:.3f}]".format(**line)
        )
    print(json.dumps({"threads": args.threads, "layers": args.layers, "type": args.type, "figures": report}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
