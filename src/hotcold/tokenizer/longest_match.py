"""RWKV's tokenizer (``tokenizer.ggml.model`` = ``rwkv``): takes the longest token at each place of the bytes.

Files spell tokens as Python bytes literals, with escapes: ``\\n``, ``\\xe4``, ``\\\\``."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from hotcold.tokenizer.vocabulary import TokenType, Vocabulary, token_bytes

_ESCAPES = {ord("t"): 9, ord("n"): 10, ord("r"): 13}


def unescaped(token: str) -> bytes:
    """The bytes of a token in a file, as llama.cpp reads them; an incomplete escape at its end is ignored."""
    text, result, i = token_bytes(token), bytearray(), 0
    while i < len(text):
        byte, i = text[i], i + 1
        if byte != ord("\\"):
            result.append(byte)
        elif i < len(text) and text[i] != ord("x"):
            result.append(_ESCAPES.get(text[i], text[i]))
            i += 1
        else:
            digits = text[i + 1 : i + 3]
            if len(digits) == 2 and all(digit in b"0123456789abcdefABCDEF" for digit in digits):
                result.append(int(digits, 16))
            i += 3
    return bytes(result)


class LongestMatch:
    def __init__(self, vocabulary: Vocabulary, _: Mapping[str, Any]) -> None:
        self.piece = vocabulary.speller(unescaped)
        never = {*vocabulary.of_types(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED)}
        pieces = enumerate(map(self.piece, range(len(vocabulary.tokens))))
        self._ids = {piece: id for id, piece in pieces if piece and id not in never}
        lengths: defaultdict[bytes, set[int]] = defaultdict(set)
        for piece in self._ids:
            lengths[piece[:2]].add(len(piece))
        #: first two bytes of tokens, or a token of one byte -> the lengths of these tokens, the longest first
        self._lengths = {start: sorted(each, reverse=True) for start, each in lengths.items()}
        self.lacks = any(bytes([byte]) not in self._ids for byte in range(256))

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of a text without special tokens; its :meth:`absent` bytes are left out."""
        return [id for id, _ in self._matches(text.encode()) if id is not None]

    def absent(self, text: str) -> list[str]:
        """The bytes of a text at which no token begins."""
        return [
            f"0x{byte:02X}"
            for byte in sorted({byte for id, byte in self._matches(text.encode()) if id is None})
        ]

    def _matches(self, text: bytes) -> list[tuple[int | None, int]]:
        """The token at each place, or None, and the first byte there."""
        matches: list[tuple[int | None, int]] = []
        ids, at = self._ids, 0
        while at < len(text):
            for n in self._lengths.get(text[at : at + 2], ()):
                if (id := ids.get(text[at : at + n])) is not None and at + n <= len(text):
                    break
            else:
                n, id = 1, ids.get(text[at : at + 1])
            matches.append((id, text[at]))
            at += n
        return matches
