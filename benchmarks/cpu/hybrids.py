"""Speed of families whose layers keep states, beside llama.cpp, on random weights of the published shapes.

    python benchmarks/cpu/hybrids.py                                      # all four, in Q4_0
    python benchmarks/cpu/hybrids.py --only nemotron --types Q4_K_M Q8_0  # as published files mix types
    python benchmarks/cpu/hybrids.py --only nemotron --by-neuron          # and with down by neuron
    python benchmarks/cpu/hybrids.py --only lfm2moe --samples 0           # only whether both compute the same

Files have few layers, of each kind about its share, and a vocabulary cut alike (lib/hybrids.py); ``--work``
keeps them. Of Nemotron's neurons a share of ``--active`` is active. Contestants take turns, in turning order:

    dense, dense t   `off`, on the stock file and on its twin with down by neuron
    exact, exact t   inactive neurons are left out of down
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
    add("--active", type=float, default=0.09, help="share of active neurons, of models with zeros (0.09)")
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
    by_name: dict[str, Any] = {"dense": Ours(loaded(args, plan, stock, "off").session(), plan)}
    if sparse:
        by_name["exact"] = Ours(loaded(args, plan, stock, "exact").session(), plan)
    if sparse and args.by_neuron:
        twin = loaded(args, plan, written(folder, key, type, args.active, "by_neuron"), "exact")
        by_name["dense t"] = Ours(twin.session("off"), plan)
        by_name["exact t"] = Ours(twin.session("exact"), plan)
    if not args.no_llama_cpp:
        by_name["llama_cpp"] = LlamaCpp(stock, args.threads, plan)
    return by_name


def agreement(by_name: dict[str, Any], vocab: int) -> dict[str, dict[str, float]]:
    """How far each one's logits are from llama.cpp's, or from the first one's."""
    window = random_tokens(CHECKED, vocab, 99)

    def logits(contestant: Any) -> Any:
        if isinstance(contestant, LlamaCpp):
            return np.array(contestant.logits(window)[:-1])
        rows = Scorer(contestant.session.model.session(contestant.session.sparsity)).logits(window)
        return np.concatenate([some.copy() for some in rows])

    truth = logits(by_name["llama_cpp" if "llama_cpp" in by_name else "dense"])
    errors = {}
    for name, contestant in by_name.items():
        logits_of_one = logits(contestant)
        apart = np.abs(logits_of_one - truth) / truth.std()
        errors[name] = {
            "median": round(float(np.median(apart)), 5),
            "most": round(float(apart.max()), 5),
            "same_top": round(float((logits_of_one.argmax(1) == truth.argmax(1)).mean()), 3),
        }
    return errors


def measured(
    by_name: dict[str, Contestant], plan: Plan, machine: MachineState, type: str, samples: int
) -> list[report.Sample]:
    """Takes samples of each measure and contestant, after one that does not count."""
    taken = []
    for measure in plan.measures:
        for contestant in by_name.values():
            contestant.warm(measure)
        for turn in range(samples):
            shown_speeds = []
            for name in order([*by_name], turn):
                run, conditions = machine.around(by_name[name].prepare(measure, turn + 1), 0.05)
                speeds = run.tok_s, run.gb_s, conditions.read_gb_s
                taken.append(report.Sample(type, measure, name, turn, *speeds, conditions.state))
                shown_speeds.append(f"{name} {run.tok_s:.1f}")
            say(f"{type}, {measure}, sample {turn + 1}, tok/s: {', '.join(shown_speeds)}")
    return taken


def summary(samples: list[report.Sample]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for type, measure in dict.fromkeys((sample.type, sample.measure) for sample in samples):
        of_measure = [sample for sample in samples if (sample.type, sample.measure) == (type, measure)]
        row: dict[str, Any] = {}
        for name in dict.fromkeys(sample.contestant for sample in of_measure):
            mine = [sample for sample in of_measure if sample.contestant == name]
            row[name] = {"tok_s": round(statistics.median(sample.tok_s for sample in mine), 2)}
            if all(sample.gb_s is not None for sample in mine):
                speeds = [sample.gb_s for sample in mine if sample.gb_s is not None]
                shares = [sample.gb_s / sample.read_gb_s for sample in mine if sample.gb_s is not None]
                row[name]["gb_s"] = round(statistics.median(speeds), 2)
                row[name]["probe_share"] = round(statistics.median(shares), 3)
        ratios = {f"{a} / {b}": report.spread(report.ratios(of_measure, a, b)) for a, b in PAIRS}
        row["ratios"] = {name: sample for name, sample in ratios.items() if sample}
        rows[f"{type}, {measure}"] = row
    return rows


def show(rows: dict[str, Any]) -> None:
    for name, row in rows.items():
        print(name)
        for contestant, figures in row.items():
            if contestant == "ratios":
                for pair, ratio in figures.items():
                    spread = f"({ratio['low']:.2f} to {ratio['high']:.2f}, {ratio['n']})"
                    print(f"  {pair:22} x{ratio['median']:.2f} {spread}")
            else:
                rate = (
                    f"{figures['gb_s']:6.2f} GB/s, {figures['probe_share']:.2f}" if "gb_s" in figures else ""
                )
                print(f"  {contestant:12} {figures['tok_s']:9.2f} tok/s {rate}", flush=True)


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
            by_name = contestants(args, plan, folder, key, type)
            agreements[name] = agreement(by_name, shape.vocab)
            say(f"{name}: logits apart: {json.dumps(agreements[name])}")
            if args.samples:
                samples += measured(by_name, plan, machine, name, args.samples)
            if "llama_cpp" in by_name:
                say(f"{name}: flash attention {by_name['llama_cpp'].settings}")
                by_name["llama_cpp"].close()
            del by_name
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
