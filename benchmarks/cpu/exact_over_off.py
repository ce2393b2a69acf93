"""Speed of ``exact`` over ``off`` by the share of active neurons, of one sequence and of several.

    python benchmarks/cpu/exact_over_off.py
    python benchmarks/cpu/exact_over_off.py --types Q8_0 --active 0.85 0.9 0.95 --rounds 20

Random ReLU models whose weights cause the activity (lib/models.py), with down by neuron and in panels. Both
modes share the weights, have the same bits and take turns. Each ratio is of two samples taken one after the
other; printed are the median, the least and the greatest. The last line of stdout is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lib.contestants import Ours, Plan, run_round
from lib.machine import MachineState, commit
from lib.models import Recipe, Shape, write


def ratios(path: Path, args: argparse.Namespace, machine: MachineState) -> dict[str, list[float]]:
    """Returns off's time over exact's in each turn, by measure."""
    plan = Plan((), (0,), args.sequences, args.generate, layers=args.layers)
    options = LoadOptions(
        sparsity="exact", threads=args.threads, context=plan.context, sequences=plan.sequences, gpu="off"
    )
    model = load(path, options)
    modes = {mode: Ours(model.session(mode), plan) for mode in ("exact", "off")}
    for measure in plan.measures:
        for each in modes.values():
            each.warm(measure)
    speeds: dict[tuple[str, int], dict[str, float]] = {}
    for round in range(args.rounds):
        for measure, turn, mode, measured, _ in run_round(modes, plan, machine, round):
            speeds.setdefault((measure, turn), {})[mode] = measured.tok_s
    model.close()
    found: dict[str, list[float]] = {}
    for (measure, _), both in speeds.items():
        found.setdefault(measure, []).append(both["exact"] / both["off"])
    return found


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--types", nargs="+", default=["Q4_0"])
    parser.add_argument("--layouts", nargs="+", default=["by_neuron", "by_output"])
    parser.add_argument("--active", nargs="+", type=float, default=[0.3, 0.5, 0.7, 0.85, 0.9, 0.95])
    parser.add_argument("--shape", nargs=5, type=int, default=[4096, 11008, 32, 32, 32000],
        metavar=("DIM", "NEURONS", "HEADS", "KV", "VOCAB"))  # fmt: skip
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--generate", type=int, default=12, help="tokens of a sample (12)")
    parser.add_argument("--rounds", type=int, default=5, help="of three samples each (5)")
    parser.add_argument("-t", "--threads", type=int, default=2)
    args = parser.parse_args()
    machine, rows = MachineState(args.threads), list[dict[str, Any]]()
    dim, neurons, heads, kv_heads, vocab = args.shape
    shape = Shape(dim, neurons, args.layers, heads, kv_heads, vocab, 2048)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        for type, layout, active in [
            (t, i, a) for t in args.types for i in args.layouts for a in args.active
        ]:
            write(path, Recipe(shape, type, active, layout))
            for measure, over in ratios(path, args, machine).items():
                row = {"type": type, "layout": layout, "active": active, "measure": measure}
                middle, least, most = statistics.median(over), min(over), max(over)
                rows.append(row | {"median": middle, "least": least, "most": most, "n": len(over)})
                print(*row.values(), f"{middle:.3f} ({least:.3f} to {most:.3f})", flush=True)
            path.unlink()
    print(json.dumps({"commit": commit(), "rows": rows}))


if __name__ == "__main__":
    main()
