"""SentencePiece's byte-pair encoding with scores (``tokenizer.ggml.model`` = ``llama``).

A text starts as its characters. Two neighbours merge if their concatenation is a token, the pair with the
highest score first (the leftmost on a tie), until no such pair is left. A character without a token becomes
its bytes in UTF-8. Kudo and Richardson, arXiv 1808.06226; the ids equal llama.cpp's and SentencePiece's."""

from array import array
from collections.abc import Iterator, Mapping, MutableSequence
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hotcold.tokenizer.vocabulary import Vocabulary, token_bytes

SPACE = "\u2581"  #: SentencePiece's spelling of a space inside tokens

_CACHED_CHUNKS = 1 << 14
_CACHED_LENGTH = 64  # longer chunks rarely repeat
_PART = 1 << 16  # characters per call: other threads wait until it returns
_POSITION_BITS = 40


def spelled(token: str) -> bytes:
    """The bytes of an ordinary token."""
    return token_bytes(token.replace(SPACE, " "))


def _pairs(text: str) -> npt.NDArray[np.uint64]:
    """The pairs of neighbouring characters of a text, each as one number."""
    points = np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.uint64)
    pairs: npt.NDArray[np.uint64] = points[:-1] << np.uint64(32) | points[1:]
    return pairs


def _numbers(start: int, end: int) -> MutableSequence[int]:
    """The numbers from ``start`` to ``end`` - 1. Millions of them are an array, which takes a seventh of the
    memory, and is made quickly, so that other threads do not wait long."""
    if end - start <= _PART:
        return list(range(start, end))
    return array("i", np.arange(start, end, dtype=np.int32).tobytes())


class SentencePieceBPE:
    def __init__(self, vocabulary: Vocabulary, _: Mapping[str, Any]) -> None:
        assert vocabulary.scores is not None
        self.piece = vocabulary.speller(spelled)
        # Without control tokens no sequence of merges can spell one.
        self._ids = vocabulary.ordinary()
        # Ranks have the order of scores, equal for equal scores; a rank and a position fit into one integer.
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
        """The characters of a text without a token, and without tokens for their bytes."""
        chunks = self._chunks(text.replace(" ", SPACE))
        symbols = {symbol for chunk in chunks for symbol in self._symbols(chunk)}
        return [f"U+{ord(symbol):04X}" for symbol in sorted(symbols) if not self._symbol_ids(symbol)]

    def _chunks(self, text: str) -> Iterator[str]:
        """Cuts a text between two characters that are neighbours in no token: no merge can cross this place.
        A short text stays whole, since merging it takes less time than listing the neighbours."""
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
        """Sorted pairs of characters that are neighbours in tokens, as from :func:`_pairs`, then a number
        above all pairs. NUL, which joins the tokens here, counts as a neighbour of all."""
        return np.append(np.unique(_pairs("\0".join(self._ids))), ~np.uint64(0))

    def _merge(self, chunk: str) -> tuple[int, ...]:
        return tuple(id for symbol in self._symbols(chunk) for id in self._symbol_ids(symbol))

    def _symbols(self, chunk: str) -> list[str]:
        """The symbols of a chunk after all merges."""
        ids, ranks = self._ids, self._ranks
        symbols = list(chunk)
        end = len(symbols)
        previous, following = _numbers(-1, end - 1), _numbers(1, end + 1)
        # An entry is rank and left position. It is stale unless the current pair there has that rank. Every
        # pair pushed its own entry, so equal ranks cannot confuse the order.
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
