"""Facts about the model and the server that requests and replies need."""

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
    name: str  #: the model's name for clients
    tokenizer: Tokenizer
    aliases: tuple[str, ...] = ()  #: other names that requests may use
    context: int = 0  #: limit of a request's positions
    slots: int = 1  #: limit of concurrent requests
    created: int = 0  #: Unix time of the model
    params: int = 0
    size_bytes: int = 0
    fingerprint: str = ""  #: identifies the model, its mode and the program's version
    max_tokens: int | None = None  #: default limit of an answer's tokens; None: the route's
    timeout_s: float | None = None  #: see :class:`~hotcold.engine.request.Job`
    deadline_s: float | None = None  #: see :class:`~hotcold.engine.request.Job`
    thinking_budget: int | None = None  #: default limit of thinking, in tokens; None: none
    tool_format: ToolFormat = GENERAL  #: the model's format of calls
    call_ids: CallIds = "openai"  #: the template's form of call ids
    meta: Mapping[str, Any] = field(default_factory=dict)  #: additional facts for /v1/models
    sampling: SamplingParams = field(default_factory=SamplingParams)  #: default parameters of requests
    sparsity: str = ""  #: off, exact or predicted
    pooling: Pooling | None = None  #: how the model makes vectors of texts; None: it cannot
    not_pooled: str = ""  #: the reason if it cannot
    open_schemas: bool = False  #: see :attr:`hotcold.server.settings.Settings.open_schemas`
    kept_items: Kept = field(default_factory=lambda: Kept(MOST_ITEM_BYTES, MOST_ITEMS), compare=False)
    kept_responses: KeptResponses = field(default_factory=KeptResponses, compare=False)

    @property
    def vocab(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def fills_in(self) -> bool:
        """True if the vocabulary has tokens to fill in the middle."""
        return self.tokenizer.filling.keys() >= {"fim_pre", "fim_suf", "fim_mid"}

    @property
    def capabilities(self) -> list[str]:
        """The model's abilities by Ollama's names, except thinking, which its template determines."""
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
        """The number of characters in the longest token."""
        return max(len(self.tokenizer.piece(id)) for id in range(self.vocab))

    @property
    def most_characters(self) -> int:
        """The number of characters that may fit into a prompt."""
        return (self.context + 1) * self._longest

    def check_ids(self, ids: list[int], param: str) -> None:
        """Raises APIError for an id that is not in the vocabulary, or for more ids than fit."""
        if len(ids) > self.context:
            raise from_job(PromptTooLongError(len(ids), self.context), param)
        prompts.check_ids(ids, self.vocab, param)

    def encode_text(self, text: str, param: str) -> list[int]:
        """Returns the tokens of a user's text. Raises APIError if it cannot fit, before encoding."""
        self.check_length(text, param)
        return self.tokenizer.encode(text)

    def check_length(self, text: str, param: str) -> None:
        """Raises APIError for a text that cannot fit, by a lower bound of its tokens, without encoding."""
        least = self.tokenizer.least_tokens(text)
        if least >= self.context:
            raise from_job(PromptTooLongError(least, self.context, at_least=True), param)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a whole prompt from a program. Names of control tokens become these tokens; a
        prompt that begins with BOS gets no second one. Raises APIError if it cannot fit, before encoding."""
        self.check_length(text, "prompt")
        ids = self.tokenizer.encode(text, parse_special=True)
        bos = self.tokenizer.bos_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids
