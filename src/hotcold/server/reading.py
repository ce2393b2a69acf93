"""Reads the requests of all routes, notes what a request asked in vain, and has it answered."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from hotcold.chat.stand_ins import texts_of
from hotcold.engine.request import Job, RequestError
from hotcold.server.bodies import AT_ONCE, read_json
from hotcold.server.protocol.chat import ChatCall
from hotcold.server.protocol.completion import CompletionCall
from hotcold.server.protocol.constraints import SCHEMAS, grammar_param
from hotcold.server.protocol.errors import from_job
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

    async def _checked(self, request: Request, jobs: Sequence[Job], field: str) -> list[Job]:
        """The jobs of a request with its grammar checked, which the check may change; before that, whether
        their prompts have room, since that takes no time. ``field`` is where these came in. APIError: one has
        none, or no answer can be held to the grammar."""
        llm = self._service.llm
        grammar = jobs[0].grammar
        try:
            for job in jobs:
                llm.check_length(job)
            if grammar is None:
                return [*jobs]
            grammar = await llm.check(grammar)
        except RequestError as error:
            raise from_job(error, field, grammar_param(jobs)) from None
        checked = [replace(job, grammar=grammar) for job in jobs]
        note_not_enforced(request, checked[0])
        return checked

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
        jobs = await self._checked(request, jobs, field)
        await self._note_left_out(request, texts_of(call.messages))
        return Answer(self._service, jobs, reply, stream=call.stream, field=field)

    async def _continued(self, request: Request, call: CompletionCall | NativeCall, texts: Any) -> Any:
        """Answers with what the model writes after texts."""
        prompts = await self._service.in_thread(call.encode)
        jobs, reply = await self._checked(request, call.jobs(prompts), "prompt"), call.reply(prompts)
        await self._note_left_out(request, texts_of(texts))
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
