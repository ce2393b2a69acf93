"""Measures what more threads gain: generation and prompts with 2, 4, 8 and 16 threads of one machine, in
turns.

    python benchmarks/cpu/threads.py                        # as many of those as there are cores for
    python benchmarks/cpu/threads.py --threads 1 2 --layers 2 --rounds 3
    python benchmarks/cpu/threads.py --built-in             # many small steps a token: waits, not memory

The model is synthetic (benchmarks/lib/models.py), 4096/11008 in Q4_0 with a predictor, a tenth of its neurons
active, in all three modes; or another file (``-m``). Each number of threads has a model of its own in memory.
In a round each of them measures how fast its threads read memory, then runs a prompt and generates. A figure
is a median with its range. "of ... GB/s" is what the same threads read in that round, with the share that
generation used of it; "times" is the speed over that of the fewest threads in the same round.

The last line of stdout is one JSON object: what each round measured, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotcold.demo import model_path
from hotcold.engine.engine import Engine
from hotcold.kernels.cores import available_cores
from hotcold.kernels.cpu import CPUBackend, ReadProbe
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.tasks.bench import Round, measure, prompt_of
from hotcold.tasks.reports import Setup

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.contestants import order
from lib.models import Recipe, Shape, write

FIGURES = ("tok_s", "gb_s", "read_bandwidth_gb_s", "bandwidth_share", "prompt_tok_s", "python_share")


@dataclass(frozen=True)
class Threads:
    threads: int
    sparsity: str
    engine: Engine
    probe: ReadProbe

    @property
    def name(self) -> str:
        return f"{self.sparsity}, {self.threads} threads"


def contestants(path: Path, modes: list[str] | None, threads: list[int], context: int) -> list[Threads]:
    """Opens contestants for each number of threads, fewest first; ``modes`` None: all that the file has."""
    all_threads = []
    for n in sorted(threads):
        model = load(path, LoadOptions(threads=n, context=context, sequences=1, gpu="off"))
        assert isinstance(model.backend, CPUBackend)
        probe = ReadProbe(model.backend)
        for mode in modes or ["off", "exact", "predicted"]:
            all_threads.append(Threads(n, mode, Engine(model.session(mode)), probe))
    return all_threads


def run_rounds(all: list[Threads], rounds: int, n_prompt: int, n_gen: int) -> dict[str, list[Round]]:
    by_contestant: dict[str, list[Round]] = {contestant.name: [] for contestant in all}
    by_name = {contestant.name: contestant for contestant in all}
    for round in range(-1, rounds):  # the first warms memory and threads
        for name in order(list(by_name), max(round, 0)):
            contestant = by_name[name]
            prompt = prompt_of(contestant.engine.session.model, n_prompt)
            taken = measure(contestant.engine, prompt, [n_gen], contestant.probe, seed=max(round, 0))
            if round >= 0:
                by_contestant[name].append(taken)
    return by_contestant


def summary(all: list[Threads], rounds: dict[str, list[Round]]) -> list[dict[str, Any]]:
    fewest = min(contestant.threads for contestant in all)
    report = []
    for contestant in all:
        line: dict[str, Any] = {"sparsity": contestant.sparsity, "threads": contestant.threads}
        for figure in FIGURES:
            values = [value for r in rounds[contestant.name] if (value := getattr(r, figure)) is not None]
            line[figure] = statistics.median(values) if values else None
            line[f"{figure}_range"] = [min(values), max(values)] if values else None
        base = rounds[f"{contestant.sparsity}, {fewest} threads"]
        pairs = zip(rounds[contestant.name], base, strict=True)
        line["times"] = statistics.median([a.tok_s / b.tok_s for a, b in pairs if a.tok_s and b.tok_s])
        line["rounds"] = [{name: getattr(r, name) for name in FIGURES} for r in rounds[contestant.name]]
        report.append(line)
    return report


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    cores = available_cores()
    counts = [n for n in (2, 4, 8, 16) if n <= cores] or [1]
    parser.add_argument("--threads", type=int, nargs="+", default=counts, help=f"here: {counts}")
    parser.add_argument("-m", "--model", type=Path, help="a GGUF file, instead of a synthetic one")
    parser.add_argument("--built-in", action="store_true", help="the built-in model")
    parser.add_argument("--sparsity", nargs="+", choices=("off", "exact", "predicted"), help="modes")
    parser.add_argument("--layers", type=int, default=8, help="of the synthetic model (8)")
    parser.add_argument("--type", default="Q4_0", help="its block type (Q4_0)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--generate", type=int, default=32)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, modes = args.model, args.sparsity
        if args.built_in:
            path, modes = model_path(), modes or ["off", "exact"]
        elif path is None:
            path = Path(folder) / "synthetic.gguf"
            shape = Shape(4096, 11008, args.layers, 32, 32, 32000, 2048)
            write(path, Recipe(shape, args.type, 0.1, "pwri"))
        all = contestants(path, modes, args.threads, args.prompt + args.generate + 1)
        setup = Setup.from_session(all[0].engine.session)
        print(f"{setup.model}, {setup.processor}, {setup.isa}, {cores} cores", flush=True)
        report = summary(all, run_rounds(all, args.rounds, args.prompt, args.generate))
    for line in report:
        low, high = line["tok_s_range"]
        print(
            "{sparsity:<10}{threads:3} threads: {tok_s:7.1f} tok/s [{low:.1f}, {high:.1f}]; "
            "{times:.2f} times; "
            "{gb_s:.1f} of {read_bandwidth_gb_s:.1f} GB/s, {bandwidth_share:.2f}; "
            "prompt {prompt_tok_s:.0f}; Python {python_share:.1%}".format(low=low, high=high, **line)
        )
    print(json.dumps({"processor": setup.processor, "isa": setup.isa, "cores": cores, "figures": report}))


if __name__ == "__main__":
    main()
