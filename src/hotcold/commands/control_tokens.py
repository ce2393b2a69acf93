"""Reads names of control tokens in texts, such as those that a chat template writes: an option and a note."""

import argparse
from contextlib import suppress
from pathlib import Path

from hotcold.commands import options
from hotcold.errors import UserError

_NAMED = 3  # names of a note


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--special",
        "--parse-special",
        action="store_true",
        help="read names of control tokens in the text, such as <|im_end|>, as these tokens",
    )


def note_names(args: argparse.Namespace, model: Path | None, *texts: Path | None) -> None:
    """Prints a note where a text has names of control tokens that are read as characters."""
    if args.special:
        return
    from hotcold.demo import model_path
    from hotcold.formats.gguf import open_gguf
    from hotcold.tokenizer.tokenizer import Tokenizer

    names: list[str] = []
    with suppress(UserError), open_gguf(model or model_path()) as file:  # the command itself names a mistake
        names = [*Tokenizer.from_metadata(file.metadata).control_names.values()]
    for text in texts if names else ():
        words = options.read_text(text) if text is not None else ""
        if found := [name for name in names if name in words]:
            listed = ", ".join(found[:_NAMED]) + ", ..." * (len(found) > _NAMED)
            seen = f"{text} has names of control tokens ({listed}), which are read as characters"
            options.print_notes([f"{seen}: --special reads them as these tokens"])
