"""OpenAI's ``/v1/embeddings``: vectors of texts."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from hotcold.engine.request import Job
from hotcold.server.protocol.chat import MODEL
from hotcold.server.protocol.completion import Prompt, Prompts
from hotcold.server.protocol.errors import invalid
from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.fields import Choice, Field, Fields, Shape, Whole, check_depth, refuse
from hotcold.server.protocol.limits import LARGEST, MAX_INPUTS
from hotcold.server.protocol.replies import Reply

DIMENSIONS = Field(Whole(1, LARGEST), None, "Number of values per vector: the first ones, normalised.")
FIELDS: Fields = {
    "model": MODEL,
    "input": Field(Prompts(MAX_INPUTS), None, "One or several texts, or their token ids.", required=True),
    "encoding_format": Field(
        Choice(("float", "base64")), "float", "base64: of little-endian float32 values."
    ),
    "dimensions": DIMENSIONS,
}
BODY = Shape(FIELDS)


@dataclass(frozen=True)
class EmbeddingsCall:
    """The jobs and options of one request."""

    facts: Facts
    texts: list[Prompt]
    job: Job  #: the job of each text, without its tokens
    in_base64: bool
    dimensions: int | None  #: length of the vectors; None: the model's
    stream: bool = False

    def encode(self) -> list[list[int]]:
        """Returns the tokens of each text; names of control tokens stay text. Not for an event loop."""
        encode = self.facts.encode_text
        return [encode(each, "input") if isinstance(each, str) else each for each in self.texts]

    def jobs(self, prompts: Sequence[Sequence[int]]) -> list[Job]:
        """Returns the job of each text."""
        return [replace(self.job, prompt=ids) for ids in prompts]

    def reply(self, prompts: Sequence[Sequence[int]]) -> "EmbeddingsReply":
        """Makes the reply."""
        return EmbeddingsReply(self.facts, len(prompts), self.dimensions, in_base64=self.in_base64)


class EmbeddingsReply(Reply):
    prefix: ClassVar[str] = "embd-"

    def __init__(self, facts: Facts, jobs: int, dimensions: int | None, *, in_base64: bool = False) -> None:
        super().__init__(facts, [None] * jobs)
        self.at_once = 2 * facts.slots
        self._dimensions = dimensions
        self._in_base64 = in_base64

    def whole(self) -> dict[str, Any]:
        tokens = self._prompt_tokens()
        return {
            "object": "list",
            "model": self._facts.name,
            "data": [
                {"object": "embedding", "index": i, "embedding": self._shown(vector)}
                for i, vector in enumerate(self._vectors())
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def _prompt_tokens(self) -> int:
        return sum(each.last.prompt_tokens for each in self._answers if each.last is not None)

    def _vectors(self) -> list[Sequence[float]]:
        """Returns the vector of each job."""
        pieces = [each.last for each in self._answers]
        return [shortened(each.vector or (), self._dimensions) for each in pieces if each is not None]

    def _shown(self, vector: Sequence[float]) -> list[float] | str:
        if self._in_base64:
            return base64.b64encode(np.array(vector, "<f4").tobytes()).decode()
        return [*vector]


def parse(body: object, facts: Facts) -> EmbeddingsCall:
    """Reads the body of a request. Raises APIError for wrong values, or if the model cannot make vectors;
    ignores unknown fields."""
    check_depth(body)
    values = BODY.read(body, "")
    job = job_of(values, facts)
    for i, text in enumerate(values["input"]):
        if not isinstance(text, str):
            facts.check_ids(text, f"input[{i}]" if len(values["input"]) > 1 else "input")
    in_base64 = values["encoding_format"] == "base64"
    return EmbeddingsCall(facts, values["input"], job, in_base64, values["dimensions"])


def job_of(values: Mapping[str, Any], facts: Facts) -> Job:
    """Returns the job of each text. Raises APIError if the model has no vectors, or none of this length."""
    if facts.pooling is None:
        raise invalid(facts.not_pooled, "model", "unsupported_model")
    dimensions, length = values["dimensions"], facts.meta["n_embd"]
    if dimensions is not None and dimensions > length:
        refuse("dimensions", dimensions, f"allowed are 1 to {length}, the size of the model's vectors")
    return Job(max_tokens=1, pooling=facts.pooling, deadline_s=facts.deadline_s, timeout_s=facts.timeout_s)


def shortened(vector: Sequence[float], dimensions: int | None) -> Sequence[float]:
    """Returns the first values of a vector, divided by their norm; a whole vector is unchanged."""
    if dimensions is None or dimensions == len(vector):
        return vector
    first = np.array(vector[:dimensions])
    length = np.linalg.norm(first)
    unit: list[float] = (first / length if length else first).astype(np.float32).tolist()
    return unit
