"""Predictors of sparse models by five methods: what they name, what they cost, and the verdict of `auto`.

    python benchmarks/quality/predictors.py books.txt --held-out Heidi.txt --work predictors \
        --model relu.gguf drelu.gguf --bisect 6

The models are the built-in one and the files of `--model`, such as converted models of sparsified.py.
Each method is fitted to the same text for each `--recall`. `hotcold fit-predictor` itself measures the cost
on the held-out text, until an interval decides or `--eval-tokens` are used up. `--bisect N` then looks in N
steps for the smallest recall whose interval passes, because fewer neurons are named there.

The method `by-layer` looks for the recall of each layer by itself, also by bisection: all other layers name
all neurons, and the KL divergence from `exact` may be the layer's part of `--kl`. The text of this search is
the last fifth of TEXT, to which no factors are fitted; the held-out text measures the result.

Predictors are trained in the work folder: a run that was killed continues. `--wide` takes a twin of the
built-in model that is four times as wide (lib/wide.py) instead of the built-in model itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import hotcold
from hotcold.demo import model_path
from hotcold.formats.gguf import open_gguf
from hotcold.kernels.backend import PredictorTensors
from hotcold.runtime.loading import load
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.session import LoadedModel
from hotcold.sparse.fitting import Fit, FitOptions, Fitted, fit_layer
from hotcold.sparse.measurement import MOST_RATIO
from hotcold.sparse.predictor import write_sidecar
from hotcold.tasks.ffn_inputs import ffn_inputs
from hotcold.tasks.fitting import Comparison
from hotcold.tasks.scoring import Scorer, compare, join
from hotcold.tasks.windows import evenly, text_windows
from hotcold.training.options import TrainOptions
from lib.wide import write_wide

METHODS = {
    "svd": {"method": "svd"},
    "svd-weighted": {"method": "svd", "weighted": True},
    "train": {"method": "train"},
    "train-relu": {"method": "train"},
}
BY_LAYER = "by-layer"
RECALLS = 0.5, 0.9999  # between which a bisection looks
STEPS = 6  # of the bisection for each layer
JUDGED = 8  # windows that compare two recalls of a layer
CONTEXT = 256

HEAD = (
    "| model | method | recall asked for | of the FFN | marked | of active | recall (worst) "
    "| weighted recall (worst) | read | KL | perplexity, of `exact` | tokens | `auto` | tok/s, of `exact` |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)
LAYER_HEAD = (
    "| layer | rank | of the FFN | marked | active | marked / active | recall | weighted recall | read |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def row(model: str, method: str, asked: str, comparison: Comparison) -> str:
    fits, cost = [fit for fit in comparison.layers if fit.rank], comparison.measured
    mean = {name: statistics.mean(getattr(fit, name) for fit in fits) for name in vars(fits[0])}
    of_active = statistics.mean(fit.candidates / max(1e-9, fit.active) for fit in fits)
    ratio, low, high = (
        f"{100 * (each - 1):+.3f}" for each in (cost.ppl_ratio, cost.ppl_ratio_low, cost.ppl_ratio_high)
    )
    return (
        f"| {model} | `{method}` | {asked} | {mean['size_ratio']:.1%} | {mean['candidates']:.1%} "
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
    comparison = hotcold.fit_predictor(
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
    print(row(model.stem, method, f"{recall:.5g}", comparison), flush=True)
    if args.layers:
        print(f"\n{layers(comparison.layers)}\n", flush=True)
    return {"model": model.stem, "asked": recall, **comparison.report(), "method": method}


def bisected(model: Path, method: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Looks for the smallest recall whose cost passes: each step halves the interval of log(1 - recall)."""
    least, most = RECALLS
    for _ in range(args.bisect):
        recall = 1 - ((1 - least) * (1 - most)) ** 0.5
        result = fitted(model, method, recall, args)
        high = result["measured"]["ppl_ratio_high"]
        passes = high is not None and high <= MOST_RATIO
        least, most = (least, recall) if passes else (recall, most)
        yield result


class LayerSearch:
    """Predictors of a model: each layer has the smallest recall that its part of a KL divergence allows."""

    def __init__(self, model: Path, args: argparse.Namespace) -> None:
        self.path, self.folder = model, args.work
        options = LoadOptions(sparsity="exact", threads=args.threads, context=CONTEXT, gpu="off")
        self.model: LoadedModel = load(model, options)
        windows = text_windows(self.model.tokenizer, args.text.read_text(encoding="utf-8"), CONTEXT)
        end = len(windows) * 4 // 5
        fit_to = evenly(windows[:end], max(1, args.tokens * 4 // (5 * CONTEXT)))
        unseen = evenly(windows[end:], max(JUDGED, args.tokens // (5 * CONTEXT)))
        self.judges = evenly(unseen, JUDGED)
        self.inputs = [ffn_inputs(self.model, each, {"normed"}) for each in (fit_to, unseen)]

    def fitted(self, layer: int, recall: float) -> Fitted:
        options = FitOptions("svd", recall, weighted=True)
        fit_to, held_out = (each[layer] for each in self.inputs)
        with open_gguf(self.path) as file:
            return fit_layer(file, self.model.config, layer, options, fit_to=fit_to, held_out=held_out)[0]

    def write(self, tensors: Sequence[PredictorTensors]) -> Path:
        path: Path = self.folder / f"{self.path.stem}-{BY_LAYER}.predictor.gguf"
        write_sidecar(path, self.model.fingerprint, tensors, {"input": "normed"})
        return path

    def divergence(self, tensors: Sequence[PredictorTensors]) -> float:
        sidecar = self.write(tensors)
        with (
            closing(self.model.session("exact")) as exact,
            closing(self.model.session("predicted", sidecar)) as predicted,
        ):
            scorers = Scorer(predicted), Scorer(exact)
            return float(join([compare(*scorers, window) for window in self.judges]).kl.mean())

    def found(self, budget: float) -> list[Fitted]:
        """Returns one fit for each layer. Raises ValueError if a layer keeps its part at no recall."""
        layers = range(self.model.config.layers)
        widest = [self.fitted(layer, RECALLS[1]) for layer in layers]
        everything = np.float32(-1e38)  # the threshold that all neurons reach
        whole = [replace(each.tensors, threshold=each.tensors.threshold * 0 + everything) for each in widest]
        best = [*widest]
        part = budget / len(layers)
        for layer in layers:
            alone = [*whole]
            alone[layer] = widest[layer].tensors
            if (cost := self.divergence(alone)) > part:
                got = f"layer {layer} costs {cost:.3g} nats at a recall of {RECALLS[1]}"
                raise ValueError(f"{got}: at most {part:.3g}, its part of --kl: give a larger --kl")
            least, most = RECALLS
            for _ in range(STEPS):
                recall = 1 - ((1 - least) * (1 - most)) ** 0.5
                fitted = self.fitted(layer, recall)
                alone[layer] = fitted.tensors
                if self.divergence(alone) <= part:
                    most, best[layer] = recall, fitted
                else:
                    least = recall
        return best


def by_layer(model: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    search = LayerSearch(model, args)
    text, tokens, threads = args.held_out, args.eval_tokens, args.threads
    for budget in args.kl:
        try:
            best = search.found(budget)
        except ValueError as error:
            print(f"| {model.stem} | `{BY_LAYER}` | KL {budget:g} | none: {error} |", flush=True)
            continue
        sidecar = search.write([each.tensors for each in best])
        cost = hotcold.measure_predictor(model, sidecar, text, eval_tokens=tokens, threads=threads)
        comparison = Comparison(
            cost.speed, cost.measured, [each.fit for each in best], [each.tensors for each in best]
        )
        print(row(model.stem, BY_LAYER, f"KL {budget:g}", comparison), flush=True)
        if args.layers:
            print(f"\n{layers(comparison.layers)}\n", flush=True)
        yield {"model": model.stem, "method": BY_LAYER, "kl": budget, **comparison.report()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, help="to fit to")
    parser.add_argument("--held-out", type=Path, required=True, help="to judge by")
    parser.add_argument("--work", type=Path, required=True, help="folder for what is made")
    parser.add_argument("--model", type=Path, nargs="+", default=[], help="more GGUF files")
    parser.add_argument("--wide", action="store_true", help="the twin instead of the built-in model")
    parser.add_argument(
        "--method", nargs="+", choices=[*METHODS, BY_LAYER], default=[*METHODS, BY_LAYER], help="(all)"
    )
    parser.add_argument("--recall", type=float, nargs="*", default=[0.992], help="(0.992)")
    parser.add_argument("--bisect", type=int, default=0, metavar="N", help="steps to the least recall (0)")
    parser.add_argument("--kl", type=float, nargs="+", default=[5e-4], help="nats, for by-layer (0.0005)")
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
            if method == BY_LAYER:
                report += by_layer(model, args)
                continue
            report += [fitted(model, method, recall, args) for recall in args.recall]
            report += bisected(model, method, args)
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
