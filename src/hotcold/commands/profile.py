"""Counts how often each neuron is active on a text. Every token is computed as in decoding. Commands find the
profile as MODEL.profile.gguf next to the model."""

import argparse

import hotcold
from hotcold.commands import control_tokens, options
from hotcold.commands.progress import phases
from hotcold.formats.files import write_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-f", "--file", type=options.file_path, metavar="TEXT", help="UTF-8 text file")
    source.add_argument(
        "--import",
        dest="counts_folder",
        type=options.file_path,
        metavar="DIR",
        help="folder with PowerInfer's counts (activation_0.pt, ...), whose pickles are not executed",
    )
    options.add_output(parser, "-o", "--output", required=True, metavar="FILE", help="file to write")
    options.add_output(
        parser,
        "--picture",
        metavar="FILE",
        help="write an SVG picture of how often the neurons of each layer are active",
    )
    options.add_force(parser)
    add(
        "--tokens",
        type=options.whole_number(1),
        metavar="N",
        help="with -f: sample N tokens spread over the text (default: all); with --import: how many tokens "
        "the counts cover (default: the largest count)",
    )
    options.add_model_options(parser, sparsity=False, context=options.TEXT_WINDOW)
    control_tokens.add_option(parser)
    options.add_json_option(parser)
    parser.epilog = "The text is cut into windows of -c tokens (512 at most), as by hotcold perplexity."


def run(args: argparse.Namespace) -> int:
    model = options.local_model(args.model)
    control_tokens.note_files(args, model, args.file)
    with phases() as advance:
        profile = hotcold.profile(
            model,
            args.file,
            special=args.special,
            counts=args.counts_folder,
            tokens=args.tokens,
            context=args.ctx_size,
            threads=args.threads,
            cache_type=options.cache_type(args),
            backend=args.backend,
            output=args.output,
            force=args.force,
            progress=advance,
        )
    if args.picture:
        write_text(args.picture, profile.picture())
    if profile.setup:
        options.print_notes(profile.setup.notes)
    print(profile)
    return options.end(args, profile.report() | {"output": str(args.output)})
