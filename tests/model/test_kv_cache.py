"""Pages: all or nothing, and free when they have no owner any more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.page_count import assert_no_page_is_lost

from hotcold.kernels.backend import PAGE
from hotcold.kernels.reference import ReferenceBackend
from hotcold.model.config import Config, ModelError
from hotcold.model.families import FAMILIES
from hotcold.model.kv_cache import KVCacheFull, PagePool, SequenceState
from hotcold.model.mixers.attention import AttentionShape
from hotcold.model.mixers.rope import Rope

CONFIG = Config(
    family=FAMILIES["llama"], layers=3, dim=16,
    mixers=(AttentionShape(4, 2, 4, rope=Rope(4, 1e4, True)),) * 3,
    neurons=(8,) * 3, vocab=10, context=64, norm_eps=1e-5, activation="silu",
    threshold=0.0, gated=True, down_layout="by_output",
)  # fmt: skip


def cache(pages: int) -> PagePool:
    return SequenceState(ReferenceBackend(), CONFIG, pages).pages


def test_shapes_and_bytes() -> None:
    layers = SequenceState(ReferenceBackend(), CONFIG, 5).layers
    assert len(layers) == 3
    for k, v in layers:
        assert k.shape == v.shape == (5, 2, PAGE, 4) and k.dtype == v.dtype == np.float16
        assert k is not v
    assert sum(k.nbytes + v.nbytes for k, v in layers) == 5 * CONFIG.page_bytes("f16")


@pytest.mark.parametrize(("type", "dtype", "row"), [("f32", np.float32, 64), ("q8_0", np.uint8, 68)])
def test_other_types(type: str, dtype: type, row: int) -> None:
    config = replace(CONFIG, mixers=(AttentionShape(4, 2, 64),) * 3)
    layers = SequenceState(ReferenceBackend(), config, 5, type).layers
    assert all(each.shape == (5, 2, PAGE, row) and each.dtype == dtype for kv in layers for each in kv)
    assert sum(k.nbytes + v.nbytes for k, v in layers) == 5 * config.page_bytes(type)


@pytest.mark.parametrize("head_dim", [4, 48, 80])
def test_heads_that_blocks_do_not_fit_are_refused(head_dim: int) -> None:
    config = replace(CONFIG, mixers=(AttentionShape(4, 2, head_dim),) * 3)
    message = rf"type q8_0 \(`cache_type`\): its blocks of 32 do not fit heads of {head_dim}: use f16"
    with pytest.raises(ModelError, match=message):
        config.page_bytes("q8_0")
    with pytest.raises(ModelError, match=message):
        SequenceState(ReferenceBackend(), config, 1, "q8_0")


def test_pages_are_taken_all_or_none() -> None:
    kv = cache(5)
    first = kv.allocate("first", 3)
    assert len(set(first)) == 3 and kv.free_pages == 2
    with pytest.raises(KVCacheFull, match="3 pages asked for: 2 of 5 are free"):
        kv.allocate("second", 3)
    assert kv.free_pages == 2 and not kv.owns("second")
    rest = kv.allocate("second", 2)
    assert sorted(first + rest) == [0, 1, 2, 3, 4]
    assert kv.allocate("third", 0) == []
    kv.release("first")
    assert kv.owns("second") and not kv.owns("first")
    assert sorted(kv.allocate("fourth", 3)) == sorted(first)


def test_giving_back_twice_takes_nothing_from_others() -> None:
    kv = cache(5)
    kv.allocate("one", 2)
    kv.allocate("two", 2)
    for _ in range(2):
        kv.release("one")
        assert kv.free_pages == 3
    with pytest.raises(ValueError, match="'two' has pages: release them first"):
        kv.allocate("two", 1)
    assert kv.free_pages == 3
    kv.clear()
    assert kv.free_pages == 5 and not kv.owns("two")


@pytest.mark.parametrize("n", [-1, -100])
def test_counts_below_zero_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match=f"{n} pages asked for"):
        cache(1).allocate("owner", n)
    with pytest.raises(ValueError, match=f"KV cache of {n} pages"):
        cache(n)


def test_a_shared_page_is_free_when_its_last_owner_has_left() -> None:
    kv = cache(5)
    first = kv.allocate("first", 3)
    assert kv.allocate("second", 1, shared=first[:2]) == [*first[:2], 3] and kv.free_pages == 1
    assert kv.allocate("store", 0, shared=first[1:]) == first[1:] and kv.free_pages == 1
    assert kv._owned["second"] == [*first[:2], 3] and not kv.owns("nobody")
    kv.release("first")
    assert kv.free_pages == 1
    kv.release("second")
    assert kv.free_pages == 3 and kv._owned["store"] == first[1:]
    kv.release("store")
    assert kv.free_pages == 5


@pytest.mark.parametrize("shared", [[4], [0, 0], [0, 5], [-1], [0, 3]])
def test_only_what_somebody_owns_is_shared(shared: list[int]) -> None:
    kv = cache(5)
    kv.allocate("first", 3)
    with pytest.raises(
        ValueError, match=r"pages \[.*\] to share: each must be owned or kept, and named once"
    ):
        kv.allocate("second", 1, shared)
    assert kv.free_pages == 2 and not kv.owns("second")


PAGES = 9

#: (what, owner, pages, which of the taken pages are shared)
actions = st.tuples(
    st.sampled_from(["allocate", "allocate", "allocate", "release", "clear"]),
    st.integers(0, 5),
    st.integers(0, 5),
    st.lists(st.integers(0, 30), max_size=4),
)


@given(st.lists(actions, max_size=40))
def test_pages_against_a_table_of_who_has_which(
    steps: list[tuple[str, int, int, list[int]]],
) -> None:
    """The table has a cell for each page and owner, and knows neither lists nor counts of references."""
    kv = cache(PAGES)
    table = np.zeros((PAGES, 6), bool)
    for what, owner, n, picks in steps:
        taken = np.flatnonzero(table.any(axis=1))
        if what == "clear" and n == 0:
            kv.clear()
            table[:] = False
        elif what == "release":
            kv.release(owner)
            table[:, owner] = False
        elif what == "allocate":
            shared = [int(taken[pick % len(taken)]) for pick in picks] if len(taken) else []
            free = np.flatnonzero(~table.any(axis=1))
            if kv.owns(owner) or len(set(shared)) < len(shared):
                with pytest.raises(ValueError, match=r"has pages|named once"):
                    kv.allocate(owner, n, shared)
            elif n > len(free):
                with pytest.raises(KVCacheFull):
                    kv.allocate(owner, n, shared)
            else:
                assert kv.allocate(owner, n, shared) == [*shared, *free[:n]]
                table[[*shared, *free[:n]], owner] = True
        assert kv.free_pages == int((~table.any(axis=1)).sum())
        assert_no_page_is_lost(kv)
        for each in range(6):
            assert sorted(kv._owned.get(each, ())) == np.flatnonzero(table[:, each]).tolist()
            assert kv.owns(each) or not table[:, each].any()
