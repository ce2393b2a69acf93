"""OpenAI's ``/v1/completions``: the reply."""

from collections.abc import Sequence
from typing import Any, ClassVar

from hotcold.engine.generation import Piece
from hotcold.server.protocol.answers import Answer
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.logprobs import Columns, joined
from hotcold.server.protocol.openai_reply import OpenAIReply
from hotcold.server.protocol.replies import Event


class _Scores:
    """The log-probabilities of one choice: of its answer, and with ``echo`` of its prompt."""

    def __init__(self, columns: Columns, prompt: str, ids: Sequence[int], echo: bool) -> None:
        self._columns, self._prompt, self._echo = columns, prompt, echo
        self._left = list(ids)  # tokens of the prompt whose log-probabilities are still missing
        self.parts: list[dict[str, Any]] = []
        if not echo:
            columns.skip(ids)

    def add(self, piece: Piece, answer: Answer) -> dict[str, Any]:
        """Returns the entries of a piece, which was already added to the answer."""
        parts = []
        if self._echo:
            n = len(piece.prompt_logprobs)
            parts.append(self._columns.add(self._left[:n], piece.prompt_logprobs, self._prompt))
            del self._left[:n]
        if not answer.silent:
            parts.append(self._columns.add(piece.ids, piece.logprobs))
        # Evaluation harnesses that echo cut off the last entry, as the entry of the one token after the
        # prompt. If the text ends there, an entry without values replaces that token.
        if self._echo and piece.finish_reason == "stop" and not answer.tokens and not answer.silent:
            parts.append(self._columns.nothing())
        self.parts.append(joined(parts))
        return self.parts[-1]


class CompletionReply(OpenAIReply):
    """The reply of completions; see :class:`Reply`. ``prompts`` has the text and the tokens of each job's
    prompt. ``silent`` hides the generated token, since the engine generates at least one."""

    prefix: ClassVar[str] = "cmpl-"
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    def __init__(
        self,
        facts: Facts,
        prompts: Sequence[tuple[str, Sequence[int]]],
        *,
        n: int,
        echo: bool,
        silent: bool,
        logprobs: bool,
        include_usage: bool,
        every_timings: bool = False,
    ) -> None:
        super().__init__(
            facts,
            [None] * len(prompts),
            n=n,
            include_usage=include_usage,
            every_timings=every_timings,
            silent=silent,
        )
        self._echoed = [text if echo else "" for text, _ in prompts]
        self._begun = [False] * len(prompts)
        self._scores: list[_Scores] | None = None
        if logprobs:
            columns = [Columns(facts.tokenizer) for _ in prompts]
            self._scores = [
                _Scores(column, *prompt, echo) for column, prompt in zip(columns, prompts, strict=True)
            ]

    def _piece(self, i: int, piece: Piece, events: list[Event]) -> list[Event]:
        """Returns one event for each piece, even without text."""
        answer = self._answers[i]
        text = "" if answer.silent else piece.text
        if not self._begun[i]:
            text, self._begun[i] = self._echoed[i] + text, True
        logprobs = None if self._scores is None else self._scores[i].add(piece, answer)
        events = [self._chunk([self._shown(i, text, logprobs)])]
        self._decorate(i, piece, events)
        return events

    def _choice(self, i: int) -> dict[str, Any]:
        logprobs = None if self._scores is None else joined(self._scores[i].parts)
        return self._shown(i, self._echoed[i] + self._answers[i].text(), logprobs)

    def _shown(self, i: int, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        answer = self._answers[i]
        reason = answer.finish_reason and ("length" if answer.silent else answer.finish_reason)
        return {"index": i, "text": text, "logprobs": logprobs, "finish_reason": reason}
