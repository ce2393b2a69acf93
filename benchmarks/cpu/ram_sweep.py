"""Budgets of RAM from 10 to 100 % of a model of experts: measured speed, and hits beside `plan`'s.

    python benchmarks/cpu/larger_than_memory.py -m q30.gguf --make 16 --gib 3 --profile  # makes both files
    python benchmarks/cpu/ram_sweep.py -m q30.gguf --profile q30.counted.gguf --svg sweep.svg

Budgets take turns, and each round has a text of its own, as texts differ in hits. Each measurement is a
process of its own that begins with the file out of the system's cache. The profile serves the plan alone,
unless `--hot` gives it to loading, too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cpu.larger_than_memory import CONTEXT, apart
from hotcold.errors import UserError
from hotcold.formats.gguf import open_gguf
from hotcold.runtime.loading import plan_memory
from hotcold.tasks.ram_planning import plan_ram
from lib.curves import Curve, Panel, svg

SHARES = (10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100)


def budgets(path: Path, shares: list[float]) -> dict[float, int]:
    """Bytes of each share of all that the model takes; those alone that hold two experts of each layer."""
    by_share = {}
    with open_gguf(path) as file:
        all_of_it = plan_memory(file, {"ram_budget": 1 << 50, "context": CONTEXT}).experts
        assert all_of_it is not None
        whole = sum(all_of_it.bill.values()) + all_of_it.expert_bytes
        for share in shares:
            budget = math.ceil(share / 100 * whole)
            try:
                plan_memory(file, {"ram_budget": budget, "context": CONTEXT})
            except UserError as error:
                print(f"{share:g} %: {error}", file=sys.stderr)
            else:
                by_share[share] = budget
    return by_share


def one(args: argparse.Namespace, budget: int, seed: int) -> dict[str, Any]:
    """A measurement of the text that ``seed`` draws."""
    figures = apart(args, budget, hot=args.hot, seed=seed)
    plan = plan_ram(args.model, budget, context=CONTEXT, profile=args.profile)
    figures |= {
        "expected_hit_share": plan.hit_share,
        "expected_disk_bytes_per_token": plan.disk_bytes_per_token,
    }
    del figures["text"]
    print(json.dumps({"budget": budget} | figures), file=sys.stderr, flush=True)
    return figures


def picture(rows: list[dict[str, Any]], caption: str) -> str:
    def points(name: str, by: float = 1.0) -> list[tuple[float, float]]:
        return [(row["share"], row[name] * by) for row in rows]

    def ranges(name: str) -> list[tuple[float, float]]:
        return [(min(row["rounds"][name]), max(row["rounds"][name])) for row in rows]

    speed = [Curve("measured", "#10a37f", points("tok_s"), ranges("tok_s"))]
    hits = [
        Curve("measured", "#10a37f", points("hit_share", 100)),
        Curve("plan", "#3b82f6", points("expected_hit_share", 100), dashed=True),
    ]
    panels = [Panel("tokens a second", speed), Panel("experts in memory, of those chosen, %", hits, 100)]
    return svg("Budgets of RAM", "budget, % of the model", panels, caption)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", type=Path, required=True, metavar="FILE", help="a model of experts")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, metavar="%", help="of the model")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="of hotcold profile, for the plans")
    parser.add_argument("--hot", action="store_true", help="loading has MODEL.counted.gguf")
    parser.add_argument("--tokens", type=int, default=64, help="of a measurement (64)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int, help="of the pool (as many as cores)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the picture there")
    parser.add_argument("--told", default="", help="the picture's last line: machine, model, commit")
    args = parser.parse_args()
    args.warm, args.sparsity = False, None
    by_share = budgets(args.model, args.shares)
    rounds: dict[float, list[dict[str, Any]]] = {share: [] for share in by_share}
    for seed in range(1, args.rounds + 1):
        for share, budget in by_share.items():
            rounds[share].append(one(args, budget, seed))
    rows = []
    print("    %  budget GiB   tok/s    hits    plan  MiB/token    plan")
    for share, samples in rounds.items():
        names = [name for name, value in samples[0].items() if isinstance(value, float)]
        row: dict[str, Any] = {name: statistics.median(sample[name] for sample in samples) for name in names}
        row |= {"share": share, "budget_bytes": by_share[share]}
        row["rounds"] = {name: [sample[name] for sample in samples] for name in names}
        rows.append(row)
        print(
            f"{share:5g} {by_share[share] / 2**30:11.2f} {row['tok_s']:7.2f}"
            f" {row['hit_share']:7.1%} {row['expected_hit_share']:7.1%}"
            f" {row['disk_bytes_per_token'] / 2**20:10.1f}"
            f" {row['expected_disk_bytes_per_token'] / 2**20:7.1f}"
        )
    if args.svg is not None:
        args.svg.write_text(picture(rows, args.told), encoding="utf-8")
    print(json.dumps({"shares": rows, "tokens": args.tokens, "cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
