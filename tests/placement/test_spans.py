"""Two sides of a made-up run on a clock that stands where the test puts it."""

from __future__ import annotations

import pytest

from hotcold.kernels.reference import ReferenceBackend
from hotcold.sparse.timeline import MOMENTS, Span, Timeline


class Link:
    """Records given marks on a clock of microseconds."""

    now = 0.0

    def start_marks(self, capacity: int) -> None:
        self._marks: list[tuple[int, int, int]] = []

    def mark(self, moment: int, layer: int) -> None:
        self._marks.append((moment, layer, round(self.now * 1000)))

    def marks(self) -> list[tuple[int, int, int]]:
        return self._marks


def two_steps() -> Timeline:
    """Layer 0 is wholly cold, 1 and 2 are split, and 3 is wholly hot; the second step has layer 0 alone."""
    hot, cold = ReferenceBackend(), ReferenceBackend()
    timeline, link = Timeline(cold), Link()
    timeline.start(link)  # type: ignore[arg-type]
    for now, what, layer in (
        (1, cold, 0), (2, hot, 1),
        (4, "post", 1), (4.5, "take", 1), (6, "wait", 1), (7, "give", 1), (8, "waited", 1),
        (9, "post", 2), (9.5, "take", 2), (10.5, "give", 2), (12, "wait", 2), (12.5, "waited", 2),
        (14, None, 4), (20, cold, 0), (23, None, 4),
    ):  # fmt: skip
        link.now = now
        if isinstance(what, str):
            link.mark(MOMENTS.index(what), layer)
        else:
            timeline.stage(what, layer)
    return timeline


SPANS = [
    Span("cold", "layers", 0, 0, 1, 2),
    Span("hot", "attention", 0, 1, 2, 4),
    Span("hot", "hot ffn", 0, 1, 4, 6),
    Span("cold", "cold ffn", 0, 1, 4.5, 7),
    Span("hot", "wait", 0, 1, 6, 8),
    Span("hot", "attention", 0, 2, 8, 9),
    Span("cold", "cold ffn", 0, 2, 9.5, 10.5),
    Span("hot", "hot ffn", 0, 2, 9, 12),
    Span("hot", "wait", 0, 2, 12, 12.5),
    Span("hot", "layers", 0, 1, 12.5, 14),
    Span("cold", "layers", 1, 0, 20, 23),
]


def test_what_each_side_does_and_when() -> None:
    spans = two_steps().spans()
    assert [span[:4] for span in spans] == [span[:4] for span in SPANS]
    assert [span[4:] for span in spans] == [pytest.approx(span[4:]) for span in SPANS]


def test_overlap_is_the_share_of_the_cold_sides_time() -> None:
    """Both are busy from 4.5 to 6 and from 9.5 to 10.5; waiting is not work."""
    assert two_steps().overlap() == pytest.approx((1.5 + 1) / (1 + 2.5 + 1 + 3))


def test_nothing_on_the_cold_side_has_no_overlap() -> None:
    assert Timeline(ReferenceBackend()).overlap() is None


def test_a_trace_has_a_row_of_events_for_each_side() -> None:
    names, events = two_steps().trace()[:2], two_steps().trace()[2:]
    assert [(each["ph"], each["tid"], each["args"]["name"]) for each in names] == [
        ("M", 0, "hot"),
        ("M", 1, "cold"),
    ]
    assert len(events) == len(SPANS)
    for event, (side, what, step, layer, start, end) in zip(events, SPANS, strict=True):
        assert (
            event["name"] == what and event["ph"] == "X" and event["args"] == {"layer": layer, "step": step}
        )
        assert event["tid"] == (side == "cold") and event["pid"] == names[0]["pid"]
        assert (event["ts"], event["dur"]) == (pytest.approx(start), pytest.approx(end - start))
