"""A model's answer in a conversation: its text, its thinking, and its calls of tools."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hotcold.chat.stream import AnswerStream, Part
from hotcold.engine.generation import Generation, Piece, joined


@dataclass(frozen=True)
class ToolCall:
    id: str  #: repeated in the message of role ``tool`` with the result
    name: str
    arguments: str  #: an object in JSON


@dataclass(frozen=True)
class ChatPiece:
    """The new part of an answer; ``str()`` returns the text to show."""

    parts: tuple[Part, ...]
    piece: Piece  #: has the ids and timings, and in the last piece the finish reason

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if part.kind == "content")

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if part.kind == "reasoning")

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Answer(Generation):
    """A finished answer; ``text`` and ``str()`` return the text to show."""

    reasoning: str = ""  #: the thinking, if the template marks it
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message for the next turn."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


def divided(pieces: Generator[Piece, None, None], stream: AnswerStream) -> Generator[ChatPiece, None, None]:
    """Divides the text of a continuation's pieces; closing this generator closes them."""
    try:
        for piece in pieces:
            parts = stream.push(piece.text)
            if piece.finish_reason is not None:
                parts += stream.finish()
            yield ChatPiece(tuple(parts), piece)
    finally:
        pieces.close()


def answer_of(pieces: Sequence[ChatPiece]) -> Answer:
    """Joins all pieces of an answer."""
    generation = joined([each.piece for each in pieces])
    same = {field.name: getattr(generation, field.name) for field in fields(generation)}
    return Answer(
        **same | {"text": "".join(map(str, pieces))},
        reasoning="".join(each.reasoning for each in pieces),
        tool_calls=tuple(_calls(part for each in pieces for part in each.parts)),
    )


def _calls(parts: Iterator[Part]) -> Iterator[ToolCall]:
    name, arguments, index = "", "", -1
    for part in parts:
        if part.kind == "call_start":
            if index >= 0:
                yield ToolCall(_id(index), name, arguments)
            name, arguments, index = part.name, "", part.index
        elif part.kind == "call_arguments":
            arguments += part.text
    if index >= 0:
        yield ToolCall(_id(index), name, arguments)


def _id(index: int) -> str:
    """Returns a call id of nine letters and digits: some templates accept no other form."""
    return f"call{index:05}"
