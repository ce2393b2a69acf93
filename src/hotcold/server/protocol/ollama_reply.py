"""Ollama's ``/api/chat`` and ``/api/generate``: the replies.

Its clients run each call that they get, and no reason for an end says that a call was cut off. So a call with
incomplete arguments is content: Ollama itself returns no such call, either."""

import json
from datetime import UTC, datetime
from typing import Any, ClassVar

from hotcold.chat.stream import AnswerStream
from hotcold.server.protocol.answers import Block
from hotcold.server.protocol.arguments import are_complete, input_of
from hotcold.server.protocol.dialects import ollama_error
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.replies import Event, Framing, Reply


class OllamaReply(Reply):
    """The reply with one answer; see :class:`Reply`. ``key`` is ``message`` in a chat, otherwise
    ``response``."""

    prefix: ClassVar[str] = "ollama-"
    framing: ClassVar[Framing] = "ollama"

    def __init__(self, facts: Facts, splitter: AnswerStream, *, key: str) -> None:
        super().__init__(facts, [splitter])
        self._key = key

    def end(self) -> list[Event]:
        return [{**self._line(), **self._last()}]

    def fail(self, error: APIError) -> list[Event]:
        return [ollama_error(error)]

    def whole(self) -> dict[str, Any]:
        (answer,) = self._answers
        calls = [_call(block) for block in answer.calls if are_complete(block.text)]
        incomplete = [_incomplete(block) for block in answer.calls if not are_complete(block.text)]
        content = "".join([answer.text(), *incomplete])
        return {**self._line(content, answer.text("reasoning"), calls), **self._last()}

    def _text(self, i: int, block: Block, text: str) -> list[Event]:
        if block.kind == "call":
            return []
        return [self._line(text) if block.kind == "content" else self._line(reasoning=text)]

    def _closed(self, i: int, block: Block, cut: bool) -> list[Event]:
        """Returns a line with a whole call, or with the text of an incomplete one."""
        if block.kind != "call":
            return []
        if are_complete(block.text):
            return [self._line(calls=[_call(block)])]
        return [self._line(_incomplete(block))]

    def _line(
        self, content: str = "", reasoning: str = "", calls: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        last_fields = {"thinking": reasoning} if reasoning else {}
        if self._key == "response":
            return {**_head(self._facts), "response": content, **last_fields, "done": False}
        message: dict[str, Any] = {"role": "assistant", "content": content, **last_fields}
        if calls:
            message["tool_calls"] = calls
        return {**_head(self._facts), "message": message, "done": False}

    def _last(self) -> dict[str, Any]:
        """Returns the fields of the last line; times are in nanoseconds."""
        (answer,) = self._answers
        piece = answer.last
        assert piece is not None
        arrivals, ended = piece.timings.added or 0.0, piece.timings.finished or 0.0
        first = piece.timings.first_token or ended
        return {
            "done": True,
            "done_reason": "length" if piece.finish_reason == "length" else "stop",
            "total_duration": nanoseconds(ended - arrivals),
            "load_duration": 0,
            "prompt_eval_count": piece.prompt_tokens,
            "prompt_eval_duration": nanoseconds(first - arrivals),
            "eval_count": answer.tokens,
            "eval_duration": nanoseconds(ended - first),
        }


def _call(block: Block) -> dict[str, Any]:
    function = {"index": block.index, "name": block.name, "arguments": input_of(block.text)}
    return {"id": block.id, "function": function}


def _incomplete(block: Block) -> str:
    """Returns the text of a call with incomplete arguments."""
    return f'{{"name": {json.dumps(block.name, ensure_ascii=False)}, "arguments": {block.text}'


def loaded(facts: Facts, key: str) -> dict[str, Any]:
    """Returns the reply to a request that only loads the model."""
    nothing = {"message": {"role": "assistant", "content": ""}} if key == "message" else {"response": ""}
    return {**_head(facts), **nothing, "done": True, "done_reason": "load"}


def moment(seconds: float) -> str:
    """Returns a Unix time in Ollama's form."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _head(facts: Facts) -> dict[str, Any]:
    return {"model": facts.name, "created_at": moment(datetime.now(UTC).timestamp())}


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
