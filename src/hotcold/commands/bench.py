"""Measures the speed of prompts and of generation, the bytes read, and the memory bandwidth at the same
time."""

import argparse

import hotcold
from hotcold.commands import options
from hotcold.commands.progress import phases
from hotcold.kernels.backend import DECODE_ROWS
from hotcold.runtime.options import DRAFT_MAX
from hotcold.tasks.bench import MOST_SEQUENCES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, number = parser.add_argument, options.whole_number
    add("-p", "--n-prompt", type=number(1), default=128, metavar="N", help="prompt tokens (default: 128)")
    add("-n", "--n-gen", type=number(2), default=64, metavar="N", help="tokens to generate (default: 64)")
    add(
        "-np",
        "--parallel",
        type=number(1, MOST_SEQUENCES),
        default=1,
        metavar="N",
        help=f"number of sequences; a step decodes up to {DECODE_ROWS} of them (default: 1)",
    )
    add(
        "-r",
        "--repetitions",
        type=number(1),
        default=5,
        metavar="N",
        help="number of measured rounds (default: 5)",
    )
    add(
        "--draft",
        choices=["look-up", "none"],
        help="look-up: draft tokens from earlier text (prompt lookup); none: no draft tokens (default: the "
        "draft block of the model's file, if it has one)",
    )
    add("--no-draft", dest="draft", action="store_const", const="none", help="the same as --draft none")
    add(
        "--draft-max",
        type=number(1, DECODE_ROWS - 1),
        default=DRAFT_MAX,
        metavar="N",
        help=f"at most N draft tokens per sequence and step (default: {DRAFT_MAX})",
    )
    options.add_output(
        parser,
        "--timeline",
        metavar="FILE",
        help="run one more round and write a Chrome trace of when the GPU and the CPU worked and waited",
    )
    options.add_force(parser)
    options.add_model_options(parser)
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    with phases() as advance:
        benchmark = hotcold.bench(
            options.local_model(args.model),
            n_prompt=args.n_prompt,
            n_gen=args.n_gen,
            parallel=args.parallel,
            repetitions=args.repetitions,
            draft=args.draft,
            draft_max=args.draft_max,
            timeline=args.timeline,
            force=args.force,
            progress=advance,
            **options.model_options(args),
        )
    options.print_notes_of(benchmark.setup, verbose=args.verbose)
    print(benchmark)
    return options.end(args, benchmark.report())
