"""Turns text into token ids: one line per token, with its id and its text. Reads only the vocabulary."""

import argparse
import sys

from hotcold.commands import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    options.add_model(parser)
    add("-p", "--prompt", default="-", metavar="TEXT", help="the text (default: all of standard input)")
    add("--no-bos", action="store_true", help="add no BOS and no EOS, even if the model expects them")
    add(
        "--special",
        action="store_true",
        help="read names of control tokens, such as </s>, as control tokens, not as plain text",
    )
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    from hotcold.demo import model_path
    from hotcold.formats.files import naming
    from hotcold.formats.gguf import open_gguf
    from hotcold.tokenizer.tokenizer import Tokenizer, TokenizerError

    path = options.local_model(args.model) or model_path()
    with open_gguf(path) as file, naming(path, TokenizerError):
        tokenizer = Tokenizer.from_metadata(file.metadata)
    text = options.read_text(None) if args.prompt == "-" else args.prompt
    ids = tokenizer.encode(text, add_bos=False if args.no_bos else None, parse_special=args.special)
    if args.prompt == "-":
        options.note_empty(text, None)
    options.note_left_out(tokenizer, text)
    options.print_notes(tokenizer.notes)
    pieces = [tokenizer.piece(id) for id in ids]
    if not args.json:
        width = len(str(tokenizer.vocab_size - 1))
        lines = [f"{id:{width}}  {escaped(piece)}\n" for id, piece in zip(ids, pieces, strict=True)]
        sys.stdout.write("".join(lines))
    return options.end(args, {"ids": ids, "pieces": [_text_or_bytes(piece) for piece in pieces]})


def escaped(piece: bytes) -> str:
    r"""Returns a token's bytes in double quotes, as printable characters: ``" caf"``, ``"\n"``,
    ``"\xc3"``."""
    shown = "".join(map(_shown, piece.decode(errors="surrogateescape")))
    return f'"{shown}"'


def _shown(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # a byte that is not UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    if character.isprintable():
        return f"\\{character}" if character in '"\\' else character
    return character.encode("unicode_escape").decode().replace("\\x", "\\u00")


def _text_or_bytes(piece: bytes) -> str | list[int]:
    """Returns a token as llama.cpp's server does: a string, or the values of its bytes if it has no whole
    characters."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
