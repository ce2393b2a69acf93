"""What a timeline makes of its marks, by hand: who works, who waits, and for how long together."""

from __future__ import annotations

import pytest

from hotcold.kernels.reference import ReferenceBackend
from hotcold.sparse.timeline import Span, Timeline


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    """One step of a model whose layer 2 is split; times in microseconds.

    hot:   attention 0 to 10, its FFN to 14, waits to 30, the layers after it to 40
    cold:  takes at 12, its FFN to 28
    """
    hot = ReferenceBackend()
    timeline = Timeline(hot)
    clock = iter([0, 10, 12, 14, 28, 30, 40])
    monkeypatch.setattr("hotcold.sparse.timeline.time.perf_counter", lambda: next(clock) / 1e6)
    timeline.stage(hot, 0)
    for what in ("post", "take", "wait", "give", "waited"):
        timeline.mark(what, 2)
    timeline.stage(None, 3)
    return timeline


def test_spans(timeline: Timeline) -> None:
    def rounded(span: Span) -> tuple[str, str, float, float]:
        return span.side, span.what, round(span.start, 6), round(span.end, 6)

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
    assert Timeline(ReferenceBackend()).overlap() is None
