"""``/v1/completions``: the answer."""

from collections.abc import Sequence
from typing import Any

from hotcold.engine.generation import Piece
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.logprobs import Columns, joined
from hotcold.server.protocol.replies import Reply
from hotcold.server.protocol.usage import timings, usage


class _Text:
    """One choice so far."""

    def __init__(self, columns: Columns | None) -> None:
        self.columns = columns
        self.text = ""
        self.logprobs: list[dict[str, Any]] = []
        self.begun = False
        self.echoed = 0  # tokens of the prompt whose log-probabilities have come
        self.finish_reason: str | None = None


class CompletionReply(Reply):
    """See :class:`Reply`. ``prompts`` has the text and the tokens of each job's prompt; ``silent``: the token
    that was generated, because one must be, is not shown."""

    def __init__(
        self,
        facts: Facts,
        prompts: Sequence[tuple[str, Sequence[int]]],
        *,
        n: int,
        echo: bool,
        silent: bool,
        logprobs: bool,
        stream: bool,
        include_usage: bool,
        every_timings: bool = False,
    ) -> None:
        super().__init__(facts, len(prompts), prefix="cmpl-")
        self._prompts = prompts
        self._n = n
        self._echo = echo
        self._silent = silent
        self._stream = stream
        self._include_usage = include_usage
        self._every_timings = every_timings
        self._texts = [_Text(Columns(facts.tokenizer) if logprobs else None) for _ in prompts]

    def add(self, i: int, piece: Piece) -> list[dict[str, Any]]:
        choice, tally = self._texts[i], self._tallies[i]
        reason = piece.finish_reason
        tally.add(piece, silent=self._silent)
        text = "" if self._silent else piece.text
        parts: list[dict[str, Any]] = []
        if not choice.begun:
            choice.begun = True
            text = self._begin(i, choice, text)
        if choice.columns is not None and self._echo:
            parts.append(self._echoed(i, choice, choice.columns, piece))
        if choice.columns is not None and not self._silent:
            parts.append(choice.columns.add(piece.ids, piece.logprobs))
        if reason is not None:
            choice.finish_reason = "length" if self._silent else reason
            parts += self._end_of_text(choice, tally.tokens, piece)
        found = joined(parts) if choice.columns is not None else None
        if not self._stream:
            choice.text += text
            choice.logprobs += [found] if found else []
            return []
        event = self._chunk([self._choice(i, text, found, choice.finish_reason)])
        frame = piece.frame
        if frame is not None:
            event["hotcold"] = frame.plain()
        if self._every_timings or reason is not None:
            event["timings"] = timings([tally], 1, self._facts.sparsity)
        return [event]

    def end(self) -> list[dict[str, Any]]:
        return [{**self._chunk([]), **self._counts()}] if self._stream and self._include_usage else []

    def whole(self) -> dict[str, Any]:
        choices = [
            self._choice(
                i, each.text, None if each.columns is None else joined(each.logprobs), each.finish_reason
            )
            for i, each in enumerate(self._texts)
        ]
        return {**self._head("text_completion"), "choices": choices, **self._counts()}

    def _begin(self, i: int, choice: _Text, text: str) -> str:
        """The prompt before the first text, where it is to be echoed."""
        prompt, ids = self._prompts[i]
        if self._echo:
            return prompt + text
        if choice.columns is not None:
            choice.columns.skip(ids)
        return text

    def _echoed(self, i: int, choice: _Text, columns: Columns, piece: Piece) -> dict[str, Any]:
        """Returns the new part of the prompt's tokens."""
        prompt, ids = self._prompts[i]
        start = choice.echoed
        choice.echoed += len(piece.prompt_logprobs)
        return columns.add(ids[start : choice.echoed], piece.prompt_logprobs, prompt)

    def _end_of_text(self, choice: _Text, tokens: int, piece: Piece) -> list[dict[str, Any]]:
        """Harnesses that echo cut the last entry off, as that of the one token after the prompt. Where that
        was the end of the text, which is no token of the answer, an entry without values stands for it."""
        ended = piece.finish_reason == "stop" and not tokens and not self._silent
        if choice.columns is None or not self._echo or not ended:
            return []
        return [choice.columns.nothing()]

    def _counts(self) -> dict[str, Any]:
        return {
            "usage": usage(self._tallies, self._n),
            "timings": timings(self._tallies, self._n, self._facts.sparsity),
        }

    def _choice(self, i: int, text: str, found: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        return {"index": i, "text": text, "logprobs": found, "finish_reason": reason}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head("text_completion"), "choices": choices}
        if self._include_usage:
            chunk["usage"] = None
        return chunk
