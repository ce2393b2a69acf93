"""A request as plain data, which may cross from one process to another: what to continue, and how."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hotcold.grammar.grammar import Grammar
from hotcold.runtime.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """One text to continue. Values are checked where the engine gets them."""

    prompt: Sequence[int]  #: token ids
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 200
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  #: as :attr:`~hotcold.engine.request.Request.logprobs`
    grammar: Grammar | None = None
    #: whether the prompt's own tokens get log-probabilities, too, by the decode rule; with ``logprobs``
    echo: bool = False
    cache: bool = True  #: whether its pages may be shared with other requests
    shown: tuple[int, ...] = ()  #: as :attr:`~hotcold.engine.request.Request.shown`
    deadline_s: float | None = None  #: from when it was added; then it ends with an error
    picture: bool = False  #: whether pieces bring frames of which neurons fired
