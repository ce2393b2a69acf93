"""Facts about the model and the server that the translations need."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hotcold.chat.call_ids import CallIds
from hotcold.chat.tool_formats import GENERAL, ToolFormat
from hotcold.engine.request import PromptTooLongError
from hotcold.runtime.pooling import Pooling
from hotcold.runtime.sampling import SamplingParams
from hotcold.server.protocol import prompts
from hotcold.server.protocol.errors import from_job
from hotcold.server.protocol.kept import MOST_ITEM_BYTES, MOST_ITEMS, Kept, KeptResponses
from hotcold.tokenizer.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 2048
"""Tokens of an answer whose request states no length, of OpenAI's completions 16, unless the server was told
another number."""


@dataclass(frozen=True)
class Facts:
    name: str  #: name of the model for clients
    tokenizer: Tokenizer
    aliases: tuple[str, ...] = ()  #: other names that requests may use
    context: int = 0  #: positions of one request
    slots: int = 1  #: requests that run at the same time
    created: int = 0  #: Unix time of the model
    params: int = 0
    size_bytes: int = 0
    fingerprint: str = ""  #: identifies the model, its mode and the program
    max_tokens: int | None = None  #: limit of an answer if the request sets none; None: the route's
    timeout_s: float | None = None  #: as of :class:`~hotcold.engine.request.Job`
    deadline_s: float | None = None  #: likewise
    thinking_budget: int | None = None  #: tokens of thinking if the request sets none; None: no limit
    tool_format: ToolFormat = GENERAL  #: how the model writes calls
    call_ids: CallIds = "openai"  #: form of call ids that the template wants
    meta: Mapping[str, Any] = field(default_factory=dict)  #: more about the model, for /v1/models
    sampling: SamplingParams = field(default_factory=SamplingParams)  #: defaults for a request
    sparsity: str = ""  #: the mode: off, exact or predicted
    pooling: Pooling | None = None  #: how texts become vectors; None: they cannot
    not_pooled: str = ""  #: and why
    open_schemas: bool = False  #: as :attr:`hotcold.server.settings.Settings.open_schemas`
    kept_items: Kept = field(default_factory=lambda: Kept(MOST_ITEM_BYTES, MOST_ITEMS), compare=False)
    kept_responses: KeptResponses = field(default_factory=KeptResponses, compare=False)

    @property
    def vocab(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def fills_in(self) -> bool:
        """True if the vocabulary has the tokens around a text to fill in."""
        return self.tokenizer.filling.keys() >= {"fim_pre", "fim_suf", "fim_mid"}

    @property
    def capabilities(self) -> list[str]:
        """The model's abilities by Ollama's names, without thinking, which its template decides."""
        insert, embedding = self.fills_in, self.pooling is not None
        return ["completion", "tools", *["insert"] * insert, *["embedding"] * embedding]

    @property
    def default_max_tokens(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @cached_property
    def _longest(self) -> int:
        """The most characters of a token."""
        return max(len(self.tokenizer.piece(id)) for id in range(self.vocab))

    @property
    def most_characters(self) -> int:
        """The characters of a prompt that may fit, at most."""
        return (self.context + 1) * self._longest

    def check_ids(self, ids: list[int], param: str) -> None:
        """Raises APIError for an id that is not in the vocabulary, or for more ids than fit."""
        if len(ids) > self.context:
            raise from_job(PromptTooLongError(len(ids), self.context), param)
        prompts.check_ids(ids, self.vocab, param)

    def encode_text(self, text: str, param: str) -> list[int]:
        """The tokens of a user's text. APIError: it cannot fit, which is checked first."""
        self.check_length(text, param)
        return self.tokenizer.encode(text)

    def check_length(self, text: str, param: str) -> None:
        """Raises APIError for a text that surely has so many tokens that the context has no room for an
        answer. It need not be encoded to know."""
        least = self.tokenizer.least_tokens(text)
        if least >= self.context:
            raise from_job(PromptTooLongError(least, self.context, at_least=True), param)

    def encode(self, text: str) -> list[int]:
        """The tokens of a whole prompt that a program wrote: names of control tokens are these tokens. A
        prompt that begins with BOS gets no second one. APIError: it cannot fit, which is checked first."""
        self.check_length(text, "prompt")
        ids = self.tokenizer.encode(text, parse_special=True)
        bos = self.tokenizer.bos_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids
