"""Renders chat templates in processes that can be killed: templates come with models, so from strangers.

A process starts when it is first needed, and is kept. A process that takes too long or too much memory is
killed: only that rendering fails, and the next one starts another. While one hangs, others serve the rest."""

import threading
from collections.abc import Mapping
from typing import Any

from hotcold.engine.request import RequestError
from hotcold.errors import UserError
from hotcold.processes.guarded import GuardedProcess, ProcessDied, ProcessLost

MODULE = "hotcold.chat.renderer"
SECONDS = 2.0  #: processor time of one rendering
MEMORY_BYTES = 256 << 20  #: memory beyond that of the process after its imports
OUTPUT_BYTES = 64 << 20  #: limit of its answer; a character is up to 6 bytes of JSON
MOST_PROCESSES = 4  #: a server's large requests take three at most, and leave one to small ones
WAIT_SECONDS = 30.0  #: how long to wait for a process while all are busy


class TemplateError(UserError):
    """Raised if a template cannot be rendered, or not with these messages. One line."""


class TemplateStopped(TemplateError):
    """Raised if rendering took too long or too much memory, or failed."""


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
        """The text that ``renderer.render`` makes of a request. TemplateError: it cannot, or takes too long
        or too much memory. RequestError ``queue_full``: all processes are busy for long; ``engine_failed``:
        there is no process, and the request is not to blame."""
        text = self._ask(request)["text"]
        assert isinstance(text, str)
        return text

    def probe(self, request: Mapping[str, Any]) -> list[str | None]:
        """The texts of a request's ``probes``, None for each that cannot be rendered; all of them together
        may take as long as one rendering. Errors are those of :meth:`render`."""
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
        """Ends the processes; a busy one ends when it is done."""
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
