"""The picture of ``cpu/gathered.py``: a layer's time by the share of its neurons that are active, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from lib.picture import STYLE

#: Ways with their names and colours; those of panels are dashed.
LINES = {
    "off": ("off, by neuron", "#8f96a3", ""),
    "exact": ("exact, by neuron", "#10a37f", ""),
    "predicted": ("predicted, by neuron", "#e08a1e", ""),
    "off p": ("off, panels", "#8f96a3", "5 4"),
    "exact p": ("exact, panels", "#10a37f", "5 4"),
    "predicted p": ("predicted, panels", "#e08a1e", "5 4"),
}
WIDTH, HEIGHT = 880, 460
LEFT, RIGHT, TOP, BOTTOM = 60, 690, 56, 390


def svg(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """Times are medians of those over the dense layer's in the same round, which is 1."""
    values = {(row["way"], row["share"]): 1 / row["over_dense"][1] for row in rows if row["over_dense"]}
    highest = max([1.2, *values.values()]) * 1.05
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        _text(16, 28, "Time of an FFN layer by the share of its neurons that are active; dense = 1", 15),
    ]

    def place(share: float, value: float) -> tuple[float, float]:
        return LEFT + (RIGHT - LEFT) * share / 100, BOTTOM - (BOTTOM - TOP) * value / highest

    for share in range(0, 101, 20):
        x, _ = place(share, 0)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{BOTTOM}"/>')
        parts.append(_text(x, BOTTOM + 18, f"{share} %", 12, anchor="middle"))
    for half in range(int(highest * 2) + 1):
        _, y = place(0, half / 2)
        style = "one" if half == 2 else "grid"
        parts.append(f'<line class="{style}" x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{half / 2:g}", 12, anchor="end"))
    parts.append(_text(RIGHT + 12, place(0, 1)[1] + 4, "dense", 12))
    y = TOP + 8.0
    for way, (name, colour, dashes) in LINES.items():
        points = [place(share, value) for (of, share), value in values.items() if of == way]
        if not points:
            continue
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        line = f'fill="none" stroke="{colour}" stroke-width="2"{dashed}'
        at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{at}" {line}/>')
        parts.append(f'<polyline points="{RIGHT + 12},{y:.1f} {RIGHT + 40},{y:.1f}" {line}/>')
        parts.append(_text(RIGHT + 46, y + 4, name, 12))
        y += 20
    shape = " x ".join(str(each) for each in facts["shape"])
    told = [facts["type"], shape, f"{facts['threads']} threads", facts["isa"], f"times {facts['times']}"]
    parts.append(_text(16, HEIGHT - 16, f"{', '.join(told)}; commit {facts['commit']}", 10.5))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, size: float, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text class="text" {place}>{escape(text)}</text>'
