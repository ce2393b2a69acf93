"""Chats with a model in the terminal. Answers go to stdout, notes and figures to stderr. Piped input is one
message per line; the first one that is refused ends the program with exit code 2. /help lists commands."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from hotcold.chat.chat import ANSWER_TOKENS
from hotcold.commands import options
from hotcold.commands.chat_commands import completions, run_command
from hotcold.commands.chat_terminal import Terminal, say
from hotcold.commands.cli import EXIT_INTERRUPTED
from hotcold.commands.conversation import Conversation
from hotcold.commands.interrupts import Interrupts
from hotcold.commands.line_input import LineInput
from hotcold.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-sys", "--system-prompt", metavar="TEXT", help="how the model should behave")
    parser.add_argument(
        "-n",
        "--n-predict",
        "--predict",
        type=options.token_count,
        metavar="N",
        help=f"at most N tokens per answer; -1: until the context is full (default: {ANSWER_TOKENS}, or a "
        "quarter of a small context)",
    )
    parser.add_argument(
        "--load", type=options.file_path, metavar="FILE", help="continue a conversation that /save wrote"
    )
    parser.add_argument(
        "--history",
        type=options.file_path,
        metavar="FILE",
        help="keep the history of typed lines in this file (default: no file)",
    )
    parser.add_argument("--no-figures", action="store_true", help="print no speed after answers")
    options.add_plain_option(parser)
    options.add_template_options(parser)
    options.add_model_options(parser)
    options.add_draft_options(parser)
    options.add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    given = options.sampling_given(args)
    conversation = Conversation(args.system_prompt or "")
    if args.load is not None:
        conversation.load(args.load)
    session = options.load_session(args)
    params = replace(session.model.sampling, **given)
    with Interrupts() as interrupts:
        lines = LineInput(interrupts, _history(args.history), completions, plain=args.plain)
        max_tokens = args.n_predict or min(ANSWER_TOKENS, max(1, session.model.context // 4))
        terminal = Terminal(
            session, conversation, params, interrupts, max_tokens=max_tokens, plain=args.plain
        )
        terminal.figures, terminal.verbose = not args.no_figures, args.verbose
        try:
            terminal.greet(lines.interactive)
            return _talk(terminal, lines)
        finally:
            lines.close()
            terminal.close()


def _history(path: Path | None) -> Path | None:
    """Checks the file of ``--history``. UserError: lines could not be written to it at the end."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise UserError(f"--history {path}: a file in an existing folder is needed")
    return path


def _talk(terminal: Terminal, lines: LineInput) -> int:
    """Reads and answers messages until the end; returns the exit code. UserError: piped input has none."""
    asked_to_quit, is_empty = False, True
    while True:
        try:
            text = lines.read()
        except KeyboardInterrupt:
            if not lines.interactive:
                return EXIT_INTERRUPTED
            print()
            if lines.typed():
                continue
            if asked_to_quit:
                return 0
            say("(to end: Ctrl-C again, Ctrl-D or /quit)")
            asked_to_quit = True
            continue
        except UserError as error:
            if not lines.interactive:
                raise
            say(f"error: {error}")
            continue
        asked_to_quit = False
        if text is None:
            if lines.interactive:
                print()
            elif is_empty:
                raise UserError("standard input has no message: write one a line, or chat in a terminal")
            return 0
        if not text.strip():
            continue
        is_empty = False
        try:
            if text.startswith("/") and "\n" not in text:
                if not run_command(terminal, text):
                    return 0
            else:
                terminal.ask(text)
            if lines.interactive:
                print()
            elif terminal.interrupted:
                return EXIT_INTERRUPTED
        except (UserError, OSError) as error:
            if not lines.interactive:  # later lines were written for an answer that is missing
                raise
            say(f"error: {error}")
        sys.stdout.flush()
