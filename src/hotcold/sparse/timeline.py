"""When the two sides of a hybrid model compute and when they wait."""

import time
from itertools import groupby, product
from typing import Any, NamedTuple

from hotcold.kernels.backend import Backend

SIDES = ("hot", "cold")

#: The side, and what lies between a mark and the one before it there.
_BETWEEN = {
    "post": ("hot", "attention"),
    "wait": ("hot", "hot ffn"),
    "waited": ("hot", "wait"),
    "give": ("cold", "cold ffn"),
}


class Span(NamedTuple):
    side: str
    what: str
    step: int
    layer: int
    start: float  #: microseconds, as ``end``
    end: float


class Timeline:
    """Collects :meth:`mark` of a Handshake and :meth:`stage`, which is the ``watch`` of a Transformer."""

    def __init__(self, hot: Backend) -> None:
        self._hot = hot
        self._marks: list[tuple[str, int, float]] = []

    def mark(self, what: str, layer: int) -> None:
        self._marks.append((what, layer, time.perf_counter() * 1e6))

    def stage(self, backend: Backend | None, layer: int) -> None:
        self.mark("end" if backend is None else SIDES[backend is not self._hot], layer)

    def spans(self) -> list[Span]:
        """In the order of their ends. A wholly hot layer belongs to the next one's attention; ``layers`` are
        those after the last split one, or of the cold side alone."""
        found: list[Span] = []
        since = dict.fromkeys(SIDES, 0.0)  # each side's last mark
        step = 0
        stage = ("end", 0)  # the side and the layer that the hot side's program is at
        for what, layer, now in self._marks:
            if what in _BETWEEN:
                side, name = _BETWEEN[what]
                found.append(Span(side, name, step, layer, since[side], now))
                since[side] = now
            elif what == "take":
                since["cold"] = now
            else:
                if stage[0] != "end":
                    found.append(Span(stage[0], "layers", step, stage[1], since[stage[0]], now))
                step += what == "end"
                stage = (what, layer)
                since[what] = now
        return found

    def overlap(self) -> float | None:
        """Share of the cold side's busy time in which the hot side was busy too; None without any."""
        both = busy = 0.0
        for _, spans in groupby(self.spans(), lambda span: span.step):
            working = [span for span in spans if span.what != "wait"]
            hot, cold = ([span for span in working if span.side == side] for side in SIDES)
            busy += sum(span.end - span.start for span in cold)
            both += sum(max(0, min(a.end, b.end) - max(a.start, b.start)) for a, b in product(hot, cold))
        return both / busy if busy else None

    def trace(self) -> list[dict[str, Any]]:
        """Chrome's Trace Event Format, for ui.perfetto.dev."""
        rows: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "tid": i, "args": {"name": side}}
            for i, side in enumerate(SIDES)
        ]
        for side, what, step, layer, start, end in self.spans():
            args = {"layer": layer, "step": step}
            times = {"ts": start, "dur": end - start, "tid": SIDES.index(side)}
            rows.append({"name": what, "ph": "X", "args": args, **times})
        return [row | {"pid": 0} for row in rows]
