"""A stand-in for ``AsyncLLM`` without a process, whose answers, delays and failures a test decides."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from functools import cache
from typing import Any

from hotcold.demo import model_path
from hotcold.engine.generation import Piece
from hotcold.engine.request import Grammar, Job, PromptTooLongError, RequestError, Timings
from hotcold.hosting.model_file import ModelFile
from hotcold.hosting.state import ModelInfo
from hotcold.runtime.pooling import Pooling, pooling_of
from hotcold.watch.live import Frame

CONTEXT = 256


@cache
def model_file() -> ModelFile:
    return ModelFile.read(model_path())


class MadeUpLLM:
    """Continues every prompt with ``words``, each after ``pace_s``; it is loaded from the start."""

    def __init__(self, words: tuple[str, ...] = ("a", " b", " c"), pace_s: float = 0) -> None:
        self.words, self.pace_s = words, pace_s
        self.status, self.loaded, self.error = "ready", 1.0, None
        self.jobs: list[Job] = []
        self.running = 0  #: streams that were begun and not yet closed
        self.reason = "stop"  #: why answers end
        self.held: asyncio.Event | None = None  #: where set, the first piece waits for it
        self.frame: Frame | None = None  #: of every piece
        self.fail_at: int | None = None  #: index of the piece that is replaced by an error
        self.failure = RequestError("it broke", "engine_failed")
        self.checks: list[Grammar] = []  #: that were asked for
        self.checking: asyncio.Event | None = None  #: where set, checks wait for it
        self.refusal: RequestError | None = None  #: of grammars
        self.tokenizer, self.metadata = model_file().tokenizer, model_file().metadata
        self.sampling = model_file().sampling

    @property
    def pooling(self) -> Pooling:
        return pooling_of(self.metadata)

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            name="made-up",
            path="made-up.gguf",
            fingerprint="0123456789abcdef",
            context=CONTEXT,
            vocab=self.tokenizer.vocab_size,
            family="llama",
            sparsity="exact",
            notes=(),
            slots=4,
            chunk=128,
            cache_type="f16",
            cache_positions=1024,
            threads=1,
            layers=2,
            neurons=(64, 64),
        )

    async def start(self) -> None: ...

    async def ready(self) -> None: ...

    async def close(self, drain_s: float = 0) -> None:
        self.status = "closed"

    async def stats(self, *, steps: bool = False) -> Any:
        raise RequestError("no engine", "engine_failed")

    async def check(self, grammar: Grammar) -> Grammar:
        self.checks.append(grammar)
        if self.checking is not None:
            await self.checking.wait()
        if self.refusal is not None:
            raise self.refusal
        return grammar

    def check_length(self, job: Job) -> None:
        if len(job.prompt) >= CONTEXT:
            raise PromptTooLongError(len(job.prompt), CONTEXT)

    def prepare_grammars(self) -> None: ...

    async def stream(self, job: Job) -> AsyncGenerator[Piece, None]:
        self.check_length(job)
        self.jobs.append(job)
        self.running += 1
        timings = Timings(added=time.perf_counter())
        try:
            if self.held is not None:
                await self.held.wait()
            for i, word in enumerate(self.words):
                await asyncio.sleep(self.pace_s)
                if i == self.fail_at:
                    raise self.failure
                timings.first_token = timings.first_token or time.perf_counter()
                last = i == len(self.words) - 1
                yield Piece(
                    text=word,
                    ids=(100 + i,),
                    logprobs=(),
                    finish_reason=self.reason if last else None,
                    stop=None,
                    context_full=False,
                    prompt_tokens=len(job.prompt),
                    seed=1,
                    timings=timings,
                    frame=self.frame,
                )
        finally:
            self.running -= 1
