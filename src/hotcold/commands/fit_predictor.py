"""Makes the predictors of --sparsity predicted from a text, without training, and says what they are worth.

They go into a sidecar. Commands find one that lies beside the model as MODEL.predictor.gguf. It also says in
which layers prediction pays; there --sparsity auto uses it."""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from hotcold import __version__
from hotcold.commands import options
from hotcold.commands.progress import progress
from hotcold.demo import model_path
from hotcold.engine.benchmark import measure, prompt_of
from hotcold.engine.engine import Engine
from hotcold.engine.ffn_inputs import ffn_inputs
from hotcold.engine.loading import LoadedModel
from hotcold.engine.session import Session
from hotcold.engine.windows import evenly, text_windows
from hotcold.errors import UserError
from hotcold.formats.gguf import open_gguf
from hotcold.sparse.fitting import INPUTS, FitOptions, Fitted, fit_layer
from hotcold.sparse.predictor import write_sidecar

_ROUNDS = 5  # of timing

_HEADING = "layer  rank     bytes  of FFN  candidates  active  recall  weighted   read  pays"
_ROW = (
    "{layer:5}{rank:6}{nbytes:10}{size_ratio:8.1%}{candidates:12.1%}{active:8.1%}{recall:8.4f}"
    "{weighted_recall:10.4f}{read_ratio:7.3f}  {pays!s:>5}"
)

Windows = list[list[int]]


class Speed(NamedTuple):
    """Of generation, on this machine: medians of rounds in which both modes took turns."""

    exact_tok_s: float
    predicted_tok_s: float
    ratio: float  #: of the second to the first, round by round


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, path, number = parser.add_argument, options.file_path, options.number
    add("-f", "--file", type=path, required=True, metavar="TEXT", help="text to fit to, UTF-8")
    add("-o", "--output", type=path, required=True, metavar="FILE", help="where to write the sidecar")
    add(
        "--method",
        choices=tuple(INPUTS),
        default="svd",
        help="svd: a truncated SVD of the gate. trained: the predictors in a PowerInfer file (default: svd)",
    )
    add(
        "--recall",
        type=number,
        metavar="R",
        help="share of the active neurons to find (default: 0.99; trained: what their own thresholds find)",
    )
    add("--weighted", action="store_true", help="in --recall a neuron counts by how much it adds")
    add(
        "--type",
        type=str.upper,
        metavar="TYPE",
        help="block type of the predictors (default: q4_0; trained: as in the file)",
    )
    add(
        "--max-share",
        type=number,
        default=0.15,
        metavar="S",
        help="most bytes of a predictor, as a share of its layer's FFN (default: 0.15)",
    )
    add(
        "--tokens",
        type=options.whole_number(2),
        default=8192,
        metavar="N",
        help="tokens to use, sampled over the whole text: four fifths to fit to, one to judge by (8192)",
    )
    add(
        "--held-out",
        type=path,
        metavar="TEXT",
        help="text to judge by (default: the last fifth of -f, which is then not fitted to)",
    )
    options.add_model_options(parser, sparsity=False)
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    settings = FitOptions(args.method, args.recall, args.weighted, args.type, args.max_share)
    if args.output.exists() or not args.output.parent.is_dir():
        raise UserError(f"-o {args.output}: a new file in a folder that exists is needed")
    texts = [options.read_text(path) for path in (args.file, args.held_out) if path]
    path = args.model or model_path()
    # Loading as predicted checks a PowerInfer file's own predictors before anything else is done.
    mode = "predicted" if args.method == "trained" else "exact"
    model = options.load_model(args, sparsity=mode, predictor=path, default_context=512)
    fit_to, held_out = _windows(model, texts, args.tokens)
    ladders = _fit(model, path, settings, fit_to, held_out)
    best = [ladder[0] for ladder in ladders]
    metadata = _metadata(settings, best)
    write_sidecar(args.output, model.fingerprint, [each.tensors for each in best], metadata)
    # Bytes say in which layers prediction pays, the clock whether it does at all.
    measured = "auto" if any(metadata["pays"]) else "predicted"
    exact = model.session("exact")
    speed = _speed(exact, model.session(measured, args.output))
    if speed.ratio < 1:
        metadata["pays"] = [False] * len(best)
        write_sidecar(args.output, model.fingerprint, [each.tensors for each in best], metadata)
    report = {
        **metadata,
        **speed._asdict(),
        "measured": measured,
        "layers": [asdict(each.fit) for each in best],
        "frontier": [[asdict(each.fit) for each in ladder] for ladder in ladders],
        "output": str(args.output),
        **options.facts(exact),
    }
    _print(report)
    return options.end(args, report)


def _windows(model: LoadedModel, texts: Sequence[str], tokens: int) -> tuple[Windows, Windows]:
    """Windows to fit to and to judge by, none in both: four fifths and one fifth of ``tokens``.

    They are spread over the two texts, or over the first four fifths and the last fifth of one."""
    fit_to, *more = (text_windows(model.tokenizer, text, model.context) for text in texts)
    if more:
        held_out = more[0]
    else:
        end = len(fit_to) * 4 // 5
        fit_to, held_out = fit_to[:end], fit_to[end:]
    if not fit_to:
        raise UserError("the text is less than two windows: give more, or make them smaller (-c)")
    wanted = max(1, tokens * 4 // (5 * model.context)), max(1, tokens // (5 * model.context))
    return evenly(fit_to, wanted[0]), evenly(held_out, wanted[1])


def _fit(
    model: LoadedModel, path: Path, settings: FitOptions, fit_to: Windows, held_out: Windows
) -> list[list[Fitted]]:
    """By layer, predictors of several ranks, the best first."""
    names = {"normed", INPUTS[settings.method]}
    inputs = ffn_inputs(model, fit_to, names), ffn_inputs(model, held_out, names)
    ladders = []
    with open_gguf(path) as file, progress("layers") as advance:
        for layer, (seen, unseen) in enumerate(zip(*inputs, strict=True)):
            found = fit_layer(file, model.config, layer, settings, fit_to=seen, held_out=unseen)
            ladders.append(found)
            advance(layer + 1, model.config.layers)
    return ladders


def _metadata(settings: FitOptions, best: Sequence[Fitted]) -> dict[str, Any]:
    """``hotcold.predictor.*`` of the sidecar, as docs/formats.md lists them."""
    found: dict[str, Any] = {
        "version": __version__,
        "method": settings.method,
        "weighted": settings.weighted,
        "input": INPUTS[settings.method],
    }
    if settings.target is not None:
        found["target"] = settings.target
    for name in ("pays", "candidates", "recall", "weighted_recall", "read_ratio"):
        found[name] = [getattr(each.fit, name) for each in best]
    return found


def _speed(exact: Session, predicted: Session) -> Speed:
    model = exact.model
    prompt = prompt_of(model, min(32, model.context // 4))
    length = min(64, model.context // 2)
    engines = Engine(exact), Engine(predicted)

    def round(seed: int) -> list[float]:
        return [measure(engine, prompt, [length], None, seed=seed)["tok_s"] or 1 for engine in engines]

    round(0)  # warms memory and threads
    rounds = [round(seed) for seed in range(1, _ROUNDS + 1)]
    return Speed(
        exact_tok_s=statistics.median(before for before, _ in rounds),
        predicted_tok_s=statistics.median(after for _, after in rounds),
        ratio=statistics.median(after / before for before, after in rounds),
    )


def _print(report: dict[str, Any]) -> None:
    print(_HEADING)
    for layer, fit in enumerate(report["layers"]):
        print(_ROW.format(layer=layer, **fit))
    fits = [fit for ladder in report["frontier"] for fit in ladder]
    for rank in sorted({fit["rank"] for fit in fits}):
        same = [fit for fit in fits if fit["rank"] == rank]
        size, candidates, read = (
            statistics.mean(fit[name] for fit in same) for name in ("size_ratio", "candidates", "read_ratio")
        )
        print(f"rank {rank}: {size:.1%} of the FFN, {candidates:.1%} candidates, reads {read:.3f} of exact")
    exact, predicted = (f"{report[f'{mode}_tok_s']:.1f}" for mode in ("exact", "predicted"))
    ratio = f"{report['ratio']:.2f}"
    print(f"generation: exact {exact}, {report['measured']} {predicted} tok/s, {ratio} times")
    pays = report["pays"]
    print(f"{report['output']}: --sparsity auto uses it in {sum(pays)} of {len(pays)} layers")
