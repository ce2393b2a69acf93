"""Counts a pool's pages, or slots, by hand."""

from __future__ import annotations

from hotcold.model.kv_cache import PagePool, SlotPool


def assert_no_page_is_lost(pool: PagePool | SlotPool) -> None:
    """Each page is owned or free, has as many owners as lists name it, and a key both ways or none."""
    lists = list(pool._owned.values())
    owners = [sum(page in pages for pages in lists) for page in range(pool._places)]
    free = [page for page in range(pool._places) if not owners[page]]
    assert pool._owners == owners
    assert sorted(pool._blank) == [page for page in free if page not in pool._keys]
    assert sorted(pool._kept) == [page for page in free if page in pool._keys]
    assert {page: key for key, page in pool._by_key.items()} == pool._keys
    assert (pool.free, pool.kept) == (len(free), len(pool._kept))
