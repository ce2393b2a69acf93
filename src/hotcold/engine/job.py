"""A request as plain data, which may cross from one process to another: what to continue, and how."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hotcold.engine.sampling import SamplingParams

#: ``checked`` is what a check has made of one of the others; nobody else makes it.
GrammarKind = Literal["json_schema", "json_object", "regex", "gbnf", "lark", "checked"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match from its first character to its last."""

    kind: GrammarKind
    source: str = ""  #: JSON of the schema, the expression, or the grammar's text; nothing of ``json_object``
    #: what of a schema the answer is not held to, such as ``uniqueItems at properties.tags``
    notes: tuple[str, ...] = ()


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
