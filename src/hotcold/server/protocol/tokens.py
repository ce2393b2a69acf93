"""The routes ``/tokenize`` and ``/detokenize``."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hotcold.server.protocol.facts import Facts
from hotcold.server.protocol.fields import Field, Fields, Flag, Shape, Text
from hotcold.server.protocol.json_parts import LongText
from hotcold.server.protocol.prompts import Ids, check_ids

_TOKENS = 1 << 12  # tokens to decode in one call

TOKENIZE: Fields = {
    "content": Field(Text(), None, "The text to tokenise.", required=True),
    "add_special": Field(Flag(), False, "Adds BOS and EOS if the model expects them."),
    "parse_special": Field(Flag(), True, "Reads names of control tokens as control tokens."),
    "with_pieces": Field(Flag(), False, "Returns an object with id and piece for each token."),
}
DETOKENIZE: Fields = {"tokens": Field(Ids(low=0), None, "Token ids.", required=True)}


@dataclass(frozen=True)
class TokenizeCall:
    facts: Facts
    content: str
    add_special: bool
    parse_special: bool
    with_pieces: bool

    def answer(self) -> dict[str, Any]:
        """Returns the reply, for :func:`json_parts`. Slow for long texts: not for an event loop's thread."""
        add_bos = None if self.add_special else False
        ids = self.facts.tokenizer.encode(self.content, add_bos=add_bos, parse_special=self.parse_special)
        if not self.with_pieces:
            return {"tokens": ids}
        return {"tokens": ({"id": id, "piece": self._piece(id)} for id in ids)}

    def _piece(self, id: int) -> str | list[int]:
        """Returns the text of a token, or its bytes if they are not whole characters."""
        piece = self.facts.tokenizer.piece(id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return list(piece)


@dataclass(frozen=True)
class DetokenizeCall:
    facts: Facts
    tokens: list[int]

    def answer(self) -> dict[str, Any]:
        """Returns the reply, for :func:`json_parts`."""
        return {"content": LongText(self._text())}

    def _text(self) -> Iterator[str]:
        stream = self.facts.tokenizer.stream_decoder()
        for at in range(0, len(self.tokens), _TOKENS):
            yield "".join(map(stream.push, self.tokens[at : at + _TOKENS]))
        yield stream.flush()


def parse_tokenize(body: object, facts: Facts) -> TokenizeCall:
    """Reads the body of a request. Raises APIError for wrong values."""
    return TokenizeCall(facts, **Shape(TOKENIZE).read(body, ""))


def parse_detokenize(body: object, facts: Facts) -> DetokenizeCall:
    """Reads the body of a request. Raises APIError for wrong values."""
    tokens = Shape(DETOKENIZE).read(body, "")["tokens"]
    check_ids(tokens, facts.vocab, "tokens")
    return DetokenizeCall(facts, tokens)
