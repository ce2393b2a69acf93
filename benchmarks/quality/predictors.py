"""Predictors of sparse models by four methods: what they name, what they cost, and the verdict of `auto`.

    python benchmarks/quality/predictors.py books.txt --held-out Heidi.txt --work predictors \
        --model relu.gguf drelu.gguf --bisect 6

The models are the built-in one and the files of `--model`, such as converted models of sparsified.py.
Each method is fitted to the same text for each `--recall`. `hotcold fit-predictor` itself measures the cost
on the held-out text, until an interval decides or `--eval-tokens` are used up. `--bisect N` then looks in N
steps for the smallest recall whose interval passes, because fewer neurons are named there.

Predictors are trained in the work folder: a run that was killed continues. `--wide` takes a twin of the
built-in model that is four times as wide (lib/wide.py) instead of the built-in model itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import hotcold
from hotcold.demo import model_path
from hotcold.sparse.fitting import Fit
from hotcold.sparse.measurement import MOST_RATIO
from hotcold.tasks.fitting import Comparison
from hotcold.training.options import TrainOptions
from lib.wide import write_wide

METHODS = {
    "svd": {"method": "svd"},
    "svd-weighted": {"method": "svd", "weighted": True},
    "train": {"method": "train"},
    "train-relu": {"method": "train"},
}
RECALLS = 0.5, 0.9999  # between which a bisection looks

HEAD = (
    "| model | method | recall asked for | of the FFN | marked | of active | recall (worst) "
    "| weighted recall (worst) | read | KL | perplexity, of `exact` | tokens | `auto` | tok/s, of `exact` |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)
LAYER_HEAD = (
    "| layer | rank | of the FFN | marked | active | marked / active | recall | weighted recall | read |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def row(model: str, method: str, recall: float, found: Comparison) -> str:
    fits, cost = [fit for fit in found.layers if fit.rank], found.measured
    mean = {name: statistics.mean(getattr(fit, name) for fit in fits) for name in vars(fits[0])}
    of_active = statistics.mean(fit.candidates / max(1e-9, fit.active) for fit in fits)
    ratio, low, high = (
        f"{100 * (each - 1):+.3f}" for each in (cost.ppl_ratio, cost.ppl_ratio_low, cost.ppl_ratio_high)
    )
    return (
        f"| {model} | `{method}` | {recall:.5g} | {mean['size_ratio']:.1%} | {mean['candidates']:.1%} "
        f"| {of_active:.2f} | {mean['recall']:.4f} ({min(fit.recall for fit in fits):.4f}) "
        f"| {mean['weighted_recall']:.4f} ({min(fit.weighted_recall for fit in fits):.4f}) "
        f"| {mean['read_ratio']:.3f} | {cost.kl_mean:.2g} | {ratio} % [{low}, {high}] | {cost.tokens} "
        f"| {cost.objection or 'used'} "
        f"| {cost.speed_ratio:.2f} [{cost.speed_low:.2f}, {cost.speed_high:.2f}] |"
    )


def layers(fits: list[Fit]) -> str:
    lines = [LAYER_HEAD]
    lines += [
        f"| {i} | {fit.rank} | {fit.size_ratio:.1%} | {fit.candidates:.1%} | {fit.active:.1%} "
        f"| {fit.candidates / max(1e-9, fit.active):.2f} | {fit.recall:.4f} | {fit.weighted_recall:.4f} "
        f"| {fit.read_ratio:.3f} |"
        for i, fit in enumerate(fits)
    ]
    return "\n".join(lines)


def fitted(model: Path, method: str, recall: float, args: argparse.Namespace) -> dict[str, Any]:
    """Makes and measures predictors, and prints their row."""
    name = f"{model.stem}-{method}-{recall:.6g}"
    output = args.work / f"{name}.predictor.gguf"
    output.unlink(missing_ok=True)
    options: dict[str, Any] = dict(METHODS[method])
    if options["method"] == "train":
        training = TrainOptions(epochs=args.epochs, relu=method == "train-relu")
        options |= {"work": args.work / name, "training": training}
    found = hotcold.fit_predictor(
        model,
        args.text,
        output=output,
        held_out=args.held_out,
        recall=recall,
        tokens=args.tokens,
        eval_tokens=args.eval_tokens,
        threads=args.threads,
        **options,
    )
    print(row(model.stem, method, recall, found), flush=True)
    if args.layers:
        print(f"\n{layers(found.layers)}\n", flush=True)
    return {"model": model.stem, "asked": recall, **found.report(), "method": method}


def bisected(model: Path, method: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Looks for the smallest recall whose cost passes: each step halves the interval of log(1 - recall)."""
    least, most = RECALLS
    for _ in range(args.bisect):
        recall = 1 - ((1 - least) * (1 - most)) ** 0.5
        found = fitted(model, method, recall, args)
        high = found["measured"]["ppl_ratio_high"]
        passes = high is not None and high <= MOST_RATIO
        least, most = (least, recall) if passes else (recall, most)
        yield found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, help="to fit to")
    parser.add_argument("--held-out", type=Path, required=True, help="to judge by")
    parser.add_argument("--work", type=Path, required=True, help="folder for what is made")
    parser.add_argument("--model", type=Path, nargs="+", default=[], help="more GGUF files")
    parser.add_argument("--wide", action="store_true", help="the twin instead of the built-in model")
    parser.add_argument("--method", nargs="+", choices=[*METHODS], default=[*METHODS], help="(all)")
    parser.add_argument("--recall", type=float, nargs="*", default=[0.992], help="(0.992)")
    parser.add_argument("--bisect", type=int, default=0, metavar="N", help="steps to the least recall (0)")
    parser.add_argument("--tokens", type=int, default=32768, help="(32768)")
    parser.add_argument("--eval-tokens", type=int, default=65536, help="held-out tokens, at most (65536)")
    parser.add_argument("--epochs", type=int, default=TrainOptions().epochs, help="for each rank, at most")
    parser.add_argument("--threads", type=int, default=1, help="(1)")
    parser.add_argument("--layers", action="store_true", help="print the figures of each layer, too")
    args = parser.parse_args()
    args.work.mkdir(exist_ok=True)
    first = args.work / "wide.gguf" if args.wide else Path(model_path())
    if args.wide and not first.exists():
        write_wide(first, args.text.read_text(encoding="utf-8"))
    print(HEAD, flush=True)
    report = []
    for model in [first, *args.model]:
        for method in args.method:
            report += [fitted(model, method, recall, args) for recall in args.recall]
            report += bisected(model, method, args)
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
