"""The messages between an engine process and its front."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from hotcold.engine.generation import Piece
from hotcold.engine.request import Job, RequestError
from hotcold.hosting.state import ModelInfo, ProcessStats
from hotcold.processes.plain_data import Plain, PlainDataError, from_plain, pack, to_plain


@dataclass(frozen=True, slots=True)
class Load:
    """The first message: the model to load."""

    model: str | None  #: None: the built-in model
    options: Mapping[str, Any] = field(default_factory=dict)  #: options of LoadOptions as texts and numbers


@dataclass(frozen=True, slots=True)
class Submit:
    id: int  #: unique number that the front assigns
    job: Job  #: the ids of its prompt are sent as 32-bit integers


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends a job; no effect if it has ended."""

    id: int


@dataclass(frozen=True, slots=True)
class AskStats:
    id: int
    steps: bool = False  #: whether to send the times of steps


@dataclass(frozen=True, slots=True)
class Close:
    """Ends the process and all its jobs."""


@dataclass(frozen=True, slots=True)
class Loading:
    done: int  #: bytes
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class LoadFailed:
    message: str  #: a line for the user


@dataclass(frozen=True, slots=True)
class Failure:
    """A job has ended with a :class:`RequestError`."""

    id: int
    message: str
    code: str
    retry_after_s: float | None = None

    @property
    def error(self) -> RequestError:
        return RequestError(self.message, self.code, self.retry_after_s)


@dataclass(frozen=True, slots=True)
class Step:
    """The result of a step: pieces by job, then failed jobs."""

    pieces: tuple[tuple[int, Piece], ...] = ()
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class Stats:
    id: int  #: id of the question
    stats: ProcessStats


Command: TypeAlias = Load | Submit | Abort | AskStats | Close
EngineMessage: TypeAlias = Loading | Ready | LoadFailed | Step | Stats

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (Load, Submit, Abort, AskStats, Close, Loading, Ready, LoadFailed, Step, Stats)
}


def encode(message: Command | EngineMessage) -> bytes:
    """Encodes a message. Raises PlainDataError if it is too long."""
    ids = message.job.prompt if isinstance(message, Submit) else ()
    if isinstance(message, Submit):
        message = replace(message, job=replace(message.job, prompt=()))
    long = isinstance(message, Step) and any(piece.prompt_logprobs for _, piece in message.pieces)
    return pack([type(message).__name__, to_plain(message)], ids, long=long)


def decode(plain: Plain, ids: "array[int]") -> Any:
    """Decodes a message. Raises PlainDataError if it is invalid, UserError for an invalid value of a job."""
    if not isinstance(plain, list) or len(plain) != 2 or plain[0] not in [*_KINDS]:
        raise PlainDataError(f"{plain!r:.40} is not a message")
    message = from_plain(_KINDS[plain[0]], plain[1])
    if isinstance(message, Submit):
        return replace(message, job=replace(message.job, prompt=ids))
    return message
