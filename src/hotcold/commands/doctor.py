"""Shows what this machine has, and how fast it and its GPU read memory. The measurement takes about 10 s and
is cached."""

import argparse

import hotcold
from hotcold.commands import options
from hotcold.commands.flags import in_flags
from hotcold.commands.progress import phases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--again", action="store_true", help="measure again, even if figures are cached")
    parser.add_argument(
        "-o",
        "--output",
        type=options.new_file,
        metavar="FILE",
        help="also write the figures to a new file, for hotcold plan --hardware",
    )
    parser.add_argument(
        "--disk",
        type=options.file_path,
        metavar="FILE",
        help="also measure the disk of a large file, such as a model, by reads of it for some seconds",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME|INDEX|off",
        help="the GPU to measure: a part of its name, or its number in what this command lists; off: only "
        "the CPU (default: a discrete card, else an integrated GPU; never software)",
    )
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    with phases() as advance:
        found = hotcold.doctor(
            gpu=args.gpu,
            again=args.again,
            output=args.output,
            disk=args.disk,
            progress=advance,
            show=lambda section: print(in_flags(section), flush=True),
        )
    options.print_notes(found.notes)
    return options.end(args, found.report() | {"gpu_reason": in_flags(found.gpu_reason)})
