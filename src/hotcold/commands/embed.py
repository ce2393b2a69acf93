"""Prints the embeddings of texts: one line of JSON with a vector of length 1 for each text. The pooling is
that of the model's file, as in Qwen3-Embedding, or of --pooling; without both it is the last token's
vector."""

import argparse
import io
import json
import sys
from dataclasses import replace

from hotcold.commands import control_tokens, options
from hotcold.errors import UserError
from hotcold.runtime.pooling import Pooling, names_pooling

_UNNAMED = "the model's file does not say how to pool: the last token's vector is used (--pooling last)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "-p",
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="a text; may be repeated (default: each line of standard input is one)",
    )
    add("-f", "--file", type=options.file_path, metavar="FILE", help="file with one text per line")
    options.add_pooling_option(add)
    control_tokens.add_option(parser)
    options.add_model_options(parser)
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    from hotcold.engine.engine import Engine
    from hotcold.engine.request import Job, Request

    texts: list[str] = args.prompt
    given = len(texts)
    if args.file is not None or not texts:
        lines = io.StringIO(options.read_text(args.file), newline=None)  # not at U+2028 and the like
        texts = [*texts, *(line.removesuffix("\n") for line in lines)]
    if not texts:
        name = "standard input" if args.file is None else str(args.file)
        raise UserError(f"{name} has no text: write one text a line, or give texts with -p")
    session = options.load_session(args, state_copies=0)
    model = session.model
    if args.pooling is None and not names_pooling(model.chat_metadata):
        pooling: Pooling = "last"
        options.print_notes([_UNNAMED])
    else:
        pooling = model.pooling
    options.note_left_out(model.tokenizer, *texts)
    control_tokens.note_names(args, model.tokenizer, "\n".join(texts), "the text")
    engine = Engine(session)
    job = Job(max_tokens=1, pooling=pooling)
    requests: list[Request] = []
    for number, text in enumerate(texts, 1):
        try:
            requests.append(
                Request(replace(job, prompt=model.tokenizer.encode(text, parse_special=args.special)))
            )
            engine.check(requests[-1])
        except UserError as error:
            place = f"text {number} of `-p`" if number <= given else f"line {number - given}"
            raise UserError(f"{place}: {error}") from None
    engine.run(requests)
    if not args.json:
        for request in requests:
            sys.stdout.write(f"{json.dumps(request.vector)}\n")
    report = {
        "embeddings": [request.vector for request in requests],
        "pooling": pooling,
        "prompt_tokens": sum(len(request.job.prompt) for request in requests),
        **options.facts(session),
    }
    return options.end(args, report)
