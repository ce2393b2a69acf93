"""A small mutation fuzzer without coverage: the same inputs for the same seed, on any Python."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Sequence

#: Wrong values for a length, a count, an offset or a scale.
_NUMBERS = [0, 1, 7, 8, 31, 32, 64, 255, 256, 2**15, 2**16 - 1, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1]
_NUMBERS += [2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]


def mutants(seeds: Sequence[bytes], seed: int = 0) -> Iterator[bytes]:
    """Endlessly: one of ``seeds`` with 1 to 5 edits, mostly in its first 4 KiB."""
    rng = random.Random(seed)
    while True:
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 5)):
            at = rng.randrange(min(len(data), rng.choice((64, 512, 4096, 1 << 20))) or 1)
            rng.choice(_EDITS)(rng, data, at, seeds)
        yield bytes(data)


Edit = Callable[[random.Random, bytearray, int, Sequence[bytes]], None]


def _flip(rng: random.Random, data: bytearray, at: int, seeds: Sequence[bytes]) -> None:
    data[at : at + 1] = bytes([rng.randrange(256)])


def _number(rng: random.Random, data: bytearray, at: int, seeds: Sequence[bytes]) -> None:
    width = rng.choice((1, 2, 4, 8))
    number = struct.pack("<Q", (rng.choice(_NUMBERS) + rng.randint(-2, 2)) % 2**64)
    data[at : at + width] = number[:width]


def _add(rng: random.Random, data: bytearray, at: int, seeds: Sequence[bytes]) -> None:
    if at < len(data):
        data[at] = (data[at] + rng.randint(-16, 16)) % 256


def _delete(rng: random.Random, data: bytearray, at: int, seeds: Sequence[bytes]) -> None:
    del data[at : at + rng.choice((1, 4, 8, rng.randint(1, 200)))]


def _insert(rng: random.Random, data: bytearray, at: int, seeds: Sequence[bytes]) -> None:
    data[at:at] = rng.randbytes(rng.choice((1, 4, 8, rng.randint(1, 64))))


def _splice(rng: random.Random, data: bytearray, at: int, seeds: Sequence[bytes]) -> None:
    """A piece of this or another seed, over or between what is there."""
    other = rng.choice(seeds)
    start, length = rng.randrange(len(other) or 1), rng.randint(1, 300)
    data[at : at + rng.choice((0, length))] = other[start : start + length]


def _cut(rng: random.Random, data: bytearray, at: int, seeds: Sequence[bytes]) -> None:
    del data[at:]


_EDITS: Sequence[Edit] = (
    [_flip] * 4 + [_number] * 6 + [_add] * 3 + [_splice] * 3 + [_delete, _insert] * 2 + [_cut]
)
