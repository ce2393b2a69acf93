"""Items of the last answers of ``/v1/responses``, to which later requests may refer."""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from hotcold.server.protocol.errors import invalid
from hotcold.values import shown

MOST_BYTES = 8 << 20  #: of their JSON
MOST_ITEMS = 4096


class KeptItems:
    """The oldest ones go first. Their ids are random, so nobody finds those of others. Safe to use from
    several threads."""

    def __init__(self) -> None:
        self._items: OrderedDict[str, str] = OrderedDict()  # JSON, by id
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, items: Iterable[dict[str, Any]]) -> None:
        """Keeps items with ids that are new."""
        for item in items:
            text = json.dumps(item)
            with self._lock:
                self._items[item["id"]] = text
                self._bytes += len(text)
                while self._bytes > MOST_BYTES or len(self._items) > MOST_ITEMS:
                    self._bytes -= len(self._items.popitem(last=False)[1])

    def find(self, id: str, param: str) -> Any:
        """The item of this id. APIError: there is none."""
        with self._lock:
            text = self._items.get(id)
        if text is None:
            told = f"{param} is {shown(id)}, which is not among the last items that are kept here"
            raise invalid(f"{told}: send the item itself, as clients do with store false", param)
        return json.loads(text)
