"""Speed on one machine beside llama.cpp and others, as a table and a picture, in ten minutes.

    python benchmarks/cpu/compare.py --out results --ik-llama-bench ik_llama.cpp/build/bin/llama-bench
    python benchmarks/cpu/compare.py --only Q4_K_M --out results     # adds to what --out has
    python benchmarks/cpu/compare.py --only Q6_K --prompts 16 512 --depths 32768 --sequences 1
    python benchmarks/cpu/compare.py --models smollm2.gguf gemma3.gguf --minutes 5 --out results
    python benchmarks/cpu/compare.py --experts mixtral --only Q4_0   # or qwen3moe
    python benchmarks/cpu/compare.py --pure --only IQ4_XS Q3_K Q2_K IQ3_S IQ3_XXS TQ2_0 --layers 3
    python benchmarks/cpu/compare.py --only Q4_0 --layers 8 --powerinfer PowerInfer/build/bin/main

Synthetic models of one seed: a layer of 4096/14336, with 8 heads for keys and values and 32 for queries, and
a vocabulary of 1024, so that the head weighs as little as in a whole model. llama.cpp, which leaves out the
last layer's FFN for rows without logits, is asked for the logits of all. ``--layers`` takes more, where
the last cache is larger than some layers or time does not matter. For every type:

- ``dense``: ours on a stock file of a SiLU model; ``llama_cpp``, ``ik_llama_cpp`` and ``openvino`` on the
  same, the first with flash attention on or off, the second with repacking or without, whichever is faster;
- ``exact`` and ``predicted``: ours on the twin with ReLU, of whose neurons 10 % are active: PowerInfer's
  layout with its predictor, or, of types that llama.cpp quantises, a stock file in ``exact`` alone. Only
  PowerInfer also gains from zeros, so they are compared with llama.cpp on the dense file;
- ``powerinfer``: its ``main`` on the PWRI file, in F16 and Q4_0.

``--pure`` has all matrices in one type, which need not be llama.cpp's quantiser's: random blocks of it,
dense, made in a second.

``--ungated`` has squared ReLU without a gate (llama.cpp's arcee) in all of them, ``--experts`` a family's
shapes. With ``--models`` your files replace the synthetic ones, dense, beside llama.cpp: loading is
timed, too, only the last logits of a prompt are computed, and the perplexity of both on a text is shown.

The minutes are shared out among the types. A round runs all measures, short ones three times, and of each all
engines right after each other, in turning and alternating order; a ratio is made of two samples that were
taken so. Around each sample the machine's state is measured (lib/machine.py). K types come from llama.cpp's
quantiser, in llama-cpp-python (built with CMAKE_ARGS=-DGGML_NATIVE=ON), or of ``--llama-quantize``. If that
package dies of AMX, it is built again in ``--work`` (lib/llama_build.py). ``--out`` gets ``quick.md``,
``quick.svg`` and ``quick.json``. The last line of stdout is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hotcold.runtime.loading import load
from hotcold.runtime.machine import processor
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.session import LoadedModel, Session
from hotcold.tasks.windows import text_windows

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib import models, picture, report
from lib.contestants import Contestant, Ours, Plan, run_round
from lib.llama import LlamaCpp
from lib.llama import quantise as quantise_by_package
from lib.llama_build import use_working_llama_cpp
from lib.machine import REPOSITORY, MachineState, commit
from lib.processes import LlamaBench, OpenVINO, PowerInfer
from lib.processes import run as run_program

#: Types whose blocks lib/models.py makes, and whose PWRI file has a predictor.
WRITTEN = ("F16", "Q8_0", "Q4_0")
#: With --models, of those.
MODEL_DEFAULTS = {"prompts": [128, 512], "depths": [0], "no_sparse": True}
#: How good the results are that are so fast: windows of a text.
TEXT, WINDOW, WINDOWS = REPOSITORY / "tests/data/heidi.txt", 256, 4


def add_model_options(add: Callable[..., Any]) -> None:
    """Adds the options that say which models to make, and who runs them."""
    add("--shape", nargs=5, type=int, default=[4096, 14336, 32, 8, 1024],
        metavar=("DIM", "NEURONS", "HEADS", "KV", "VOCAB"))  # fmt: skip
    add("--layers", type=int, default=1)
    add("--active", type=float, default=0.1, help="share of active neurons (0.1)")
    add("--ungated", action="store_true", help="squared ReLU without a gate (llama.cpp's arcee)")
    add("--pure", action="store_true", help="dense, with all matrices in blocks of the type")
    add("--experts", choices=models.EXPERT_SHAPES, help="experts, in this shape instead of --shape")
    add("--work", type=Path, help="where models are written and reused (default: a temporary folder)")
    add("--threads", type=int, default=2)
    add("--rounds", type=int, default=20, help="at most (20)")
    add("--generate", type=int, default=48, help="tokens of a sample of generation (48)")
    add("--no-llama-cpp", action="store_true")
    add("--no-sparse", action="store_true", help="dense models alone")
    add("--llama-quantize", type=Path, help="llama.cpp's program (default: llama-cpp-python's quantiser)")


def add_options(add: Callable[..., Any]) -> None:
    add_model_options(add)
    add("--quick", action="store_true", help=argparse.SUPPRESS)  # there was a longer comparison
    add("--only", nargs="+", metavar="TYPE", help="of blocks, instead of all four; --out keeps the others'")
    add("--models", nargs="+", type=Path, metavar="FILE", help="these, not synthetic ones")
    add("--minutes", type=float, default=9.0, help="that it may take (9)")
    add("--prompts", nargs="*", type=int, default=[128, 2048], help="their tokens (128 2048)")
    add("--depths", nargs="*", type=int, default=[0, 8192],
        help="positions before generation, multiples of 512 (0 8192)")  # fmt: skip
    add("--sequences", type=int, default=8, help="at the same time; 1 leaves the measure out (8)")
    add("--powerinfer", type=Path, help="PowerInfer's main")
    add("--ik-llama-bench", type=Path, help="ik_llama.cpp's llama-bench")
    add("--openvino-python", type=Path, help="of an environment with openvino-genai (this one, if it has it)")
    add("--out", type=Path, help="folder for quick.md, quick.json and quick.svg")


class Clock:
    """Tells how far it is, and shares the time out."""

    def __init__(self, seconds: float) -> None:
        self.start, self.seconds = time.monotonic(), seconds

    @property
    def spent(self) -> float:
        return time.monotonic() - self.start

    def share(self, parts: int) -> float:
        """The end of the first of several equal parts of the remaining time."""
        return self.spent + max(0.0, self.seconds - self.spent) / parts

    def say(self, line: str) -> None:
        spent, total = int(self.spent), int(self.seconds)
        clock = f"{spent // 60}:{spent % 60:02} of {total // 60}:{total % 60:02}"
        print(f"[{clock}] {line}", file=sys.stderr, flush=True)


class Files:
    """Written when first needed."""

    def __init__(self, args: argparse.Namespace, folder: Path, clock: Clock) -> None:
        self.args, self.folder, self.clock = args, folder, clock
        self.published = {path.stem: path for path in getattr(args, "models", None) or ()}

    def dense(self, type: str) -> Path:
        if type in self.published:
            return self.published[type]
        return self._path(type, self.args.active if self.args.ungated else None, "by_output")

    def sparse(self, type: str) -> Path:
        pwri = type in WRITTEN and not self.args.experts
        return self._path(type, self.args.active, "pwri" if pwri else "by_output")

    def _path(self, type: str, active: float | None, layout: str) -> Path:
        args = self.args
        dim, neurons, heads, kv_heads, vocab = args.shape
        shape = models.Shape(dim, neurons, args.layers, heads, kv_heads, vocab, 1 << 16)
        name = args.experts or "x".join(map(str, (*args.shape, args.layers)))
        dense = "pure" if getattr(args, "pure", False) else "silu"
        kind = dense if active is None else f"{'ungated' if args.ungated else 'relu'}{active:g}"
        path = self.folder / f"{name}-{type}-{kind}-{layout}.gguf"
        if path.exists():
            return path
        if type in WRITTEN or getattr(args, "pure", False):
            made = models.EXPERT_SHAPES[args.experts] if args.experts else shape
            models.write(path, models.Recipe(made, type, active, layout, gated=not args.ungated))
        else:
            quantise(self._path("F16", active, layout), path, type, args)
        self.clock.say(f"wrote {path.name}, {path.stat().st_size / 1e9:.2f} GB")
        return path


def quantise(source: Path, path: Path, type: str, args: argparse.Namespace) -> None:
    """By llama.cpp's quantiser."""
    if args.llama_quantize is not None:
        try:
            run_program([str(args.llama_quantize), str(source), str(path), type, str(args.threads)], 3600)
        except (OSError, RuntimeError) as error:
            raise SystemExit(f"--llama-quantize: {error}") from None
        return
    if find_spec("llama_cpp") is None:
        fix = "install llama-cpp-python, or give --llama-quantize PATH"
        raise SystemExit(f"type {type} needs llama.cpp's quantiser: {fix}")
    quantise_by_package(source, path, type, args.threads)


def contestants(args: argparse.Namespace, plan: Plan, files: Files, type: str) -> dict[str, Contestant]:
    """Ours, and llama.cpp."""
    dense = files.dense(type)

    def again() -> Session:
        return ours(args, plan, dense, "off").session()

    by_name: dict[str, Contestant] = {"dense": Ours(again(), plan, again)}
    if not args.no_sparse:
        model = ours(args, plan, files.sparse(type), "exact")
        by_name["exact"] = Ours(model.session(), plan)
        if type in WRITTEN:
            by_name["predicted"] = Ours(model.session("predicted"), plan)
    if not args.no_llama_cpp:
        try:
            by_name["llama_cpp"] = LlamaCpp(dense, args.threads, plan)
        except ImportError:
            files.clock.say("llama-cpp-python is not installed: there is nothing to compare with")
    return by_name


def others(args: argparse.Namespace, plan: Plan, files: Files, type: str) -> dict[str, Contestant]:
    """Engines in processes of their own."""
    by_name: dict[str, Contestant] = {}
    if plan.published:  # they have no loading by itself
        return by_name
    if args.ik_llama_bench is not None:
        by_name["ik_llama_cpp"] = LlamaBench(args.ik_llama_bench, files.dense(type), args.threads, plan)
    python = args.openvino_python
    if python is None and find_spec("openvino_genai") is not None:
        python = Path(sys.executable)
    if python is not None:
        try:
            by_name["openvino"] = OpenVINO(python, files.dense(type), args.threads, plan)
        except RuntimeError as error:
            files.clock.say(f"{type}: {error}")
    if args.powerinfer is not None and type in models.POWERINFER_TYPES:
        by_name["powerinfer"] = PowerInfer(args.powerinfer, files.sparse(type), args.threads, plan)
    return by_name


def ours(args: argparse.Namespace, plan: Plan, path: Path, sparsity: str) -> LoadedModel:
    # Beside the longest sequence, the prompts of two rounds, so that the deep one's pages stay.
    positions = plan.context + 2 * sum(plan.prompts) + 64 * plan.sequences + 1024
    options = LoadOptions(
        sparsity=sparsity, threads=args.threads, context=plan.context, sequences=plan.sequences,
        cache_positions=positions, gpu="off",
    )  # fmt: skip
    return load(path, options)


def measure_type(
    args: argparse.Namespace, plan: Plan, files: Files, machine: MachineState, type: str, end: float
) -> tuple[list[report.Sample], dict[str, Any]]:
    """Rounds until ``end`` on the clock, one at least; one before it warms memory and chooses settings."""
    clock, samples = files.clock, []
    clock.say(f"{type}: making models")
    by_name = contestants(args, plan, files, type) | others(args, plan, files, type)
    clock.say(f"{type}: a first round, which does not count: {', '.join(by_name)}")
    for measure in plan.measures:
        for contestant in by_name.values():
            if contestant.can(measure, 0):
                contestant.warm(measure)
        clock.say(f"{type}: {measure} works")
    for round in range(args.rounds):
        begun = clock.spent
        shown_speeds: dict[tuple[str, int], list[str]] = {}
        for measure, turn, name, measured, conditions in run_round(by_name, plan, machine, round):
            speeds = measured.tok_s, measured.gb_s, conditions.read_gb_s
            samples.append(report.Sample(type, measure, name, turn, *speeds, conditions.state))
            shown_speeds.setdefault((measure, turn), []).append(f"{name} {measured.tok_s:.1f}")
        for (measure, turn), texts in shown_speeds.items():
            clock.say(f"{type}, {measure}, sample {turn + 1}, tok/s: {', '.join(texts)}")
        if clock.spent + (clock.spent - begun) > end:
            break
    settings: dict[str, Any] = {}
    if plan.published:
        settings[f"perplexity, {type}"] = perplexities(by_name)
    for name, contestant in by_name.items():
        chosen = getattr(contestant, "settings", None)
        if chosen:
            settings[f"{report.NAMES[name]}, {type}"] = chosen
        if isinstance(contestant, LlamaCpp | OpenVINO):
            contestant.close()
    return samples, settings


def perplexities(by_name: Mapping[str, Contestant]) -> dict[str, float]:
    """Measures the perplexity of a text of stories, by the contestants that tell it."""
    mine = by_name["dense"]
    assert isinstance(mine, Ours)
    tokenizer = mine.session.model.tokenizer
    windows = text_windows(tokenizer, TEXT.read_text(encoding="utf-8"), WINDOW)[1 : WINDOWS + 1]
    return {
        report.NAMES[name]: round(math.exp(contestant.surprise(windows)), 3)
        for name, contestant in by_name.items()
        if isinstance(contestant, Ours | LlamaCpp)
    }


def run(args: argparse.Namespace, folder: Path) -> None:
    plan = Plan(
        tuple(args.prompts), tuple(args.depths), args.sequences, args.generate, layers=args.layers,
        published=bool(args.models),
    )  # fmt: skip
    clock = Clock(60 * args.minutes)
    files, machine = Files(args, folder, clock), MachineState(args.threads)
    args.llama_build = "" if args.no_llama_cpp else use_working_llama_cpp(folder, clock.say)
    types = [path.stem for path in args.models or ()] or args.only or ["Q4_0", "Q4_K_M", "Q8_0", "F16"]
    samples, settings = earlier(args) if args.only else ([], {})
    samples = [each for each in samples if each.type not in types]
    for i, type in enumerate(types):  # one at a time: all of them would not fit in memory
        new_samples, chosen = measure_type(args, plan, files, machine, type, clock.share(len(types) - i))
        samples += new_samples
        settings |= facts(args) | chosen
        save(args, samples, settings)
        if args.work is None:
            for path in folder.glob(f"*-{type}-*"):
                if type != "F16" or i == len(types) - 1:  # others are quantised from these
                    path.unlink()
    clock.say("done")
    print(report.markdown(samples, settings))
    print(json.dumps({"quick": True, **report.summary(samples), "settings": settings}))


def facts(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the conditions to which the figures belong."""
    settings = {"commit": commit(), "processor": processor(), "threads": args.threads}
    with suppress(PackageNotFoundError):
        settings["llama-cpp-python"] = f"{version('llama-cpp-python')} {args.llama_build}".strip()
    if not getattr(args, "models", None):
        shape = "dim {}, neurons {}, heads {}, kv heads {}, vocabulary {}".format(*args.shape)
        settings["shape"] = args.experts or f"{shape}, {args.layers} layers"
    return settings


def earlier(args: argparse.Namespace) -> tuple[list[report.Sample], dict[str, Any]]:
    """Returns the results of other types that --out has."""
    path = None if args.out is None else args.out / "quick.json"
    if path is None or not path.exists():
        return [], {}
    kept = json.loads(path.read_text(encoding="utf-8"))
    return [report.Sample(**each) for each in kept["samples"]], kept["settings"]


def save(args: argparse.Namespace, samples: list[report.Sample], settings: dict[str, Any]) -> None:
    """After each type, so that a run that is cut short is not lost."""
    if args.out is None:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    kept = {"settings": settings, "samples": [asdict(each) for each in samples]}
    (args.out / "quick.json").write_text(json.dumps(kept), encoding="utf-8")
    (args.out / "quick.md").write_text(report.markdown(samples, settings), encoding="utf-8")
    image = picture.svg(report.summary(samples), settings)
    (args.out / "quick.svg").write_text(image, encoding="utf-8")


@contextmanager
def model_folder(args: argparse.Namespace) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add_options(parser.add_argument)
    if parser.parse_known_args(arguments)[0].models:
        parser.set_defaults(**MODEL_DEFAULTS)
    args = parser.parse_args(arguments)
    if any(depth % 512 for depth in args.depths):
        parser.error(f"--depths {args.depths}: allowed are multiples of 512")
    files = [("--models", path) for path in args.models or ()]
    files += [("--ik-llama-bench", args.ik_llama_bench), ("--powerinfer", args.powerinfer)]
    for option, path in files:
        if path is not None and not path.is_file():
            parser.error(f"{option} {path} is no file: give the path of one")
    if args.experts and args.ungated:
        parser.error("--experts have a gate: leave out --ungated")
    if args.pure:
        if args.experts or args.ungated:
            parser.error("--pure models are dense: leave out --experts and --ungated")
        args.no_sparse = True
    if args.experts and not {*(args.only or ("all",))} <= {*WRITTEN}:
        parser.error(f"--experts are written in {', '.join(WRITTEN)}: choose with --only")
    return args


def main() -> None:
    args = parse()
    with model_folder(args) as folder:
        run(args, folder)


if __name__ == "__main__":
    main()
