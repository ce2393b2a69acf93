"""When the two sides of a hybrid model compute and when they wait."""

import time
from itertools import groupby, product
from typing import Any

from hotcold.kernels.backend import Backend

Event = dict[str, Any]

#: The side, and what lies between a mark and the one before it there.
_BETWEEN = {
    "post": ("hot", "attention"), "wait": ("hot", "hot ffn"), "waited": ("hot", "wait"),
    "give": ("cold", "cold ffn"),
}  # fmt: skip


class Timeline:
    """Collects :meth:`mark` of a Handshake and :meth:`stage`, which is the ``watch`` of a Transformer."""

    def __init__(self, hot: Backend) -> None:
        self._hot = hot
        self._marks: list[tuple[str, int, float]] = []

    def mark(self, what: str, layer: int) -> None:
        self._marks.append((what, layer, time.perf_counter() * 1e6))

    def stage(self, backend: Backend | None, layer: int) -> None:
        self.mark("end" if backend is None else "hot" if backend is self._hot else "cold", layer)

    def events(self) -> list[Event]:
        """Chrome's Trace Event Format, for ui.perfetto.dev; in microseconds, and in the order of their ends.

        Layers that are wholly hot belong to the next one's attention; ``layers`` are those after the last
        split one, or on the cold side alone.
        """
        found: list[Event] = []
        since: dict[str, float] = {}
        step, stage = 0, ("end", 0)

        def add(side: str, name: str, layer: int, end: float) -> None:
            args, start = {"layer": layer, "step": step}, since[side]
            found.append(
                {
                    "name": name,
                    "ph": "X",
                    "pid": 0,
                    "tid": side,
                    "args": args,
                    "ts": start,
                    "dur": end - start,
                }
            )
            since[side] = end

        for what, layer, now in self._marks:
            if what in _BETWEEN:
                add(*_BETWEEN[what], layer, now)
            elif what == "take":
                since["cold"] = now
            else:
                if stage[0] != "end":
                    add(stage[0], "layers", stage[1], now)
                step, stage, since[what] = step + (what == "end"), (what, layer), now
        return found

    def overlap(self) -> float | None:
        """Share of the cold side's busy time in which the hot side was busy too; None without any."""
        both = busy = 0.0
        for _, events in groupby(self.events(), lambda event: event["args"]["step"]):
            sides: dict[str, list[tuple[float, float]]] = {"hot": [], "cold": []}
            for event in events:
                if event["name"] != "wait":
                    sides[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            busy += sum(end - start for start, end in sides["cold"])
            both += sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in product(*sides.values()))
        return both / busy if busy else None
