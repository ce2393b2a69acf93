"""Finds added tokens in a text, and applies their flags to the text around them, as the tokenizers library
does.

GGUF has no keys for the flags. ``hotcold convert`` writes its own keys. Without them, llama.cpp's rules for
well-known vocabularies apply, by their names."""

import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from hotcold.values import shown

PREFIX = "hotcold.tokenizer."

#: Unicode's property White_Space. Python's ``isspace`` also accepts U+001C to U+001F.
SPACES = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029"
    "\u202f\u205f\u3000"
)
_FREE, _FIRST, _OTHER = b"\0", b"\1", b"\2"
_PART = 1 << 16  # characters per call: other threads wait until it returns
_WORD = ("L", "M", "Nd", "Nl", "Pc")  # Unicode categories of word characters in regular expressions


@dataclass(frozen=True)
class TokenFlags:
    """Ids of the tokens that have each flag."""

    lstrip: frozenset[int] = frozenset()  #: takes the white space before it
    rstrip: frozenset[int] = frozenset()  #: takes the white space after it
    single_word: frozenset[int] = frozenset()  #: does not match next to a letter, a digit or an underscore
    #: is searched for after spaces are respelled: then no white space is left to strip, and a space that the
    #: vocabulary puts before a text belongs to the token
    normalized: frozenset[int] = frozenset()

    def metadata(self) -> dict[str, Any]:
        """Keys from which :func:`read_flags` makes the same flags; empty without flags."""
        given = {each.name: sorted(getattr(self, each.name)) for each in fields(self)}
        return {f"{PREFIX}{name}": np.array(ids, np.int32) for name, ids in given.items() if ids}


def read_flags(
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    special: Sequence[int],
    wrong: Callable[[str], Exception],
) -> TokenFlags:
    """Reads the flags. ``special`` are the tokens to search for in a text; ``wrong`` makes errors."""
    keys = [each.name for each in fields(TokenFlags) if PREFIX + each.name in metadata]
    if not keys:
        return implied_flags(metadata, tokens, special)
    return TokenFlags(**{key: frozenset(_ids(metadata, key, len(tokens), wrong)) for key in keys})


def implied_flags(metadata: Mapping[str, Any], tokens: Sequence[str], special: Sequence[int]) -> TokenFlags:
    """The flags of a file without keys for them: llama.cpp's rules, by names."""
    name, architecture, pre, model = (
        value if isinstance(value := metadata.get(key), str) else ""
        for key in ("general.name", "general.architecture", "tokenizer.ggml.pre", "tokenizer.ggml.model")
    )
    name = name.lower()
    jina = any(each in pre for each in ("jina-v2-de", "jina-v2-es", "jina-v2-code"))
    if jina or any(each in architecture for each in ("nomic-bert-moe", "jina-bert-v3")):
        return TokenFlags(lstrip=_named(tokens, "<mask>"))
    # Newer files of Phi-3 have names such as "Phi 3.5 Mini Instruct"; Phi-4 has another kind of vocabulary.
    if "phi-3" in name or "phi3" in name or (architecture == "phi3" and model == "llama"):
        kept = _named(tokens, "<unk>", "<s>", "<|endoftext|>")
        return TokenFlags(rstrip=_named(tokens, "</s>").union(special) - kept)
    if "modern-bert" in name:
        return TokenFlags(lstrip=_named(tokens, "[MASK]"))
    return TokenFlags()


def _named(tokens: Sequence[str], *names: str) -> frozenset[int]:
    return frozenset(id for id, token in enumerate(tokens) if token in names)


def _ids(metadata: Mapping[str, Any], key: str, size: int, wrong: Callable[[str], Exception]) -> list[int]:
    value = metadata[PREFIX + key]
    if not isinstance(value, np.ndarray) or value.ndim != 1 or (len(value) and value.dtype.kind not in "iu"):
        raise wrong(f"{PREFIX}{key} is {shown(value)}: an array of token ids is needed")
    ids: list[int] = value.tolist()
    for id in ids:
        if not 0 <= id < size:
            raise wrong(f"{PREFIX}{key} holds {id}: the {size} tokens have the ids 0 to {size - 1}")
    return ids


@dataclass(frozen=True)
class AddedTokens:
    """Finds tokens in a text by name, in the order of ``names``."""

    names: Sequence[tuple[str, int]]
    flags: TokenFlags

    def cut(self, text: str, before: str = "", after: str = "") -> list[str | int]:
        """The text in parts: ids of the tokens, and the strings between them, none empty. ``before`` and
        ``after`` are the neighbouring characters, if any."""
        characters = {each for at in range(0, len(text), _PART) for each in {*text[at : at + _PART]}}
        names = [each for each in self.names if each[0][0] in characters and each[0] in text]
        if not names:
            return [text] if text else []
        taken = bytearray(len(text))  # for each character: _FIRST of a token, _OTHER of its others
        ends: dict[int, tuple[int, int]] = {}  # end and id of each token, by start
        for name, id in names:
            for left, right in self._places(text, taken, name, id, before, after):
                ends[left] = right, id
                taken[left:right] = _FIRST + _OTHER * (right - left - 1)
        parts: list[str | int] = []
        at = 0
        while (left := taken.find(_FIRST, at)) >= 0:
            if left > at:
                parts.append(text[at:left])
            at, id = ends[left]
            parts.append(id)
        return [*parts, text[at:]] if at < len(text) else parts

    def _places(
        self, text: str, taken: bytearray, name: str, id: int, before: str, after: str
    ) -> Iterator[tuple[int, int]]:
        """Yields start and end of each match of a token, from left to right, outside of earlier matches. The
        time does not grow with the number of earlier matches."""
        flags = self.flags
        spaces = SPACES.replace(" ", "") if id in flags.normalized else SPACES
        at = 0
        while at >= 0 and (left := text.find(name, at)) >= 0:
            right = left + len(name)
            taken_at = left if taken[left] else taken.find(_FIRST, left, right)
            if taken_at >= 0:
                at = taken.find(_FREE, taken_at)
                continue
            at = right
            sides = (text[left - 1] if left else before, text[right] if right < len(text) else after)
            if id in flags.single_word and any(map(_is_word, sides)):
                continue
            while id in flags.lstrip and left and not taken[left - 1] and text[left - 1] in spaces:
                left -= 1
            while id in flags.rstrip and right < len(text) and not taken[right] and text[right] in spaces:
                right += 1
            at = right
            yield left, right


def _is_word(character: str) -> bool:
    """True for a word character; False for the empty string."""
    return bool(character) and (
        character in "\u200c\u200d" or unicodedata.category(character).startswith(_WORD)
    )
