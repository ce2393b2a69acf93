"""Servers in this process that record what clients ask. The model's answers are written beforehand, for
programs that no small model can work for, or a real model computes them. HTTP, dialects, chat template, tools
and grammars are Hotcold's own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from hotcold.api.async_llm import AsyncLLM
from hotcold.engine.generation import Piece
from hotcold.engine.request import Grammar, Job, RequestError, Timings
from hotcold.grammar.constraint import Grammars
from hotcold.hosting.model_file import ModelFile
from hotcold.hosting.state import ModelInfo
from hotcold.server.run import http_server
from hotcold.server.service import Service
from hotcold.server.settings import Settings, listening_sockets

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SECRET = ("authorization", "x-api-key")
CONTEXT = 1 << 17  # agents' prompts have some ten thousand tokens


class ScriptedLLM:
    """Stands for ``AsyncLLM``, with a file's tokenizer and another chat template. ``answer`` gets a prompt's
    text, control tokens by name, and returns what the model answers. An answer that the request's grammar
    does not allow ends the request with an error."""

    def __init__(self, model: Path, template: str, answer: Callable[[str], str]) -> None:
        file = ModelFile.read(model, template)
        self.tokenizer, self.metadata, self.sampling = file.tokenizer, file.metadata, file.sampling
        self.status, self.loaded, self.error, self.pooling = "ready", 1.0, None, None
        self._answer, self._grammars = answer, Grammars(file.tokenizer)
        self.info = file.complete(
            ModelInfo(
                name=model.stem,
                path=str(model),
                fingerprint=file.fingerprint,
                context=CONTEXT,
                vocab=file.tokenizer.vocab_size,
                family="llama",
                sparsity="off",
                notes=(),
                slots=4,
                chunk=128,
                cache_type="f16",
                cache_positions=4 * CONTEXT,
                threads=1,
                layers=2,
                neurons=(64, 64),
            )
        )

    async def start(self) -> None: ...

    async def ready(self) -> None: ...

    async def close(self, drain_s: float = 0) -> None:
        self._grammars.close()

    async def stats(self, *, steps: bool = False) -> Any:
        raise RequestError("no engine runs here", "engine_failed")

    def prepare_grammars(self) -> None: ...

    def check_length(self, job: Job) -> None: ...

    async def check(self, grammar: Grammar) -> Grammar:
        return await asyncio.wrap_future(self._grammars.checking(grammar))

    async def stream(self, job: Job) -> AsyncGenerator[Piece, None]:
        prompt = "".join(self.tokenizer.piece(each).decode(errors="replace") for each in job.prompt)
        ids = self.tokenizer.encode(self._answer(prompt), add_bos=False, parse_special=True)
        if job.grammar is not None:
            checked = job.grammar if job.grammar.kind == "checked" else await self.check(job.grammar)
            possible: Any = self._grammars.constraint(checked)
            if (fits := possible.possible([], ids)) < len(ids):
                wrong = self.tokenizer.decode(ids[: fits + 1])
                raise RequestError(f"the script's answer is not allowed from its end on: {wrong!r}")
        timings = Timings(added=time.perf_counter(), started=time.perf_counter())
        decoder = self.tokenizer.stream_decoder(job.shown)
        for place, token in enumerate(ids[: job.max_tokens]):
            await asyncio.sleep(0)
            timings.first_token = timings.first_token or time.perf_counter()
            last, whole = place == min(len(ids), job.max_tokens) - 1, len(ids) <= job.max_tokens
            yield Piece(
                text=decoder.push(token) + (decoder.flush() if last else ""),
                ids=(token,),
                logprobs=(),
                finish_reason=("stop" if whole else "length") if last else None,
                stop=None,
                context_full=False,
                prompt_tokens=len(job.prompt),
                seed=1,
                timings=timings,
            )


@dataclass
class Reading:
    """The work of one answer of a real model."""

    prompt: int  #: tokens of the prompt
    reused: int  #: tokens of the prompt that came from the prefix cache
    reading_s: float  #: time from the start to the first token
    tokens: int = 0  #: tokens of the answer
    writing_s: float = 0.0  #: time from the first token to the end
    end: str | None = None  #: the finish reason; None: the client went away


class NotedLLM(AsyncLLM):
    """A real model that notes the work of each answer."""

    readings: list[Reading]

    async def stream(self, job: Job) -> AsyncGenerator[Piece, None]:
        reading, first = None, 0.0
        async with contextlib.aclosing(super().stream(job)) as pieces:
            async for piece in pieces:
                if reading is None:
                    first = time.perf_counter()
                    start = piece.timings.started or first
                    reading = Reading(piece.prompt_tokens, piece.reused, round(first - start, 1))
                    self.readings.append(reading)
                reading.tokens += len(piece.ids)
                reading.writing_s, reading.end = round(time.perf_counter() - first, 1), piece.finish_reason
                yield piece


@dataclass
class Exchange:
    """A request that was answered."""

    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)  #: of the request, without keys
    body: bytes = b""
    status: int = 0
    reply: bytes = b""


class Recorder:
    """Notes what passes to an application and back."""

    def __init__(self, app: ASGIApp, exchanges: list[Exchange]) -> None:
        self._app, self._exchanges = app, exchanges

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        query = f"?{scope['query_string'].decode()}" if scope["query_string"] else ""
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        known = {name: value for name, value in headers.items() if name not in _SECRET}
        exchange = Exchange(scope["method"], scope["path"] + query, known)
        self._exchanges.append(exchange)

        async def record_request() -> Message:
            message = await receive()
            exchange.body += message.get("body", b"")
            return message

        async def record_reply(message: Message) -> None:
            exchange.status = message.get("status", exchange.status)
            exchange.reply += message.get("body", b"")
            await send(message)

        await self._app(scope, record_request, record_reply)


@dataclass
class Scripted:
    url: str
    exchanges: list[Exchange] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)  #: of a real model's answers


def scripted_server(
    model: Path, template: str, answer: Callable[[str], str]
) -> AbstractContextManager[Scripted]:
    """Runs a server whose answers ``answer`` gives."""
    return _server(lambda _: ScriptedLLM(model, template, answer), "scripted", Settings(port=0, log=False))


def noted_server(model: Path, context: int) -> AbstractContextManager[Scripted]:
    """Runs a server whose answers a real model computes, with patience for long prompts."""

    def llm(server: Scripted) -> NotedLLM:
        noted = NotedLLM(model, sequences=2, context=context)
        noted.readings = server.readings
        return noted

    # The likeliest tokens: small models err often enough.
    return _server(llm, "model", Settings(port=0, log=False, timeout_s=3600, sampling={"temperature": 0}))


@contextmanager
def _server(make: Callable[[Scripted], Any], name: str, settings: Settings) -> Iterator[Scripted]:
    """Runs a server on a free port of this machine, in a thread."""
    sockets = listening_sockets(settings)
    host, port = sockets[0].getsockname()[:2]
    scripted = Scripted(f"http://{host}:{port}")
    started = threading.Event()
    stops: list[Callable[[], object]] = []

    async def run() -> None:
        llm = make(scripted)
        service = Service(llm, settings, name)
        await service.load()
        server = http_server(service, None, lambda app: Recorder(app, scripted.exchanges))
        stop = asyncio.Event()
        stops.append(partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set))
        started.set()
        await server.serve(sockets, stop)
        await llm.close()
        service.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    if not started.wait(60):
        raise SystemExit("the server did not start")
    try:
        yield scripted
    finally:
        stops[0]()
        thread.join(30)
