"""Ollama's ``/api/embed``, and ``/api/embeddings`` of older clients: vectors of texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hotcold.server.protocol.chat import MODEL
from hotcold.server.protocol.embeddings import DIMENSIONS, EmbeddingsCall, EmbeddingsReply, job_of
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.fields import Either, Field, Fields, Flag, Items, Shape, Text, check_depth
from hotcold.server.protocol.limits import MAX_INPUTS
from hotcold.server.protocol.ollama_reply import nanoseconds

_TEXTS = Either({str: Text(), list: Items(Text(), 0, MAX_INPUTS)}, "a string, or a list of strings,")
EMBED: Fields = {
    "model": MODEL,
    "input": Field(_TEXTS, None, "One or several texts; without a text the answer has no vectors."),
    "truncate": Field(Flag(), True, "Truncates a text that is longer than the context; false refuses it."),
    "dimensions": DIMENSIONS,
}
EMBEDDINGS: Fields = {
    "model": MODEL,
    "prompt": Field(Text(), "", "A text; it is truncated if it is longer than the context."),
}


@dataclass(frozen=True)
class OllamaEmbeddingsCall(EmbeddingsCall):
    """The jobs and options of one request."""

    truncate: bool = True
    single: bool = False  #: the answer is one vector, as of the older route

    def encode(self) -> list[list[int]]:
        if not self.truncate:
            return super().encode()
        return [self._cut(each) for each in self.texts if isinstance(each, str)]

    def _cut(self, text: str) -> list[int]:
        """The tokens of a text, without as many at its end as do not fit; EOS stays."""
        tokenizer, most = self.facts.tokenizer, self.facts.context - 1
        ids = tokenizer.encode(text[: self.facts.most_characters])
        return ids if len(ids) <= most else [*ids[: most - tokenizer.add_eos], *ids[-1:] * tokenizer.add_eos]

    def reply(self, prompts: Sequence[Sequence[int]]) -> EmbeddingsReply:
        return OllamaEmbeddingsReply(self.facts, len(prompts), self.dimensions, single=self.single)


class OllamaEmbeddingsReply(EmbeddingsReply):
    def __init__(self, facts: Facts, jobs: int, dimensions: int | None, *, single: bool) -> None:
        super().__init__(facts, jobs, dimensions)
        self._single = single

    def whole(self) -> dict[str, Any]:
        vectors = self._vectors()
        if self._single:
            return {"embedding": vectors[0] if vectors else []}
        return {
            "model": self._facts.name,
            "embeddings": vectors,
            "total_duration": nanoseconds(self._seconds()),
            "load_duration": 0,
            "prompt_eval_count": self._prompt_tokens(),
        }

    def _seconds(self) -> float:
        """Seconds from the first text's arrival to the last one's end."""
        timings = [each.last.timings for each in self._answers if each.last is not None]
        begun = [each.added for each in timings if each.added is not None]
        ended = [each.finished for each in timings if each.finished is not None]
        return max(ended) - min(begun) if begun and ended else 0.0


def parse_embed(body: object, facts: Facts) -> OllamaEmbeddingsCall:
    """APIError for what is wrong, and where the model gives no vectors. Unknown fields are ignored."""
    check_depth(body)
    values = Shape(EMBED).read(body, "")
    given = values["input"] or []
    job, dimensions = job_of(values, facts), values["dimensions"]
    texts = [given] if isinstance(given, str) else given
    return OllamaEmbeddingsCall(facts, texts, job, False, dimensions, truncate=values["truncate"])


def parse_embeddings(body: object, facts: Facts) -> OllamaEmbeddingsCall:
    """The same of the older route."""
    check_depth(body)
    values = Shape(EMBEDDINGS).read(body, "")
    texts = [values["prompt"]] if values["prompt"] else []
    return OllamaEmbeddingsCall(facts, texts, job_of({"dimensions": None}, facts), False, None, single=True)
