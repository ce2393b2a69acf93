"""The form in which each dialect sends the events of a stream."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hotcold.server.protocol.json_parts import to_json
from hotcold.server.protocol.replies import Framing


@dataclass(frozen=True)
class Frames:
    """The form of events. ``ping`` is sent while a client waits, ``done`` at the end of a stream."""

    content_type: bytes
    event: Callable[[dict[str, Any]], bytes]
    ping: bytes
    done: bytes = b""

    def lines(self, events: Iterable[dict[str, Any]]) -> bytes:
        return b"".join(map(self.event, events))


def _data(event: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % to_json(event)


def _named(event: dict[str, Any]) -> bytes:
    """Returns an event whose name is its ``type``."""
    return b"event: %b\n%b" % (event["type"].encode(), _data(event))


def _line(event: dict[str, Any]) -> bytes:
    return to_json(event) + b"\n"


_EVENTS = b"text/event-stream; charset=utf-8"
_COMMENT = b": ping\n\n"
FRAMES: dict[Framing, Frames] = {
    "openai": Frames(_EVENTS, _data, _COMMENT, b"data: [DONE]\n\n"),
    "llama.cpp": Frames(_EVENTS, _data, _COMMENT),
    "responses": Frames(_EVENTS, _named, _COMMENT),
    "anthropic": Frames(_EVENTS, _named, b""),  # replies have events for waiting clients
    "ollama": Frames(b"application/x-ndjson", _line, b""),  # clients parse every line as an object
}
