"""Log-probabilities in OpenAI's two forms."""

from collections.abc import Sequence
from typing import Any

from hotcold.engine.sampler import Logprobs
from hotcold.server.protocol.fields import finite
from hotcold.tokenizer.tokenizer import Tokenizer


def of_chat(tokenizer: Tokenizer, ids: Sequence[int], found: Sequence[Logprobs]) -> list[dict[str, Any]]:
    """The field ``choices[].logprobs.content`` of the chat route."""
    return [
        {
            **_token(tokenizer, id, each.logprob),
            "top_logprobs": [_token(tokenizer, other, value) for other, value in each.top],
        }
        for id, each in zip(ids, found, strict=True)
    ]


def _token(tokenizer: Tokenizer, id: int, logprob: float) -> dict[str, Any]:
    piece = tokenizer.piece(id)
    return {"token": piece.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(piece)}


def name(piece: bytes) -> str:
    r"""A token of the completion route: its text, or ``bytes:\xe2\x82`` where it is a part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def empty() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


class Columns:
    """The field ``choices[].logprobs`` of the completion route: four lists with an entry for each token.

    ``text_offset`` counts the characters before a token in the text that the tokens decode to. Among tokens
    with the same text, ``top_logprobs`` has the likeliest."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.stream_decoder()
        self._offset = 0

    def skip(self, ids: Sequence[int]) -> None:
        """Skips tokens that come before the shown text."""
        for id in ids:
            self._decoder.push(id)

    def add(self, ids: Sequence[int], found: Sequence[Logprobs | None], text: str = "") -> dict[str, Any]:
        """The entries of the next tokens; None for a token that follows nothing. ``text`` is the text of
        which they were made, if known: it has the names of control tokens, which decoded text does not
        have."""
        columns = empty()
        for id, each in zip(ids, found, strict=True):
            piece = self._tokenizer.piece(id)
            own = name(piece)
            columns["tokens"].append(own)
            columns["text_offset"].append(self._offset)
            columns["token_logprobs"].append(None if each is None else finite(each.logprob))
            columns["top_logprobs"].append(None if each is None else self._top(own, each))
            decoded = self._decoder.push(id)
            named = not decoded and own and text.startswith(own, self._offset)
            self._offset += len(own) if named else len(decoded)
        return columns

    def nothing(self) -> dict[str, Any]:
        """The entry of the end of a text, which is no token."""
        return {
            "tokens": [""],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._offset],
        }

    def _top(self, own: str, found: Logprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for id, value in found.top:
            top.setdefault(name(self._tokenizer.piece(id)), finite(value))
        top.setdefault(own, finite(found.logprob))
        return top


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The results of several calls of :meth:`Columns.add` as one."""
    columns = empty()
    for part in parts:
        for key, values in columns.items():
            values += part[key]
    return columns
