"""The loop of a thread that owns an engine: commands come in through a queue, pieces of text go out.

Between two steps all commands that have come are obeyed, so that an abort frees its slot within a step,
whether the request waits, reads its prompt or decodes. Without requests the thread waits for commands and
does nothing."""

import queue
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TypeAlias

from hotcold.engine.engine import Engine
from hotcold.engine.generation import Continuation, Piece
from hotcold.engine.request import Constraint, Grammar, Job, Request, RequestError
from hotcold.engine.sampler import DamagedModelError
from hotcold.errors import UserError
from hotcold.hosting.messages import Abort, AskStats, Close, Failure, Stats, Step, Submit
from hotcold.hosting.state import ProcessStats, resident_bytes

_TRIES = 3  # steps that fail one after the other, until the engine counts as broken
_STARTING_S = 0.0005  # that starting jobs may take between two steps
_STEP_TIMES = 8192  # that are kept


class EngineBroken(Exception):
    """Every step fails: only another process can go on."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A job whose grammar is ready, or the error; from this thread's own compiler."""

    id: int
    request: Request
    constraint: Constraint | Exception


Command: TypeAlias = Submit | Abort | AskStats | Close | Compiled


class EngineThread:
    """Runs jobs on an engine. ``commands`` may come from any thread; ``tell`` is given what is new after each
    step, and must return soon; ``constraint`` makes what a grammar allows, perhaps slowly: it is called in a
    thread of its own."""

    def __init__(
        self,
        engine: Engine,
        commands: "queue.SimpleQueue[Command]",
        tell: Callable[[Step | Stats], None],
        constraint: Callable[[Grammar], Constraint] | None = None,
    ) -> None:
        self._engine, self._commands = engine, commands
        self._tell, self._constraint = tell, constraint
        self._arrived: dict[int, Job] = {}  # in order; not looked at yet
        self._running: dict[int, Continuation] = {}
        self._ids: dict[Request, int] = {}
        self._compiling: dict[int, Future[None]] = {}
        self._compilers: ThreadPoolExecutor | None = None
        self._open = True
        self._failed_steps = 0
        self._step_s: deque[float] = deque(maxlen=_STEP_TIMES)
        self._began: float | None = None  # the step before, if requests ran since

    def run(self) -> None:
        """Runs until :class:`Close` comes; then aborts whatever runs. EngineBroken: no step succeeds."""
        try:
            while self._open:
                self._obey_all()
                self._start_arrived()
                if self._running and self._open:
                    self._step()
        finally:
            for id in list(self._running):
                self._abort(id)
            if self._compilers is not None:
                self._compilers.shutdown(wait=False, cancel_futures=True)

    def _obey_all(self) -> None:
        """Obeys all commands that have come; without requests, waits for the next."""
        wait = not self._running and not self._arrived
        if wait:
            self._began = None
        while wait or not self._commands.empty():
            command = self._commands.get()
            wait = False
            match command:
                case Submit():
                    self._arrived[command.id] = command.job
                case Compiled():
                    self._start_compiled(command)
                case Abort():
                    self._abort(command.id)
                case AskStats():
                    self._tell(Stats(command.id, self._stats(command.steps)))
                case Close():
                    self._open = False
                    return

    def _start_arrived(self) -> None:
        """Starts one job, and more while that takes no time to speak of: when many come at once, those that
        run go on in between."""
        until = time.perf_counter() + _STARTING_S
        while self._arrived and self._open:
            id = next(iter(self._arrived))
            self._submit(id, self._arrived.pop(id))
            if time.perf_counter() >= until:
                return

    def _submit(self, id: int, job: Job) -> None:
        try:
            request = Request(job)
            if job.grammar is None:
                self._start(id, request)
            else:
                self._compile(id, request, job.grammar)
        except Exception as error:
            self._fail([(id, error)])

    def _start(self, id: int, request: Request) -> None:
        self._engine.check(request)  # before its text is looked at
        continuation = Continuation(self._engine, request)
        self._engine.add(request)
        self._running[id] = continuation
        self._ids[request] = id

    def _compile(self, id: int, request: Request, grammar: Grammar) -> None:
        """The request is queued when its grammar is ready: steps of others go on meanwhile."""
        make = self._constraint
        if make is None:
            raise RequestError("grammars need the package llguidance: install it")
        if self._compilers is None:
            self._compilers = ThreadPoolExecutor(1, "hotcold-grammar")

        def compiled() -> None:
            found: Constraint | Exception
            try:
                found = make(grammar)
            except Exception as error:
                found = error
            self._commands.put(Compiled(id, request, found))

        self._compiling[id] = self._compilers.submit(compiled)

    def _start_compiled(self, found: Compiled) -> None:
        if self._compiling.pop(found.id, None) is None:
            return  # aborted meanwhile
        try:
            if isinstance(found.constraint, Exception):
                raise found.constraint
            found.request.constraint = found.constraint
            self._start(found.id, found.request)
        except Exception as error:
            self._fail([(found.id, error)])

    def _abort(self, id: int) -> None:
        self._arrived.pop(id, None)
        if (future := self._compiling.pop(id, None)) is not None:
            future.cancel()
        if (continuation := self._forget(id)) is not None:
            self._engine.abort(continuation.request)

    def _forget(self, id: int) -> Continuation | None:
        continuation = self._running.pop(id, None)
        if continuation is not None:
            del self._ids[continuation.request]
        return continuation

    def _step(self) -> None:
        now = time.perf_counter()
        if self._began is not None:
            self._step_s.append(now - self._began)
        self._began = now
        try:
            events = self._engine.step()
        except Exception as defect:
            self._step_failed(defect)
            return
        self._failed_steps = 0
        pieces: list[tuple[int, Piece]] = []
        failed: list[tuple[int, Exception]] = []
        scored = [each.request for each in self._running.values() if each.has_scores]
        for request in dict.fromkeys([*(event.request for event in events), *scored]):
            id = self._ids.get(request)
            if id is None:
                continue
            piece, error = self._take(id, request)
            if piece is not None and (error is None or piece.text or piece.ids):
                pieces.append((id, piece))
            if error is not None:
                failed.append((id, error))
            if error is not None or self._running[id].finished:
                self._forget(id)
        if pieces or failed:
            self._tell(Step(tuple(pieces), tuple(_failure(*each) for each in failed)))

    def _take(self, id: int, request: Request) -> tuple[Piece | None, Exception | None]:
        """Returns a request's new piece, and its error if it has ended with one."""
        try:
            return self._running[id].take(), request.error
        except Exception as defect:
            self._engine.abort(request)
            return None, defect

    def _step_failed(self, error: Exception) -> None:
        """Tells of the requests that the engine ended, since they ran in the step; those that wait go on."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        print(
            f"hotcold: a step failed: {type(error).__name__}: {error} ({where.filename}:{where.lineno})",
            file=sys.stderr,
            flush=True,
        )
        told = RequestError(str(error), "engine_failed") if isinstance(error, UserError) else error
        ended = [id for id, each in self._running.items() if each.request.finished]
        for id in ended:
            self._forget(id)
        self._fail([(id, told) for id in ended])
        self._failed_steps += 1
        if self._failed_steps == _TRIES:
            raise EngineBroken(str(error)) from error

    def _fail(self, jobs: Sequence[tuple[int, Exception]]) -> None:
        self._tell(Step((), tuple(_failure(*each) for each in jobs)))

    def _stats(self, steps: bool) -> ProcessStats:
        times = tuple(self._step_s) if steps else ()
        if steps:
            self._step_s.clear()
        now = self._engine.stats()
        return ProcessStats(**asdict(now), rss_bytes=resident_bytes(), step_s=times)


def _failure(id: int, error: Exception) -> Failure:
    if isinstance(error, RequestError):
        return Failure(id, str(error), error.code, error.retry_after_s)
    if isinstance(error, UserError):
        code = "engine_failed" if isinstance(error, DamagedModelError) else "invalid_request"
        return Failure(id, str(error), code)
    if isinstance(error, MemoryError):
        return Failure(id, "the engine has no memory left for this request", "engine_failed")
    return Failure(id, f"the engine failed: {type(error).__name__}", "engine_failed")
