"""The engine process, from its first message to its last."""

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from hotcold.engine.engine import Engine
from hotcold.engine.request import Constraint, Grammar
from hotcold.engine.speculation import speculation_of
from hotcold.errors import UserError
from hotcold.hosting.loop import Command, EngineBroken, EngineThread
from hotcold.hosting.messages import (
    Abort,
    EngineMessage,
    Failure,
    Load,
    LoadFailed,
    Loading,
    Ready,
    Step,
    decode,
    encode,
)
from hotcold.hosting.state import model_info
from hotcold.processes.channel import Reader, Writer
from hotcold.processes.plain_data import PlainDataError
from hotcold.runtime.opening import opened
from hotcold.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from hotcold.grammar.constraint import Grammars

#: Limit of the time that a thread waits for Python's global lock after native code. Other threads read
#: commands and write pieces during steps. Python's default of 5 ms would delay every step.
_SWITCH_S = 0.0003
_PROGRESS_S = 0.05  # time between two reports

EXIT_DEFECT = 70


def serve(reading: int, writing: int) -> int:
    """Loads the model that the first message names, and runs jobs until :class:`Close`. Returns the exit code
    if there was no model to load; otherwise it ends the process."""
    sys.setswitchinterval(_SWITCH_S)
    reader = Reader(reading)
    writer = Writer(writing, gone=_leave)
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def tell(message: EngineMessage) -> None:
        writer.write(partial(encoded, message, commands.put))

    first = reader.read()
    load = decode(*first) if first is not None else None
    if not isinstance(load, Load):
        return 0 if first is None else EXIT_DEFECT
    listener = partial(_listen, reader, commands.put, tell)
    threading.Thread(target=listener, name="hotcold-reader", daemon=True).start()
    engine = _loaded(load, tell)
    code = EXIT_DEFECT
    if engine is not None:
        constraint = _Constraints(engine.model.tokenizer)
        thread = EngineThread(engine, commands, tell, constraint)
        tell(Ready(model_info(engine)))
        try:
            thread.run()
            code = 0
        except EngineBroken as error:
            _note(f"the engine ends: {error}")
        except Exception:
            _note(traceback.format_exc())
        constraint.close()
        engine.model.close()
    writer.close()
    sys.stderr.flush()
    os._exit(code)  # does not wait for threads in system calls


def encoded(message: EngineMessage, put: Callable[[Command], None]) -> bytes:
    """Encodes a message. If a step is too large, only its jobs end, with an error."""
    try:
        return encode(message)
    except PlainDataError as error:
        if not isinstance(message, Step):
            raise
        failures = {each.id: each for each in message.failures}
        for id, _ in message.pieces:
            put(Abort(id))
            failures.setdefault(id, Failure(id, f"an answer cannot be sent: {error}", "engine_failed"))
        return encode(Step((), tuple(failures.values())))


def _loaded(load: Load, tell: Callable[[EngineMessage], None]) -> Engine | None:
    """Loads the model, and its drafter if there is one. If that fails, reports the error and returns None."""
    last = -_PROGRESS_S

    def progress(_: str, nbytes: int, total: int) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= _PROGRESS_S:
            last = now
            tell(Loading(nbytes, total))

    try:
        session = opened(load.model, load.options, progress).session()
        return Engine(session, speculation=speculation_of(session))  # a draft model also needs memory
    except UserError as error:
        message = str(error)
    except MemoryError:
        message = "not enough memory to load the model: use a smaller `context` or a smaller model"
    except Exception as error:
        _note(traceback.format_exc())
        message = f"loading failed by a defect of Hotcold (please report it): {type(error).__name__}: {error}"
    tell(LoadFailed(" ".join(message.split())))
    return None


def _listen(reader: Reader, put: Callable[[Command], None], tell: Callable[[EngineMessage], None]) -> None:
    """Reads commands until the front closes the pipe, then ends the process."""
    try:
        while (parts := reader.read()) is not None:
            try:
                put(decode(*parts))
            except PlainDataError:
                raise
            except ValueError as error:  # an invalid value of a job, which the front should have refused
                tell(Step((), (Failure(parts[0][1]["id"], str(error), "invalid_request"),)))
    except Exception as error:
        _note(f"the server process sent an invalid message: {type(error).__name__}: {error}")
        os._exit(EXIT_DEFECT)
    _leave()


def _leave() -> None:
    """Ends the process at once: without its front it has no task."""
    os._exit(0)


def _note(text: str) -> None:
    print(f"hotcold: {text}", file=sys.stderr, flush=True)


class _Constraints:
    """Makes constraints of grammars that the front has checked. The first one imports the compiler."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._grammars: Grammars | None = None

    def __call__(self, grammar: Grammar) -> Constraint:
        """Makes a constraint. Called from one thread at a time."""
        if self._grammars is None:
            from hotcold.grammar.constraint import Grammars

            self._grammars = Grammars(self._tokenizer)
        return self._grammars.constraint(grammar)

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()
