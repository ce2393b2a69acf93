"""Speed on one machine against llama.cpp and PowerInfer, in interleaved rounds.

    python benchmarks/cpu/compare.py --powerinfer PowerInfer/build/bin/main --out results
    python benchmarks/cpu/compare.py --types Q4_0 Q8_0 F16 --active 0.1 0.05 0.2 0.4 --out results
    python benchmarks/cpu/compare.py --quick --out results    # all that matters, in ten minutes

``--quick`` is told by benchmarks/cpu/quick.py; what follows is of the long comparison.

The models are synthetic (benchmarks/lib/models.py) and made from one seed. Contestants, for every block type
and share of active neurons:

- ``dense``: ours on a stock GGUF of a SiLU model, sparsity off (with ``--ungated`` of squared ReLU, whose
  down rows then lie so that neurons can be left out: that costs time where none is);
- ``llama_cpp``: llama.cpp on the same file;
- ``exact``: ours, lossless sparsity, on weights that lie by neuron (those of the PWRI file, which once in
  memory are those of the by-neuron GGUF: one copy serves both modes);
- ``exact_stock``: ours, lossless sparsity, on a stock GGUF of the ReLU model, down by output;
- ``predicted``: ours with PowerInfer's predictor, on the PWRI file;
- ``powerinfer``: PowerInfer's ``main`` on that file; its sparse FFN computes F16 and Q4_0 alone.

Every round runs each once, in turning and alternating order, phase by phase: all prompts, then the first
piece of everyone's generation (``--pieces``), and so on. Before and after each the machine's state is told
(benchmarks/lib/machine.py), and the read bandwidth is probed before it; a ratio is made of two samples of
the same phase of one round in the same state. A shared machine changes its state every second or two, so
short pieces leave more pairs. llama.cpp comes from llama-cpp-python, built from source
(CMAKE_ARGS=-DGGML_NATIVE=ON). ``--out`` gets ``speed.md``, ``speed.json`` with every sample, and
``speed.png``. The last line of stdout is a JSON object with the ratios of the first type and share.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.session import Session

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cpu import quick as quick_comparison
from lib import long_report as report
from lib import models as synthetic
from lib.long_contestants import Contestant, Lengths, LlamaCpp, Ours, PowerInfer
from lib.machine import MachineState

REPOSITORY = Path(__file__).resolve().parents[2]


class Models:
    """The files, written when first needed, and ours on them."""

    def __init__(self, args: argparse.Namespace, folder: Path, *, ungated: bool = False) -> None:
        self.args, self.folder, self.ungated = args, folder, ungated
        dim, neurons, heads, kv_heads, vocab = args.shape
        self.shape = synthetic.Shape(dim, neurons, args.layers, heads, kv_heads, vocab, 2048)

    @property
    def dense_active(self) -> float | None:
        """The share of the file that the dense contestants run: an ungated model has no SiLU twin."""
        return self.args.active[0] if self.ungated else None

    def path(self, type: str, active: float | None, layout: str) -> Path:
        shape = "x".join(map(str, (*self.args.shape, self.args.layers)))
        what = "silu" if active is None else f"{'ungated' if self.ungated else 'relu'}{active:g}"
        path = self.folder / f"{shape}-{type}-{what}-{layout}.gguf"
        if not path.exists():
            recipe = synthetic.Recipe(self.shape, type, active, layout, gated=not self.ungated)
            synthetic.write(path, recipe, self.args.vocabulary)
            say(f"wrote {path.name}, {path.stat().st_size / 1e9:.2f} GB")
            for figures in synthetic.verify(path)[:1] if active is not None else ():
                say(f"  layer 0 on random tokens: {figures}")
        return path

    def ours(self, path: Path, sparsity: str, lengths: Lengths) -> Session:
        options = LoadOptions(
            sparsity=sparsity, threads=self.args.threads, context=lengths.context,
            sequences=max(1, lengths.sequences), gpu="off",
        )  # fmt: skip
        session = load(path, options).session()
        for note in session.notes:
            say(f"  {path.name}, {sparsity}: {note}")
        return session


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def dense_contestants(models: Models, type: str, lengths: Lengths) -> dict[str, Contestant]:
    """Those that do not depend on the active share."""
    path = models.path(type, models.dense_active, "by_output")
    found: dict[str, Contestant] = {"dense": Ours(models.ours(path, "off", lengths), lengths)}
    if not models.args.no_llama_cpp:
        try:
            llama = LlamaCpp(path, models.args.threads, lengths)
        except ImportError:
            say("llama-cpp-python is not installed: ratios to llama.cpp stay null")
        else:
            found["llama_cpp"] = llama
            say(f"llama.cpp is faster with flash attention: {llama.flash_attention}")
    return found


def sparse_contestants(models: Models, type: str, active: float, lengths: Lengths) -> dict[str, Contestant]:
    stock = models.path(type, active, "by_output")
    pwri = models.path(type, active, "pwri")
    predicted = models.ours(pwri, "predicted", lengths)
    found: dict[str, Contestant] = {
        "exact": Ours(predicted.model.session("exact"), lengths),
        "exact_stock": Ours(models.ours(stock, "exact", lengths), lengths),
        "predicted": Ours(predicted, lengths),
    }
    binary = models.args.powerinfer
    if binary is None:
        say("no --powerinfer: ratios to PowerInfer stay null")
    elif type not in synthetic.POWERINFER_TYPES:
        say(f"PowerInfer's sparse FFN gives garbage in {type}: ratios to it stay null")
    else:
        found["powerinfer"] = PowerInfer(binary, pwri, models.args.threads, models.args.powerinfer_tokens)
    return found


def order(names: list[str], round: int) -> list[str]:
    """Turns by one every second round and runs backwards in the others."""
    at = round // 2 % len(names)
    turned = names[at:] + names[:at]
    return turned if round % 2 == 0 else turned[::-1]


def run_rounds(
    contestants: dict[str, Contestant],
    machine: MachineState,
    args: argparse.Namespace,
    type: str,
    active: float,
) -> Iterator[report.Sample]:
    for contestant in contestants.values():
        for _, run in contestant.phases(args.rounds):  # warms memory, threads and the file cache
            run()
    for round in range(args.rounds):
        names = order(list(contestants), round)
        due = [name for name in names if name != "powerinfer" or round % args.powerinfer_every == 0]
        line: dict[str, list[str]] = {name: [] for name in due}
        # All do the first phase, then all the second: what is compared lies as close in time as can be.
        for index, phase in enumerate(zip_longest(*(contestants[name].phases(round) for name in due))):
            for name, step in zip(due, phase, strict=True):
                if step is None:
                    continue
                measure, run = step
                measured, seen = machine.around(run, args.probe)
                # A generation's pieces begin with the second phase; each is paired with others' same piece.
                piece = max(0, index - 1) if measure == "generation" else 0
                yield report.Sample(
                    type, active, round * args.pieces + piece, name, measure, measured.tok_s, measured.gb_s,
                    measured.active_share, seen.state, seen.barrier_ns, seen.read_gb_s,
                )  # fmt: skip
                if measure == "generation":
                    line[name].append(f"{measured.tok_s:.1f} ({seen.state})")
        told = "; ".join(f"{name} {', '.join(each)}" for name, each in line.items())
        say(f"{type} {active:.0%} round {round + 1}/{args.rounds}: {told}")


def measure_all(args: argparse.Namespace, folder: Path) -> tuple[list[report.Sample], dict[str, Any]]:
    models, machine = Models(args, folder, ungated=args.ungated), MachineState(args.threads)
    lengths = Lengths(args.prompt, args.generate, args.sequences, pieces=args.pieces)
    samples: list[report.Sample] = []
    settings: dict[str, Any] = {"sequences in parallel": args.sequences, "pieces": args.pieces}
    for type in args.types:  # one type at a time: all of them would not fit in memory
        dense = dense_contestants(models, type, lengths)
        llama = dense.get("llama_cpp")
        for active in args.active:
            contestants = dense | sparse_contestants(models, type, active, lengths)
            samples += run_rounds(contestants, machine, args, type, active)
            del contestants
            save(args, samples, facts(args) | settings)
            if args.work is None:
                kept = models.path(type, models.dense_active, "by_output")
                for path in (models.path(type, active, layout) for layout in ("by_output", "pwri")):
                    if path != kept:
                        path.unlink()
        if isinstance(llama, LlamaCpp):
            settings[f"llama.cpp's flash attention, {type}"] = llama.flash_attention
            llama.close()
        del dense, llama
        if args.work is None:
            models.path(type, models.dense_active, "by_output").unlink()
    return samples, settings


def save(args: argparse.Namespace, samples: list[report.Sample], settings: dict[str, Any]) -> None:
    """Writes what is known so far, so that a run that is cut short is not lost."""
    if args.out is None:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "speed.md").write_text(report.markdown(samples, settings), encoding="utf-8")
    rows = [asdict(sample) for sample in samples]
    (args.out / "speed.json").write_text(json.dumps({"settings": settings, "samples": rows}), "utf-8")
    if not report.plot(samples, args.out / "speed.png"):
        say("matplotlib is not installed: no plot")


def facts(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures belong to."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    found = {"commit": described.stdout.strip() or "unknown", "processor": processor()}
    try:
        import llama_cpp

        found["llama-cpp-python"] = llama_cpp.__version__
    except ImportError:
        pass
    shape = "dim {}, neurons {}, heads {}, kv heads {}, vocabulary {}".format(*args.shape)
    return found | {
        "threads": args.threads,
        "shape": f"{shape}, {args.layers} layers",
        "rounds": args.rounds,
        "tokens": f"prompt {args.prompt}, generation {args.generate}, PowerInfer {args.powerinfer_tokens}",
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def add_model_options(add: Callable[..., Any]) -> None:
    """Those that say which models to make, and who runs them."""
    add(
        "--shape", nargs=5, type=int, default=[4096, 11008, 32, 32, 32000],
        metavar=("DIM", "NEURONS", "HEADS", "KV", "VOCAB"),
    )  # fmt: skip
    add("--layers", type=int, default=8)
    add("--vocabulary", type=Path, help="GGUF file with a tokenizer of VOCAB tokens (default: a made-up one)")
    add("--work", type=Path, help="where models are written and reused (default: a temporary folder)")
    add("--threads", type=int, default=2)
    add("--rounds", type=int, default=10)
    add("--prompt", type=int, default=128)
    add("--generate", type=int, default=40)
    add("--no-llama-cpp", action="store_true")
    add("--powerinfer", type=Path, help="PowerInfer's main")
    add("--powerinfer-tokens", type=int, default=96, help="generated by each of its samples (96)")


@contextmanager
def model_folder(args: argparse.Namespace) -> Iterator[Path]:
    if args.powerinfer is not None and not args.powerinfer.is_file():
        raise SystemExit(f"--powerinfer {args.powerinfer} is no file: give the path of its program main")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add: Callable[..., Any] = parser.add_argument
    add("--types", nargs="+", default=["Q4_0"], help="of blocks (Q4_0; with --quick all four)")
    add("--active", nargs="+", type=float, default=[0.1], help="shares of active neurons (0.1)")
    add_model_options(add)
    add("--ungated", action="store_true", help="squared ReLU without a gate (llama.cpp's arcee); not --quick")
    add("--pieces", type=int, default=1, help="that a generation is timed in (1)")
    add("--sequences", type=int, default=8, help="at the same time; 1 leaves the measure out (8)")
    add("--probe", type=float, default=0.1, help="seconds of each probe of the read bandwidth (0.1)")
    add("--powerinfer-every", type=int, default=1, help="rounds between its samples (1)")
    add("--out", type=Path, help="folder for speed.md, speed.json and speed.png")
    quick_comparison.add_options(add)
    first = parser.parse_known_args()[0]
    if first.quick:
        parser.set_defaults(**quick_comparison.DEFAULTS)
    if first.models:
        parser.set_defaults(**quick_comparison.MODEL_DEFAULTS)
    args = parser.parse_args()
    if args.pieces < 1 or args.generate % args.pieces:
        parser.error(f"--pieces {args.pieces} must divide --generate {args.generate}")
    if args.ungated and (args.quick or len(args.active) > 1):
        parser.error("--ungated makes one file for all contestants: give one --active, and not --quick")
    if args.models and not args.quick:
        parser.error("--models belongs to --quick: add it")
    if args.quick:
        with model_folder(args) as folder:
            quick_comparison.run(args, folder, lambda: facts(args))
        return
    with model_folder(args) as folder:
        samples, settings = measure_all(args, folder)
    settings = facts(args) | settings
    save(args, samples, settings)
    print(report.markdown(samples, settings))
    type, active = args.types[0], args.active[0]
    of_first = [sample for sample in samples if (sample.type, sample.active) == (type, active)]
    print(json.dumps({"type": type, "active": active, **report.summary(of_first), "settings": settings}))


if __name__ == "__main__":
    main()
