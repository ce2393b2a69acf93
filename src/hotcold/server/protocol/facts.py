"""What the translations need to know of the model and the server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hotcold.chat.call_ids import CallIds
from hotcold.chat.tool_formats import GENERAL, ToolFormat
from hotcold.model.tokenizer import Tokenizer
from hotcold.runtime.sampling import SamplingParams
from hotcold.server.protocol import prompts
from hotcold.server.protocol.errors import APIError

DEFAULT_MAX_TOKENS = 2048
"""Tokens of an answer whose request states no length, of OpenAI's completions 16, unless the server was told
another number."""


@dataclass(frozen=True)
class Facts:
    name: str  #: of the model, as clients are told
    tokenizer: Tokenizer
    aliases: tuple[str, ...] = ()  #: other names that requests may use
    context: int = 0  #: positions of one request
    slots: int = 1  #: requests that run at a time
    created: int = 0  #: Unix time of the model
    params: int = 0
    size_bytes: int = 0
    fingerprint: str = ""  #: of the model, its mode and the program
    max_tokens: int | None = None  #: of an answer whose request states no length; None: the routes' own
    deadline_s: float | None = None  #: of each request
    tool_format: ToolFormat = GENERAL  #: how the model writes calls
    call_ids: CallIds = "openai"  #: the form of ids that its template wants
    meta: Mapping[str, Any] = field(default_factory=dict)  #: more about the model, for /v1/models
    sampling: SamplingParams = field(default_factory=SamplingParams)  #: where a request does not say
    sparsity: str = ""  #: the mode: off, exact or predicted
    open_schemas: bool = False  #: as :attr:`hotcold.server.settings.Settings.open_schemas`

    @property
    def vocab(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def default_max_tokens(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @cached_property
    def _longest(self) -> int:
        """The most characters that a token can stand for."""
        return max(len(self.tokenizer.piece(id)) for id in range(self.vocab))

    def check_ids(self, ids: list[int], param: str) -> None:
        """APIError for an id that is not in the vocabulary, or more of them than fit."""
        if len(ids) > self.context:
            seen = f"{param} has {len(ids)} tokens and the context holds {self.context}"
            message = f"{seen}: shorten it, or enlarge the context (-c) as far as the model allows"
            raise APIError(message, param=param, code="context_length_exceeded")
        prompts.check_ids(ids, self.vocab, param)

    def encode(self, text: str) -> list[int]:
        """The tokens of a whole prompt that a program wrote: names of control tokens are these tokens. One
        that begins with BOS gets no second one. APIError, at once, for one that cannot fit."""
        if len(text) > (self.context + 1) * self._longest:
            seen = f"prompt has {len(text)} characters, which are more than {self.context} tokens"
            message = f"{seen}: shorten it, or enlarge the context (-c) as far as the model allows"
            raise APIError(message, param="prompt", code="context_length_exceeded")
        ids = self.tokenizer.encode(text, parse_special=True)
        bos = self.tokenizer.bos_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids
