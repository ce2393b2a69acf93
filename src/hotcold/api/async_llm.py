"""A model for programs with an event loop. It runs in its own process, and no call blocks the loop."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

from hotcold.api.llm import Ids, Prompt, Vectors, check_each, embedded, ids_of, is_one, vectors
from hotcold.api.options import ChatOptions, Options, chat_job, job_of, refused
from hotcold.chat.answer import Answer, ChatPiece, answer_of
from hotcold.chat.chat import Chat
from hotcold.engine.generation import Generation, Piece, joined
from hotcold.engine.request import Grammar, Job
from hotcold.errors import UserError
from hotcold.hosting.front import EngineFront, Status
from hotcold.hosting.state import ModelInfo, ProcessStats
from hotcold.runtime.options import LoadOptions
from hotcold.runtime.pooling import Pooling
from hotcold.runtime.sampling import SamplingParams
from hotcold.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from hotcold.grammar.constraint import Grammars


class AsyncLLM:
    """A model in its own process, for one event loop.

    >>> async with AsyncLLM("model.gguf", sequences=4) as llm:
    ...     async for piece in llm.stream_text("Once upon a time", max_tokens=50):
    ...         print(piece, end="", flush=True)

    ``sequences`` requests run at the same time, ``max_waiting`` requests wait in order of arrival, and
    further ones are refused with ``queue_full``. ``chunk`` is the limit of prompt tokens in a step. Other
    options are the same as of :class:`~hotcold.api.llm.LLM`. Raises UserError for an invalid value.

    All methods belong to the event loop that called :meth:`start`, and to its thread."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        max_waiting: int = 64,
        **options: Unpack[LoadOptions],
    ) -> None:
        #: the connection to the engine process
        self.front = EngineFront(model, max_waiting=max_waiting, **options)
        self._grammars: Grammars | None = None  # created for the first grammar
        self._template: Chat | None = None  # created at the first access

    def __repr__(self) -> str:
        if self.status != "ready":
            return f"AsyncLLM(status={self.status!r})"
        info = self.info
        return f"AsyncLLM({info.name!r}, sparsity={info.sparsity!r}, context={info.context})"

    @property
    def status(self) -> Status:
        return self.front.status

    @property
    def loaded(self) -> float:
        """The loaded part of the model, 0 to 1."""
        return self.front.loaded

    @property
    def error(self) -> str | None:
        """The reason for the status ``failed``, in one line."""
        return self.front.error

    @property
    def info(self) -> ModelInfo:
        """Facts of the loaded model. Raises RequestError if the model is not loaded."""
        return self.front.info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises RequestError if the model is not loaded."""
        return self.front.tokenizer

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of the GGUF file. Raises RequestError if the model is not loaded."""
        return self.front.metadata

    @property
    def pooling(self) -> Pooling:
        """How the model makes vectors of texts. Raises UserError if it cannot."""
        return self.front.pooling

    @property
    def sampling(self) -> SamplingParams:
        """The default sampling parameters: after loading, the file's recommendation."""
        return self.front.sampling

    @property
    def template(self) -> Chat:
        """The model's chat template, and how it marks thinking and calls of tools. Rendering is slow: call it
        in a thread. Raises RequestError if the model is not loaded."""
        if self._template is None:
            self._template = Chat(self.tokenizer, self.metadata, self.info.name)
        return self._template

    async def start(self) -> None:
        """Starts the engine process, which then loads the model: see :meth:`ready`. Raises RuntimeError after
        an earlier start or close, and OSError if the system cannot start a process."""
        await self.front.start()

    async def ready(self) -> None:
        """Waits until the model is loaded. Raises UserError if it cannot be loaded."""
        await self.front.ready()

    async def stats(self, *, steps: bool = False) -> ProcessStats:
        """Returns the engine's statistics after its current step; with ``steps`` also the times of the steps
        since the last such call. Raises RequestError if there is no engine."""
        return await self.front.stats(steps=steps)

    def check_length(self, job: Job) -> None:
        """Raises RequestError ``context_length_exceeded`` if the prompt leaves no space for an answer.
        :meth:`stream` calls it before it checks a grammar, which takes longer."""
        self.front.check_length(job)

    def prepare_grammars(self) -> None:
        """Prepares the compilation of grammars, without waiting, so that the first one is faster."""
        self._of_grammars().prepare()

    async def check(self, grammar: Grammar) -> Grammar:
        """Returns the grammar, with ``notes`` on the parts of its schemas that are not enforced. Raises
        RequestError ``invalid_grammar`` if it cannot be enforced. Another process compiles it, within bounds;
        the result is cached. :meth:`stream` calls this first."""
        return await self._checked(grammar)

    async def stream(self, job: Job) -> AsyncGenerator[Piece, None]:
        """Streams a job like :meth:`EngineFront.stream`, after a check of its grammar."""
        if job.grammar is not None and job.grammar.kind != "checked":
            self.check_length(job)
            job = replace(job, grammar=await self._checked(job.grammar))
        async with contextlib.aclosing(self.front.stream(job)) as pieces:
            async for piece in pieces:
                yield piece

    async def stream_text(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncGenerator[Piece, None]:
        """Streams the continuation of a text or token ids. Raises UserError for invalid options or
        prompts."""
        job = self._job(options)
        ids = await asyncio.to_thread(ids_of, self.tokenizer, prompt)
        async with contextlib.aclosing(self.stream(replace(job, prompt=ids))) as pieces:
            async for piece in pieces:
                yield piece

    @overload
    async def generate(self, prompt: str, **options: Unpack[Options]) -> Generation: ...
    @overload
    async def generate(self, prompt: Ids, **options: Unpack[Options]) -> Generation: ...
    @overload
    async def generate(
        self, prompt: list[str] | Sequence[Ids], **options: Unpack[Options]
    ) -> list[Generation]: ...
    @overload
    async def generate(self, prompt: list[Prompt], **options: Unpack[Options]) -> list[Generation]: ...
    async def generate(
        self, prompt: Prompt | Sequence[Prompt], **options: Unpack[Options]
    ) -> Generation | list[Generation]:
        """Continues a prompt, or each prompt of a list, with the same texts as :meth:`LLM.generate`. An error
        of one prompt of a list is in :attr:`Generation.error`. Cancellation ends all of them."""
        job = self._job(options)
        if is_one(prompt):
            generation = await self._generate(prompt, job)  # type: ignore[arg-type]
            if generation.error is not None:
                raise generation.error
            return generation
        prompts: list[Prompt] = [*prompt]
        check_each(prompts)
        # Without other callers, this list alone never fills the queue.
        room = asyncio.Semaphore(min(2 * self.info.slots, self.front.most))

        async def each(index: int) -> Generation:
            async with room:
                return await self._generate(prompts[index], job.nth(index))

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each(index)) for index in range(len(prompts))]
        return [task.result() for task in tasks]

    async def embed(self, prompt: Prompt | Sequence[Prompt]) -> Vectors:
        """Returns the vector of a text, or of each text of a list; see :meth:`LLM.embed`."""
        prompts = embedded(prompt)
        job = Job(max_tokens=1, pooling=self.pooling)
        room = asyncio.Semaphore(min(2 * self.info.slots, self.front.most))

        async def each(prompt: Prompt) -> tuple[float, ...] | None:
            async with room:
                ids = await asyncio.to_thread(ids_of, self.tokenizer, prompt)
                async with contextlib.aclosing(self.stream(replace(job, prompt=ids))) as stream:
                    return [piece async for piece in stream][-1].vector

        tasks = [asyncio.create_task(each(prompt)) for prompt in prompts]
        try:
            return vectors(await asyncio.gather(*tasks), is_one(prompt))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[ChatPiece, None]:
        """Streams the answer to the last message of a conversation; see :meth:`LLM.stream_chat`."""
        _check_plain(options)
        job, parts = await asyncio.to_thread(chat_job, self.template, messages, options, self.sampling)
        async with contextlib.aclosing(self.stream(job)) as pieces:
            async for piece in pieces:
                new = parts.push(piece.text)
                if piece.finish_reason is not None:
                    new += parts.finish()
                yield ChatPiece(tuple(new), piece)

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> Answer:
        """Returns the answer to the last message of a conversation; see :meth:`LLM.chat`."""
        async with contextlib.aclosing(self.stream_chat(messages, **options)) as pieces:
            return answer_of([piece async for piece in pieces])

    async def close(self, drain_s: float = 0) -> None:
        """Ends the engine process. New jobs are refused at once. Running jobs have ``drain_s`` seconds to
        end, and then get a RequestError ``closed``. A second call meanwhile may shorten the wait."""
        try:
            await self.front.close(drain_s)
        finally:
            for process in (self._grammars, self._template):
                if process is not None:
                    await asyncio.to_thread(process.close)

    async def __aenter__(self) -> Self:
        await self.start()
        try:
            await self.ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _job(self, options: Mapping[str, Any]) -> Job:
        _check_plain(options)
        return job_of(options, self.sampling)

    async def _generate(self, prompt: Prompt, job: Job) -> Generation:
        """Continues a prompt; an error is in the result."""
        pieces: list[Piece] = []
        try:
            ids = await asyncio.to_thread(ids_of, self.tokenizer, prompt)
            async with contextlib.aclosing(self.stream(replace(job, prompt=ids))) as stream:
                async for piece in stream:
                    pieces.append(piece)
        except UserError as error:
            if not pieces:
                return refused(job, error)
            return joined([*pieces[:-1], replace(pieces[-1], finish_reason="error")], error)
        return joined(pieces)

    async def _checked(self, grammar: Grammar) -> Grammar:
        """Returns a grammar in checked form, so that the engine process parses nothing in Python."""
        self.front.check()
        checked = await asyncio.wrap_future(self._of_grammars().checking(grammar))
        return replace(checked, param=grammar.param)

    def _of_grammars(self) -> "Grammars":
        if self._grammars is None:
            from hotcold.grammar.constraint import Grammars

            self._grammars = Grammars(self.tokenizer)
        return self._grammars


def _check_plain(options: Mapping[str, Any]) -> None:
    if options.get("constraint") is not None:
        raise UserError("AsyncLLM takes no constraint, since its engine is another process: give a grammar")
