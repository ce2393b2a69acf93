"""Records the times in which the two sides of a hybrid model compute and wait."""

import statistics
from collections.abc import Sequence
from itertools import groupby, product
from typing import TYPE_CHECKING, Any, NamedTuple

from hotcold.kernels.backend import Backend

if TYPE_CHECKING:
    from hotcold.kernels.backend import Link

SIDES = ("hot", "cold")
#: Marks that a link records, in the order of csrc/program/link.h, then the marks of :meth:`Timeline.stage`.
MOMENTS = ("post", "take", "wait", "give", "waited", "hot", "cold", "end")

_CAPACITY = 1 << 18  #: marks that are kept; a step has five in each split layer

#: Mark -> the side, and its activity between its last mark and this one.
_BETWEEN = {
    "post": ("hot", "attention"),
    "wait": ("hot", "hot ffn"),
    "waited": ("hot", "wait"),
    "give": ("cold", "cold ffn"),
}


class Span(NamedTuple):
    side: str
    name: str
    step: int
    layer: int
    start: float  #: in microseconds, like ``end``
    end: float


class Handshake(NamedTuple):
    """Median delays between the two sides, in microseconds; None if it never happened."""

    post_to_take_us: float | None  #: from a post until the cold side takes it
    answer_to_collect_us: float | None  #: from an answer until the waiting hot side continues


class Timeline:
    """Collects the marks of the links between a cold backend and others, and the marks of :meth:`stage`,
    which is the ``watch`` of a Transformer."""

    def __init__(self, cold: Backend) -> None:
        self._cold = cold
        self._links: Sequence[Link] = ()

    def start(self, *links: "Link") -> None:
        """Drops the marks of the links, and starts their recording."""
        self._links = links
        for link in links:
            link.start_marks(_CAPACITY)

    def stage(self, backend: Backend | None, layer: int) -> None:
        if self._links:
            moment = "end" if backend is None else SIDES[backend is self._cold]
            self._links[0].mark(MOMENTS.index(moment), layer)

    @property
    def marks(self) -> list[tuple[str, int, float]]:
        """The marks in order of time: the moment's name, the layer, and the time in microseconds."""
        recorded = sorted((mark for link in self._links for mark in link.marks()), key=lambda mark: mark[2])
        return [(MOMENTS[moment], layer, nanoseconds / 1e3) for moment, layer, nanoseconds in recorded]

    def handshake(self) -> Handshake:
        """The delays of signals between the two sides."""
        taken, collected = [], []
        last = dict.fromkeys(MOMENTS, 0.0)
        for moment, _, now in self.marks:
            if moment == "take":
                taken.append(now - last["post"])
            elif moment == "waited" and last["wait"] < last["give"]:
                collected.append(now - last["give"])
            last[moment] = now
        medians = (statistics.median(times) if times else None for times in (taken, collected))
        return Handshake(*medians)

    def spans(self) -> list[Span]:
        """The spans of both sides, in the order of their ends. A layer without cold neurons counts as the
        next layer's attention. ``layers`` are those after the last split one, or the cold side's."""
        all_spans: list[Span] = []
        since = dict.fromkeys(SIDES, 0.0)  # each side's last mark
        step = 0
        stage = ("end", 0)  # the side and the layer of the hot side's program
        for moment, layer, now in self.marks:
            if moment in _BETWEEN:
                side, name = _BETWEEN[moment]
                all_spans.append(Span(side, name, step, layer, since[side], now))
                since[side] = now
            elif moment == "take":
                since["cold"] = now
            else:
                if stage[0] != "end":
                    all_spans.append(Span(stage[0], "layers", step, stage[1], since[stage[0]], now))
                step += moment == "end"
                stage = (moment, layer)
                since[moment] = now
        return all_spans

    def overlap(self) -> float | None:
        """The share of the cold side's busy time in which the hot side was busy, too; None without any."""
        both = busy = 0.0
        for _, spans in groupby(self.spans(), lambda span: span.step):
            working = [span for span in spans if span.name != "wait"]
            hot, cold = ([span for span in working if span.side == side] for side in SIDES)
            busy += sum(span.end - span.start for span in cold)
            both += sum(max(0, min(a.end, b.end) - max(a.start, b.start)) for a, b in product(hot, cold))
        return both / busy if busy else None

    def trace(self) -> list[dict[str, Any]]:
        """The spans in Chrome's Trace Event Format, for ui.perfetto.dev."""
        rows: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "tid": i, "args": {"name": side}}
            for i, side in enumerate(SIDES)
        ]
        for side, name, step, layer, start, end in self.spans():
            args = {"layer": layer, "step": step}
            times = {"ts": start, "dur": end - start, "tid": SIDES.index(side)}
            rows.append({"name": name, "ph": "X", "args": args, **times})
        return [row | {"pid": 0} for row in rows]
