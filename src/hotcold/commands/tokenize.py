"""Turns text into token ids: one line per token, its id and its text. Needs a file's vocabulary only."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hotcold.commands import options

if TYPE_CHECKING:
    from hotcold.model.tokenizer import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-m", "--model", type=Path, metavar="FILE", help="GGUF file (default: the built-in model)")
    add("-p", "--prompt", default="-", metavar="TEXT", help="the text (default: all of standard input)")
    add("--no-bos", action="store_true", help="leave out what the model expects around a text")
    add("--special", action="store_true", help="read names of control tokens, such as </s>, as these tokens")
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    tokenizer = _tokenizer(args.model)
    text = _standard_input() if args.prompt == "-" else args.prompt
    ids = tokenizer.encode(text, add_bos=False if args.no_bos else None, parse_special=args.special)
    pieces = [tokenizer.piece(id) for id in ids]
    if args.json:
        print(json.dumps({"ids": ids, "pieces": [_text_or_bytes(piece) for piece in pieces]}))
        return 0
    width = len(str(tokenizer.vocab_size - 1))
    lines = [f"{id:{width}}  {escaped(piece)}\n" for id, piece in zip(ids, pieces, strict=True)]
    sys.stdout.write("".join(lines))
    return 0


def escaped(piece: bytes) -> str:
    r"""A token's bytes in double quotes, in printable characters: ``" caf"``, ``"\n"``, ``"\xc3"``."""
    shown = "".join(map(_shown, piece.decode(errors="surrogateescape")))
    return f'"{shown}"'


_ESCAPES = str.maketrans({'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"})


def _shown(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    if character.isprintable() or character in "\n\r\t":
        return character.translate(_ESCAPES)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _text_or_bytes(piece: bytes) -> str | list[int]:
    """As llama.cpp's server does: a string, or the bytes' values where a token is not whole characters."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _tokenizer(path: Path | None) -> Tokenizer:
    from hotcold.formats.gguf import open_gguf
    from hotcold.formats.gguf_values import printable
    from hotcold.model.tokenizer import Tokenizer, TokenizerError

    if path is None:
        from hotcold import demo

        path = demo.model_path()
    with open_gguf(path) as file:
        try:
            return Tokenizer.from_metadata(file.metadata)
        except TokenizerError as error:
            raise TokenizerError(f"{printable(str(path))}: {error}") from None


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"standard input is not UTF-8 text: byte {error.object[error.start]:#04x} at {error.start}"
        ) from None
