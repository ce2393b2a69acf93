"""The choice of the copy of a state to evict."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotcold.engine.state_copies import Copy, least_useful


def copies(*pages_used: tuple[int, int], borders: tuple[tuple[int, int], ...] = ()) -> dict[bytes, Copy]:
    """Copies by name: their pages and the arrival of the request that used them last."""
    return {
        f"{used}:{pages}".encode(): Copy(pages, used, (pages, used) in borders) for pages, used in pages_used
    }


def largest_factor(pages: list[int]) -> float:
    """Returns how many times farther from the end a copy is than the next one; a step has up to 7 pages."""
    distances = [pages[-1] + 8 - each for each in [0, *pages]]
    return max(before / after for before, after in pairwise(distances))


@pytest.mark.parametrize(("most", "factor"), [(6, 8.0), (12, 3.0), (24, 1.9)])
def test_a_path_becomes_sparse_with_the_distance_from_its_end(most: int, factor: float) -> None:
    random, kept, end = np.random.default_rng(most), copies(), 0
    worst = 0.0
    for _ in range(400):
        end += int(random.integers(1, 8))
        if len(kept) == most:
            del kept[least_useful(kept, 5, end)]
        kept |= copies((end, 5))
        worst = max(worst, largest_factor(sorted(each.pages for each in kept.values())))
    assert worst < factor and max(each.pages for each in kept.values()) == end > 1000


@given(st.sets(st.integers(1, 300), min_size=1, max_size=12), st.integers(0, 30))
def test_the_copy_between_the_nearest_neighbours_goes(pages: set[int], more: int) -> None:
    """All others would leave a gap that is as large at least."""
    end = max(pages) + more
    kept = copies(*((each, 3) for each in pages))
    gone = kept[least_useful(kept, 3, end)].pages
    path = [0, *sorted(pages), end]

    def left_by(page: int) -> float:
        i = path.index(page, 1)
        return (end + 1 - path[i - 1]) / (end + 1 - path[i + 1])

    assert left_by(gone) == min(map(left_by, pages))


def test_borders_then_ends_are_given_up_last() -> None:
    borders = ((10, 1), (20, 1), (12, 2), (22, 2))
    kept = copies((10, 1), (20, 1), (30, 1), (40, 1), (12, 2), (22, 2), (32, 2), (42, 2), borders=borders)
    order = []
    while len(kept) > 3:
        order.append(key := least_useful(kept, 2, 43))
        del kept[key]
    assert order[:3] == [
        b"1:30",
        b"2:32",
        b"2:42",
    ]  # all that is neither a border nor the end of the other path
    assert set(order[3:]) <= {b"1:10", b"1:20", b"2:12", b"2:22"}
    assert b"1:40" in kept


def test_paths_give_up_alike_but_for_those_unused_longer() -> None:
    kept = copies(*((pages, used) for used in (1, 2, 3) for pages in range(10, 210, 10)))
    for _ in range(30):
        del kept[least_useful(kept, 3, 210)]
    left = [sum(each.used == used for each in kept.values()) for used in (1, 2, 3)]
    assert left == [9, 10, 11]  # ends of paths 1 and 2 do not count


def test_all_copies_of_paths_unused_for_long_come_first() -> None:
    """Each of ten conversations has left one copy, and one continues."""
    kept = copies(*((5, used) for used in range(10)))
    borders = ((1, 20),)
    kept |= copies((1, 20), (2, 20), (3, 20), borders=borders)
    order = []
    while len(kept) > 3:
        order.append(key := least_useful(kept, 20, 9))
        del kept[key]
    assert order == [*(f"{used}:5".encode() for used in range(9)), b"20:2"]


def test_the_only_copy_goes() -> None:
    assert least_useful(copies((4, 1)), 1, 9) == least_useful(copies((4, 1)), 2, 1) == b"1:4"
