"""Writes plain data as JSON: at once, or in parts, so that a large value delays no other thread."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

_PART = 1 << 15  # characters of JSON that one call writes while other threads wait
_PLAIN = 8  # assumed characters of a number, a boolean or null


def to_json(content: Any) -> bytes:
    """Returns compact JSON. A lone surrogate, which UTF-8 cannot hold, is escaped."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class LongText:
    """A text for :func:`json_parts`, generated while it is written."""

    def __init__(self, parts: Iterable[str]) -> None:
        self.parts = parts


def json_parts(value: Any) -> Iterator[bytes]:
    """Returns the JSON of :func:`to_json` in parts that take a few milliseconds each. Iterators become lists,
    and :class:`LongText` a string."""
    if not is_large(value):
        yield to_json(value)
    elif isinstance(value, str | LongText):
        yield b'"'
        for text in value.parts if isinstance(value, LongText) else [value]:
            yield from (to_json(text[at : at + _PART])[1:-1] for at in range(0, len(text), _PART))
        yield b'"'
    elif isinstance(value, dict):
        before = b"{"
        for name, item in value.items():
            yield before + to_json(name) + b":"
            yield from json_parts(item)
            before = b","
        yield b"}"
    else:
        yield b"["
        before = b""
        for values in _runs(value):
            yield before
            yield from (to_json(values)[1:-1],) if len(values) > 1 else json_parts(values[0])
            before = b","
        yield b"]"


def _runs(values: Iterable[Any]) -> Iterator[list[Any]]:
    """Groups the values of a list: each group is small, or has one large value."""
    run: list[Any] = []
    total = 0
    for item in values:
        size = _size(item)
        if run and total + size > _PART:
            yield run
            run, total = [], 0
        run.append(item)
        total += size
    if run:
        yield run


def is_large(value: Any) -> bool:
    """Returns whether writing a value as JSON would delay other threads noticeably."""
    return _size(value) > _PART


def _size(value: Any) -> int:
    """Returns about the number of characters in a value's JSON, or a number above :data:`_PART`."""
    total, values = 0, [value]
    while values and total <= _PART:
        item = values.pop()
        total += len(item) if isinstance(item, str) else _PLAIN
        if isinstance(item, dict):
            total += sum(map(len, item)) if len(item) <= _PART else _PART
            values.extend(item.values() if total <= _PART else ())
        elif isinstance(item, list | tuple):
            total += len(item)
            values.extend(item if total <= _PART else ())
        elif isinstance(item, Iterator | LongText):
            return _PART + 1
    return total
