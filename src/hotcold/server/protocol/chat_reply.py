"""OpenAI's ``/v1/chat/completions``: the reply."""

from collections.abc import Sequence
from typing import Any, ClassVar

from hotcold.chat.stream import AnswerStream
from hotcold.engine.generation import Piece
from hotcold.server.protocol import logprobs
from hotcold.server.protocol.answers import Answer, Block
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.openai_reply import OpenAIReply
from hotcold.server.protocol.replies import Event

_FIELDS = {"content": "content", "reasoning": "reasoning_content"}


class ChatReply(OpenAIReply):
    """The reply with one splitter for each choice; see :class:`Reply`."""

    prefix: ClassVar[str] = "chatcmpl-"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def __init__(
        self,
        facts: Facts,
        splitters: Sequence[AnswerStream],
        *,
        include_usage: bool,
        logprobs: bool,
        every_timings: bool = False,
    ) -> None:
        super().__init__(
            facts,
            splitters,
            n=len(splitters),
            include_usage=include_usage,
            every_timings=every_timings,
        )
        self._logprobs: list[list[dict[str, Any]]] | None = [[] for _ in splitters] if logprobs else None
        self._sent = [0] * len(splitters)  # number of log-probabilities that were sent, for each choice

    def first(self) -> list[Event]:
        return [self._delta(i, {"role": "assistant", "content": ""}) for i in range(len(self._answers))]

    def _opened(self, i: int, block: Block) -> list[Event]:
        if block.kind != "call":
            return []
        return [self._delta(i, {"tool_calls": [{"index": block.index, **_call(block)}]})]

    def _text(self, i: int, block: Block, text: str) -> list[Event]:
        if block.kind == "call":
            call = {"index": block.index, "function": {"arguments": text}}
            return [self._delta(i, {"tool_calls": [call]})]
        return [self._delta(i, {_FIELDS[block.kind]: text})]

    def _piece(self, i: int, piece: Piece, events: list[Event]) -> list[Event]:
        if self._logprobs is not None:
            self._logprobs[i] += logprobs.of_chat(self._facts.tokenizer, piece.ids, piece.logprobs)
        if piece.finish_reason is not None:
            events.append(self._delta(i, {}, _reason(self._answers[i])))
        if not events and piece.frame is not None:
            events.append(self._delta(i, {}))
        if not events:
            return []
        if self._logprobs is not None and (unsent := self._logprobs[i][self._sent[i] :]):
            events[0]["choices"][0]["logprobs"] = _logprobs(unsent)
            self._sent[i] += len(unsent)
        self._decorate(i, piece, events)
        return events

    def _choice(self, i: int) -> dict[str, Any]:
        answer = self._answers[i]
        content, reasoning, calls = answer.text(), answer.text("reasoning"), answer.calls
        shown = None if calls and not content else content
        message: dict[str, Any] = {"role": "assistant", "content": shown, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [_call(block) for block in calls]
        return {
            "index": i,
            "message": message,
            "logprobs": None if self._logprobs is None else _logprobs(self._logprobs[i]),
            "finish_reason": _reason(answer),
        }

    def _delta(self, i: int, delta: dict[str, Any], reason: str | None = None) -> Event:
        return self._chunk([{"index": i, "delta": delta, "logprobs": None, "finish_reason": reason}])


def _call(block: Block) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.text}}


def _logprobs(tokens: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": tokens, "refusal": None}


def _reason(answer: Answer) -> str | None:
    """Returns why the answer ended."""
    return "tool_calls" if answer.calls_tools else answer.finish_reason
