"""OpenAI's ``/v1/responses``: the answer."""

import secrets
from typing import Any, ClassVar

from hotcold.chat.call_ids import new_call_id
from hotcold.chat.stream import AnswerStream, Part
from hotcold.engine.generation import Piece
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.replies import Framing, Reply
from hotcold.server.protocol.responses_tools import Names
from hotcold.server.protocol.usage import usage

_KINDS = {
    "content": "message",
    "reasoning": "reasoning",
    "call_start": "function_call",
    "call_arguments": "function_call",
}
_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
#: The kind of an item -> the names of its events of text.
_EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


class ResponsesReply(Reply):
    """See :class:`Reply`; of one job. ``told`` are fields of the request that the response repeats, ``names``
    those of its functions; ``keep``: whether its items are kept for later requests."""

    framing: ClassVar[Framing] = "responses"

    def __init__(
        self,
        facts: Facts,
        splitter: AnswerStream,
        told: dict[str, Any],
        names: Names,
        *,
        stream: bool,
        keep: bool,
    ) -> None:
        super().__init__(facts, 1, prefix="resp_")
        self._splitter = splitter
        self._told = told
        self._names = names
        self._stream = stream
        self._keep = keep
        self._items: list[dict[str, Any]] = []  # as they are at their end
        self._text = ""  # of the last one, so far
        self._open = False  # whether the last one may go on
        self._held = 0  # tokens whose text is not told apart yet
        self._number = 0

    def first(self) -> list[dict[str, Any]]:
        if not self._stream:
            return []
        begun = self._response("in_progress")
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
        ]

    def add(self, i: int, piece: Piece) -> list[dict[str, Any]]:
        (tally,) = self._tallies
        reason = piece.finish_reason
        tally.add(piece)
        parts = self._splitter.push(piece.text) if piece.text else []
        if reason is not None:
            parts += self._splitter.finish()
        self._held += len(piece.ids)
        if parts:
            tally.reasoning_tokens += self._held if parts[0].kind == "reasoning" else 0
            self._held = 0
        events = []
        for part in parts:
            events += self._add(part)
        if reason is not None:
            events += self._closed("incomplete" if reason == "length" else "completed")
            if self._keep:
                self._facts.kept.add(self._items)
        return events if self._stream else []

    def end(self) -> list[dict[str, Any]]:
        if not self._stream:
            return []
        whole = self.whole()
        return [self._event(f"response.{whole['status']}", response=whole)]

    def fail(self, error: APIError) -> list[dict[str, Any]]:
        told = {"code": "server_error", "message": error.message}
        return [
            self._event("error", code=error.code, message=error.message, param=error.param),
            self._event("response.failed", response={**self._response("failed"), "error": told}),
        ]

    def whole(self) -> dict[str, Any]:
        piece = self._tallies[0].last
        assert piece is not None
        cut = piece.finish_reason == "length"
        return self._response("incomplete" if cut else "completed")

    def _response(self, status: str) -> dict[str, Any]:
        used = {"usage": self._usage()} if status in ("completed", "incomplete") else {}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._facts.name,
            "output": list(self._items) if status != "in_progress" else [],
            **self._told,
            **used,
        }

    def _usage(self) -> dict[str, Any]:
        counts = usage(self._tallies)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": counts["completion_tokens_details"],
            "total_tokens": counts["total_tokens"],
        }

    def _event(self, type: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": type, "sequence_number": self._number - 1, **fields}

    def _add(self, part: Part) -> list[dict[str, Any]]:
        kind = _KINDS[part.kind]
        events = []
        if part.kind == "call_start" or (part.text and not (self._open and self._items[-1]["type"] == kind)):
            events = [*self._closed(), *self._opened(kind, part)]
        if part.text:
            self._text += part.text
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            events.append(self._event(f"{_EVENTS[kind]}.delta", **self._place(), delta=part.text, **more))
        return events

    def _opened(self, kind: str, part: Part) -> list[dict[str, Any]]:
        id = _PREFIXES[kind] + secrets.token_hex(12)
        item: dict[str, Any] = {"id": id, "type": kind, "status": "in_progress"}
        if kind == "function_call":
            call_id = new_call_id(self._facts.call_ids, part.name, part.index)
            item |= {"call_id": call_id, **self._names.divided(part.name), "arguments": ""}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            item |= {"role": "assistant", "content": []}
        self._items.append(item)
        self._text, self._open = "", True
        index = len(self._items) - 1
        events = [self._event("response.output_item.added", output_index=index, item=dict(item))]
        if kind != "function_call":
            part_of = _part(kind, "")
            events.append(self._event("response.content_part.added", **self._place(), part=part_of))
        return events

    def _closed(self, status: str = "completed") -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open = False
        item, text = self._items[-1], self._text
        kind = item["type"]
        name = "arguments" if kind == "function_call" else "text"
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        if kind == "function_call":
            item["arguments"] = text
            more = {"name": item["name"]}
        else:
            item["content"] = [_part(kind, text)]
        item["status"] = status
        place = self._place()
        events = [self._event(f"{_EVENTS[kind]}.done", **place, **{name: text}, **more)]
        if kind != "function_call":
            events.append(self._event("response.content_part.done", **place, part=_part(kind, text)))
        index = len(self._items) - 1
        return [*events, self._event("response.output_item.done", output_index=index, item=dict(item))]

    def _place(self) -> dict[str, Any]:
        """Where a text belongs."""
        item = self._items[-1]
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        return place if item["type"] == "function_call" else {**place, "content_index": 0}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
