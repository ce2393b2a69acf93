"""``benchmarks/cpu/compare.py --quick``: every type against every engine at hand, in under ten minutes.

    python benchmarks/cpu/compare.py --quick --out results --ik-llama-bench ik_llama.cpp/build/bin/llama-bench
    python benchmarks/cpu/compare.py --quick --only Q4_K_M --out results     # adds to what --out has
    python benchmarks/cpu/compare.py --quick --only Q6_K --prompts 16 512 --depths 32768 --sequences 1
    python benchmarks/cpu/compare.py --quick --models smollm2.gguf gemma3.gguf --minutes 5 --out results

Synthetic models of one seed: a layer of 4096/14336, with 8 heads for keys and values and 32 for queries, and
a vocabulary of 1024, so that the head weighs as little as in a whole model. llama.cpp, which leaves out the
last layer's FFN for rows without logits, is asked for the logits of all. ``--layers`` takes more, where
the last cache is larger than some layers or time does not matter. For every type:

- ``dense``: ours on a stock file of a SiLU model; ``llama_cpp``, ``ik_llama_cpp`` and ``openvino`` on the
  same, the first with flash attention on or off, the second with repacking or without, whichever is faster;
- ``exact`` and ``predicted``: ours on the twin with ReLU, of whose neurons 10 % are active: PowerInfer's
  layout with its predictor, or, of types that llama.cpp quantises, a stock file in ``exact`` alone. Nobody
  else gains from zeros, so they are compared with llama.cpp on the dense file.

With ``--models`` files of yours take the place of the synthetic ones, dense, beside llama.cpp: loading is
timed, too, of a prompt only the last logits are asked for, and the perplexity of both on a text is told.

The minutes are shared out among the types. A round runs all measures, short ones three times, and of each all
engines right after each other, in turning and alternating order; a ratio is made of two samples that were
taken so. K types come from
llama.cpp's quantiser, in llama-cpp-python, or of ``--llama-quantize``. ``--out`` gets ``quick.md``,
``quick.svg`` and ``quick.json``. The last line of stdout is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.session import LoadedModel, Session
from hotcold.tasks.windows import text_windows
from lib import models as synthetic
from lib import picture as quick_picture
from lib import report
from lib.contestants import Contestant, Plan, QuickLlamaCpp, QuickOurs
from lib.llama_quantiser import quantise as quantise_by_package
from lib.machine import MachineState
from lib.processes import LlamaBench, OpenVINO

REPOSITORY = Path(__file__).resolve().parents[2]

#: Types whose blocks benchmarks/lib/models.py makes, and whose PWRI file has a predictor.
WRITTEN = ("F16", "Q8_0", "Q4_0")
TURNS = 3  #: of each short measure in a round
#: In place of those of the long comparison; rounds end with the minutes.
DEFAULTS = {
    "types": ["Q4_0", "Q4_K_M", "Q8_0", "F16"],
    "shape": [4096, 14336, 32, 8, 1024],
    "layers": 1,
    "rounds": 20,
    "generate": 48,
}


#: With --models, of those.
MODEL_DEFAULTS = {"prompts": [128, 512], "depths": [0], "no_sparse": True}
#: How good the results are that are so fast: windows of a text.
TEXT, WINDOW, WINDOWS = REPOSITORY / "tests/data/heidi.txt", 256, 4


def add_options(add: Callable[..., Any]) -> None:
    add("--quick", action="store_true", help="the whole table in minutes: quick_comparison.py says how")
    add("--only", nargs="+", metavar="TYPE", help="with --quick: of these types; --out keeps the others'")
    add("--models", nargs="+", type=Path, metavar="FILE", help="with --quick: these, not synthetic ones")
    add("--minutes", type=float, default=9.0, help="that --quick may take (9)")
    add("--prompts", nargs="*", type=int, default=[128, 2048], help="with --quick: their tokens (128 2048)")
    add("--depths", nargs="*", type=int, default=[0, 8192],
        help="with --quick: positions before generation, multiples of 512 (0 8192)")  # fmt: skip
    add("--no-sparse", action="store_true", help="with --quick: dense models alone")
    add("--llama-quantize", type=Path, help="llama.cpp's program (default: llama-cpp-python's quantiser)")
    add("--ik-llama-bench", type=Path, help="ik_llama.cpp's llama-bench")
    add("--openvino-python", type=Path, help="of an environment with openvino-genai (this one, if it has it)")


class Clock:
    """Tells how far it is, and shares the time out."""

    def __init__(self, seconds: float) -> None:
        self.start, self.seconds = time.monotonic(), seconds

    @property
    def spent(self) -> float:
        return time.monotonic() - self.start

    def share(self, parts: int) -> float:
        """The end of the first of so many equal parts of what is left."""
        return self.spent + max(0.0, self.seconds - self.spent) / parts

    def say(self, line: str) -> None:
        spent, total = int(self.spent), int(self.seconds)
        clock = f"{spent // 60}:{spent % 60:02} of {total // 60}:{total % 60:02}"
        print(f"[{clock}] {line}", file=sys.stderr, flush=True)


class Files:
    """Written when first needed."""

    def __init__(self, args: argparse.Namespace, folder: Path, clock: Clock) -> None:
        self.args, self.folder, self.clock = args, folder, clock
        self.published = {path.stem: path for path in args.models or ()}

    def dense(self, type: str) -> Path:
        if type in self.published:
            return self.published[type]
        return self._path(type, None, "by_output")

    def sparse(self, type: str) -> Path:
        return self._path(type, self.args.active[0], "pwri" if type in WRITTEN else "by_output")

    def _path(self, type: str, active: float | None, layout: str) -> Path:
        dim, neurons, heads, kv_heads, vocab = self.args.shape
        what = "silu" if active is None else f"relu{active:g}"
        shape = "x".join(map(str, (*self.args.shape, self.args.layers)))
        path = self.folder / f"{shape}-{type}-{what}-{layout}.gguf"
        if path.exists():
            return path
        if type in WRITTEN:
            made = synthetic.Shape(dim, neurons, self.args.layers, heads, kv_heads, vocab, 1 << 16)
            synthetic.write(path, synthetic.Recipe(made, type, active, layout))
        else:
            quantise(self._path("F16", active, layout), path, type, self.args)
        self.clock.say(f"wrote {path.name}, {path.stat().st_size / 1e9:.2f} GB")
        return path


def quantise(source: Path, path: Path, type: str, args: argparse.Namespace) -> None:
    """By llama.cpp's quantiser."""
    if args.llama_quantize is not None:
        command = [str(args.llama_quantize), str(source), str(path), type, str(args.threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise SystemExit(f"--llama-quantize ended with {done.returncode}: {last[:200]}")
        return
    if find_spec("llama_cpp") is None:
        fix = "install llama-cpp-python, or give --llama-quantize PATH"
        raise SystemExit(f"type {type} needs llama.cpp's quantiser: {fix}")
    quantise_by_package(source, path, type, args.threads)


def contestants(args: argparse.Namespace, plan: Plan, files: Files, type: str) -> dict[str, Contestant]:
    dense = files.dense(type)

    def again() -> Session:
        return ours(args, plan, dense, "off").session()

    found: dict[str, Contestant] = {"dense": QuickOurs(again(), plan, again)}
    if not args.no_sparse:
        model = ours(args, plan, files.sparse(type), "exact")
        found["exact"] = QuickOurs(model.session(), plan)
        if type in WRITTEN:
            found["predicted"] = QuickOurs(model.session("predicted"), plan)
    if not args.no_llama_cpp:
        try:
            found["llama_cpp"] = QuickLlamaCpp(dense, args.threads, plan)
        except ImportError:
            files.clock.say("llama-cpp-python is not installed: there is nothing to compare with")
    if plan.published:  # the others have no loading by itself
        return found
    if args.ik_llama_bench is not None:
        found["ik_llama_cpp"] = LlamaBench(args.ik_llama_bench, dense, args.threads, plan)
    python = args.openvino_python
    if python is None and find_spec("openvino_genai") is not None:
        python = Path(sys.executable)
    if python is not None:
        try:
            found["openvino"] = OpenVINO(python, dense, args.threads, plan)
        except RuntimeError as error:
            files.clock.say(f"{type}: {error}")
    return found


def ours(args: argparse.Namespace, plan: Plan, path: Path, sparsity: str) -> LoadedModel:
    # Beside the longest sequence, the prompts of two rounds, so that the deep one's pages stay.
    positions = plan.context + 2 * sum(plan.prompts) + 64 * plan.sequences + 1024
    options = LoadOptions(
        sparsity=sparsity, threads=args.threads, context=plan.context, sequences=plan.sequences,
        cache_positions=positions, gpu="off",
    )  # fmt: skip
    return load(path, options)


def run_round(
    found: Mapping[str, Contestant], machine: MachineState, args: argparse.Namespace, plan: Plan, round: int
) -> Iterator[tuple[str, int, str, Any, Any]]:
    """Measure, turn, contestant, what was measured, and under which conditions."""
    for measure in plan.measures:
        turns = 1 if plan.slow(measure) else TURNS
        for turn in range(turns * round, turns * (round + 1)):
            names = [name for name, each in found.items() if each.can(measure, turn % turns)]
            at = turn // 2 % len(names)
            names = names[at:] + names[:at]
            for name in names if turn % 2 == 0 else names[::-1]:
                run = found[name].prepare(measure, turn + 1)
                yield measure, turn, name, *machine.around(run, args.probe / 2)


def measure_type(
    args: argparse.Namespace, plan: Plan, files: Files, machine: MachineState, type: str, end: float
) -> tuple[list[report.Sample], dict[str, Any]]:
    """Rounds until ``end`` on the clock, one at least; one before it warms memory and chooses settings."""
    clock, samples = files.clock, []
    clock.say(f"{type}: making models")
    found = contestants(args, plan, files, type)
    clock.say(f"{type}: a first round, which does not count: {', '.join(found)}")
    for measure in plan.measures:
        for each in found.values():
            if each.can(measure, 0):
                each.warm(measure)
        clock.say(f"{type}: {measure} works")
    for round in range(args.rounds):
        begun = clock.spent
        told: dict[tuple[str, int], list[str]] = {}
        for measure, turn, name, measured, seen in run_round(found, machine, args, plan, round):
            samples.append(
                report.Sample(
                    type, measure, name, turn, measured.tok_s, measured.gb_s, seen.read_gb_s, seen.state
                )
            )
            told.setdefault((measure, turn), []).append(f"{name} {measured.tok_s:.1f}")
        for (measure, turn), speeds in told.items():
            clock.say(f"{type}, {measure}, sample {turn + 1}, tok/s: {', '.join(speeds)}")
        if clock.spent + (clock.spent - begun) > end:
            break
    settings: dict[str, Any] = {}
    if plan.published:
        settings[f"perplexity, {type}"] = perplexities(found)
    for name, contestant in found.items():
        chosen = getattr(contestant, "settings", None)
        if chosen:
            settings[f"{report.NAMES[name]}, {type}"] = chosen
        if isinstance(contestant, QuickLlamaCpp | OpenVINO):
            contestant.close()
    return samples, settings


def perplexities(found: Mapping[str, Contestant]) -> dict[str, float]:
    """Of a text of stories, by the contestants that say it."""
    mine = found["dense"]
    assert isinstance(mine, QuickOurs)
    tokenizer = mine.session.model.tokenizer
    windows = text_windows(tokenizer, TEXT.read_text(encoding="utf-8"), WINDOW)[1 : WINDOWS + 1]
    return {
        report.NAMES[name]: round(math.exp(each.surprise(windows)), 3)
        for name, each in found.items()
        if isinstance(each, QuickOurs | QuickLlamaCpp)
    }


def run(args: argparse.Namespace, folder: Path, facts: Callable[[], dict[str, Any]]) -> None:
    plan = Plan(
        tuple(args.prompts), tuple(args.depths), args.sequences, args.generate, layers=args.layers,
        published=bool(args.models),
    )  # fmt: skip
    for path in args.models or ():
        if not path.is_file():
            raise SystemExit(f"--models {path} is no file: give the paths of GGUF files")
    if any(depth % 512 for depth in args.depths):
        raise SystemExit(f"--depths {args.depths}: allowed are multiples of 512")
    if args.ik_llama_bench is not None and not args.ik_llama_bench.is_file():
        raise SystemExit(f"--ik-llama-bench {args.ik_llama_bench} is no file: give the path of llama-bench")
    clock = Clock(60 * args.minutes)
    files, machine = Files(args, folder, clock), MachineState(args.threads)
    types = [path.stem for path in args.models] if args.models else args.only or args.types
    samples, settings = earlier(args) if args.only else ([], {})
    samples = [each for each in samples if each.type not in types]
    unsaid = {"tokens", "shape"} if args.models else {"tokens"}
    for i, type in enumerate(types):  # one at a time: all of them would not fit in memory
        more, chosen = measure_type(args, plan, files, machine, type, clock.share(len(types) - i))
        samples += more
        settings |= {name: value for name, value in facts().items() if name not in unsaid} | chosen
        save(args, samples, settings)
        if args.work is None:
            for path in folder.glob(f"*-{type}-*"):
                if type != "F16" or i == len(types) - 1:  # others are quantised from these
                    path.unlink()
    clock.say("done")
    print(report.markdown(samples, settings))
    print(json.dumps({"quick": True, **report.summary(samples), "settings": settings}))


def earlier(args: argparse.Namespace) -> tuple[list[report.Sample], dict[str, Any]]:
    """What --out has of other types."""
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
    picture = quick_picture.svg(report.summary(samples), settings)
    (args.out / "quick.svg").write_text(picture, encoding="utf-8")
