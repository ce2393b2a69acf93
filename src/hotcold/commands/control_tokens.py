"""An option that reads names of control tokens in a text as control tokens, and a note without it."""

import argparse
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hotcold.commands import options
from hotcold.errors import UserError

if TYPE_CHECKING:
    from hotcold.tokenizer.tokenizer import Tokenizer

_NAMED = 3  # limit of names in a note


def add_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--special",
        "--parse-special",
        action="store_true",
        help="read names of control tokens in the text, such as <|im_end|>, as control tokens, not as "
        "plain text",
    )


def note_files(args: argparse.Namespace, model: Path | None, *texts: Path | None) -> None:
    """Prints a note if a file has names of control tokens that are read as plain text."""
    if args.special:
        return
    from hotcold.demo import model_path
    from hotcold.formats.gguf import open_gguf
    from hotcold.tokenizer.tokenizer import Tokenizer

    with (
        suppress(UserError),
        open_gguf(model or model_path()) as file,
    ):  # the command itself reports the mistake
        tokenizer = Tokenizer.from_metadata(file.metadata)
        for text in texts:
            if text is not None:
                note_names(args, tokenizer, options.read_text(text), str(text))


def note_names(args: argparse.Namespace, tokenizer: "Tokenizer", text: str, source: str) -> None:
    """Prints a note if a text has names of control tokens that are read as plain text."""
    names = [] if args.special else [name for name in tokenizer.control_names.values() if name in text]
    if names:
        listed = ", ".join(names[:_NAMED]) + ", ..." * (len(names) > _NAMED)
        read = f"{source} has names of control tokens ({listed}), which are read as plain text"
        options.print_notes([f"{read}: --special reads them as control tokens"])
