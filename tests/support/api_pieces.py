"""Pieces of answers as an engine would give them, and what the protocol knows of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from support.built_in import tokenizer

from hotcold.chat.tool_formats import HERMES
from hotcold.demo import model_path
from hotcold.engine.generation import Piece
from hotcold.engine.request import Timings
from hotcold.engine.sampler import Logprobs
from hotcold.formats.gguf import open_gguf
from hotcold.server.protocol.facts import Facts
from hotcold.tokenizer.tokenizer import Tokenizer


@cache
def filling() -> Tokenizer:
    """The same with tokens around texts to fill in."""
    marks = {f"tokenizer.ggml.fim_{kind}_token_id": 400 + i for i, kind in enumerate(("pre", "suf", "mid"))}
    with open_gguf(model_path()) as file:
        return Tokenizer.from_metadata({**file.metadata, **marks})


def facts(**changes: Any) -> Facts:
    known = Facts(
        name="fable",
        tokenizer=tokenizer(),
        aliases=("gpt-4o",),
        context=512,
        slots=4,
        created=1_700_000_000,
        params=7_000_000,
        size_bytes=8_000_000,
        fingerprint="hotcold-test",
        tool_format=HERMES,
        sparsity="exact",
    )
    return replace(known, **changes)


def piece(text: str, ids: Sequence[int] = (), finish_reason: str | None = None, **changes: Any) -> Piece:
    known: dict[str, Any] = {
        "text": text,
        "ids": tuple(ids),
        "logprobs": (),
        "finish_reason": finish_reason,
        "stop": None,
        "context_full": False,
        "prompt_tokens": 9,
        "seed": 5,
        "timings": Timings(added=10.0, first_token=10.5, finished=12.5 if finish_reason else None),
    }
    return Piece(**{**known, **changes})


def likely(id: int, logprob: float = -0.25, top: int = 2) -> Logprobs:
    """The token was the likeliest; the ids after it come next."""
    others = [((id + i) % tokenizer().vocab_size, logprob - i) for i in range(top)]
    return Logprobs(logprob, tuple(others))


@dataclass(frozen=True)
class Part:
    kind: str
    text: str = ""
    index: int = 0
    name: str = ""


class Marked:
    """A made-up way of writing: ``<`` begins what was thought and ``>`` ends it, ``[name`` begins a call
    up to a space, ``]`` ends it. Nothing is held back."""

    def __init__(self) -> None:
        self._kind = "content"
        self._name = ""
        self._calls = 0

    def push(self, text: str) -> list[Part]:
        return list(self._parts(text))

    def finish(self) -> list[Part]:
        return []

    def _parts(self, text: str) -> Iterable[Part]:
        for character in text:
            if character in "<>[]":
                self._kind = {"<": "reasoning", "[": "name"}.get(character, "content")
            elif self._kind == "name" and character == " ":
                yield Part("call_start", "", self._calls, self._name)
                self._calls += 1
                self._name, self._kind = "", "call_arguments"
            elif self._kind == "name":
                self._name += character
            else:
                yield Part(self._kind, character, max(self._calls - 1, 0))


def pieces_of(text: str, size: int = 3, reason: str = "stop", **changes: Any) -> list[Piece]:
    """A text cut after every ``size`` characters, a token each, and an empty last piece."""
    cut = [text[i : i + size] for i in range(0, len(text), size)]
    return [piece(each, [100 + i], **changes) for i, each in enumerate(cut)] + [piece("", [], reason)]
