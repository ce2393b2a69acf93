"""Reads the requests of all routes, has them prepared in threads, and has them answered."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request

from hotcold.engine.request import Job, RequestError
from hotcold.server.bodies import parse, read_body
from hotcold.server.protocol.constraints import grammar_param
from hotcold.server.protocol.errors import from_job
from hotcold.server.protocol.facts import Facts
from hotcold.server.request_log import LEFT_OUT, NOT_ENFORCED, NOTES
from hotcold.server.sending import LargeReply, unless_gone
from hotcold.server.service import Call, Prepared, Service
from hotcold.server.streaming import Answer

T = TypeVar("T")

_MOST_NOT_ENFORCED = 1000  # characters of the header
_CONTROL = re.compile("[\x00-\x1f\x7f]")


class Reader:
    """Base of the classes of routes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def _prepared(
        self, request: Request, prepare: Callable[[Any, Facts], T], field: str = "messages"
    ) -> T:
        """Calls ``prepare`` with the request's JSON, in a thread. A server that is not ready says so before
        the body is uploaded. ``field`` is where a prompt came in. APIError: the server is not ready or too
        busy, the body is no JSON, the prompt is too long, or the client has gone."""
        service = self._service
        facts = service.facts
        body = await read_body(request, service.settings, service.in_thread)

        def prepared() -> T:
            return prepare(parse(body, service.settings.depth), facts)

        try:
            return await unless_gone(request.receive, service.preparing.run(len(body), prepared))
        except RequestError as error:
            raise from_job(error, field) from None

    async def _generated(self, request: Request, read: Callable[[Any, Facts], Call], field: str) -> Answer:
        """Answers with what the model writes for the call that ``read`` makes of a body."""
        prepared = await self._prepared(
            request, lambda body, facts: self._service.prepare(read(body, facts)), field
        )
        return await self._answer(request, prepared, field)

    async def _answer(self, request: Request, prepared: Prepared, field: str) -> Answer:
        jobs = await self._checked(request, prepared.jobs, field)
        note_left_out(request, prepared.left_out)
        return Answer(self._service, jobs, prepared.reply, stream=prepared.stream, field=field)

    async def _checked(self, request: Request, jobs: Sequence[Job], field: str) -> list[Job]:
        """The jobs of a request with its grammar checked, which the check may change; before that, whether
        their prompts have room, since that takes no time. ``field`` is where these came in. APIError: one has
        none, or no answer can be held to the grammar."""
        llm = self._service.llm
        grammar = jobs[0].grammar if jobs else None
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

    def _large(self, value: Any) -> LargeReply:
        """The reply whose JSON is written in threads."""
        return LargeReply(value, self._service.in_thread, self._service.settings.write_s)


def note_left_out(request: Request, left_out: str) -> None:
    """Notes for the log, and for a header, what of a prompt's texts no token can spell."""
    if left_out:
        request.scope[NOTES][LEFT_OUT] = left_out


def note_not_enforced(request: Request, job: Job) -> None:
    """Notes for the log, and for a header, which parts of the request's schemas the answer is not held to."""
    if job.grammar is not None and job.grammar.notes:
        request.scope[NOTES][NOT_ENFORCED] = header_text(job.grammar.notes)


def header_text(notes: Sequence[str]) -> str:
    """Joins as many notes as a header has room for, in ASCII."""
    found = ""
    for i, note in enumerate(notes):
        more = f"{'; ' if found else ''}{note[:300].encode('ascii', 'backslashreplace').decode():.300}"
        if len(found) + len(more) > _MOST_NOT_ENFORCED:
            found += f"; and {len(notes) - i} more"
            break
        found += more
    return _CONTROL.sub(" ", found)
