"""Makes the predictors of --sparsity predicted from a text, without training, and says what they are worth.

They go into a sidecar. Commands find one that lies beside the model as MODEL.predictor.gguf. It also says in
which layers prediction pays; there --sparsity auto uses it."""

import argparse
import statistics
from pathlib import Path
from typing import Any

from hotcold import __version__
from hotcold.commands import options
from hotcold.commands.bench import measure, prompt_of
from hotcold.commands.progress import progress
from hotcold.demo import model_path
from hotcold.engine.engine import Engine
from hotcold.engine.loading import LoadedModel
from hotcold.engine.scoring import cut_windows, ffn_inputs
from hotcold.formats.gguf import open_gguf
from hotcold.sparse.fitting import INPUTS, FitOptions, Ladder, fit_layer
from hotcold.sparse.predictor import write_sidecar

_ROUNDS = 5  # of timing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, path, number = parser.add_argument, options.file_path, options.number
    add("-f", "--file", type=path, required=True, metavar="TEXT", help="the text, UTF-8")
    add("-o", "--output", type=path, required=True, metavar="FILE", help="the sidecar")
    what = "an SVD of the gate, or the trained predictors of a PowerInfer file (svd)"
    add("--method", choices=("svd", "trained"), default="svd", help=what)
    what = "part of the active neurons to find (0.99; trained: what their thresholds give)"
    add("--recall", type=number, metavar="R", help=what)
    add("--weighted", action="store_true", help="recall counts what neurons add, not how many they are")
    add("--type", type=str.upper, metavar="TYPE", help="block type, as q8_0 (q4_0; trained: as it is)")
    add("--max-share", type=number, default=0.15, metavar="S", help="in bytes, of a layer's FFN (0.15)")
    what = "evenly from the text (8192); held in memory for each layer"
    add("--tokens", type=options.whole_number(2), default=8192, metavar="N", help=what)
    what = "text to judge by (default: the last fifth of the other)"
    add("--held-out", type=path, metavar="TEXT", help=what)
    options.add_model_options(parser, sparsity=False)
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    settings = FitOptions(args.method, args.recall, args.weighted, args.type, args.max_share)
    if args.output.exists() or not args.output.parent.is_dir():
        raise ValueError(f"-o {args.output}: a new file in a folder that exists is needed")
    texts = [options.read_text(path) for path in (args.file, args.held_out) if path]
    path, mode = args.model or model_path(), "predicted" if args.method == "trained" else "exact"
    model = options.load_model(args, sparsity=mode, predictor=path, default_context=512)
    model = model.with_sparsity("exact")
    names, windows = {"normed", INPUTS[settings.method]}, _windows(model, texts, args.tokens)
    inputs = [ffn_inputs(model, each, names) for each in windows]
    ladders = []
    with open_gguf(path) as file, progress("layers") as advance:
        for layer, both in enumerate(zip(*inputs, strict=True)):
            ladders.append(fit_layer(file, model.config, layer, both, settings))
            advance(layer + 1, model.config.layers)
    report = _write(args.output, model, settings, ladders) | options.facts(model)
    _print(report)
    return options.end(args, report)


def _windows(model: LoadedModel, texts: list[str], tokens: int) -> list[list[list[int]]]:
    """Windows to fit to and, a fifth of all, to judge by: ``tokens`` evenly from one text or from two."""
    encode, bos = model.tokenizer.encode, model.tokenizer.bos_id
    cut = [cut_windows(encode(text, add_bos=False), model.context, bos) for text in texts]
    if len(cut) == 1:
        end = len(cut[0]) * 4 // 5
        cut = [cut[0][:end], cut[0][end:]]
    if not cut[0]:
        raise ValueError("the text is less than two windows: give more, or make them smaller (-c)")
    counts = (max(1, tokens * part // (5 * model.context)) for part in (4, 1))
    return [each[:: max(1, len(each) // n)][:n] for each, n in zip(cut, counts, strict=True)]


def _write(path: Path, model: LoadedModel, asked: FitOptions, ladders: list[Ladder]) -> dict[str, Any]:
    """Writes the sidecar. Bytes say in which layers prediction pays, the clock whether it does at all."""
    frontier = [[vars(fit) for _, fit in ladder] for ladder in ladders]
    best, tensors = [ladder[0] for ladder in frontier], [ladder[0][0] for ladder in ladders]
    facts: dict[str, Any] = {"version": __version__, "method": asked.method, "weighted": asked.weighted}
    facts["input"] = INPUTS[asked.method]
    facts |= {} if asked.recall is None else {"target": asked.recall}
    for name in ("pays", "marked", "recall", "weighted_recall", "read"):
        facts[name] = [fit[name] for fit in best]
    write_sidecar(path, model.fingerprint, tensors, facts)
    mode = "auto" if any(facts["pays"]) else "predicted"
    speed = _speed(model, model.with_sparsity(mode, path))
    if speed["ratio"] < 1:
        facts["pays"] = [False] * len(best)
        write_sidecar(path, model.fingerprint, tensors, facts)
    return {**facts, **speed, "measured": mode, "layers": best, "frontier": frontier, "output": str(path)}


def _speed(*models: LoadedModel) -> dict[str, float]:
    context = models[0].context
    prompt, length = prompt_of(models[0], min(32, context // 4)), [min(64, context // 2)]
    engines = [Engine(model) for model in models]
    rounds = [
        [measure(engine, prompt, length, None, seed=seed)["tok_s"] or 1 for engine in engines]
        for seed in range(_ROUNDS + 1)
    ][1:]  # the first warms memory and threads
    exact, predicted = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = statistics.median(after / before for before, after in rounds)
    return {"exact_tok_s": exact, "predicted_tok_s": predicted, "ratio": ratio}


def _print(report: dict[str, Any]) -> None:
    print("layer  rank     bytes  of FFN  marked  active  recall  weighted   read  pays")
    row = (
        "{:5}{rank:6}{nbytes:10}{share:8.1%}{marked:8.1%}{active:8.1%}{recall:8.4f}{weighted_recall:10.4f}"
        "{read:7.3f}  {pays!s:>5}"
    )
    print("\n".join(row.format(i, **fit) for i, fit in enumerate(report["layers"])))
    fits = [fit for ladder in report["frontier"] for fit in ladder]
    for rank in sorted({fit["rank"] for fit in fits}):
        same = [fit for fit in fits if fit["rank"] == rank]
        share, marked, read = (statistics.mean(fit[k] for fit in same) for k in ("share", "marked", "read"))
        print(f"rank {rank}: {share:.1%} of the FFN, {marked:.1%} marked, reads {read:.3f} of exact")
    print(
        "generation: exact {exact_tok_s:.1f}, {measured} {predicted_tok_s:.1f} tok/s, {ratio:.2f} times\n"
        "{output}: auto uses it in {} of {} layers".format(sum(report["pays"]), len(report["pays"]), **report)
    )
