"""An engine process in which requests fail: ``max_tokens`` says at which stage of an answer, and when."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hotcold.engine.engine import Engine
from hotcold.engine.generation import Continuation
from hotcold.engine.request import Job, Request
from hotcold.hosting import host, loop
from hotcold.hosting.loop import EngineThread
from hotcold.hosting.messages import Step
from hotcold.processes.plain_data import PlainDataError
from hotcold.runtime.session import Session

STAGES = ("step", "constraint", "text", "pipe", "end")
MOMENTS = ("first", "amid", "last")
_CODE = 2000  # the first of the values of max_tokens that ask for a fault
_AMID, _LAST = 3, 6  # tokens of the answer


def max_tokens_of(stage: str, moment: str) -> int:
    return _CODE + 10 * STAGES.index(stage) + MOMENTS.index(moment)


def launcher(folder: Path) -> Path:
    """A program to start in place of Python, which runs the engine process with faults (POSIX)."""
    path = folder / "python"
    code = "from support.faulty_engine import install; install()\nfrom hotcold.hosting.__main__ import main"
    path.write_text(f"#!{sys.executable} -P\nimport sys\n{code}\nsys.exit(main())\n", encoding="utf-8")
    path.chmod(0o700)
    return path


def fault_of(job: Job) -> tuple[str, str] | None:
    stage, moment = divmod(job.max_tokens - _CODE, 10)
    return (STAGES[stage], MOMENTS[moment]) if job.max_tokens >= _CODE else None


def _due(request: Request, stage: str) -> bool:
    """True if the request fails now at this stage."""
    if (fault := fault_of(request.job)) is None or fault[0] != stage:
        return False
    return len(request.output) >= {"first": 0, "amid": _AMID, "last": _LAST}[fault[1]]


def install() -> None:
    """Makes this process's engine fail."""
    run, step, start, take = Session.run, Engine.step, EngineThread._start, Continuation.take
    submit, taken, encode = EngineThread._submit, EngineThread._take, host.encode
    loop._TRIES = sys.maxsize  # faulty steps follow each other here
    engines: list[Engine] = []
    jobs: dict[int, Job] = {}
    pieces: dict[int, int] = {}

    def faulty_step(engine: Engine) -> Any:
        engines[:] = [engine]
        events = step(engine)
        for request in engine.scheduler.running:
            if fault_of(request.job) is not None and len(request.output) == _LAST:
                engine.finish(request)
                if _due(request, "step"):
                    raise RuntimeError("a step that gave a last token")
        return events

    def faulty_run(session: Session, *arguments: Any) -> None:
        if any(_due(each, "step") for each in engines[0].scheduler.running):
            raise RuntimeError("a step")
        run(session, *arguments)

    def faulty_start(thread: EngineThread, id: int, request: Request) -> None:
        if (fault := fault_of(request.job)) is not None and fault[0] == "constraint":
            tokens = {"first": 0, "amid": _AMID, "last": _LAST - 1}[fault[1]]

            def constraint(output: Any) -> Any:
                if len(output) >= tokens:
                    raise RuntimeError("a constraint")
                return None, None

            request.constraint = constraint
        start(thread, id, request)

    def faulty_text(continuation: Continuation) -> Any:
        if _due(continuation.request, "text"):
            raise RuntimeError("a text")
        return take(continuation)

    def faulty_take(thread: EngineThread, id: int, request: Request) -> Any:
        piece, error = taken(thread, id, request)
        if error is None and _due(request, "end"):
            return piece, RuntimeError("the end")
        return piece, error

    def faulty_submit(thread: EngineThread, id: int, job: Job) -> None:
        jobs[id] = job
        submit(thread, id, job)

    def faulty_encode(message: Any) -> bytes:
        for id, piece in message.pieces if isinstance(message, Step) else ():
            stage, moment = fault_of(jobs[id]) or ("", "")
            pieces[id] = pieces.get(id, 0) + 1
            last = piece.finish_reason is not None
            if stage == "pipe" and {"first": True, "amid": pieces[id] > 2 or last, "last": last}[moment]:
                raise PlainDataError("a pipe")
        return encode(message)

    Engine.step, Session.run, Continuation.take = faulty_step, faulty_run, faulty_text  # type: ignore[method-assign]
    EngineThread._start, EngineThread._submit = faulty_start, faulty_submit  # type: ignore[method-assign]
    EngineThread._take, host.encode = faulty_take, faulty_encode  # type: ignore[method-assign]
