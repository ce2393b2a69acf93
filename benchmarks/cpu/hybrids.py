"""Speed of families whose layers keep states, beside llama.cpp, on random weights of the published shapes.

    python benchmarks/cpu/hybrids.py                                      # all four, in Q4_0
    python benchmarks/cpu/hybrids.py --only nemotron --types Q4_K_M Q8_0  # as published files mix types
    python benchmarks/cpu/hybrids.py --only nemotron --by-neuron          # and with down by neuron
    python benchmarks/cpu/hybrids.py --only lfm2moe --samples 0           # only whether both compute the same

Files have few layers, of each kind about its share, and a vocabulary cut alike (lib/hybrids.py); ``--work``
keeps them. Of Nemotron's neurons a share of ``--active`` fires. Contestants take turns, in turning order:

    dense, dense t   `off`, on the stock file and on its twin with down by neuron
    exact, exact t   neurons that do not fire are left out of down
    llama_cpp        on the stock file, with flash attention or without, whichever is faster

Each has ``--samples`` samples of generation, of a prompt and of several sequences. Printed are medians of
tokens a second, GB/s of weights and KV cache that had to be read (llama.cpp's without states) with their
share of the read probe just before, and the medians of paired ratios with their range. Of a prompt the last
logits alone are asked for. llama.cpp leaves out the last FFN of LFM2 for the other rows, 1 of 8 here.

Before that both compute the same tokens: how far the logits differ, in standard deviations of llama.cpp's,
and how often the likeliest token is the same. The last line of stdout is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.session import LoadedModel
from hotcold.tasks.scoring import Scorer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib import hybrids, report
from lib.contestants import Contestant, Ours, Plan, order, random_tokens
from lib.llama import LlamaCpp
from lib.machine import MachineState, commit

#: Of whose ratios the goals speak.
PAIRS = (
    ("dense", "llama_cpp"), ("exact", "llama_cpp"), ("exact t", "llama_cpp"), ("exact", "dense"),
    ("exact t", "dense"), ("exact t", "dense t"),
)  # fmt: skip
CHECKED = 48  #: tokens of the comparison of logits


def add_options(add: Any) -> None:
    add("--only", nargs="+", choices=hybrids.HYBRIDS, default=[*hybrids.HYBRIDS])
    add("--types", nargs="+", default=["Q4_0"], metavar="TYPE", help="of blocks, or Q4_K_M (Q4_0)")
    add("--active", type=float, default=0.09, help="share of neurons that fire, of models with zeros (0.09)")
    add("--by-neuron", action="store_true", help="a twin with down by neuron, too")
    add("--samples", type=int, default=5, help="of each measure (5)")
    add("--prompts", type=int, nargs="*", default=[512])
    add("--sequences", type=int, default=8, help="at the same time; 1 leaves the measure out (8)")
    add("--generate", type=int, default=32, help="tokens of a sample of generation (32)")
    add("--threads", type=int, default=2)
    add("--chunk", type=int, default=0, help="the most prompt tokens of a step of ours")
    add("--no-llama-cpp", action="store_true")
    add("--work", type=Path, help="where files are written and reused (default: a temporary folder)")
    add("--out", type=Path, help="a file for the JSON object")


def written(folder: Path, key: str, type: str, active: float, layout: str) -> Path:
    shape = hybrids.HYBRIDS[key]
    path = folder / f"{key}-{type}-{layout}.gguf"
    if not path.exists():
        part = path.with_suffix(".part")
        hybrids.write(part, hybrids.HybridRecipe(shape, type, active if shape.ungated else None, layout))
        part.rename(path)
        say(f"wrote {path.name}, {path.stat().st_size / 1e9:.2f} GB")
    return path


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def loaded(args: argparse.Namespace, plan: Plan, path: Path, sparsity: str) -> LoadedModel:
    options = LoadOptions(
        sparsity=sparsity, threads=args.threads, context=plan.context, sequences=plan.sequences,
        cache_positions=plan.context + 2 * sum(plan.prompts) + 64 * plan.sequences + 1024, gpu="off",
    )  # fmt: skip
    if args.chunk:
        options["chunk"] = args.chunk
    return load(path, options)


def contestants(args: argparse.Namespace, plan: Plan, folder: Path, key: str, type: str) -> dict[str, Any]:
    stock, sparse = written(folder, key, type, args.active, "by_output"), hybrids.HYBRIDS[key].ungated
    found: dict[str, Any] = {"dense": Ours(loaded(args, plan, stock, "off").session(), plan)}
    if sparse:
        found["exact"] = Ours(loaded(args, plan, stock, "exact").session(), plan)
    if sparse and args.by_neuron:
        twin = loaded(args, plan, written(folder, key, type, args.active, "by_neuron"), "exact")
        found["dense t"] = Ours(twin.session("off"), plan)
        found["exact t"] = Ours(twin.session("exact"), plan)
    if not args.no_llama_cpp:
        found["llama_cpp"] = LlamaCpp(stock, args.threads, plan)
    return found


def agreement(found: dict[str, Any], vocab: int) -> dict[str, dict[str, float]]:
    """How far each one's logits are from llama.cpp's, or from the first one's."""
    window = random_tokens(CHECKED, vocab, 99)

    def logits(each: Any) -> Any:
        if isinstance(each, LlamaCpp):
            return np.array(each.logits(window)[:-1])
        rows = Scorer(each.session.model.session(each.session.sparsity)).logits(window)
        return np.concatenate([some.copy() for some in rows])

    truth = logits(found["llama_cpp" if "llama_cpp" in found else "dense"])
    errors = {}
    for name, each in found.items():
        own = logits(each)
        apart = np.abs(own - truth) / truth.std()
        errors[name] = {
            "median": round(float(np.median(apart)), 5),
            "most": round(float(apart.max()), 5),
            "same_top": round(float((own.argmax(1) == truth.argmax(1)).mean()), 3),
        }
    return errors


def measured(
    found: dict[str, Contestant], plan: Plan, machine: MachineState, type: str, samples: int
) -> list[report.Sample]:
    """Takes samples of each measure and contestant, after one that does not count."""
    taken = []
    for measure in plan.measures:
        for each in found.values():
            each.warm(measure)
        for turn in range(samples):
            shown_speeds = []
            for name in order([*found], turn):
                run, conditions = machine.around(found[name].prepare(measure, turn + 1), 0.05)
                speeds = run.tok_s, run.gb_s, conditions.read_gb_s
                taken.append(report.Sample(type, measure, name, turn, *speeds, conditions.state))
                shown_speeds.append(f"{name} {run.tok_s:.1f}")
            say(f"{type}, {measure}, sample {turn + 1}, tok/s: {', '.join(shown_speeds)}")
    return taken


def summary(samples: list[report.Sample]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for type, measure in dict.fromkeys((each.type, each.measure) for each in samples):
        own = [each for each in samples if (each.type, each.measure) == (type, measure)]
        row: dict[str, Any] = {}
        for name in dict.fromkeys(each.contestant for each in own):
            mine = [each for each in own if each.contestant == name]
            row[name] = {"tok_s": round(statistics.median(each.tok_s for each in mine), 2)}
            if all(each.gb_s is not None for each in mine):
                speeds = [each.gb_s for each in mine if each.gb_s is not None]
                shares = [each.gb_s / each.read_gb_s for each in mine if each.gb_s is not None]
                row[name]["gb_s"] = round(statistics.median(speeds), 2)
                row[name]["probe_share"] = round(statistics.median(shares), 3)
        ratios = {f"{a} / {b}": report.spread(report.ratios(own, a, b)) for a, b in PAIRS}
        row["ratios"] = {name: each for name, each in ratios.items() if each}
        rows[f"{type}, {measure}"] = row
    return rows


def show(rows: dict[str, Any]) -> None:
    for name, row in rows.items():
        print(name)
        for contestant, each in row.items():
            if contestant == "ratios":
                for pair, ratio in each.items():
                    spread = f"({ratio['low']:.2f} to {ratio['high']:.2f}, {ratio['n']})"
                    print(f"  {pair:22} x{ratio['median']:.2f} {spread}")
            else:
                rate = f"{each['gb_s']:6.2f} GB/s, {each['probe_share']:.2f}" if "gb_s" in each else ""
                print(f"  {contestant:12} {each['tok_s']:9.2f} tok/s {rate}", flush=True)


def run(args: argparse.Namespace, folder: Path) -> None:
    plan = Plan(
        tuple(args.prompts), (0,), args.sequences, args.generate, parallel_generate=args.generate // 2,
        last_logits=True,
    )  # fmt: skip
    machine = MachineState(args.threads)
    samples: list[report.Sample] = []
    agreements = {}
    for key in args.only:
        for type in args.types:
            shape = hybrids.HYBRIDS[key]
            name = f"{shape.name}, {type}"
            found = contestants(args, plan, folder, key, type)
            agreements[name] = agreement(found, shape.vocab)
            say(f"{name}: logits apart: {json.dumps(agreements[name])}")
            if args.samples:
                samples += measured(found, plan, machine, name, args.samples)
            if "llama_cpp" in found:
                say(f"{name}: flash attention {found['llama_cpp'].settings}")
                found["llama_cpp"].close()
            del found
            whole = {
                "commit": commit(), "threads": args.threads, "agreement": agreements,
                "rows": summary(samples), "samples": [asdict(each) for each in samples],
            }  # fmt: skip
            if args.out is not None:
                args.out.write_text(json.dumps(whole), encoding="utf-8")
    show(whole["rows"])
    print(json.dumps({key: value for key, value in whole.items() if key != "samples"}))


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add_options(parser.add_argument)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        run(args, folder)


if __name__ == "__main__":
    main()
