"""Measures how large the inputs of each matrix are on a text: the importance matrix of hotcold quantize.

The file is as llama.cpp's llama-imatrix writes it, and its quantiser reads it, too."""

import argparse
import time

from hotcold.commands import control_tokens, options
from hotcold.commands.progress import phases
from hotcold.errors import UserError
from hotcold.quantize.imatrix import ImportanceMatrix
from hotcold.tasks.imatrix import imatrix


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model_file",
        nargs="?",
        type=options.model_file,
        metavar="MODEL",
        help=options.MODEL_HELP,
    )
    add("-f", "--file", type=options.file_path, required=True, metavar="TEXT", help="UTF-8 text file")
    options.add_output(parser, "-o", "--output", required=True, metavar="FILE", help="file to write")
    options.add_force(parser)
    add(
        "--chunks",
        type=options.whole_number(1),
        metavar="N",
        help="use only the first N windows of -c tokens (default: all)",
    )
    add(
        "--process-output",
        action="store_true",
        help="also measure the output matrix (default: only matrices of the layers, as in llama.cpp)",
    )
    options.add_model_options(parser, sparsity=False, context=options.TEXT_WINDOW)
    control_tokens.add_option(parser)
    options.add_json_option(parser)
    parser.epilog = (
        "The text is encoded once and cut into consecutive windows of -c tokens (default: the model's "
        "context, 512 at most), each computed by itself; an incomplete last window is dropped."
    )


def run(args: argparse.Namespace) -> int:
    if args.model_file is not None and args.model is not None:
        raise UserError(f"two models, {args.model_file} and -m {args.model}: give one of them")
    model = options.local_model(args.model_file or args.model)
    control_tokens.note_files(args, model, args.file)
    start = time.perf_counter()
    with phases() as advance:
        matrix = imatrix(
            model,
            args.file,
            special=args.special,
            context=args.ctx_size,
            chunks=args.chunks,
            output_head=args.process_output,
            threads=args.threads,
            cache_type=options.cache_type(args),
            backend=args.backend,
            output=args.output,
            force=args.force,
            progress=advance,
        )
    seconds = time.perf_counter() - start
    notes = _notes(matrix)
    options.print_notes(notes)
    tokens = matrix.chunks * matrix.chunk_size
    windows = f"{tokens} tokens ({matrix.chunks} windows of {matrix.chunk_size})"
    print(f"{args.output}: inputs of {len(matrix)} matrices over {windows}, {tokens / seconds:.0f} tok/s")
    return options.end(
        args,
        {
            "output": str(args.output),
            "matrices": len(matrix),
            "chunks": matrix.chunks,
            "chunk_size": matrix.chunk_size,
            "tokens": tokens,
            "seconds": round(seconds, 3),
            "notes": notes,
        },
    )


def _notes(matrix: ImportanceMatrix) -> list[str]:
    missed = {name: int((each.counts == 0).sum()) for name, each in matrix.items()}
    if not (incomplete := [name for name, experts in missed.items() if experts]):
        return []
    most = max(incomplete, key=missed.__getitem__)
    got = f"{len(incomplete)} matrices have experts that no token chose ({most}: {missed[most]})"
    return [f"{got}: the weights of such experts count equally; use more text"]
