"""OpenAI's ``/v1/responses``: the answer."""

import secrets
from typing import Any, ClassVar

from hotcold.chat.call_ids import new_call_id
from hotcold.chat.stream import AnswerStream, Part
from hotcold.engine.generation import Piece
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.json_parts import to_json
from hotcold.server.protocol.kept import RequestTexts
from hotcold.server.protocol.replies import Framing, Reply
from hotcold.server.protocol.responses_tools import InputText, Names
from hotcold.server.protocol.usage import usage

_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}
#: The kind of an item -> the names of its events of text.
_EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
#: The kind of a call -> the field that has its text.
_FIELDS = {"function_call": "arguments", "custom_tool_call": "input"}


class ResponsesReply(Reply):
    """See :class:`Reply`; of one job. ``told`` are fields of the request that the response repeats, ``names``
    those of its functions; ``kept`` is kept with the response for later requests, which None forbids."""

    framing: ClassVar[Framing] = "responses"

    def __init__(
        self,
        facts: Facts,
        splitter: AnswerStream,
        told: dict[str, Any],
        names: Names,
        *,
        stream: bool,
        kept: RequestTexts | None,
    ) -> None:
        super().__init__(facts, 1, prefix="resp_")
        self._splitter = splitter
        self._told = told
        self._names = names
        self._stream = stream
        self._kept = kept
        self._items: list[dict[str, Any]] = []  # as they are at their end
        self._text = ""  # of the last one, so far
        self._input = InputText()  # of the last one, where it is a call of a custom tool
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

    def waiting(self) -> list[dict[str, Any]]:
        """Codex gives up after five minutes without an event; comments are none to it."""
        return [self._event("response.in_progress", response=self._response("in_progress"))]

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
            status = "incomplete" if reason == "length" else "completed"
            events += self._closed(status)
            if self._kept is not None:
                self._keep(self._kept, status)
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

    def _keep(self, request: RequestTexts, status: str) -> None:
        for item in self._items:
            self._facts.kept_items.add(item["id"], to_json(item))
        whole = self._response(status).items()
        own = {name: value for name, value in whole if name not in self._told}
        self._facts.kept_responses.keep(own, request)

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
        kind = self._kind(part)
        events = []
        if part.kind == "call_start" or (part.text and not (self._open and self._items[-1]["type"] == kind)):
            events = [*self._closed(), *self._opened(kind, part)]
        text = self._input.push(part.text) if kind == "custom_tool_call" else part.text
        if text:
            self._text += text
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            events.append(self._event(f"{_EVENTS[kind]}.delta", **self._place(), delta=text, **more))
        return events

    def _kind(self, part: Part) -> str:
        """The type of the item that a part belongs to."""
        if part.kind == "call_start":
            return "custom_tool_call" if self._names.is_custom(part.name) else "function_call"
        if part.kind == "call_arguments":
            return str(self._items[-1]["type"])
        return "reasoning" if part.kind == "reasoning" else "message"

    def _opened(self, kind: str, part: Part) -> list[dict[str, Any]]:
        id = _PREFIXES[kind] + secrets.token_hex(12)
        item: dict[str, Any] = {"id": id, "type": kind, "status": "in_progress"}
        if kind in _FIELDS:
            call_id = new_call_id(self._facts.call_ids, part.name, part.index)
            item |= {"call_id": call_id, **self._names.divided(part.name), _FIELDS[kind]: ""}
            self._input = InputText()
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            item |= {"role": "assistant", "content": []}
        self._items.append(item)
        self._text, self._open = "", True
        index = len(self._items) - 1
        events = [self._event("response.output_item.added", output_index=index, item=dict(item))]
        if kind not in _FIELDS:
            part_of = _part(kind, "")
            events.append(self._event("response.content_part.added", **self._place(), part=part_of))
        return events

    def _closed(self, status: str = "completed") -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open = False
        item, text = self._items[-1], self._text
        kind = item["type"]
        name = _FIELDS.get(kind, "text")
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        if kind in _FIELDS:
            item[name] = text
            more = {"name": item["name"]} if kind == "function_call" else {}
        else:
            item["content"] = [_part(kind, text)]
        item["status"] = status
        place = self._place()
        events = [self._event(f"{_EVENTS[kind]}.done", **place, **{name: text}, **more)]
        if kind not in _FIELDS:
            events.append(self._event("response.content_part.done", **place, part=_part(kind, text)))
        index = len(self._items) - 1
        return [*events, self._event("response.output_item.done", output_index=index, item=dict(item))]

    def _place(self) -> dict[str, Any]:
        """Where a text belongs."""
        item = self._items[-1]
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        return place if item["type"] in _FIELDS else {**place, "content_index": 0}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
