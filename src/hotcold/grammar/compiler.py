"""Compiles grammars to token masks with llguidance. Only this file knows that package."""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from hotcold.grammar.error import GrammarError
from hotcold.tokenizer.tokenizer import Tokenizer
from hotcold.values import printable

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = npt.NDArray[np.uint64]  #: ``[ceil(V / 64)]``, a bit for each id

#: Limits of one step. A mask that needs more is an error, so no grammar stops the engine for long: a mask at
#: these limits takes some tenths of a second.
_LIMITS = {
    "max_items_in_row": 10_000,
    "initial_lexer_fuel": 5_000_000,
    "step_lexer_fuel": 1_000_000,
    "step_max_items": 200_000,
    "max_lexer_states": 20_000,  # of 1 to 2 kB
    "max_grammar_size": 200_000,
    "verbose_errors": False,  # verbose errors would quote the answer
}


@dataclass(frozen=True)
class GrammarVocabulary:
    """The facts about a tokenizer that the compiler needs."""

    pieces: Sequence[bytes]  #: ``[V]`` bytes that each token adds to the text
    silent: Sequence[int]  #: tokens that add nothing
    stops: Sequence[int]  #: tokens that end the text, at least one

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> Self:
        """Collects the facts. GrammarError: the vocabulary has no token that ends a text."""
        if not tokenizer.stop_ids:
            raise GrammarError("this model has no token that ends a text, which constrained answers need")
        silent = sorted(tokenizer.control_names)
        pieces = [tokenizer.piece(id) for id in range(tokenizer.vocab_size)]
        return cls(pieces, silent, sorted(tokenizer.stop_ids))

    def control_ids(self) -> dict[str, int]:
        """Tokens that add nothing to a text, by name."""
        return {self.pieces[id].decode(errors="replace"): id for id in self.silent}

    def to_plain(self) -> dict[str, Any]:
        """Returns the vocabulary in a form that JSON can hold."""
        joined = base64.b64encode(b"".join(self.pieces)).decode()
        lengths = [len(piece) for piece in self.pieces]
        return {"pieces": joined, "lengths": lengths, "silent": self.silent, "stops": self.stops}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Self:
        joined = base64.b64decode(plain["pieces"])
        ends = np.cumsum([0, *plain["lengths"]]).tolist()
        pieces = [joined[start:end] for start, end in pairwise(ends)]
        return cls(pieces, plain["silent"], plain["stops"])


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Safe to use from several threads."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        llguidance = self._llguidance = _llguidance()
        self._size = len(vocabulary.pieces)
        self.stops = frozenset(vocabulary.stops)
        self._tokenizer = llguidance.LLTokenizer(_Tokens(vocabulary), eos_token=list(vocabulary.stops))
        self._limits = llguidance.LLParserLimits(**_LIMITS)
        self.pieces = vocabulary.pieces
        self._silent = frozenset({*vocabulary.silent, *vocabulary.stops})
        self._ids: dict[bytes, int] = {}  # by piece, once they are needed
        self._longest = 0

    def compile(self, lark: str) -> "Matcher":
        """The matcher of a grammar in llguidance's dialect of Lark, before the first token. GrammarError,
        with the line: it is invalid, or too large."""
        # Without no_forcing, llguidance would allow only one tokenisation of a certain text.
        text = '%llguidance {"no_forcing": true}\n' + lark
        matcher = self._llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        _refuse_errors(matcher, "the grammar is not valid")
        return Matcher(matcher, self._size)

    def spelled(self, text: bytes) -> list[int]:
        """Tokens that spell a text, the longest at each place. They end before bytes at which no token
        begins. A model may tokenise the text otherwise."""
        if not self._ids:
            ids = {piece: id for id, piece in enumerate(self.pieces) if piece and id not in self._silent}
            self._longest = max(map(len, ids), default=0)
            self._ids = ids
        token_ids: list[int] = []
        at = 0
        while at < len(text):
            ends = range(min(at + self._longest, len(text)), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is None:
                break
            token_ids.append(self._ids[text[at:end]])
            at = end
        return token_ids


class TooManyStates(GrammarError):
    """Raised if a matcher has stored the largest allowed number of states of regular expressions."""


def escaped_regex(regex: str) -> str:
    """A regular expression, escaped to stand between slashes."""
    escaped: str = _llguidance().regex_to_lark(regex, "")
    return escaped


def _llguidance() -> ModuleType:
    import llguidance  # here, so that other commands start without it

    return llguidance


class Matcher:
    """The position of an answer in a grammar. Several threads at once may only call :meth:`copy`."""

    def __init__(self, matcher: "LLMatcher", size: int) -> None:
        self._matcher = matcher
        self._size = size
        self._bounded = False  # True if llguidance applies the limits of a step, from the first mask on

    def copy(self) -> "Matcher":
        """Returns a matcher at the same position. Both share the count of states of regular expressions."""
        return Matcher(self._matcher.deep_copy(), self._size)

    def consume(self, tokens: Sequence[int]) -> bool:
        """Advances by tokens that do not end the text. False: a token is not allowed, and the matcher is no
        longer usable. GrammarError: advancing would cost too much."""
        if not tokens:
            return True
        if not self._matcher.is_stopped() and self._matcher.consume_tokens(list(tokens)):
            return True
        if not _NOT_ALLOWED.search(self._matcher.get_error()):
            _refuse_errors(self._matcher, "the grammar cannot continue")
        return False

    def rollback(self, n: int) -> bool:
        """Takes back the last ``n`` tokens. False: it cannot, and the matcher is no longer usable."""
        return self._matcher.rollback(n) and not self._matcher.is_error()

    def complete(self) -> bool:
        """True if the text may end here."""
        return self._matcher.is_accepting()

    def forced(self) -> bytes:
        """The only bytes that may follow, or none if there is a choice. GrammarError: they are too many."""
        if not self._bounded:
            self.mask()
        if self._matcher.is_stopped():
            return b""
        # If a control token comes next, this call leaves the matcher in a state that allows no token.
        matcher = self._matcher.deep_copy()
        forced_bytes: bytes = matcher.compute_ff_bytes()
        _refuse_errors(matcher, "the grammar cannot continue")
        return forced_bytes

    def possible(self, tokens: Sequence[int]) -> int:
        """The number of leading tokens that may follow, in this order."""
        return 0 if self._matcher.is_stopped() else self._matcher.validate_tokens(list(tokens))

    def mask(self) -> Mask:
        """The tokens that may come next; tokens that end the text, if the grammar is complete. GrammarError:
        computing the mask would cost too much, or no token is allowed."""
        bits = self._matcher.compute_bitmask()  # without Python's lock
        self._bounded = True
        _refuse_errors(self._matcher, "the grammar cannot continue")
        mask = np.zeros(-(-self._size // 64), np.uint64)
        n = min(len(bits), mask.nbytes)  # it has one bit more than the vocabulary has tokens
        mask.view(np.uint8)[:n] = np.frombuffer(bits, np.uint8, n)
        return mask


class _Tokens:
    """The form in which llguidance reads a vocabulary."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.tokens = list(vocabulary.pieces)
        self.eos_token_id = vocabulary.stops[0]
        self.special_token_ids = sorted({*vocabulary.silent, *vocabulary.stops})

    def __call__(self, text: str) -> list[int]:
        raise AssertionError("the compiler asked for tokens of a forced text, but forces none")


def _refuse_errors(matcher: "LLMatcher", label: str) -> None:
    if matcher.is_error():
        text = printable(" ".join(_EXCERPT.split(matcher.get_error())[0].split()), 500)
        for pattern, reason in _REASONS.items():
            if match := re.search(pattern, text):
                error = TooManyStates if pattern == _STATES else GrammarError
                raise error(f"{label}: {reason.format(*match.groups(), **_LIMITS)}")
        raise GrammarError(f"{label}: {_OUR_LINE.sub(_their_line, text)}")


def _their_line(match: re.Match[str]) -> str:
    return f"line {int(match[1]) - 1}: "  # the first line is the %llguidance line


_EXCERPT = re.compile(r"\n *\d+ \||\n<state>|<non-verbose/>")  # the text after it quotes the grammar
_OUR_LINE = re.compile(r"^(?:at )?(\d+)\(\d+\): ")
_NOT_ALLOWED = re.compile("doesn't satisfy the grammar|out of range")
_STATES = "too many states"
#: llguidance's messages -> the reasons that a client reads. Most are limits that docs/grammar.md lists.
_REASONS = {
    "NoExtension": "no token can come next: it requires a text without an end, or nothing at all",
    r"Current row has (\d+) items": "too many items at one place, {}: the limit is {max_items_in_row}",
    "Too many items": "too many items for one token: the limit is {step_max_items}",
    "ParserTooComplex": "there are too many ways to continue",
    "too many expressions": "too many steps of an expression for one token: the limit is {step_lexer_fuel}",
    _STATES: "too many states of its expressions: the limit is {max_lexer_states}",
    "LexerTooComplex": "an expression in it is too complex",
    "lexer precomputation failed|initial lexer config|fuel exhausted": (
        "too many steps to compile its expressions: the limit is {initial_lexer_fuel}"
    ),
    "number of symbols": "too many symbols: the limit is {max_grammar_size}",
    "if regex is empty": "it takes too long to find whether a text matches several of its patterns",
    "patternProperty regexes (.+) and (.+) are not disjoint": (
        "the patternProperties {} and {} match some of the same names: write patterns that exclude each "
        "other, or name these properties"
    ),
    "^panic": "the grammar compiler fails: write the grammar in another way",
}
