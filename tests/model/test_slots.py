"""Slots: one writer each, and copies that stay until their slot is needed."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.page_count import assert_no_page_is_lost

from hotcold.model.kv_cache import SlotPool


def test_a_copy_is_given_away_last_and_the_longest_unused_first() -> None:
    pool = SlotPool(4)
    slots = [pool.take(owner) for owner in "abc"]
    assert slots == [0, 1, 2]
    for owner, slot in zip("abc", slots, strict=True):
        pool.keep(slot, f"copy of {owner}")
    for owner in "bac":
        pool.release(owner)
    assert (pool.free, pool.kept) == (4, 3)
    pool.hold("reader", 1)  # used again: it is the last one from now on
    pool.release("reader")
    taken = [pool.take("next") for _ in range(4)]
    assert taken == [3, 0, 2, 1] and pool.take("next") is None
    assert pool.find("copy of a") is pool.find("copy of b") is None


def test_a_copy_outlives_who_made_it_while_somebody_reads_it() -> None:
    pool = SlotPool(2)
    assert pool.take("writer") == 0
    pool.keep(0, "prompt")
    pool.hold("one", 0)
    pool.release("writer")
    assert pool.take("other") == 1 and pool.take("third") is None and pool.find("prompt") == 0
    assert not pool.owns("third")
    pool.drop("one", 0)
    assert not pool.owns("one") and pool.take("third") == 0 and pool.find("prompt") is None


def test_what_is_forgotten_is_blank_or_its_owners_alone() -> None:
    pool = SlotPool(3)
    pool.take("a")
    pool.keep(0, "k")
    pool.hold("b", 0)
    assert not pool.forget(0) and pool.find("k") == 0  # two read it
    pool.drop("b", 0)
    assert pool.forget(0) and pool.find("k") is None and pool.forget(0)
    pool.keep(0, "k")
    pool.release("a")
    assert pool.kept == 1 and pool.forget(0)
    assert (pool.kept, pool.free) == (0, 3)
    assert_no_page_is_lost(pool)


@pytest.mark.parametrize("slot", [1, 2, -1, 0])
def test_a_blank_slot_or_ones_own_cannot_be_held(slot: int) -> None:
    pool = SlotPool(2)
    pool.take("a")
    with pytest.raises(ValueError, match=f"slot {slot} to hold: it must be owned or kept"):
        pool.hold("a", slot)
    with pytest.raises(ValueError, match="slot 1 is kept as 'k': it must have an owner"):
        pool.keep(1, "k")
    assert_no_page_is_lost(pool)


def test_no_slots_are_no_pool() -> None:
    with pytest.raises(ValueError, match="0 slots for the states of sequences: at least 1 is needed"):
        SlotPool(0)


class Slots(RuleBasedStateMachine):
    """Against a list of (key, owners) by slot, and the order in which slots became free."""

    @initialize(slots=st.integers(1, 6))
    def begin(self, slots: int) -> None:
        self.pool = SlotPool(slots)
        self.owners: list[set[int]] = [set() for _ in range(slots)]
        self.keys: list[str | None] = [None] * slots
        self.unused: list[int] = []  # with a key and without an owner

    def _left(self, slot: int) -> None:
        if not self.owners[slot] and self.keys[slot] is not None:
            self.unused.append(slot)

    @rule(owner=st.integers(0, 4))
    def take(self, owner: int) -> None:
        blank = [i for i, owners in enumerate(self.owners) if not owners and self.keys[i] is None]
        wanted = blank[0] if blank else self.unused[0] if self.unused else None
        assert self.pool.take(owner) == wanted
        if wanted is None:
            return
        if not blank:
            self.unused.remove(wanted)
            self.keys[wanted] = None
        self.owners[wanted] = {owner}

    @rule(owner=st.integers(0, 4), slot=st.integers(0, 5))
    def hold(self, owner: int, slot: int) -> None:
        slot %= len(self.owners)
        if owner in self.owners[slot] or (not self.owners[slot] and self.keys[slot] is None):
            with pytest.raises(ValueError, match="to hold"):
                self.pool.hold(owner, slot)
            return
        self.pool.hold(owner, slot)
        self.owners[slot].add(owner)
        if slot in self.unused:
            self.unused.remove(slot)

    @rule(owner=st.integers(0, 4), slot=st.integers(0, 5))
    def drop(self, owner: int, slot: int) -> None:
        slot %= len(self.owners)
        if owner in self.owners[slot]:
            self.pool.drop(owner, slot)
            self.owners[slot].remove(owner)
            self._left(slot)

    @rule(owner=st.integers(0, 4))
    def release(self, owner: int) -> None:
        theirs = self.pool._owned.get(owner, [])
        assert sorted(theirs) == [i for i, owners in enumerate(self.owners) if owner in owners]
        theirs = theirs[::-1]
        self.pool.release(owner)
        for slot in theirs:
            self.owners[slot].remove(owner)
            self._left(slot)

    @rule(slot=st.integers(0, 5), key=st.sampled_from("xyz"))
    def keep(self, slot: int, key: str) -> None:
        slot %= len(self.owners)
        if not self.owners[slot]:
            return
        self.pool.keep(slot, key)
        if key not in self.keys and self.keys[slot] is None:
            self.keys[slot] = key

    @rule(slot=st.integers(0, 5))
    def forget(self, slot: int) -> None:
        slot %= len(self.owners)
        gone = self.keys[slot] is None or len(self.owners[slot]) < 2
        assert self.pool.forget(slot) == gone
        if gone:
            self.keys[slot] = None
            if slot in self.unused:
                self.unused.remove(slot)

    @rule(some=st.integers(0, 9))
    def clear(self, some: int) -> None:
        if some == 0:
            self.pool.clear()
            self.owners = [set() for _ in self.owners]
            self.keys = [None] * len(self.keys)
            self.unused = []

    @invariant()
    def both_say_the_same(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert_no_page_is_lost(self.pool)
        for key in "xyz":
            assert self.pool.find(key) == (self.keys.index(key) if key in self.keys else None)
        assert self.pool.kept == len(self.unused)
        assert self.pool.free == sum(not owners for owners in self.owners)


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
