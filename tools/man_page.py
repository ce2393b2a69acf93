"""Writes the man page, which wheels carry, from what ``--help`` says.

python tools/man_page.py [--check]      # src/man/hotcold.1; --check: exit code 1 if it would change
"""

import argparse
import re
import sys
from pathlib import Path

from hotcold.commands.cli import VERBS
from hotcold.commands.command_line import parser_of
from hotcold.commands.completion import help_of

PAGE = Path(__file__).resolve().parent.parent / "src" / "man" / "hotcold.1"
HEAD = r""".\" Written by tools/man_page.py from what --help says.
.TH HOTCOLD 1 "" hotcold "User Commands"
.SH NAME
hotcold \- runs large language models by computing only the neurons that a token needs
.SH SYNOPSIS
.B hotcold
.I COMMAND
[options]
.br
.B hotcold
\-\-version | \-\-completion bash|zsh|fish
.SH DESCRIPTION
The first command to try writes a story with the built\-in model:
.PP
.RS
hotcold generate \-p "Once upon a time"
.RE
.PP
Most options have llama.cpp's names; its other options are understood, or refused with the reason.
"""
TAIL = r""".SH EXIT STATUS
0: done. 2: a mistake of the user, in a file or of the machine. 70: a defect of the program. 130: interrupted.
141: the reader of the output has gone.
.SH ENVIRONMENT
.TP
.B HOTCOLD_ISA
The instruction set to use instead of the processor's best one, such as avx2.
.TP
.B HOTCOLD_READS
The method of reading experts that are not in memory: io_uring or threads.
.TP
.B HOTCOLD_CACHE
The folder of downloaded models.
.TP
.B HOTCOLD_API_KEY
The key that clients of \fBhotcold serve\fR must send.
"""


def roff(text: str) -> str:
    """The text on its own lines, so that none is taken for a request."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^(?=[.'])", r"\\&", text, flags=re.MULTILINE)


def option(parser: argparse.ArgumentParser, action: argparse.Action) -> list[str]:
    name = ", ".join(f"\\fB{roff(each)}\\fR" for each in action.option_strings)
    value = ""
    if action.nargs != 0:
        shown = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest)
        shown = shown if isinstance(shown, str) else " ".join(shown)
        value = f"\\fI{roff(shown)}\\fR"
    return [".TP", f"{name} {value}".strip(), roff(help_of(parser, action))]


def command(verb: str) -> list[str]:
    parser = parser_of(verb)
    lines = [f".SS hotcold {roff(verb)}", roff(" ".join((parser.description or "").split()))]
    for group in parser._action_groups:
        for action in group._group_actions:
            if action.help != argparse.SUPPRESS and action.dest != "help":
                lines += option(parser, action)
    return lines


def page() -> str:
    lines = [".SH COMMANDS"]
    for verb, summary in VERBS:
        lines += [".TP", f"\\fB{roff(verb)}\\fR", roff(summary)]
    lines.append(".SH OPTIONS OF THE COMMANDS")
    for verb, _ in VERBS:
        lines += command(verb)
    return HEAD + "\n".join(lines) + "\n" + TAIL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    made = page()
    if check:
        return int(PAGE.read_text(encoding="utf-8") != made)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
