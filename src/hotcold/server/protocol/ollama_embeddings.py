"""Ollama's ``/api/embed`` and its older ``/api/embeddings``: vectors of texts."""

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
    single: bool = False  #: whether the reply has one vector, as on the older route

    def encode(self) -> list[list[int]]:
        if not self.truncate:
            return super().encode()
        return [self._cut(each) for each in self.texts if isinstance(each, str)]

    def _cut(self, text: str) -> list[int]:
        """Returns the tokens of a text, cut at its end to fit; EOS stays."""
        tokenizer, limit = self.facts.tokenizer, self.facts.context - 1
        ids = tokenizer.encode(text[: self.facts.most_characters])
        return (
            ids if len(ids) <= limit else [*ids[: limit - tokenizer.add_eos], *ids[-1:] * tokenizer.add_eos]
        )

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
        """Returns the seconds from the first text's arrival to the end of the last one."""
        timings = [each.last.timings for each in self._answers if each.last is not None]
        starts = [each.added for each in timings if each.added is not None]
        ended = [each.finished for each in timings if each.finished is not None]
        return max(ended) - min(starts) if starts and ended else 0.0


def parse_embed(body: object, facts: Facts) -> OllamaEmbeddingsCall:
    """Reads the body of a request. Raises APIError for wrong values, or if the model cannot make vectors;
    ignores unknown fields."""
    check_depth(body)
    values = Shape(EMBED).read(body, "")
    given = values["input"] or []
    job, dimensions = job_of(values, facts), values["dimensions"]
    texts = [given] if isinstance(given, str) else given
    return OllamaEmbeddingsCall(facts, texts, job, False, dimensions, truncate=values["truncate"])


def parse_embeddings(body: object, facts: Facts) -> OllamaEmbeddingsCall:
    """Reads the body of a request of the older route."""
    check_depth(body)
    values = Shape(EMBEDDINGS).read(body, "")
    texts = [values["prompt"]] if values["prompt"] else []
    return OllamaEmbeddingsCall(facts, texts, job_of({"dimensions": None}, facts), False, None, single=True)
