"""The server's state: the model, its public facts, and whether the server accepts requests."""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar

from hotcold.api.async_llm import AsyncLLM
from hotcold.chat.chat import Chat
from hotcold.chat.messages import Message, content_text, normal
from hotcold.chat.stand_ins import texts_of
from hotcold.engine.request import Job, RequestError
from hotcold.errors import UserError
from hotcold.hosting.state import ProcessStats
from hotcold.runtime.pooling import Pooling
from hotcold.server.metrics import Metrics
from hotcold.server.preparing import Preparing
from hotcold.server.protocol.chat import ChatCall
from hotcold.server.protocol.completion import CompletionCall
from hotcold.server.protocol.embeddings import EmbeddingsCall
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.native import NativeCall
from hotcold.server.protocol.props import TemplateFacts, caps
from hotcold.server.protocol.replies import Reply
from hotcold.server.rare_lines import RareLines
from hotcold.server.running import Running
from hotcold.server.settings import Settings

T = TypeVar("T")
State = Literal["loading", "ready", "draining", "failed"]

_STATS_S = 2.0
_LONG_TEXT = "Once upon a time " * 20
_THREADS = 4  # they write the JSON of replies in parts

#: A request for the model's output.
Call: TypeAlias = ChatCall | CompletionCall | NativeCall | EmbeddingsCall


@dataclass(frozen=True)
class Prepared:
    """A request that can run: its jobs, and the reply that converts their pieces."""

    jobs: list[Job]
    reply: Reply
    stream: bool
    left_out: str  #: tools that run elsewhere, and the characters of its texts that no token can encode


class Service:
    """The model, settings and state that routes share. It refuses requests until :meth:`load` has
    returned."""

    def __init__(
        self,
        llm: AsyncLLM,
        settings: Settings,
        alias: str | None = None,
        write: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    ) -> None:
        self.llm = llm
        self.settings = settings
        self.metrics = Metrics()
        self.rare = RareLines(write)  #: notes on stderr about causes that unauthenticated clients can repeat
        self._alias = alias
        self._draining = False
        self._facts: Facts | None = None
        self._chat: Chat | None = None
        self._template: TemplateFacts | None = None
        self._requests = 0
        self._running: set[Running] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.preparing = Preparing()
        self._threads = ThreadPoolExecutor(_THREADS, "hotcold-front")

    @property
    def state(self) -> State:
        if self._draining:
            return "draining"
        if self.llm.status in ("failed", "closed"):
            return "failed"
        return "loading" if self._facts is None else "ready"

    @property
    def facts(self) -> Facts:
        """The model's facts. Raises APIError if the server does not accept requests now."""
        self.check()
        assert self._facts is not None
        return self._facts

    async def load(self) -> None:
        """Loads the model. Raises UserError if it cannot be loaded."""
        await self.llm.start()
        await self.llm.ready()
        info = self.llm.info
        self._chat = Chat(self.llm.tokenizer, self.llm.metadata, info.name)
        self._threads.submit(self._prepare_long_texts)
        if info.template is not None:  # agents send tools with their first request
            self.llm.prepare_grammars()
            self._threads.submit(self.template_facts)  # starts a process for templates
        pooling, not_pooled = _pooling(self.llm)
        names = (*([info.name] if self._alias else []), self.settings.hub_name)
        self._facts = Facts(
            name=self._alias or info.name,
            aliases=tuple(filter(None, names)),
            tokenizer=self.llm.tokenizer,
            context=info.context,
            slots=info.slots,
            created=info.created,
            params=info.params,
            size_bytes=info.size_bytes,
            fingerprint=info.fingerprint,
            timeout_s=self.settings.timeout_s,
            deadline_s=self.settings.deadline_s,
            tool_format=self._chat.tool_format,
            call_ids=self._chat.call_ids,
            meta=_meta(self.llm.metadata),
            max_tokens=self.settings.max_tokens,
            thinking_budget=self.settings.thinking_budget,
            sampling=replace(self.llm.sampling, **self.settings.sampling),
            sparsity=info.sparsity,
            pooling=pooling,
            not_pooled=not_pooled,
            open_schemas=self.settings.open_schemas,
        )

    def _prepare_long_texts(self) -> None:
        """Makes the tokenizer build its tables for long texts, so that no request waits for them."""
        self.llm.tokenizer.least_tokens(_LONG_TEXT)
        self.llm.tokenizer.encode(_LONG_TEXT)

    @property
    def thinks(self) -> bool:
        """True if the model's template marks thinking."""
        return self._chat is not None and self._chat.thinks

    @property
    def busy(self) -> int:
        """The number of texts that are generated or wait."""
        return sum(each.left for each in self._running)

    def template_facts(self) -> TemplateFacts:
        """Returns the chat template and its abilities, determined once. Not for the event loop's thread."""
        if self._template is None:
            assert self._chat is not None
            with_tools = self.llm.metadata.get("tokenizer.chat_template.tool_use")
            self._template = TemplateFacts(
                self.llm.info.template or "",
                with_tools if isinstance(with_tools, str) else "",
                caps(self._chat),
            )
        return self._template

    def prompt_text(self, call: ChatCall) -> str:
        """Returns the text of a conversation's prompt. Time and errors are those of :meth:`prepare`."""
        assert self._chat is not None
        return self._chat.text(
            [normal(each) for each in call.messages],
            call.tools,
            kwargs=call.template_kwargs,
            add_generation_prompt=call.add_generation_prompt,
            continue_last=call.continue_last,
        )

    def check(self) -> None:
        """Raises APIError if the server does not accept requests now."""
        if self.state != "ready":
            raise self.unavailable()

    def unavailable(self) -> APIError:
        """Returns the error that says why the server does not accept requests."""
        message, code, retry_after = _UNAVAILABLE[self.state]
        return APIError(message, status=503, type="unavailable_error", code=code, retry_after=retry_after)

    def prepare(self, call: Call) -> "Prepared":
        """Makes the jobs of a call and its reply. It renders templates and encodes texts, so it never runs in
        the event loop's thread. Raises UserError if the template refuses the conversation; RequestError or
        APIError if the prompt is too long."""
        tokenizer = self.llm.tokenizer
        if not isinstance(call, ChatCall):
            prompts = call.encode()
            jobs, reply = call.jobs(prompts), call.reply(prompts)
            return Prepared(jobs, reply, call.stream, tokenizer.left_out(texts_of(call.texts)))
        chat = self._chat
        assert chat is not None  # requests that arrived before draining began are still answered
        messages = [normal(each) for each in call.messages]
        ids = self._ids(call, messages, call.facts.context)
        thought = chat.thought(
            ids,
            call.callable,
            kwargs=call.template_kwargs,
            beginning=content_text(messages[-1]["content"]) if call.continue_last else None,
            budget=call.thinking_budget,
        )
        borders = chat.borders(ids, messages)
        jobs = [replace(job, shown=chat.shown, thought=thought, borders=borders) for job in call.jobs(ids)]
        opened = thought is not None and thought.opened
        reply = call.reply(
            lambda: chat.stream(opened, call.callable, sure=True, form=call.form, begun=call.continue_last)
        )
        left_out = filter(None, (call.left_out, tokenizer.left_out(texts_of(call.messages))))
        return Prepared(jobs, reply, call.stream, ", ".join(left_out))

    def count(self, call: ChatCall) -> int:
        """Counts the tokens of a conversation's prompt, which may be more than the context holds. Time and
        errors are those of :meth:`prepare`."""
        return len(self._ids(call, [normal(each) for each in call.messages]))

    def _ids(self, call: ChatCall, messages: Sequence[Message], context: int | None = None) -> list[int]:
        assert self._chat is not None
        return self._chat.ids(
            messages,
            call.tools,
            kwargs=call.template_kwargs,
            add_generation_prompt=call.add_generation_prompt,
            continue_last=call.continue_last,
            context=context,
        )

    async def in_thread(self, function: Callable[..., T], *values: Any) -> T:
        """Calls a function that takes some milliseconds in a thread; :attr:`preparing` is for requests."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *values)

    async def stats(self) -> ProcessStats | None:
        """Returns the engine's figures and its steps since the last call; None without an answer."""
        if self.llm.status != "ready":
            return None
        with contextlib.suppress(TimeoutError, RequestError):
            async with asyncio.timeout(_STATS_S):
                return await self.llm.stats(steps=True)
        return None

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Counts a request that shutdown waits for, even while its body is still read."""
        self._requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._requests -= 1
            if not self._requests:
                self._idle.set()

    @contextlib.contextmanager
    def counted(self, running: Running) -> Iterator[None]:
        """Registers texts that shutdown ends after its time limit."""
        self._running.add(running)
        try:
            yield
        finally:
            self._running.discard(running)

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, waits for the running ones for a time, then ends them with an error."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        for running in self._running:
            running.fail(RequestError("the server was stopped", "closed"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await self._idle.wait()

    def close(self) -> None:
        """Ends the threads, and the processes for templates."""
        if self._chat is not None:
            self._chat.close()
        self.rare.close()
        self.preparing.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _pooling(llm: AsyncLLM) -> tuple[Pooling | None, str]:
    """Returns the pooling that the user or the file names, or why there is none."""
    try:
        return llm.pooling, ""
    except UserError as error:
        return None, str(error)


def _meta(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Returns facts of the model file, by the names of llama.cpp's ``/v1/models``."""
    prefix = metadata.get("general.architecture")
    keys = {"n_ctx_train": f"{prefix}.context_length", "n_embd": f"{prefix}.embedding_length"}
    return {name: value for name, key in keys.items() if isinstance(value := metadata.get(key), int)}


_UNAVAILABLE = {
    "loading": ("the model is being loaded", "model_loading", 2),
    "draining": ("the server is being stopped", "shutting_down", 5),
    "failed": ("the engine has ended: the server must be started again", "engine_failed", 10),
}
