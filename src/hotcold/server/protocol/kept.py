"""The last answers of ``/v1/responses``, in memory: whole responses, and items to which requests refer."""

import json
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

from hotcold.server.protocol.json_parts import json_parts, to_json

MOST_BYTES, MOST = 64 << 20, 1024  #: of responses: bytes of their JSON with that of their input, and number
MOST_ITEM_BYTES, MOST_ITEMS = 8 << 20, 4096


def text_of(value: Any) -> bytes:
    """The JSON text of a value, written in parts, so that a large one holds up no other thread."""
    return b"".join(json_parts(value))


class Kept:
    """JSON texts in UTF-8 by id; the oldest go first. Ids are random, so a client finds no answers to other
    clients. Safe to use from several threads."""

    def __init__(self, most_bytes: int, most: int) -> None:
        self._most_bytes, self._most = most_bytes, most
        self._texts: OrderedDict[str, tuple[bytes, ...]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, id: str, *texts: bytes) -> None:
        """Keeps texts under a new id."""
        with self._lock:
            self._texts[id] = texts
            self._bytes += sum(map(len, texts))
            while self._bytes > self._most_bytes or len(self._texts) > self._most:
                self._forget(next(iter(self._texts)))

    def find(self, id: str) -> tuple[bytes, ...] | None:
        with self._lock:
            return self._texts.get(id)

    def remove(self, id: str) -> bool:
        """Forgets the texts of an id; False where there are none."""
        with self._lock:
            return id in self._texts and self._forget(id)

    def _forget(self, id: str) -> bool:
        self._bytes -= sum(map(len, self._texts.pop(id)))
        return True


class RequestTexts(NamedTuple):
    """JSON texts that are kept with a response. A thread writes them while the request is prepared."""

    input: bytes  #: all items of the conversation before the answer
    told: bytes  #: fields of the request that the response repeats


class KeptResponses(Kept):
    """Responses, each with the whole conversation before it: one goes on though earlier ones are gone."""

    def __init__(self) -> None:
        super().__init__(MOST_BYTES, MOST)

    def keep(self, response: dict[str, Any], request: RequestTexts) -> None:
        """Keeps a response that lacks the fields of ``request.told``, which may be large."""
        self.add(response["id"], to_json(response), *request)

    def response(self, id: str) -> dict[str, Any] | None:
        """The response of this id; None: it is not kept."""
        texts = self.find(id)
        return None if texts is None else {**json.loads(texts[0]), **json.loads(texts[2])}

    def conversation(self, id: str) -> list[dict[str, Any]] | None:
        """The items before a response and its own; None: it is not kept."""
        texts = self.find(id)
        return None if texts is None else [*json.loads(texts[1]), *json.loads(texts[0])["output"]]
