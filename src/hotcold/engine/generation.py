"""The text of a request, in pieces or as a whole, and the reason of its end."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from hotcold.engine.engine import Engine
from hotcold.engine.request import FinishReason, Request, Timings
from hotcold.engine.sampler import Logprobs
from hotcold.engine.text import TextStream
from hotcold.watch.live import Frame, Viewer

SCORED_TOKENS = 256  #: scored prompt tokens that make a piece without text


@dataclass(frozen=True)
class Piece:
    """New text of a continuation, with its tokens; ``str()`` gives the text. Each piece before the last one
    has text or ``prompt_logprobs``."""

    text: str
    ids: tuple[int, ...]  #: new tokens; a later piece may have the end of their text
    logprobs: tuple[Logprobs, ...]  #: log-probabilities of ``ids``, if requested
    finish_reason: FinishReason | None  #: None before the last piece
    stop: str | None  #: the stop string that ended the text; the text does not contain it
    context_full: bool  #: whether the end of the context ended the text
    prompt_tokens: int  #: length of the prompt, BOS included
    seed: int  #: seed that gives the same text again
    timings: Timings  #: times so far
    reused: int = 0  #: prompt tokens served from the prefix cache
    #: with ``echo``: log-probabilities of the next prompt tokens (None for the first token); the first piece
    #: with text has the last of them
    prompt_logprobs: tuple[Logprobs | None, ...] = ()
    guessed: int = 0  #: draft tokens verified so far
    accepted: int = 0  #: draft tokens accepted so far
    frame: Frame | None = None  #: active neurons, for requests with a viewer
    vector: tuple[float, ...] | None = None  #: the result of a job with pooling, in the last piece

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Generation:
    """A finished continuation; ``str()`` gives its text."""

    text: str  #: the continuation alone, without the prompt and without a stop string
    #: token ids, without an end token; the token that completed a stop string is the last one
    ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]  #: log-probabilities of ``ids``, if requested
    finish_reason: FinishReason
    stop: str | None  #: the stop string that ended the text
    context_full: bool  #: whether the end of the context ended the text
    prompt_tokens: int  #: length of the prompt, BOS included
    seed: int  #: seed that gives the same text again
    timings: Timings
    error: Exception | None = None  #: cause of the finish reason ``error``; ``text`` came before it
    reused: int = 0  #: prompt tokens served from the prefix cache
    prompt_logprobs: tuple[Logprobs | None, ...] = ()  #: with ``echo``: log-probabilities of the prompt
    guessed: int = 0  #: draft tokens verified
    accepted: int = 0  #: draft tokens accepted

    def __str__(self) -> str:
        return self.text


class Continuation:
    """A request and its text; a stop string in the text ends the request (:class:`TextStream`)."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.request = request
        self._engine = engine
        job = request.job
        self._text = TextStream(engine.model.tokenizer, job.prompt, job.stop, job.shown, job.thought)
        self._pushed = 0  # tokens passed to the text stream; none follows a stop string
        self._tokens_in_pieces = 0
        self._scored = 0  # prompt tokens with log-probabilities in pieces so far
        self._ended = False

    @property
    def finished(self) -> bool:
        """True if the last piece was taken."""
        return self._ended

    @property
    def has_news(self) -> bool:
        """True if there are tokens, scores or an end that :meth:`take` has not returned."""
        return self.request.finished or len(self.request.output) > self._pushed or self.has_scores

    @property
    def has_scores(self) -> bool:
        """True if enough prompt tokens were scored for a piece without text. A single piece for a long prompt
        would keep its reader waiting."""
        return len(self.request.prompt_logprobs) - self._scored >= SCORED_TOKENS

    def take(self) -> Piece | None:
        """Returns the next piece; None if there is no text to show, no end, and no :attr:`has_scores`. Ends
        the request if its text has come to a stop string."""
        if self._ended:
            return None
        # Read first: from here on, a step of another thread may add tokens and end the request.
        self._ended = self.request.finished
        text = ""
        # Steps of other threads may have added several tokens, perhaps more than the text keeps.
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
        new = slice(self._tokens_in_pieces, self._pushed)
        self._tokens_in_pieces = self._pushed
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
        """Ends the request at the token that completed a stop string; drops later tokens."""
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
    """Runs a request and yields its text piece by piece; cancels it when closed or interrupted. Raises the
    request's error after the text before it. A pause between two pieces delays no other thread."""
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
    """Runs requests to their end, together with all queued ones. A failed request has
    :attr:`Generation.error`; an exception from here cancels all requests."""
    continuations = [Continuation(engine, request) for request in requests]
    pieces: list[list[Piece]] = [[] for _ in requests]
    try:
        for request in requests:
            engine.add(request)
        while unfinished := [continuation for continuation in continuations if not continuation.finished]:
            engine.run_until(lambda: any(continuation.has_news for continuation in unfinished), requests)
            for continuation, pieces_so_far in zip(continuations, pieces, strict=True):
                if (piece := continuation.take()) is not None:
                    pieces_so_far.append(piece)
    finally:
        for request in requests:
            engine.abort(request)
    return [
        joined(continuation, request.error) for continuation, request in zip(pieces, requests, strict=True)
    ]


def joined(pieces: Sequence[Piece], error: Exception | None = None) -> Generation:
    """Joins all pieces of a continuation."""
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
