"""Anthropic's ``/v1/messages``: the answer."""

from typing import Any, ClassVar

from hotcold.chat.call_ids import new_call_id
from hotcold.chat.stream import AnswerStream, Part
from hotcold.engine.generation import Piece
from hotcold.server.protocol.arguments import input_of
from hotcold.server.protocol.dialects import anthropic_error
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.replies import Framing, Reply

#: The kind of a part -> the type of its block.
_BLOCKS = {
    "content": "text",
    "reasoning": "thinking",
    "call_start": "tool_use",
    "call_arguments": "tool_use",
}
#: The type of a block -> the type of its deltas, and the field that they have.
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class MessagesReply(Reply):
    """See :class:`Reply`; of one job."""

    framing: ClassVar[Framing] = "anthropic"

    def __init__(self, facts: Facts, splitter: AnswerStream, *, stream: bool) -> None:
        super().__init__(facts, 1, prefix="msg_")
        self._splitter = splitter
        self._stream = stream
        self._blocks: list[dict[str, Any]] = []  # as they are begun
        self._texts: list[str] = []  # of each block, so far
        self._open = False  # whether the last block may go on
        self._started = False  # whether the message has begun

    def waiting(self) -> list[dict[str, Any]]:
        """Claude Code gives up after five minutes without an event; pings are none to it."""
        if not self._started:
            return [self._begun()]
        nothing = {"stop_reason": None, "stop_sequence": None}
        return [{"type": "message_delta", "delta": nothing, "usage": self._usage()}]

    def add(self, i: int, piece: Piece) -> list[dict[str, Any]]:
        (tally,) = self._tallies
        reason = piece.finish_reason
        tally.add(piece)
        events = [] if self._started else [self._begun()]
        parts = self._splitter.push(piece.text) if piece.text else []
        if reason is not None:
            parts += self._splitter.finish()
        for part in parts:
            events += self._add(part)
        if reason is not None:
            events += self._closed()
        return events if self._stream else []

    def end(self) -> list[dict[str, Any]]:
        if not self._stream:
            return []
        delta = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return [delta, {"type": "message_stop"}]

    def fail(self, error: APIError) -> list[dict[str, Any]]:
        return [anthropic_error(error)]

    def whole(self) -> dict[str, Any]:
        content = [self._whole(*each) for each in zip(self._blocks, self._texts, strict=True)]
        return {**self._head_of(content), **self._stop(), "usage": self._usage()}

    def _head_of(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._facts.name,
            "content": content,
        }

    def _begun(self) -> dict[str, Any]:
        self._started = True
        nothing = {"stop_reason": None, "stop_sequence": None}
        usage = {**self._usage(), "output_tokens": 0}
        return {"type": "message_start", "message": {**self._head_of([]), **nothing, "usage": usage}}

    def _add(self, part: Part) -> list[dict[str, Any]]:
        kind = _BLOCKS[part.kind]
        events = []
        if part.kind == "call_start" or (part.text and not (self._open and self._blocks[-1]["type"] == kind)):
            events = [*self._closed(), self._opened(kind, part)]
        if part.text:
            self._texts[-1] += part.text
            name, field = _DELTAS[kind]
            events.append(self._delta({"type": name, field: part.text}))
        return events

    def _opened(self, kind: str, part: Part) -> dict[str, Any]:
        if kind == "tool_use":
            id = new_call_id(self._facts.call_ids, part.name, part.index).replace("call_", "toolu_", 1)
            block: dict[str, Any] = {"type": kind, "id": id, "name": part.name, "input": {}}
        elif kind == "thinking":
            block = {"type": kind, "thinking": "", "signature": ""}
        else:
            block = {"type": kind, "text": ""}
        self._blocks.append(block)
        self._texts.append("")
        self._open = True
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}

    def _closed(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open = False
        events = []
        if self._blocks[-1]["type"] == "thinking":
            events.append(self._delta({"type": "signature_delta", "signature": ""}))
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _whole(self, block: dict[str, Any], text: str) -> dict[str, Any]:
        if block["type"] != "tool_use":
            return {**block, block["type"]: text}
        return {**block, "input": input_of(text)}

    def _stop(self) -> dict[str, Any]:
        """Why the answer ended."""
        piece = self._tallies[0].last
        assert piece is not None
        reason = "end_turn"
        if piece.finish_reason == "length":
            reason = "max_tokens"
        elif any(block["type"] == "tool_use" for block in self._blocks):
            reason = "tool_use"
        elif piece.stop is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": piece.stop if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, Any]:
        """Counts of tokens; those of the prompt that were not computed anew are counted apart. They are 0
        while the prompt is read."""
        (tally,) = self._tallies
        piece = tally.last
        return {
            "input_tokens": piece.prompt_tokens - piece.reused if piece else 0,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": piece.reused if piece else 0,
            "output_tokens": tally.tokens,
        }
