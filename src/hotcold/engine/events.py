"""The events that a step of the engine returns: a request's token, or its end."""

from dataclasses import dataclass

from hotcold.engine.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class Token:
    """A new token, already in ``request.output``. Fields that the request did not ask for are None or
    empty."""

    request: Request
    id: int
    logprob: float | None = None  #: natural logarithm of its probability under the model's own distribution
    top: tuple[tuple[int, float], ...] = ()  #: likeliest ids with theirs (:attr:`Job.logprobs`)


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a request; ``request.error`` has the cause if the reason is ``error``."""

    request: Request
    reason: FinishReason


Event = Token | Finished
