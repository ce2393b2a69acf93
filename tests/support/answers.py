"""Answers as the streams that divide them give them, in pieces of any size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from hotcold.chat.stream import AnswerStream, Part


def parts_of(stream: AnswerStream, pieces: Iterable[str]) -> list[Part]:
    parts = [part for piece in pieces for part in stream.push(piece)] + stream.finish()
    assert stream.finish() == []
    return parts


def read(stream: AnswerStream, pieces: Iterable[str]) -> dict[str, Any]:
    """Everything of one kind together; calls as [name, arguments]."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for part in parts_of(stream, pieces):
        if part.kind == "call_start":
            assert part.index == len(found["calls"])
            found["calls"].append([part.name, ""])
        elif part.kind == "call_arguments":
            found["calls"][part.index][1] += part.text
        else:
            found[part.kind] += part.text
    return found


def steps(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def cut(text: str) -> st.SearchStrategy[list[str]]:
    """The text in up to nine pieces."""
    cuts = st.lists(st.integers(0, len(text)), max_size=8).map(sorted)
    return cuts.map(lambda at: [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)])
