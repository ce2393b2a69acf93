"""Reads the requests of all routes, notes what a request asked in vain, and has it answered."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from hotcold.chat.stand_ins import texts_of
from hotcold.engine.request import Job
from hotcold.server.bodies import AT_ONCE, read_json
from hotcold.server.protocol.chat import ChatCall
from hotcold.server.protocol.completion import CompletionCall
from hotcold.server.protocol.constraints import SCHEMAS
from hotcold.server.protocol.native import NativeCall
from hotcold.server.request_log import LEFT_OUT, NOT_ENFORCED, NOTES
from hotcold.server.service import Service
from hotcold.server.streaming import Answer

_MOST_NOT_ENFORCED = 1000  # characters of the header
_CONTROL = re.compile("[\x00-\x1f\x7f]")


class Reader:
    """Base of the classes of routes."""

    def __init__(self, service: Service) -> None:
        self._service = service

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

    async def _answered(self, request: Request, call: ChatCall, field: str) -> Answer:
        """Answers a conversation; ``field`` is where it came in."""
        jobs, reply = await self._service.in_thread(self._service.chat_jobs, call)
        note_not_enforced(request, call.job)
        await self._note_left_out(request, texts_of(call.messages))
        return Answer(self._service, jobs, reply, stream=call.stream, field=field)

    async def _continued(self, request: Request, call: CompletionCall | NativeCall, texts: Any) -> Any:
        """Answers with what the model writes after texts."""
        await self._note_left_out(request, texts_of(texts))
        note_not_enforced(request, call.job)
        prompts = await self._service.in_thread(call.encode)
        jobs, reply = call.jobs(prompts), call.reply(prompts)
        return Answer(self._service, jobs, reply, stream=call.stream)


def note_not_enforced(request: Request, job: Job) -> None:
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
