"""How far ahead, and into which cache, weights are fetched best on this processor.

    python benchmarks/cpu/fetching.py --rounds 20 --settings 1K:1 2K:1 3K:1 4K:1 8K:1 3K:2 8K:2 16K:2

The settings (bytes ahead and the level of the cache) take turns within one process, a few tokens each, on the
same weights, in an order that is drawn for each round: a dense model, and a sparse one in ``exact`` and in
``predicted``. Printed are medians over the rounds, for each state that the machine was in
(benchmarks/lib/machine.py) and for all: of the speed over the first setting's in the same round and state,
and of the share of the read bandwidth that was probed just before.

What a processor should have belongs in the table of csrc/simd/fetching.cpp. The last line of stdout is a JSON
object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from hotcold.kernels.processor import fetching, set_fetching

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cpu.compare import Clock, Files, add_model_options, contestants, facts, model_folder
from lib.contestants import DECODE, Plan, order
from lib.machine import STATES, MachineState
from lib.report import Sample, interval, ratios

SETTINGS = ("3K:1", "1K:1", "2K:1", "4K:1", "8K:1", "16K:1", "1K:2", "2K:2", "3K:2", "4K:2", "8K:2", "16K:2")


def measure(args: argparse.Namespace, folder: Path) -> list[Sample]:
    """Contestants of the samples are settings, measures are modes."""
    plan, clock, machine = Plan((), (0,), 1, args.tokens), Clock(0), MachineState(args.threads)
    modes = contestants(args, plan, Files(args, folder, clock), args.type)
    samples: list[Sample] = []
    for round in range(-1, args.rounds):  # the first one warms memory and threads
        for mode in order([mode for mode in modes if mode in args.modes], max(round, 0)):
            for setting in random.sample(args.settings, len(args.settings)):
                run = modes[mode].prepare(DECODE, round + 1)
                set_fetching(setting)
                measured, conditions = machine.around(run, 0.02)
                speeds = measured.tok_s, measured.gb_s, conditions.read_gb_s
                samples.append(Sample(args.type, mode, setting, round, *speeds, conditions.state))
        clock.say(f"round {round + 1}/{args.rounds}")
    return [sample for sample in samples if sample.round >= 0]


def summary(samples: list[Sample], settings: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each state, mode and setting with pairs."""
    modes = dict.fromkeys(each.measure for each in samples)
    for state, mode, setting in product((*STATES, "any"), modes, settings):
        chosen = [each for each in samples if each.measure == mode and state in (each.state, "any")]
        pairs = ratios(chosen, setting, settings[0])
        if not pairs:
            continue
        of_setting = [each for each in chosen if each.contestant == setting and each.gb_s is not None]
        low, high = interval(pairs)
        yield {
            "state": state, "mode": mode, "setting": setting, "ratio": statistics.median(pairs),
            "low": low, "high": high, "gb_s": statistics.median(each.gb_s or 0 for each in of_setting),
            "share": statistics.median((each.gb_s or 0) / each.read_gb_s for each in of_setting),
            "pairs": len(pairs),
        }  # fmt: skip


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add_model_options(parser.add_argument)
    parser.add_argument("--type", default="Q4_0")
    parser.add_argument("--modes", nargs="+", default=["dense", "exact", "predicted"])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), metavar="BYTES:LEVEL")
    parser.add_argument("--tokens", type=int, default=4, help="generated with one setting in a round")
    parser.set_defaults(shape=[4096, 11008, 32, 32, 32000], layers=8, rounds=10, no_llama_cpp=True)
    args = parser.parse_args()
    chosen = fetching()
    with model_folder(args) as folder:
        rows = list(summary(measure(args, folder), args.settings))
    print(f"state     mode      setting   ratio            95 %   GB/s  share  pairs   (default {chosen})")
    for row in rows:
        interval = f"{row['low']:.3f} to {row['high']:.3f}"
        figures = f"{row['ratio']:6.3f}{interval:>16}{row['gb_s']:7.1f}{row['share']:7.2f}{row['pairs']:7}"
        print(f"{row['state']:<10}{row['mode']:<10}{row['setting']:<9}{figures}")
    print(json.dumps({"facts": facts(args), "default": chosen, "rows": rows}))


if __name__ == "__main__":
    main()
