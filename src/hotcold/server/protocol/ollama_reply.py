"""Ollama's ``/api/chat`` and ``/api/generate``: the answers."""

from datetime import UTC, datetime
from typing import Any, ClassVar

from hotcold.chat.call_ids import new_call_id
from hotcold.chat.stream import AnswerStream, Part
from hotcold.engine.generation import Piece
from hotcold.server.protocol.arguments import input_of
from hotcold.server.protocol.dialects import ollama_error
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.replies import Framing, Reply


class OllamaReply(Reply):
    """See :class:`Reply`; of one job. ``key`` is ``message`` in a conversation, else ``response``."""

    framing: ClassVar[Framing] = "ollama"

    def __init__(self, facts: Facts, splitter: AnswerStream, *, stream: bool, key: str) -> None:
        super().__init__(facts, 1, prefix="ollama-")
        self._splitter = splitter
        self._stream = stream
        self._key = key
        self._texts = {"content": "", "reasoning": ""}
        self._calls: list[dict[str, Any]] = []
        self._call: Part | None = None  # that has begun
        self._arguments = ""  # its, so far

    def add(self, i: int, piece: Piece) -> list[dict[str, Any]]:
        (tally,) = self._tallies
        reason = piece.finish_reason
        tally.add(piece)
        parts = self._splitter.push(piece.text) if piece.text else []
        if reason is not None:
            parts += self._splitter.finish()
        lines = []
        for part in parts:
            lines += self._add(part)
        if reason is not None:
            lines += self._called()
        return lines if self._stream else []

    def end(self) -> list[dict[str, Any]]:
        return [{**self._line(), **self._last()}] if self._stream else []

    def fail(self, error: APIError) -> list[dict[str, Any]]:
        return [ollama_error(error)]

    def whole(self) -> dict[str, Any]:
        line = self._line(self._texts["content"], self._texts["reasoning"], self._calls)
        return {**line, **self._last()}

    def _add(self, part: Part) -> list[dict[str, Any]]:
        """Lines of a part; a call is told as a whole, when it has ended."""
        if part.kind == "call_arguments":
            self._arguments += part.text
            return []
        lines = self._called()
        if part.kind == "call_start":
            self._call, self._arguments = part, part.text
        elif part.text:
            self._texts[part.kind] += part.text
            lines.append(self._line(part.text) if part.kind == "content" else self._line(reasoning=part.text))
        return lines

    def _called(self) -> list[dict[str, Any]]:
        if self._call is None:
            return []
        name, index = self._call.name, self._call.index
        call = {
            "id": new_call_id(self._facts.call_ids, name, index),
            "function": {"index": index, "name": name, "arguments": input_of(self._arguments)},
        }
        self._calls.append(call)
        self._call = None
        return [self._line(calls=[call])]

    def _line(
        self, content: str = "", reasoning: str = "", calls: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        more = {"thinking": reasoning} if reasoning else {}
        if self._key == "response":
            return {**_head(self._facts), "response": content, **more, "done": False}
        message: dict[str, Any] = {"role": "assistant", "content": content, **more}
        if calls:
            message["tool_calls"] = calls
        return {**_head(self._facts), "message": message, "done": False}

    def _last(self) -> dict[str, Any]:
        """The fields that only the last line has; times are in nanoseconds."""
        (tally,) = self._tallies
        piece = tally.last
        assert piece is not None
        begun, ended = piece.timings.added or 0.0, piece.timings.finished or 0.0
        first = piece.timings.first_token or ended
        return {
            "done": True,
            "done_reason": "length" if piece.finish_reason == "length" else "stop",
            "total_duration": nanoseconds(ended - begun),
            "load_duration": 0,
            "prompt_eval_count": piece.prompt_tokens,
            "prompt_eval_duration": nanoseconds(first - begun),
            "eval_count": tally.tokens,
            "eval_duration": nanoseconds(ended - first),
        }


def loaded(facts: Facts, key: str) -> dict[str, Any]:
    """The answer to a request that only has the model loaded."""
    nothing = {"message": {"role": "assistant", "content": ""}} if key == "message" else {"response": ""}
    return {**_head(facts), **nothing, "done": True, "done_reason": "load"}


def moment(seconds: float) -> str:
    """A Unix time as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _head(facts: Facts) -> dict[str, Any]:
    return {"model": facts.name, "created_at": moment(datetime.now(UTC).timestamp())}


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
