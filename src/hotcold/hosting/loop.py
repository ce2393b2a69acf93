"""The loop of the thread that owns an engine. Commands arrive in a queue; pieces of text are sent.

Between two steps the thread executes all commands. An abort thus frees its slot within a step, whether the
request waits, reads its prompt or decodes. Without requests the thread waits for commands."""

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

_TRIES = 3  # consecutive failed steps before the engine counts as broken
_STARTING_S = 0.0005  # time for starting jobs between two steps
_STEP_TIMES = 8192  # limit of stored step times


class EngineBroken(Exception):
    """Raised if every step fails; only a new process can recover."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A job with its grammar's constraint, or the error. The compiler thread sends it."""

    id: int
    request: Request
    constraint: Constraint | Exception


Command: TypeAlias = Submit | Abort | AskStats | Close | Compiled


class EngineThread:
    """Runs jobs on an engine. Any thread may put ``commands``. ``tell`` sends the results of each step, and
    must return soon. ``constraint`` compiles a grammar; it may be slow, so it runs in its own thread."""

    def __init__(
        self,
        engine: Engine,
        commands: "queue.SimpleQueue[Command]",
        tell: Callable[[Step | Stats], None],
        constraint: Callable[[Grammar], Constraint] | None = None,
    ) -> None:
        self._engine, self._commands = engine, commands
        self._tell, self._constraint = tell, constraint
        self._arrived: dict[int, Job] = {}  # in the order of arrival, before any check
        self._running: dict[int, Continuation] = {}
        self._ids: dict[Request, int] = {}
        self._compiling: dict[int, Future[None]] = {}
        self._compilers: ThreadPoolExecutor | None = None
        self._open = True
        self._failed_steps = 0
        self._step_s: deque[float] = deque(maxlen=_STEP_TIMES)
        self._began: float | None = None  # start of the last step, if requests ran since

    def run(self) -> None:
        """Runs until :class:`Close`, then aborts all jobs. Raises EngineBroken if no step succeeds."""
        try:
            while self._open:
                self._execute_commands()
                self._start_arrived()
                if self._running and self._open:
                    self._step()
        finally:
            for id in list(self._running):
                self._abort(id)
            if self._compilers is not None:
                self._compilers.shutdown(wait=False, cancel_futures=True)

    def _execute_commands(self) -> None:
        """Executes all queued commands; without requests, waits for the next one."""
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
        """Starts one job, and further ones for a short time: a burst of jobs does not delay the running
        ones."""
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
        self._engine.check(request)  # before its text is processed
        continuation = Continuation(self._engine, request)
        self._engine.add(request)
        self._running[id] = continuation
        self._ids[request] = id

    def _compile(self, id: int, request: Request, grammar: Grammar) -> None:
        """Compiles a request's grammar in another thread, then queues the request. Other requests run."""
        make = self._constraint
        if make is None:
            raise RequestError("grammars need the package llguidance: install it")
        if self._compilers is None:
            self._compilers = ThreadPoolExecutor(1, "hotcold-grammar")

        def compiled() -> None:
            result: Constraint | Exception
            try:
                result = make(grammar)
            except Exception as error:
                result = error
            self._commands.put(Compiled(id, request, result))

        self._compiling[id] = self._compilers.submit(compiled)

    def _start_compiled(self, job: Compiled) -> None:
        if self._compiling.pop(job.id, None) is None:
            return  # aborted in the meantime
        try:
            if isinstance(job.constraint, Exception):
                raise job.constraint
            job.request.constraint = job.constraint
            self._start(job.id, job.request)
        except Exception as error:
            self._fail([(job.id, error)])

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
        """Returns a request's new piece, and its error if it ended with one."""
        try:
            return self._running[id].take(), request.error
        except Exception as defect:
            self._engine.abort(request)
            return None, defect

    def _step_failed(self, error: Exception) -> None:
        """Reports the requests of a failed step, which the engine has ended. Waiting requests continue."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        print(
            f"hotcold: a step failed: {type(error).__name__}: {error} ({where.filename}:{where.lineno})",
            file=sys.stderr,
            flush=True,
        )
        reported = RequestError(str(error), "engine_failed") if isinstance(error, UserError) else error
        ended = [id for id, each in self._running.items() if each.request.finished]
        for id in ended:
            self._forget(id)
        self._fail([(id, reported) for id in ended])
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
