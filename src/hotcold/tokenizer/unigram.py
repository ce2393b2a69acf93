"""SentencePiece's unigram model (``tokenizer.ggml.model`` = ``t5``).

SentencePiece's normalisation comes first: a table of replacements, if there is one, and single spaces. Then
a text is cut into the tokens with the highest sum of scores (Kudo, arXiv 1804.10959)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hotcold.tokenizer.library import encoding
from hotcold.tokenizer.spm import SPACE, spelled
from hotcold.tokenizer.vocabulary import PREFIX, TokenizerError, TokenType, Vocabulary, array, flag, wrong

_UNKNOWN = "\U0010ffff"  # name of the unknown token, which occurs in no text
_LONGEST_KEY = 256  # bytes; bounds the walk through a broken table


class Unigram:
    lacks = False  #: the file has a token for unknown text

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> None:
        from tokenizers import Tokenizer, models

        if vocabulary.unknown_id is None:
            raise TokenizerError(f"the file has no {PREFIX}unknown_token_id: t5 needs one")
        assert vocabulary.scores is not None
        ids = vocabulary.ordinary(TokenType.UNUSED, TokenType.USER_DEFINED)
        scores = vocabulary.scores.tolist()
        # Like SentencePiece, the library scores an unknown character 10 below the lowest score.
        pieces = [(_UNKNOWN, max(scores)), *((token, scores[id]) for token, id in ids.items())]
        self._tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
        self._ids = [vocabulary.unknown_id, *ids.values()]
        self.piece = vocabulary.speller(spelled)
        byte_ids = vocabulary.byte_ids()
        self._byte_ids = byte_ids if len(byte_ids) == 256 else None
        self._prefix = SPACE if vocabulary.add_space_prefix else ""
        self._single_spaces = flag(metadata, "remove_extra_whitespaces", default=True)
        table = array(metadata, "precompiled_charsmap", "iu")
        self._table = None
        if table is not None and len(table):
            self._table = _Replacements(table.astype(np.uint8).tobytes())

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of a text without special tokens. Unknown characters become bytes or the unknown token."""
        if self._table:
            text = self._table.apply(text)
        if self._single_spaces:
            words = [word for word in text.split(" ") if word]
            text = self._prefix + SPACE.join(words) if words else ""
        encoded = encoding(self._tokenizer, text.replace(" ", SPACE))
        ids: list[int] = []
        for index, token in zip(encoded.ids, encoded.tokens, strict=True):
            if index == 0 and self._byte_ids:
                ids += map(self._byte_ids.__getitem__, token.encode())
            else:
                ids.append(self._ids[index])
        return ids

    def absent(self, text: str) -> list[str]:
        """An empty list: nothing is left out."""
        return []


class _Replacements:
    """SentencePiece's ``precompiled_charsmap``: the length of a trie, the trie, and the replacement strings.
    The trie is a double array (Aoe 1989) of uint32 in the format of the darts-clone library."""

    def __init__(self, data: bytes) -> None:
        size = int.from_bytes(data[:4], "little")
        if not 0 < size <= len(data) - 4 or size % 4:
            raise wrong("precompiled_charsmap", f"has {len(data)} bytes, its trie {size}: it is cut off")
        self._units: list[int] = np.frombuffer(data, "<u4", size // 4, offset=4).tolist()
        self._strings = data[4 + size :]

    def apply(self, text: str) -> str:
        raw, out, at = text.encode(), bytearray(), 0
        while at < len(raw):
            length, start = self._longest(raw[at : at + _LONGEST_KEY])
            end = self._strings.find(b"\0", start)
            if length and end >= 0:
                out += self._strings[start:end]
            else:
                length = 1
                out.append(raw[at])
            at += length
        return out.decode(errors="replace")

    def _longest(self, key: bytes) -> tuple[int, int]:
        """The bytes of the longest entry that begins ``key``, and the offset of its replacement."""
        units, longest = self._units, (0, 0)
        node = _offset(units[0])
        for length, byte in enumerate(key, 1):
            node ^= byte
            if node >= len(units) or units[node] & 0x800000FF != byte:
                break
            unit = units[node]
            node ^= _offset(unit)
            if unit >> 8 & 1 and node < len(units):
                longest = (length, units[node] & 0x7FFFFFFF)
        return longest


def _offset(unit: int) -> int:
    return unit >> 10 << ((unit & 1 << 9) >> 6)
