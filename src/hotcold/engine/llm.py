"""The Python interface: text in, text out."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack, overload

from hotcold.engine.engine import Engine
from hotcold.engine.load_options import LLMOptions, LoadOptions, check_names
from hotcold.engine.loading import LoadedModel, load
from hotcold.engine.request import FinishReason, Request, Timings
from hotcold.engine.sampler import SamplingParams
from hotcold.engine.session import Session
from hotcold.errors import UserError
from hotcold.model.tokenizer import Tokenizer


class GenerationOptions(TypedDict, total=False):
    """What :meth:`LLM.generate` and :meth:`LLM.stream` take besides the prompt; all optional."""

    max_tokens: int  #: the most tokens to generate (200)
    ignore_eos: bool  #: never choose a token that ends the text (False)
    temperature: float  #: 0 is greedy (0.8)
    top_k: int  #: keep the k likeliest tokens; 0 keeps all (40)
    top_p: float  #: keep the likeliest tokens that together have this probability (0.95)
    min_p: float  #: drop tokens less likely than this times the likeliest (0.05)
    repeat_penalty: float  #: above 1 makes recent tokens less likely (1.0)
    seed: int | None  #: 0 or more; the same seed gives the same text. None draws one


@dataclass(frozen=True)
class Generation:
    """A finished continuation; ``str()`` gives its text."""

    text: str  #: the continuation alone, without the prompt
    ids: tuple[int, ...]  #: its token ids, without the one that ended the text
    finish_reason: FinishReason
    context_full: bool  #: whether the end of the context is what stopped it
    prompt_tokens: int  #: BOS included
    seed: int  #: gives this text again
    timings: Timings

    def __str__(self) -> str:
        return self.text


class TextStream:
    """The text of a request as its tokens arrive, never with half a character."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self._taken = 0
        self._decoder = tokenizer.stream_decoder()
        for token in request.prompt:  # so that the text continues the prompt, with its space
            self._decoder.push(token)

    def take(self) -> str:
        new = self.request.output[self._taken :]
        self._taken += len(new)
        text = "".join(map(self._decoder.push, new))
        return text + self._decoder.flush() if self.request.finished else text


def stream_text(engine: Engine, request: Request) -> Iterator[str]:
    """Runs a request and yields its text piece by piece; cancels it when it is closed or interrupted. Raises
    the request's error, after the text before it."""
    text = TextStream(request, engine.model.tokenizer)
    try:
        try:
            engine.add(request)
            while not request.finished:
                engine.step()
                if piece := text.take():
                    yield piece
            if piece := text.take():  # it may have finished while another stream was read
                yield piece
        finally:
            engine.abort(request)
    finally:
        engine.abort(request)  # again: an interrupt may have ended the first time
    if request.error is not None:
        raise request.error


class LLM:
    """A model, ready to continue text.

    >>> with LLM() as llm:
    ...     print(llm.generate("Once upon a time", max_tokens=50, seed=1))

    ``path`` is a GGUF file; None is the small built-in model. Not for use from several threads at once.
    ``ValueError``: a file that is no model, or an option that does not fit it or the machine."""

    def __init__(self, path: str | os.PathLike[str] | None = None, **options: Unpack[LLMOptions]) -> None:
        check_names(options, LLMOptions)
        file = None if path is None else Path(path)
        self._engine: Engine | None = Engine(load(file, LoadOptions.of(options)).session())

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise UserError("this LLM is closed: make another")
        return self._engine

    @property
    def model(self) -> LoadedModel:
        return self.engine.model

    @property
    def session(self) -> Session:
        return self.engine.session

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]) -> Iterator[str]:
        """Yields the continuation's text piece by piece. Leaving the loop early cancels the request.

        A text gets BOS where the model wants it, token ids are taken as they are; :class:`GenerationOptions`
        has the options. ``ValueError``: the prompt does not fit in the context, an option is out of range, or
        no token can be chosen (then it comes after the text before it)."""
        request = self.request(prompt, **options)
        self.engine.check(request)  # now, not at the first piece
        return stream_text(self.engine, request)

    @overload
    def generate(self, prompt: str, **options: Unpack[GenerationOptions]) -> Generation: ...
    @overload
    def generate(self, prompt: list[str], **options: Unpack[GenerationOptions]) -> list[Generation]: ...
    def generate(
        self, prompt: str | list[str], **options: Unpack[GenerationOptions]
    ) -> Generation | list[Generation]:
        """Continues a text, or each of several, and returns when all are done. Each gets the same text alone
        as among others. Options and errors are those of :meth:`stream`; the error of one prompt is raised
        when the others are done."""
        prompts = [prompt] if isinstance(prompt, str) else prompt
        requests = [self.request(each, **options) for each in prompts]
        self.engine.run(requests)
        done = [self._generation(request) for request in requests]
        return done[0] if isinstance(prompt, str) else done

    def request(self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]) -> Request:
        """A request for ``llm.engine``, for those who run its steps themselves."""
        check_names(options, GenerationOptions)
        rest: dict[str, Any] = dict(options)
        own = {name: rest.pop(name) for name in ("max_tokens", "ignore_eos") if name in rest}
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return Request(ids, SamplingParams(**rest), **own)

    def close(self) -> None:
        """Frees the model. Using the LLM afterwards is a ValueError."""
        if self._engine is not None:
            self._engine.model.close()
        self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generation(self, request: Request) -> Generation:
        assert request.finish_reason is not None
        return Generation(
            text=TextStream(request, self.tokenizer).take(),
            ids=tuple(request.output),
            finish_reason=request.finish_reason,
            context_full=request.context_full,
            prompt_tokens=len(request.prompt),
            seed=request.seed,
            timings=request.timings,
        )
