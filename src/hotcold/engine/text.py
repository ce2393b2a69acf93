"""Turns tokens into text as they arrive: whole characters, and nothing of a stop string.

Ids go in and text comes out; this module knows no engine."""

from collections.abc import Iterable, Sequence
from itertools import chain

from hotcold.engine.thought import Thought, phases_of
from hotcold.errors import UserError
from hotcold.tokenizer.tokenizer import Tokenizer
from hotcold.values import shown

MAX_STOPS = 256  #: stop strings of one request
MAX_STOP_LENGTH = 1024  #: characters of each

#: Tokens of a prompt that a decoder must see: the last three bytes say whether a character has begun, the
#: last token whether text has begun.
_TAIL = 64


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """One or several stop strings as a tuple. UserError: one is no text or empty, or there are too many."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise UserError(f"stop has {len(stops)} strings: at most {MAX_STOPS} are allowed")
    for each in stops:
        if not isinstance(each, str) or not 0 < len(each) <= MAX_STOP_LENGTH:
            seen = f"a string of {len(each)}" if isinstance(each, str) else shown(each)
            raise UserError(f"stop holds {seen}: strings of 1 to {MAX_STOP_LENGTH} characters are needed")
    return stops


class TextStream:
    """Turns the tokens of a continuation into text that is safe to show.

    Bytes that may begin a character are held back until the rest has come, and characters that may begin a
    stop string until it is clear that they do not. The stop string whose last character comes first ends the
    text (the longest, if several end there); it is not part of the text. The borders of tokens do not matter.
    After :attr:`stop` is set, tokens are refused.

    ``prompt`` has the tokens before the continuation, so that the text keeps its first space. Control tokens
    that are ``shown`` add their names to the text, others nothing. A ``thought`` has no stop strings."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        shown: Iterable[int] = (),
        thought: Thought | None = None,
    ) -> None:
        self._phases = phases_of(thought) if thought is not None and stop else None
        self.stop: str | None = None  #: the stop string that ended the text
        self._decoder = tokenizer.stream_decoder(shown)
        for id in prompt[-_TAIL:]:  # a long prompt would take long
            self._decoder.push(id)
        self._prefixes: dict[str, list[_Prefix]] = {}  # stop strings by first character
        for each in stop:
            self._prefixes.setdefault(each[0], []).append(_Prefix(each))
        self._begun: list[_Prefix] = []  # stop strings that have begun at the end of the text
        self._held = ""

    def push(self, id: int) -> str:
        """The text that a token makes safe to show, which may be empty. The token that completes a stop
        string still belongs to the continuation's ids; no other may follow."""
        if self.stop is not None:
            raise ValueError(f"token {id} comes after the stop string {self.stop!r}")
        return self._divided(self._decoder.push(id))

    def finish(self) -> str:
        """The text that was held back, when no token will follow; empty after a stop string. Bytes of an
        unfinished character are U+FFFD."""
        if self.stop is not None:
            return ""
        text = self._divided(self._decoder.flush())
        if self._phases is not None:
            text += self._safe(self._phases.finish())
        if self.stop is None:
            text += self._held
            self._held = ""
        return text

    def _divided(self, new: str) -> str:
        """Text that is safe to show; that of a thought always is."""
        if self._phases is None:
            return self._safe(new)
        text = ""
        for answers, part in self._phases.push(new):
            if answers:
                text += self._safe(part)
                if self.stop is not None:
                    break
            else:
                text += self._held + part
                self._held, self._begun = "", []
                for prefix in chain.from_iterable(self._prefixes.values()):
                    prefix.length = 0
        return text

    def _safe(self, new: str) -> str:
        if not self._prefixes:
            return new
        text = self._held + new
        for end, character in enumerate(new, len(self._held) + 1):
            # Other stop strings cost nothing: they neither begin with this character nor have begun.
            beginning = [each for each in self._prefixes.get(character, ()) if not each.length]
            moved = [*self._begun, *beginning]
            complete = [prefix.text for prefix in moved if prefix.push(character)]
            if complete:
                self.stop = max(complete, key=len)
                return text[: end - len(self.stop)]
            self._begun = [prefix for prefix in moved if prefix.length]
        safe = len(text) - max((prefix.length for prefix in self._begun), default=0)
        self._held = text[safe:]
        return text[:safe]


class _Prefix:
    """Tracks the longest prefix of a string with which the text so far ends, by Knuth, Morris and Pratt
    (1977): each character costs constant time on average. The table of shorter prefixes grows with the
    longest prefix that was met, so a new stream costs nothing."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = 0  #: length of the prefix
        self._shorter: list[int] = []  # by length - 1: the longest proper prefix that is also a suffix

    def push(self, character: str) -> bool:
        """Takes a character; True if the string is complete, and then no character may follow."""
        while self.length and self.text[self.length] != character:
            self.length = self._shorter[self.length - 1]
        self.length += self.text[self.length] == character
        if self.length > len(self._shorter):  # by one
            self._shorter.append(self._next_shorter())
        return self.length == len(self.text)

    def _next_shorter(self) -> int:
        i = len(self._shorter)
        if i == 0:
            return 0
        character, length = self.text[i], self._shorter[-1]
        while length and self.text[length] != character:
            length = self._shorter[length - 1]
        return length + (self.text[length] == character)
