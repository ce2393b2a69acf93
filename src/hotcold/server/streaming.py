"""The model's answers, sent at once or as a stream of events. A disconnect cancels their jobs."""

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from hotcold.engine.request import Job, RequestError
from hotcold.server.framing import FRAMES
from hotcold.server.protocol.constraints import grammar_param
from hotcold.server.protocol.errors import APIError, from_job
from hotcold.server.protocol.json_parts import is_large
from hotcold.server.protocol.replies import Reply
from hotcold.server.replies import error_reply
from hotcold.server.request_log import NOTES, defect
from hotcold.server.running import Running
from hotcold.server.sending import Sending, disconnected
from hotcold.server.service import Service

_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies forward events at once
]


class Answer:
    """The response of a route. It runs the jobs and sends the reply that ``reply`` makes from their pieces.
    ``field`` is the field of the prompt, for error messages."""

    def __init__(
        self,
        service: Service,
        jobs: Sequence[Job],
        reply: Reply,
        *,
        stream: bool,
        field: str = "prompt",
    ) -> None:
        self._service, self._jobs, self._reply = service, jobs, reply
        self._stream, self._field = stream, field
        self._frames = FRAMES[reply.framing]
        self._started = False
        self._complete = False  # the last part was passed to the connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._work(scope, send))
        gone = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not self._complete:  # otherwise the task is about to end
                work.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if work.cancelled():
            scope[NOTES]["status"] = 499
        else:
            work.result()

    async def _work(self, scope: Scope, send: Send) -> None:
        running = Running(self._service.llm, self._jobs, self._service.metrics, self._reply.at_once)
        sending = Sending(scope, send, self._service.settings.write_s)
        notes = scope[NOTES]
        notes["prompt"] = sum(len(job.prompt) for job in self._jobs)
        with self._service.counted(running):
            try:
                async with running:
                    await (
                        self._events(running, sending)
                        if self._stream
                        else self._whole(running, scope, sending)
                    )
            except Exception as error:
                await self._fail(self._as_api_error(error, scope), scope, sending)
            finally:
                notes["generated"] = running.generated
                if running.ttft_s is not None:
                    notes["ttft"] = f"{running.ttft_s:.3f}s"

    async def _whole(self, running: Running, scope: Scope, sending: Sending) -> None:
        while not running.finished:
            for index, piece in await running.take(self._service.settings.ping_s):
                self._reply.add(index, piece)

        def note_part(last: bool) -> None:
            self._started, self._complete = True, last

        await sending.json(self._reply.whole, self._service.in_thread, note_part)

    async def _events(self, running: Running, sending: Sending) -> None:
        patience = self._service.settings.ping_s
        # An error before the first event is reported by a status.
        pieces = await running.take(patience)
        headers = [(b"content-type", self._frames.content_type), *_HEADERS]
        await sending.start(headers)
        self._started = True
        events = self._reply.first()
        while True:
            for index, piece in pieces:
                events += self._reply.add(index, piece)
            if running.finished:
                break
            idle = not events and not pieces
            lines = await self._lines(self._reply.waiting() if idle else events)
            await sending.body(self._frames.ping if idle and not lines else lines)
            pieces = await running.take(patience)
            events = []
        events += self._reply.end()
        lines = await self._lines(events)
        self._complete = True
        await sending.body(lines + self._frames.done, more_follows=False)

    async def _lines(self, events: list[dict[str, Any]]) -> bytes:
        if is_large(events):
            return await self._service.in_thread(self._frames.lines, events)
        return self._frames.lines(events)

    def _as_api_error(self, error: Exception, scope: Scope) -> APIError:
        """Returns the error for the client, and records it for the log."""
        if isinstance(error, RequestError):
            error = from_job(error, self._field, grammar_param(self._jobs))
        if not isinstance(error, APIError):
            return defect(error, scope)
        scope[NOTES]["error"] = error.code
        return error

    async def _fail(self, error: APIError, scope: Scope, sending: Sending) -> None:
        if self._started and not self._stream:
            raise error  # closes the connection: incomplete JSON must not look complete
        self._complete = True
        if not self._started:
            await sending.response(error_reply(error, scope["path"]))
            return
        await sending.body(self._frames.lines(self._reply.fail(error)), more_follows=False)
