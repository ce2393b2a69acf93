"""A timeline of marks made by hand: who works, who waits, and for how long together."""

from __future__ import annotations

import pytest

from hotcold.kernels._native import FlagLink
from hotcold.kernels.reference import ReferenceBackend
from hotcold.sparse.timeline import MOMENTS, Span, Timeline


class RecordedLink:
    def __init__(self, *marks: tuple[str, int]) -> None:
        """Marks of layer 2: what happens, and when, in microseconds."""
        self._marks = [(MOMENTS.index(what), 2, 1000 * now) for what, now in marks]

    def start_marks(self, capacity: int) -> None:
        assert capacity > len(self._marks)

    def marks(self) -> list[tuple[int, int, int]]:
        return self._marks


def of_marks(*marks: tuple[str, int]) -> Timeline:
    timeline = Timeline(ReferenceBackend())
    timeline.start(RecordedLink(*marks))  # type: ignore[arg-type]
    return timeline


@pytest.fixture
def timeline() -> Timeline:
    """One step of a model whose layer 2 is split; times in microseconds.

    hot:   attention 0 to 10, its FFN to 14, waits to 30, the layers after it to 40
    cold:  takes at 12, its FFN to 28
    """
    return of_marks(
        ("hot", 0), ("post", 10), ("take", 12), ("wait", 14), ("give", 28), ("waited", 30), ("end", 40)
    )


def test_spans(timeline: Timeline) -> None:
    def rounded(span: Span) -> tuple[str, str, float, float]:
        return span.side, span.name, round(span.start, 6), round(span.end, 6)

    assert [rounded(span) for span in timeline.spans()] == [
        ("hot", "attention", 0, 10),
        ("hot", "hot ffn", 10, 14),
        ("cold", "cold ffn", 12, 28),
        ("hot", "wait", 14, 30),
        ("hot", "layers", 30, 40),
    ]
    assert all(span.step == 0 for span in timeline.spans())


def test_overlap_leaves_waiting_out(timeline: Timeline) -> None:
    """The cold side works for 16; for 2 of these the hot side does, too, and then it waits."""
    assert timeline.overlap() == pytest.approx(2 / 16)


def test_no_cold_work_has_no_overlap() -> None:
    timeline = Timeline(ReferenceBackend())
    assert timeline.overlap() is None and timeline.handshake() == (None, None)


def test_a_handshake_is_measured_where_the_other_side_waits() -> None:
    """The answer of the second layer was there before the hot side came for it, and does not count."""
    layers = [(100, 104, 120, 150, 157), (200, 210, 290, 250, 291), (300, 303, 310, 340, 341)]
    marks = []
    for post, take, wait, give, waited in layers:
        marks += [("post", post), ("take", take), ("wait", wait), ("give", give), ("waited", waited)]
    timeline = of_marks(*sorted(marks, key=lambda mark: mark[1]))
    assert timeline.handshake() == (4, 4)  # medians of 4, 10 and 3, and of 7 and 1


def test_stages_are_recorded_by_the_link() -> None:
    """With its own clock, and in the names that csrc/program/link.h gives the others."""
    hot, cold, link = ReferenceBackend(), ReferenceBackend(), FlagLink(1)
    timeline = Timeline(cold)
    timeline.stage(hot, 0)  # before it is started: forgotten
    timeline.start(link)
    timeline.stage(hot, 0)
    link.post(3)
    assert link.wait_posted(3)
    link.answer(3)
    link.wait_answered(3)
    timeline.stage(cold, 4)
    timeline.stage(None, 0)
    found = [(what, layer) for what, layer, _ in timeline.marks]
    assert found == [
        ("hot", 0), ("post", 3), ("take", 3), ("give", 3), ("wait", 3), ("waited", 3), ("cold", 4), ("end", 0)
    ]  # fmt: skip
    times = [now for _, _, now in timeline.marks]
    assert times == sorted(times)
    timeline.start(link)
    assert not timeline.marks
