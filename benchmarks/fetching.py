"""How far ahead, and into which cache, weights are fetched best on this processor.

    python benchmarks/fetching.py --rounds 20 --settings 1K:1 2K:1 3K:1 4K:1 8K:1 3K:2 8K:2 16K:2

The settings (bytes ahead and the level of the cache) take turns within one process, a few tokens each, on the
same weights, in an order that is drawn for each round: a dense model, and a sparse one in ``exact`` and in
``predicted``. Printed are medians over the rounds, for each state that the machine was in
(benchmarks/machine_state.py) and for all: of the speed over the first setting's in the same round and state,
and of the share of the read bandwidth that was probed just before.

What a processor should have belongs in the table of csrc/simd/cpu_isa.cpp. The last line of stdout is a JSON
object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from compare_cpu import Models, add_model_options, facts, model_folder, order, say
from contestants import Lengths, Ours
from machine_state import STATES, MachineState

from hotcold.kernels import _native
from hotcold.kernels.cpu import fetching

SETTINGS = ("3K:1", "1K:1", "2K:1", "4K:1", "8K:1", "16K:1", "1K:2", "2K:2", "3K:2", "4K:2", "8K:2", "16K:2")


def parsed(setting: str) -> tuple[int, int]:
    """Bytes ahead and level: ``3K:1`` is 3072 bytes into L1."""
    kilobytes, level = setting.split("K:")
    return int(kilobytes) << 10, int(level)


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    models, machine = Models(args, folder), MachineState(args.threads)
    lengths = Lengths(args.prompt, args.generate, 1, pieces=len(args.settings))
    predicted = models.ours(models.path(args.type, args.active, "pwri"), "predicted", lengths)
    dense = models.ours(models.path(args.type, None, "by_output"), "off", lengths)
    modes = {
        "dense": Ours(dense, lengths),
        "exact": Ours(predicted.model.session("exact"), lengths),
        "predicted": Ours(predicted, lengths),
    }
    samples: list[dict[str, Any]] = []
    for round in range(-1, args.rounds):  # the first one warms memory and threads
        for mode in order([mode for mode in modes if mode in args.modes], max(round, 0)):
            phases = modes[mode].phases(round + 1)
            next(phases)[1]()
            drawn = random.sample(args.settings, len(args.settings))
            for setting, (_, run) in zip(drawn, phases, strict=True):
                _native.set_fetching(*parsed(setting))
                seen, conditions = machine.around(run, args.probe)
                sample = {"round": round, "mode": mode, "setting": setting, "tok_s": seen.tok_s}
                share = (seen.gb_s or 0) / conditions.read_gb_s
                samples.append(sample | {"gb_s": seen.gb_s, "share": share, "state": conditions.state})
        say(f"round {round + 1}/{args.rounds}")
    return [sample for sample in samples if sample["round"] >= 0]


def summary(samples: list[dict[str, Any]], settings: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each state, mode and setting, of those that have pairs."""
    for state, mode, setting in product(
        (*STATES, "any"), dict.fromkeys(each["mode"] for each in samples), settings
    ):
        of_mode = [each for each in samples if each["mode"] == mode and state in (each["state"], "any")]
        base = {each["round"]: each for each in of_mode if each["setting"] == settings[0]}
        own = [each for each in of_mode if each["setting"] == setting and each["round"] in base]
        pairs = [each for each in own if each["state"] == base[each["round"]]["state"] != "mixed"]
        if not pairs:
            continue
        ratios = [each["tok_s"] / base[each["round"]]["tok_s"] for each in pairs]
        resampled = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
        low, high = np.quantile(np.median(resampled, 1), [0.025, 0.975])
        share, gb_s = (statistics.median(each[key] for each in pairs) for key in ("share", "gb_s"))
        yield {
            "state": state, "mode": mode, "setting": setting, "ratio": statistics.median(ratios),
            "low": low, "high": high, "gb_s": gb_s, "share": share, "pairs": len(pairs),
        }  # fmt: skip


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add_model_options(parser.add_argument)
    parser.add_argument("--type", default="Q4_0")
    parser.add_argument("--active", type=float, default=0.1)
    parser.add_argument("--modes", nargs="+", default=["dense", "exact", "predicted"])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), metavar="BYTES:LEVEL")
    parser.add_argument("--tokens", type=int, default=4, help="generated with one setting in a round")
    parser.add_argument("--probe", type=float, default=0.02, help="seconds of the read probe")
    args = parser.parse_args()
    args.generate = args.tokens * len(args.settings)
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
