"""Turns a Hugging Face checkpoint (config.json, weights and tokenizer files) into a GGUF file, or a GGUF file
into one with another layout: down rows by neuron, or PowerInfer's file with predictors inside."""

import argparse
import sys
import time
from pathlib import Path

from hotcold.commands import control_tokens, options
from hotcold.commands.progress import progress
from hotcold.convert import ConvertOptions, convert
from hotcold.convert.conversion import FILE_TYPES
from hotcold.errors import UserError
from hotcold.formats.gguf import open_gguf
from hotcold.formats.words import DOWN_LAYOUTS
from hotcold.quantize.layouts import LayoutOptions, Rewritten, change_layout
from hotcold.tasks.hot_first import hot_first
from hotcold.tasks.layout_cost import layout_cost
from hotcold.tasks.scoring import Divergence, perplexity

_FOR_CHECKPOINTS = ("dense", "no_draft", "name", "license")
_FOR_GGUF = ("format", "take_predictors", "hot_first", "file", "special")
_NOT_HOT_FIRST = ("type", "down", "predictors", "format", "take_predictors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=options.file_path, metavar="IN", help="folder of a checkpoint, or a GGUF file")
    options.add_output(parser, "out", nargs="?", metavar="OUT", help="the same as --output")
    options.add_output(
        parser,
        "-o",
        "--output",
        metavar="FILE",
        help="file to write (default for a checkpoint: ./NAME-TYPE.gguf)",
    )
    add(
        "--type",
        type=str.lower,
        metavar="TYPE",
        help=f"of a checkpoint: block type of its matrices, {', '.join(FILE_TYPES).lower()} (default: "
        "f16); of a GGUF file: block type of the down matrices that --down changes (default: "
        "unchanged)",
    )
    add(
        "--down",
        choices=DOWN_LAYOUTS,
        help="layout of the down matrices: by_neuron, for sparse modes, or by_output, as in llama.cpp "
        "(default: by_neuron for a checkpoint whose activation gives zeros; unchanged for a GGUF file)",
    )
    add(
        "--predictors",
        type=options.file_path,
        metavar="PATH",
        help="folder of PowerInfer's predictors (model_0.pt, ...) to put into the file; for a GGUF file "
        "also a predictor file of hotcold fit-predictor; the output is then in PowerInfer's format",
    )
    options.add_force(parser)
    options.add_json_option(parser)
    group = parser.add_argument_group("checkpoints")
    group.add_argument(
        "--dense",
        action="store_true",
        help="write a file that llama.cpp loads: down rows by_output, no predictors",
    )
    group.add_argument(
        "--no-draft",
        action="store_true",
        help="leave out the draft block (multi-token prediction), which makes generation faster",
    )
    group.add_argument("--name", metavar="TEXT", help="general.name (default: the folder's name)")
    group.add_argument("--license", metavar="SPDX", help="general.license, such as mit")
    group = parser.add_argument_group("GGUF files")
    group.add_argument(
        "--format",
        choices=("gguf", "powerinfer"),
        help="format of OUT (default: that of IN; powerinfer with --predictors)",
    )
    options.add_output(
        group,
        "--take-predictors",
        metavar="FILE",
        help="move the predictors of IN to this file; OUT has none",
    )
    group.add_argument(
        "--hot-first",
        type=options.file_path,
        metavar="PROFILE",
        help="sort each expert's neurons by how often they are active (PROFILE is from hotcold profile), "
        "so that cold neurons can stay on the disk with --ram-budget; prints the expected gain. A "
        "predictor file next to IN is sorted, too, and each neuron's rows are then stored together",
    )
    group.add_argument(
        "-f",
        "--file",
        type=options.file_path,
        metavar="TEXT",
        help="measure on this text how much OUT's predictions differ from IN's, with all neurons computed",
    )
    control_tokens.add_option(group)


def run(args: argparse.Namespace) -> int:
    if args.out is not None and args.output is not None:
        raise UserError(f"two outputs, {args.out} and -o {args.output}: give one of them")
    gguf = args.source.is_file()
    for name in _FOR_CHECKPOINTS if gguf else _FOR_GGUF:
        if getattr(args, name) not in (None, False):
            kind = "a checkpoint folder" if gguf else "a GGUF file"
            flag = "-f" if name == "file" else f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} is only for {kind}, and {args.source} is not one")
    return _change_layout(args) if gguf else _convert(args)


def _change_layout(args: argparse.Namespace) -> int:
    output = args.out or args.output
    if output is None:
        with open_gguf(args.source):  # says so if it is none
            raise UserError("a GGUF file needs an output: hotcold convert IN.gguf OUT.gguf")
    if args.hot_first is not None:
        return _hot_first(args, output)
    text = None if args.file is None else options.read_text(args.file)
    settings = LayoutOptions(
        down=args.down,
        format=args.format,
        predictors=args.predictors,
        take_predictors=args.take_predictors,
        type=args.type,
        force=args.force,
    )
    start = time.perf_counter()
    with progress("converting", in_bytes=True) as advance:
        done = change_layout(args.source, output, settings, advance)
    seconds = time.perf_counter() - start
    cost = None
    if text is not None:
        control_tokens.note_files(args, args.source, args.file)
        with progress("windows") as advance:
            cost = layout_cost(output, args.source, text, advance, special=args.special)
    notes = _notes(done, cost, args)
    options.print_notes(notes)
    types = ", ".join(f"{count} {type}" for type, count in done.types.items())
    kind = f"{done.format}, {done.nbytes / 1e6:.1f} MB"
    print(f"{output}: {kind}, tensors: {types}, down {done.down_layout}", file=sys.stderr)
    if cost is not None:
        print(f"over {len(cost.kl)} tokens", *cost.lines("compared with the old file"), sep="\n")
    report = {
        "output": str(output),
        "bytes": done.nbytes,
        "format": done.format,
        "down_layout": done.down_layout,
        "tensor_types": done.types,
        "requantised": done.requantised,
        "cost": cost and {"tokens": len(cost.kl), "new_ppl": perplexity(cost.nll), **cost.summary()},
        "notes": notes,
        "seconds": round(seconds, 3),
    }
    return options.end(args, report)


def _hot_first(args: argparse.Namespace, output: Path) -> int:
    if other := [name for name in _NOT_HOT_FIRST if getattr(args, name) is not None]:
        raise UserError(
            f"--hot-first only changes the order of neurons: leave out --{other[0].replace('_', '-')}"
        )
    if args.file is not None:
        raise UserError("--hot-first does not change results: leave out -f")
    start = time.perf_counter()
    with progress("converting", in_bytes=True) as advance:
        done, worth = hot_first(
            args.source, output, args.hot_first, force=args.force, show=print, progress=advance
        )
    print(f"{output}: hot neurons first, {done.nbytes / 1e6:.1f} MB, with its profile", file=sys.stderr)
    report = {
        "output": str(output),
        "bytes": done.nbytes,
        "worth": worth.report(),
        "notes": done.notes,
        "seconds": round(time.perf_counter() - start, 3),
    }
    return options.end(args, report)


def _notes(done: Rewritten, cost: Divergence | None, args: argparse.Namespace) -> list[str]:
    notes = [*done.notes]
    if done.requantised and cost is None:
        ask = "-f TEXT measures the loss, and a conversion from a float file has none"
        notes.append(f"{done.requantised} down matrices were quantised again: {ask}")
    if args.take_predictors is not None:
        notes.append(f"{args.take_predictors} has the predictors of {done.output}")
    return notes


def _convert(args: argparse.Namespace) -> int:
    type = "f16" if args.type is None else args.type
    name = args.name or args.source.resolve().name
    output = args.out or args.output or Path(f"{name}-{type}.gguf")
    settings = ConvertOptions(
        type=type.upper(),
        down=args.down,
        dense=args.dense,
        predictors=args.predictors,
        name=name,
        license=args.license,
        no_draft=args.no_draft,
        force=args.force,
    )
    start = time.perf_counter()
    with progress("converting", in_bytes=True) as advance:
        done = convert(args.source, output, settings, advance)
    seconds = time.perf_counter() - start
    options.print_notes(done.notes)
    types = ", ".join(f"{count} {type}" for type, count in done.types.items())
    kind = f"{done.architecture} with {done.activation}, {done.nbytes / 1e6:.1f} MB"
    print(f"{done.output}: {kind}, tensors: {types}, down {done.down_layout}", file=sys.stderr)
    summary = {
        "output": str(done.output),
        "bytes": done.nbytes,
        "architecture": done.architecture,
        "activation": done.activation,
        "down_layout": done.down_layout,
        "type": type,
        "tensor_types": done.types,
        "notes": done.notes,
        "seconds": round(seconds, 3),
    }
    return options.end(args, summary)
