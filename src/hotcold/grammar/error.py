"""The error of a grammar that a request brought."""

from hotcold.engine.request import RequestError


class GrammarError(RequestError):
    """A grammar or schema that is broken, not supported, or beyond the limits, and would be so again. One
    line."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "invalid_grammar")
