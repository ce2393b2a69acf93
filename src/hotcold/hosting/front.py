"""The front of an engine process. It sends jobs and receives pieces of their texts; it computes nothing."""

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

#: ``new`` until :meth:`EngineFront.start`; ``failed`` after loading failed or the engine process died.
Status = Literal["new", "loading", "ready", "failed", "closed"]

_EXIT_S = 10.0  # time for the engine process to end by itself
_LOADING_RETRY_S = 2.0


class EngineFront:
    """A model in its own process, for one event loop. All methods belong to the loop that called
    :meth:`start`, and to its thread. Options are the same as of :class:`AsyncLLM`."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        max_waiting: int = 64,
        **options: Unpack[LoadOptions],
    ) -> None:
        options_with_defaults: dict[str, Any] = {"sequences": 4, **options}
        loading = complete(options_with_defaults)  # raises UserError now, and not in the other process
        self._chat_template = loading["chat_template"]
        self._pooling = loading["pooling"]
        self._options = {
            name: _plain(value) for name, value in options_with_defaults.items() if value is not None
        }
        self._model = None if model is None else os.fspath(model)
        #: limit of jobs that run or wait at the same time
        self.most = loading["sequences"] + whole("max_waiting", max_waiting, 0, LARGEST)
        self._status: Status = "new"
        self._loaded = 0.0
        self._error: str | None = None
        self._file: ModelFile | None = None
        self._info: ModelInfo | None = None
        self._replies: dict[int, _Reply] = {}
        self._queries: dict[int, asyncio.Future[ProcessStats]] = {}
        self._last_id = 0
        self._job_s = 1.0  # running mean of a job's time
        self._settled = asyncio.Event()  # set when loading has ended, with or without success
        self._idle = asyncio.Event()  # set while there is no unfinished job
        self._idle.set()
        self._exited = asyncio.Event()
        self._transport: asyncio.SubprocessTransport | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def status(self) -> Status:
        return self._status

    @property
    def loaded(self) -> float:
        """The loaded part of the model, 0 to 1."""
        return self._loaded

    @property
    def error(self) -> str | None:
        """The reason for the status ``failed``, in one line."""
        return self._error

    @property
    def info(self) -> ModelInfo:
        """Facts of the loaded model. Raises RequestError if the model is not loaded."""
        if self._info is None:
            raise self._unusable()
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises RequestError if the model is not loaded."""
        return self._ready_file().tokenizer

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of the GGUF file. Raises RequestError if the model is not loaded."""
        return self._ready_file().metadata

    @property
    def sampling(self) -> SamplingParams:
        """The default sampling parameters: after loading, the file's recommendation."""
        return SamplingParams() if self._file is None else self._file.sampling

    async def start(self) -> None:
        """Starts the engine process, which then loads the model: see :meth:`ready`. Raises RuntimeError after
        an earlier start or close, and OSError if the system cannot start a process."""
        if self._status != "new":
            raise RuntimeError(f"this engine is {self._status}: create a new one")
        self._status = "loading"
        pipes = _Pipes(self._received, self._process_ended, self._fail)
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
        if self._status != "loading":  # closed in the meantime
            self._kill()
            return
        self._send(Load(self._model, self._options))

    async def ready(self) -> None:
        """Waits until the model is loaded. Raises UserError if it cannot be loaded."""
        if self._status == "new":
            raise RuntimeError("the engine is not started: call start() first")
        await self._settled.wait()
        if self._status == "closed":
            raise self._unusable()
        if self._info is None:
            raise UserError(self._error or "the model was not loaded")

    async def stream(self, job: Job) -> AsyncGenerator[Piece, None]:
        """Runs a job and yields its text in pieces; the last piece has a ``finish_reason``. Closing the
        generator, or cancelling the task that reads it, aborts the job within a step.

        Raises RequestError if the job cannot start or continue; see :class:`RequestError` for its codes."""
        id, reply = self._submit(job)
        try:
            while True:
                piece = await reply.next()
                yield piece
                if piece.finish_reason not in (None, "error"):  # after ``error`` the next call raises it
                    return
        finally:
            self._drop(id)

    def check(self) -> None:
        """Raises RequestError if no job can run now."""
        if self._status != "ready":
            raise self._unusable()

    async def stats(self, *, steps: bool = False) -> ProcessStats:
        """Returns the engine's statistics after its current step; with ``steps`` also the times of the steps
        since the last such call. Raises RequestError if there is no engine."""
        self.check()
        id = self._next_id()
        query: asyncio.Future[ProcessStats] = asyncio.get_running_loop().create_future()
        self._queries[id] = query
        self._send(AskStats(id, steps))
        try:
            return await query
        finally:
            self._queries.pop(id, None)

    async def close(self, drain_s: float = 0) -> None:
        """Ends the engine process. New jobs are refused at once. Running jobs have ``drain_s`` seconds to
        end, and then get a RequestError ``closed``. A second call meanwhile may shorten the wait."""
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
                    pipe.close()  # ends a process that is still loading
                await _wait(self._exited, _EXIT_S)
        finally:
            self._kill()
        await self._exited.wait()

    @property
    def pooling(self) -> Pooling:
        """How the model makes vectors of texts. Raises UserError without a chosen or supported pooling."""
        return pooling_of(self.metadata, self._pooling)

    def check_length(self, job: Job) -> None:
        """Raises RequestError ``context_length_exceeded`` if the prompt leaves no space for an answer."""
        context = self.info.context
        if len(job.prompt) >= context:
            raise PromptTooLongError(len(job.prompt), context)

    def _submit(self, job: Job) -> tuple[int, "_Reply"]:
        self.check()
        slots = self.info.slots
        if len(self._replies) >= self.most:
            turns = (len(self._replies) - slots + 1) / slots
            retry = min(max(self._job_s * turns, 1.0), 60.0)
            got = f"{len(self._replies)} requests run or wait"
            raise RequestError(f"{got}, and no more are allowed: try again later", "queue_full", retry)
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
        """Removes a stream that is no longer read, and aborts its job if it has not ended."""
        if self._forget(id) is not None:
            self._send(Abort(id))

    def _forget(self, id: int) -> "_Reply | None":
        reply = self._replies.pop(id, None)
        if not self._replies:
            self._idle.set()
        return reply

    def _received(self, message: Any) -> None:
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
                query = self._queries.get(message.id)
                if query is not None and not query.done():
                    query.set_result(message.stats)
            case Step():
                failed = {failure.id for failure in message.failures}
                for id, piece in message.pieces:
                    if id in failed:
                        piece = replace(piece, finish_reason="error")
                    # an ``error`` is followed by a failure
                    ended = piece.finish_reason not in (None, "error")
                    self._deliver(id, piece, ended)
                for failure in message.failures:
                    self._deliver(failure.id, failure.error, True)

    def _deliver(self, id: int, item: Piece | RequestError, ended: bool) -> None:
        reply = self._replies.get(id)
        if reply is None:
            return  # the caller has closed the stream
        reply.put(item)
        if ended:
            self._job_s += 0.1 * (time.monotonic() - reply.began - self._job_s)
            self._forget(id)

    async def _read_file(self, info: ModelInfo) -> None:
        """Reads the model's file after the engine has loaded it, since only the engine downloads."""
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
        self._kill()  # closes the pipes of the process, which has ended

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
        for query in self._queries.values():
            if not query.done():
                query.set_exception(error)
        self._queries.clear()

    def _kill(self) -> None:
        if self._transport is None:
            self._exited.set()
        elif not self._exited.is_set():
            self._transport.kill()
        else:
            self._transport.close()

    def _send(self, command: Command) -> None:
        data = encode(command)
        # Under uvloop this is not one of asyncio's classes.
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
        """Returns the error that says why no job can run."""
        if self._status == "failed":
            return RequestError(self._error or "the engine failed", "engine_failed")
        if self._status == "closed":
            return RequestError("the engine was closed", "closed")
        return RequestError("the model is not loaded yet", "not_ready", _LOADING_RETRY_S)


class _Reply:
    """Queue of a job's pieces that were not yet read."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._items: deque[Piece | RequestError] = deque()
        self._more: asyncio.Future[None] | None = None

    def put(self, item: Piece | RequestError) -> None:
        self._items.append(item)
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def next(self) -> Piece:
        """Returns the next piece. Raises the RequestError that ended the job."""
        while not self._items:
            self._more = asyncio.get_running_loop().create_future()
            await self._more
        item = self._items.popleft()
        if isinstance(item, RequestError):
            raise item
        return item


class _Pipes(asyncio.SubprocessProtocol):
    """The pipes from and to an engine process. ``ended`` is called once, after the end of the process and of
    its output; ``failed`` for an invalid message."""

    def __init__(
        self, received: Callable[[Any], None], ended: Callable[[], None], failed: Callable[[str], None]
    ) -> None:
        self._received, self._ended, self._failed = received, ended, failed
        self._unpacker = Unpacker()
        self._left = {"output", "process"}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        try:
            for parts in self._unpacker.push(data):
                self._received(decode(*parts))
        except ValueError as error:  # later data cannot be parsed, either
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
    """Converts an option to a value that a message can hold."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value
