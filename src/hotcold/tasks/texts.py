"""Texts to read, checked before anything is computed."""

import codecs
import sys
from contextlib import nullcontext
from pathlib import Path

from hotcold.errors import UserError
from hotcold.values import not_utf8

_LONGEST_TEXT = 1 << 30  # bytes; an endless device must not fill the memory


def read_text(path: Path | None) -> str:
    """Returns the text of a UTF-8 file, without a byte order mark; None reads standard input. UserError: too
    large, or not UTF-8. OSError: not readable."""
    name = "standard input" if path is None else str(path)
    with nullcontext(sys.stdin.buffer) if path is None else path.open("rb") as file:
        data = file.read(_LONGEST_TEXT + 1)
    if len(data) > _LONGEST_TEXT:
        raise UserError(f"{name} is longer than {_LONGEST_TEXT} bytes: use a part of it")
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} {not_utf8(error)}") from None


def text_of(text: str | Path) -> str:
    """Returns a text, or the text of a file. UserError: the text is an existing file's name, which would
    silently count as a text of about three words; others as in :func:`read_text`."""
    if isinstance(text, Path):
        return read_text(text)
    if not isinstance(text, str):
        raise UserError(f"text is of type {type(text).__name__}: a str, or a Path to a UTF-8 file, is needed")
    if len(text) < 256 and "\0" not in text and Path(text).is_file():
        raise UserError(f"text is {text!r}, the name of a file: give Path({text!r}) to read it")
    return text
