"""Predictors that were trained beside those that were cut from the gate: what both mark for one recall.

    python benchmarks/quality/predictors.py books.txt --held-out Heidi.txt --work predictors --wide

For each recall (of what neurons add, not of how many they are) both methods are fitted to the same text; both
are judged by the held-out text, layer by layer, and by its perplexity against that of all neurons. Predictors
are trained in the work folder: a run that is killed goes on where it was. `--wide` takes a twin of the
built-in model that is four times as wide (lib/wide.py) instead of the built-in model itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import hotcold
from hotcold.demo import model_path
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.sparse.fitting import Fit
from hotcold.sparse.predictor import write_sidecar
from hotcold.tasks import scoring
from hotcold.tasks.windows import text_windows
from hotcold.training.options import TrainOptions
from lib.wide import write_wide

HEAD = (
    "| method | recall asked for | of the FFN | marked | of active | weighted recall (worst) | read "
    "| perplexity | KL, P99 | tok/s, of `exact` |\n|---|---|---|---|---|---|---|---|---|---|"
)
LAYER_HEAD = (
    "| layer | rank | of the FFN | marked | active | marked / active | weighted recall | read |\n"
    "|---|---|---|---|---|---|---|---|"
)


def row(method: str, recall: float, fits: list[Fit], ratio: float, compared: dict[str, Any]) -> str:
    mean = {name: statistics.mean(getattr(fit, name) for fit in fits) for name in vars(fits[0])}
    of_active = statistics.mean(fit.candidates / fit.active for fit in fits)
    change, low, high = (
        f"{100 * (compared[name] - 1):+.3f}" for name in ("ppl_ratio", "ppl_ratio_low", "ppl_ratio_high")
    )
    return (
        f"| {method} | {recall} | {mean['size_ratio']:.1%} | {mean['candidates']:.1%} | {of_active:.2f} "
        f"| {mean['weighted_recall']:.4f} ({min(fit.weighted_recall for fit in fits):.4f}) "
        f"| {mean['read_ratio']:.3f} | {change} % [{low}, {high}] "
        f"| {compared['kl_mean']:.5f}, {compared['kl_p99']:.4f} | {ratio:.2f} |"
    )


def layers(fits: list[Fit]) -> str:
    lines = [LAYER_HEAD]
    lines += [
        f"| {i} | {fit.rank} | {fit.size_ratio:.1%} | {fit.candidates:.1%} | {fit.active:.1%} "
        f"| {fit.candidates / fit.active:.2f} | {fit.weighted_recall:.4f} | {fit.read_ratio:.3f} |"
        for i, fit in enumerate(fits)
    ]
    return "\n".join(lines)


def holding(fits: list[Fit]) -> int:
    """Layers that find 0.99 by weight, mark at most 1.5 times the active ones, and take at most 15 %."""
    return sum(
        fit.weighted_recall >= 0.99 and fit.candidates <= 1.5 * fit.active and fit.size_ratio <= 0.15
        for fit in fits
    )


def divergence(model: Path, sidecar: Path, text: str, chunks: int) -> dict[str, Any]:
    """How the text's probabilities with predictors differ from those of all neurons."""
    loaded = load(model, LoadOptions(threads=1, gpu="off", sparsity="off"))
    windows = text_windows(loaded.tokenizer, text, loaded.context)[:chunks]
    with closing(loaded.session("off")) as off, closing(loaded.session("predicted", sidecar)) as predicted:
        scorers = scoring.Scorer(predicted), scoring.Scorer(off)
        return scoring.join([scoring.compare(*scorers, window) for window in windows]).summary()


def measured(model: Path, args: argparse.Namespace, recall: float) -> list[dict[str, Any]]:
    name = f"{model.stem}-{recall}"
    text = args.held_out.read_text(encoding="utf-8")
    output = args.work / f"{name}.predictor.gguf"
    output.unlink(missing_ok=True)
    fitted = hotcold.fit_predictor(
        model,
        args.text,
        method="train",
        output=output,
        work=args.work / name,
        training=TrainOptions(epochs=args.epochs),
        held_out=args.held_out,
        recall=recall,
        tokens=args.tokens,
        threads=1,
    )
    assert fitted.svd is not None
    other = args.work / f"{name}.svd.gguf"
    write_sidecar(other, fitted.fingerprint, fitted.svd.tensors, fitted.metadata)
    found, results = [], (("train", fitted, output), ("svd", fitted.svd, other))
    for method, result, path in results:
        compared = divergence(model, path, text, args.chunks)
        print(row(method, recall, result.layers, result.speed.ratio, compared), flush=True)
        found.append({"method": method, "asked": recall, **result.report(), "compare": compared})
    for method, result, _ in results:
        print(f"\n`{method}` at {recall}: {holding(result.layers)} of {len(result.layers)} layers hold\n")
        print(layers(result.layers), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, help="to fit to")
    parser.add_argument("--held-out", type=Path, required=True, help="to judge by")
    parser.add_argument("--work", type=Path, required=True, help="folder for what is made")
    parser.add_argument("--wide", action="store_true", help="the twin instead of the built-in model")
    parser.add_argument("--recall", type=float, nargs="+", default=[0.992], help="(0.992)")
    parser.add_argument("--tokens", type=int, default=32768, help="(32768)")
    parser.add_argument("--epochs", type=int, default=TrainOptions().epochs, help="for each rank, at most")
    parser.add_argument("--chunks", type=int, default=60, help="windows of the held-out text scored (60)")
    args = parser.parse_args()
    args.work.mkdir(exist_ok=True)
    model = Path(model_path())
    if args.wide:
        model = args.work / "wide.gguf"
        if not model.exists():
            write_wide(model, args.text.read_text(encoding="utf-8"))
    print(HEAD, flush=True)
    report = [each for recall in args.recall for each in measured(model, args, recall)]
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
