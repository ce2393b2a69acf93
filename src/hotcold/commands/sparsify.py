"""Trains a checkpoint until most of its neurons are zero, so that it runs fast. Its activation becomes dReLU
or ReLU, and a growing penalty makes activations zero. SIGTERM and Ctrl-C save the state of the run; the same
command then continues. The output is a checkpoint for `hotcold convert`, transformers and lm-eval. Several
processes: torchrun --nproc-per-node 2 -m hotcold sparsify ... docs/your_model.md says how many tokens a model
needs."""

import argparse
import os
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from hotcold.commands import options
from hotcold.commands.progress import progress
from hotcold.errors import UserError

if TYPE_CHECKING:
    from hotcold.training.sparsifying import Report, Sparsified
    from hotcold.training.token_data import Source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, path, number, whole = parser.add_argument, options.file_path, options.number, options.whole_number
    add("checkpoint", type=path, metavar="CHECKPOINT", help="folder of the Hugging Face checkpoint")
    add(
        "-f",
        "--file",
        action="append",
        required=True,
        metavar="TEXT[=SHARE]",
        help="file to train on: text in UTF-8, or rows with text or messages (.jsonl, .parquet); several are "
        "mixed by their shares (default: by their lengths)",
    )
    add("-o", "--output", type=path, required=True, metavar="OUT", help="new folder to write")
    add("--tokens", type=whole(1), required=True, metavar="N", help="tokens to train on")
    add(
        "--activation",
        choices=("drelu", "relu"),
        default="drelu",
        help="relu: ReLU of the gate. drelu: of gate and up, which gives more zeros (default: drelu)",
    )
    add("--learning-rate", type=number, default=5e-5, metavar="R", help="its highest value (default: 5e-5)")
    add(
        "--l1",
        type=number,
        default=0.3,
        metavar="W",
        help="weight of the penalty on activations: more gives more zeros (default: 0.3)",
    )
    add("-c", "--context", type=whole(2), default=512, metavar="N", help="tokens per window (default: 512)")
    add("--batch", type=whole(1), default=8, metavar="N", help="windows per forward pass (default: 8)")
    add("--accumulate", type=whole(1), default=1, metavar="N", help="forward passes per step (default: 1)")
    add(
        "--checkpointing",
        action="store_true",
        help="compute activations again in the backward pass: less memory, a third more time",
    )
    add(
        "--loss-chunk",
        type=whole(1),
        default=1024,
        metavar="N",
        help="tokens whose logits are in memory at the same time (default: 1024)",
    )
    add(
        "--distil",
        type=number,
        default=0.0,
        metavar="W",
        help="share of the loss that compares with the original model's predictions, 0 to 1 (default: 0)",
    )
    add(
        "--no-special",
        action="store_true",
        help="read names of control tokens in texts, such as <|im_end|>, as plain text, not as control "
        "tokens",
    )
    _add_ending(parser)
    add("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    add("-t", "--threads", type=whole(1), metavar="N", help="number of threads (default: PyTorch's)")
    add("--work", type=path, metavar="FOLDER", help="folder for the state of the run (default: OUT.work)")
    add("--cache", type=path, metavar="FOLDER", help="folder for token files (default: tokens in --work)")
    add("--save-every", type=number, default=300, metavar="S", help="seconds between saves (default: 300)")
    add(
        "--log",
        type=path,
        metavar="FILE.jsonl",
        help="log file with a JSON object for each step; with TensorBoard installed, also its events",
    )
    options.add_force(parser)
    add(
        "--seed",
        type=whole(0, 2**31 - 1),
        default=0,
        metavar="N",
        help="seed of random numbers (default: 0)",
    )
    options.add_json_option(parser)


def _add_ending(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the end of a run")
    group.add_argument(
        "--held-out",
        type=options.file_path,
        metavar="TEXT",
        help="held-out text file for the measurements (default: windows at the ends of -f, which are not "
        "used for training)",
    )
    group.add_argument(
        "--control", action="store_true", help="also train the original on the same tokens, and compare"
    )
    group.add_argument(
        "--threshold",
        choices=("one", "per-layer"),
        default="one",
        help="threshold of gates: one for all layers, or one for each (default: one)",
    )
    group.add_argument(
        "--no-threshold", dest="threshold", action="store_const", const="none", help="no threshold of gates"
    )


def run(args: argparse.Namespace) -> int:
    sources = [source(each) for each in args.file]
    from hotcold.training.libraries import torch
    from hotcold.training.sparsifying import SparsifyOptions, sparsify

    if args.threads:
        torch.set_num_threads(args.threads)
    names = (
        *("tokens", "activation", "learning_rate", "l1", "context", "batch", "accumulate", "checkpointing"),
        *("loss_chunk", "distil", "threshold", "control", "seed"),
    )
    settings = SparsifyOptions(**{name: getattr(args, name) for name in names}, special=not args.no_special)
    with progress("training") as advance:
        found = sparsify(
            args.checkpoint,
            sources,
            args.output,
            settings,
            device=args.device,
            work=args.work,
            held_out=args.held_out,
            cache=args.cache,
            log=args.log,
            force=args.force,
            report=_print_report,
            progress=advance,
            note=lambda text: print(text, file=sys.stderr),
            save_seconds=args.save_every,
        )
    if os.environ.get("RANK", "0") != "0":  # the first process of torchrun prints
        return 0
    _print_end(args, found)
    return options.end(args, found.report() | {"output": str(args.output)})


def source(given: str) -> "Source":
    """Parses a file to train on: ``FILE`` or ``FILE=SHARE``."""
    from hotcold.training.token_data import Source

    name, equals, tail = given.rpartition("=")
    if not equals or Path(given).exists():
        return Source(Path(given))
    try:
        share = float(tail)
    except ValueError:
        share = -1.0
    if not 0 < share < float("inf"):
        raise UserError(f"-f {given}: the share {tail!r} is not a number above 0")
    return Source(Path(name), share)


def _print_report(report: "Report") -> None:
    quality = f"loss {report.loss:.3f}, perplexity {report.perplexity:.2f}"
    zeros = f"zeros {report.mean_zeros:.1%}"
    print(f"{options.scaled(report.tokens)} tokens, {quality}, {zeros}", file=sys.stderr)
    _print_layers(report.zeros)


def _print_layers(zeros: list[float]) -> None:
    shares = " ".join(f"{100 * share:.0f}" for share in zeros)
    indented = textwrap.fill(f"% by layer: {shares}", 78, initial_indent="  ", subsequent_indent="    ")
    print(indented, file=sys.stderr)


def _print_end(args: argparse.Namespace, found: "Sparsified") -> None:
    measured, control = found.measured, found.control
    ratios = f"{measured.perplexity / found.original.perplexity:.3f} of the original's"
    divergences = f"{measured.divergence:.3f} nats from the original"
    print(f"perplexity of {measured.tokens} tokens of {args.held_out or 'held-out text'}:")
    print(f"  the original: {found.original.perplexity:.2f}")
    if control is not None:
        print(f"  the control:  {control.perplexity:.2f}, the original trained on the same tokens")
        ratios += f", {measured.perplexity / control.perplexity:.3f} of the control's"
        divergences += f", {found.control_divergence:.3f} from the control"
    else:
        print("  the control:  not trained; --control trains the original on the same tokens")
    print(f"  sparse:       {measured.perplexity:.2f}, {ratios}")
    print(f"divergence: {divergences}")
    thresholds = sorted(found.choice.thresholds)
    print(f"zeros {measured.mean_zeros:.1%}, thresholds {thresholds[0]:.3g} to {thresholds[-1]:.3g}")
    _print_layers(measured.zeros)
    print(f"{args.work or f'{args.output}.work'}: state of the run, for more --tokens; may be deleted")
    print(f"{args.output}; next: hotcold convert {args.output}")
