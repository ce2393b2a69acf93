"""The events that a step of the engine returns: a request's token, or its end."""

from dataclasses import dataclass

from hotcold.engine.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class Token:
    """One more token, already in ``request.output``. What the request did not ask for is None or empty."""

    request: Request
    id: int
    logprob: float | None = None  #: natural logarithm of its probability under the model's own distribution
    top: tuple[tuple[int, float], ...] = ()  #: the likeliest ids with theirs, as :attr:`Job.logprobs` asks


@dataclass(frozen=True, slots=True)
class Finished:
    """A request has ended; ``request.error`` says why where the reason is ``error``."""

    request: Request
    reason: FinishReason


Event = Token | Finished
