"""Shows what this machine has, and how fast it and its GPU read memory. The measurement takes about 10 s and
is cached."""

import argparse

import hotcold
from hotcold.commands import options
from hotcold.commands.flags import in_flags
from hotcold.commands.progress import phases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--again", action="store_true", help="measure again, even if figures are cached")
    options.add_output(
        parser,
        "-o",
        "--output",
        metavar="FILE",
        help="also write the figures to this file, for hotcold plan --hardware",
    )
    options.add_force(parser)
    parser.add_argument(
        "--disk",
        type=options.file_path,
        metavar="FILE",
        help="also measure the disk of this large file, such as a model, by reading it for a few seconds",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME|INDEX|off",
        help="the GPU to measure: part of its name, or its number in this command's list; off: only the "
        "CPU (default: a discrete GPU, else an integrated one; never a software driver)",
    )
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    with phases() as advance:
        diagnosis = hotcold.doctor(
            gpu=args.gpu,
            again=args.again,
            output=args.output,
            force=args.force,
            disk=args.disk,
            progress=advance,
            show=lambda section: print(in_flags(section), flush=True),
        )
    options.print_notes(diagnosis.notes)
    return options.end(args, diagnosis.report() | {"gpu_reason": in_flags(diagnosis.gpu_reason)})
