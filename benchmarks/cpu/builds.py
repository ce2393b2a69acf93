"""Two builds of Hotcold against each other, in turns: what a change costs or gains.

    python benchmarks/cpu/builds.py old/.venv/bin/python new/.venv/bin/python --pairs 20
    python benchmarks/cpu/builds.py old/src new/src --rows 1 2 3 4 8   # folders with a built package

Each build runs in processes of its own, one for each model, which wait while the other's turn is. A figure is
the median of the pairs' ratios, old time / new time, so more than 1 is a gain, with a 95 % interval
(bootstrap of the median). The figures are generation of one sequence (dense, `exact`, `predicted`, and
`exact` on a stock file), a prompt of 128, and 8 sequences; ``--rows`` adds steps with other numbers of
sequences. The models are synthetic (benchmarks/lib/models.py), 4096/11008. ``--gaps 0 50 200`` adds steps of
the built-in model, each that many microseconds of Python after the one before it (and after what the engine
itself takes between two), which are not part of the figure: what it costs to have the threads at work again.

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.builds import Child, build, serve, turns
from lib.report import interval

#: of each file: arguments of synthetic.Recipe
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "by_neuron": {"active": 0.1, "layout": "by_neuron"},
    "stock": {"active": 0.1, "layout": "by_output"},
    "pwri": {"active": 0.1, "layout": "pwri"},
}
BUILT_IN = "built-in"  #: the model of that name, which needs no file
_PROMPT = 16  #: tokens before the generated ones


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


def answer_with(path: str, sparsity: str, threads: int) -> Callable[[dict[str, int]], float]:
    """Seconds per token of the build that runs this; it uses nothing but what builds have had for long."""
    from hotcold import LLM

    built_in = path == BUILT_IN
    context = 256 if built_in else 512
    llm = LLM(None if built_in else path, sparsity=sparsity, threads=threads, context=context, sequences=16)
    vocab = 1000 if built_in else 20000
    prompt = [1] + [300 + i * 7919 % vocab for i in range(127)]

    def answer(asked: dict[str, int]) -> float:
        engine, sequences, tokens = llm.engine, asked["sequences"], asked["tokens"]
        if sequences == 0:
            request = llm.request(prompt[:tokens], temperature=0.0, max_tokens=1, ignore_eos=True)
            start = time.perf_counter()
            engine.run([request])
            return (time.perf_counter() - start) / tokens
        requests = []
        for i in range(sequences):
            seed = asked["seed"] + i
            requests.append(llm.request(prompt[:_PROMPT], seed=seed, max_tokens=tokens + 20, ignore_eos=True))
            engine.add(requests[-1])
        while len(requests[-1].output) < 2:
            engine.step()
        seconds = 0.0
        for _ in range(tokens):
            start = time.perf_counter()
            while asked["gap_us"] and time.perf_counter() - start < asked["gap_us"] * 1e-6:
                pass
            start = time.perf_counter()
            engine.step()
            seconds += time.perf_counter() - start
        for request in requests:
            engine.abort(request)
        return seconds / tokens / sequences

    return answer


class Build:
    """Processes of one build, one for each model and mode."""

    def __init__(self, where: Path, folder: Path, threads: int) -> None:
        self._where, self._folder, self._threads = where, folder, threads
        self._processes: dict[tuple[str, str], Child] = {}

    def seconds(self, figure: Figure, seed: int) -> float:
        """Per token."""
        key = figure.model, figure.sparsity
        if key not in self._processes:
            path = BUILT_IN if figure.model == BUILT_IN else self._folder / f"{figure.model}.gguf"
            self._processes[key] = build(self._where, __file__, path, figure.sparsity, self._threads)
        return float(self._processes[key].ask({**asdict(figure), "seed": seed}))

    def close(self) -> None:
        for process in self._processes.values():
            process.close()


def compare(builds: list[Build], figures: list[Figure], pairs: int) -> list[dict[str, Any]]:
    samples: dict[str, list[list[float]]] = {figure.name: [] for figure in figures}
    for round in range(-1, pairs):  # the first warms memory and threads
        for figure in figures:
            taken = {at: builds[at].seconds(figure, max(round, 0)) for at in turns(2, round)}
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
    from lib.models import Recipe, Shape, write

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
        serve(answer_with(sys.argv[2], sys.argv[3], int(sys.argv[4])))
    else:
        main()
