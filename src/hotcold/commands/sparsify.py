"""Trains a checkpoint until most of its neurons are zero, so that it runs fast: its activation becomes dReLU
or ReLU, and a growing penalty empties the neurons.

A run that was ended goes on where it was when the same command is given again. What comes out is a checkpoint
for `hotcold convert`. docs/your_model.md says how many tokens it takes."""

import argparse
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from hotcold.commands import options
from hotcold.commands.progress import progress
from hotcold.errors import UserError

if TYPE_CHECKING:
    from hotcold.training.mixture import NamedText
    from hotcold.training.sparsifying import Report, Sparsified


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, path, number, whole = parser.add_argument, options.file_path, options.number, options.whole_number
    add("checkpoint", type=path, metavar="CHECKPOINT", help="folder of the Hugging Face checkpoint")
    add(
        "-f",
        "--file",
        action="append",
        required=True,
        metavar="TEXT[=SHARE]",
        help="file of text to train on, UTF-8; several are mixed by their shares (default: by their lengths)",
    )
    add("-o", "--output", type=path, required=True, metavar="OUT", help="folder to write")
    add("--tokens", type=whole(1), required=True, metavar="N", help="tokens to train on")
    add(
        "--activation",
        choices=("drelu", "relu"),
        default="drelu",
        help="relu: ReLU of the gate. drelu: of gate and up, which gives more zeros (default: drelu)",
    )
    add("--learning-rate", type=number, default=5e-5, metavar="R", help="the highest (default: 5e-5)")
    add(
        "--l1",
        type=number,
        default=0.3,
        metavar="W",
        help="weight of the penalty on activations: more gives more zeros (default: 0.3)",
    )
    add("-c", "--context", type=whole(2), default=512, metavar="N", help="tokens of a window (default: 512)")
    add("--batch", type=whole(1), default=8, metavar="N", help="windows of a step (default: 8)")
    add(
        "--distil",
        type=number,
        default=0.0,
        metavar="W",
        help="share of the loss that asks for the original's predictions, 0 to 1 (default: 0)",
    )
    add(
        "--no-special",
        action="store_true",
        help="read names of control tokens in texts, such as <|im_end|>, as characters, not as these tokens",
    )
    add("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    add(
        "--work",
        type=path,
        metavar="FOLDER",
        help="folder of the run's state, deleted at the end (default: OUT.work)",
    )
    add("--seed", type=whole(0, 2**31 - 1), default=0, metavar="N", help="seed of the random numbers (0)")
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    texts = [named_text(each) for each in args.file]
    from hotcold.training.sparsifying import SparsifyOptions, sparsify

    names = ("tokens", "activation", "learning_rate", "l1", "context", "batch", "distil", "seed")
    settings = SparsifyOptions(**{name: getattr(args, name) for name in names}, special=not args.no_special)
    with progress("training") as advance:
        found = sparsify(
            args.checkpoint,
            texts,
            args.output,
            settings,
            device=args.device,
            work=args.work,
            told=_print_report,
            progress=advance,
        )
    _print_end(args.output, found)
    return options.end(args, found.report() | {"output": str(args.output)})


def named_text(given: str) -> "NamedText":
    """A text of ``FILE`` or ``FILE=SHARE``."""
    from hotcold.tasks.texts import read_text
    from hotcold.training.mixture import NamedText

    name, equals, tail = given.rpartition("=")
    if not equals or Path(given).exists():
        return NamedText(given, read_text(Path(given)))
    try:
        share = float(tail)
    except ValueError:
        share = -1.0
    if not 0 < share < float("inf"):
        raise UserError(f"-f {given}: the share {tail!r} is not a number above 0")
    return NamedText(name, read_text(Path(name)), share)


def _print_report(report: "Report") -> None:
    quality = f"loss {report.loss:.3f}, perplexity {report.perplexity:.2f}"
    zeros = f"zeros {report.mean_zeros:.1%}"
    print(f"{options.scaled(report.tokens)} tokens, {quality}, {zeros}", file=sys.stderr)
    _print_layers(report.zeros)


def _print_layers(zeros: list[float]) -> None:
    shares = " ".join(f"{100 * share:.0f}" for share in zeros)
    indented = textwrap.fill(f"% by layer: {shares}", 78, initial_indent="  ", subsequent_indent="    ")
    print(indented, file=sys.stderr)


def _print_end(output: Path, found: "Sparsified") -> None:
    zeros = sum(found.zeros) / len(found.zeros)
    print(f"zeros {zeros:.1%}, perplexity {found.perplexity:.2f}", end="")
    print(f" (the original: {found.original_perplexity:.2f}), threshold {found.threshold:.3g}")
    _print_layers(found.zeros)
    print(f"{output} (and sparsity.svg there); next: hotcold convert {output}")
