"""The answer of a job while it is generated: blocks of text, thinking and calls, and counts."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from hotcold.chat.stream import AnswerStream, Part, PartKind
from hotcold.engine.generation import Piece
from hotcold.server.protocol.arguments import are_complete

BlockKind: TypeAlias = Literal["content", "reasoning", "call"]
#: Kind of a part -> kind of its block.
KINDS: dict[PartKind, BlockKind] = {
    "content": "content",
    "reasoning": "reasoning",
    "call_start": "call",
    "call_arguments": "call",
}


@dataclass
class Block:
    """A run of an answer's text of one kind, or one call of a tool."""

    kind: BlockKind
    name: str = ""  #: name of the called tool
    index: int = 0  #: number of the call, from 0
    id: str = ""  #: id of the call
    text: str = ""  #: the text so far; of a call: its arguments


@dataclass
class Answer:
    """The answer of one job so far."""

    splitter: AnswerStream | None  #: divides the text into blocks; None: the text is one block
    silent: bool  #: whether its tokens are neither shown nor counted
    blocks: list[Block] = field(default_factory=list)
    tokens: int = 0
    reasoning_tokens: int = 0  #: tokens of thinking; a piece with both kinds counts as its first kind
    undivided_tokens: int = 0  #: tokens of text that the splitter holds back
    last: Piece | None = None

    @property
    def finish_reason(self) -> str | None:
        return None if self.last is None else self.last.finish_reason

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == "call"]

    @property
    def calls_tools(self) -> bool:
        """True if the answer ended to call tools. A stop string may have cut off the last call."""
        if self.last is None or self.finish_reason != "stop" or not self.calls:
            return False
        return self.last.stop is None or are_complete(self.calls[-1].text)

    def text(self, kind: BlockKind = "content") -> str:
        return "".join(block.text for block in self.blocks if block.kind == kind)

    def parts(self, piece: Piece) -> list[Part]:
        """Divides the text of the next piece, and counts its tokens."""
        self.last = piece
        self.tokens += 0 if self.silent else len(piece.ids)
        text = "" if self.silent else piece.text
        if self.splitter is None:
            return [Part("content", text)] if text else []
        parts = self.splitter.push(text) if text else []
        if piece.finish_reason is not None:
            parts += self.splitter.finish()
        self.undivided_tokens += len(piece.ids)
        if parts:
            self.reasoning_tokens += self.undivided_tokens if parts[0].kind == "reasoning" else 0
            self.undivided_tokens = 0
        return parts
