"""A request's text and how it ended, piece by piece or as a whole."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from hotcold.engine.engine import Engine
from hotcold.engine.request import FinishReason, Request, Timings
from hotcold.engine.sampler import Logprobs
from hotcold.engine.text import TextStream
from hotcold.watch.live import Frame, Viewer

SCORED_TOKENS = 256  #: of a prompt, whose log-probabilities make a piece of their own


@dataclass(frozen=True)
class Piece:
    """New text of a continuation, with its tokens; ``str()`` gives the text. All but the last piece have some
    text, or some ``prompt_logprobs``."""

    text: str
    ids: tuple[int, ...]  #: since the piece before; their text may come later, where a part is held back
    logprobs: tuple[Logprobs, ...]  #: of these ids, if asked for
    finish_reason: FinishReason | None  #: of the last piece; None before
    stop: str | None  #: the stop string that ended the text, which is no part of it
    context_full: bool  #: whether the end of the context is what stopped it
    prompt_tokens: int  #: BOS included
    seed: int  #: gives this text again
    timings: Timings  #: up to now
    reused: int = 0  #: tokens of the prompt that were not computed, since another request had them
    #: of the next tokens of the prompt, the first of which has none, of a request with ``echo``; the first
    #: text has the last of them
    prompt_logprobs: tuple[Logprobs | None, ...] = ()
    guessed: int = 0  #: tokens so far that were guessed and verified
    accepted: int = 0  #: of those, the ones that were right
    frame: Frame | None = None  #: which neurons fired, of a request with a viewer
    vector: tuple[float, ...] | None = None  #: of the last piece of a job with a pooling

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Generation:
    """A finished continuation; ``str()`` gives its text."""

    text: str  #: the continuation alone, without the prompt and without a stop string
    #: its token ids, without one that ended the text; the one that completed a stop string is the last
    ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]  #: of these ids, if asked for
    finish_reason: FinishReason
    stop: str | None  #: the stop string that ended the text
    context_full: bool  #: whether the end of the context is what stopped it
    prompt_tokens: int  #: BOS included
    seed: int  #: gives this text again
    timings: Timings
    error: Exception | None = None  #: where the reason is ``error``: why; the text is what came before it
    reused: int = 0  #: tokens of the prompt that were not computed, since another request had them
    prompt_logprobs: tuple[Logprobs | None, ...] = ()  #: of the prompt's tokens, with ``echo``
    guessed: int = 0  #: tokens that were guessed and verified
    accepted: int = 0  #: of those, the ones that were right

    def __str__(self) -> str:
        return self.text


class Continuation:
    """A request and the text of its tokens, which may end it: see :class:`TextStream` for stop strings."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.request = request
        self._engine = engine
        job = request.job
        self._text = TextStream(engine.model.tokenizer, job.prompt, job.stop, job.shown, job.thought)
        self._pushed = 0  # tokens whose text was taken; none follows a stop string
        self._told = 0  # tokens of the pieces so far
        self._scored = 0  # tokens of the prompt whose log-probabilities pieces had
        self._ended = False

    @property
    def finished(self) -> bool:
        """Whether the last piece was taken."""
        return self._ended

    @property
    def has_news(self) -> bool:
        """Whether there are tokens, scores or an end that :meth:`take` has not seen."""
        return self.request.finished or len(self.request.output) > self._pushed or self.has_scores

    @property
    def has_scores(self) -> bool:
        """Whether so many of the prompt's tokens were scored that they are a piece without text: all of a
        long prompt as one would hold up whoever reads it."""
        return len(self.request.prompt_logprobs) - self._scored >= SCORED_TOKENS

    def take(self) -> Piece | None:
        """Returns the new piece since the last call, or None where there is no text to show, no end, and no
        :attr:`has_scores`. A request whose text has come to a stop string is ended."""
        if self._ended:
            return None
        # Asked first, since a step of another thread may add tokens and end the request from here on.
        self._ended = self.request.finished
        text = ""
        # Other requests' steps may have given this one several tokens, more perhaps than belong to it.
        for id in self.request.output[self._pushed :]:
            text += self._text.push(id)
            self._pushed += 1
            if self._text.stop is not None:
                self._end_at_stop()
                break
        if self._ended:
            text += self._text.finish()
        elif not text and not self.has_scores:
            return None
        stop, viewer = self._text.stop, self.request.viewer
        new = slice(self._told, self._pushed)
        self._told = self._pushed
        prompt_logprobs = tuple(self.request.prompt_logprobs[self._scored :])
        self._scored += len(prompt_logprobs)
        return Piece(
            text=text,
            ids=tuple(self.request.output[new]),
            logprobs=tuple(self.request.output_logprobs[new]),
            finish_reason=self.request.finish_reason if self._ended else None,
            stop=stop,
            context_full=self.request.context_full and self._ended,
            prompt_tokens=len(self.request.job.prompt),
            seed=self.request.seed,
            timings=replace(self.request.timings),
            reused=self.request.reused,
            prompt_logprobs=prompt_logprobs,
            guessed=self.request.guessed,
            accepted=self.request.accepted,
            frame=None if viewer is None else self._frame(viewer),
            vector=self.request.vector,
        )

    def _end_at_stop(self) -> None:
        """Ends the request with the token that completed a stop string, whatever was chosen after it."""
        request = self.request
        self._engine.finish(request)
        del request.output[self._pushed :], request.output_logprobs[self._pushed :]
        request.finish_reason, request.error = "stop", None
        self._ended = True

    def _frame(self, viewer: Viewer) -> Frame:
        request = self.request
        frame = viewer.frame(self._pushed, last=self._ended)
        if frame.rates is None:
            return frame
        return replace(frame, rates=replace(frame.rates, guessed=request.guessed, accepted=request.accepted))


def stream(engine: Engine, request: Request) -> Generator[Piece, None, None]:
    """Runs a request and yields its text piece by piece; cancels it when it is closed or interrupted. Raises
    the request's error, after the text before it. A pause between two pieces delays no other thread."""
    continuation = Continuation(engine, request)
    try:
        engine.add(request)
        while not continuation.finished:
            engine.run_until(lambda: continuation.has_news, [request])
            piece = continuation.take()
            if piece is not None and (request.error is None or piece.text or piece.prompt_logprobs):
                yield piece
    finally:
        engine.abort(request)
    if request.error is not None:
        raise request.error


def generate(engine: Engine, requests: Sequence[Request]) -> list[Generation]:
    """Runs requests to their end, beside each other and whatever else is queued. One that fails is told by
    its :attr:`Generation.error` alone; where anything is raised, all are cancelled."""
    continuations = [Continuation(engine, request) for request in requests]
    pieces: list[list[Piece]] = [[] for _ in requests]
    try:
        for request in requests:
            engine.add(request)
        while unfinished := [each for each in continuations if not each.finished]:
            engine.run_until(lambda: any(each.has_news for each in unfinished), requests)
            for each, found in zip(continuations, pieces, strict=True):
                if (piece := each.take()) is not None:
                    found.append(piece)
    finally:
        for request in requests:
            engine.abort(request)
    return [joined(each, request.error) for each, request in zip(pieces, requests, strict=True)]


def joined(pieces: Sequence[Piece], error: Exception | None = None) -> Generation:
    """All pieces of a continuation as one."""
    last = pieces[-1]
    assert last.finish_reason is not None
    return Generation(
        text="".join(piece.text for piece in pieces),
        ids=tuple(id for piece in pieces for id in piece.ids),
        logprobs=tuple(each for piece in pieces for each in piece.logprobs),
        finish_reason=last.finish_reason,
        stop=last.stop,
        context_full=last.context_full,
        prompt_tokens=last.prompt_tokens,
        seed=last.seed,
        timings=last.timings,
        error=error,
        reused=last.reused,
        prompt_logprobs=tuple(each for piece in pieces for each in piece.prompt_logprobs),
        guessed=last.guessed,
        accepted=last.accepted,
    )
