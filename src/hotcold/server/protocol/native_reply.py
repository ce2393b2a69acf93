"""llama.cpp's own ``/completion``: the reply."""

from collections.abc import Sequence
from typing import Any, ClassVar

from hotcold.engine.generation import Piece
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.fields import finite
from hotcold.server.protocol.replies import Event, Framing, Reply
from hotcold.server.protocol.usage import timings

_MISSING = object()


class NativeReply(Reply):
    """The reply with one answer; see :class:`Reply`. ``prompt`` is the prompt's text."""

    prefix: ClassVar[str] = "cmpl-"
    framing: ClassVar[Framing] = "llama.cpp"

    def __init__(
        self,
        facts: Facts,
        prompt: str,
        settings: dict[str, Any],
        *,
        silent: bool,
        logprobs: bool,
        return_tokens: bool,
        every_timings: bool,
        fields: Sequence[str],
    ) -> None:
        super().__init__(facts, [None], silent=silent)
        self._prompt = prompt
        self._settings = settings
        self._logprobs = logprobs
        self._return_tokens = return_tokens
        self._every_timings = every_timings
        self._fields = fields
        self._tokens: list[int] = []
        self._probabilities: list[dict[str, Any]] = []

    def _piece(self, i: int, piece: Piece, events: list[Event]) -> list[Event]:
        (answer,) = self._answers
        text, ids = ("", ()) if answer.silent else (piece.text, piece.ids)
        probabilities = self._token_probabilities(piece) if self._logprobs and not answer.silent else []
        self._tokens += ids
        self._probabilities += probabilities
        if not text and not ids:
            return []
        event: Event = {
            "index": 0,
            "content": text,
            "tokens": list(ids),
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": answer.tokens,
            "tokens_evaluated": piece.prompt_tokens,
        }
        if self._logprobs:
            event["completion_probabilities"] = probabilities
        if self._every_timings:
            event["timings"] = timings([answer], 1, self._facts.sparsity)
        return [event]

    def end(self) -> list[Event]:
        return [self._selected({**self._last(), "content": "", "tokens": []})]

    def whole(self) -> dict[str, Any]:
        reply = {
            **self._last(),
            "content": self._answers[0].text(),
            "tokens": self._tokens if self._return_tokens else [],
        }
        if self._logprobs:
            reply["completion_probabilities"] = self._probabilities
        return self._selected(reply)

    def _selected(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Returns the requested fields, as llama.cpp's server does: names are paths, absent fields left
        out."""
        if not self._fields:
            return reply
        chosen: dict[str, Any] = {}
        for path in self._fields:
            value: Any = reply
            for name in path.split("/"):
                value = value[name] if isinstance(value, dict) and name in value else _MISSING
            if value is not _MISSING:
                chosen[path] = value
        return chosen

    def _last(self) -> dict[str, Any]:
        (answer,) = self._answers
        piece = answer.last
        assert piece is not None
        return {
            "index": 0,
            "id_slot": -1,
            "stop": True,
            "model": self._facts.name,
            "tokens_predicted": answer.tokens,
            "tokens_evaluated": piece.prompt_tokens,
            "tokens_cached": piece.prompt_tokens + answer.tokens,
            "generation_settings": {**self._settings, "seed": piece.seed},
            "prompt": self._prompt,
            "has_new_line": "\n" in answer.text(),
            "truncated": False,
            "stop_type": _stop_type(piece, answer.silent),
            "stopping_word": piece.stop or "",
            "timings": timings([answer], 1, self._facts.sparsity),
        }

    def _token_probabilities(self, piece: Piece) -> list[dict[str, Any]]:
        return [
            {
                **self._token(id, entry.logprob),
                "top_logprobs": [self._token(other, value) for other, value in entry.top],
            }
            for id, entry in zip(piece.ids, piece.logprobs, strict=True)
        ]

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        piece = self._facts.tokenizer.piece(id)
        return {
            "id": id,
            "token": piece.decode(errors="replace"),
            "bytes": list(piece),
            "logprob": finite(logprob),
        }


def _stop_type(piece: Piece, silent: bool) -> str:
    if piece.stop is not None and not silent:
        return "word"
    return "limit" if piece.finish_reason == "length" or silent else "eos"
