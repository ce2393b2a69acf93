"""OpenAI's ``/v1/responses``: the reply."""

import secrets
from typing import Any, ClassVar

from hotcold.chat.stream import AnswerStream
from hotcold.engine.generation import Piece
from hotcold.server.protocol.answers import Block
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.json_parts import to_json
from hotcold.server.protocol.kept import RequestTexts
from hotcold.server.protocol.replies import Event, Framing, Reply
from hotcold.server.protocol.responses_tools import InputText, Names
from hotcold.server.protocol.usage import usage

_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}
#: Kind of an item -> names of its events of text.
_EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
#: Kind of a call -> the field of its text.
_FIELDS = {"function_call": "arguments", "custom_tool_call": "input"}


class ResponsesReply(Reply):
    """The reply with one answer; see :class:`Reply`. ``told`` are fields of the request that the response
    repeats, ``names`` the names of its functions. ``kept`` is stored with the response; None: it is not
    stored."""

    prefix: ClassVar[str] = "resp_"
    framing: ClassVar[Framing] = "responses"

    def __init__(
        self,
        facts: Facts,
        splitter: AnswerStream,
        repeated: dict[str, Any],
        names: Names,
        *,
        kept: RequestTexts | None,
    ) -> None:
        super().__init__(facts, [splitter])
        self._repeated = repeated
        self._names = names
        self._kept = kept
        self._items: list[dict[str, Any]] = []  # final items, one for each block
        self._input = InputText()  # input of the last block, if it is a call of a custom tool
        self._number = 0

    def first(self) -> list[Event]:
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def waiting(self) -> list[Event]:
        """Returns an event: Codex gives up after five minutes without one, and comments do not count."""
        return [self._event("response.in_progress", response=self._response("in_progress"))]

    def end(self) -> list[Event]:
        response = self.whole()
        return [self._event(f"response.{response['status']}", response=response)]

    def fail(self, error: APIError) -> list[Event]:
        details = {"code": "server_error", "message": error.message}
        return [
            self._event("error", code=error.code, message=error.message, param=error.param),
            self._event("response.failed", response={**self._response("failed"), "error": details}),
        ]

    def whole(self) -> dict[str, Any]:
        return self._response(_status(self._answers[0].finish_reason == "length"))

    def _piece(self, i: int, piece: Piece, events: list[Event]) -> list[Event]:
        if piece.finish_reason is not None and self._kept is not None:
            for item in self._items:
                self._facts.kept_items.add(item["id"], to_json(item))
            response = self._response(_status(piece.finish_reason == "length"))
            kept = {name: value for name, value in response.items() if name not in self._repeated}
            self._facts.kept_responses.keep(kept, self._kept)
        return events

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
            **self._repeated,
            **used,
        }

    def _usage(self) -> dict[str, Any]:
        counts = usage(self._answers)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": counts["completion_tokens_details"],
            "total_tokens": counts["total_tokens"],
        }

    def _event(self, type: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": type, "sequence_number": self._number - 1, **fields}

    def _opened(self, i: int, block: Block) -> list[Event]:
        kind = self._kind(block)
        item: dict[str, Any] = {
            "id": _PREFIXES[kind] + secrets.token_hex(12),
            "type": kind,
            "status": "in_progress",
        }
        if block.kind == "call":
            item |= {"call_id": block.id, **self._names.divided(block.name), _FIELDS[kind]: ""}
            self._input = InputText()
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            item |= {"role": "assistant", "content": []}
        self._items.append(item)
        events = [self._item_event("added")]
        if block.kind != "call":
            part = _part(block, "")
            events.append(self._event("response.content_part.added", **self._place(), part=part))
        return events

    def _text(self, i: int, block: Block, text: str) -> list[Event]:
        kind = self._kind(block)
        if kind == "custom_tool_call":
            text = self._input.push(text)
        extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        delta = {**self._place(), "delta": text, **extra}
        return [self._event(f"{_EVENTS[kind]}.delta", **delta)] if text else []

    def _closed(self, i: int, block: Block, cut: bool) -> list[Event]:
        item, kind = self._items[-1], self._kind(block)
        text = self._input.text if kind == "custom_tool_call" else block.text
        name = _FIELDS.get(kind, "text")
        extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        if block.kind == "call":
            item[name] = text
            extra = {"name": item["name"]} if kind == "function_call" else {}
        else:
            item["content"] = [_part(block, text)]
        item["status"] = _status(cut)
        place = self._place()
        events = [self._event(f"{_EVENTS[kind]}.done", **place, **{name: text}, **extra)]
        if block.kind != "call":
            events.append(self._event("response.content_part.done", **place, part=_part(block, text)))
        return [*events, self._item_event("done")]

    def _kind(self, block: Block) -> str:
        """Returns the type of a block's item."""
        if block.kind == "call":
            return "custom_tool_call" if self._names.is_custom(block.name) else "function_call"
        return "reasoning" if block.kind == "reasoning" else "message"

    def _item_event(self, happened: str) -> Event:
        index = len(self._items) - 1
        return self._event(f"response.output_item.{happened}", output_index=index, item=dict(self._items[-1]))

    def _place(self) -> dict[str, Any]:
        """Returns the fields that locate a text."""
        item = self._items[-1]
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        return place if item["type"] in _FIELDS else {**place, "content_index": 0}


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(cut: bool) -> str:
    return "incomplete" if cut else "completed"
