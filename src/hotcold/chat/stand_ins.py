"""Prevents special tokens in users' text from becoming tokens, whatever a chat template does with the text.

A template joins its own text with the text of users. The result does not show which of the two wrote
``<|im_end|>``, or half of it. Therefore users' characters that may be part of a control token's name pass
through the template as *stand-ins*. A stand-in is a private character that occurs in neither text. Only the
template's own characters can then spell a control token. Afterwards the original characters replace the
stand-ins. Operations of templates on a text (``in``, ``split``, ``trim``) work on a :class:`MarkedText`,
which answers for the original text."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, SupportsIndex

from hotcold.errors import UserError
from hotcold.tokenizer.unicode import check_unicode

if TYPE_CHECKING:
    from hotcold.tokenizer.tokenizer import Tokenizer

#: Stand-ins are characters of the private use areas.
_PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
#: Noncharacters, which texts seldom have.
_MARKS = (*range(0xFDD0, 0xFDF0), *(plane << 16 | low for plane in range(1, 17) for low in (0xFFFE, 0xFFFF)))
_PART = 1 << 16  # characters per call, during which other threads wait
#: Templates write tools as JSON, which escapes these. All names of control tokens have other characters, too.
_NEVER_MARKED = frozenset('"\\')


@dataclass(frozen=True)
class StandIns:
    """A mapping of characters: ``marked[i]`` replaces ``plain[i]``; no character occurs twice."""

    plain: str
    marked: str

    @cached_property
    def forward(self) -> dict[int, str]:
        return {ord(a): b for a, b in zip(self.plain, self.marked, strict=True)}

    @cached_property
    def back(self) -> dict[int, str]:
        return {ord(b): a for a, b in zip(self.plain, self.marked, strict=True)}

    def replaced(self, text: str) -> str:
        """Returns a text with stand-ins for its characters."""
        return _translated(text, self.forward)

    def restored(self, text: str) -> str:
        """Returns a text with the original characters of its stand-ins."""
        return _translated(text, self.back)

    def mark(self, value: Any) -> Any:
        """Converts all strings, keys included, of dicts, lists and plain values to :class:`MarkedText`."""
        if isinstance(value, str):
            return MarkedText(value.translate(self.forward), self)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(each) for key, each in value.items()}
        return [self.mark(each) for each in value] if isinstance(value, list) else value


_NONE = StandIns("", "")


def _translated(text: str, table: Mapping[int, str]) -> str:
    return "".join(text[at : at + _PART].translate(table) for at in range(0, len(text), _PART))


def stand_ins(names: Iterable[str], texts: Iterable[str]) -> StandIns:
    """Returns stand-ins for the characters of token names. They will be used in ``texts``, and do not occur
    there. Raises UserError if the texts use up the private characters."""
    plain = "".join(sorted(_markable(names)))
    used = _characters(texts)
    free = (character for area in _PRIVATE for character in map(chr, area) if character not in used)
    marked = "".join(character for character, _ in zip(free, plain, strict=False))
    if len(marked) < len(plain):
        raise UserError("the text uses nearly all private-use characters of Unicode: remove some of them")
    return StandIns(plain, marked)


def unused(count: int, texts: Iterable[str]) -> list[str]:
    """Returns characters that occur in none of the texts. Raises UserError if there are too few."""
    used = _characters(texts)
    characters = [character for character in map(chr, _MARKS) if character not in used][:count]
    if len(characters) < count:
        raise UserError("the text uses nearly all noncharacters of Unicode: remove some of them")
    return characters


def _characters(texts: Iterable[str]) -> set[str]:
    """Returns the characters of texts that are not ASCII: stand-ins and marks are not ASCII."""
    characters: set[str] = set()
    for text in texts:
        for at in () if text.isascii() else range(0, len(text), _PART):
            characters.update(text[at : at + _PART])
    return characters


def encode_rendered(tokenizer: "Tokenizer", text: str, stand_ins: StandIns) -> list[int]:
    """Returns the token ids of a rendered prompt, with control tokens only where the template itself wrote
    their names. Adds BOS if the file wants it and the template did not write it; never adds EOS."""
    text = str.__str__(text)  # a MarkedText would hide its stand-ins
    check_unicode(text, "the prompt")
    parts: list[str | int] = []
    for part in tokenizer.cut_special(text):
        if isinstance(part, int) and not _markable([tokenizer.control_names.get(part, "x")]):
            # A name of spaces only has no stand-ins, so a user may have written it.
            part = tokenizer.control_names[part]
        if isinstance(part, str):
            part = stand_ins.restored(part)
            if parts and isinstance(last := parts[-1], str):
                parts[-1] = last + part
                continue
        parts.append(part)
    ids = tokenizer.encode_parts(parts)
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids


def _markable(names: Iterable[str]) -> set[str]:
    characters = set("".join(names))
    return {each for each in characters - _NEVER_MARKED if each > " " and not each.isspace()}


class MarkedText(str):
    """A text with stand-ins that behaves like the original text; its parts are also such texts. Operations
    that it does not define see the stand-ins: their result may differ, but a user's character never passes
    for the template's."""

    _stand_ins: StandIns
    _plain: str  #: the original text, of the same length

    def __new__(cls, text: str, stand_ins: StandIns = _NONE) -> "MarkedText":
        self = super().__new__(cls, text)
        self._stand_ins = stand_ins
        self._plain = text.translate(stand_ins.back)
        return self

    def _of(self, text: str) -> "MarkedText":
        return MarkedText(text, self._stand_ins)

    def _view(self, value: Any) -> Any:
        """Returns the original of an argument: of a text, or of several, as ``startswith`` accepts."""
        if isinstance(value, tuple):
            return tuple(map(self._view, value))
        return value.translate(self._stand_ins.back) if isinstance(value, str) else value

    def _between(self, start: int, end: int) -> "MarkedText":
        return self._of(str.__getitem__(self, slice(start, end)))

    def _cut(self, parts: Iterable[str], skip: int) -> list["MarkedText"]:
        """Returns the parts of the text, with ``skip`` characters between neighbours."""
        cut, at = [], 0
        for part in parts:
            cut.append(self._between(at, at + len(part)))
            at += len(part) + skip
        return cut

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return repr(self._plain).translate(self._stand_ins.forward)

    def __hash__(self) -> int:
        return hash(self._plain)

    def __contains__(self, part: Any) -> bool:
        return bool(self._view(part) in self._plain)

    def __eq__(self, other: object) -> bool:
        return bool(self._plain == self._view(other))

    def __ne__(self, other: object) -> bool:
        return bool(self._plain != self._view(other))

    def __lt__(self, other: str) -> bool:
        return bool(self._plain < self._view(other))

    def __le__(self, other: str) -> bool:
        return bool(self._plain <= self._view(other))

    def __gt__(self, other: str) -> bool:
        return bool(self._plain > self._view(other))

    def __ge__(self, other: str) -> bool:
        return bool(self._plain >= self._view(other))

    def __int__(self) -> int:
        return int(self._plain)

    def __float__(self) -> float:
        return float(self._plain)

    def __add__(self, other: str) -> "MarkedText":
        return self._of(str.__add__(self, other))

    def __radd__(self, other: str) -> "MarkedText":
        return self._of(str.__add__(other, self))

    def __getitem__(self, place: SupportsIndex | slice) -> "MarkedText":
        return self._of(str.__getitem__(self, place))

    def __iter__(self) -> Iterator["MarkedText"]:
        return map(self._of, str.__iter__(self))

    def lstrip(self, chars: str | None = None, /) -> "MarkedText":
        return self._between(len(self) - len(self._plain.lstrip(self._view(chars))), len(self))

    def rstrip(self, chars: str | None = None, /) -> "MarkedText":
        return self._between(0, len(self._plain.rstrip(self._view(chars))))

    def strip(self, chars: str | None = None, /) -> "MarkedText":
        return self.rstrip(chars).lstrip(chars)

    def removeprefix(self, prefix: str, /) -> "MarkedText":
        return self._between(len(self) - len(self._plain.removeprefix(self._view(prefix))), len(self))

    def removesuffix(self, suffix: str, /) -> "MarkedText":
        return self._between(0, len(self._plain.removesuffix(self._view(suffix))))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._split(self._plain.split(self._view(sep), maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._split(self._plain.rsplit(self._view(sep), maxsplit), sep)

    def _split(self, parts: list[str], sep: str | None) -> list[str]:
        if sep is not None:
            return [*self._cut(parts, len(sep))]
        texts: list[str] = []
        at = 0
        for part in parts:  # only spaces are between them
            at = self._plain.index(part, at)
            texts.append(self._between(at, at + len(part)))
            at += len(part)
        return texts

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        before, middle, after = self._cut(self._plain.partition(self._view(sep)), 0)
        return before, middle, after

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        before, middle, after = self._cut(self._plain.rpartition(self._view(sep)), 0)
        return before, middle, after

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = self._cut(self._plain.splitlines(keepends=True), 0)
        bare = self._plain.splitlines(keepends)
        return [line._between(0, len(text)) for line, text in zip(lines, bare, strict=True)]

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> "MarkedText":
        plain = self._view(old)
        if not plain:  # between all characters: not useful
            return self
        return self._of(str.join(new, self._cut(self._plain.split(plain, count), len(plain))))


def _asks(name: str) -> Callable[..., Any]:
    """Makes a method that answers for the plain text."""

    def method(self: MarkedText, *args: Any) -> Any:
        return getattr(self._plain, name)(*map(self._view, args))

    return method


def _changes(name: str) -> Callable[..., MarkedText]:
    """Makes a method that changes the plain text; the result counts as a user's text."""

    def method(self: MarkedText, *args: Any) -> MarkedText:
        changed = getattr(self._plain, name)(*map(self._view, args))
        return self._of(changed.translate(self._stand_ins.forward))

    return method


_QUESTIONS = (
    "startswith", "endswith", "find", "rfind", "index", "rindex", "count", "isalpha", "isdigit", "isdecimal",
    "isnumeric", "isalnum", "isupper", "islower", "istitle", "isspace", "isascii", "isprintable",
    "isidentifier",
)  # fmt: skip
_CHANGES = ("upper", "lower", "title", "capitalize", "swapcase", "casefold", "expandtabs")
for _name in _QUESTIONS:
    setattr(MarkedText, _name, _asks(_name))
for _name in _CHANGES:
    setattr(MarkedText, _name, _changes(_name))


def texts_of(value: Any) -> Iterator[str]:
    """Yields all strings, keys included, of mappings, sequences and plain values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts_of(key)
            yield from texts_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_of(item)
