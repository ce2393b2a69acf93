"""Log-probabilities in the forms of OpenAI's two routes."""

from collections.abc import Sequence
from typing import Any

from hotcold.engine.sampler import Logprobs
from hotcold.server.protocol.fields import finite
from hotcold.tokenizer.tokenizer import Tokenizer


def of_chat(tokenizer: Tokenizer, ids: Sequence[int], entries: Sequence[Logprobs]) -> list[dict[str, Any]]:
    """Returns the field ``choices[].logprobs.content`` of the chat route."""
    return [
        {
            **_token(tokenizer, id, entry.logprob),
            "top_logprobs": [_token(tokenizer, other_id, value) for other_id, value in entry.top],
        }
        for id, entry in zip(ids, entries, strict=True)
    ]


def _token(tokenizer: Tokenizer, id: int, logprob: float) -> dict[str, Any]:
    piece = tokenizer.piece(id)
    return {"token": piece.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(piece)}


def name(piece: bytes) -> str:
    r"""Returns a token of the completion route: its text, or ``bytes:\xe2\x82`` for a part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def empty() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


class Columns:
    """The field ``choices[].logprobs`` of the completion route: four lists with an entry for each token.

    ``text_offset`` counts the characters before a token in the decoded text. Of several tokens with the same
    text, ``top_logprobs`` has the likeliest."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.stream_decoder()
        self._offset = 0

    def skip(self, ids: Sequence[int]) -> None:
        """Skips tokens before the shown text."""
        for id in ids:
            self._decoder.push(id)

    def add(self, ids: Sequence[int], entries: Sequence[Logprobs | None], text: str = "") -> dict[str, Any]:
        """Returns the entries of the next tokens; None for the first token of a prompt. ``text`` is the
        tokens' source, if known: it has the names of control tokens, which decoded text lacks."""
        columns = empty()
        for id, entry in zip(ids, entries, strict=True):
            piece = self._tokenizer.piece(id)
            token = name(piece)
            columns["tokens"].append(token)
            columns["text_offset"].append(self._offset)
            columns["token_logprobs"].append(None if entry is None else finite(entry.logprob))
            columns["top_logprobs"].append(None if entry is None else self._top(token, entry))
            decoded = self._decoder.push(id)
            named = not decoded and token and text.startswith(token, self._offset)
            self._offset += len(token) if named else len(decoded)
        return columns

    def nothing(self) -> dict[str, Any]:
        """Returns the entry of the end of a text, which is no token."""
        return {
            "tokens": [""],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._offset],
        }

    def _top(self, token: str, entry: Logprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for id, value in entry.top:
            top.setdefault(name(self._tokenizer.piece(id)), finite(value))
        top.setdefault(token, finite(entry.logprob))
        return top


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Joins the results of several calls of :meth:`Columns.add`."""
    columns = empty()
    for part in parts:
        for key, values in columns.items():
            values += part[key]
    return columns
