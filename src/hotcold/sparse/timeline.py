"""When the two sides of a hybrid model compute and when they wait, as a Chrome trace."""

import time
from itertools import groupby, product
from typing import Any, NamedTuple

from hotcold.kernels.backend import Backend

#: The side, and what lies between a mark and the one before it there.
_BETWEEN = {
    "post": ("hot", "attention"), "wait": ("hot", "hot ffn"), "waited": ("hot", "wait"),
    "give": ("cold", "cold ffn"),
}  # fmt: skip


class Span(NamedTuple):
    """What a side did; seconds of ``time.perf_counter``. ``layer`` is the first of those that it covers."""

    side: str  #: ``hot`` or ``cold``
    what: str
    step: int
    layer: int
    start: float
    end: float


class Timeline:
    """Collects :meth:`mark` of a Handshake and :meth:`stage`, which is the ``watch`` of a Transformer."""

    def __init__(self, hot: Backend) -> None:
        self._hot = hot
        self._marks: list[tuple[str, int, float]] = []

    def mark(self, what: str, layer: int) -> None:
        self._marks.append((what, layer, time.perf_counter()))

    def stage(self, backend: Backend, parts: range) -> None:
        if parts:
            self.mark("hot" if backend is self._hot else "cold", max(parts.start - 1, 0))
        else:
            self.mark("end", 0)

    def spans(self) -> list[Span]:
        """In the order of their ends. A layer that is wholly hot belongs to the next one's attention."""
        found: list[Span] = []
        since: dict[str, float] = {}
        step, stage = 0, ("", 0)
        for what, layer, now in self._marks:
            if what in _BETWEEN:
                side, name = _BETWEEN[what]
                found.append(Span(side, name, step, layer, since[side], now))
                since[side] = now
            elif what == "take":
                since["cold"] = now
            else:  # a stage begins, or the step has ended
                side, first = stage
                if side:
                    found.append(Span(side, "layers", step, first, since[side], now))
                stage, step = ("", 0) if what == "end" else (what, layer), step + (what == "end")
                since[what] = now
        return found

    def overlap(self) -> float | None:
        """Share of the cold side's busy time in which the hot side was busy too; None without any."""
        both = busy = 0.0
        for _, spans in groupby(self.spans(), lambda span: span.step):
            sides: dict[str, list[Span]] = {"hot": [], "cold": []}
            for span in spans:
                if span.what != "wait":
                    sides[span.side].append(span)
            busy += sum(cold.end - cold.start for cold in sides["cold"])
            pairs = product(sides["hot"], sides["cold"])
            both += sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a, b in pairs)
        return both / busy if busy else None

    def chrome_trace(self) -> dict[str, Any]:
        """For chrome://tracing or ui.perfetto.dev: the Trace Event Format, microseconds."""
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": side}}
            for tid, side in enumerate(("hot", "cold"))
        ]
        events = [
            {
                "name": span.what, "ph": "X", "pid": 0, "tid": int(span.side == "cold"),
                "ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6,
                "args": {"layer": span.layer, "step": span.step},
            }
            for span in self.spans()
        ]  # fmt: skip
        return {"traceEvents": names + events}
