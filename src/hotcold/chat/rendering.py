"""Renders chat templates, which are untrusted, in processes that can be killed.

A process starts at the first need and stays. A process that exceeds its time or memory is killed: only that
rendering fails, and the next one starts a new process. Other processes serve other requests meanwhile."""

import threading
from collections.abc import Mapping
from typing import Any

from hotcold.engine.request import RequestError
from hotcold.errors import UserError
from hotcold.processes.guarded import GuardedProcess, ProcessDied, ProcessLost

MODULE = "hotcold.chat.renderer"
SECONDS = 2.0  #: processor time of one rendering
MEMORY_BYTES = 256 << 20  #: memory beyond the process's memory after its imports
OUTPUT_BYTES = 64 << 20  #: limit of the answer; a character has up to 6 bytes of JSON
MOST_PROCESSES = 4  #: a server's large requests use at most three, so one remains for small requests
WAIT_SECONDS = 30.0  #: limit of the wait while all processes are busy


class TemplateError(UserError):
    """Raised if a template cannot be rendered, or not with these messages. The message has one line."""


class TemplateStopped(TemplateError):
    """Raised if rendering exceeded its time or memory, or failed."""


class TemplateProcess:
    """Renders templates in other processes; several threads may use it at once."""

    def __init__(self, seconds: float = SECONDS, wait_seconds: float = WAIT_SECONDS) -> None:
        self._seconds = seconds
        self._wait_seconds = wait_seconds
        self._idle: list[GuardedProcess] = []
        self._free = threading.Condition()
        self._started = 0
        self._closed = False

    def render(self, request: Mapping[str, Any]) -> str:
        """Returns the text that ``renderer.render`` makes of a request. Raises TemplateError if it cannot, or
        exceeds its time or memory. Raises RequestError ``queue_full`` if all processes stay busy, and
        ``engine_failed`` if no process can run."""
        text = self._ask(request)["text"]
        assert isinstance(text, str)
        return text

    def probe(self, request: Mapping[str, Any]) -> list[str | None]:
        """Returns the texts of a request's ``probes``, None for each that cannot be rendered. All of them
        together have the time of one rendering. Errors are the same as of :meth:`render`."""
        texts = self._ask(request)["texts"]
        assert isinstance(texts, list)
        return texts

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        process = self._take()
        try:
            return process.ask(dict(request))
        except ProcessLost as error:
            raise RequestError(f"chat templates cannot be rendered now: {error}", "engine_failed") from None
        except ProcessDied as error:
            raise TemplateStopped(f"rendering the model's chat template was stopped: {error}") from None
        except UserError as error:
            raise TemplateError(f"the model's chat template cannot be rendered: {error}") from None
        finally:
            self._give(process)

    def close(self) -> None:
        """Ends the processes; a busy one ends after its rendering."""
        with self._free:
            self._closed = True
            idle, self._idle = self._idle, []
            self._free.notify_all()
        for process in idle:
            process.close()

    def _take(self) -> GuardedProcess:
        with self._free:
            if self._closed:
                raise TemplateError("this chat is closed: create a new one")
            if not self._idle and self._started < MOST_PROCESSES:
                self._idle.append(_new_process(self._seconds))
                self._started += 1
            if not self._free.wait_for(lambda: self._idle or self._closed, self._wait_seconds):
                busy = f"all {MOST_PROCESSES} processes that render chat templates are busy"
                raise RequestError(f"{busy}: try again later", "queue_full", self._wait_seconds)
            if self._closed:
                raise TemplateError("this chat is closed: create a new one")
            return self._idle.pop()

    def _give(self, process: GuardedProcess) -> None:
        with self._free:
            if not self._closed:
                self._idle.append(process)
                self._free.notify()
                return
        process.close()


def _new_process(seconds: float) -> GuardedProcess:
    return GuardedProcess(MODULE, seconds=seconds, memory_bytes=MEMORY_BYTES, output_bytes=OUTPUT_BYTES)
