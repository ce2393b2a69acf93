"""Which pages of the cache hold the beginning of a request's tokens already.

A full page is kept under a key that stands for all tokens up to its end, and for whatever else decides about
its bits: the model, the mode, predictors, placement and cache type. The pool gives such a page away when
nobody runs on it and pages lack, so nothing is held that somebody needs.

Where layers keep a state of the whole sequence, pages alone do not do: a request begins where a copy of the
state is kept, too, under the key of the page that ends there. A copy costs nothing but its slot: the step
after it reads that and writes another (:class:`States`)."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from hotcold.engine.request import Request
from hotcold.kernels.backend import PAGE
from hotcold.model.kv_cache import PagePool, SlotPool


@dataclass(frozen=True)
class Found:
    """The beginning of a request that others have computed."""

    pages: Sequence[int] = ()  #: that hold its tokens
    slot: int = -1  #: with the state after those; -1 without any
    known: int = 0  #: pages of its beginning that are kept, those among them after which no state is


class PrefixCache:
    """Keeps the pages of requests, and copies of their states in ``slots``, for those that begin with the
    same tokens.

    ``identity`` is what decides about the bits of keys and values beside tokens. ``generated``: whether rows
    of generated tokens have the bits that rows of a prompt have; else only pages of prompts are kept, and
    only for prompts."""

    def __init__(
        self, pool: PagePool, identity: Sequence[str], *, generated: bool, slots: SlotPool | None = None
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._root = _digest(json.dumps([*identity, generated]).encode())
        self._generated = generated

    def find(self, request: Request, first: int = 0) -> Found:
        """Finds a request's tokens from those of its page ``first`` on; the pages before it are its own.
        At least its last token is left to be computed, which gives the next one."""
        if not shares(request):
            return Found()
        last = min((request.length - 1) // PAGE, self._most(request))
        pages = list(self._found(request, range(first, last)))
        known = first + len(pages)
        if self._slots is None:
            return Found(pages, known=known)
        while pages:
            slot = self._slots.find(self._key(request, first + len(pages) - 1))
            if slot is not None:
                return Found(pages, slot, known)
            pages.pop()
        return Found(known=known)

    def state_key(self, request: Request, position: int) -> bytes | None:
        """Where a request's tokens before a position end with a page: what the state after them is found
        under, if others may find it."""
        pages, rest = divmod(position, PAGE)
        if rest or not shares(request) or not 0 < pages <= self._most(request):
            return None
        return self._key(request, pages - 1)

    def keep(self, request: Request) -> None:
        """Keeps the full pages of a request that has them, for others."""
        if not shares(request):
            return
        for i in range(request.kept, min(request.computed // PAGE, self._most(request))):
            self._pool.keep(request.pages[i], self._key(request, i))
            request.kept = i + 1

    def _most(self, request: Request) -> int:
        """Pages, of those that a request fills, that are like those of any other."""
        return (request.length if self._generated else len(request.job.prompt)) // PAGE

    def _found(self, request: Request, pages: range) -> Iterator[int]:
        for i in pages:
            page = self._pool.find(self._key(request, i))
            if page is None:
                return
            yield page

    def _key(self, request: Request, index: int) -> bytes:
        """A hash chain: each key depends on that of the page before."""
        keys = request.page_keys
        while len(keys) <= index:
            at = len(keys) * PAGE
            tokens = np.asarray(request.tokens(at, at + PAGE), np.int32)
            keys.append(_digest((keys[-1] if keys else self._root) + tokens.tobytes()))
        return keys[index]


def shares(request: Request) -> bool:
    """Whether a request may have pages together with others. The prompt of one that is scored runs as decode
    rows, so its pages are not those of a prompt."""
    return request.job.cache and not request.job.echo


def _digest(data: bytes) -> bytes:
    """Wide enough that nobody can make two texts with one key."""
    return blake2b(data, digest_size=32).digest()
