"""Makes predictors for --sparsity predicted from a text, measures their quality, and writes them to a file.
Commands find the file as MODEL.predictor.gguf next to the model. The file also stores the cost and the gain.
--sparsity auto uses the predictors if two things hold: the perplexity on held-out text is at most 1.001 times
that of exact, by the upper end of a 95 % interval, and generation is faster in every round."""

import argparse
from pathlib import Path
from typing import Any

import hotcold
from hotcold.commands import control_tokens, options
from hotcold.commands.flags import in_flags
from hotcold.commands.progress import phases
from hotcold.errors import UserError
from hotcold.sparse.fitting import INPUTS
from hotcold.training.options import TrainOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, path, number = parser.add_argument, options.file_path, options.number
    add("-f", "--file", type=path, required=True, metavar="TEXT", help="UTF-8 text file to fit to")
    options.add_output(parser, "-o", "--output", required=True, metavar="FILE", help="file to write")
    options.add_force(parser)
    add(
        "--method",
        choices=tuple(INPUTS),
        default="svd",
        help="svd: a truncated SVD of the gate. train: the same, then trained with torch (pip install "
        "'.[train]'). trained: the predictors in a PowerInfer file (default: svd)",
    )
    add(
        "--measure",
        type=path,
        metavar="FILE",
        help="measure the predictors in FILE on -f, and write them unchanged with the measurement",
    )
    add(
        "--recall",
        type=number,
        metavar="R",
        help="share of the active neurons that predictors must find (default: 0.99; trained: as their own "
        "thresholds give)",
    )
    add(
        "--weighted",
        action="store_true",
        help="weight the neurons in --recall by how much they contribute to the output",
    )
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
        help="limit of a predictor's bytes, as a share of its layer's FFN (default: 0.15)",
    )
    add(
        "--tokens",
        type=options.whole_number(2),
        default=8192,
        metavar="N",
        help="tokens to use, sampled over the whole text: four fifths to fit, one to judge (default: 8192)",
    )
    add(
        "--eval-tokens",
        type=options.whole_number(1),
        default=16384,
        metavar="N",
        help="compare perplexity with that of exact on at most N held-out tokens; stops early when the "
        "result is clear (default: 16384)",
    )
    add(
        "--held-out",
        type=path,
        metavar="TEXT",
        help="held-out text file to judge the predictors by (default: the last fifth of -f)",
    )
    _add_training(parser)
    options.add_model_options(parser, sparsity=False, context=options.TEXT_WINDOW)
    control_tokens.add_option(parser)
    options.add_json_option(parser)


def _add_training(parser: argparse.ArgumentParser) -> None:
    defaults = TrainOptions()
    group = parser.add_argument_group("with --method train")
    group.add_argument(
        "--work",
        type=options.file_path,
        metavar="FOLDER",
        help="folder for the state of the training, from which the same command continues after an "
        "interruption (default: FILE.work)",
    )
    group.add_argument(
        "--max-marked",
        type=options.number,
        metavar="X",
        help="predict at most X times as many neurons as are active, if --max-share allows it (default: 1.5)",
    )
    group.add_argument(
        "--epochs",
        type=options.whole_number(1),
        metavar="N",
        help=f"at most N passes over the text for each rank (default: {defaults.epochs})",
    )
    group.add_argument(
        "--rate",
        type=options.number,
        metavar="R",
        help=f"highest learning rate of Adam (default: {defaults.rate})",
    )
    group.add_argument(
        "--relu",
        action="store_true",
        default=None,
        help="put a ReLU between the two factors, as in PowerInfer's predictors",
    )


def _training(args: argparse.Namespace) -> TrainOptions | None:
    """Returns the options of the training; None if none was given."""
    given = {name: getattr(args, name) for name in ("max_marked", "epochs", "rate", "relu")}
    chosen = {name: value for name, value in given.items() if value is not None}
    return TrainOptions(**chosen) if chosen else None


#: Options of making predictors, and their defaults.
_MAKING: dict[str, Any] = {
    "method": "svd",
    "recall": None,
    "weighted": False,
    "type": None,
    "max_share": 0.15,
    "tokens": 8192,
    "held_out": None,
    "work": None,
    "max_marked": None,
    "epochs": None,
    "rate": None,
    "relu": None,
}


def _measure(args: argparse.Namespace, model: Path | None) -> int:
    given = [name for name, default in _MAKING.items() if getattr(args, name) != default]
    if given:
        flag = f"--{given[0].replace('_', '-')}"
        raise UserError(f"--measure does not change predictors: leave out {flag}, or --measure")
    with phases() as advance:
        cost = hotcold.measure_predictor(
            model,
            args.measure,
            args.file,
            special=args.special,
            eval_tokens=args.eval_tokens,
            context=args.ctx_size,
            threads=args.threads,
            cache_type=options.cache_type(args),
            backend=args.backend,
            output=args.output,
            force=args.force,
            progress=advance,
        )
    print(in_flags("\n".join(cost.verdict)))
    return options.end(args, cost.report() | {"output": str(args.output)})


def run(args: argparse.Namespace) -> int:
    model = options.local_model(args.model)
    control_tokens.note_files(args, model, args.file, args.held_out)
    if args.measure is not None:
        return _measure(args, model)
    with phases() as advance:
        fitted = hotcold.fit_predictor(
            model,
            args.file,
            special=args.special,
            held_out=args.held_out,
            method=args.method,
            recall=args.recall,
            weighted=args.weighted,
            type=args.type,
            max_share=args.max_share,
            tokens=args.tokens,
            eval_tokens=args.eval_tokens,
            context=args.ctx_size,
            threads=args.threads,
            cache_type=options.cache_type(args),
            backend=args.backend,
            output=args.output,
            force=args.force,
            work=args.work,
            training=_training(args),
            progress=advance,
        )
    options.print_notes(fitted.setup.notes)
    print(in_flags(str(fitted)))
    if args.method == "train":
        print(f"{args.work or f'{args.output}.work'}: the state of the training, which may be deleted")
    return options.end(args, fitted.report() | {"output": str(args.output)})
