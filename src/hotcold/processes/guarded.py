"""Answers untrusted requests in a process that can be killed: one line of JSON in, one line out.

Chat templates and grammars may take any time and any memory, so they run there. The module that answers has a
function ``answer(request: dict) -> dict``. Its imports are loaded before the first request, and do not count
towards the bounds of a request."""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
import weakref
from typing import IO, Any

from hotcold.errors import UserError
from hotcold.processes.environment import minimal_environment
from hotcold.values import shown

_START_S = 120.0  # limit for starting an interpreter and its imports, on a busy machine
_CLOCK = 10.0  # clock time allowed per processor time, since other processes compute, too
_REQUEST_BYTES = 1 << 26  # limit of one line of input


class ProcessDied(UserError):
    """Raised if the process ended, or was killed, before it answered. The next request starts another."""


class ProcessLost(ProcessDied):
    """Raised without a fault of the request: no process could start, or it was closed or killed from
    outside."""


class ProcessTimeout(ProcessDied, TimeoutError):
    """Raised if the request took too long; by clock time alone, if the machine is busy."""

    def __init__(self, message: str, *, by_clock: bool = False) -> None:
        super().__init__(message)
        self.by_clock = by_clock


class GuardedProcess:
    """Calls ``module``'s function ``answer`` in its own process. The first request starts the process; a
    killed process is replaced. Several threads may use it: requests wait for each other.

    Bounds of a request: ``seconds`` of processor time (ten times as much clock time), ``memory_bytes`` beyond
    the memory after the imports, ``output_bytes`` of JSON in the answer. The process ends with this one, at
    the latest when a request's time is over."""

    def __init__(self, module: str, *, seconds: float, memory_bytes: int, output_bytes: int) -> None:
        self._module = module
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._output_bytes = output_bytes
        self._lock = threading.Lock()
        self._closed = False
        self._child: _Child | None = None
        self._end: weakref.finalize[..., Any] | None = None  # ends the process, even without close()

    @property
    def pid(self) -> int | None:
        """The id of the running process, or None."""
        child = self._child
        return None if child is None else child.process.pid

    def ask(self, request: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Returns the module's answer, within ``seconds`` if given. Raises UserError if the module raised
        one, and ProcessTimeout after the time limit. Raises ProcessLost without a process, and ProcessDied
        after a failure or for too much memory or output."""
        seconds = self._seconds if seconds is None else seconds
        line = b"%r %b\n" % (seconds, _to_json(request))
        if len(line) > _REQUEST_BYTES:
            raise UserError(f"the request has {len(line)} bytes: at most {_REQUEST_BYTES} are allowed")
        with self._lock:
            if self._closed:
                raise ProcessLost("the process is closed")
            if self._child is None:
                self._child = self._start()
            try:
                answer = json.loads(self._child.exchange(line, seconds * _CLOCK, self._output_bytes))
            except ProcessTimeout as error:
                self._give_up()
                message = f"it took longer than {seconds:g} s and was stopped"
                raise ProcessTimeout(message, by_clock=error.by_clock) from None
            except ProcessDied:
                self._give_up()
                if self._closed:
                    raise ProcessLost("the process is closed") from None
                raise
            except BaseException:  # Ctrl-C: the unread answer would be taken for the next one
                self._give_up()
                raise
            if "failed" in answer:
                self._give_up()
                raise ProcessDied(f"it failed: {answer['failed']}")
        if "error" in answer:
            raise UserError(str(answer["error"]))
        result: dict[str, Any] = answer["answer"]
        return result

    def close(self) -> None:
        """Ends the process; a running request raises ``ProcessDied``. May be called again."""
        self._closed = True
        child = self._child
        if child is not None:
            child.process.kill()  # a thread that waits for its answer reads the end of the pipe
        with self._lock:
            self._give_up()

    def _start(self) -> "_Child":
        child = _Child(self._module, self._memory_bytes, self._output_bytes)
        self._end = weakref.finalize(self, child.end)
        try:
            child.exchange(b"", _START_S, 100)
        except ProcessDied as error:
            self._end()
            raise ProcessLost(f"the process of {self._module} did not start: {error}") from None
        except BaseException:
            self._end()
            raise
        return child

    def _give_up(self) -> None:
        self._child = None
        if self._end is not None:
            self._end()


class _Child:
    """One process and its two pipes."""

    def __init__(self, module: str, memory_bytes: int, output_bytes: int) -> None:
        code = "from hotcold.processes.guarded import serve; serve()"
        self._memory_bytes = memory_bytes
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, module, str(memory_bytes), str(output_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a traceback may quote the request
            # Arenas of malloc use address space, which is bounded.
            env={**minimal_environment(), "MALLOC_ARENA_MAX": "2"},
            **apart(),
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._in: IO[bytes] = self.process.stdin
        self._out: IO[bytes] = self.process.stdout

    def exchange(self, line: bytes, seconds: float, limit: int) -> bytes:
        """Sends a line and returns the answer, of at most ``limit`` bytes. Without a line, returns the first
        answer of a new process, whose memory is not bounded before."""
        late = threading.Event()

        def stop() -> None:
            late.set()
            self.process.kill()

        timer = threading.Timer(seconds, stop)
        timer.daemon = True
        timer.start()
        try:
            if line:
                self._in.write(line)
                self._in.flush()
            answer = self._out.readline(limit + 1)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        finally:
            timer.cancel()
            timer.join()  # a late timer must act before this call ends, not during the next
        if answer.endswith(b"\n") and not late.is_set():
            return answer
        if len(answer) > limit:
            raise ProcessDied(f"its answer has more than {limit} bytes")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)  # the process closed its pipe and may end with an exit code
        self.process.kill()
        code = self.process.wait()
        if late.is_set() or code in _TIME_SIGNALS:
            raise ProcessTimeout("too slow", by_clock=late.is_set() or code != _TIME_SIGNALS[0])
        got = f"signal {-code}" if code < 0 else f"exit code {code}"
        if code == _KILLED:  # killed by another process
            raise ProcessLost(f"it ended ({got})")
        needed = f": it may have needed more than {_mebibytes(self._memory_bytes)}" if line else ""
        raise ProcessDied(f"it ended ({got}){needed}")

    def end(self) -> None:
        self.process.kill()
        for pipe in (self._in, self._out):
            with contextlib.suppress(OSError):  # the line was written, but not read
                pipe.close()
        self.process.wait()


def _to_json(value: object) -> bytes:
    """Returns JSON on one line. Text is not escaped: escaping a long text takes several times as long, and no
    other thread runs meanwhile."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def apart(platform: str = sys.platform) -> dict[str, Any]:
    """Returns options of ``Popen`` that protect a process from the terminal's Ctrl-C."""
    if platform == "win32":
        return {"creationflags": 0x200}  # CREATE_NEW_PROCESS_GROUP, which other systems' modules lack
    return {"start_new_session": True}


def _mebibytes(n: int) -> str:
    return f"{n / 2**20:g} MiB of memory"


if sys.platform == "win32":
    import functools

    from hotcold.processes.windows import OVER_TIME, Bounds
    from hotcold.windows import kernel32

    _TIME_SIGNALS: tuple[int, ...] = (OVER_TIME,)  # an exit code on this system
    _KILLED: int | None = None

    @functools.cache
    def _bounds() -> Bounds:
        return Bounds(kernel32())

    def _bound_memory(additional: int) -> None:
        _bounds().memory(additional)

    def _bound_time(seconds: float) -> None:
        _bounds().time(seconds, seconds * (_CLOCK + 1))

else:
    import resource
    import signal

    _TIME_SIGNALS = (-signal.SIGPROF, -signal.SIGALRM)  # for processor time and clock time
    _KILLED = -signal.SIGKILL

    def _bound_memory(additional: int) -> None:
        """Limits the process to ``additional`` bytes of address space beyond the present, if the system
        reports it (Linux). Disables core files."""
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            with open("/proc/self/statm", encoding="ascii") as file:
                now = int(file.read().split()[0]) * resource.getpagesize()
        except OSError:
            return
        resource.setrlimit(resource.RLIMIT_AS, (now + additional, now + additional))

    def _bound_time(seconds: float) -> None:
        """Lets the system end the process after this much processor time, and after ten times as much clock
        time; 0 removes the limits."""
        if not seconds:  # the parent may have blocked or ignored these signals
            for one in (signal.SIGPROF, signal.SIGALRM):
                signal.signal(one, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF, signal.SIGALRM))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, seconds * (_CLOCK + 1))


def serve() -> None:
    """Runs the child process: answers until its input ends."""
    name, memory_bytes, output_bytes = sys.argv[1:]
    _bound_time(0)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other output must not be taken for an answer
    module = importlib.import_module(name)
    _bound_memory(int(memory_bytes))
    answers.write(b"{}\n")
    answers.flush()
    while line := sys.stdin.buffer.readline():
        seconds, request = line.split(b" ", 1)
        _bound_time(float(seconds))
        reply = _reply(module, request)
        encoded = _to_json(reply) + b"\n"
        _bound_time(0)
        answers.write(encoded[: int(output_bytes) + 1])  # the reader refuses a longer answer
        answers.flush()
        if "failed" in reply:
            return  # the state is unknown


def _reply(module: Any, line: bytes) -> dict[str, Any]:
    try:
        return {"answer": module.answer(json.loads(line))}
    except UserError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {shown(str(error))}"}
