"""``/v1/chat/completions``: the answer."""

from collections.abc import Sequence
from typing import Any

from hotcold.chat.call_ids import CallIds, new_call_id
from hotcold.chat.stream import AnswerStream, Part
from hotcold.engine.generation import Piece
from hotcold.server.protocol import logprobs
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.replies import Reply
from hotcold.server.protocol.usage import timings, usage


class _Answer:
    """One choice so far."""

    def __init__(self, splitter: AnswerStream, call_ids: CallIds) -> None:
        self.splitter = splitter
        self._call_ids = call_ids
        self.content = ""
        self.reasoning = ""
        self.calls: dict[int, dict[str, Any]] = {}
        self.finish_reason: str | None = None
        self.held = 0  # tokens whose text is not told apart yet
        self.logprobs: list[dict[str, Any]] = []  # of the whole answer, or of those not yet sent

    def add(self, part: Part) -> dict[str, Any]:
        """Takes a part in and gives its ``delta``."""
        if part.kind == "content":
            self.content += part.text
            return {"content": part.text}
        if part.kind == "reasoning":
            self.reasoning += part.text
            return {"reasoning_content": part.text}
        if part.kind == "call_start":
            function = {"name": part.name, "arguments": part.text}
            call = {"id": new_call_id(self._call_ids, part.name, part.index), "type": "function"}
            self.calls[part.index] = {**call, "function": function}
            return {"tool_calls": [{"index": part.index, **call, "function": dict(function)}]}
        self.calls[part.index]["function"]["arguments"] += part.text
        return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}

    def message(self) -> dict[str, Any]:
        content = None if self.calls and not self.content else self.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call for _, call in sorted(self.calls.items())]
        return message


class ChatReply(Reply):
    """See :class:`Reply`. There is a splitter for each choice."""

    def __init__(
        self,
        facts: Facts,
        splitters: Sequence[AnswerStream],
        *,
        stream: bool,
        include_usage: bool,
        logprobs: bool,
        every_timings: bool = False,
    ) -> None:
        super().__init__(facts, len(splitters), prefix="chatcmpl-")
        self._stream = stream
        self._include_usage = include_usage
        self._logprobs = logprobs
        self._every_timings = every_timings
        self._answers = [_Answer(each, facts.call_ids) for each in splitters]

    def first(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(i, delta) for i in range(len(self._answers))] if self._stream else []

    def add(self, i: int, piece: Piece) -> list[dict[str, Any]]:
        answer, tally = self._answers[i], self._tallies[i]
        reason = piece.finish_reason
        tally.add(piece)
        if self._logprobs:
            answer.logprobs += logprobs.of_chat(self._facts.tokenizer, piece.ids, piece.logprobs)
        parts = answer.splitter.push(piece.text) if piece.text else []
        if reason is not None:
            parts += answer.splitter.finish()
        answer.held += len(piece.ids)
        if parts:
            tally.reasoning_tokens += answer.held if parts[0].kind == "reasoning" else 0
            answer.held = 0
        deltas = [answer.add(part) for part in parts]
        if reason is not None:
            answer.finish_reason = "tool_calls" if reason == "stop" and answer.calls else reason
        if not self._stream:
            return []
        chunks = [self._chunk(i, delta) for delta in deltas]
        if reason is not None:
            chunks.append(self._chunk(i, {}, answer.finish_reason))
        self._decorate(i, chunks, piece)
        return chunks

    def end(self) -> list[dict[str, Any]]:
        if not (self._stream and self._include_usage):
            return []
        return [{**self._head("chat.completion.chunk"), "choices": [], **self._counts()}]

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "message": answer.message(),
                "logprobs": self._found(answer),
                "finish_reason": answer.finish_reason,
            }
            for i, answer in enumerate(self._answers)
        ]
        return {**self._head("chat.completion"), "choices": choices, **self._counts()}

    def _counts(self) -> dict[str, Any]:
        n = len(self._answers)
        return {
            "usage": usage(self._tallies, n),
            "timings": timings(self._tallies, n, self._facts.sparsity),
        }

    def _found(self, answer: _Answer) -> dict[str, Any] | None:
        return {"content": answer.logprobs, "refusal": None} if self._logprobs else None

    def _chunk(self, i: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": i, "delta": delta, "logprobs": None, "finish_reason": reason}
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return chunk

    def _decorate(self, i: int, chunks: list[dict[str, Any]], piece: Piece) -> None:
        """Puts what belongs to the piece as a whole into its first event and its last."""
        answer, tally = self._answers[i], self._tallies[i]
        frame = piece.frame
        if not chunks and frame is not None:
            chunks.append(self._chunk(i, {}))
        if not chunks:
            return
        if self._logprobs and answer.logprobs:
            chunks[0]["choices"][0]["logprobs"] = self._found(answer)
            answer.logprobs = []
        if frame is not None:
            chunks[0]["hotcold"] = frame.plain()
        if self._every_timings or answer.finish_reason is not None:
            chunks[-1]["timings"] = timings([tally], 1, self._facts.sparsity)
