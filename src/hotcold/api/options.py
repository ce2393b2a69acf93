"""Jobs from what a caller gives: the options of :meth:`LLM.generate`, and those that only a server has."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from hotcold.api.llm import ChatOptions, GenerationOptions, Settings, settings_of
from hotcold.engine.generation import Generation
from hotcold.engine.text import stop_strings
from hotcold.errors import UserError
from hotcold.grammar.grammar import Grammar
from hotcold.hosting.job import Job
from hotcold.runtime.options import check_names
from hotcold.runtime.sampling import SamplingParams
from hotcold.values import real


class JobOptions(GenerationOptions, total=False):
    """What :meth:`AsyncLLM.generate` and :meth:`AsyncLLM.stream_text` take besides the prompt; all optional.
    A ``constraint`` is refused, since it cannot cross to the engine's process: a ``grammar`` can."""

    grammar: Grammar | None  #: what the answer must match
    echo: bool  #: with ``logprobs``: the prompt's tokens get them, too (False)
    cache: bool  #: whether pages of the KV cache are shared with other requests (True)
    deadline_s: float | None  #: the request ends with an error after so many seconds


class JobChatOptions(JobOptions, ChatOptions, total=False):
    """What :meth:`AsyncLLM.chat` and :meth:`AsyncLLM.stream_chat` take besides the messages."""


_OF_THE_JOB = ("grammar", "echo", "cache")


@dataclass(frozen=True)
class JobSettings:
    """What the jobs of one call share, checked."""

    settings: Settings
    fields: Mapping[str, Any]  #: of :class:`Job`, that a request of the engine does not have

    @classmethod
    def of(cls, options: Mapping[str, Any], base: SamplingParams) -> Self:
        """Of :class:`JobOptions`, and of ``base`` what they do not say. UserError: a value that is not
        allowed; TypeError: an unknown option."""
        check_names(options, JobOptions)
        rest: dict[str, Any] = dict(options)
        if rest.pop("constraint", None) is not None:
            raise UserError("a constraint cannot cross to the engine's process: give a grammar")
        own: dict[str, Any] = {name: rest.pop(name) for name in _OF_THE_JOB if name in rest}
        own["stop"] = stop_strings(rest.pop("stop", None))
        deadline_s = rest.pop("deadline_s", None)
        if deadline_s is not None:
            own["deadline_s"] = real("deadline_s", deadline_s, 0, 1e9, "seconds")
        return cls(settings_of(rest, base), own)

    def job(self, ids: list[int]) -> Job:
        return Job(ids, self.settings.params.with_seed(), **self.settings.fields, **self.fields)

    def of_prompt(self, index: int) -> Self:
        """Those of one prompt of several, as :meth:`LLM.generate` numbers them."""
        return replace(self, settings=self.settings.of_prompt(index))

    def refused(self, error: UserError) -> Generation:
        """For a prompt that did not start."""
        return self.settings.refused(error)
