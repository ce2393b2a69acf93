"""Anthropic's ``/v1/messages``: the reply."""

from typing import Any, ClassVar

from hotcold.chat.stream import AnswerStream
from hotcold.engine.generation import Piece
from hotcold.server.protocol.answers import Block
from hotcold.server.protocol.arguments import input_of
from hotcold.server.protocol.dialects import anthropic_error
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.replies import Event, Framing, Reply

#: Kind of a block -> its type, the type of its deltas, and the field of their text.
_TYPES = {
    "content": ("text", "text_delta", "text"),
    "reasoning": ("thinking", "thinking_delta", "thinking"),
    "call": ("tool_use", "input_json_delta", "partial_json"),
}
_NOTHING = {"stop_reason": None, "stop_sequence": None}


class MessagesReply(Reply):
    """The reply with one answer; see :class:`Reply`."""

    prefix: ClassVar[str] = "msg_"
    framing: ClassVar[Framing] = "anthropic"

    def __init__(self, facts: Facts, splitter: AnswerStream) -> None:
        super().__init__(facts, [splitter])
        self._started = False  # whether ``message_start`` was sent

    def waiting(self) -> list[Event]:
        """Returns an event: Claude Code gives up after five minutes without one, and pings do not count."""
        if not self._started:
            return [self._begun()]
        return [{"type": "message_delta", "delta": _NOTHING, "usage": self._usage()}]

    def end(self) -> list[Event]:
        delta = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return [delta, {"type": "message_stop"}]

    def fail(self, error: APIError) -> list[Event]:
        return [anthropic_error(error)]

    def whole(self) -> dict[str, Any]:
        content = [_content(block) for block in self._answers[0].blocks]
        return {**self._head(content), **self._stop(), "usage": self._usage()}

    def _head(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._facts.name,
            "content": content,
        }

    def _begun(self) -> Event:
        self._started = True
        usage = {**self._usage(), "output_tokens": 0}
        return {"type": "message_start", "message": {**self._head([]), **_NOTHING, "usage": usage}}

    def _piece(self, i: int, piece: Piece, events: list[Event]) -> list[Event]:
        return events if self._started else [self._begun(), *events]

    def _opened(self, i: int, block: Block) -> list[Event]:
        return [{"type": "content_block_start", "index": self._index, "content_block": _content(block)}]

    def _text(self, i: int, block: Block, text: str) -> list[Event]:
        _, type, field = _TYPES[block.kind]
        return [self._delta({"type": type, field: text})]

    def _closed(self, i: int, block: Block, cut: bool) -> list[Event]:
        stop = {"type": "content_block_stop", "index": self._index}
        if block.kind != "reasoning":
            return [stop]
        return [self._delta({"type": "signature_delta", "signature": ""}), stop]

    @property
    def _index(self) -> int:
        """The index of the last block."""
        return len(self._answers[0].blocks) - 1

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stop(self) -> dict[str, Any]:
        """Returns why the answer ended."""
        (answer,) = self._answers
        piece = answer.last
        assert piece is not None
        reason = "end_turn"
        if piece.finish_reason == "length":
            reason = "max_tokens"
        elif answer.calls_tools:
            reason = "tool_use"
        elif piece.stop is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": piece.stop if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, Any]:
        """Returns the counts of tokens, with prompt tokens from the prefix cache in a separate field. Counts
        of the prompt are 0 until it has been read."""
        (answer,) = self._answers
        piece = answer.last
        return {
            "input_tokens": piece.prompt_tokens - piece.reused if piece else 0,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": piece.reused if piece else 0,
            "output_tokens": answer.tokens,
        }


def _content(block: Block) -> dict[str, Any]:
    """Returns the content of a block so far."""
    if block.kind == "call":
        id = block.id.replace("call_", "toolu_", 1)
        return {"type": "tool_use", "id": id, "name": block.name, "input": input_of(block.text)}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}
