"""Reads the requests of all routes, prepares them in threads, and returns their answers."""

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
    """Base class of the routes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def _prepared(
        self, request: Request, prepare: Callable[[Any, Facts], T], field: str = "messages"
    ) -> T:
        """Calls ``prepare`` with the request's JSON, in a thread. ``field`` is the prompt's, for messages.

        Raises APIError if the server is not ready (before it reads the body) or too busy. Also raises it for
        invalid JSON, for a prompt that is too long, or if the client disconnected."""
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
        """Returns the model's answer to the call that ``read`` makes from a body."""
        prepared = await self._prepared(
            request, lambda body, facts: self._service.prepare(read(body, facts)), field
        )
        return await self._answer(request, prepared, field)

    async def _answer(self, request: Request, prepared: Prepared, field: str) -> Answer:
        jobs = await self._checked(request, prepared.jobs, field)
        note_left_out(request, prepared.left_out)
        return Answer(self._service, jobs, prepared.reply, stream=prepared.stream, field=field)

    async def _checked(self, request: Request, jobs: Sequence[Job], field: str) -> list[Job]:
        """Checks the lengths of the prompts, which takes no time, and then the grammar. Returns the jobs with
        the grammar as checked, which may differ. ``field`` is the field of the prompts. Raises APIError if a
        prompt does not fit, or if the grammar cannot be enforced."""
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
        """Returns a reply whose JSON is written in threads."""
        return LargeReply(value, self._service.in_thread, self._service.settings.write_s)


def note_left_out(request: Request, left_out: str) -> None:
    """Records, for the log and a header, which characters of a prompt no token can encode."""
    if left_out:
        request.scope[NOTES][LEFT_OUT] = left_out


def note_not_enforced(request: Request, job: Job) -> None:
    """Records, for the log and a header, which parts of the request's schemas are not enforced."""
    if job.grammar is not None and job.grammar.notes:
        request.scope[NOTES][NOT_ENFORCED] = header_text(job.grammar.notes)


def header_text(notes: Sequence[str]) -> str:
    """Joins as many notes as fit into the header, in ASCII."""
    text = ""
    for i, note in enumerate(notes):
        part = f"{'; ' if text else ''}{note[:300].encode('ascii', 'backslashreplace').decode():.300}"
        if len(text) + len(part) > _MOST_NOT_ENFORCED:
            text += f"; and {len(notes) - i} more"
            break
        text += part
    return _CONTROL.sub(" ", text)
