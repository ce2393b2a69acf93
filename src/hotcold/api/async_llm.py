"""A model for programs with an event loop: it runs in a process of its own, and nothing here waits for it."""

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
    """A model in a process of its own, for one event loop.

    >>> async with AsyncLLM("model.gguf", sequences=4) as llm:
    ...     async for piece in llm.stream_text("Once upon a time", max_tokens=50):
    ...         print(piece, end="", flush=True)

    ``sequences`` requests run at the same time, ``max_waiting`` more wait in order of arrival, and beyond
    these a request is refused with ``queue_full``. ``chunk`` is the most prompt tokens of a step. Other
    options are those of :class:`~hotcold.api.llm.LLM`; values that cannot be right are a UserError now.

    All methods belong to the event loop in which :meth:`start` was called, and to its thread."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        max_waiting: int = 64,
        **options: Unpack[LoadOptions],
    ) -> None:
        #: what talks with the engine's process
        self.front = EngineFront(model, max_waiting=max_waiting, **options)
        self._grammars: Grammars | None = None  # once one was to be checked
        self._template: Chat | None = None  # once it was asked for

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
        """The part of the model that was read, 0 to 1."""
        return self.front.loaded

    @property
    def error(self) -> str | None:
        """A line on why the status is ``failed``."""
        return self.front.error

    @property
    def info(self) -> ModelInfo:
        """RequestError: the model is not loaded yet, or could not be."""
        return self.front.info

    @property
    def tokenizer(self) -> Tokenizer:
        """Errors as of :attr:`info`."""
        return self.front.tokenizer

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The GGUF file's metadata, which is all but its tensors; errors as of :attr:`info`."""
        return self.front.metadata

    @property
    def pooling(self) -> Pooling:
        """How texts become vectors. UserError: the model gives none."""
        return self.front.pooling

    @property
    def sampling(self) -> SamplingParams:
        """How tokens are chosen where a request does not say: as the file recommends, once it is loaded."""
        return self.front.sampling

    @property
    def template(self) -> Chat:
        """The model's chat template, and how it marks thinking and calls of tools. What it renders takes a
        while: call it in a thread. Errors as of :attr:`info`."""
        if self._template is None:
            self._template = Chat(self.tokenizer, self.metadata, self.info.name)
        return self._template

    async def start(self) -> None:
        """Starts the engine process, which then loads the model: see :meth:`ready`. RuntimeError: it was
        started or closed before; OSError: the system starts no process."""
        await self.front.start()

    async def ready(self) -> None:
        """Waits until the model is loaded; a UserError says why it cannot be."""
        await self.front.ready()

    async def stats(self, *, steps: bool = False) -> ProcessStats:
        """How the engine is, after its current step; with ``steps`` how long the steps took since this was
        asked for last. RequestError: there is no engine."""
        return await self.front.stats(steps=steps)

    def check_length(self, job: Job) -> None:
        """RequestError ``context_length_exceeded``: the prompt leaves no room for an answer. :meth:`stream`
        does this first, before it checks a grammar, which takes longer."""
        self.front.check_length(job)

    def prepare_grammars(self) -> None:
        """Starts, and does not wait for, what the first grammar would else wait for."""
        self._of_grammars().prepare()

    async def check(self, grammar: Grammar) -> Grammar:
        """The grammar with ``notes`` on what of its schemas an answer is not held to. RequestError
        ``invalid_grammar``: no answer may be held to this. It is compiled in another process, within bounds,
        and the result is kept for a while. :meth:`stream` does this first."""
        return await self._checked(grammar)

    async def stream(self, job: Job) -> AsyncGenerator[Piece, None]:
        """Streams a job as :meth:`EngineFront.stream` does, but checks its grammar first."""
        if job.grammar is not None and job.grammar.kind != "checked":
            self.check_length(job)
            job = replace(job, grammar=await self._checked(job.grammar))
        async with contextlib.aclosing(self.front.stream(job)) as pieces:
            async for piece in pieces:
                yield piece

    async def stream_text(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncGenerator[Piece, None]:
        """:meth:`stream` of a text, or token ids. UserError: an option or a prompt that is not allowed."""
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
        """Continues a prompt, or each of several, as :meth:`LLM.generate` does, and with the same texts. One
        of several that fails says why in :attr:`Generation.error`. Cancelling it ends all of them."""
        job = self._job(options)
        if is_one(prompt):
            done = await self._generate(prompt, job)  # type: ignore[arg-type]
            if done.error is not None:
                raise done.error
            return done
        prompts: list[Prompt] = [*prompt]
        check_each(prompts)
        # None of them meets a full queue, if it is alone.
        room = asyncio.Semaphore(min(2 * self.info.slots, self.front.most))

        async def each(index: int) -> Generation:
            async with room:
                return await self._generate(prompts[index], job.nth(index))

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each(index)) for index in range(len(prompts))]
        return [task.result() for task in tasks]

    async def embed(self, prompt: Prompt | Sequence[Prompt]) -> Vectors:
        """:meth:`LLM.embed`: the vector of a text, or those of several."""
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
        """:meth:`LLM.stream_chat`: the answer to the last message of a conversation, piece by piece."""
        _check_plain(options)
        job, parts = await asyncio.to_thread(chat_job, self.template, messages, options, self.sampling)
        async with contextlib.aclosing(self.stream(job)) as pieces:
            async for piece in pieces:
                new = parts.push(piece.text)
                if piece.finish_reason is not None:
                    new += parts.finish()
                yield ChatPiece(tuple(new), piece)

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> Answer:
        """:meth:`LLM.chat`: the answer to the last message of a conversation."""
        async with contextlib.aclosing(self.stream_chat(messages, **options)) as pieces:
            return answer_of([piece async for piece in pieces])

    async def close(self, drain_s: float = 0) -> None:
        """Ends the engine process. No new job can start from now on; those that run have ``drain_s`` seconds
        to end, and then get a RequestError ``closed``. May be called again meanwhile, to wait for less
        time."""
        try:
            await self.front.close(drain_s)
        finally:
            for each in (self._grammars, self._template):
                if each is not None:
                    await asyncio.to_thread(each.close)

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
        """Answers a prompt; the result has the error, if there was one."""
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
        """Returns a grammar in the form that the engine process takes, so that nothing is parsed there in
        Python."""
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
