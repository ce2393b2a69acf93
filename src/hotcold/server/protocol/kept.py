"""The newest answers of ``/v1/responses``, in memory: whole responses, and items that requests refer to."""

import json
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

from hotcold.server.protocol.json_parts import json_parts, to_json

#: limits of stored responses: bytes of their JSON including the input, and their number
MOST_BYTES, MOST = 64 << 20, 1024
MOST_ITEM_BYTES, MOST_ITEMS = 8 << 20, 4096


def text_of(value: Any) -> bytes:
    """Returns the JSON of a value. It is written in parts, so that a large value delays no other thread."""
    return b"".join(json_parts(value))


class Kept:
    """JSON texts in UTF-8 by id; the oldest are removed first. Ids are random, so a client cannot find other
    clients' answers. Several threads may use it."""

    def __init__(self, most_bytes: int, most: int) -> None:
        self._most_bytes, self._most = most_bytes, most
        self._texts: OrderedDict[str, tuple[bytes, ...]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, id: str, *texts: bytes) -> None:
        """Stores texts under a new id."""
        with self._lock:
            self._texts[id] = texts
            self._bytes += sum(map(len, texts))
            while self._bytes > self._most_bytes or len(self._texts) > self._most:
                self._forget(next(iter(self._texts)))

    def find(self, id: str) -> tuple[bytes, ...] | None:
        with self._lock:
            return self._texts.get(id)

    def remove(self, id: str) -> bool:
        """Removes the texts of an id; False if there are none."""
        with self._lock:
            return id in self._texts and self._forget(id)

    def _forget(self, id: str) -> bool:
        self._bytes -= sum(map(len, self._texts.pop(id)))
        return True


class RequestTexts(NamedTuple):
    """JSON texts that are stored with a response. A thread writes them while it prepares the request."""

    input: bytes  #: all items of the conversation before the answer
    repeated: bytes  #: fields of the request that the response repeats


class KeptResponses(Kept):
    """Responses, each with the whole conversation before it, so that one outlives the earlier ones."""

    def __init__(self) -> None:
        super().__init__(MOST_BYTES, MOST)

    def keep(self, response: dict[str, Any], request: RequestTexts) -> None:
        """Stores a response without the fields of ``request.repeated``, which may be large."""
        self.add(response["id"], to_json(response), *request)

    def response(self, id: str) -> dict[str, Any] | None:
        """Returns the response of an id; None if it is not stored."""
        texts = self.find(id)
        return None if texts is None else {**json.loads(texts[0]), **json.loads(texts[2])}

    def conversation(self, id: str) -> list[dict[str, Any]] | None:
        """Returns the items before a response and its own items; None if it is not stored."""
        texts = self.find(id)
        return None if texts is None else [*json.loads(texts[1]), *json.loads(texts[0])["output"]]
