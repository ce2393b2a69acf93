"""Reads the options of a command. Errors are one line, and llama.cpp's names of options are understood."""

import argparse
import importlib
import re
from collections.abc import Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import Any, NoReturn

from hotcold.commands.llama_cpp_options import IS, NO, ROWS, Row
from hotcold.errors import UserError

MODEL_ARGUMENT = "model_argument"  #: where argparse keeps a model that is given without ``-m``
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")


def nearest(word: str, known: Sequence[str]) -> str:
    """Returns a hint at the known word that was probably meant; may be empty."""
    if word.startswith("-") and f"-{word}" in known:
        return f"; did you mean -{word}?"
    matches = get_close_matches(word, known, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and name the nearest option. Options of one dash are read
    as a whole: ``-ngl`` is never ``-n`` with the value ``gl``."""

    notes: Sequence[str] = ()  #: notes on options of llama.cpp in the parsed command line

    def parse_strictly(self, argv: Sequence[str]) -> argparse.Namespace:
        words, self.notes = _Words(self, argv).understood()
        args, unknown = self.parse_known_args(words)
        if unknown:
            self.unknown(unknown[0])
        if (model := getattr(args, MODEL_ARGUMENT, None)) is not None:
            if args.model is not None:
                self.error(f"the model is given twice, as {str(model)!r} and -m {args.model}: give it once")
            args.model = model
        return args

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Returns no matches. Argparse would accept prefixes of names, and short names joined with a value;
        without them a text such as ``-h is for help`` stays a text."""
        return []

    @property
    def verb(self) -> str:
        return self.prog.rpartition(" ")[2]

    @property
    def names(self) -> dict[str, argparse.Action]:
        """The options by name."""
        return self._option_string_actions

    def format_help(self) -> str:
        """Returns the help. Its usage line has only the required options; the list below has all."""
        formatter = self._get_formatter()
        groups = [group for group in self._mutually_exclusive_groups if group.required]
        ways = [action for group in groups for action in group._group_actions]
        needed = [each for each in self._actions if not each.option_strings or each.required or each in ways]
        formatter.add_usage(None, needed, groups, prefix="")
        self.usage = f"{formatter.format_help().strip()} [options]".replace("%", "%%")
        return super().format_help()

    def unknown(self, word: str) -> NoReturn:
        if word.startswith("-"):
            self.error(f"unknown option {word!r}{nearest(word.partition('=')[0], list(self.names))}")
        self.error(f"unknown argument {word!r}{'; a text needs -p' if '--prompt' in self.names else ''}")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (`{self.prog} --help` lists the options)")


class _Words:
    """Reads the words of a command line, one after the other."""

    def __init__(self, parser: OneLineParser, argv: Sequence[str]) -> None:
        self._parser = parser
        self._left = [*argv]
        self._found: list[str] = []
        self._notes: list[str] = []

    def understood(self) -> tuple[list[str], list[str]]:
        """Returns the words for argparse, and notes. UserError: an option is unknown, or refused."""
        while self._left:
            word = self._left.pop(0)
            if word == "--":
                self._found += [word, *self._left]
                break
            if not _is_option(word):
                self._found.append(word)
            elif words_of_ours := self._own(word):
                self._found += words_of_ours
            else:
                self._foreign(word)
        return self._found, self._notes

    def _own(self, word: str) -> list[str]:
        """Returns the words of an option of this program; empty for an option of llama.cpp."""
        names = self._parser.names
        if word in names or word.partition("=")[0] in names:
            return [word]
        number = re.fullmatch(r"(-[A-Za-z])([0-9.]+)", word)  # -n4
        if number is None or number[1] not in names or names[number[1]].nargs is not None:
            return []
        return [number[1], number[2]]

    def _foreign(self, word: str) -> None:
        name, given, value = word.partition("=")
        rows = [row for row in ROWS if name in row.names.split() and self._is_for(row)]
        if not rows:
            self._parser.unknown(word)
        takes = rows[0].takes
        if not takes:
            if given:
                self._parser.error(f"{name} takes no value")
        elif not given:
            value = self._value(name, takes)
        row = next((each for each in rows if re.fullmatch(each.when, value)), rows[-1])
        option = f"{name} {value}".strip()
        if row.outcome == NO:
            raise UserError(f"{name} of llama.cpp does not exist in `{self._parser.prog}`: {row.text}")
        if row.outcome == IS:
            words = [each.format(value) for each in row.text.split()]
            if words[0] not in self._parser.names:
                self._parser.unknown(word)
            self._found += words
            self._notes.append(f"{option} is read as {' '.join(words)}")
        else:
            self._notes.append(f"{option} has no effect: {row.text}")

    def _is_for(self, row: Row) -> bool:
        """Returns whether the row applies to this command: most rows are for commands that run a model."""
        return "--threads" in self._parser.names and (not row.verbs or self._parser.verb in row.verbs.split())

    def _value(self, name: str, takes: str) -> str:
        """Returns the value of an option: the next word. It may be empty if the option needs none."""
        following = self._left[0] if self._left else None
        if "|" in takes:
            return self._left.pop(0) if following in takes.split("|") else ""
        if following is None or _is_option(following):
            self._parser.error(f"{name} needs a value: {takes}")
        return self._left.pop(0)


def _is_option(word: str) -> bool:
    """Returns whether argparse takes the word for an option; other words that begin with a dash are
    values."""
    return len(word) > 1 and word[0] == "-" and " " not in word and not _NEGATIVE.fullmatch(word)


def module_of(verb: str) -> ModuleType:
    """Imports and returns the module of a command."""
    return importlib.import_module(f"hotcold.commands.{verb.replace('-', '_')}")


def parser_of(verb: str) -> OneLineParser:
    """Returns the parser of a command, with its options."""
    module = module_of(verb)
    parser = OneLineParser(prog=f"hotcold {verb}", description=module.__doc__, allow_abbrev=False)
    module.add_arguments(parser)
    return parser
