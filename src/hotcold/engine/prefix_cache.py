"""The prefix cache: pages of the KV cache that later requests with the same first tokens read.

The cache keeps a full page under a key of all tokens up to the page's end and of all else that decides its
bits: model, mode, predictors, placement and cache type. The pool reuses such a page when no request reads it
and no other page is free.

Where layers keep a state of the whole sequence, a request also needs a copy of the state after the last page.
The cache keeps copies under the key of the page that ends there. A copy costs only its slot: the step after
it reads the copy and writes another slot (:class:`States`)."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from hotcold.engine.request import Request
from hotcold.kernels.backend import PAGE
from hotcold.model.kv_cache import PagePool, SlotPool


@dataclass(frozen=True)
class CachedPrefix:
    """The cached beginning of a request."""

    pages: Sequence[int] = ()  #: pages with its tokens
    slot: int = -1  #: slot with the state after these pages; -1: none
    known: int = 0  #: cached pages, including pages after the last cached state


class PrefixCache:
    """Keeps pages of requests, and copies of their states in ``slots``, for later requests. ``identity``: all
    besides the tokens that decides the bits of keys and values. ``generated``: rows of generated tokens have
    the same bits as prompt rows. Otherwise only pages of prompts are kept, and only for prompts."""

    def __init__(
        self, pool: PagePool, identity: Sequence[str], *, generated: bool, slots: SlotPool | None = None
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._root = _digest(json.dumps([*identity, generated]).encode())
        self._generated = generated

    def find(self, request: Request, first: int = 0) -> CachedPrefix:
        """Returns the cached pages of a request from page ``first`` on; the request has the pages before. The
        last token is never among them, since its row gives the next token."""
        if not shares(request):
            return CachedPrefix()
        last = min((request.length - 1) // PAGE, self._most(request))
        pages = list(self._cached_pages(request, range(first, last)))
        known = first + len(pages)
        if self._slots is None:
            return CachedPrefix(pages, known=known)
        while pages:
            slot = self._slots.find(self._key(request, first + len(pages) - 1))
            if slot is not None:
                return CachedPrefix(pages, slot, known)
            pages.pop()
        return CachedPrefix(known=known)

    def state_key(self, request: Request, position: int) -> bytes | None:
        """Returns the key of a request's state before a position; None if no page ends there, or if the state
        must not be shared."""
        pages, rest = divmod(position, PAGE)
        if rest or not shares(request) or not 0 < pages <= self._most(request):
            return None
        return self._key(request, pages - 1)

    def keep(self, request: Request) -> None:
        """Keeps the full pages of a request that others may share."""
        if not shares(request):
            return
        for i in range(request.kept, min(request.computed // PAGE, self._most(request))):
            self._pool.keep(request.pages[i], self._key(request, i))
            request.kept = i + 1

    def _most(self, request: Request) -> int:
        """Returns how many of a request's full pages others may share."""
        return (request.length if self._generated else len(request.job.prompt)) // PAGE

    def _cached_pages(self, request: Request, pages: range) -> Iterator[int]:
        for i in pages:
            page = self._pool.find(self._key(request, i))
            if page is None:
                return
            yield page

    def _key(self, request: Request, index: int) -> bytes:
        """Returns the key of a page: a hash of its tokens and of the previous page's key."""
        keys = request.page_keys
        while len(keys) <= index:
            at = len(keys) * PAGE
            tokens = np.asarray(request.tokens(at, at + PAGE), np.int32)
            keys.append(_digest((keys[-1] if keys else self._root) + tokens.tobytes()))
        return keys[index]


def shares(request: Request) -> bool:
    """Returns whether a request may share pages. Rows of a scored prompt are decode rows, whose bits may
    differ from those of prompt rows."""
    return request.job.cache and not request.job.echo


def _digest(data: bytes) -> bytes:
    """Returns a digest so wide that no client can construct two texts with the same key."""
    return blake2b(data, digest_size=32).digest()
