"""Writes plain data as JSON: at once, or in parts, so that a large value holds up no other thread."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

_PART = 1 << 15  # characters of JSON that one call writes: other threads wait until it returns
_PLAIN = 8  # characters of a value that is no string


def to_json(content: Any) -> bytes:
    """Compact JSON. Half a character of a pair, which UTF-8 cannot hold, is written as an escape."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class LongText:
    """A text for :func:`json_parts` that is made while it is written."""

    def __init__(self, parts: Iterable[str]) -> None:
        self.parts = parts


def json_parts(value: Any) -> Iterator[bytes]:
    """The JSON of :func:`to_json` in parts, each of which takes a few milliseconds. Iterators are lists, and
    :class:`LongText` is a string."""
    if not is_large(value):
        yield to_json(value)
    elif isinstance(value, str | LongText):
        yield b'"'
        for text in value.parts if isinstance(value, LongText) else [value]:
            yield from (to_json(text[at : at + _PART])[1:-1] for at in range(0, len(text), _PART))
        yield b'"'
    elif isinstance(value, dict):
        before = b"{"
        for name, each in value.items():
            yield before + to_json(name) + b":"
            yield from json_parts(each)
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
    """The values of a list, so many at a time that they are not large together; a large one alone."""
    run: list[Any] = []
    total = 0
    for each in values:
        size = _size(each)
        if run and total + size > _PART:
            yield run
            run, total = [], 0
        run.append(each)
        total += size
    if run:
        yield run


def is_large(value: Any) -> bool:
    """True if writing a value as JSON takes so long that others would notice."""
    return _size(value) > _PART


def _size(value: Any) -> int:
    """About the characters of a value's JSON, or a number above :data:`_PART`."""
    total, values = 0, [value]
    while values and total <= _PART:
        each = values.pop()
        total += len(each) if isinstance(each, str) else _PLAIN
        if isinstance(each, dict):
            total += sum(map(len, each)) if len(each) <= _PART else _PART
            values.extend(each.values() if total <= _PART else ())
        elif isinstance(each, list | tuple):
            total += len(each)
            values.extend(each if total <= _PART else ())
        elif isinstance(each, Iterator | LongText):
            return _PART + 1
    return total
