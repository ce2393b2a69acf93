"""Renders Markdown as lines of a terminal, one block after the other, without dropping text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich import markdown as rich
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

STYLES = Theme(
    {
        "markdown.h1": "bold underline",
        "markdown.h2": "bold",
        "markdown.h3": "bold",
        "markdown.h4": "italic",
        "markdown.h5": "italic",
        "markdown.h6": "italic",
        "markdown.code": "cyan",
        "markdown.block_quote": "none",
        "markdown.item.bullet": "none",
        "markdown.item.number": "none",
        "markdown.hr": "none",
        "markdown.link": "none",
        "markdown.link_url": "underline",
        "markdown.table.border": "none",
        "markdown.table.header": "bold",
    }
)
#: A line that may become a list, a heading, a rule or a table when more text follows.
_UNDECIDED = re.compile(r"[ >]*(?:[-+*=#~`|:_.][-+*=#~`|:_. ]*|\d{1,9}[.)]? *)?")
_MOST_NESTING = 100  # lists in lists count twice
_PARSER = MarkdownIt("commonmark", {"maxNesting": _MOST_NESTING}).enable(["strikethrough", "table"])
# HTML and definitions of links would be left out, and a picture would lose its address.
_PARSER.disable(["html_block", "html_inline", "reference", "image"])

_LEAST_ROOM = 8  # columns for text
_LEAST_COLUMN = 5  # of a table, with the space next to it
_INDENTS = {"bullet_list": 3, "ordered_list": 6, "blockquote": 4}  # columns that rich needs for each


@dataclass(frozen=True)
class Block:
    """A paragraph, a list, a table and so on."""

    start: int  #: start of its text in the whole text
    tokens: Sequence[Token]
    text: str = ""  #: its text as written


class _Heading(rich.Heading):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text.assemble(self.text, justify="left")


class _Code(rich.CodeBlock):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).removesuffix("\n")
        syntax = Syntax(code, self.lexer_name, theme="ansi_dark", word_wrap=True, tab_size=4)
        shown = syntax.highlight(code)
        shown.rstrip()
        yield Padding(shown, (0, 0, 0, 2))


class _Markdown(rich.Markdown):
    elements: ClassVar = {
        **rich.Markdown.elements,
        "heading_open": _Heading,
        "fence": _Code,
        "code_block": _Code,
    }

    def __init__(self, block: Block) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = [*block.tokens]


def decided(text: str) -> str:
    """Returns the part of a growing text that can be shown: all except a last line that may become something
    else."""
    start = text.rfind("\n") + 1
    return text[:start] if _UNDECIDED.fullmatch(text, start) else text


def blocks(text: str) -> list[Block]:
    """Returns the blocks of a text. More text changes only the last block."""
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    parsed: list[Block] = []
    tokens: list[Token] = []
    start = 0
    for token in _PARSER.parse(text):
        if not tokens:
            start = starts[token.map[0]] if token.map else 0
        _as_written(token)
        tokens.append(token)
        if token.level == 0 and token.nesting <= 0:
            end = starts[tokens[0].map[1]] if tokens[0].map else len(text)
            parsed.append(Block(start, tokens, text[start:end]))
            tokens = []
    return parsed


def _as_written(token: Token) -> None:
    """Keeps line breaks, and shows addresses of links without a text."""
    if token.children is None:
        return
    token.children = [child for child in token.children if child.info != "auto"]
    for child in token.children:
        if child.type == "softbreak":
            child.type = "hardbreak"


def lines_of(block: Block, console: Console) -> list[str]:
    """Returns the lines of a block, none wider than the console. A block with too many levels or columns for
    its text is shown as written."""
    if _room(block, console.width) < _LEAST_ROOM:
        return [line for text in block.text.split("\n") for line in plain_lines(text, "", console) or [""]]
    return _lines(_Markdown(block), console)


def _room(block: Block, width: int) -> int:
    """Returns the columns for the text of a block at its narrowest place."""
    room = least = width
    if any(token.level >= _MOST_NESTING - 2 for token in block.tokens):
        return 0  # the parser may drop deeper levels
    for token in block.tokens:
        room -= token.nesting * _INDENTS.get(token.type.removesuffix("_open").removesuffix("_close"), 0)
        least = min(least, room)
    columns = sum(token.type == "th_open" for token in block.tokens)
    return 0 if columns and width // columns < _LEAST_COLUMN else least


def plain_lines(text: str, style: str, console: Console) -> list[str]:
    """Returns the lines of a text that is not Markdown, wrapped at words."""
    return _lines(Text(text, style), console)


def _lines(shown: rich.Markdown | Text, console: Console) -> list[str]:
    with console.capture() as captured:
        console.print(shown, end="")
    lines = [line.rstrip() for line in captured.get().split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    while lines and not lines[0]:
        del lines[0]
    return lines
