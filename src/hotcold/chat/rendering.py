"""Chat templates are rendered in processes that can be ended: they come with models, so from strangers.

A process is started when first needed and kept. One that takes too long or too much memory is ended, that
rendering alone fails, and the next one starts another. While one of them hangs, another serves the rest."""

import importlib.util
import threading
from collections.abc import Mapping
from typing import Any

from hotcold.engine.request import RequestError
from hotcold.errors import UserError
from hotcold.processes.guarded import GuardedProcess, ProcessDied, ProcessLost

MODULE = "hotcold.chat.renderer"
SECONDS = 2.0  #: of a processor, of one rendering
MEMORY_BYTES = 256 << 20  #: beyond what the process has after its imports
OUTPUT_BYTES = 64 << 20  #: of its answer; a character is up to 12 bytes of JSON
MOST_PROCESSES = 3
WAIT_SECONDS = 30.0  #: for a process, while all of them are busy


class TemplateError(UserError):
    """A template that cannot be rendered, or not with these messages. One line."""


class TemplateProcess:
    """May be used from several threads at once."""

    def __init__(self, seconds: float = SECONDS, wait_seconds: float = WAIT_SECONDS) -> None:
        self._seconds = seconds
        self._wait_seconds = wait_seconds
        self._idle: list[GuardedProcess] = []
        self._free = threading.Condition()
        self._started = 0
        self._closed = False

    def render(self, request: Mapping[str, Any]) -> str:
        """The text that ``template_renderer.render`` makes of a request. TemplateError: it cannot, or takes
        longer than allowed, or too much memory. RequestError ``queue_full``: all processes are busy for long;
        ``engine_failed``: there is no process, through no fault of the request."""
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
            raise TemplateError(f"rendering the model's chat template was stopped: {error}") from None
        except UserError as error:
            raise TemplateError(f"the model's chat template cannot be rendered: {error}") from None
        finally:
            self._give(process)

    def close(self) -> None:
        """Ends the processes; those at work when they are done."""
        with self._free:
            self._closed = True
            idle, self._idle = self._idle, []
            self._free.notify_all()
        for process in idle:
            process.close()

    def _take(self) -> GuardedProcess:
        with self._free:
            if self._closed:
                raise TemplateError("this chat is closed: make another")
            if not self._idle and self._started < MOST_PROCESSES:
                self._idle.append(_new_process(self._seconds))
                self._started += 1
            if not self._free.wait_for(lambda: self._idle or self._closed, self._wait_seconds):
                busy = f"all {MOST_PROCESSES} processes that render chat templates are busy"
                raise RequestError(f"{busy}: try again later", "queue_full", self._wait_seconds)
            if self._closed:
                raise TemplateError("this chat is closed: make another")
            return self._idle.pop()

    def _give(self, process: GuardedProcess) -> None:
        with self._free:
            if not self._closed:
                self._idle.append(process)
                self._free.notify()
                return
        process.close()


def check_extra() -> None:
    """TemplateError: Jinja is not installed."""
    if importlib.util.find_spec("jinja2") is None:
        raise TemplateError("chat templates need the extra: pip install 'hotcold[serve]'")


def _new_process(seconds: float) -> GuardedProcess:
    check_extra()
    return GuardedProcess(MODULE, seconds=seconds, memory_bytes=MEMORY_BYTES, output_bytes=OUTPUT_BYTES)
