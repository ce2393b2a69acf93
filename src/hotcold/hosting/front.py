"""The front of an engine process: jobs go in, and pieces of their texts come out; this side only waits."""

import asyncio
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack

from hotcold.engine.generation import Piece
from hotcold.engine.request import Job, PromptTooLongError, RequestError
from hotcold.errors import UserError
from hotcold.hosting.messages import (
    Abort,
    AskStats,
    Close,
    Command,
    Load,
    LoadFailed,
    Loading,
    Ready,
    Stats,
    Step,
    Submit,
    decode,
    encode,
)
from hotcold.hosting.model_file import ModelFile
from hotcold.hosting.state import ModelInfo, ProcessStats
from hotcold.processes.environment import engine_environment
from hotcold.processes.guarded import apart
from hotcold.processes.plain_data import PlainDataError, Unpacker
from hotcold.runtime.options import LoadOptions, complete
from hotcold.runtime.pooling import Pooling, pooling_of
from hotcold.runtime.sampling import SamplingParams
from hotcold.tokenizer.tokenizer import Tokenizer
from hotcold.values import LARGEST, whole

#: ``new`` until it is started; ``failed`` when loading failed or the engine process died.
Status = Literal["new", "loading", "ready", "failed", "closed"]

_EXIT_S = 10.0  # that the engine process has to end by itself
_LOADING_RETRY_S = 2.0


class EngineFront:
    """A model in a process of its own, for one event loop: all methods belong to the loop in which
    :meth:`start` was called, and to its thread. Options are those of :class:`AsyncLLM`."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        max_waiting: int = 64,
        **options: Unpack[LoadOptions],
    ) -> None:
        given: dict[str, Any] = {"sequences": 4, **options}
        loading = complete(given)  # UserError now, and not from the other process
        self._chat_template = loading["chat_template"]
        self._pooling = loading["pooling"]
        self._options = {name: _plain(value) for name, value in given.items() if value is not None}
        self._model = None if model is None else os.fspath(model)
        #: jobs that may run or wait at the same time
        self.most = loading["sequences"] + whole("max_waiting", max_waiting, 0, LARGEST)
        self._status: Status = "new"
        self._loaded = 0.0
        self._error: str | None = None
        self._file: ModelFile | None = None
        self._info: ModelInfo | None = None
        self._replies: dict[int, _Reply] = {}
        self._asked: dict[int, asyncio.Future[ProcessStats]] = {}
        self._last_id = 0
        self._job_s = 1.0  # a running mean of how long jobs take
        self._settled = asyncio.Event()  # loading has come to an end
        self._idle = asyncio.Event()  # no job is unfinished
        self._idle.set()
        self._exited = asyncio.Event()
        self._transport: asyncio.SubprocessTransport | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def status(self) -> Status:
        return self._status

    @property
    def loaded(self) -> float:
        """The part of the model that was read, 0 to 1."""
        return self._loaded

    @property
    def error(self) -> str | None:
        """A line on why the status is ``failed``."""
        return self._error

    @property
    def info(self) -> ModelInfo:
        """RequestError: the model is not loaded yet, or could not be."""
        if self._info is None:
            raise self._unusable()
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """Errors as of :attr:`info`."""
        return self._ready_file().tokenizer

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The GGUF file's metadata, which is all but its tensors; errors as of :attr:`info`."""
        return self._ready_file().metadata

    @property
    def sampling(self) -> SamplingParams:
        """How tokens are chosen where a request does not say: until the model is loaded, whose file may
        recommend something, as in :class:`SamplingParams`."""
        return SamplingParams() if self._file is None else self._file.sampling

    async def start(self) -> None:
        """Starts the engine process, which then loads the model: see :meth:`ready`. RuntimeError: it was
        started or closed before; OSError: the system starts no process."""
        if self._status != "new":
            raise RuntimeError(f"this engine is {self._status}: create a new one")
        self._status = "loading"
        pipes = _Pipes(self._told, self._process_ended, self._fail)
        try:
            self._transport, _ = await asyncio.get_running_loop().subprocess_exec(
                lambda: pipes,
                *(sys.executable, "-P", "-m", "hotcold.hosting"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=None,
                env=engine_environment(),
                **apart(),
            )
        except BaseException:
            self._fail("the engine process cannot be started")
            raise
        if self._status != "loading":  # closed meanwhile
            self._kill()
            return
        self._send(Load(self._model, self._options))

    async def ready(self) -> None:
        """Waits until the model is loaded; a UserError says why it cannot be."""
        if self._status == "new":
            raise RuntimeError("the engine is not started: call start() first")
        await self._settled.wait()
        if self._status == "closed":
            raise self._unusable()
        if self._info is None:
            raise UserError(self._error or "the model was not loaded")

    async def stream(self, job: Job) -> AsyncGenerator[Piece, None]:
        """Runs a job and yields its text piece by piece; the last one has a ``finish_reason``. Closing the
        generator, or cancelling who waits for it, ends the job, wherever it is, within a step.

        RequestError: it cannot start, now, or it cannot go on; see :class:`RequestError` for its codes."""
        id, reply = self._submit(job)
        try:
            while True:
                piece = await reply.next()
                yield piece
                if piece.finish_reason not in (None, "error"):  # after an error, it comes next
                    return
        finally:
            self._drop(id)

    def check(self) -> None:
        """RequestError: no job can run now."""
        if self._status != "ready":
            raise self._unusable()

    async def stats(self, *, steps: bool = False) -> ProcessStats:
        """How the engine is, after its current step; with ``steps`` how long the steps took since this was
        asked for last. RequestError: there is no engine."""
        self.check()
        id = self._next_id()
        asked: asyncio.Future[ProcessStats] = asyncio.get_running_loop().create_future()
        self._asked[id] = asked
        self._send(AskStats(id, steps))
        try:
            return await asked
        finally:
            self._asked.pop(id, None)

    async def close(self, drain_s: float = 0) -> None:
        """Ends the engine process. No new job can start from now on; those that run have ``drain_s`` seconds
        to end, and then get a RequestError ``closed``. May be called again meanwhile, to wait for less
        time."""
        if self._status != "failed":
            self._status = "closed"
        self._settled.set()
        try:
            if drain_s > 0:
                await _wait(self._idle, drain_s)
            self._end_all(RequestError("the engine was closed", "closed"))
            if self._reading is not None:
                await asyncio.wait([self._reading])
            if self._transport is not None and not self._exited.is_set():
                if self._info is not None:
                    self._send(Close())
                elif (pipe := self._transport.get_pipe_transport(0)) is not None:
                    pipe.close()  # it ends while it loads
                await _wait(self._exited, _EXIT_S)
        finally:
            self._kill()
        await self._exited.wait()

    @property
    def pooling(self) -> Pooling:
        """How texts become vectors. UserError: the user chose no pooling, and the file names none that is
        supported."""
        return pooling_of(self.metadata, self._pooling)

    def check_length(self, job: Job) -> None:
        """RequestError ``context_length_exceeded``: the prompt leaves no room for an answer."""
        context = self.info.context
        if len(job.prompt) >= context:
            raise PromptTooLongError(len(job.prompt), context)

    def _submit(self, job: Job) -> tuple[int, "_Reply"]:
        self.check()
        slots = self.info.slots
        if len(self._replies) >= self.most:
            turns = (len(self._replies) - slots + 1) / slots
            retry = min(max(self._job_s * turns, 1.0), 60.0)
            seen = f"{len(self._replies)} requests run or wait"
            raise RequestError(f"{seen}, and no more are allowed: try again later", "queue_full", retry)
        self.check_length(job)
        id = self._next_id()
        try:
            self._send(Submit(id, job))
        except PlainDataError as error:
            raise RequestError(f"the request cannot be sent to the engine: {error}") from None
        reply = self._replies[id] = _Reply()
        self._idle.clear()
        return id, reply

    def _drop(self, id: int) -> None:
        """Forgets a stream that nobody reads any more, and aborts its job if that has not ended."""
        if self._forget(id) is not None:
            self._send(Abort(id))

    def _forget(self, id: int) -> "_Reply | None":
        reply = self._replies.pop(id, None)
        if not self._replies:
            self._idle.set()
        return reply

    def _told(self, message: Any) -> None:
        match message:
            case Loading():
                self._loaded = message.done / max(message.total, 1)
            case Ready():
                self._loaded = 1.0
                if self._status == "loading":
                    self._reading = asyncio.create_task(self._read_file(message.info))
            case LoadFailed():
                self._fail(message.message)
            case Stats():
                asked = self._asked.get(message.id)
                if asked is not None and not asked.done():
                    asked.set_result(message.stats)
            case Step():
                failed = {failure.id for failure in message.failures}
                for id, piece in message.pieces:
                    if id in failed:
                        piece = replace(piece, finish_reason="error")
                    ended = piece.finish_reason not in (None, "error")  # after an error, a failure follows
                    self._deliver(id, piece, ended)
                for failure in message.failures:
                    self._deliver(failure.id, failure.error, True)

    def _deliver(self, id: int, item: Piece | RequestError, ended: bool) -> None:
        reply = self._replies.get(id)
        if reply is None:
            return  # nobody reads it any more
        reply.put(item)
        if ended:
            self._job_s += 0.1 * (time.monotonic() - reply.began - self._job_s)
            self._forget(id)

    async def _read_file(self, info: ModelInfo) -> None:
        """Reads the model's file when the engine has loaded it, since only the engine downloads."""
        try:
            file = await asyncio.to_thread(ModelFile.read, Path(info.path), self._chat_template)
        except Exception as error:
            self._fail(str(error))
            return
        if self._status != "loading":
            return
        if info.fingerprint != file.fingerprint:
            self._fail(f"{info.path} was changed while it was loaded: start again")
            return
        self._file, self._info = file, file.complete(info)
        self._status = "ready"
        self._settled.set()

    def _process_ended(self) -> None:
        self._exited.set()
        if self._status in ("loading", "ready"):
            code = self._transport.get_returncode() if self._transport else None
            how = f"ended with exit code {code}"
            if code is not None and code < 0:
                how = f"was ended by signal {-code}{' (it may have run out of memory)' if code == -9 else ''}"
            self._fail(f"the engine process {how}")
        self._kill()  # it has ended: this closes its pipes

    def _fail(self, message: str) -> None:
        if self._status in ("loading", "ready"):
            self._status, self._error = "failed", message
        self._settled.set()
        self._end_all(RequestError(message, "engine_failed"))
        self._kill()

    def _end_all(self, error: RequestError) -> None:
        for reply in self._replies.values():
            reply.put(error)
        self._replies.clear()
        self._idle.set()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(error)
        self._asked.clear()

    def _kill(self) -> None:
        if self._transport is None:
            self._exited.set()
        elif not self._exited.is_set():
            self._transport.kill()
        else:
            self._transport.close()

    def _send(self, command: Command) -> None:
        data = encode(command)
        # Under uvloop it is of no class of asyncio's.
        pipe: Any = self._transport.get_pipe_transport(0) if self._transport else None
        if pipe is not None and not pipe.is_closing():
            pipe.write(data)

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _ready_file(self) -> ModelFile:
        if self._info is None or self._file is None:
            raise self._unusable()
        return self._file

    def _unusable(self) -> RequestError:
        """Why no job can run."""
        if self._status == "failed":
            return RequestError(self._error or "the engine failed", "engine_failed")
        if self._status == "closed":
            return RequestError("the engine was closed", "closed")
        return RequestError("the model is not loaded yet", "not_ready", _LOADING_RETRY_S)


class _Reply:
    """Collects what has come for a job and was not taken yet."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._items: deque[Piece | RequestError] = deque()
        self._more: asyncio.Future[None] | None = None

    def put(self, item: Piece | RequestError) -> None:
        self._items.append(item)
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def next(self) -> Piece:
        """Raises a RequestError where the job ended with one."""
        while not self._items:
            self._more = asyncio.get_running_loop().create_future()
            await self._more
        item = self._items.popleft()
        if isinstance(item, RequestError):
            raise item
        return item


class _Pipes(asyncio.SubprocessProtocol):
    """The pipes from and to an engine process. ``ended`` is called once, when the process has ended and all
    that it said has been told; ``failed`` when it says what is no message."""

    def __init__(
        self, told: Callable[[Any], None], ended: Callable[[], None], failed: Callable[[str], None]
    ) -> None:
        self._told, self._ended, self._failed = told, ended, failed
        self._unpacker = Unpacker()
        self._left = {"output", "process"}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        try:
            for found in self._unpacker.push(data):
                self._told(decode(*found))
        except ValueError as error:  # the rest cannot be understood, either
            self._failed(f"the engine process sent an invalid message: {error}")

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self._lost("output")

    def process_exited(self) -> None:
        self._lost("process")

    def _lost(self, part: str) -> None:
        if self._left:
            self._left.discard(part)
            if not self._left:
                self._ended()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Waits until the event is set, or the time is over."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


def _plain(value: Any) -> Any:
    """An option as it may cross to the engine process."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value
