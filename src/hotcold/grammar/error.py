"""The error of a grammar that a request brought."""

from hotcold.engine.request import RequestError


class GrammarError(RequestError):
    """Raised for a grammar or schema that is broken, unsupported or beyond the limits; trying again does not
    help. One line."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "invalid_grammar")
