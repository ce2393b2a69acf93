"""Turns a Hugging Face checkpoint (config.json, weights and tokenizer files) into a GGUF file."""

import argparse
import sys
import time
from pathlib import Path

from hotcold.commands import options
from hotcold.commands.progress import progress
from hotcold.convert import ConvertOptions, convert
from hotcold.convert.conversion import FILE_TYPES
from hotcold.formats.words import DOWN_LAYOUTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model_dir", type=options.file_path, metavar="MODEL_DIR", help="folder of the checkpoint")
    add(
        "-o",
        "--output",
        type=options.file_path,
        metavar="FILE",
        help="file to write (default: ./NAME-TYPE.gguf)",
    )
    add(
        "--type",
        type=str.lower,
        default="f16",
        help=f"block type of the matrices: {', '.join(FILE_TYPES).lower()} (default: f16)",
    )
    add(
        "--down",
        choices=DOWN_LAYOUTS,
        help="rows of the down matrix: by_neuron, for sparse modes, or by_output, which other tools expect "
        "(default: by_neuron if the activation gives zeros)",
    )
    add(
        "--dense",
        action="store_true",
        help="write a file that llama.cpp loads: down rows by_output, no predictors",
    )
    add(
        "--predictors",
        type=options.file_path,
        metavar="DIR",
        help="folder of PowerInfer's predictors (model_0.pt, ...) to put into the file",
    )
    add("--name", metavar="TEXT", help="general.name (default: the folder's name)")
    add("--license", metavar="SPDX", help="general.license, such as mit")
    add("--force", action="store_true", help="replace the output file if it exists")
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    name = args.name or args.model_dir.resolve().name
    output = args.output or Path(f"{name}-{args.type}.gguf")
    settings = ConvertOptions(
        type=args.type.upper(),
        down=args.down,
        dense=args.dense,
        predictors=args.predictors,
        name=name,
        license=args.license,
        force=args.force,
    )
    start = time.perf_counter()
    with progress("converting", in_bytes=True) as advance:
        done = convert(args.model_dir, output, settings, advance)
    seconds = time.perf_counter() - start
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    types = ", ".join(f"{count} {type}" for type, count in done.types.items())
    kind = f"{done.architecture} with {done.activation}, {done.nbytes / 1e6:.1f} MB"
    print(f"{done.output}: {kind}, tensors: {types}, down {done.down_layout}", file=sys.stderr)
    summary = {
        "output": str(done.output),
        "bytes": done.nbytes,
        "architecture": done.architecture,
        "activation": done.activation,
        "down_layout": done.down_layout,
        "type": args.type,
        "tensor_types": done.types,
        "notes": done.notes,
        "seconds": round(seconds, 3),
    }
    return options.end(args, summary)
