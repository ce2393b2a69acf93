"""The routes: each reads a body, has it translated, and answers with what the model writes."""

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from hotcold.chat.stand_ins import texts_of
from hotcold.engine.request import Job
from hotcold.server import openapi
from hotcold.server.bodies import AT_ONCE, read_json
from hotcold.server.metrics import CONTENT_TYPE
from hotcold.server.protocol import chat, completion, models, native, tokens
from hotcold.server.protocol.completion import CompletionCall
from hotcold.server.protocol.constraints import SCHEMAS
from hotcold.server.protocol.native import NativeCall
from hotcold.server.replies import JSONReply
from hotcold.server.request_log import LEFT_OUT, NOT_ENFORCED, NOTES
from hotcold.server.service import Service
from hotcold.server.streaming import Answer

_MOST_NOT_ENFORCED = 1000  # characters of the header
_CONTROL = re.compile("[\x00-\x1f\x7f]")
Endpoint: TypeAlias = Callable[[Request], Awaitable[Any]]


def api_routes(service: Service) -> list[BaseRoute]:
    """All but the page's. Each has its path with and without ``/v1``."""
    routes = _Routes(service)
    table: list[tuple[str, str, Endpoint]] = [
        ("GET", "/health", routes.health),
        ("GET", "/metrics", routes.metrics),
        ("GET", "/models", routes.models),
        ("GET", "/models/{name:path}", routes.model),
        ("POST", "/chat/completions", routes.chat),
        ("POST", "/completions", routes.completions),
        ("POST", "/completion", routes.native),
        ("POST", "/tokenize", routes.tokenize),
        ("POST", "/detokenize", routes.detokenize),
        ("GET", "/props", routes.props),
        ("GET", "/openapi.json", routes.openapi),
    ]
    return [
        Route(prefix + path, endpoint, methods=[method])
        for method, path, endpoint in table
        for prefix in ("/v1", "")
    ]


class _Routes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, request: Request) -> Response:
        """Tells everybody whether requests are taken, and nothing else."""
        state, loaded = self._service.state, self._service.llm.loaded
        if state == "ready":
            return JSONReply({"status": "ok"})
        error = self._service.unavailable()
        more = {"loaded": round(loaded, 3)} if state == "loading" else {}
        headers = {"Retry-After": str(error.retry_after)}
        return JSONReply({"status": state, **more, **error.body()}, error.status, headers)

    async def metrics(self, request: Request) -> Response:
        stats = await self._service.stats()
        text = self._service.metrics.text(self._service.llm.loaded, stats)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    async def models(self, request: Request) -> Response:
        return JSONReply(models.listing(self._service.facts))

    async def model(self, request: Request) -> Response:
        return JSONReply(models.one(self._service.facts, request.path_params["name"]))

    async def props(self, request: Request) -> Response:
        return JSONReply(native.props(self._service.facts, self._service.llm.info.template or ""))

    async def openapi(self, request: Request) -> Response:
        return JSONReply(openapi.document())

    async def chat(self, request: Request) -> Any:
        service = self._service
        call = await self._asked(request, chat.parse)
        jobs, reply = await service.in_thread(service.chat_jobs, call)
        _note_not_enforced(request, call.job)
        await self._note_left_out(request, texts_of(call.messages))
        return Answer(service, jobs, reply, stream=call.stream, field="messages")

    async def completions(self, request: Request) -> Any:
        call = await self._asked(request, completion.parse)
        return await self._continued(request, call, call.prompts)

    async def native(self, request: Request) -> Any:
        call = await self._asked(request, native.parse)
        return await self._continued(request, call, call.prompt, done=False)

    async def tokenize(self, request: Request) -> Response:
        call = await self._read(request, tokens.parse_tokenize)
        await self._note_left_out(request, [call.content])
        return JSONReply(await self._service.in_thread(call.answer))

    async def detokenize(self, request: Request) -> Response:
        call = await self._read(request, tokens.parse_detokenize)
        return JSONReply(await self._service.in_thread(call.answer))

    async def _continued(
        self, request: Request, call: CompletionCall | NativeCall, texts: Any, done: bool = True
    ) -> Any:
        """Answers with what the model writes after texts."""
        await self._note_left_out(request, texts_of(texts))
        _note_not_enforced(request, call.job)
        prompts = await self._service.in_thread(call.encode)
        jobs, reply = call.jobs(prompts), call.reply(prompts)
        return Answer(self._service, jobs, reply, stream=call.stream, done=done)

    async def _asked(self, request: Request, parse: Callable[..., Any]) -> Any:
        """Reads a body and checks its grammar, which the check may change. RequestError: no answer can be
        held to it."""
        call = await self._read(request, parse)
        if call.job.grammar is None:
            return call
        grammar = await self._service.llm.check(call.job.grammar)
        return replace(call, job=replace(call.job, grammar=grammar))

    async def _note_left_out(self, request: Request, texts: Iterable[str]) -> None:
        """Tells in the log, and in a header, what of a prompt's texts no token can spell."""
        tokenizer = self._service.llm.tokenizer
        if left_out := await self._service.in_thread(tokenizer.left_out, texts):
            request.scope[NOTES][LEFT_OUT] = left_out

    async def _read(self, request: Request, parse: Callable[..., Any]) -> Any:
        """Reads and parses a body. It looks at the server's state first, so that nobody uploads for
        nothing."""
        facts = self._service.facts
        body, size = await read_json(request, self._service.settings)
        if size <= AT_ONCE and not (isinstance(body, dict) and SCHEMAS & body.keys()):
            return parse(body, facts)
        return await self._service.in_thread(parse, body, facts)


def _note_not_enforced(request: Request, job: Job) -> None:
    """Tells in the log, and in a header, which parts of the request's schemas the answer is not held to."""
    if job.grammar is not None and job.grammar.notes:
        request.scope[NOTES][NOT_ENFORCED] = header_text(job.grammar.notes)


def header_text(notes: Sequence[str]) -> str:
    """Joins as many notes as a header has room for, in ASCII."""
    found = ""
    for i, note in enumerate(notes):
        more = f"{'; ' if found else ''}{note.encode('ascii', 'backslashreplace').decode():.300}"
        if len(found) + len(more) > _MOST_NOT_ENFORCED:
            found += f"; and {len(notes) - i} more"
            break
        found += more
    return _CONTROL.sub(" ", found)
