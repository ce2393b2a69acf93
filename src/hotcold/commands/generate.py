"""Continues a text. Prints the text to stdout as it is generated, and a line of figures to stderr."""

import argparse
import contextlib
import sys
from dataclasses import asdict, replace

from hotcold.commands import control_tokens, options
from hotcold.commands.cli import EXIT_INTERRUPTED
from hotcold.commands.display import display
from hotcold.commands.echo import unseen_typing
from hotcold.commands.figures import figures_of, print_figures, short_figures
from hotcold.engine.engine import Engine
from hotcold.engine.generation import Piece, stream
from hotcold.engine.request import Job, Request
from hotcold.engine.speculation import speculation_of
from hotcold.runtime.counters import Figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "-p",
        "--prompt",
        metavar="TEXT",
        help="text to continue; - reads standard input (default: standard input, if it is a pipe or a file)",
    )
    prompt.add_argument(
        "-f", "--file", type=options.file_path, metavar="FILE", help="file with the text to continue"
    )
    parser.add_argument(
        "-n",
        "--n-predict",
        "--predict",
        type=options.token_count,
        default=200,
        metavar="N",
        help="generate at most N tokens; -1: until the text or the context ends (default: 200)",
    )
    parser.add_argument("--ignore-eos", action="store_true", help="do not let the model end the text")
    parser.add_argument(
        "-r",
        "--reverse-prompt",
        "--stop",
        dest="stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop before this text; may be repeated",
    )
    parser.add_argument("--no-display-prompt", action="store_true", help="print only the continuation")
    control_tokens.add_option(parser)
    options.add_plain_option(parser)
    options.add_model_options(parser)
    options.add_draft_options(parser)
    options.add_sampling_options(parser)
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    given = options.sampling_given(args)
    job = Job(max_tokens=args.n_predict, stop=tuple(args.stop), ignore_eos=args.ignore_eos)
    prompt = args.prompt
    is_read = args.file is not None or prompt == "-" or (prompt is None and options.is_piped())
    if is_read:
        prompt = options.read_text(args.file).removesuffix("\n")
    prompt = prompt or ""
    session = options.load_session(args, state_copies=0)
    tokenizer = session.model.tokenizer
    ids = tokenizer.encode(prompt, parse_special=args.special)
    params = replace(session.model.sampling, **given)
    options.note_left_out(tokenizer, prompt)
    control_tokens.note_names(args, tokenizer, prompt, "the text")
    request = Request(replace(job, prompt=ids, params=params))
    engine = Engine(
        session, reuse=False, speculation=speculation_of(session)
    )  # a single request shares no pages
    engine.check(request)
    if is_read:
        options.note_empty(prompt, args.file)
    shown = None if args.json else display(plain=args.plain)  # with --json only the report has the text
    if shown is not None and not args.no_display_prompt:
        shown.write(prompt)
    pieces: list[Piece] = []
    try:
        with contextlib.suppress(KeyboardInterrupt), unseen_typing():
            for piece in stream(engine, request):
                pieces.append(piece)
                if shown is not None:
                    shown.write(piece.text)
    finally:
        engine.abort(request)  # harmless when it has finished
        if shown is not None:
            shown.end(always=True)
    if request.context_full:
        note = f"note: stopped: the context of {session.model.context} tokens is full (-c sets a larger one)"
        print(note, file=sys.stderr)
    figures = Figures.from_counters(session.counters, session.footprint)
    model = [session.model.name, f"sparsity {session.sparsity}"] if args.verbose else []
    shown_figures = figures_of if args.verbose else short_figures
    print_figures([*model, *shown_figures(request, figures)], plain=args.plain)
    report = {
        "text": "".join(map(str, pieces)),
        "ids": [id for piece in pieces for id in piece.ids],
        "finish_reason": request.finish_reason,
        "stop": pieces[-1].stop if pieces else None,
        "context_full": request.context_full,
        "prompt_tokens": len(request.job.prompt),
        "generated_tokens": len(request.output),
        "guessed_tokens": request.guessed,
        "accepted_tokens": request.accepted,
        "ttft_s": request.timings.ttft_s,
        "seed": request.seed,
        **asdict(figures),
        **options.facts(session),
    }
    options.end(args, report)
    return EXIT_INTERRUPTED if request.finish_reason == "cancelled" else 0
