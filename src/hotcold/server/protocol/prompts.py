"""Prompts as text or as token ids."""

from dataclasses import dataclass
from typing import Any

from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.fields import Items, Schema, Whole, refuse
from hotcold.server.protocol.limits import LARGEST

MAX_IDS = 1 << 20  #: limit of one prompt; the engine checks the context


@dataclass(frozen=True)
class Ids:
    """A list of token ids."""

    low: int = 1  #: minimum number of ids

    def read(self, value: Any, param: str) -> list[int]:
        if not isinstance(value, list) or len(value) < self.low:
            refuse(param, value, "a list of token ids is needed")
        if len(value) > MAX_IDS:
            refuse(param, value, f"at most {MAX_IDS} token ids are allowed")
        for i, id in enumerate(value):
            if isinstance(id, bool) or not isinstance(id, int):
                refuse(f"{param}[{i}]", id, "integer token ids are needed")
        return value

    def schema(self) -> Schema:
        return Items(Whole(0, LARGEST), self.low, MAX_IDS).schema()


def check_ids(ids: list[int], vocab: int, param: str) -> None:
    """Raises APIError for an id that is not in the vocabulary."""
    for id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= id < vocab:
            message = f"{param} has token {id}: allowed are the ids 0 to {vocab - 1}"
            raise APIError(message, param=param, code="invalid_value")
