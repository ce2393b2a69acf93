"""A model that says a given chain of tokens, behind everything of Hotcold but the weights.

The vocabulary has the bytes, control tokens, and one token for each text that a chain may have. Where another
token of the chain was chosen than the next one, the model continues after it; it ignores other tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from starlette.testclient import TestClient
from support import vocabularies
from support.history_model import history_model
from support.made_up_llm import MadeUpLLM
from support.vocabularies import ALPHABET, CONTROL, NORMAL

from hotcold.api.options import chat_job
from hotcold.chat.answer import Answer, answer_of, divided
from hotcold.chat.chat import Chat
from hotcold.engine.drafts import forced, look_up
from hotcold.engine.engine import Engine
from hotcold.engine.generation import Piece, stream
from hotcold.engine.request import Job, Request
from hotcold.engine.speculation import Speculation
from hotcold.grammar.constraint import Grammars
from hotcold.runtime.sampling import SamplingParams
from hotcold.server.app import make_app
from hotcold.server.service import Service
from hotcold.server.settings import Settings
from hotcold.tokenizer.tokenizer import Tokenizer

CONTEXT = 2048
EOS = "<|im_end|>"


def metadata_of(template: str, controls: Sequence[str], texts: Sequence[str]) -> dict[str, Any]:
    """A vocabulary with the tokens that end a text and begin a turn, these control tokens and texts."""
    spelled = ["".join(ALPHABET[byte] for byte in text.encode()) for text in texts]
    special = [(name, CONTROL) for name in ("<|im_start|>", EOS, *controls) if name != "<|end|>"]
    special += [(text, NORMAL) for text in dict.fromkeys(spelled) if len(text) > 1]
    eos = 257 + 1  # behind the bytes, the vocabulary's own end and the beginning of a turn
    metadata = vocabularies.bpe("gpt-2", "", special, eos_token_id=eos, add_bos_token=False)
    return {**metadata, "tokenizer.chat_template": template}


class ChainLLM(MadeUpLLM):
    """A made-up ``AsyncLLM`` whose answers an engine makes."""

    def __init__(self, template: str, controls: Sequence[str] = (), texts: Sequence[str] = ()) -> None:
        super().__init__()
        self.metadata = metadata_of(template, controls, texts)
        self.tokenizer = Tokenizer.from_metadata(self.metadata)
        self.sampling = SamplingParams(temperature=0)
        self.grammars = Grammars(self.tokenizer)
        self.template = Chat(self.tokenizer, self.metadata)
        self._ids = {self.tokenizer.piece(id): id for id in reversed(range(self.tokenizer.vocab_size))}
        self._prompt_tokens = 0
        self.say(EOS)

    @property
    def info(self) -> Any:
        return replace(super().info, context=CONTEXT, template=self.metadata["tokenizer.chat_template"])

    def id_of(self, text: str | bytes) -> int:
        return self._ids[text.encode() if isinstance(text, str) else text]

    def say(self, *texts: str | bytes, drafts: bool = False) -> None:
        """The chain of tokens that comes next; with ``drafts`` the engine guesses tokens."""
        self._chain = [self.id_of(text) for text in texts]
        session = history_model(context=CONTEXT, chunk=256)
        session.model.tokenizer = self.tokenizer
        session.model.config.vocab = vocab = self.tokenizer.vocab_size
        session.transformer.logits = np.zeros((len(session.transformer.logits), vocab), np.float32)
        session.transformer.logits_after = self._logits
        speculation = Speculation([forced, look_up], 4, 16) if drafts else None
        self.engine = Engine(session, speculation=speculation)

    def _logits(self, history: list[int]) -> np.ndarray:
        logits = np.zeros(self.tokenizer.vocab_size, np.float32)
        place = 0
        for id in history[self._prompt_tokens :]:
            if id in self._chain[place:]:
                place = self._chain.index(id, place) + 1
        logits[self._chain[place] if place < len(self._chain) else self.id_of(EOS)] = 8
        return logits

    def pieces(self, job: Job) -> Iterator[Piece]:
        self._prompt_tokens = len(job.prompt)
        constraint = None
        if job.grammar is not None:
            constraint = self.grammars.constraint(self.grammars.check(job.grammar))
        return stream(self.engine, Request(job, constraint))

    def check_length(self, job: Job) -> None:
        assert len(job.prompt) < CONTEXT

    async def stream(self, job: Job) -> AsyncGenerator[Piece, None]:
        self.jobs.append(job)
        for piece in self.pieces(job):
            yield piece

    def chat(self, messages: Sequence[Any], **options: Any) -> Answer:
        """As :meth:`LLM.chat`."""
        job, parts = chat_job(self.template, messages, options, self.sampling)
        return answer_of([*divided(self.pieces(job), parts)])  # type: ignore[arg-type]


@dataclass
class Chain:
    """A model and a server of it."""

    llm: ChainLLM
    client: TestClient
    style: Any = None  #: how the template marks thinking


@contextmanager
def chain(template: str, controls: Sequence[str] = (), texts: Sequence[str] = ()) -> Iterator[Chain]:
    llm = ChainLLM(template, controls, texts)
    service = Service(llm, Settings(log=False))  # type: ignore[arg-type]
    asyncio.run(service.load())
    with TestClient(make_app(service), base_url="http://localhost") as client:
        yield Chain(llm, client)
    service.close()
    llm.template.close()
    llm.grammars.close()
