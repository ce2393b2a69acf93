"""SentencePiece's byte-pair encoding with scores (``tokenizer.ggml.model`` = ``llama``).

A text starts as its characters. Neighbours whose concatenation is a token are merged, the pair with the
highest score first (the leftmost on a tie), until no such pair is left; a character without a token
becomes its bytes in UTF-8. Kudo and Richardson, arXiv 1808.06226; the same ids as llama.cpp and
SentencePiece."""

from array import array
from collections.abc import Iterator, Mapping, MutableSequence
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.tokenizer.vocabulary import Vocabulary, token_bytes

SPACE = "\u2581"  #: how SentencePiece spells a space inside tokens

_CACHED_CHUNKS = 1 << 14
_CACHED_LENGTH = 64  # longer chunks hardly ever repeat
_PART = 1 << 16  # characters that one call works on: other threads wait until it returns
_POSITION_BITS = 40


def spelled(token: str) -> bytes:
    """The bytes that an ordinary token adds to a text."""
    return token_bytes(token.replace(SPACE, " "))


def _pairs(text: str) -> npt.NDArray[np.uint64]:
    """Each two neighbouring characters of a text as one number."""
    points = np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.uint64)
    pairs: npt.NDArray[np.uint64] = points[:-1] << np.uint64(32) | points[1:]
    return pairs


def _numbers(start: int, end: int) -> MutableSequence[int]:
    """The numbers from ``start`` to ``end`` - 1. Millions of them are an array: it takes a seventh of the
    memory, and is made before other threads have waited for long."""
    if end - start <= _PART:
        return list(range(start, end))
    return array("i", np.arange(start, end, dtype=np.int32).tobytes())


class SentencePieceBPE:
    def __init__(self, vocabulary: Vocabulary, _: Mapping[str, Any]) -> None:
        assert vocabulary.scores is not None
        self.piece = vocabulary.speller(spelled)
        # Without control tokens no sequence of merges can spell one.
        self._ids = vocabulary.ordinary()
        # Ranks order as scores do, equal for equal scores, and pack with a position into one integer.
        self._ranks: list[int] = np.unique(-vocabulary.scores, return_inverse=True)[1].tolist()
        byte_ids = vocabulary.byte_ids()
        self._bytes = [byte_ids.get(byte, vocabulary.unknown_id) for byte in range(256)]
        self.lacks = None in self._bytes
        self._merge_cached = lru_cache(_CACHED_CHUNKS)(self._merge)

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of a text without special tokens; its :meth:`absent` characters are left out."""
        ids: list[int] = []
        for chunk in self._chunks(text.replace(" ", SPACE)):
            ids += self._merge_cached(chunk) if len(chunk) <= _CACHED_LENGTH else self._merge(chunk)
        return ids

    def absent(self, text: str) -> list[str]:
        """The characters of a text for which neither they nor their bytes have tokens."""
        chunks = self._chunks(text.replace(" ", SPACE))
        symbols = {symbol for chunk in chunks for symbol in self._symbols(chunk)}
        return [f"U+{ord(symbol):04X}" for symbol in sorted(symbols) if not self._symbol_ids(symbol)]

    def _chunks(self, text: str) -> Iterator[str]:
        """Cuts a text where no token has the two neighbouring characters: no merge can cross such a place.
        A short text stays whole: it is merged sooner than the list of neighbours is made."""
        start = 0
        for at in range(0, len(text), _PART) if len(text) > _CACHED_LENGTH else ():
            known, pairs = self._neighbours, _pairs(text[at : at + _PART + 1])
            cuts = np.flatnonzero(known[np.searchsorted(known, pairs)] != pairs)
            for cut in (cuts + at + 1).tolist():
                yield text[start:cut]
                start = cut
        yield text[start:]

    @cached_property
    def _neighbours(self) -> npt.NDArray[np.uint64]:
        """Characters that are neighbours in tokens, as :func:`_pairs` gives them, in order, then a number
        above all. NUL, which is between the tokens, counts as everybody's neighbour: a cut less."""
        return np.append(np.unique(_pairs("\0".join(self._ids))), ~np.uint64(0))

    def _merge(self, chunk: str) -> tuple[int, ...]:
        return tuple(id for symbol in self._symbols(chunk) for id in self._symbol_ids(symbol))

    def _symbols(self, chunk: str) -> list[str]:
        """The symbols that the merges make of a chunk's characters."""
        ids, ranks = self._ids, self._ranks
        symbols = list(chunk)
        end = len(symbols)
        previous, following = _numbers(-1, end - 1), _numbers(1, end + 1)
        # An entry is rank and left position. It is stale unless the pair that stands there now has that rank;
        # every pair that ever stood there pushed its own entry, so equal ranks cannot confuse the order.
        queue: list[int] = []
        for at in range(0, end, _PART):
            pairs = enumerate(map("".join, pairwise(chunk[at : at + _PART + 1])), at)
            entries = [ranks[ids[pair]] << _POSITION_BITS | i for i, pair in pairs if pair in ids]
            if at == 0:
                queue = entries
                heapify(queue)
            else:
                for entry in entries:
                    heappush(queue, entry)
        while queue:
            entry = heappop(queue)
            left = entry & ((1 << _POSITION_BITS) - 1)
            right = following[left]
            if right == end or not symbols[left]:
                continue
            merged = symbols[left] + symbols[right]
            if (id := ids.get(merged)) is None or ranks[id] != entry >> _POSITION_BITS:
                continue
            symbols[left], symbols[right] = merged, ""
            after = following[left] = following[right]
            before = previous[left]
            if after < end:
                previous[after] = left
                if (id := ids.get(merged + symbols[after])) is not None:
                    heappush(queue, ranks[id] << _POSITION_BITS | left)
            if before >= 0 and (id := ids.get(symbols[before] + merged)) is not None:
                heappush(queue, ranks[id] << _POSITION_BITS | before)
        return [symbol for symbol in symbols if symbol]

    def _symbol_ids(self, symbol: str) -> list[int]:
        if (id := self._ids.get(symbol)) is not None:
            return [id]
        ids = [id for byte in symbol.encode() if (id := self._bytes[byte]) is not None]
        return ids if len(ids) == len(symbol.encode()) else []
