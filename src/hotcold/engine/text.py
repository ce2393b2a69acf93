"""Streaming text of tokens: whole characters, without stop strings. This module knows no engine."""

from collections.abc import Iterable, Sequence
from itertools import chain

from hotcold.engine.thought import Thought, phases_of
from hotcold.errors import UserError
from hotcold.tokenizer.tokenizer import Tokenizer
from hotcold.values import shown

MAX_STOPS = 256  #: stop strings of one request
MAX_STOP_LENGTH = 1024  #: characters of each

#: Prompt tokens that a decoder needs: the last three bytes show whether a character has begun, the last token
#: whether text has begun.
_TAIL = 64


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns one or several stop strings as a tuple. UserError: too many strings, or one is empty or no
    text."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise UserError(f"stop has {len(stops)} strings: at most {MAX_STOPS} are allowed")
    for string in stops:
        if not isinstance(string, str) or not 0 < len(string) <= MAX_STOP_LENGTH:
            got = f"a string of {len(string)}" if isinstance(string, str) else shown(string)
            raise UserError(f"stop holds {got}: strings of 1 to {MAX_STOP_LENGTH} characters are needed")
    return stops


class TextStream:
    """Turns the tokens of a continuation into text that is safe to show.

    Bytes that may begin a character are held back until the character is complete. Characters that may begin
    a stop string are held back until they cannot. The first stop string to become complete ends the text (the
    longest, if several end there). The text does not contain it. Token borders do not matter. After
    :attr:`stop` is set, the stream refuses tokens.

    ``prompt`` has the tokens before the continuation, so that the text keeps its first space. Control tokens
    in ``shown`` add their names to the text, others nothing. Stop strings do not apply to a ``thought``."""

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
        for id in prompt[-_TAIL:]:  # a whole long prompt would take too much time
            self._decoder.push(id)
        self._prefixes: dict[str, list[_Prefix]] = {}  # stop strings by first character
        for string in stop:
            self._prefixes.setdefault(string[0], []).append(_Prefix(string))
        self._begun: list[_Prefix] = []  # stop strings whose beginning ends the text so far
        self._held = ""

    def push(self, id: int) -> str:
        """Returns the text that a token makes safe to show, which may be empty. The token that completes a
        stop string still belongs to the continuation's ids; no other may follow."""
        if self.stop is not None:
            raise ValueError(f"token {id} comes after the stop string {self.stop!r}")
        return self._divided(self._decoder.push(id))

    def finish(self) -> str:
        """Returns the text still held back, after the last token; empty after a stop string. Bytes of an
        unfinished character become U+FFFD."""
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
        """Returns the text that is safe to show; text of a thought always is."""
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
            # Other stop strings have not begun and do not begin here, so they cost nothing.
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
    """The longest prefix of a string that ends the text so far, by Knuth, Morris and Pratt (1977): each
    character takes constant time on average. The table of shorter prefixes grows with the longest prefix met,
    so a new stream costs nothing."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = 0  #: length of the prefix
        self._shorter: list[int] = []  # by length - 1: the longest proper prefix that is also a suffix

    def push(self, character: str) -> bool:
        """Adds a character; returns True if the string is complete. No character may follow then."""
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
